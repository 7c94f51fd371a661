// Host memory that output rows are copied to.
#include "host_memory.hpp"

#include <algorithm>
#include <atomic>

namespace lp {

HostBuffer::HostBuffer(size_t n_floats, ggml_backend_buffer_type_t pinned_type) : n_floats(n_floats) {
    if (pinned_type && n_floats > 0) {
        pinned = ggml_backend_buft_alloc_buffer(pinned_type, n_floats * sizeof(float));
        data   = pinned ? (float *) ggml_backend_buffer_get_base(pinned) : nullptr;
    }
    if (!data) {
        plain.reset(new float[std::max<size_t>(n_floats, 1)]);
        data = plain.get();
    }
}

HostBuffer::~HostBuffer() {
    if (pinned) {
        ggml_backend_buffer_free(pinned);
    }
}

std::shared_ptr<HostBuffer> HostMemoryPool::take(size_t n_floats) {
    if (!pinned_type_) {
        return std::make_shared<HostBuffer>(n_floats, nullptr);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto & kept : kept_) {
        if (kept.use_count() == 1 && kept->n_floats >= n_floats) {
            std::atomic_thread_fence(std::memory_order_acquire);  // the last reader's loads come before our writes
            return kept;
        }
    }
    auto made = std::make_shared<HostBuffer>(n_floats, pinned_type_);
    for (auto & kept : kept_) {
        if (kept.use_count() == 1) {  // unused, and too small
            kept = made;
            return made;
        }
    }
    if (kept_.size() < n_kept_) {
        kept_.push_back(made);
    }
    return made;
}

}  // namespace lp

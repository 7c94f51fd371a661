// Host memory that output rows are copied to.
#pragma once

#include "native.h"

#include <memory>
#include <mutex>
#include <vector>

namespace lp {

// Plain memory, or pinned memory where the device has it.
struct HostBuffer {
    const size_t             n_floats;
    float *                  data   = nullptr;
    ggml_backend_buffer_t    pinned = nullptr;
    std::unique_ptr<float[]> plain;

    // `pinned_type` may be null. Throws std::bad_alloc.
    HostBuffer(size_t n_floats, ggml_backend_buffer_type_t pinned_type);
    ~HostBuffer();
    HostBuffer(const HostBuffer &) = delete;
    HostBuffer & operator=(const HostBuffer &) = delete;
};

// Hands out host buffers. Pinned memory is slow to allocate, so a few buffers are kept for the next steps. Any thread.
class HostMemoryPool {
public:
    HostMemoryPool(ggml_backend_buffer_type_t pinned_type, size_t n_kept) : pinned_type_(pinned_type), n_kept_(n_kept) {}

    // A buffer of at least `n_floats`. It returns to the pool when the last reference to it goes. Throws std::bad_alloc.
    std::shared_ptr<HostBuffer> take(size_t n_floats);

private:
    const ggml_backend_buffer_type_t         pinned_type_;
    const size_t                             n_kept_;
    std::mutex                               mutex_;
    std::vector<std::shared_ptr<HostBuffer>> kept_;
};

}  // namespace lp

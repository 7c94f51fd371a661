// The compute threads of a context: threadpools made by the CPU backend module.
#include "compute_threads.hpp"

#include <stdexcept>
#include <string>

namespace {

// Declared as in ggml-cpu.h; the module is opened at run time, so they are looked up by name.
using new_pool  = ggml_threadpool_t (*)(ggml_threadpool_params *);
using free_pool = void (*)(ggml_threadpool_t);
using use_pool  = void (*)(ggml_backend_t, ggml_threadpool_t);

template <typename Function> Function of_cpu_backend(const char * name) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void * found = cpu ? ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name) : nullptr;
    if (!found) {
        throw std::runtime_error(std::string("the CPU backend has no ") + name);
    }
    return (Function) found;
}

}  // namespace

namespace lp {

class ThreadPool {
public:
    explicit ThreadPool(ggml_threadpool_params params)
        : n_threads(params.n_threads), free_(of_cpu_backend<free_pool>("ggml_threadpool_free")),
          use_(of_cpu_backend<use_pool>("ggml_backend_cpu_set_threadpool")),
          threads(of_cpu_backend<new_pool>("ggml_threadpool_new")(&params)) {
        if (!threads) {
            throw std::runtime_error("the threads could not be started");
        }
        other_ = ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr);
    }

    ~ThreadPool() {
        free_(threads);
        if (other_) {
            ggml_backend_free(other_);
        }
    }

    void rest() {
        if (other_) {
            use_(other_, threads);
            use_(other_, nullptr);
        }
    }

    const int n_threads;

private:
    free_pool free_;
    use_pool  use_;
    // Computes nothing. A backend that is given another pool pauses the one it had; the call for that cannot be looked up.
    ggml_backend_t other_ = nullptr;

public:
    const ggml_threadpool_t threads;
};

ComputeThreads::ComputeThreads(llama_context * ctx, int n_threads, int n_threads_batch, int poll)
    : ctx_(ctx), poll_((uint32_t) poll), n_threads_(n_threads), n_threads_batch_(n_threads_batch) {
    pool(n_threads, false);
    pool(n_threads_batch, false);
    switch_pools();
}

ComputeThreads::~ComputeThreads() = default;

// A pool of one thread has no workers, and is no special case: llama.cpp would take a missing pool for batches as "the
// other one".
ThreadPool & ComputeThreads::pool(int n_threads, bool is_paused) {
    for (const auto & made : pools_) {
        if (made->n_threads == n_threads) {
            return *made;
        }
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = poll_;
    params.paused                 = is_paused;
    pools_.push_back(std::make_unique<ThreadPool>(params));
    return *pools_.back();
}

void ComputeThreads::set(int n_threads, int n_threads_batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pool(n_threads, true);  // here and not before a decode: starting threads takes a while, and may fail
    pool(n_threads_batch, true);
    n_threads_       = n_threads;
    n_threads_batch_ = n_threads_batch;
    is_changed_.store(true, std::memory_order_release);
}

void ComputeThreads::switch_pools() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_changed_ = false;
    llama_attach_threadpool(ctx_, pool(n_threads_, true).threads, pool(n_threads_batch_, true).threads);
    llama_set_n_threads(ctx_, n_threads_, n_threads_batch_);
}

void ComputeThreads::rest() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto & made : pools_) {
        made->rest();
    }
}

}  // namespace lp

// Threadpools of contexts, made by the CPU backend module.
#include "threads.hpp"

#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

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

class Pool {
public:
    explicit Pool(ggml_threadpool_params params)
        : free_(of_cpu_backend<free_pool>("ggml_threadpool_free")),
          use_(of_cpu_backend<use_pool>("ggml_backend_cpu_set_threadpool")),
          threads(of_cpu_backend<new_pool>("ggml_threadpool_new")(&params)) {
        if (!threads) {
            throw std::runtime_error("the threads could not be started");
        }
        other_ = ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr);
    }

    ~Pool() {
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

private:
    free_pool free_;
    use_pool  use_;
    // Computes nothing. A backend that is given another pool pauses the one it had; the call for that cannot be looked up.
    ggml_backend_t other_ = nullptr;

public:
    const ggml_threadpool_t threads;
};

std::mutex mutex;
// Not destroyed when the process ends: a forked child has none of the threads that would be waited for.
auto & pools = *new std::unordered_map<llama_context *, std::shared_ptr<Pool>>;

std::shared_ptr<Pool> pool_of(llama_context * ctx) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto                        found = pools.find(ctx);
    return found == pools.end() ? nullptr : found->second;
}

}  // namespace

void lp::attach_threads(llama_context * ctx, int n_threads, int poll) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = (uint32_t) poll;
    const auto pool               = std::make_shared<Pool>(params);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        pools[ctx] = pool;
    }
    llama_attach_threadpool(ctx, pool->threads, pool->threads);
}

void lp::rest_threads(llama_context * ctx) {
    if (const auto pool = pool_of(ctx)) {
        pool->rest();
    }
}

std::shared_ptr<void> lp::take_threads(llama_context * ctx) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto                              taken = pools.extract(ctx);
    return taken ? std::move(taken.mapped()) : nullptr;
}

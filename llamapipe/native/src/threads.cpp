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

// `user`: a backend that computes nothing. One that is given another pool pauses the one it had, and nothing else that
// can be looked up does.
struct Pool {
    ggml_threadpool_t threads;
    ggml_backend_t    user;
};

std::mutex                                mutex;
std::unordered_map<llama_context *, Pool> pools;

template <typename Function> Function of_cpu_backend(const char * name) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void * found = cpu ? ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name) : nullptr;
    if (!found) {
        throw std::runtime_error(std::string("the CPU backend has no ") + name);
    }
    return (Function) found;
}

}  // namespace

void lp::attach_threads(llama_context * ctx, int n_threads, int poll) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = (uint32_t) poll;
    ggml_threadpool_t pool        = of_cpu_backend<new_pool>("ggml_threadpool_new")(&params);
    if (!pool) {
        throw std::runtime_error("the threads could not be started");
    }
    const std::lock_guard<std::mutex> lock(mutex);
    pools[ctx] = { pool, ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr) };
    llama_attach_threadpool(ctx, pool, pool);
}

void lp::rest_threads(llama_context * ctx) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto                        found = pools.find(ctx);
    if (found != pools.end() && found->second.user) {
        static const auto use = of_cpu_backend<use_pool>("ggml_backend_cpu_set_threadpool");
        use(found->second.user, found->second.threads);
        use(found->second.user, nullptr);
    }
}

void lp::free_threads(llama_context * ctx) {
    Pool pool = {};
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto                        found = pools.find(ctx);
        if (found == pools.end()) {
            return;
        }
        pool = found->second;
        pools.erase(found);
    }
    of_cpu_backend<free_pool>("ggml_threadpool_free")(pool.threads);
    if (pool.user) {
        ggml_backend_free(pool.user);
    }
}

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

std::mutex                                             mutex;
std::unordered_map<llama_context *, ggml_threadpool_t> pools;

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
    pools[ctx] = pool;
    llama_attach_threadpool(ctx, pool, pool);
}

void lp::free_threads(llama_context * ctx) {
    ggml_threadpool_t pool = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto                        found = pools.find(ctx);
        if (found == pools.end()) {
            return;
        }
        pool = found->second;
        pools.erase(found);
    }
    of_cpu_backend<free_pool>("ggml_threadpool_free")(pool);
}

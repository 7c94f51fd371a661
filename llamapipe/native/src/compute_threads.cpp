// The compute threads of a context: threadpools made by the CPU backend module.
#include "compute_threads.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#ifdef __linux__
#include <dirent.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#endif

namespace {

// Declared as in ggml-cpu.h; the module is opened at run time, so they are looked up by name.
using NewPool  = ggml_threadpool_t (*)(ggml_threadpool_params *);
using FreePool = void (*)(ggml_threadpool_t);
using UsePool  = void (*)(ggml_backend_t, ggml_threadpool_t);

template <typename Function> Function of_cpu_backend(const char *name) {
    ggml_backend_dev_t cpu   = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void              *found = cpu ? ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name) : nullptr;
    if (!found) {
        throw std::runtime_error(std::string("the CPU backend has no ") + name);
    }
    return reinterpret_cast<Function>(found);
}

#ifdef __linux__
// A thread starts with the name of the one that makes it. ggml keeps its workers to itself, so each pool's workers are
// found by a name that only they have.
class WorkerName {
public:
    WorkerName() {
        static std::atomic<unsigned> n_made{ 0 };
        prctl(PR_GET_NAME, before_);
        snprintf(name_, sizeof(name_), "lp-compute-%04x", n_made++ & 0xffff);
        prctl(PR_SET_NAME, name_);
    }
    ~WorkerName() { prctl(PR_SET_NAME, before_); }

    // The other threads of this name.
    std::vector<int> workers() const {
        std::vector<int> ids;
        DIR             *folder = opendir("/proc/self/task");
        while (const dirent *entry = folder ? readdir(folder) : nullptr) {
            const int id = atoi(entry->d_name);
            if (id > 0 && id != lp::this_thread_id() && name_of(id) == name_) {
                ids.push_back(id);
            }
        }
        if (folder) {
            closedir(folder);
        }
        return ids;
    }

private:
    static std::string name_of(int id) {
        char path[64], name[32] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%d/comm", id);
        if (FILE *file = fopen(path, "re")) {
            if (fgets(name, sizeof(name), file)) {
                name[strcspn(name, "\n")] = 0;
            }
            fclose(file);
        }
        return name;
    }

    char before_[16] = "", name_[16] = "";  // the most that a thread's name may have
};
#else
class WorkerName {
public:
    std::vector<int> workers() const { return {}; }
};
#endif

}  // namespace

namespace lp {

int this_thread_id() {
#ifdef __linux__
    thread_local const int id = static_cast<int>(syscall(SYS_gettid));
    return id;
#else
    return 0;
#endif
}

class ThreadPool {
public:
    explicit ThreadPool(ggml_threadpool_params params, const WorkerName &name = {})
        : n_threads(params.n_threads), free_(of_cpu_backend<FreePool>("ggml_threadpool_free")),
          use_(of_cpu_backend<UsePool>("ggml_backend_cpu_set_threadpool")), threads(start(params)) {
        other_ = ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr);
        if (n_threads > 1) {
            workers = name.workers();
        }
    }

    // ggml asserts that every thread starts.
    static ggml_threadpool_t start(ggml_threadpool_params params) {
        try {
            if (ggml_threadpool_t started = of_cpu_backend<NewPool>("ggml_threadpool_new")(&params)) {
                return started;
            }
        } catch (const std::runtime_error &) {
        }
        throw std::runtime_error("its " + std::to_string(params.n_threads) +
                                 " compute threads could not be started; give a smaller n_threads, or raise the limits of "
                                 "threads and memory");
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

    const int        n_threads;
    std::vector<int> workers;  // the kernel's ids of the other threads

private:
    FreePool free_;
    UsePool  use_;
    // Computes nothing. A backend that is given another pool pauses the one it had; the call for that cannot be looked up.
    ggml_backend_t other_ = nullptr;

public:
    const ggml_threadpool_t threads;
};

ComputeThreads::ComputeThreads(llama_context *ctx, int n_threads, int n_threads_batch, int poll)
    : ctx_(ctx), poll_(static_cast<uint32_t>(poll)), n_threads_(n_threads), n_threads_batch_(n_threads_batch) {
    pool(n_threads, false);
    pool(n_threads_batch, false);
    switch_pools();
}

ComputeThreads::~ComputeThreads() = default;

// A pool of one thread has no workers, and is no special case: llama.cpp would take a missing pool for batches as "the
// other one".
ThreadPool &ComputeThreads::pool(int n_threads, bool is_paused) {
    for (const auto &made : pools_) {
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

std::vector<int> ComputeThreads::thread_ids() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int                         decoding = decoding_.load(std::memory_order_relaxed);
    if (decoding == 0) {
        return {};
    }
    std::vector<int> ids = { decoding };
    for (const auto &made : pools_) {
        if (made->n_threads == n_threads_ || made->n_threads == n_threads_batch_) {
            ids.insert(ids.end(), made->workers.begin(), made->workers.end());
        }
    }
    return ids;
}

void ComputeThreads::rest() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto &made : pools_) {
        made->rest();
    }
}

}  // namespace lp

// The compute threads of a context: ggml threadpools of its own, so that no thread is started for a graph.
#pragma once

#include "native.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace lp {

// A ggml threadpool whose unused workers still spin: a worker that a graph leaves out polls for the next one all the
// same, for half of the graphs. So there is a pool for each number of threads, made when that number is first asked for,
// and ggml pauses the pool that it switches away from: its workers sleep until it is used again.
class ThreadPool;

// The kernel's id of the calling thread, as in /proc/self/task; 0 where the system has none.
int this_thread_id();

class ComputeThreads {
public:
    // poll: how eagerly idle workers spin for the next graph, 0 to 100. Throws std::runtime_error.
    ComputeThreads(llama_context *ctx, int n_threads, int n_threads_batch, int poll);
    ~ComputeThreads();

    // Any thread, at any time; the change happens at the next `apply`. Throws std::runtime_error, with nothing changed.
    void set(int n_threads, int n_threads_batch);

    // Before each decode, on the thread that decodes.
    void apply() {
        decoding_.store(this_thread_id(), std::memory_order_relaxed);
        if (is_changed_.load(std::memory_order_acquire)) {
            switch_pools();
        }
    }

    // Has all workers sleep until the next graph. Not while one is computed: it would never end.
    void rest();

    // The kernel's ids of the thread that decoded last, and of the workers it computes with once `set` has taken effect.
    // Empty where the system has no such ids, or nothing was decoded yet. Any thread.
    std::vector<int> thread_ids();

private:
    ThreadPool &pool(int n_threads, bool is_paused);
    void        switch_pools();

    llama_context *const                     ctx_;
    const uint32_t                           poll_;
    std::mutex                               mutex_;
    std::vector<std::unique_ptr<ThreadPool>> pools_;  // of different sizes
    int                                      n_threads_ = 0, n_threads_batch_ = 0;
    std::atomic<bool>                        is_changed_{ false };
    std::atomic<int>                         decoding_{ 0 };
};

}  // namespace lp

// Threads that wait for results, woken one after another: each wakes the next one when it waits again.
//
// They all need the GIL. A thread woken by a thread that holds the GIL blocks on it at once, often after preempting the
// holder on its own core. Threads therefore wait, and are woken, in native code without the GIL.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#ifndef __linux__
#include <condition_variable>
#endif

namespace lp {

// Where one thread at a time waits. A wake that finds no thread waiting is kept for the next wait.
class Waiter {
public:
    // True once woken; false after `timeout_ns`, or when a signal arrived.
    bool wait(int64_t timeout_ns);
    bool wake();  // whether a thread was asleep
    bool is_asleep() const { return state_ == sleeping; }

private:
    enum : uint32_t { idle, sleeping, woken };
    std::atomic<uint32_t> state_{ idle };
#ifndef __linux__
    std::mutex              mutex_;
    std::condition_variable changed_;
#endif
};

// The waiters whose turn is still to come, in their order. Any thread.
class WakeQueue {
public:
    // `patience_ns`: how long a woken thread may keep its turn before the queue counts as stalled.
    explicit WakeQueue(int64_t patience_ns) : patience_ns_(patience_ns) {}

    void add(std::vector<std::shared_ptr<Waiter>> waiters);  // wakes none of them
    void wake_next();            // wakes the first one that is asleep
    void wake_all();
    void wake_all_if_stalled();  // a woken thread may be busy with something else: the others must not wait for it
    void yield_turn();           // the thread whose turn it was waits again: wakes the next one

private:
    const int64_t                       patience_ns_;
    std::mutex                          mutex_;
    std::deque<std::shared_ptr<Waiter>> queue_;
    std::atomic<bool>                   has_any_{ false };
    std::atomic<int64_t>                turn_began_ns_{ 0 };
};

}  // namespace lp

// Threads that wait for results, and are woken one after another: each passes the turn on when it waits again.
//
// They all need the interpreter's lock. Whoever is woken by a thread that holds it goes back to sleep at once, and often
// runs before the other gives it away, on the same core. So threads wait, and are woken, where that lock is not held.
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

// What one thread at a time waits at. A wake that finds nobody is kept for the next one.
class Waiter {
public:
    // True once woken; false after so long, or when a signal came.
    bool wait(int64_t timeout_ns);
    bool wake();  // whether somebody slept
    bool asleep() const { return state_ == sleeping; }

private:
    enum : uint32_t { idle, sleeping, woken };
    std::atomic<uint32_t> state_{ idle };
#ifndef __linux__
    std::mutex              mutex_;
    std::condition_variable changed_;
#endif
};

// Whose turn comes. All entries may be called by any thread.
class Turns {
public:
    explicit Turns(int64_t patience_ns) : patience_ns_(patience_ns) {}

    void add(std::vector<std::shared_ptr<Waiter>> waiters);  // wakes nobody
    void next();   // wakes the next one that sleeps
    void all();    // wakes all that are left
    void hurry();  // does so if the last one has been keeping its turn for `patience_ns`
    void pass();   // the one whose turn it was is through with it: both

private:
    const int64_t                       patience_ns_;
    std::mutex                          mutex_;
    std::deque<std::shared_ptr<Waiter>> left_;
    std::atomic<bool>                   any_{ false };
    std::atomic<int64_t>                passed_ns_{ 0 };
};

}  // namespace lp

// What Python holds of them.
struct lp_waiter {
    std::shared_ptr<lp::Waiter> shared;
};

struct lp_turns {
    std::shared_ptr<lp::Turns> shared;
};

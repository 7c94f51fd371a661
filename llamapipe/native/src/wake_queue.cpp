// Threads that wait for results, woken one after another.
#include "wake_queue.hpp"

#include "clock.hpp"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace lp {

#ifdef __linux__

// A futex, not a condition variable: a signal ends the wait, so that Python can run its handler.
bool Waiter::wait(int64_t timeout_ns) {
    static_assert(sizeof state_ == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
    const bool kept = state_.exchange(sleeping) == woken;
    if (!kept) {
        const timespec timeout = { (time_t) (timeout_ns / 1'000'000'000), (long) (timeout_ns % 1'000'000'000) };
        syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, sleeping, &timeout, nullptr, 0);
    }
    return state_.exchange(idle) == woken || kept;
}

bool Waiter::wake() {
    const uint32_t before = state_.exchange(woken);
    if (before != woken) {  // also where two wait by mistake, and one that was woken has just reset it
        syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
    return before == sleeping;
}

#else

bool Waiter::wait(int64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool kept = state_.exchange(sleeping) == woken;
    if (!kept) {
        changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns));  // once: a signal may have ended it
    }
    return state_.exchange(idle) == woken || kept;
}

bool Waiter::wake() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool slept = state_.exchange(woken) == sleeping;
    changed_.notify_all();
    return slept;
}

#endif

void WakeQueue::add(std::vector<std::shared_ptr<Waiter>> waiters) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.insert(queue_.end(), std::make_move_iterator(waiters.begin()), std::make_move_iterator(waiters.end()));
    turn_began_ns_ = now_ns();
    has_any_       = !queue_.empty();
}

void WakeQueue::wake_next() {
    while (has_any_) {
        std::shared_ptr<Waiter> first;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (queue_.empty()) {
                return;
            }
            first = std::move(queue_.front());
            queue_.pop_front();
            has_any_       = !queue_.empty();
            turn_began_ns_ = now_ns();
        }
        if (first->wake()) {  // else its thread finds the wake when it comes to wait, and has no turn to yield
            return;
        }
    }
}

void WakeQueue::wake_all() {
    while (has_any_) {
        wake_next();
    }
}

void WakeQueue::wake_all_if_stalled() {
    if (has_any_ && now_ns() - turn_began_ns_ > patience_ns_) {
        wake_all();
    }
}

void WakeQueue::yield_turn() {
    wake_all_if_stalled();
    wake_next();
}

}  // namespace lp

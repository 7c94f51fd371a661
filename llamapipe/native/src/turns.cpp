// Threads that are woken one after another, and the C entries for them.
#include "turns.hpp"

#include "guard.hpp"
#include "collector.hpp"  // now_ns

#include <algorithm>
#include <chrono>

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

void Turns::add(std::vector<std::shared_ptr<Waiter>> waiters) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_.insert(left_.end(), std::make_move_iterator(waiters.begin()), std::make_move_iterator(waiters.end()));
    passed_ns_ = now_ns();
    any_       = !left_.empty();
}

void Turns::next() {
    while (any_) {
        std::shared_ptr<Waiter> first;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (left_.empty()) {
                return;
            }
            first = std::move(left_.front());
            left_.pop_front();
            any_       = !left_.empty();
            passed_ns_ = now_ns();
        }
        if (first->wake()) {  // else it finds its item without having slept
            return;
        }
    }
}

void Turns::all() {
    while (any_) {
        next();
    }
}

void Turns::hurry() {
    if (any_ && now_ns() - passed_ns_ > patience_ns_) {
        all();
    }
}

void Turns::pass() {
    hurry();
    next();
}

}  // namespace lp

lp_waiter * lp_waiter_new(void) {
    return lp::guard((lp_waiter *) nullptr, [] { return new lp_waiter{ std::make_shared<lp::Waiter>() }; });
}

void lp_waiter_free(lp_waiter * waiter) { delete waiter; }

bool lp_waiter_wait(lp_waiter * waiter, lp_turns * turns, double timeout_s) {
    turns->shared->pass();
    return waiter->shared->wait((int64_t) (std::clamp(timeout_s, 0.0, 3600.0) * 1e9));
}

bool lp_waiter_asleep(const lp_waiter * waiter) { return waiter->shared->asleep(); }

lp_turns * lp_turns_new(int64_t patience_ns) {
    return lp::guard((lp_turns *) nullptr, [&] { return new lp_turns{ std::make_shared<lp::Turns>(patience_ns) }; });
}

void lp_turns_free(lp_turns * turns) { delete turns; }

int lp_turns_add(lp_turns * turns, lp_waiter * const * waiters, int n) {
    return lp::guard(LP_ERROR, [&] {
        std::vector<std::shared_ptr<lp::Waiter>> shared;
        for (int i = 0; i < n; i++) {
            shared.push_back(waiters[i]->shared);
        }
        turns->shared->add(std::move(shared));
        return 0;
    });
}

void lp_turns_next(lp_turns * turns) { turns->shared->pass(); }

void lp_turns_all(lp_turns * turns) { turns->shared->all(); }

void lp_turns_hurry(lp_turns * turns) { turns->shared->hurry(); }

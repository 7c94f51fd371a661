// Threads that wait for results, woken one after another.
#include "wake_queue.hpp"

#include "clock.hpp"
#include "faults.hpp"
#include "handles.hpp"
#include "system.hpp"

#include <algorithm>

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
        const timespec timeout = { static_cast<time_t>(timeout_ns / 1'000'000'000),
                                   static_cast<long>(timeout_ns % 1'000'000'000) };
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
    const bool                   kept = state_.exchange(sleeping) == woken;
    if (!kept) {
        changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns));  // once: a signal may have ended it
    }
    return state_.exchange(idle) == woken || kept;
}

bool Waiter::wake() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool                        slept = state_.exchange(woken) == sleeping;
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

// ---- the C entries of waiters, wake queues, and of the list that a launch wakes
lp_waiter *lp_waiter_new(void) {
    return lp::guard(nullptr, [] { return new lp_waiter{ std::make_shared<lp::Waiter>() }; });
}

void lp_waiter_free(lp_waiter *waiter) { delete waiter; }

bool lp_waiter_wait(lp_waiter *waiter, lp_wake_queue *queue, double timeout_s) {
    queue->shared->yield_turn();
    return waiter->shared->wait(static_cast<int64_t>(std::clamp(timeout_s, 0.0, 3600.0) * 1e9));
}

bool lp_waiter_asleep(const lp_waiter *waiter) { return waiter->shared->is_asleep(); }

lp_wake_queue *lp_wake_queue_new(int64_t patience_ns) {
    return lp::guard(nullptr, [&] { return new lp_wake_queue{ std::make_shared<lp::WakeQueue>(patience_ns) }; });
}

void lp_wake_queue_free(lp_wake_queue *queue) { delete queue; }

int lp_wake_queue_add(lp_wake_queue *queue, lp_waiter *const *waiters, int n) {
    return lp::guard(LP_ERROR, [&] {
        std::vector<std::shared_ptr<lp::Waiter>> shared;
        for (int i = 0; i < n; i++) {
            shared.push_back(waiters[i]->shared);
        }
        queue->shared->add(std::move(shared));
        return 0;
    });
}

void lp_wake_queue_yield_turn(lp_wake_queue *queue) { queue->shared->yield_turn(); }

void lp_wake_queue_wake_all(lp_wake_queue *queue) { queue->shared->wake_all(); }

void lp_wake_queue_wake_all_if_stalled(lp_wake_queue *queue) { queue->shared->wake_all_if_stalled(); }

// ---- the list that a launch wakes
void lp_wake_list_begin(lp_wake_list *wakes) {
    for (int i = 0; i < wakes->n_fds; i++) {
        lp::system::wake_reader(wakes->fds[i]);
    }
    wakes->n_fds = 0;
    if (wakes->n_waiters > 0 && lp_wake_queue_add(wakes->queue, wakes->waiters, wakes->n_waiters) == 0) {
        wakes->n_waiters = 0;  // else there was no memory: the next launch tries again
    }
    wakes->queue->shared->wake_next();
}

void lp_wake_list_wake_all(lp_wake_list *wakes) {
    lp_wake_list_begin(wakes);
    wakes->queue->shared->wake_all();
}

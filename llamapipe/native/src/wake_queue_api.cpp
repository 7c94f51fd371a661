// The C entries of waiters, wake queues, and of the list that a launch wakes.
#include "guard.hpp"
#include "handles.hpp"

#include <algorithm>

#ifndef _WIN32
#include <unistd.h>
#endif

lp_waiter * lp_waiter_new(void) {
    return lp::guard((lp_waiter *) nullptr, [] { return new lp_waiter{ std::make_shared<lp::Waiter>() }; });
}

void lp_waiter_free(lp_waiter * waiter) { delete waiter; }

bool lp_waiter_wait(lp_waiter * waiter, lp_wake_queue * queue, double timeout_s) {
    queue->shared->yield_turn();
    return waiter->shared->wait((int64_t) (std::clamp(timeout_s, 0.0, 3600.0) * 1e9));
}

bool lp_waiter_asleep(const lp_waiter * waiter) { return waiter->shared->is_asleep(); }

lp_wake_queue * lp_wake_queue_new(int64_t patience_ns) {
    return lp::guard((lp_wake_queue *) nullptr,
                     [&] { return new lp_wake_queue{ std::make_shared<lp::WakeQueue>(patience_ns) }; });
}

void lp_wake_queue_free(lp_wake_queue * queue) { delete queue; }

int lp_wake_queue_add(lp_wake_queue * queue, lp_waiter * const * waiters, int n) {
    return lp::guard(LP_ERROR, [&] {
        std::vector<std::shared_ptr<lp::Waiter>> shared;
        for (int i = 0; i < n; i++) {
            shared.push_back(waiters[i]->shared);
        }
        queue->shared->add(std::move(shared));
        return 0;
    });
}

void lp_wake_queue_yield_turn(lp_wake_queue * queue) { queue->shared->yield_turn(); }

void lp_wake_queue_wake_all(lp_wake_queue * queue) { queue->shared->wake_all(); }

void lp_wake_queue_wake_all_if_stalled(lp_wake_queue * queue) { queue->shared->wake_all_if_stalled(); }

// ---- the list that a launch wakes
void lp_wake_list_begin(lp_wake_list * wakes) {
#ifndef _WIN32
    for (int i = 0; i < wakes->n_fds; i++) {
        if (write(wakes->fds[i], "", 1) < 0) {
            continue;  // the pipe is full, so its reader has not seen an earlier byte yet and will wake anyway
        }
    }
#endif
    wakes->n_fds = 0;
    if (wakes->n_waiters > 0 && lp_wake_queue_add(wakes->queue, wakes->waiters, wakes->n_waiters) == 0) {
        wakes->n_waiters = 0;  // else there was no memory: the next launch tries again
    }
    wakes->queue->shared->wake_next();
}

void lp_wake_list_wake_all(lp_wake_list * wakes) {
    lp_wake_list_begin(wakes);
    wakes->queue->shared->wake_all();
}

// Waiting for steps and reading their rows.
#include "clock.hpp"
#include "faults.hpp"
#include "pipeline.hpp"

#include <algorithm>
#include <chrono>

namespace lp {

// ---- submitted steps: any thread
bool Pipeline::is_ready(Step &step) {
    const Lock lock(mutex_);
    if (step.is_final()) {
        return true;
    }
    if (mode_ == LP_SYNC && !step.awaited) {
        step.awaited = true;
        work_.notify_one();
    }
    return false;
}

bool Pipeline::wait(Step &step, int64_t timeout_ns) {
    Lock lock(mutex_);
    if (step.is_final()) {
        return true;
    }
    const int64_t begin_ns = now_ns();
    bool          is_done  = true;
    counters_.n_waits++;
    step.awaited = true;
    work_.notify_one();
    if (timeout_ns < 0) {
        done_.wait(lock, [&] { return step.is_final(); });
    } else {
        is_done = done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return step.is_final(); });
    }
    counters_.wait_ns += now_ns() - begin_ns;
    trace_.add(step, LP_STAGE_WAIT, begin_ns, now_ns());
    return is_done;
}

const float *Pipeline::expose(const std::shared_ptr<Step> &step, bool *in_place) {
    Lock lock(mutex_);
    done_.wait(lock, [&] { return !step->moving; });
    if (step->slot >= 0) {
        // Enough slots must stay free for the steps in flight, however many outputs readers hold.
        if (mode_ == LP_HOST && ring_.n_held_by_others(lock, *step) < ring_.n_slots() - depth_) {
            step->n_exposed++;
            *in_place = true;
            return step->data;
        }
        move_out(lock, *step);
    }
    *in_place = false;
    return step->data;
}

void Pipeline::unexpose(Step &step) {
    const Lock lock(mutex_);
    if (--step.n_exposed == 0 && step.released && step.slot >= 0) {
        free_slot(lock, step.slot);
        step.slot = -1;
    }
}

void Pipeline::release(Step &step) {
    const Lock lock(mutex_);
    step.released = true;
    see_failure(lock, step);
    if (step.state == State::launched && mode_ == LP_SYNC && !step.fetching) {
        finish_step(lock, step, State::done);  // no thread will ask for it, and the device runs later steps after it
    }
    if (step.state == State::done && step.slot >= 0 && step.n_exposed == 0 && !step.moving) {
        free_slot(lock, step.slot);
        step.slot = -1;
        step.data = nullptr;
    }
}

void Pipeline::observe(Step &step) {
    const Lock lock(mutex_);
    see_failure(lock, step);
}

// ---- launched steps: the thread that launched them
void Pipeline::finish(Step &step) {
    if (threaded_) {
        wait(step, -1);
        observe(step);
        return;
    }
    Lock lock(mutex_);
    if (step.state != State::launched || mode_ == LP_DIRECT) {
        return;
    }
    const int64_t begin_ns = now_ns();
    counters_.n_waits++;
    while (step.state == State::launched && mode_ == LP_EVENTS) {
        const RowCopy copy = row_copies_.front();
        row_copies_.pop_front();
        lock.unlock();
        process(copy);
        lock.lock();
    }
    if (step.state == State::launched && mode_ == LP_SYNC) {
        fetch(lock, step);
    }
    counters_.wait_ns += now_ns() - begin_ns;
    trace_.add(step, LP_STAGE_WAIT, begin_ns, now_ns());
}

void Pipeline::forget(Step &step) {
    release(step);
    const Lock lock(mutex_);
    if (mode_ == LP_DIRECT) {
        launched_.clear();
    }
}

const float *Pipeline::row(Step &step, int entry) {
    const int output = step.output_of_entry[entry];
    if (output < 0) {
        return nullptr;
    }
    if (mode_ != LP_DIRECT || threaded_) {
        return step.data ? step.data + static_cast<size_t>(output) * n_vocab_ : fetch_row(step, output);
    }
    if (!step.computed) {
        const Lock lock(mutex_);
        step.computed = true;
        counters_.n_syncs++;  // llama.cpp's getters synchronize
    }
    return llama_get_logits_ith(context_->llama(), entry);
}

// A row that was left on the device because the graph sampled from it.
const float *Pipeline::fetch_row(Step &step, int output) {
    const size_t offset = static_cast<size_t>(output) * n_vocab_;
    Lock         lock(mutex_);
    done_.wait(lock, [&] { return !step.moving; });
    if (step.data) {
        return step.data + offset;
    }
    if (!step.fetched.empty() && step.fetched[output]) {
        return step.host->data + offset;
    }
    if (step.slot < 0) {
        set_error("this row was sampled in the graph and not kept");
        return nullptr;
    }
    step.moving = true;
    lock.unlock();
    const bool is_read = guard(false, [&] {
        step.fetched.resize(step.n_outputs);
        if (!step.host) {
            step.host = ring_.memory_for_rows(step);
        }
        ring_.read(step, output, 1, step.host->data + offset);
        return true;
    });
    lock.lock();
    step.moving = false;
    done_.notify_all();
    if (!is_read) {
        return nullptr;
    }
    step.fetched[output] = 1;
    count_copy(lock, sizeof(float) * n_vocab_);
    return step.host->data + offset;
}

// ---- bringing rows to the host
// Waits for one copy; on the copy thread, or on the one thread that drives the pipeline.
void Pipeline::process(const RowCopy &copy) {
    Step   &step = *copy.step;
    int     code = 0;
    int64_t computed_ns, copied_ns;
    ring_.wait_for_copies(copy, &computed_ns, &copied_ns);
    const bool is_bad = faults_.take(Fault::copy, &code);

    const Lock lock(mutex_);
    if (step.n_outputs_of(copy.ubatch) > 0) {
        count_copy(lock, ring_.n_wanted_bytes(step, copy.slot, copy.ubatch));
        trace_.add(step, LP_STAGE_COPY, computed_ns, copied_ns);
    }
    count_computed(lock, step, computed_ns);
    if (is_bad || step.released || !ring_.stays(step)) {
        free_slot(lock, copy.slot);
        if (copy.ubatch < 0) {
            step.slot = -1;
        }
    }
    if (is_bad) {
        set_error("the copy of its rows failed");
        fail(lock, step, code, lp_last_error());
    } else if (--step.n_left == 0 && step.state == State::launched) {
        finish_step(lock, step, State::done);
    }
}

// On the launching thread: waits for everything that was launched.
void Pipeline::synchronize() {
    llama_synchronize(context_->llama());
    const Lock lock(mutex_);
    counters_.n_syncs++;
    const auto launched = launched_;
    for (const auto &step : launched) {
        mark_computed(lock, *step);
    }
}

// Without events: brings a launched step's rows to the host. Releases the lock while it waits and copies.
void Pipeline::fetch(Lock &lock, Step &step) {
    step.fetching = true;
    if (!step.computed) {
        lock.unlock();
        synchronize();
        lock.lock();
    }
    if (step.n_outputs == 0 || step.slot < 0 || step.host || step.released) {
        finish_step(lock, step, State::done);
        return;
    }
    lock.unlock();
    const int64_t begin_ns  = now_ns();
    int           code      = 0;
    const bool    is_copied = guard(false, [&] {
        if (step.needs_rows) {
            step.host = ring_.memory_for_wanted_rows(step);
        }
        ring_.copy_wanted(step, step.slot, -1);
        return true;
    });
    const bool    is_bad    = faults_.take(Fault::copy, &code);
    const int     slot      = step.slot;
    lock.lock();
    if (!is_copied || is_bad || !ring_.stays(step)) {
        free_slot(lock, step.slot);
        step.slot = -1;
    }
    if (!is_copied || is_bad) {
        step.host.reset();
        fail(lock, step, is_bad ? code : LP_ERROR_STEP, is_bad ? "the copy of its rows failed" : lp_last_error());
        return;
    }
    count_copy(lock, ring_.n_wanted_bytes(step, slot, -1));
    trace_.add(step, LP_STAGE_COPY, begin_ns, now_ns());
    if (step.host && step.needs_all) {
        step.data = step.host->data;
    }
    finish_step(lock, step, State::done);
}

// Copies all rows of a done step to host memory and frees its slot. Releases the lock while it copies.
void Pipeline::move_out(Lock &lock, Step &step) {
    step.moving = true;
    lock.unlock();
    std::shared_ptr<HostBuffer> host;
    try {
        host = ring_.memory_for_rows(step);
        ring_.read(step, 0, step.n_outputs, host->data);
    } catch (...) {
        lock.lock();
        step.moving = false;
        done_.notify_all();
        throw;
    }
    lock.lock();
    step.moving = false;
    step.host   = host;
    step.data   = host->data;
    free_slot(lock, step.slot);
    step.slot = -1;
    count_copy(lock, sizeof(float) * step.n_outputs * n_vocab_);
    counters_.n_moved++;
}

}  // namespace lp

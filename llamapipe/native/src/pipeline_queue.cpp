// The pipeline's queue: what other threads submit, and the two threads that work it off.
#include "clock.hpp"
#include "guard.hpp"
#include "pipeline.hpp"

namespace lp {

std::shared_ptr<Step> Pipeline::make(const BatchArrays & batch) const {
    auto step = std::make_shared<Step>();
    step->set(batch, limits_);
    return step;
}

int Pipeline::submit(const std::shared_ptr<Step> & step) {
    Lock lock(mutex_);
    while (!is_closing_ && n_pending_ >= depth_) {
        for (const auto & launched : launched_) {  // without events a step is only known to be done once it is asked for
            launched->awaited = true;
        }
        work_.notify_one();
        done_.wait(lock);
    }
    if (is_closing_) {
        set_error("the pipeline is closed");
        return LP_ERROR_CLOSED;
    }
    if (!has_failed_ && !positions_.append(*step)) {
        return LP_ERROR_POSITIONS;
    }
    step->number  = n_numbers_++;
    step->pending = true;
    n_pending_++;
    queue_.push_back({ step, {} });
    work_.notify_one();
    return 0;
}

int Pipeline::next_position(int seq_id) {
    const Lock lock(mutex_);
    return (int) positions_.next(seq_id);
}

int Pipeline::memory(const MemoryOp & op) {
    if (!threaded_) {
        return apply(op);
    }
    const Lock lock(mutex_);
    if (is_closing_) {
        set_error("the pipeline is closed");
        return LP_ERROR_CLOSED;
    }
    if (!positions_.apply(op)) {
        return LP_ERROR_POSITIONS;
    }
    queue_.push_back({ nullptr, op });
    work_.notify_one();
    return 1;
}

int Pipeline::save(int seq_id, int64_t max_bytes, SavedCells & to) {
    return between_steps([&] { return save_cells(context_->llama(), seq_id, max_bytes, to); }, -1, 0);
}

int Pipeline::load(int seq_id, int n, const SavedCells & from) {
    return between_steps([&] { return load_cells(context_->llama(), seq_id, n, from); }, seq_id, n);
}

int Pipeline::copy(int from, int to, int n) {
    const auto work = [&] {
        return save_cells(context_->llama(), from, -1, scratch_) && load_cells(context_->llama(), to, n, scratch_);
    };
    return between_steps(work, to, n);
}

int Pipeline::sequence_end(int seq_id) {
    return between_steps(
        [&] { return (int) llama_memory_seq_pos_max(llama_get_memory(context_->llama()), seq_id) + 1; }, -1, 0);
}

// Runs `work` on the thread that launches, after all that is queued; `changed`: the sequence that has `n` cells then.
int Pipeline::between_steps(const std::function<int()> & work, int changed, int n) {
    if (!threaded_) {
        return timed(work);
    }
    Lock lock(mutex_);
    if (is_closing_) {
        set_error("the pipeline is closed");
        return LP_ERROR_CLOSED;
    }
    Task task{ work };
    queue_.push_back({ nullptr, {}, &task });
    work_.notify_one();
    done_.wait(lock, [&] { return task.is_done; });
    if (changed >= 0) {
        positions_.set(changed, task.result == 1 ? n : 0);
    }
    return task.result;
}

// On the thread that launches.
int Pipeline::apply(const MemoryOp & op) {
    return timed([&] { return apply_memory_op(context_->llama(), op); });
}

int Pipeline::timed(const std::function<int()> & work) {
    const int64_t begin_ns = now_ns();
    const int     result   = guard(LP_ERROR, work);
    if (trace_.is_on()) {
        const Step none;
        trace_.add(none, LP_STAGE_MEMORY, begin_ns, now_ns());
    }
    const Lock lock(mutex_);
    counters_.n_memory_ops++;
    return result;
}

// Nothing is queued or running, and every failure is known to its submitter.
void Pipeline::reread_positions(const Lock &) {
    positions_.reread();
    has_failed_ = false;
}

// Without events: a launched step that a thread waits for.
std::shared_ptr<Step> Pipeline::next_awaited(const Lock &, bool computed_only) const {
    if (mode_ == LP_SYNC) {
        for (const auto & step : launched_) {
            if (step->awaited && (step->computed || !computed_only)) {
                return step;
            }
        }
    }
    return nullptr;
}

void Pipeline::run_launch_thread() {
    Lock lock(mutex_);
    for (;;) {
        work_.wait(lock, [&] { return is_closing_ || !queue_.empty() || next_awaited(lock, false); });
        if (is_closing_ && !drain_) {
            for (; !queue_.empty(); queue_.pop_front()) {
                if (Task * task = queue_.front().task) {
                    task->result  = LP_ERROR_CLOSED;
                    task->is_done = true;
                    done_.notify_all();
                }
                if (queue_.front().step) {
                    fail(lock, *queue_.front().step, LP_ERROR_CLOSED,
                         "the pipeline was closed before this step was launched");
                }
            }
        }
        // Rows that are computed already are fetched without waiting, so they come before the next launch, which may wait.
        if (const auto step = next_awaited(lock, !queue_.empty())) {
            fetch(lock, *step);
        } else if (!queue_.empty()) {
            Command command = std::move(queue_.front());
            queue_.pop_front();
            is_busy_ = true;
            lock.unlock();
            int result = 0;
            if (command.step) {
                launch_step(command.step);
            } else if (command.task) {
                result = timed(command.task->work);
            } else {
                apply(command.op);
            }
            command.step.reset();  // freeing its rows may take long: not with the lock held
            lock.lock();
            if (command.task) {
                command.task->result  = result;
                command.task->is_done = true;
                done_.notify_all();
            }
            is_busy_ = false;
            if (queue_.empty() && has_failed_ && n_unobserved_ == 0) {
                reread_positions(lock);
            }
        } else if (is_closing_) {
            break;
        }
    }
    while (mode_ == LP_SYNC && !launched_.empty()) {  // so that they can still be read
        const auto step = launched_.front();
        fetch(lock, *step);
    }
    launch_thread_is_done_ = true;
    copies_.notify_all();
}

void Pipeline::run_copy_thread() {
    Lock lock(mutex_);
    for (;;) {
        copies_.wait(lock, [&] { return launch_thread_is_done_ || !row_copies_.empty(); });
        if (row_copies_.empty()) {
            return;
        }
        RowCopy copy = std::move(row_copies_.front());
        row_copies_.pop_front();
        lock.unlock();
        process(copy);
        copy.step.reset();  // freeing its rows may take long: not with the lock held
        lock.lock();
    }
}

}  // namespace lp

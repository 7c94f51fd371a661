// The pipeline's own threads: one launches, one waits for copies; and what other threads ask of them.
#include "core.hpp"
#include "guard.hpp"

#include <algorithm>
#include <chrono>
#include <string>

namespace lp {

int Core::submit(const std::shared_ptr<Step> & step) {
    Lock lock(mutex_);
    while (!closing_ && n_pending_ >= depth_) {
        for (const auto & launched : launched_) {  // without events nobody learns that it is done unless he asks
            launched->wanted = true;
        }
        work_.notify_one();
        done_.wait(lock);
    }
    if (closing_) {
        set_error("the pipeline is closed");
        return LP_ERROR_CLOSED;
    }
    if (!failed_ && !continues(*step)) {
        return LP_ERROR_POSITIONS;
    }
    step->number  = n_numbers_++;
    step->pending = true;
    n_pending_++;
    queue_.push_back({ step, {} });
    work_.notify_one();
    return 0;
}

// With the lock: takes the step's positions into account, unless they leave gaps.
bool Core::continues(const Step & step) {
    std::vector<int64_t> next(positions_.size(), -1);
    for (int i = 0; i < step.n_tokens; i++) {
        const size_t s = (size_t) step.seq_ids[(size_t) i];
        if (next[s] < 0) {
            next[s] = positions_[s].next();
        }
        if (step.positions[(size_t) i] != next[s]++) {
            const std::string text = "positions of sequence " + std::to_string(s) + " must go on from "
                + std::to_string(next[s] - 1) + " without gaps, not " + std::to_string(step.positions[(size_t) i]);
            set_error(text.c_str());
            return false;
        }
    }
    for (int i = 0; i < step.n_tokens; i++) {
        positions_[(size_t) step.seq_ids[(size_t) i]].append();
    }
    return true;
}

int Core::submit_memory(const MemoryOp & op) {
    const Lock lock(mutex_);
    if (closing_) {
        set_error("the pipeline is closed");
        return LP_ERROR_CLOSED;
    }
    if (op.op == Op::shift) {
        for (size_t s = 0; s < positions_.size(); s++) {
            if (shares_[(size_t) op.seq_id][s] && (int) s != op.seq_id) {
                const std::string text = "sequence " + std::to_string(op.seq_id) + " shares cells with sequence "
                    + std::to_string(s) + ", which would be shifted with it; remove one of them first";
                set_error(text.c_str());
                return LP_ERROR_POSITIONS;
            }
        }
    }
    const Positions before = positions_[(size_t) op.seq_id];
    note(op);
    if (op.op == Op::shift && positions_[(size_t) op.seq_id].next() > INT32_MAX) {
        positions_[(size_t) op.seq_id] = before;
        set_error("the shift leads beyond the largest position");
        return LP_ERROR_POSITIONS;
    }
    queue_.push_back({ nullptr, op });
    work_.notify_one();
    return 0;
}

// With the lock.
void Core::shares_nothing(size_t seq_id) {
    for (size_t s = 0; s < positions_.size(); s++) {
        shares_[seq_id][s] = shares_[s][seq_id] = 0;
    }
}

// With the lock: what an operation does to the positions that come next.
void Core::note(const MemoryOp & op) {
    Positions & mine = positions_[(size_t) op.seq_id];
    switch (op.op) {
        case Op::remove:
            mine.remove(op.p0, op.p1);
            if (mine.next() == 0) {
                shares_nothing((size_t) op.seq_id);
            }
            break;
        case Op::copy:
            positions_[(size_t) op.other].copy(mine, op.p0, op.p1, replaces_);
            if (!replaces_) {
                const size_t a = (size_t) op.seq_id, b = (size_t) op.other;
                for (size_t s = 0; s < positions_.size(); s++) {  // what a shares with others, b may share with them
                    shares_[b][s] = shares_[s][b] = shares_[b][s] || shares_[a][s];
                }
                shares_[a][b] = shares_[b][a] = 1;
            }
            break;
        case Op::keep:
            for (size_t s = 0; s < positions_.size(); s++) {
                if ((int) s != op.seq_id) {
                    positions_[s].set(0, 0);
                    shares_nothing(s);
                }
            }
            break;
        case Op::shift: mine.shift(op.p0, op.p1, op.delta); break;
        case Op::clear:
            for (size_t s = 0; s < positions_.size(); s++) {
                positions_[s].set(0, 0);
                shares_nothing(s);
            }
            break;
    }
}

void Core::observe(Step & step) {
    const Lock lock(mutex_);
    seen(step);
}

// With the lock. Until the failure of a step is known to its submitter, others that go on from it are taken, and fail when
// they are launched: an error belongs to those who read a step, not to whoever submits the next.
void Core::seen(Step & step) {
    if (step.state != State::failed || step.observed) {
        return;
    }
    step.observed = true;
    n_unobserved_--;
    if (threaded_ && n_unobserved_ == 0 && queue_.empty() && !busy_ && !closed_) {
        recount();
    }
}

// With the lock, nothing queued or running: where each sequence really is.
void Core::recount() {
    llama_memory_t memory = llama_get_memory(ctx_);
    for (size_t s = 0; s < positions_.size(); s++) {
        const int64_t last = llama_memory_seq_pos_max(memory, (llama_seq_id) s);
        positions_[s].set(last < 0 ? 0 : llama_memory_seq_pos_min(memory, (llama_seq_id) s), last + 1);
    }
    failed_ = false;
}

int Core::next_position(int seq_id) {
    const Lock lock(mutex_);
    return (int) positions_[(size_t) seq_id].next();
}

bool Core::ready(Step & step) {
    const Lock lock(mutex_);
    if (step.state == State::done || step.state == State::failed) {
        return true;
    }
    if (mode_ == Mode::sync && !step.wanted) {
        step.wanted = true;
        work_.notify_one();
    }
    return false;
}

bool Core::wait(Step & step, int64_t timeout_ns) {
    Lock       lock(mutex_);
    const auto is_final = [&] { return step.state == State::done || step.state == State::failed; };
    if (is_final()) {
        return true;
    }
    const int64_t begin_ns = now_ns();
    bool          finished = true;
    counters_.n_waits++;
    step.wanted = true;
    work_.notify_one();
    if (timeout_ns < 0) {
        done_.wait(lock, is_final);
    } else {
        finished = done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_final);
    }
    counters_.wait_ns += now_ns() - begin_ns;
    span(step, Stage::wait, begin_ns, now_ns());
    return finished;
}

// A launched step that somebody waits for.
std::shared_ptr<Step> Core::wanted(bool computed_only) const {
    if (mode_ == Mode::sync) {
        for (const auto & step : launched_) {
            if (step->wanted && (step->computed || !computed_only)) {
                return step;
            }
        }
    }
    return nullptr;
}

void Core::run_launcher() {
    Lock lock(mutex_);
    for (;;) {
        work_.wait(lock, [&] { return closing_ || !queue_.empty() || wanted(false); });
        if (closing_ && !drain_) {
            for (; !queue_.empty(); queue_.pop_front()) {
                if (queue_.front().step) {
                    fail(*queue_.front().step, LP_ERROR_CLOSED, "the pipeline was closed before this step was launched");
                }
            }
        }
        // What is computed already costs no waiting: before the next launch, which may.
        if (const auto step = wanted(!queue_.empty())) {
            fetch(lock, *step);
        } else if (!queue_.empty()) {
            Item item = std::move(queue_.front());
            queue_.pop_front();
            busy_ = true;
            lock.unlock();
            if (item.step) {
                launch_step(item.step);
            } else {
                do_memory(item.op);
            }
            item.step.reset();  // freeing its rows may take long: not under the lock
            lock.lock();
            busy_ = false;
            if (queue_.empty() && failed_ && n_unobserved_ == 0) {
                recount();
            }
        } else if (closing_) {
            break;
        }
    }
    while (mode_ == Mode::sync && !launched_.empty()) {  // so that they can still be read
        const auto step = launched_.front();
        fetch(lock, *step);
    }
    launcher_done_ = true;
    copies_.notify_all();
}

void Core::run_watcher() {
    Lock lock(mutex_);
    for (;;) {
        copies_.wait(lock, [&] { return launcher_done_ || !pieces_.empty(); });
        if (pieces_.empty()) {
            return;
        }
        Piece piece = std::move(pieces_.front());
        pieces_.pop_front();
        lock.unlock();
        process(piece);
        piece.step.reset();  // freeing its rows may take long: not under the lock
        lock.lock();
    }
}

void Core::stop() {
    const Lock lock(mutex_);
    closing_   = true;
    drain_     = false;
    abort_all_ = true;
    work_.notify_all();
    done_.notify_all();
}

void Core::close(bool drain) {
    {
        const Lock lock(mutex_);
        if (closed_) {
            return;
        }
        closed_  = true;
        closing_ = true;
        work_.notify_all();
        done_.notify_all();
    }
    if (!drain) {
        stop();
    }
    if (launcher_.joinable()) {
        launcher_.join();
    }
    if (watcher_.joinable()) {
        watcher_.join();
    }
    for (; !pieces_.empty(); pieces_.pop_front()) {
        process(pieces_.front());
    }
    copier_.reset();
    llama_synchronize(ctx_);
    llama_set_abort_callback(ctx_, nullptr, nullptr);
    threads_.reset();
}

}  // namespace lp

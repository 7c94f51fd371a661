// The pipeline: its life, the progress of its steps, and its queue with the two threads that work it off.
#include "pipeline.hpp"

#include "clock.hpp"
#include "faults.hpp"

#include <algorithm>
#include <cstring>

namespace lp {

// ---- the trace: when each stage of each step began and ended
namespace {

// Writes a step's sequences as ranges, such as "0-3,7"; ends in "..." where they do not fit.
void describe_sequences(const Step &step, char (&text)[LP_SEQUENCES]) {
    std::vector<int32_t> ids = step.seq_ids;
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::string all;
    for (size_t i = 0, end; i < ids.size(); i = end) {
        for (end = i + 1; end < ids.size() && ids[end] == ids[end - 1] + 1;) {
            end++;
        }
        all += (all.empty() ? "" : ",") + std::to_string(ids[i]);
        if (end - i > 1) {
            all += "-" + std::to_string(ids[end - 1]);
        }
    }
    if (all.size() >= LP_SEQUENCES) {
        all = all.substr(0, LP_SEQUENCES - 4) + "...";
    }
    memcpy(text, all.c_str(), all.size() + 1);
}

}  // namespace

void TraceLog::start(size_t n_max) {
    const Lock lock(mutex_);
    n_max_ = n_max;
    if (n_max == 0) {
        spans_.clear();
    }
}

void TraceLog::add(const Step &step, lp_stage stage, int64_t begin_ns, int64_t end_ns) {
    if (!is_on()) {
        return;
    }
    const Lock lock(mutex_);
    if (spans_.size() >= n_max_ && !spans_.empty()) {
        spans_.pop_front();
    }
    spans_.push_back({ step.number, begin_ns, end_ns, static_cast<int>(stage), step.n_tokens, step.n_outputs, {} });
    describe_sequences(step, spans_.back().sequences);
}

bool TraceLog::next(lp_span *span) {
    const Lock lock(mutex_);
    if (spans_.empty()) {
        return false;
    }
    *span = spans_.front();
    spans_.pop_front();
    return true;
}

Pipeline::Pipeline(std::shared_ptr<Context> context, const Options &o)
    : context_(std::move(context)), mode_(o.mode), depth_(o.depth),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context_->llama())))), limits_(o.limits),
      threaded_(o.threaded),
      ring_(o.mode == LP_DIRECT ? nullptr : context_->stager(), context_->llama(), o.mode, o.n_slots, o.slot_rows),
      positions_(context_->llama()) {
    llama_set_abort_callback(context_->llama(), [](void *p) { return static_cast<Pipeline *>(p)->stop_computing(); }, this);
    try {
        if (threaded_) {
            launch_thread_ = std::thread([this] { run_launch_thread(); });
            if (ring_.has_copier()) {
                copy_thread_ = std::thread([this] { run_copy_thread(); });
            }
        }
    } catch (...) {
        close(false);
        throw;
    }
}

Pipeline::~Pipeline() { close(false); }

void Pipeline::stop() {
    const Lock lock(mutex_);
    is_closing_ = true;
    drain_      = false;
    aborts_.abort_all();
    work_.notify_all();
    done_.notify_all();
}

void Pipeline::close(bool drain) {
    {
        const Lock lock(mutex_);
        if (is_closed_) {
            return;
        }
        is_closed_  = true;
        is_closing_ = true;
        work_.notify_all();
        done_.notify_all();
    }
    if (!drain) {
        stop();
    }
    for (std::thread *thread : { &launch_thread_, &copy_thread_ }) {
        if (thread->joinable()) {
            thread->join();
        }
    }
    for (; !row_copies_.empty(); row_copies_.pop_front()) {
        process(row_copies_.front());
    }
    ring_.stop_copies();
    llama_synchronize(context_->llama());
    llama_set_abort_callback(context_->llama(), nullptr, nullptr);
    context_.reset();
}

bool Pipeline::stop_computing() {
    if (wake_queue) {
        wake_queue->wake_all_if_stalled();
    }
    return aborts_.is_aborted();
}

lp_counters Pipeline::counters() {
    const Lock lock(mutex_);
    return counters_;
}

void Pipeline::count_drawn(int n) {
    const Lock lock(mutex_);
    counters_.n_graph += n;
}

// ---- the progress of a step
void Pipeline::free_slot(const Lock &lock, int slot) {
    ring_.free(lock, slot);
    done_.notify_all();
}

// A graph begins once its inputs are set and the graph before it has ended.
void Pipeline::count_computed(const Lock &, const Step &step, int64_t when_ns) {
    const int64_t begin_ns = std::max(step.stamps.inputs ? step.stamps.inputs : step.stamps.launch, last_computed_ns_);
    trace_.add(step, LP_STAGE_COMPUTE, begin_ns, when_ns);
    counters_.compute_ns += std::max<int64_t>(when_ns - begin_ns, 0);
    last_computed_ns_ = when_ns;
}

// Without events: the device is known to have finished this step.
void Pipeline::mark_computed(const Lock &lock, Step &step) {
    if (step.computed) {
        return;
    }
    step.computed = true;
    count_computed(lock, step, now_ns());
    if (step.pending) {
        step.pending = false;
        n_pending_--;
    }
    done_.notify_all();
}

void Pipeline::finish_step(const Lock &lock, Step &step, State state) {
    step.state = state;
    if (step.pending) {
        step.pending = false;
        n_pending_--;
    }
    const auto found = std::find_if(launched_.begin(), launched_.end(), [&](const auto &l) { return l.get() == &step; });
    if (found != launched_.end()) {
        launched_.erase(found);
    }
    if (step.slot >= 0 && (step.released || state == State::failed) && mode_ != LP_EVENTS) {
        free_slot(lock, step.slot);
        step.slot = -1;
    }
    done_.notify_all();
}

void Pipeline::fail(const Lock &lock, Step &step, int code, const char *why) {
    step.code   = code;
    step.error  = why ? why : "";
    has_failed_ = true;
    step.n_left--;
    n_unobserved_++;
    finish_step(lock, step, State::failed);
    if (step.released) {
        see_failure(lock, step);
    }
}

// Steps that continue a failed step are accepted until its submitter has seen the failure, and then fail at launch. The
// error is reported where an output is read, never by an unrelated submit().
void Pipeline::see_failure(const Lock &lock, Step &step) {
    if (step.state != State::failed || step.observed) {
        return;
    }
    step.observed = true;
    n_unobserved_--;
    if (threaded_ && n_unobserved_ == 0 && queue_.empty() && !is_busy_ && !is_closed_) {
        reread_positions(lock);
    }
}

// ---- the pipeline's queue: what other threads submit, and the two threads that work it off
std::shared_ptr<Step> Pipeline::make(const BatchArrays &batch) const {
    auto step = std::make_shared<Step>();
    step->set(batch, limits_);
    return step;
}

int Pipeline::submit(const std::shared_ptr<Step> &step) {
    Lock lock(mutex_);
    while (!is_closing_ && n_pending_ >= depth_) {
        for (const auto &launched : launched_) {  // without events a step is only known to be done once it is asked for
            launched->awaited = true;
        }
        work_.notify_one();
        done_.wait(lock);
    }
    if (is_closing_) {
        set_error("the pipeline is closed");
        return LP_ERROR_CLOSED;
    }
    // Whatever runs out of memory here leaves nothing behind: nobody would take up a step that is counted and not queued.
    queue_.push_back({ step, {} });
    try {
        if (!has_failed_ && !positions_.append(*step)) {
            queue_.pop_back();
            return LP_ERROR_POSITIONS;
        }
    } catch (...) {
        queue_.pop_back();
        throw;
    }
    step->number  = n_numbers_++;
    step->pending = true;
    n_pending_++;
    work_.notify_one();
    return 0;
}

int Pipeline::next_position(int seq_id) {
    const Lock lock(mutex_);
    return static_cast<int>(positions_.next(seq_id));
}

int Pipeline::memory(const MemoryOp &op) {
    if (!threaded_) {
        return apply(op);
    }
    const Lock lock(mutex_);
    if (is_closing_) {
        set_error("the pipeline is closed");
        return LP_ERROR_CLOSED;
    }
    queue_.push_back({ nullptr, op });  // first, as in `submit`
    try {
        if (!positions_.apply(op)) {
            queue_.pop_back();
            return LP_ERROR_POSITIONS;
        }
    } catch (...) {
        queue_.pop_back();
        throw;
    }
    work_.notify_one();
    return 1;
}

int Pipeline::save(int seq_id, int64_t max_bytes, Part part, SavedCells &to) {
    return between_steps([&] { return save_cells(context_->llama(), seq_id, max_bytes, part, to); }, -1, 0);
}

int Pipeline::load(int seq_id, int n, const SavedCells *cells, const SavedCells *state) {
    return between_steps([&] { return context_->load(seq_id, n, cells, state); }, seq_id, n);
}

int Pipeline::copy(int from, int to, int n, const SavedCells *state) {
    return between_steps([&] { return context_->copy(from, to, n, scratch_, state); }, to, n);
}

int Pipeline::set_adapters(const lp_adapter_set &set) {
    return between_steps([&] { return context_->set_adapters(set); }, -1, 0);
}

int Pipeline::assign_adapters(int seq_id, const lp_adapter_set &set) {
    return between_steps([&] { return context_->assign_adapters(seq_id, set); }, -1, 0);
}

int Pipeline::sequence_end(int seq_id) {
    return between_steps([&] { return llama_memory_seq_pos_max(llama_get_memory(context_->llama()), seq_id) + 1; }, -1, 0);
}

// Runs `work` on the thread that launches, after all that is queued; `changed`: the sequence that has `n` cells then.
int Pipeline::between_steps(const std::function<int()> &work, int changed, int n) {
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
int Pipeline::apply(const MemoryOp &op) {
    return timed([&] { return context_->apply(op); });
}

int Pipeline::timed(const std::function<int()> &work) {
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
        for (const auto &step : launched_) {
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
                if (Task *task = queue_.front().task) {
                    task->result  = LP_ERROR_CLOSED;
                    task->is_done = true;
                    done_.notify_all();
                }
                if (queue_.front().step) {
                    fail(lock, *queue_.front().step, LP_ERROR_CLOSED, "the pipeline was closed before this step was launched");
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

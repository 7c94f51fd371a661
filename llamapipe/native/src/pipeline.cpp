// The pipeline: its life, and the progress of its steps.
#include "pipeline.hpp"

#include "clock.hpp"

#include <algorithm>

namespace lp {

Pipeline::Pipeline(std::shared_ptr<Context> context, const Options & o)
    : context_(std::move(context)), mode_(o.mode), depth_(o.depth),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context_->llama())))), limits_(o.limits),
      threaded_(o.threaded),
      ring_(o.mode == LP_DIRECT ? nullptr : context_->stager(), context_->llama(), o.mode, o.n_slots, o.slot_rows),
      positions_(context_->llama()) {
    llama_set_abort_callback(context_->llama(), [](void * p) { return ((Pipeline *) p)->stop_computing(); }, this);
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
    for (std::thread * thread : { &launch_thread_, &copy_thread_ }) {
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
void Pipeline::free_slot(const Lock & lock, int slot) {
    ring_.free(lock, slot);
    done_.notify_all();
}

// A graph begins once its inputs are set and the graph before it has ended.
void Pipeline::count_computed(const Lock &, const Step & step, int64_t when_ns) {
    const int64_t begin_ns = std::max(step.stamps.inputs ? step.stamps.inputs : step.stamps.launch, last_computed_ns_);
    trace_.add(step, LP_STAGE_COMPUTE, begin_ns, when_ns);
    counters_.compute_ns += std::max<int64_t>(when_ns - begin_ns, 0);
    last_computed_ns_ = when_ns;
}

// Without events: the device is known to have finished this step.
void Pipeline::mark_computed(const Lock & lock, Step & step) {
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

void Pipeline::finish_step(const Lock & lock, Step & step, State state) {
    step.state = state;
    if (step.pending) {
        step.pending = false;
        n_pending_--;
    }
    const auto found = std::find_if(launched_.begin(), launched_.end(), [&](const auto & l) { return l.get() == &step; });
    if (found != launched_.end()) {
        launched_.erase(found);
    }
    if (step.slot >= 0 && (step.released || state == State::failed) && mode_ != LP_EVENTS) {
        free_slot(lock, step.slot);
        step.slot = -1;
    }
    done_.notify_all();
}

void Pipeline::fail(const Lock & lock, Step & step, int code, const char * why) {
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
void Pipeline::see_failure(const Lock & lock, Step & step) {
    if (step.state != State::failed || step.observed) {
        return;
    }
    step.observed = true;
    n_unobserved_--;
    if (threaded_ && n_unobserved_ == 0 && queue_.empty() && !is_busy_ && !is_closed_) {
        reread_positions(lock);
    }
}

}  // namespace lp

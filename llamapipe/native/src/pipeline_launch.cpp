// Launching steps: one decode for each ubatch of a batch.
#include "clock.hpp"
#include "faults.hpp"
#include "pipeline.hpp"

#include <cstring>
#include <stdexcept>

namespace lp {

// ---- for LaunchedSteps
void Pipeline::choose_wanted(Step &step, lp_sampler **samplers, const int32_t *targets, int n_top) const {
    if (ring_.samples()) {
        step.choose_wanted(samplers, targets, n_top, n_vocab_, !ring_.is_wide(step));
    }
}

int Pipeline::launch(const std::shared_ptr<Step> &step) {
    if (threaded_) {
        return submit(step);
    }
    step->number = n_numbers_++;
    launch_step(step);
    return step->state == State::failed ? step->code : 0;
}

// ---- launching
void Pipeline::launch_step(const std::shared_ptr<Step> &step) {
    {
        const Lock lock(mutex_);
        step->state  = State::running;
        step->n_left = 1;  // the launch itself
    }
    step->stamps.launch = now_ns();
    aborts_.set_running(step->number);
    size_t n_done = 0;
    int    code   = guard(LP_ERROR, [&] { return launch_ubatches(step, &n_done); });
    aborts_.set_running(-1);
    if (code == 1) {
        undo(*step, n_done);
        if (n_done > 0 && !step->grid.empty()) {
            code = LP_ERROR;  // rows of an image share a position: those of the step before are gone, too
        }
    }
    step->stamps.launched = now_ns();
    const Lock lock(mutex_);
    counters_.n_steps++;
    counters_.n_decodes += n_done;
    trace_.add(*step, LP_STAGE_LAUNCH, step->stamps.launch, step->stamps.launched);
    if (mode_ == LP_HOST || mode_ == LP_DIRECT) {
        const int64_t begin_ns = step->stamps.inputs ? step->stamps.inputs : step->stamps.launch;
        trace_.add(*step, LP_STAGE_COMPUTE, begin_ns, step->stamps.launched);
        counters_.compute_ns += step->stamps.launched - begin_ns;
    }
    if (code != 0) {
        if (step->slot >= 0) {
            free_slot(lock, step->slot);
            step->slot = -1;
        }
        const int why = code == 1 ? LP_ERROR_FULL : code == 2 ? LP_ERROR_ABORTED : code == LP_ERROR ? LP_ERROR_STEP : code;
        fail(lock, *step, why, lp_last_error());
        return;
    }
    step->state = State::launched;
    if (--step->n_left == 0 && (mode_ == LP_HOST || (mode_ == LP_DIRECT && threaded_))) {
        if (step->slot >= 0) {
            step->data = ring_.slot_data(step->slot);
        }
        finish_step(lock, *step, State::done);
    } else if (step->n_left == 0 && mode_ == LP_EVENTS) {
        finish_step(lock, *step, State::done);  // a wide step whose last copy ended before this line
    } else {
        launched_.push_back(step);
        done_.notify_all();  // a thread that waits in `submit` now marks it as awaited
        if (step->released && mode_ == LP_SYNC) {
            finish_step(lock, *step, State::done);
        }
    }
    if (mode_ == LP_SYNC && ring_.waits_for_last_graph()) {
        for (size_t i = launched_.size(); i-- > 1;) {
            mark_computed(lock, *launched_[i - 1]);  // its graph had to end before this step's inputs could be uploaded
        }
    }
}

// Returns llama_decode's code of the ubatch that failed, or 0.
int Pipeline::launch_ubatches(const std::shared_ptr<Step> &step, size_t *n_done) {
    if (threaded_ && has_failed_ && !positions_.matches_memory(*step)) {
        set_error("it continues a sequence whose step before it failed");
        return LP_ERROR_POSITIONS;
    }
    if (!step->is_causal && step->ubatches.size() > 1) {  // llama.cpp would end the process, or compute something else
        set_error("entries that see each other do not fit into one ubatch");
        return LP_ERROR;
    }
    const bool is_staged = mode_ != LP_DIRECT, is_wide = ring_.is_wide(*step);
    ring_.take_memory_for_results(*step);
    // There are three cases for where the rows of a step go:
    if (is_staged ? is_wide && step->needs_rows : threaded_ && step->n_outputs > 0) {
        // 1. A wide step, or one of a threaded direct pipeline: each ubatch's rows are copied to host memory at once.
        step->host = ring_.memory_for_wanted_rows(*step);
    } else if (is_staged && !is_wide && (step->n_outputs > 0 || ring_.has_copier())) {
        // 2. Any other step of a ring: they stay in one slot, from which they are copied or read later.
        const int  slot = take_slot(step);
        const Lock lock(mutex_);
        step->slot = slot;
    }
    // 3. A direct pipeline without threads: they stay in llama.cpp's own buffer until the next decode.
    for (size_t i = 0; i < step->ubatches.size(); i++) {
        const Ubatch &ubatch = step->ubatches[i];
        int           slot   = step->slot;
        if (is_staged && is_wide && ubatch.n_outputs > 0) {
            slot = take_slot(step);
        }
        int code = LP_ERROR;
        try {
            if (is_staged) {
                ring_.expect(*step, ubatch, slot);
            }
            code = decode(*step, ubatch);
        } catch (...) {
            give_slot_back(*step, slot);
            throw;
        }
        if (code == 0 && is_staged && (!ring_.settle() || faults_.take(Fault::rows, &code))) {
            set_error("llama.cpp cut the batch otherwise than expected, and its rows cannot be told apart");
            code = LP_ERROR_ROWS;
        }
        if (code != 0) {
            give_slot_back(*step, slot);
            return code;
        }
        ++*n_done;
        if (!is_staged && step->host && ubatch.n_outputs > 0) {
            read_direct(*step, ubatch);
        } else if (is_staged && is_wide && ubatch.n_outputs > 0) {
            stage_out(step, slot, static_cast<int>(i));
        }
    }
    if (is_staged && !is_wide && ring_.has_copier()) {
        step->host = step->n_outputs > 0 && step->needs_rows ? ring_.memory_for_wanted_rows(*step) : nullptr;
        stage_out(step, step->slot, -1);
    } else if (mode_ == LP_HOST && !is_wide && step->results) {
        ring_.copy_wanted(*step, step->slot, -1);
    }
    if (step->host && step->needs_all) {
        step->data = step->host->data;
    }
    return 0;
}

int Pipeline::decode(Step &step, const Ubatch &ubatch) {
    int code = 0;
    if (faults_.take(Fault::launch, &code)) {
        set_error("see the log llamapipe.native");
        return code;
    }
    const size_t first = ubatch.first;
    code = context_->decode({ ubatch.n, step.tokens.data() + first, step.positions.data() + first, step.seq_ids.data() + first,
                              step.outputs.data() + first, step.embeddings.empty() ? nullptr : step.embeddings.data() + first,
                              step.grid.empty() ? nullptr : step.grid.data() + 2 * first, step.is_causal });
    if (step.stamps.inputs == 0) {
        step.stamps.inputs = ring_.inputs_ns();
    }
    return code;
}

// A slot for rows of `step`. Where all slots are held, the oldest done step is moved out first, so this never waits for a
// reader.
int Pipeline::take_slot(const std::shared_ptr<Step> &step) {
    Lock lock(mutex_);
    for (;;) {
        const int slot = ring_.take_free(lock, step);
        if (slot >= 0) {
            return slot;
        }
        if (const auto oldest = ring_.oldest_movable(lock)) {
            move_out(lock, *oldest);
        } else if (mode_ == LP_SYNC && !launched_.empty()) {
            const auto first = launched_.front();
            fetch(lock, *first);
        } else if (!threaded_ && !row_copies_.empty()) {
            const RowCopy copy = row_copies_.front();
            row_copies_.pop_front();
            lock.unlock();
            process(copy);
            lock.lock();
        } else {
            done_.wait(lock);
        }
    }
}

// Frees the slot of a failed ubatch of a wide step. Any other step owns its slot, which `launch_step` frees.
void Pipeline::give_slot_back(const Step &step, int slot) {
    if (slot >= 0 && slot != step.slot) {
        const Lock lock(mutex_);
        free_slot(lock, slot);
    }
}

// After the decode that fills `slot`: starts the copies of its rows, or does them where that needs no waiting.
void Pipeline::stage_out(const std::shared_ptr<Step> &step, int slot, int ubatch) {
    if (mode_ == LP_EVENTS) {
        ring_.start_copies(*step, slot, ubatch);
        const Lock lock(mutex_);
        step->n_left++;
        row_copies_.push_back({ step, slot, ubatch });
        copies_.notify_one();
        return;
    }
    if (mode_ == LP_SYNC) {
        synchronize();
    }
    const int64_t begin_ns = now_ns();
    ring_.copy_wanted(*step, slot, ubatch);
    const Lock lock(mutex_);
    count_copy(lock, ring_.n_wanted_bytes(*step, slot, ubatch));
    trace_.add(*step, LP_STAGE_COPY, begin_ns, now_ns());
    free_slot(lock, slot);
}

// Copies a ubatch's rows out of llama.cpp's buffer, which the next decode overwrites.
void Pipeline::read_direct(Step &step, const Ubatch &ubatch) {
    const size_t n_bytes = sizeof(float) * n_vocab_;
    for (int i = 0; i < ubatch.n; i++) {
        const int output = step.output_of_entry[ubatch.first + i];
        if (output < 0) {
            continue;
        }
        const float *row = llama_get_logits_ith(context_->llama(), i);
        if (!row) {
            throw std::runtime_error("llama.cpp has no logits of an output");
        }
        memcpy(step.host->data + static_cast<size_t>(output) * n_vocab_, row, n_bytes);
    }
    const Lock lock(mutex_);
    counters_.n_syncs++;
    count_copy(lock, ubatch.n_outputs * n_bytes);
}

// Removes the first ubatches of a step that found no KV cells: a step is computed whole or not at all.
void Pipeline::undo(const Step &step, size_t n_ubatches) {
    guard(0, [&] {
        llama_memory_t memory = llama_get_memory(context_->llama());
        for (size_t i = 0; i < n_ubatches; i++) {
            const Ubatch &ubatch = step.ubatches[i];
            for (int e = ubatch.first; e < ubatch.first + ubatch.n; e++) {
                llama_memory_seq_rm(memory, step.seq_ids[e], step.positions[e], -1);
            }
        }
        return 0;
    });
}

}  // namespace lp

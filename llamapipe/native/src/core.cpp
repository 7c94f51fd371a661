// Launching steps: one decode for each part of a batch, and memory operations between them.
#include "core.hpp"

#include "accessor.hpp"
#include "guard.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace lp {

Core::Core(llama_context * ctx, std::shared_ptr<Collector> collector, const Options & o)
    : ctx_(ctx), collector_(std::move(collector)), threads_(threads_of(ctx)), mode_(o.mode), depth_(o.depth), n_slots_(o.n_slots),
      slot_rows_(o.slot_rows), n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))),
      n_seq_max_((int) llama_n_seq_max(ctx)), shape_(o.shape), threaded_(o.threaded), slots_((size_t) o.n_slots),
      positions_((size_t) n_seq_max_), shares_((size_t) n_seq_max_, std::vector<char>((size_t) n_seq_max_)) {
    const llama_model * model = llama_get_model(ctx);
    replaces_ = llama_n_ctx_seq(ctx) != llama_n_ctx(ctx) || llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
    if (mode_ == Mode::events || mode_ == Mode::sync) {
        ggml_backend_dev_t       device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(collector_->buffer()));
        ggml_backend_dev_props props  = {};
        ggml_backend_dev_get_props(device, &props);
        pinned_   = props.caps.host_buffer ? ggml_backend_dev_host_buffer_type(device) : nullptr;
        // Devices that share the host's memory may read inputs in place, and several take turns with copies of them.
        size_t n_gpus = 0;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            n_gpus += ggml_backend_dev_type(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_GPU;
        }
        in_order_ = props.type == GGML_BACKEND_DEVICE_TYPE_GPU && n_gpus == 1;
        if (mode_ == Mode::events) {
            ggml_backend_t compute = compute_backend(ctx, device);
            if (!compute || !props.caps.events) {
                throw std::runtime_error("the device has no events");
            }
            copier_ = std::make_unique<Copier>(compute, n_slots_);
        }
    }
    llama_set_abort_callback(ctx, [](void * core) { return ((Core *) core)->stop_computing(); }, this);
    try {
        if (threaded_) {
            launcher_ = std::thread([this] { run_launcher(); });
            if (copier_) {
                watcher_ = std::thread([this] { run_watcher(); });
            }
        }
    } catch (...) {
        close(false);
        throw;
    }
}

Core::~Core() { close(false); }

std::shared_ptr<Step> Core::spare() {
    for (const auto & step : spares_) {
        if (step.use_count() == 1) {
            step->clear();
            return step;
        }
    }
    auto step = std::make_shared<Step>();
    if (spares_.size() < 8) {
        spares_.push_back(step);
    }
    return step;
}

std::shared_ptr<Step> Core::make(int n, const int32_t * tokens, const int32_t * positions, const int32_t * seq_ids,
                                 const int8_t * outputs) {
    auto step = std::make_shared<Step>();
    step->set(n, tokens, positions, seq_ids, outputs, shape_);
    return step;
}

int64_t Core::launch(int n, const int32_t * tokens, const int32_t * positions, const int32_t * seq_ids,
                     const int8_t * outputs, lp_sampler ** samplers, const int32_t * targets, int n_top) {
    make_way();
    last_.reset();
    auto step = spare();
    step->set(n, tokens, positions, seq_ids, outputs, shape_);
    if (samples() && (samplers || targets)) {
        step->wish(samplers, targets, n_top, n_vocab_, !wide(*step));
    }
    return launch_live(step);
}

int64_t Core::launch_again(const int32_t * sampled, lp_sampler ** samplers) {
    if (!last_) {
        set_error("no step was launched yet");
        return LP_ERROR;
    }
    make_way();
    const bool idle = last_.use_count() == 2;  // by itself in the spares
    const auto last = std::move(last_);
    auto       step = idle ? last : spare();
    step->advance(*last, sampled);
    if (idle) {
        step->clear();
    }
    if (samples() && samplers) {
        step->wish(samplers, nullptr, 0, n_vocab_, !wide(*step));
    }
    return launch_live(step);
}

// Rows of a step can be had until `depth` more are launched.
void Core::make_way() {
    while ((int) live_.size() >= depth_) {
        forget(live_.front()->number);
    }
}

int64_t Core::launch_live(const std::shared_ptr<Step> & step) {
    last_ = step;
    if (threaded_) {
        const int code = submit(step);
        if (code != 0) {
            return code;
        }
    } else {
        step->number = n_numbers_++;
        launch_step(step);
        if (step->state == State::failed) {
            return step->code;
        }
    }
    live_.push_back(step);
    return step->number;
}

void Core::launch_step(const std::shared_ptr<Step> & step) {
    {
        const Lock lock(mutex_);
        step->state  = State::running;
        step->n_left = 1;  // the launch itself
    }
    step->stamps.launch = now_ns();
    running_            = step->number;
    size_t    n_done    = 0;
    const int code      = guard(LP_ERROR, [&] { return launch_parts(step, &n_done); });
    running_            = -1;
    if (code == 1) {
        undo(*step, n_done);
    }
    step->stamps.launched = now_ns();
    Lock lock(mutex_);
    counters_.n_steps++;
    counters_.n_decodes += (int64_t) n_done;
    span(*step, Stage::launch, step->stamps.launch, step->stamps.launched);
    if (mode_ == Mode::host || mode_ == Mode::stock) {
        const int64_t begin_ns = step->stamps.inputs ? step->stamps.inputs : step->stamps.launch;
        span(*step, Stage::compute, begin_ns, step->stamps.launched);
        counters_.compute_ns += step->stamps.launched - begin_ns;
    }
    if (code != 0) {
        if (step->slot >= 0) {
            free_slot(step->slot);
            step->slot = -1;
        }
        fail(*step, code == 1 ? LP_ERROR_FULL : code == 2 ? LP_ERROR_ABORTED : code == LP_ERROR ? LP_ERROR_STEP : code,
             lp_last_error());
        return;
    }
    step->state = State::launched;
    if (--step->n_left == 0 && (mode_ == Mode::host || (mode_ == Mode::stock && threaded_))) {
        if (step->slot >= 0) {
            step->data = slot_data(step->slot);
        }
        finish_step(*step, State::done);
    } else if (step->n_left == 0 && mode_ == Mode::events) {
        finish_step(*step, State::done);  // a wide one whose last copy was quicker than this line
    } else {
        launched_.push_back(step);
        done_.notify_all();  // who waits for room asks for it now
        if (step->released && mode_ == Mode::sync) {
            finish_step(*step, State::done);
        }
    }
    if (mode_ == Mode::sync && in_order_) {
        for (size_t i = launched_.size(); i-- > 1;) {
            computed(*launched_[i - 1]);  // its graph had to end before this step's inputs could be set
        }
    }
}

// Returns llama_decode's code of the part that failed, or 0.
int Core::launch_parts(const std::shared_ptr<Step> & step, size_t * n_done) {
    if (threaded_ && failed_ && !follows(*step)) {
        set_error("it continues a sequence whose step before it failed");
        return LP_ERROR_POSITIONS;
    }
    const bool staged = mode_ != Mode::stock;
    if (!step->graph.empty()) {
        step->results = spare_memory(results_pool_, step->graph.size() * (sizeof(GraphResult) / sizeof(float)));
    }
    if (step->needs_candidates) {
        step->found = spare_memory(found_pool_, step->graph.size() * 2 * (size_t) collector_->sampler()->n_candidates());
    }
    if (mode_ == Mode::stock ? threaded_ && step->n_outputs > 0 : wide(*step) && step->needs_rows) {
        step->host = host_for(*step);
    } else if (staged && !wide(*step) && (step->n_outputs > 0 || copier_)) {
        const int slot = take_slot(step);
        const Lock lock(mutex_);
        step->slot = slot;
    }
    for (size_t i = 0; i < step->parts.size(); i++) {
        const Part & part = step->parts[i];
        int          slot = step->slot;
        if (staged && wide(*step) && part.n_outputs > 0) {
            slot = take_slot(step);
        }
        if (staged) {
            step->rows.resize((size_t) part.n_outputs);
            step->parameters.clear();
            for (int j = 0; j < part.n_outputs; j++) {
                const int place = wide(*step) ? j : step->places[(size_t) (part.first_output + j)];
                step->rows[(size_t) j] = (int64_t) slot * slot_rows_ + place;
                if (!step->graph.empty()) {
                    step->parameters.push_back(step->graph[(size_t) step->places[(size_t) (part.first_output + j)]]);
                }
            }
        }
        int code = LP_ERROR;
        try {
            if (staged) {
                collector_->expect(step->rows.data(), step->graph.empty() ? nullptr : step->parameters.data(), part.n_outputs);
            }
            code = decode(*step, part);
        } catch (...) {
            give_back(*step, slot);
            throw;
        }
        if (code == 0 && staged && (!collector_->settle() || injected(Fault::rows, &code))) {
            set_error("llama.cpp cut the batch otherwise than expected, and its rows cannot be told apart");
            code = LP_ERROR_ROWS;
        }
        if (code != 0) {
            give_back(*step, slot);
            return code;
        }
        ++*n_done;
        if (mode_ == Mode::stock && step->host && part.n_outputs > 0) {
            read_stock(*step, part);
        } else if (staged && wide(*step) && part.n_outputs > 0) {
            stage_out(step, slot, (int) i);
        }
    }
    if (staged && !wide(*step) && copier_) {
        step->host = step->n_outputs > 0 && step->needs_rows ? host_for(*step) : nullptr;
        stage_out(step, step->slot, -1);
    } else if (mode_ == Mode::host && !wide(*step) && step->results) {
        copy_now(*step, step->slot, -1);
    }
    if (step->host && step->needs_all) {
        step->data = step->host->data;
    }
    return 0;
}

// The slot of a part of a wide step that came to nothing; that of any other step is the step's own.
void Core::give_back(const Step & step, int slot) {
    if (slot >= 0 && slot != step.slot) {
        const Lock lock(mutex_);
        free_slot(slot);
    }
}

int Core::decode(Step & step, const Part & part) {
    // llama_batch wants a pointer to a list of sequences for each token; ours have exactly one.
    thread_local std::vector<int32_t>        n_seq_id;
    thread_local std::vector<llama_seq_id *> seq_id;
    if ((int) n_seq_id.size() < part.n) {
        n_seq_id.resize((size_t) part.n, 1);
        seq_id.resize((size_t) part.n);
    }
    for (int i = 0; i < part.n; i++) {
        seq_id[(size_t) i] = step.seq_ids.data() + part.first + i;
    }
    llama_batch batch = {};
    batch.n_tokens    = part.n;
    batch.token       = step.tokens.data() + part.first;
    batch.pos         = step.positions.data() + part.first;
    batch.n_seq_id    = n_seq_id.data();
    batch.seq_id      = seq_id.data();
    batch.logits      = step.outputs.data() + part.first;
    set_error("see the log llamapipe.native");
    int code = 0;
    if (injected(Fault::launch, &code)) {
        return code;
    }
    if (threads_) {
        threads_->apply();
    }
    code = llama_decode(ctx_, batch);
    if (step.stamps.inputs == 0 && collector_) {
        step.stamps.inputs = collector_->inputs_ns();
    }
    return code;
}

// Copies a part's rows out of llama.cpp's buffer: the next decode overwrites it.
void Core::read_stock(Step & step, const Part & part) {
    for (int i = 0; i < part.n; i++) {
        const int output = step.output_of_entry[(size_t) (part.first + i)];
        if (output < 0) {
            continue;
        }
        const float * row = llama_get_logits_ith(ctx_, i);
        if (!row) {
            throw std::runtime_error("llama.cpp has no logits of an output");
        }
        memcpy(step.host->data + (size_t) output * (size_t) n_vocab_, row, sizeof(float) * (size_t) n_vocab_);
    }
    const Lock lock(mutex_);
    counters_.n_syncs++;
    counters_.n_copies++;
    counters_.n_bytes += (int64_t) part.n_outputs * n_vocab_ * (int64_t) sizeof(float);
}

// Takes back the first parts of a step that found no cells: a step is done whole or not at all.
void Core::undo(const Step & step, size_t n_parts) {
    guard(0, [&] {
        for (size_t i = 0; i < n_parts; i++) {
            const Part & part = step.parts[i];
            for (int e = part.first; e < part.first + part.n; e++) {
                llama_memory_seq_rm(llama_get_memory(ctx_), step.seq_ids[(size_t) e], step.positions[(size_t) e], -1);
            }
        }
        return 0;
    });
}

// With the lock.
void Core::fail(Step & step, int code, const char * why) {
    step.code  = code;
    step.error = why ? why : "";
    failed_    = true;
    step.n_left--;
    n_unobserved_++;
    finish_step(step, State::failed);
    if (step.released) {
        seen(step);
    }
}

// Whether each sequence goes on from where it is now: behind a failed step it may not.
bool Core::follows(const Step & step) const {
    std::vector<int32_t> next(positions_.size(), -1);
    for (int i = 0; i < step.n_tokens; i++) {
        const size_t s = (size_t) step.seq_ids[(size_t) i];
        if (next[s] < 0) {
            next[s] = llama_memory_seq_pos_max(llama_get_memory(ctx_), (llama_seq_id) s) + 1;
        }
        if (step.positions[(size_t) i] != next[s]++) {
            return false;
        }
    }
    return true;
}

int Core::memory(const MemoryOp & op) {
    if (threaded_) {
        const int code = submit_memory(op);
        return code == 0 ? 1 : code;
    }
    return do_memory(op);
}

int Core::do_memory(const MemoryOp & op) {
    const int64_t begin_ns = now_ns();
    const int     result   = apply(op);
    const Lock    lock(mutex_);
    counters_.n_memory_ops++;
    if (tracing()) {
        const Step none;
        span(none, Stage::memory, begin_ns, now_ns());
    }
    return result;
}

int Core::apply(const MemoryOp & op) {
    return guard(LP_ERROR, [&] {
        llama_memory_t memory = llama_get_memory(ctx_);
        switch (op.op) {
            case Op::remove: return (int) llama_memory_seq_rm(memory, op.seq_id, op.p0, op.p1);
            case Op::copy: llama_memory_seq_cp(memory, op.seq_id, op.other, op.p0, op.p1); break;
            case Op::keep:  // not llama_memory_seq_keep: it looks at the cells of one stream only
                for (int s = 0; s < n_seq_max_; s++) {
                    if (s != op.seq_id) {
                        llama_memory_seq_rm(memory, s, -1, -1);
                    }
                }
                break;
            case Op::shift: llama_memory_seq_add(memory, op.seq_id, op.p0, op.p1, op.delta); break;
            case Op::clear: llama_memory_clear(memory, false); break;
        }
        return 1;
    });
}

void Core::fail_next(Fault fault, int code) {
    const Lock lock(mutex_);
    fault_      = fault;
    fault_code_ = code;
}

bool Core::injected(Fault fault, int * code) {
    if (fault_ != fault) {
        return false;
    }
    const Lock lock(mutex_);
    fault_ = Fault::none;
    *code  = fault_code_;
    return true;
}

lp_counters Core::counters() {
    const Lock lock(mutex_);
    return counters_;
}

void Core::trace(size_t n_max) {
    const Lock lock(mutex_);
    n_spans_ = n_max;
    if (n_max == 0) {
        spans_.clear();
    }
}

bool Core::next_span(Span * span) {
    const Lock lock(mutex_);
    if (spans_.empty()) {
        return false;
    }
    *span = spans_.front();
    spans_.pop_front();
    return true;
}

// Which sequences a step feeds, as ranges; cut short where they do not fit.
static void describe(const Step & step, char (&text)[LP_SEQUENCES]) {
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

void Core::note_span(const Step & step, Stage stage, int64_t begin_ns, int64_t end_ns) {
    const Lock lock(mutex_);
    span(step, stage, begin_ns, end_ns);
}

// With the lock.
void Core::span(const Step & step, Stage stage, int64_t begin_ns, int64_t end_ns) {
    if (!tracing()) {
        return;
    }
    if (spans_.size() >= n_spans_) {
        spans_.pop_front();
    }
    spans_.push_back({ step.number, stage, step.n_tokens, step.n_outputs, begin_ns, end_ns, {} });
    describe(step, spans_.back().sequences);
}

}  // namespace lp

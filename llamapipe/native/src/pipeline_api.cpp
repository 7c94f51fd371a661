// The C entries of the pipeline.
#include "clock.hpp"
#include "faults.hpp"
#include "handles.hpp"

#include <cstring>

lp_pipeline *lp_pipeline_new(lp_context *context, enum lp_mode mode, int depth, int n_slots, int slot_rows, int n_ubatch,
                             bool kv_streams, bool threaded) {
    return lp::guard(nullptr, [&] {
        const lp::Pipeline::Options options = {
            mode, depth, n_slots, slot_rows, { n_ubatch, slot_rows, kv_streams }, threaded,
        };
        const auto shared = std::make_shared<lp::Pipeline>(context->shared, options);
        return new lp_pipeline{ shared, lp::LaunchedSteps(shared), nullptr };
    });
}

void lp_pipeline_stop(lp_pipeline *pipeline) { pipeline->shared->stop(); }

void lp_pipeline_close(lp_pipeline *pipeline, bool drain) {
    lp::guard(0, [&] {
        pipeline->shared->close(drain);
        return 0;
    });
}

void lp_pipeline_free(lp_pipeline *pipeline) { delete pipeline; }

// ---- queue
lp_step *lp_submit(lp_pipeline *pipeline, int n, const int32_t *tokens, const int32_t *positions, const int32_t *seq_ids,
                   const int8_t *outputs, int *code) {
    *code = LP_ERROR;
    return lp::guard(nullptr, [&]() -> lp_step * {
        const auto step   = pipeline->shared->make({ n, tokens, positions, seq_ids, outputs });
        auto       handle = std::make_unique<lp_step>(lp_step{ pipeline->shared, step });
        *code             = pipeline->shared->submit(step);
        return *code == 0 ? handle.release() : nullptr;
    });
}

int lp_next_position(lp_pipeline *pipeline, int seq_id) { return pipeline->shared->next_position(seq_id); }

int lp_memory(lp_pipeline *pipeline, enum lp_memory_op op, int seq_id, int other, int p0, int p1, int delta) {
    return lp::guard(LP_ERROR, [&] { return pipeline->shared->memory({ op, seq_id, other, p0, p1, delta }); });
}

int lp_set_adapters(lp_pipeline *pipeline, const lp_adapter_set *set) {
    return lp::guard(LP_ERROR, [&] { return pipeline->shared->set_adapters(*set); });
}

int lp_assign_adapters(lp_pipeline *pipeline, int seq_id, const lp_adapter_set *set) {
    return lp::guard(LP_ERROR, [&] { return pipeline->shared->assign_adapters(seq_id, *set); });
}

int lp_sequence_end(lp_pipeline *pipeline, int seq_id) {
    return lp::guard(LP_ERROR, [&] { return pipeline->shared->sequence_end(seq_id); });
}

lp_saved *lp_save(lp_pipeline *pipeline, int seq_id, int64_t max_bytes, bool only_state) {
    return lp::guard(nullptr, [&]() -> lp_saved * {
        auto           saved = std::make_unique<lp_saved>();
        const lp::Part part  = only_state ? lp::Part::state : lp::Part::all;
        return pipeline->shared->save(seq_id, max_bytes, part, saved->cells) == 1 ? saved.release() : nullptr;
    });
}

bool lp_save_state(lp_pipeline *pipeline, int seq_id, lp_saved *to) {
    return lp::guard(false, [&] { return pipeline->shared->save(seq_id, -1, lp::Part::state, to->cells) == 1; });
}

lp_saved *lp_saved_new(const void *bytes, int64_t n) {
    return lp::guard(nullptr, [&] {
        auto saved = std::make_unique<lp_saved>();
        saved->cells.resize(n);
        memcpy(saved->cells.bytes.get(), bytes, n);
        return saved.release();
    });
}

const void *lp_saved_data(const lp_saved *saved) { return saved->cells.bytes.get(); }

int64_t lp_saved_bytes(const lp_saved *saved) { return saved->cells.size; }

void lp_saved_free(lp_saved *saved) { delete saved; }

static const lp::SavedCells *cells_of(const lp_saved *saved) { return saved ? &saved->cells : nullptr; }

int lp_load(lp_pipeline *pipeline, int seq_id, int n, const lp_saved *cells, const lp_saved *state) {
    return lp::guard(LP_ERROR, [&] { return pipeline->shared->load(seq_id, n, cells_of(cells), cells_of(state)); });
}

lp_saved *lp_context_save_state(lp_context *context, int seq_id, lp_saved *to) {
    return lp::guard(nullptr, [&]() -> lp_saved * {
        auto      made  = to ? nullptr : std::make_unique<lp_saved>();
        lp_saved *saved = to ? to : made.get();
        if (lp::save_cells(context->shared->llama(), seq_id, -1, lp::Part::state, saved->cells) != 1) {
            return nullptr;
        }
        (void)made.release();
        return saved;
    });
}

int lp_context_load_state(lp_context *context, int seq_id, int n, const lp_saved *state) {
    return lp::guard(LP_ERROR, [&] { return context->shared->load(seq_id, n, nullptr, &state->cells); });
}

int lp_copy(lp_pipeline *pipeline, int from, int to, int n, const lp_saved *state) {
    return lp::guard(LP_ERROR, [&] { return pipeline->shared->copy(from, to, n, cells_of(state)); });
}

// ---- launch
// Wakes readers one by one while a step computes, and those that are left at its end: no launch will wake them then, and
// sampling may take long.
template <typename Launch> static int64_t launch_and_wake(lp_pipeline &pipeline, Launch &&launch) {
    if (pipeline.wakes) {
        lp_wake_list_begin(pipeline.wakes);
    }
    const int64_t step = lp::guard(LP_ERROR, launch);
    if (pipeline.wakes) {
        pipeline.wakes->queue->shared->wake_all();
    }
    return step;
}

int64_t lp_launch(lp_pipeline *pipeline, int n, const int32_t *tokens, const int32_t *positions, const int32_t *seq_ids,
                  const int8_t *outputs, lp_sampler **samplers, const int32_t *targets, int n_top, const float *const *embeddings,
                  const int32_t *grid, bool is_causal) {
    return launch_and_wake(*pipeline, [&] {
        return pipeline->steps.launch({ n, tokens, positions, seq_ids, outputs, embeddings, grid, is_causal }, samplers, targets,
                                      n_top);
    });
}

int64_t lp_launch_again(lp_pipeline *pipeline, const int32_t *sampled, lp_sampler **samplers) {
    return launch_and_wake(*pipeline, [&] { return pipeline->steps.launch_again(sampled, samplers); });
}

void lp_wake_at_launch(lp_pipeline *pipeline, lp_wake_list *wakes) {
    pipeline->wakes              = wakes;
    pipeline->shared->wake_queue = wakes->queue->shared;
}

void lp_abort(lp_pipeline *pipeline, int64_t number) { pipeline->shared->aborts().abort(number); }

int64_t lp_launching(const lp_pipeline *pipeline) { return pipeline->shared->aborts().running(); }

// ---- wait
bool lp_step_ready(lp_step *step) { return step->pipeline->is_ready(*step->shared); }

bool lp_step_wait(lp_step *step, int64_t timeout_ns) { return step->pipeline->wait(*step->shared, timeout_ns); }

int lp_step_code(lp_step *step) {
    step->pipeline->observe(*step->shared);
    return step->shared->code;
}

const char *lp_step_error(const lp_step *step) { return step->shared->error.c_str(); }

int64_t lp_step_number(const lp_step *step) { return step->shared->number; }

const float *lp_step_expose(lp_step *step, bool *in_place) {
    *in_place = false;
    return lp::guard(nullptr, [&] { return step->pipeline->expose(step->shared, in_place); });
}

void lp_step_unexpose(lp_step *step) { step->pipeline->unexpose(*step->shared); }

void lp_step_release(lp_step *step) { step->pipeline->release(*step->shared); }

void lp_step_free(lp_step *step) {
    step->pipeline->release(*step->shared);
    delete step;
}

// ---- counters and trace
void lp_get_counters(lp_pipeline *pipeline, lp_counters *counters) { *counters = pipeline->shared->counters(); }

void lp_trace(lp_pipeline *pipeline, int64_t n_max) { pipeline->shared->trace().start(n_max); }

bool lp_next_span(lp_pipeline *pipeline, lp_span *span) { return pipeline->shared->trace().next(span); }

int64_t lp_now_ns(void) { return lp::now_ns(); }

// The C entries of the pipeline.
#include "pipeline.hpp"

#include "guard.hpp"

#include <cstring>

#ifndef _WIN32
#include <unistd.h>
#endif

lp_pipeline * lp_pipeline_new(llama_context * ctx, lp_collector * collector, int mode, int depth, int n_slots,
                              int slot_rows, int n_ubatch, bool streams, bool threaded) {
    return lp::guard((lp_pipeline *) nullptr, [&] {
        const lp::Core::Options options = {
            (lp::Mode) mode, depth, n_slots, slot_rows, { n_ubatch, slot_rows, streams }, threaded,
        };
        return new lp_pipeline{ std::make_shared<lp::Core>(ctx, collector ? collector->shared : nullptr, options), nullptr };
    });
}

void lp_pipeline_stop(lp_pipeline * pipeline) { pipeline->shared->stop(); }

void lp_pipeline_close(lp_pipeline * pipeline, bool drain) {
    lp::guard(0, [&] {
        pipeline->shared->close(drain);
        return 0;
    });
}

void lp_pipeline_free(lp_pipeline * pipeline) { delete pipeline; }

lp_step * lp_submit(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                    const int32_t * seq_ids, const int8_t * outputs, int * code) {
    *code = LP_ERROR;
    return lp::guard((lp_step *) nullptr, [&]() -> lp_step * {
        const auto step   = pipeline->shared->make(n, tokens, positions, seq_ids, outputs);
        auto       handle = std::make_unique<lp_step>(lp_step{ pipeline->shared, step });
        *code             = pipeline->shared->submit(step);
        return *code == 0 ? handle.release() : nullptr;
    });
}

int lp_next_position(lp_pipeline * pipeline, int seq_id) { return pipeline->shared->next_position(seq_id); }

bool lp_step_ready(lp_step * step) { return step->core->ready(*step->shared); }

bool lp_step_wait(lp_step * step, int64_t timeout_ns) { return step->core->wait(*step->shared, timeout_ns); }

int lp_step_code(lp_step * step) {
    step->core->observe(*step->shared);
    return step->shared->code;
}

const char * lp_step_error(const lp_step * step) { return step->shared->error.c_str(); }

int64_t lp_step_number(const lp_step * step) { return step->shared->number; }

const float * lp_step_expose(lp_step * step, bool * in_place) {
    *in_place = false;
    return lp::guard((const float *) nullptr, [&] { return step->core->expose(step->shared, in_place); });
}

void lp_step_unexpose(lp_step * step) { step->core->unexpose(*step->shared); }

void lp_step_release(lp_step * step) { step->core->release(*step->shared); }

void lp_step_free(lp_step * step) {
    step->core->release(*step->shared);
    delete step;
}

void lp_wake_at_launch(lp_pipeline * pipeline, lp_wakes * wakes) {
    pipeline->wakes         = wakes;
    pipeline->shared->turns = wakes->turns->shared;
}

void lp_wakes_begin(lp_wakes * wakes) {
#ifndef _WIN32
    for (int i = 0; i < wakes->n_fds; i++) {
        if (write(wakes->fds[i], "", 1) < 0) {
            continue;  // whoever cannot take a byte has not taken the last one either
        }
    }
#endif
    wakes->n_fds = 0;
    if (wakes->n_waiters > 0 && lp_turns_add(wakes->turns, wakes->waiters, wakes->n_waiters) == 0) {
        wakes->n_waiters = 0;  // else there was no memory: the next launch tries again
    }
    wakes->turns->shared->next();
}

void lp_wakes_now(lp_wakes * wakes) {
    lp_wakes_begin(wakes);
    wakes->turns->shared->all();
}

// Wakes those who wait for a launch one by one while it computes, and who is left at its end: nobody hurries them then, and
// sampling may take long.
template <typename Launch> static int64_t waking(lp_pipeline & pipeline, Launch && launch) {
    if (pipeline.wakes) {
        lp_wakes_begin(pipeline.wakes);
    }
    const int64_t step = lp::guard((int64_t) LP_ERROR, launch);
    if (pipeline.wakes) {
        pipeline.wakes->turns->shared->all();
    }
    return step;
}

int64_t lp_launch(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                  const int32_t * seq_ids, const int8_t * outputs, lp_sampler ** samplers, const int32_t * targets,
                  int n_top) {
    return waking(*pipeline, [&] {
        return pipeline->shared->launch(n, tokens, positions, seq_ids, outputs, samplers, targets, n_top);
    });
}

int64_t lp_launch_again(lp_pipeline * pipeline, const int32_t * sampled, lp_sampler ** samplers) {
    return waking(*pipeline, [&] { return pipeline->shared->launch_again(sampled, samplers); });
}

int lp_memory(lp_pipeline * pipeline, int op, int seq_id, int other, int p0, int p1, int delta) {
    return pipeline->shared->memory({ (lp::Op) op, seq_id, other, p0, p1, delta });
}

void lp_abort(lp_pipeline * pipeline, int64_t number) { pipeline->shared->abort(number); }

int64_t lp_launching(const lp_pipeline * pipeline) { return pipeline->shared->launching(); }

void lp_fail_next(lp_pipeline * pipeline, int fault, int code) { pipeline->shared->fail_next((lp::Fault) fault, code); }

void lp_get_counters(lp_pipeline * pipeline, lp_counters * counters) { *counters = pipeline->shared->counters(); }

void lp_trace(lp_pipeline * pipeline, int64_t n_max) { pipeline->shared->trace((size_t) n_max); }

bool lp_next_span(lp_pipeline * pipeline, lp_span * out) {
    lp::Span span;
    if (!pipeline->shared->next_span(&span)) {
        return false;
    }
    *out = { span.step, span.begin_ns, span.end_ns, (int) span.stage, span.n_tokens, span.n_rows, {} };
    memcpy(out->sequences, span.sequences, sizeof span.sequences);
    return true;
}

int64_t lp_now_ns(void) { return lp::now_ns(); }

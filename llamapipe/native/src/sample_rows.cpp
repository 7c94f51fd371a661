// Sampling from the rows of a step, and scoring tokens by them.
#include "clock.hpp"
#include "faults.hpp"
#include "handles.hpp"
#include "sampler.hpp"
#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace {

// Where the rows of one call come from.
struct Rows {
    std::function<bool(int, lp::Row *)> partial;  // whether a part of the row is on the host, and which
    std::function<const float *(int)>   full;     // null: the entry is not an output
};

constexpr int kNoRow = 2;

// Calls use(row) with the part that is on the host, and with the full row if that was not enough. Returns its code, or
// `kNoRow`.
template <typename Use> int with_row(const Rows &rows, int i, Use &&use) {
    lp::Row row;
    if (rows.partial && rows.partial(i, &row)) {
        const int code = use(row);
        if (code != lp_sampler::kNeedsFullRow) {
            return code;
        }
    }
    const float *all = rows.full(i);
    if (!all) {
        lp::set_error("this entry of the step is not an output");
        return kNoRow;
    }
    return use(lp::Row(all));
}

// Draws and accepts a token for each row that has none yet. A row may have an lp_no_token afterwards: its request fails, the
// others continue. For `guessed` see lp_sample_rows. Returns how many rows have a sampler that can guess what follows.
int draw_rows(int n_rows, lp_sampler **samplers, const int32_t *guessed, int32_t *tokens, const Rows &rows) {
    int n_guessing = 0;
    for (int i = 0; i < n_rows; i++) {
        lp_sampler &sampler = *samplers[i];
        if (guessed && i > 0 && guessed[i - 1] >= 0 && tokens[i - 1] != guessed[i - 1]) {
            tokens[i] = LP_NOT_DRAWN;  // so what follows it differs, too, up to the last row of its sampler
            continue;
        }
        if (!guessed || i == 0 || guessed[i - 1] < 0) {
            sampler.n_noted = 0;
        }
        const int code = lp::guard(LP_ERROR, [&] {
            if (tokens[i] >= 0) {  // by the graph
                const int noted = sampler.n_logprobs < 0
                                          ? 0
                                          : with_row(rows, i, [&](const lp::Row &row) { return sampler.note(row, tokens[i]); });
                sampler.take(tokens[i]);
                return noted;
            }
            const int failed = with_row(rows, i, [&](const lp::Row &row) { return sampler.draw(row, &tokens[i]); });
            if (failed == 0) {
                sampler.accepted(tokens[i]);
            }
            return failed;
        });
        if (code == kNoRow) {
            return LP_ERROR;
        }
        if (code != 0) {
            tokens[i] = code == LP_ERROR_LOGITS ? LP_NO_FINITE_LOGIT
                        : code == LP_ERROR_MASK ? LP_NO_ALLOWED_TOKEN
                                                : LP_SAMPLER_FAILED;
        }
    }
    for (int i = 0; i < n_rows; i++) {
        n_guessing += samplers[i]->guesser && samplers[i]->guesser->has_guess();
    }
    return n_guessing;
}

// Waits for a step and runs `body` with it; the step's code if it failed.
template <typename Body> int with_step(lp_pipeline *pipeline, int64_t number, Body &&body) {
    return lp::guard(LP_ERROR, [&]() -> int {
        lp::LaunchedSteps &steps = pipeline->steps;
        lp::Step          *step  = steps.finish(number);
        if (!step) {
            return LP_ERROR;
        }
        if (step->state == lp::State::failed) {
            lp::set_error(step->error.c_str());
            return step->code;
        }
        lp::TraceLog &trace    = steps.pipeline().trace();
        const int64_t begin_ns = trace.is_on() ? lp::now_ns() : 0;
        const int     code     = body(steps, *step);
        if (trace.is_on()) {
            trace.add(*step, LP_STAGE_SAMPLE, begin_ns, lp::now_ns());
        }
        return code;
    });
}

}  // namespace

int lp_sample_rows(lp_pipeline *pipeline, int64_t number, int n_rows, const int32_t *entries, lp_sampler **samplers,
                   const int32_t *guessed, int32_t *tokens) {
    return with_step(pipeline, number, [&](lp::LaunchedSteps &steps, lp::Step &step) {
        int n_drawn = 0;
        for (int i = 0; i < n_rows; i++) {
            tokens[i] = steps.drawn_token(step, entries[i], samplers[i]);
            n_drawn += tokens[i] >= 0;
        }
        if (n_drawn > 0) {
            steps.pipeline().count_drawn(n_drawn);
        }
        return draw_rows(n_rows, samplers, guessed, tokens,
                         { [&](int i, lp::Row *row) { return steps.partial_row(step, entries[i], row); },
                           [&](int i) { return steps.row(step, entries[i]); } });
    });
}

const float *lp_step_row(lp_pipeline *pipeline, int64_t number, int entry) {
    const float *row = nullptr;
    with_step(pipeline, number, [&](lp::LaunchedSteps &steps, lp::Step &step) {
        row = steps.row(step, entry);
        return 0;
    });
    return row;
}

int lp_candidates(const float *rows, int n_rows, int n_vocab, int k, int32_t *ids, float *logits, double *log_sum_exp) {
    return lp::guard(LP_ERROR, [&]() -> int {
        std::vector<llama_token_data> top;
        for (int i = 0; i < n_rows; i++) {
            const float *row = rows + static_cast<size_t>(i) * n_vocab;
            log_sum_exp[i]   = lp::log_sum_exp(row, n_vocab);
            lp::top_k(row, n_vocab, k, top);
            top.resize(k, { -1, -INFINITY, 0.0f });
            for (int j = 0; j < k; j++) {
                ids[static_cast<size_t>(i) * k + j]    = top[j].id;
                logits[static_cast<size_t>(i) * k + j] = top[j].logit;
            }
        }
        return 0;
    });
}

int lp_score_rows(lp_pipeline *pipeline, int64_t number, int n, const int32_t *entries, const int32_t *targets, float *logprobs,
                  int8_t *greedy, int n_top, int32_t *top_ids, float *top_logprobs) {
    return with_step(pipeline, number, [&](lp::LaunchedSteps &steps, lp::Step &step) -> int {
        const int                     n_vocab = steps.pipeline().n_vocab();
        std::vector<llama_token_data> top;
        double                        total = 0;
        int32_t                       best  = -1;
        lp::Row                       row;
        for (int i = 0; i < n; i++) {
            const bool again = i > 0 && entries[i] == entries[i - 1];
            float      logit;
            if (!again && steps.partial_row(step, entries[i], &row) && row.is_exact(n_top)) {
                total = row.log_sum_exp();
                best  = row.best();
                top.clear();
                for (int k = 0; k < n_top; k++) {
                    top.push_back({ row.id(k), row.logit(k), 0.0f });
                }
            } else if (!again) {
                row = {};
            }
            if (!row.find(targets[i], &logit)) {
                const float *all = steps.row(step, entries[i]);
                if (!all) {
                    lp::set_error("this entry of the step is not an output");
                    return LP_ERROR;
                }
                row   = lp::Row(all);
                total = lp::log_sum_exp(all, n_vocab);
                best  = lp::argmax(all, n_vocab);
                logit = all[targets[i]];
                if (n_top > 0) {
                    lp::top_k(all, n_vocab, n_top, top);
                    top.resize(n_top, { -1, -INFINITY, 0.0f });
                }
            }
            logprobs[i] = static_cast<float>(logit - total);
            greedy[i]   = targets[i] == best;
            for (int k = 0; k < n_top; k++) {
                top_ids[i * n_top + k]      = top[k].id;
                top_logprobs[i * n_top + k] = static_cast<float>(top[k].logit - total);
            }
        }
        return 0;
    });
}

#ifdef LP_TESTING
int lp_sample_context(lp_context *context, int n_rows, const int32_t *rows, lp_sampler **samplers, int32_t *tokens) {
    return lp::guard(LP_ERROR, [&] {
        llama_context *ctx = context->shared->llama();
        std::fill(tokens, tokens + n_rows, -1);
        return draw_rows(n_rows, samplers, nullptr, tokens, { {}, [&](int i) { return llama_get_logits_ith(ctx, rows[i]); } });
    });
}
#endif

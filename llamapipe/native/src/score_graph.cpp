// Reads what the graph found out about the targets of a step.
#include "guard.hpp"
#include "pipeline.hpp"

#include <cmath>
#include <limits>

int lp_score_graph(lp_pipeline * pipeline, int64_t number, int n, const int32_t * entries, float * logprobs, int8_t * greedy) {
    return lp::guard(LP_ERROR, [&] {
        lp::Step * step = pipeline->shared->finish(number);
        if (!step) {
            return (int) LP_ERROR;
        }
        if (step->state == lp::State::failed) {
            lp::set_error(step->error.c_str());
            return step->code;
        }
        for (int i = 0; i < n; i++) {
            const bool inside = entries[i] >= 0 && entries[i] < step->n_tokens;
            const int  output = inside ? step->output_of_entry[(size_t) entries[i]] : -1;
            if (output < 0 || !step->results || !(step->wishes[(size_t) output] & lp::Step::target)) {
                lp::set_error("this entry of the step had no target, or the graph does not sample");
                return (int) LP_ERROR;
            }
            const lp::GraphResult & result = step->result(output);
            const bool              finite = std::isfinite(result.log_sum_exp);
            logprobs[i] = finite ? result.target_logits[0] - result.log_sum_exp : std::numeric_limits<float>::quiet_NaN();
            greedy[i]   = finite && result.best == step->graph[(size_t) output].targets[0];
        }
        return 0;
    });
}

bool lp_in_graph(lp_sampler * s) {
    return lp::guard(false, [&] {
        lp::GraphRow row;
        return lp::in_graph(s, &row);
    });
}

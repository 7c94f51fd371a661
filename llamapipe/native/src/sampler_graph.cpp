// Which draws the graph can make, and with which parameters.
#include "graph_sampler.hpp"
#include "guard.hpp"
#include "native_test.h"
#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lp {

bool in_graph(lp_sampler * sampler, GraphRow * row) {
    *row = {};
    if (!sampler->is_plain() || sampler->n_logprobs >= GraphSampler::max_candidates) {
        return false;
    }
    if (sampler->greedy()) {
        return true;
    }
    Kind  last = Kind::none;
    int   k    = sampler->n_vocab;
    float top_p = 1.0f, min_p = 0.0f, temperature = 1.0f;
    for (const StageInfo & stage : sampler->stages) {
        if (stage.kind <= last || stage.kind == Kind::other) {
            return false;
        }
        last = stage.kind;
        switch (stage.kind) {
            case Kind::top_k: k = std::min(k, (int) stage.value); break;
            case Kind::top_p: top_p = stage.value; break;
            case Kind::min_p: min_p = stage.value; break;
            default: temperature = stage.value;
        }
    }
    // Without a sort, the CPU draws in the order of the vocabulary; the graph always draws in descending order.
    const bool sorted = k < sampler->n_vocab || (k <= GraphSampler::max_candidates && top_p < 1.0f);
    if (!sorted || k > GraphSampler::max_candidates) {
        return false;
    }
    row->inverse_temperature = 1.0f / temperature;
    row->top_k               = (float) k;
    if (top_p < 1.0f) {
        row->top_p = std::max(top_p, std::numeric_limits<float>::min());  // the first token stays
    }
    if (min_p > 0.0f) {
        // A logit that equals the bar is kept, but the graph's comparisons are strict: so the bar is one step lower, and not
        // among the numbers that a device may flush to 0.
        row->log_min_p = std::min(std::nextafter(std::log(min_p), -1e9f), -1e-30f);
    }
    row->uniform = std::min((float) sampler->peek(), std::nextafter(1.0f, 0.0f));  // it may round up to 1
    return true;
}

// Logits processors need the full row, and so do stages that need statistics of it or more of its tokens.
bool from_candidates(const lp_sampler * sampler, GraphRow * row) {
    *row = {};
    if (sampler->needs_row || sampler->n_wanted() >= GraphSampler::max_candidates ||
        sampler->n_logprobs >= GraphSampler::max_candidates) {
        return false;
    }
    sampler->raised(row->targets, GraphRow::n_targets);
    return true;
}

}  // namespace lp

static_assert(LP_TARGETS == lp::GraphRow::n_targets);

bool lp_in_graph(lp_sampler * s) {
    return lp::guard(false, [&] {
        lp::GraphRow row;
        return lp::in_graph(s, &row);
    });
}

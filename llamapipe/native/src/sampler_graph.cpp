// What a request's sampling asks of the graph.
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
        const bool again = stage.kind == Kind::top_k && last == Kind::top_k;  // several in a row are the smallest
        if ((stage.kind <= last && !again) || stage.kind == Kind::other) {
            return false;
        }
        last = stage.kind;
        switch (stage.kind) {
            case Kind::top_k: k = stage.value < (float) k ? (int) stage.value : k; break;
            case Kind::top_p: top_p = stage.value; break;
            case Kind::min_p: min_p = stage.value; break;
            default: temperature = stage.value;
        }
    }
    // Otherwise the other route draws in the order of the vocabulary.
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
        // What equals the bar is kept, and comparisons are strict: a bar one step lower, and not in what may be flushed to 0.
        row->log_min_p = std::min(std::nextafter(std::log(min_p), -1e9f), -1e-30f);
    }
    row->uniform = std::min((float) sampler->peek(), std::nextafter(1.0f, 0.0f));  // it may round up to 1
    return true;
}

// Processors look at the row itself, and stages that need statistics of it, or more of its tokens, do, too.
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

// Samples all output rows of a graph in one subgraph, whose parameters and random numbers are an input.
#include "graph_sampler.hpp"

#include "faults.hpp"
#include "native.h"
#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lp {

namespace {

constexpr int64_t kRowFloats    = sizeof(GraphRow) / sizeof(float);
constexpr int64_t kResultFloats = sizeof(GraphResult) / sizeof(float);
constexpr float   kLargest      = std::numeric_limits<float>::max();

// values[indices[j, r], r] for (m, n) indices.
ggml_tensor *look_up(ggml_context *c, ggml_tensor *values, ggml_tensor *indices) {
    const int64_t m = indices->ne[0], n = indices->ne[1];
    return ggml_reshape_2d(c, ggml_get_rows(c, ggml_reshape_3d(c, values, 1, values->ne[0], n), indices), m, n);
}

// (values[j, r] - values[i, r]) as (j, i, r), of which only the sign is kept.
ggml_tensor *compare(ggml_context *c, ggml_tensor *values) {
    const int64_t k = values->ne[0], n = values->ne[1];
    ggml_tensor  *square = ggml_new_tensor_3d(c, GGML_TYPE_F32, k, k, n);
    ggml_tensor  *all    = ggml_repeat(c, ggml_reshape_3d(c, values, k, 1, n), square);
    return ggml_sgn(c, ggml_sub(c, all, ggml_reshape_3d(c, values, 1, k, n)));
}

}  // namespace

GraphSampler::GraphSampler(int n_vocab) : n_vocab_(n_vocab), k_(std::min(n_vocab, kMaxCandidates)) {}

bool GraphSampler::probe(ggml_backend_dev_t device) {
    if (n_vocab_ > 1 << 24) {
        problem_ = "the vocabulary is too large";
        return false;
    }
    for (const bool sorts : { false, true }) {
        sorts_          = sorts;
        problem_        = "";
        ggml_context *c = ggml_init({ ggml_tensor_overhead() * 128 + ggml_graph_overhead(), nullptr, true });
        if (!c) {
            problem_ = "there is no memory";
            return false;
        }
        ggml_cgraph *graph = ggml_new_graph(c);
        declare(c, 2);
        build(c, graph, ggml_new_tensor_2d(c, GGML_TYPE_F32, n_vocab_, 2), ggml_new_tensor_1d(c, GGML_TYPE_I64, 2));
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            if (!ggml_backend_dev_supports_op(device, ggml_graph_node(graph, i))) {
                problem_ = std::string("the device has no operation ") + ggml_op_desc(ggml_graph_node(graph, i));
                break;
            }
        }
        results_ = candidates_ = ranks_ = input_ = nullptr;
        ggml_free(c);
        if (problem_.empty()) {
            return true;
        }
    }
    return false;
}

void GraphSampler::declare(ggml_context *ctx, int64_t n_rows) {
    results_    = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kResultFloats, n_rows);
    candidates_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 2 * k_, n_rows);
    ranks_      = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, k_);
}

void GraphSampler::fill() {
    std::vector<float> ranks(k_);
    for (int i = 0; i < k_; i++) {
        ranks[i] = static_cast<float>(-i);
    }
    ggml_backend_tensor_set(ranks_, ranks.data(), 0, ranks.size() * sizeof(float));
}

void GraphSampler::build(ggml_context *ctx, ggml_cgraph *graph, ggml_tensor *logits, ggml_tensor *index) {
    input_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kRowFloats, logits->ne[1]);
    ggml_set_name(input_, "lp_sampling");
    ggml_set_input(input_);
    // A copy first: ggml's scheduler would copy every view of an input to the device separately.
    const Found found = sample(ctx, logits, ggml_cont(ctx, input_));
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, results_, found.result, index));
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, candidates_, found.candidates, index));
}

void GraphSampler::set_input(const GraphRow *rows) {
    if (!input_ || !input_->buffer) {
        return;
    }
    const size_t n = input_->ne[1];
    if (!rows) {
        defaults_.resize(std::max(defaults_.size(), n));
        rows = defaults_.data();
    }
    ggml_backend_tensor_set(input_, rows, 0, n * sizeof(GraphRow));
}

// The order is llama.cpp's own: top_k, top_p among the tokens that are left, min_p, temperature. Every comparison is strict, as
// `step` is, and each kept set is a prefix of the candidates in their order. Rows without a request and rows with NaN must do
// no harm either: every index is clamped, and every compared value is a number.
GraphSampler::Found GraphSampler::sample(ggml_context *c, ggml_tensor *logits, ggml_tensor *rows) const {
    const int64_t n = logits->ne[1], k = k_;
    const auto    column = [&](ggml_tensor *t, int64_t i) {  // (1, n)
        return ggml_view_2d(c, t, 1, n, t->nb[1], i * sizeof(float));
    };
    ggml_tensor *inverse_temperature = column(rows, 0), *top_k = column(rows, 1), *top_p = column(rows, 2),
                *log_min_p = column(rows, 3), *uniform = column(rows, 4),
                *targets = ggml_view_2d(c, rows, GraphRow::kTargets, n, rows->nb[1], 5 * sizeof(float));

    // The candidates, in the device's own order.
    ggml_tensor *some = sorts_ ? ggml_cont(c, ggml_argsort_top_k(c, logits, k_)) : ggml_top_k(c, logits, k_);
    ggml_tensor *z    = ggml_clamp(c, look_up(c, logits, some), -kLargest, kLargest);
    ggml_tensor *ids  = ggml_cast(c, some, GGML_TYPE_F32);

    // The rank of each candidate: how many have a larger logit, or the same logit and a lower id. All ranks differ, so sorting
    // by them has the same result on every device, and a comparison with NaN cannot lead a sort astray.
    ggml_tensor *before = ggml_step(c, ggml_sub(c, ggml_scale(c, compare(c, z), 2.0f), compare(c, ids)));
    ggml_tensor *order  = ggml_argsort(c, ggml_reshape_2d(c, ggml_sum_rows(c, before), k, n), GGML_SORT_ORDER_ASC);
    z                   = look_up(c, z, order);
    ids                 = look_up(c, ids, order);

    ggml_tensor *top   = ggml_cont(c, column(z, 0));
    ggml_tensor *below = ggml_sub(c, z, top);  // at most 0
    ggml_tensor *shape = ggml_new_tensor_2d(c, GGML_TYPE_F32, k, n);
    ggml_tensor *in_k  = ggml_step(c, ggml_add(c, ggml_repeat(c, ranks_, shape), top_k));
    ggml_tensor *p     = ggml_mul(c, ggml_exp(c, below), in_k);
    p                  = ggml_div(c, p, ggml_sum_rows(c, p));
    ggml_tensor *in_p  = ggml_step(c, ggml_add(c, ggml_sub(c, p, ggml_cumsum(c, p)), top_p));
    ggml_tensor *in_m  = ggml_step(c, ggml_sub(c, below, log_min_p));

    // The draw: the first candidate whose cumulative weight exceeds the uniform share of the sum. Rounding may leave none; then
    // it is the last candidate with a weight, and never one without.
    ggml_tensor *weight = ggml_exp(c, ggml_mul(c, below, inverse_temperature));
    weight              = ggml_mul(c, ggml_mul(c, ggml_mul(c, weight, in_k), in_p), in_m);
    ggml_tensor *sum    = ggml_cumsum(c, weight);
    ggml_tensor *bar    = ggml_mul(c, ggml_cont(c, column(sum, k - 1)), uniform);
    ggml_tensor *kept   = ggml_step(c, weight);
    ggml_tensor *above  = ggml_sum_rows(c, ggml_mul(c, ggml_step(c, ggml_sub(c, sum, bar)), kept));
    above               = ggml_clamp(c, above, 1.0f, static_cast<float>(k));
    ggml_tensor *chosen = ggml_clamp(c, ggml_sub(c, ggml_sum_rows(c, kept), above), 0.0f, static_cast<float>(k - 1));
    chosen              = ggml_cast(c, chosen, GGML_TYPE_I32);

    ggml_tensor *sums    = ggml_sum_rows(c, ggml_exp(c, ggml_sub(c, logits, top)));
    ggml_tensor *log_sum = ggml_add(c, ggml_log(c, sums), top);
    ggml_tensor *wanted =
            ggml_cast(c, ggml_clamp(c, ggml_cont(c, targets), 0.0f, static_cast<float>(n_vocab_ - 1)), GGML_TYPE_I32);
    ggml_tensor *result = look_up(c, ids, chosen);
    for (ggml_tensor *next :
         { ggml_sub(c, look_up(c, z, chosen), log_sum), log_sum, ggml_cont(c, column(ids, 0)), look_up(c, logits, wanted) }) {
        result = ggml_concat(c, result, next, 0);
    }
    return { result, ggml_concat(c, ids, z, 0) };
}

// ---- which draws the graph can make, and with which parameters
bool in_graph(lp_sampler *sampler, GraphRow *row) {
    *row = {};
    if (!sampler->is_plain() || sampler->n_logprobs >= GraphSampler::kMaxCandidates) {
        return false;
    }
    if (sampler->greedy()) {
        return true;
    }
    Kind  last  = Kind::none;
    int   k     = sampler->n_vocab;
    float top_p = 1.0f, min_p = 0.0f, temperature = 1.0f;
    for (const StageInfo &stage : sampler->stages) {
        if (stage.kind <= last || stage.kind == Kind::other) {
            return false;
        }
        last = stage.kind;
        switch (stage.kind) {
            case Kind::top_k: k = std::min(k, static_cast<int>(stage.value)); break;
            case Kind::top_p: top_p = stage.value; break;
            case Kind::min_p: min_p = stage.value; break;
            default: temperature = stage.value;
        }
    }
    // Without a sort, the CPU draws in the order of the vocabulary; the graph always draws in descending order.
    const bool sorted = k < sampler->n_vocab || (k <= GraphSampler::kMaxCandidates && top_p < 1.0f);
    if (!sorted || k > GraphSampler::kMaxCandidates) {
        return false;
    }
    row->inverse_temperature = 1.0f / temperature;
    row->top_k               = static_cast<float>(k);
    if (top_p < 1.0f) {
        row->top_p = std::max(top_p, std::numeric_limits<float>::min());  // the first token stays
    }
    if (min_p > 0.0f) {
        // A logit that equals the bar is kept, but the graph's comparisons are strict: so the bar is one step lower, and not
        // among the numbers that a device may flush to 0.
        row->log_min_p = std::min(std::nextafter(std::log(min_p), -1e9f), -1e-30f);
    }
    row->uniform = std::min(static_cast<float>(sampler->peek()), std::nextafter(1.0f, 0.0f));  // it may round up to 1
    return true;
}

// Logits processors need the full row, and so do stages that need statistics of it or more of its tokens.
bool from_candidates(const lp_sampler *sampler, GraphRow *row) {
    *row = {};
    if (sampler->needs_row || sampler->n_wanted() >= GraphSampler::kMaxCandidates ||
        sampler->n_logprobs >= GraphSampler::kMaxCandidates) {
        return false;
    }
    sampler->raised(row->targets, GraphRow::kTargets);
    return true;
}

}  // namespace lp

static_assert(LP_TARGETS == lp::GraphRow::kTargets);

// Samples all output rows of a graph in one subgraph, whose parameters and random numbers are an input.
//
// Nothing in the subgraph depends on a request, so requests start, end and change their parameters without a new graph. Each
// row yields a few numbers (GraphResult) and its candidates. They are written to the same row of `results` and `candidates`
// that the logits have in the ring.
#pragma once

#include "native.h"

#include <limits>
#include <string>
#include <vector>

namespace lp {

// What the graph reads for an output row, in the order of its input. The defaults sample the most probable token.
struct GraphRow {
    float inverse_temperature = 1.0f;
    float top_k               = 1.0f;
    float top_p               = 2.0f;  // a token is kept if the tokens before it have less mass than this; above 1: all
    float log_min_p           = -std::numeric_limits<float>::max();  // a logit is kept if it is above the largest one plus this
    float uniform             = 0.0f;  // in [0, 1)
    static constexpr int kTargets          = 4;
    float                targets[kTargets] = {};  // tokens whose logits are wanted
};

// What the graph writes for an output row. Tokens are exact, because vocabularies of more than 2^24 are refused.
struct GraphResult {
    float token, logprob;  // sampled, and its log-probability in the whole row at temperature 1
    float log_sum_exp;  // of the row; not finite where a logit is NaN or infinite, and then no other field is valid
    float best;  // the most probable token, the lowest of several
    float target_logits[GraphRow::kTargets];
};

class GraphSampler {
public:
    // Most candidates of a row; smaller vocabularies have fewer.
    static constexpr int kMaxCandidates = 64;

    explicit GraphSampler(int n_vocab);

    // Whether the device supports all operations; else `problem` names one that it does not.
    bool        probe(ggml_backend_dev_t device);
    const char *problem() const { return problem_.empty() ? nullptr : problem_.c_str(); }

    // Adds the tensors that outlive a graph to a context that is about to be allocated. Call `fill` once it is.
    static constexpr int kTensors = 3;
    void                 declare(ggml_context *ctx, int64_t n_rows);
    void                 fill();

    // Adds the subgraph over `logits`, (n_vocab, n); the results go to the rows of `index`.
    void build(ggml_context *ctx, ggml_cgraph *graph, ggml_tensor *logits, ggml_tensor *index);
    void forget() { input_ = nullptr; }
    // Uploads the rows of the graph built last, once for each decode. Null: the defaults.
    void set_input(const GraphRow *rows);

    ggml_tensor *results() const { return results_; }
    // The largest logits of a row in descending order, on ties the lower ids first. Any logits that equal the last one may be
    // missing. First all ids, then all logits (clamped to finite numbers).
    ggml_tensor *candidates() const { return candidates_; }
    int          n_candidates() const { return k_; }

private:
    struct Found {
        ggml_tensor *result, *candidates;
    };
    Found sample(ggml_context *c, ggml_tensor *logits, ggml_tensor *rows) const;

    const int             n_vocab_, k_;
    bool                  sorts_      = false;  // whole rows, because the device has no top-k operation
    ggml_tensor          *results_    = nullptr;  // (a GraphResult, rows)
    ggml_tensor          *candidates_ = nullptr;  // (2 k, rows)
    ggml_tensor          *ranks_      = nullptr;  // 0, -1, -2, ...
    ggml_tensor          *input_      = nullptr;  // of the graph built last
    std::vector<GraphRow> defaults_;
    std::string           problem_;
};

// Whether the next draw of a sampler can be made in the graph, and with which parameters. Changes nothing.
bool in_graph(lp_sampler *sampler, GraphRow *row);

// Whether a row's candidates are likely to suffice for its next draw. If so, sets the tokens as targets that may be raised above
// them.
bool from_candidates(const lp_sampler *sampler, GraphRow *row);

}  // namespace lp

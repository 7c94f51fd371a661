// Stages the logits of each decode in rows of our own, using only public headers of llama.cpp.
//
// A llama_sampler of ours is attached to every sequence when the context is created, and never changed again. When
// llama.cpp builds a graph, our sampler adds one copy of all output rows into `staging`. The destination rows are an input
// of the graph, so they rotate while the graph is reused. llama.cpp then copies no logits itself.
//
// On a CPU nothing is copied at all: the tensor of all output rows gets a place in `staging` as its own memory, and another
// place before each decode.
#pragma once

#include "graph_sampler.hpp"

#include <atomic>
#include <memory>
#include <vector>

namespace lp {

class LogitsStager {
public:
    // `n_rows` rows of `n_vocab` floats, for a context of `n_seq_max` sequences. `samples`: the graph shall sample, too.
    LogitsStager(int n_vocab, int n_seq_max, int64_t n_rows, bool samples);
    ~LogitsStager();
    LogitsStager(const LogitsStager &)            = delete;
    LogitsStager &operator=(const LogitsStager &) = delete;

    // Adds our samplers to the parameters of one context, which this stager must outlive.
    void configure(llama_context_params &params);

    // Whether rows will be staged: there is memory, the device supports the operation, and llama.cpp's graphs have the
    // expected form. Known once the context is created.
    bool        attached() const { return staging_ && supported_ && n_graphs_ > 0 && n_unknown_ == 0; }
    const char *problem() const;

    // The sampling subgraph, or null; then `sampler_problem` says why the graph does not sample.
    const GraphSampler *sampler() const { return attached() ? sampler_.get() : nullptr; }
    const char         *sampler_problem() const;

    // Sets the rows that the next decode writes its outputs to, in the order of its outputs, and what it samples them with
    // (or null). Neither is copied. Throws std::bad_alloc.
    void expect(const int64_t *rows, const GraphRow *parameters, int n);
    // After a decode: whether all its outputs arrived there.
    bool settle();
    // When the last decode's inputs were set, just before it was computed; 0 without outputs.
    int64_t inputs_ns() const { return inputs_ns_; }

    ggml_tensor          *staging() const { return staging_; }
    ggml_backend_buffer_t buffer() const { return buffer_; }
    // In host memory: the first row. Null elsewhere.
    float *host() const { return host_; }

private:
    static LogitsStager          &of(const llama_sampler *sampler) { return *static_cast<LogitsStager *>(sampler->ctx); }
    static const llama_sampler_i &interface();

    bool init(ggml_backend_buffer_type_t buft);
    void apply(ggml_context *ctx, ggml_cgraph *graph, llama_sampler_data *data);
    void set_input();
    void set_place();

    const int     n_vocab_;
    const int     n_seq_max_;
    const int64_t n_rows_;

    std::vector<llama_sampler *>          samplers_;  // by sequence: a chain that holds our sampler
    std::vector<llama_sampler_seq_config> configs_;

    ggml_context         *ctx_       = nullptr;
    ggml_tensor          *staging_   = nullptr;  // with one extra row, for unexpected outputs
    ggml_backend_buffer_t buffer_    = nullptr;
    float                *host_      = nullptr;
    ggml_tensor          *index_     = nullptr;  // of the graph built last: the staging row of each of its outputs
    ggml_tensor          *outputs_   = nullptr;  // or its output rows, where they are computed in place
    bool                  in_place_  = false;   // on a CPU a tensor's memory may change until its graph runs
    bool                  first_     = false;    // no row of the graph that is being built was seen yet
    bool                  supported_ = true;
    // Changed while a step is launched, read by callers.
    std::atomic<int> n_graphs_{ 0 }, n_unknown_{ 0 };

    std::unique_ptr<GraphSampler> sampler_;
    std::string                   sampler_problem_ = "it was not asked for";

    const int64_t       *rows_       = nullptr;
    const GraphRow      *parameters_ = nullptr;
    int                  n_expected_ = 0, n_written_ = 0, n_wrong_ = 0;
    int64_t              inputs_ns_ = 0;
    std::vector<int64_t> astray_;
    std::vector<float>   scattered_;  // for rows computed in place whose destinations are not contiguous, or that are unexpected
    bool                 is_scattered_ = false;
};

}  // namespace lp

// Stages the logits of each decode in rows of our own, with public headers of llama.cpp only.
//
// A llama_sampler of ours is given for every sequence when the context is created and never changed again. When
// llama.cpp builds a graph, it adds one copy of all output rows into `staging`; which rows of it is an input of the
// graph, so the place rotates while the graph is reused. llama.cpp then copies no logits itself.
//
// On the CPU nothing is copied at all: the tensor of all output rows is given its place in `staging` as its own memory, and
// another place before each decode.
#pragma once

#include "graph_sampler.hpp"

#include <memory>
#include <vector>

namespace lp {

class LogitsStager {
public:
    // `n_rows` of `n_vocab` floats, for contexts of `n_seq_max` sequences. `samples`: the graph shall sample, too.
    LogitsStager(int n_vocab, int n_seq_max, int64_t n_rows, bool samples);
    ~LogitsStager();
    LogitsStager(const LogitsStager &) = delete;
    LogitsStager & operator=(const LogitsStager &) = delete;

    // Adds our samplers to the parameters of the one context this collector is for; it must outlive that context.
    void configure(llama_context_params & params);

    // Whether rows will be staged: there is memory, the device knows the operation, and llama.cpp's graphs have the form
    // that is expected here. To be asked after the context was created.
    bool attached() const { return staging_ && supported_ && n_graphs_ > 0 && n_unknown_ == 0; }
    const char * problem() const;

    // Whether the graph samples; null if it does, else why it does not.
    const GraphSampler * sampler() const { return attached() ? sampler_.get() : nullptr; }
    const char * sampler_problem() const;

    // The rows where the next decode shall put its outputs, in the order of its outputs, and what it samples them with (or
    // null). Not copied. Throws std::bad_alloc.
    void expect(const int64_t * rows, const GraphRow * parameters, int n);
    // After a decode: whether it has put all its outputs there.
    bool settle();
    // When the last decode's inputs were set, which is just before it computes; 0 without outputs.
    int64_t inputs_ns() const { return inputs_ns_; }

    ggml_tensor *         staging() const { return staging_; }
    ggml_backend_buffer_t buffer() const { return buffer_; }
    // In host memory: the first row. Null elsewhere.
    float * host() const { return host_; }

private:
    static LogitsStager & of(const llama_sampler * sampler) { return *(LogitsStager *) sampler->ctx; }
    static const llama_sampler_i & interface();

    bool init(ggml_backend_buffer_type_t buft);
    void apply(ggml_context * ctx, ggml_cgraph * graph, llama_sampler_data * data);
    void set_input();
    void set_place();

    const int     n_vocab_;
    const int     n_seq_max_;
    const int64_t n_rows_;

    std::vector<llama_sampler *>          samplers_;  // chains of one sampler of ours, by sequence
    std::vector<llama_sampler_seq_config> configs_;

    ggml_context *        ctx_     = nullptr;
    ggml_tensor *         staging_ = nullptr;  // one row more than asked for: where unexpected outputs go
    ggml_backend_buffer_t buffer_  = nullptr;
    float *               host_    = nullptr;
    ggml_tensor *         index_   = nullptr;  // of the graph built last: the staging row of each of its outputs
    ggml_tensor *         outputs_ = nullptr;  // or its output rows themselves, where they are computed in place
    bool                  in_place_ = false;   // a CPU computes, so a tensor's memory is known when a graph runs, not before
    bool                  first_   = false;    // no row of the graph being built was seen yet
    bool                  supported_ = true;
    int                   n_graphs_ = 0, n_unknown_ = 0;

    std::unique_ptr<GraphSampler> sampler_;
    std::string                   sampler_problem_ = "it was not asked for";

    const int64_t *      rows_ = nullptr;
    const GraphRow *     parameters_ = nullptr;
    int                  n_expected_ = 0, n_written_ = 0, n_wrong_ = 0;
    int64_t              inputs_ns_ = 0;
    std::vector<int64_t> astray_;
    std::vector<float>   scattered_;  // rows computed in place that do not lie side by side in the end, or are unexpected
    bool                 is_scattered_ = false;
};

}  // namespace lp

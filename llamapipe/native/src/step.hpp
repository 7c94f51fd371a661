// One step: a batch, how it is cut into decodes, and where its output rows are.
#pragma once

#include "graph_sampler.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lp {

// How llama.cpp cuts a batch into ubatches; each becomes one llama_decode of ours, so that its rows can be told apart.
struct Shape {
    int  n_ubatch;
    int  n_rows;    // most output rows of a decode
    bool streams;   // ubatches hold equally long parts of consecutive sequences
};

// A run of entries that is one llama_decode.
struct Part {
    int first, n;                 // in the order of llama.cpp
    int first_output, n_outputs;  // in that order, too
};

// Memory that rows were copied to: plain, or pinned where the device has such memory.
struct HostRows {
    const size_t          n_floats;
    float *               data   = nullptr;
    ggml_backend_buffer_t pinned = nullptr;
    std::unique_ptr<float[]> plain;

    // Throws std::bad_alloc. `buft` may be null.
    HostRows(size_t n_floats, ggml_backend_buffer_type_t buft);
    ~HostRows();
    HostRows(const HostRows &) = delete;
    HostRows & operator=(const HostRows &) = delete;
};

enum class State { queued, running, launched, done, failed };

// When the stages of a step began and ended; nanoseconds of now_ns().
struct Stamps {
    int64_t launch = 0, inputs = 0, launched = 0;
};

struct Step {
    int64_t number   = -1;  // until launched
    int     n_tokens = 0, n_outputs = 0;

    // Entries in the order of llama.cpp; `order` has their places in the batch.
    std::vector<int32_t> tokens, positions, seq_ids, order;
    std::vector<int8_t>  outputs;
    std::vector<Part>    parts;
    std::vector<int32_t> output_of_entry;  // by place in the batch: which output it is, or -1
    std::vector<int32_t> places;           // by output in llama.cpp's order: which output of the batch it is
    std::vector<int64_t> rows;             // scratch: the staging rows of a decode

    // By output of the batch, if the graph samples: with what, and what for. Empty: it samples nothing of this step.
    enum Wish : char { token = 1, target = 2, candidates = 4, row = 8 };
    std::vector<GraphRow> graph;
    std::vector<char>     wishes;
    std::vector<GraphRow> parameters;          // scratch: those of a decode
    bool                  needs_rows = true;   // a whole row is wanted at once; others come to the host when asked for
    bool                  needs_all  = true;   // all of them are
    bool                  needs_candidates = false;

    // Under the pipeline's lock, or of the one thread that drives it.
    State       state     = State::queued;
    int         code      = 0;  // of a failed step: llama_decode's, or LP_ERROR...
    std::string error;
    int         slot      = -1;     // of the ring, while its rows are there
    bool        released  = false;  // nobody will read it
    bool        wanted    = false;  // somebody waits for it or asks whether it is ready
    bool        computed  = false;  // known to be, without events
    bool        pending   = false;  // counts against the depth
    bool        fetching  = false;  // its rows are on their way to the host, without events
    bool        observed  = false;  // its failure is known to whoever submitted it, or to nobody ever
    bool        moving    = false;  // its rows are being copied out of the ring
    int         n_exposed = 0;      // readers that have its slot's memory in their hands
    int         n_left    = 0;      // copies under way or to come
    const float * data    = nullptr;     // the rows, (n_outputs, n_vocab), once done
    std::shared_ptr<HostRows> host;      // where `data` is, if not in the ring
    std::shared_ptr<HostRows> results;   // a GraphResult for each output, once done, if the graph samples
    std::shared_ptr<HostRows> found;     // and its candidates, if any are wanted
    std::vector<char>         fetched;   // without `data`: which rows of `host` are there
    Stamps      stamps;

    // Takes a batch and cuts it. Throws std::bad_alloc.
    void clear();
    void set(int n, const int32_t * tokens, const int32_t * positions, const int32_t * seq_ids, const int8_t * outputs,
             const Shape & shape);
    // The same entries, each one position further with the token sampled from its row; all entries must be outputs.
    void advance(const Step & last, const int32_t * sampled);
    // What the graph shall do for each output, and what of it shall come to the host at once; samplers and targets may be
    // null. `stays`: whole rows can be had later. Throws std::bad_alloc.
    void wish(lp_sampler ** samplers, const int32_t * targets, int n_top, int n_vocab, bool stays);
    bool wants(int output, Wish wish) const { return wishes.empty() ? wish == row : (wishes[(size_t) output] & wish) != 0; }
    const GraphResult & result(int output) const { return ((const GraphResult *) results->data)[output]; }

private:
    void cut_runs(const Shape & shape);
    void cut_streams(const int32_t * seq_ids, const int8_t * outputs, const Shape & shape);
};

}  // namespace lp

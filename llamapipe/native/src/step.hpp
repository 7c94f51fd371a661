// One step: a batch, the ubatches it is cut into, and where its output rows are.
#pragma once

#include "graph_sampler.hpp"
#include "host_memory.hpp"
#include "ubatches.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lp {

// A batch as callers pass it: arrays with one element for each entry.
struct BatchArrays {
    int             n;
    const int32_t * tokens, * positions, * seq_ids;
    const int8_t *  outputs;
};

enum class State { queued, running, launched, done, failed };

// When the stages of a launch began and ended; nanoseconds of now_ns().
struct Stamps {
    int64_t launch = 0, inputs = 0, launched = 0;
};

struct Step {
    int64_t number   = -1;  // until launched
    int     n_tokens = 0, n_outputs = 0;

    // ---- the batch. Entries are in llama.cpp's order; `order` has their places in the caller's batch.
    std::vector<int32_t> tokens, positions, seq_ids, order;
    std::vector<int8_t>  outputs;
    std::vector<Ubatch>  ubatches;
    std::vector<int32_t> output_of_entry;  // by place in the caller's batch: its output, or -1
    std::vector<int32_t> places;           // by output in llama.cpp's order: which output of the caller's batch it is
    std::vector<int64_t> rows;             // scratch: the staging rows of a decode

    // ---- graph sampling, by output of the caller's batch; empty where the graph samples nothing of this step.
    enum Wanted : char { token = 1, target = 2, candidates = 4, row = 8 };
    std::vector<GraphRow> graph;       // what each output is sampled with
    std::vector<char>     wanted;      // the Wanted flags of each output
    std::vector<GraphRow> parameters;  // scratch: those of a decode
    bool                  needs_rows       = true;  // at least one whole row is copied to the host without being asked for
    bool                  needs_all        = true;  // all of them are
    bool                  needs_candidates = false;

    // ---- progress. Guarded by the pipeline's lock, or owned by the one thread that drives the pipeline.
    State       state      = State::queued;
    int         code       = 0;      // of a failed step: llama_decode's, or LP_ERROR...
    std::string error;
    int         slot       = -1;     // in the ring, while its rows are there
    int         n_exposed  = 0;      // readers that hold a pointer into its slot
    int         n_left     = 0;      // copies in flight, plus the launch itself
    bool        released   = false;  // no reader will ask for it again
    bool        awaited    = false;  // a thread waits for it, or asked whether it is ready
    bool        computed   = false;  // known to be computed (modes without events)
    bool        pending    = false;  // counts against the depth
    bool        fetching   = false;  // its rows are being copied to the host (modes without events)
    bool        moving     = false;  // its rows are being copied out of the ring
    bool        observed   = false;  // its failure is known to its submitter, or was released unseen
    const float * data     = nullptr;         // the rows, (n_outputs, n_vocab), once done
    std::shared_ptr<HostBuffer> host;         // owns `data`, unless that is in the ring
    std::shared_ptr<HostBuffer> results;      // with graph sampling: a GraphResult for each output, once done
    std::shared_ptr<HostBuffer> top;          // with graph sampling: the candidates of each output, if any are wanted
    std::vector<char>           fetched;      // where `data` is null: which rows of `host` are there
    Stamps      stamps;

    void clear();
    // Copies a batch and cuts it. Throws std::bad_alloc.
    void set(const BatchArrays & batch, const UbatchLimits & limits);
    // The entries of the last step, each one position further and with the token sampled from its row. All entries must be
    // outputs.
    void advance(const Step & last, const int32_t * sampled);
    // Decides for each output whether the graph samples it, and what of it is copied to the host at once. `samplers` and
    // `targets` may be null. `stays`: whole rows stay in the ring and can be fetched later. Throws std::bad_alloc.
    void choose_wanted(lp_sampler ** samplers, const int32_t * targets, int n_top, int n_vocab, bool stays);

    bool wants(int output, Wanted what) const {
        return wanted.empty() ? what == row : (wanted[(size_t) output] & what) != 0;
    }
    const GraphResult & result(int output) const { return ((const GraphResult *) results->data)[output]; }
    bool is_final() const { return state == State::done || state == State::failed; }
    int  n_outputs_of(int ubatch) const { return ubatch < 0 ? n_outputs : ubatches[(size_t) ubatch].n_outputs; }
};

}  // namespace lp

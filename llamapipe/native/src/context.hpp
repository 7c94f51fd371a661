// The owner of a llama_context, its logits stager and its compute threads.
//
// llama.cpp calls the stager while it builds and computes graphs, and computes on the threads. So both end after the
// llama_context does, in whichever order callers let go of their handles.
#pragma once

#include "compute_threads.hpp"
#include "hidden_states.hpp"
#include "logits_stager.hpp"
#include "native.h"
#include "row_adapters.hpp"
#include "shared_cells.hpp"
#include "step.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lp {

// ---- the KV cells of a sequence, copied to host memory and back
struct SavedCells {
    std::unique_ptr<uint8_t[]> bytes;  // in llama.cpp's format
    size_t                     size = 0, capacity = 0;

    // Makes room for `n` bytes, which are not initialised. Throws std::bad_alloc.
    void resize(size_t n);
};

// These wait for the device. Not while a graph is computed on another thread.

// A sequence's memory has two parts: cells, of which the first `n` can be kept, and a state that belongs to the end of
// the sequence alone: recurrent states, and the cells of layers with a sliding window.
enum class Part { all, state };

// Copies a sequence to `to`. 1 done; 0 if it takes more than `max_bytes` (negative: no limit) or cannot be read.
int save_cells(llama_context *ctx, int seq_id, int64_t max_bytes, Part part, SavedCells &to);
// Lets a sequence end after its first `n` positions. `cells` replace those that it has, and `state`, which was saved at
// position `n`, replaces its state; null: neither. 1 done; 0 refused, because its memory lacks what position `n` needs:
// the sequence is empty then, or as it was if neither was given.
int load_cells(llama_context *ctx, int seq_id, int n, const SavedCells *cells, const SavedCells *state);

// ---- the backend that computes a context's graphs on a device
ggml_backend_t compute_backend(llama_context *ctx, ggml_backend_dev_t device);  // null when there is none

size_t scratch_bytes(llama_context *ctx);  // of the buffers that graphs are computed in, on all devices

class Context {
public:
    struct Options {
        int     poll;         // how eagerly idle compute threads spin for the next graph, 0 to 100
        int64_t n_ring_rows;  // rows to stage logits in; 0: none
        bool    samples;      // with a ring: the graph shall sample, too
        bool    attends;      // attention is computed by llamapipe's kernels where they can
        bool    multiplies;   // and so are products of floats
    };

    // Where rows cannot be staged, the context is made without a stager. Throws std::runtime_error.
    Context(llama_model *model, const llama_context_params &params, const Options &options);

    ~Context();

    llama_context                       *llama() const { return llama_.get(); }
    const std::shared_ptr<LogitsStager> &stager() const { return stager_; }  // null: rows stay in llama.cpp's own buffer
    ComputeThreads                      &threads() { return *threads_; }

    // Why rows are not staged although a ring was asked for; null if they are, or none was.
    const char *staging_problem() const { return staging_problem_.empty() ? nullptr : staging_problem_.c_str(); }

    // llama_decode of entries that are in llama.cpp's order: its code. One thread at a time. Where ggml has no memory left for
    // a graph, it throws, then and from then on.
    int decode(const BatchArrays &batch);

    // What the decodes after it compute with. Waits for the device: what was set before may be freed then.
    int set_adapters(const lp_adapter_set &set);

    // Whether sequences can have adapters of their own: all is computed on the CPU, with our kernels where they can.
    bool mixes_adapters() const;

    // Cells that attention did not read for each of the sequences that have them, in all layers.
    int64_t n_spared() const { return shares_ ? shares_->n_spared : 0; }

    // The adapter of a sequence's rows, or none, in the decodes after it, if the context computes with a carrier.
    int assign_adapters(int seq_id, const lp_adapter_set &set);

    // Operations on cells, after which the states that are kept are those of the cells.
    int apply(const MemoryOp &op);
    int load(int seq_id, int n, const SavedCells *cells, const SavedCells *state);
    int copy(int from, int to, int n, SavedCells &scratch, const SavedCells *state);

    // Keeps states of the tokens that are decoded from now on, of the last `n_most` of each sequence (see HiddenStates).
    void keep_states(int n_most, const std::vector<int32_t> &layers) {
        states_ = std::make_unique<HiddenStates>(llama_.get(), n_most, layers);
    }
    const HiddenStates *states() const { return states_.get(); }  // null: none are kept

    // `decode` for a context of drafting layers, which take a token and the state of the one before it. That is the state
    // of `before[i]`, an output of this context's last batch, or (-1) the one that `target` has kept, which a model with an
    // encoder (EAGLE-3) encodes first. Such a model needs an output of each entry, or none: its graph computes all rows, and
    // llama.cpp takes the first ones for those of the outputs.
    int draft(const BatchArrays &batch, const int32_t *before, const HiddenStates &target);

    // Computes cells from the states that `target` has kept of these positions, for a draft whose cells are the model's
    // (DFlash). llama_decode's code.
    int inject(int n, const int32_t *positions, const int32_t *seq_ids, const HiddenStates &target);

    // The most probable token of an output of the last batch, or -1, and its probability.
    int best(int entry, float *share) const;

private:
    struct Free {
        void operator()(llama_context *ctx) const { llama_free(ctx); }
        void operator()(llama_batch_ext *batch) const { llama_batch_ext_free(batch); }
    };

    int decode(const BatchArrays &batch, const std::vector<const float *> &states);
    int decode_rows(const BatchArrays &batch, const std::vector<const float *> &states = {});
    // Encodes states of `width` numbers, some at a time. `out`: a state of the model's own for each. llama_process' code.
    int encode(const std::vector<const float *> &states, size_t width, float *out);
    // Computes on the context's threads, with our kernels. `mixed`: the batch whose rows may have adapters of their own.
    template <typename Body> int compute(const BatchArrays *mixed, Body &&body);

    std::unique_ptr<lp::kernels::SharedCells> shares_;  // null: sequences share one range of cells

    lp::kernels::RowAdapters               row_adapters_;
    std::vector<std::string>               changed_matrices_;  // by the carrier
    std::shared_ptr<LogitsStager>          stager_;
    std::unique_ptr<ComputeThreads>        threads_;
    std::string                            staging_problem_;
    std::vector<int32_t>                   n_seq_id_;  // scratch of `decode`
    std::vector<llama_seq_id *>            seq_id_;
    const bool                             attends_, multiplies_;
    bool                                   is_broken_ = false, has_control_ = false;
    bool                                   reserves_ = false;  // the next decode does: the adapters were changed
    std::unique_ptr<HiddenStates>          states_;
    bool                                   gives_states_ = false;
    int                                    n_encoded_    = 1;    // most states that are encoded at a time
    std::vector<float>                     own_states_, encoded_;  // scratch of `draft`
    std::unique_ptr<llama_batch_ext, Free> rows_;        // scratch of `decode_rows`
    std::unique_ptr<llama_context, Free>   llama_;     // the last member, so the first to end
};

}  // namespace lp

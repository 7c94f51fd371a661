// One step: a batch, the ubatches it is cut into, and where its output rows are.
#pragma once

#include "graph_sampler.hpp"
#include "native.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace lp {

// ---- how llama.cpp cuts a batch into ubatches. Each becomes one llama_decode of ours, so that its rows can be told apart
struct UbatchLimits {
    int  n_ubatch;
    int  n_rows;      // most output rows of a decode
    bool kv_streams;  // each sequence has KV cells of its own: a ubatch holds equally long parts of consecutive sequences
};

// A run of entries that is one llama_decode.
struct Ubatch {
    int first, n;                 // entries, in llama.cpp's order
    int first_output, n_outputs;  // outputs, in llama.cpp's order
};

// Cuts a batch of `n` entries. `order` gets the entries' places in the batch in llama.cpp's order. Throws std::bad_alloc.
void cut_into_ubatches(int n, const int32_t *seq_ids, const int8_t *outputs, const UbatchLimits &limits,
                       std::vector<int32_t> &order, std::vector<Ubatch> &ubatches);

// ---- host memory that output rows are copied to
// Plain memory, or pinned memory where the device has it.
struct HostBuffer {
    const size_t             n_floats;
    float                   *data   = nullptr;
    ggml_backend_buffer_t    pinned = nullptr;
    std::unique_ptr<float[]> plain;

    // `pinned_type` may be null. Throws std::bad_alloc.
    HostBuffer(size_t n, ggml_backend_buffer_type_t pinned_type);
    ~HostBuffer();
    HostBuffer(const HostBuffer &)            = delete;
    HostBuffer &operator=(const HostBuffer &) = delete;
};

// Hands out host buffers. Pinned memory is slow to allocate, so a few buffers are kept for the next steps. Any thread.
class HostMemoryPool {
public:
    HostMemoryPool(ggml_backend_buffer_type_t pinned_type, size_t n_kept) : pinned_type_(pinned_type), n_kept_(n_kept) {}

    // A buffer of at least `n_floats`. It returns to the pool when the last reference to it goes. Throws std::bad_alloc.
    std::shared_ptr<HostBuffer> take(size_t n_floats);

private:
    const ggml_backend_buffer_type_t         pinned_type_;
    const size_t                             n_kept_;
    std::mutex                               mutex_;
    std::vector<std::shared_ptr<HostBuffer>> kept_;
};

// A batch as callers pass it: arrays with one element for each entry.
struct BatchArrays {
    int                 n;
    const int32_t      *tokens, *positions, *seq_ids;
    const int8_t       *outputs;
    const float *const *embeddings = nullptr;  // input rows; null for entries that are tokens, or for all
    const int32_t      *grid       = nullptr;  // two for each entry: its height and width, -1 if they are its position
    bool                is_causal  = true;     // else all entries of a sequence see each other
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
    std::vector<int32_t>       tokens, positions, seq_ids, order;
    std::vector<int8_t>        outputs;
    std::vector<const float *> embeddings;  // empty: all entries are tokens
    std::vector<int32_t>       grid;              // empty: no entry has a height and a width
    bool                       is_causal = true;
    std::vector<Ubatch>        ubatches;
    std::vector<int32_t>       output_of_entry;  // by place in the caller's batch: its output, or -1
    std::vector<int32_t>       places;           // by output in llama.cpp's order: which output of the caller's batch it is
    std::vector<int64_t>       rows;             // scratch: the staging rows of a decode

    // ---- graph sampling, by output of the caller's batch; empty where the graph samples nothing of this step.
    enum Wanted : char { token = 1, target = 2, candidates = 4, row = 8 };
    std::vector<GraphRow> graph;       // what each output is sampled with
    std::vector<char>     wanted;      // the Wanted flags of each output
    std::vector<GraphRow> parameters;  // scratch: those of a decode
    bool                  needs_rows       = true;  // at least one whole row is copied to the host without being asked for
    bool                  needs_all        = true;  // all of them are
    bool                  needs_candidates = false;

    // ---- progress. Guarded by the pipeline's lock, or owned by the one thread that drives the pipeline.
    State                       state = State::queued;
    int                         code  = 0;      // of a failed step: llama_decode's, or LP_ERROR...
    std::string                 error;
    int                         slot      = -1;     // in the ring, while its rows are there
    int                         n_exposed = 0;      // readers that hold a pointer into its slot
    int                         n_left    = 0;      // copies in flight, plus the launch itself
    bool                        released  = false;  // no reader will ask for it again
    bool                        awaited   = false;  // a thread waits for it, or asked whether it is ready
    bool                        computed  = false;  // known to be computed (modes without events)
    bool                        pending   = false;  // counts against the depth
    bool                        fetching  = false;  // its rows are being copied to the host (modes without events)
    bool                        moving    = false;  // its rows are being copied out of the ring
    bool                        observed  = false;  // its failure is known to its submitter, or was released unseen
    const float                *data      = nullptr;         // the rows, (n_outputs, n_vocab), once done
    std::shared_ptr<HostBuffer> host;         // owns `data`, unless that is in the ring
    std::shared_ptr<HostBuffer> results;      // with graph sampling: a GraphResult for each output, once done
    std::shared_ptr<HostBuffer> top;          // with graph sampling: the candidates of each output, if any are wanted
    std::vector<char>           fetched;      // where `data` is null: which rows of `host` are there
    Stamps                      stamps;

    void clear();
    // Copies a batch and cuts it. Throws std::bad_alloc.
    void set(const BatchArrays &batch, const UbatchLimits &limits);
    // The entries of the last step, each one position further and with the token sampled from its row. All entries must be
    // outputs.
    void advance(const Step &last, const int32_t *sampled);
    // Decides for each output whether the graph samples it, and what of it is copied to the host at once. `samplers` and
    // `targets` may be null. `stays`: whole rows stay in the ring and can be fetched later. Throws std::bad_alloc.
    void choose_wanted(lp_sampler **samplers, const int32_t *targets, int n_top, int n_vocab, bool stays);

    bool wants(int output, Wanted what) const { return wanted.empty() ? what == row : (wanted[output] & what) != 0; }
    const GraphResult &result(int output) const { return reinterpret_cast<const GraphResult *>(results->data)[output]; }
    bool               is_final() const { return state == State::done || state == State::failed; }
    int                n_outputs_of(int ubatch) const { return ubatch < 0 ? n_outputs : ubatches[ubatch].n_outputs; }
};

// ---- an operation on the KV cells of sequences, between steps
// `p0` and `p1` are positions, `p1` exclusive and negative for the end.
struct MemoryOp {
    lp_memory_op op;
    int          seq_id, other, p0, p1, delta;
};

// Changes llama.cpp's memory; not while a graph is computed. 1 done, 0 refused, LP_ERROR.
int apply_memory_op(llama_context *ctx, const MemoryOp &op);

// Sets of positions as ascending ranges that do not touch.
class PositionRanges {
public:
    // The position that follows the last one.
    int64_t next() const { return ranges_.empty() ? 0 : ranges_.back().second; }

    void append(int64_t position);
    // Removes [p0, p1); everything from p0 on for a negative p1.
    void remove(int64_t p0, int64_t p1);
    // Takes [p0, p1) of another sequence: in addition to its own positions, or instead of them.
    void copy(const PositionRanges &from, int64_t p0, int64_t p1, bool replaces);
    // Adds `delta` to the positions in [p0, p1); those that become negative are removed.
    void shift(int64_t p0, int64_t p1, int64_t delta);
    // For what a step adds, so that `append` cannot fail: it may begin after a gap, and an image leaves another one.
    void make_room() { ranges_.reserve(ranges_.size() + 2); }
    // All positions from `first` to before `end`.
    void set(int64_t first, int64_t end);

private:
    using Range = std::pair<int64_t, int64_t>;  // from, to before
    void join();

    std::vector<Range> ranges_;
};

// The positions that each sequence holds: the one place that knows them.
//
// A pipeline accepts steps and memory operations long before llama.cpp executes them, and llama.cpp must not be asked
// while it computes. So positions are tracked here, as of the end of the queue. llama.cpp's own memory is consulted in
// only two cases, both after a failed step: `matches_memory` before a step is launched, and `reread`, when nothing is
// queued and the failure is known to its submitter.
//
// The rows of an image with a grid share one position, and what follows continues further on. Once there was one, a step may
// leave a gap, or begin at the last position.
//
// Not thread-safe: the pipeline calls it with its lock held.
class SequencePositions {
public:
    explicit SequencePositions(llama_context *ctx);

    // The next position of a sequence once everything queued is done.
    int64_t next(int seq_id) const { return ranges_[seq_id].next(); }

    // Adds a step's tokens. False, with an error message and nothing changed, if they would leave gaps.
    bool append(const Step &step);
    // Adds the effect of an operation. False, with an error message and nothing changed, if it cannot be done.
    bool apply(const MemoryOp &op);

    // A sequence has the positions from 0 to before `n`, in cells of its own.
    void set(int seq_id, int n);

    // Whether each of the step's sequences continues where llama.cpp's memory ends. Not while a graph is computed.
    bool matches_memory(const Step &step) const;
    // Reads all positions from llama.cpp's memory. Not while a graph is computed.
    void reread();

private:
    void separate(size_t seq_id);
    // Whether entry i of a step may follow the positions that end before `next`.
    bool follows(const Step &step, size_t i, int64_t next) const;

    llama_context *const           ctx_;
    bool                           copy_replaces_;  // a copy replaces the positions of its destination
    bool                           has_grids_ = false;  // a step had a grid
    std::vector<PositionRanges>    ranges_;         // by sequence
    std::vector<std::vector<char>> shares_;         // which sequences may have cells in common
};

}  // namespace lp

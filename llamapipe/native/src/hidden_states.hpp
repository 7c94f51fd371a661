// The states that drafting layers read, of each token as long as its cell is kept: the last hidden state (MTP), or the
// inputs of some layers (EAGLE-3).
//
// llama.cpp gives them out through llama-ext.h, which promises nothing: hidden_states.cpp is the only file that uses it.
#pragma once

#include "native.h"
#include "step.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lp {

// Why this llama.cpp does not give out hidden states; null if it does.
const char *states_problem();

// The states of the last tokens of each sequence of a context. They follow its cells: what removes, replaces or copies
// cells does the same here, so a state always belongs to the cell of its position. Not thread-safe.
class HiddenStates {
public:
    // Asks `llama` for the state of each token: the inputs of `layers`, one after the other, or without any its last hidden
    // state. `n_most`: of a sequence; up to twice as many are kept. llama.cpp ends the process if the graph of its
    // architecture does not give out these inputs.
    HiddenStates(llama_context *llama, int n_most, const std::vector<int32_t> &layers);

    int width() const { return width_; }

    // Takes the states of the batch that was decoded last. Waits for it.
    void take(const BatchArrays &batch);

    void follow(const MemoryOp &op);
    void cut(int seq_id, int end);  // keeps those before a position
    void copy(int from, int to, int end);

    // The positions that a sequence has states of: from `begin` to before `end`.
    int          begin(int seq_id) const { return sequences_[seq_id].begin; }
    int          end(int seq_id) const;
    const float *of(int seq_id, int position) const;  // null: not kept

private:
    struct Sequence {
        int                begin = 0;
        std::vector<float> rows;
    };

    void put(int seq_id, int position, const std::vector<const float *> &parts, size_t i);

    llama_context        *llama_;
    std::vector<int32_t>  layers_;
    int                   n_embd_, width_, n_most_;  // of one layer, of all
    std::vector<Sequence> sequences_;
};

// Lets a context of drafting layers give out its own states.
void give_out_states(llama_context *llama);
// The states of all entries that it computed last, or of its outputs; null if it has none.
const float *given_states(llama_context *llama);
// The state of an output of its last batch; null if it had none.
const float *given_state(llama_context *llama, int entry);

}  // namespace lp

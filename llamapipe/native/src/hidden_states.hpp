// The states that a model's drafting layers (MTP) read: the last hidden state of each token, as long as its cell is kept.
//
// llama.cpp gives them out through llama-ext.h, which promises nothing: hidden_states.cpp is the only file that uses it.
#pragma once

#include "native.h"
#include "step.hpp"

#include <cstddef>
#include <vector>

namespace lp {

// Why this llama.cpp does not give out hidden states; null if it does.
const char * states_problem();

// The states of the last tokens of each sequence of a context. They follow its cells: what removes, replaces or copies
// cells does the same here, so a state always belongs to the cell of its position. Not thread-safe.
class HiddenStates {
public:
    // Asks `llama` for the state of each token. `n_most`: of a sequence; up to twice as many are kept.
    HiddenStates(llama_context * llama, int n_most);

    int width() const { return width_; }

    // Takes the states of the batch that was decoded last. Waits for it.
    void take(const BatchArrays & batch);

    void follow(const MemoryOp & op);
    void cut(int seq_id, int end);  // keeps those before a position
    void copy(int from, int to, int end);

    // The positions that a sequence has states of: from `begin` to before `end`.
    int           begin(int seq_id) const { return sequences_[(size_t) seq_id].begin; }
    int           end(int seq_id) const;
    const float * of(int seq_id, int position) const;  // null: not kept

private:
    struct Sequence {
        int                begin = 0;
        std::vector<float> rows;
    };

    void put(int seq_id, int position, const float * row);

    llama_context *       llama_;
    int                   width_, n_most_;
    std::vector<Sequence> sequences_;
};

// Lets a context of drafting layers give out its own states.
void give_out_states(llama_context * llama);
// The state of an entry of its last batch; null if it had none.
const float * given_state(llama_context * llama, int entry);

}  // namespace lp

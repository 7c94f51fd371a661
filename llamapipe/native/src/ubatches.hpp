// How llama.cpp cuts a batch into ubatches. Each becomes one llama_decode of ours, so that its rows can be told apart.
#pragma once

#include <cstdint>
#include <vector>

namespace lp {

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
void cut_into_ubatches(int n, const int32_t * seq_ids, const int8_t * outputs, const UbatchLimits & limits,
                       std::vector<int32_t> & order, std::vector<Ubatch> & ubatches);

}  // namespace lp

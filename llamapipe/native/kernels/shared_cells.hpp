// Cells that are the same in the ranges of several sequences. Open this file for why attention may read one of the copies.
//
// With a range of cells for each sequence, requests that begin with the same tokens have copies of the same keys and values.
// Attention reads them once for all of these requests if it knows that they are the same. Nobody says so: it compares bytes,
// when a sequence comes beside others and then as they grow. What was compared counts until a cell is written to again. Graphs
// write with SET_ROWS, which is watched (`written`); of what is written between graphs, the context tells (`changed`).
// So requests may have their tokens from anywhere: a copied prefix, a loaded one, or the same prompt computed twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_tensor;

namespace lp::kernels {

// Whether an operation writes the keys of cells in a cache of llama.cpp's.
bool is_write_of_keys(const ggml_tensor *op);

// One thread at a time. Nothing is allocated after the constructor: graphs are computed where nothing may throw.
class SharedCells {
public:
    // For sequences 0 .. n_sequences - 1 of a cache with that many layers; in more layers, nothing is shared.
    SharedCells(int n_sequences, int n_layers);

    // Between graphs: the cells of a sequence were loaded, copied or rotated.
    void changed(int sequence);

    // By a graph: the rows of `is_write_of_keys`.
    void written(const ggml_tensor *op);

    // The keys and values of a layer, and those of n sequences, from `first` on, that attention is computed for.
    struct Range {
        const void *layer;   // where the keys of all sequences are
        const char *keys;    // of the first sequence
        const char *values;
        size_t      key_bytes, value_bytes;    // of a cell
        size_t      key_stride, value_stride;  // of a sequence
        int         first, n;
    };

    // Which earlier sequence of a range has the most first cells in common with one: `parent`, a place in the range, or -1, and
    // how many these are.
    struct Link {
        int     parent;
        int64_t n;
    };

    // Writes the links, of cells that the rows see: `n_seen`, from the first one on, of each sequence.
    void find(const Range &range, const int64_t *n_seen, Link *links);

    // The first cells that two sequences of a range have in common, as far as is known and seen.
    static int64_t common(const Link *links, int a, int b);

    int64_t n_spared = 0;  // cells that attention did not read again, in all layers

private:
    struct Sequence {
        int      parent  = -1;  // another sequence, whose first n cells are the same
        int64_t  n       = 0;
        bool     differs = false;                 // cell n does
        uint64_t version = 0, parent_version = 0;  // when they were compared
        int64_t  written = INT64_MAX;             // the first of its cells that was written to since
    };
    struct Layer {
        const void           *key   = nullptr;
        int                   first = 0, n = 0;  // of the last range, and when that was
        uint64_t              n_changes = 0;
        std::vector<Sequence> sequences;
    };

    std::vector<Layer>    layers_;
    std::vector<uint64_t> versions_;  // of each sequence
    uint64_t              n_changes_ = 1;
};

}  // namespace lp::kernels

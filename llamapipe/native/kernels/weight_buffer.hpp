// Brings our kernels into ggml's CPU backend, as a type of weight buffers. Open this file for what a load may ask for.
#pragma once

#include "ggml.h"

#include <cstdint>

namespace lp::kernels {

// Puts our buffer type at the head of the list that llama.cpp asks for the CPU's weights; before the first model is loaded.
// It stays until the process ends. Returns null, or why ggml's kernels are used for everything. Any thread; may throw.
const char *install();

// The CPU level of the kernels, such as "avx2"; null where ggml's are used for everything.
const char *level();

// Whether this level has attention and linear layers, too.
bool attends();

// Whether a matrix of weights would be packed.
bool have(ggml_type type, int64_t n_columns, int64_t n_rows);

// Packed weights in a file: those of one buffer, in its order.
struct PackedFile {
    int      fd     = -1;  // negative: there is no file
    int64_t  offset = 0, n_bytes = 0;
    uint64_t layout = 0;  // which tensors these are, and in which form
};

// What the models that a thread loads shall pack, and what they have packed.
struct Packing {
    int        n_threads = 1;
    PackedFile file;  // is mapped instead, if its weights are the ones that would be packed
    int        n_tensors = 0;
    int64_t    n_bytes   = 0;  // of packed weights
    // Their buffer. Of several, which no model has so far, it is the first; only that one can be in a file.
    void    *data       = nullptr;
    int64_t  n_data     = 0;
    uint64_t layout     = 0;
    bool     is_mapped  = false;
    bool     has_buffer = false;
};

// Replaces packed weights by a mapping of a file that has the same bytes. Returns false if that is not possible; nothing has
// changed then. Any thread, also while others multiply.
bool map_file(void *data, int64_t n_bytes, int fd, int64_t offset);

// While one lives, models that this thread loads have their weights packed where there is a kernel. Without one, our buffer
// type declines: other threads may load with ggml's kernels at the same time.
class PackingScope {
public:
    explicit PackingScope(Packing *packing) noexcept;
    ~PackingScope();
    PackingScope(const PackingScope &)            = delete;
    PackingScope &operator=(const PackingScope &) = delete;

private:
    Packing *outer_;
};

class RowAdapters;
class SharedCells;

// While one lives, the graphs that this thread computes use our attention and our products of floats, or ggml's. `varies`: a
// row's result may depend on how many are computed with it, where many are faster otherwise (tile_products.hpp). Their rows
// have adapters of their own, unless `adapters` is null. `shares`: which sequences of a cache have the same cells, or null.
class ComputeScope {
public:
    ComputeScope(bool attends, bool multiplies, bool varies, const RowAdapters *adapters, SharedCells *shares) noexcept;
    ~ComputeScope();
    ComputeScope(const ComputeScope &)            = delete;
    ComputeScope &operator=(const ComputeScope &) = delete;

private:
    bool               outer_attends_, outer_multiplies_, outer_varies_;
    const RowAdapters *outer_adapters_;
    SharedCells       *outer_shares_;
};

}  // namespace lp::kernels

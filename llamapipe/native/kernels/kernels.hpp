// Products of packed weight matrices with rows of activations. Open this file to add a CPU level, panels.hpp to add a type.
//
// Weights are packed once, at load, into panels of 16 rows. A product unpacks a panel once for a tile of activation rows, so
// several rows cost little more than one. Activations are quantized exactly as ggml quantizes them for that type of
// weights; sums within a block are integers, and blocks are added in order. So a row's result is the same, bit for bit,
// whatever other rows are computed with it, and differs from ggml's only by the order of float additions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml.h"

namespace lp::kernels {

constexpr int kPanelRows = 16;

// The kernel for one type of weights at one CPU level. All functions may be called from any number of threads.
struct Kernel {
    ggml_type   type;
    const char *level;  // "avx2", "avx512-vnni"
    int         block_columns;  // the number of columns must be a multiple
    int         panels_at_once;  // it is fastest with a multiple
    int         least_rows;  // that are worth the unpacking of a panel, where there are as many

    // Bytes of a packed panel, and of a quantized row of activations.
    size_t (*panel_bytes)(int64_t n_columns);
    size_t (*row_bytes)(int64_t n_columns);

    // Packs 16 rows that are `stride` bytes apart in the file's own form.
    void (*pack)(const void *rows, size_t stride, int64_t n_columns, void *panel);

    // Quantizes the columns [first, last) of a row, both multiples of block_columns; `row` and `quantized` are the whole
    // row's addresses.
    void (*quantize)(const float *row, int64_t n_columns, int64_t first, int64_t last, void *quantized);

    // y[j][16 * p + r] = the product of row r of panel p with quantized row j, for all panels and rows.
    void (*multiply)(const void *panels, int64_t n_panels, int64_t n_columns, const void *const *rows, int64_t n_rows,
                     float *const *y);
};

// The kernel for weights of this type and shape on this machine, or null where ggml's are to be used.
const Kernel *find(ggml_type type, int64_t n_columns, int64_t n_rows);

}  // namespace lp::kernels

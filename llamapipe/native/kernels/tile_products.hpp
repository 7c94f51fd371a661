// Products of packed weights with many rows of activations, with AMX: both become bfloat16, and the sums of all columns are
// float32. Open this file for what they cost and where they may be used.
//
// A panel's weights are made, with their scales and minima, once for up to kTileRows rows: part by part, in the first-level
// cache. So a block's scale costs nothing for a row, which is what integer tiles fail at. The results are nearer to those of
// float64 than those of activations in 8 bits, but they are others. So a row's result depends on whether enough rows are
// computed with it; it does not depend on which, on their number from there on, or on threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml.h"

namespace lp::kernels {

constexpr int64_t kLeastTileRows = 64;   // for fewer, weights are not worth the making
constexpr int     kTileRows      = 256;  // that are multiplied at once
constexpr int     kTilePanels    = 16;   // the same of panels

struct TileKernel {
    ggml_type type;

    // y[j][i] = the product of row i of the panels with row j, for n_results rows of the panels, and up to kTileRows rows of
    // those that put_row has written, from a multiple of 16 on. `scratch`: tile_scratch_bytes, aligned to 64.
    void (*multiply)(const void *panels, int64_t n_panels, int64_t n_results, int64_t n_columns, const uint16_t *rows,
                     int64_t n_rows, float *const *y, void *scratch);
};

// The kernel for a type, or null where there is none: without AMX, or if the system refuses it.
const TileKernel *find_tiles(ggml_type type);

// n rows are 16 by 16 together: their bytes, aligned to 64. Rows that nobody writes may have any values.
inline size_t       tile_rows_bytes(int64_t n_columns, int64_t n) { return (n + 15) / 16 * 16 * n_columns * sizeof(uint16_t); }
inline uint16_t    *tile_rows(void *rows, int64_t n_columns, int64_t i) { return static_cast<uint16_t *>(rows) + i * n_columns; }
extern const size_t tile_scratch_bytes;

// Writes the columns [first, last) of row i, multiples of 32, as bfloat16.
void put_row(const float *row, int64_t n_columns, int64_t first, int64_t last, void *rows, int64_t i);

}  // namespace lp::kernels

// Attention whose rows do not depend on each other. Open this file to add a CPU level.
//
// ggml chooses among three loops by the number of rows, cuts a row's cells by the number of threads, and adds values in
// 16 bits; so a row's result depends on what is computed beside it. Here it depends on nothing but the row's query and its
// cells in their order:
//   - a score is one chain of additions over the dimensions of a head;
//   - the softmax takes the exact maximum of all scores, and adds the weights in fixed point, where order does not matter;
//   - a dimension of the result is one chain of additions over the cells. Cells that a row does not see have weight 0 there,
//     which changes nothing.
// Rows and heads that read the same keys and values, or equal ones (shared_cells.hpp), are computed together, and read and
// convert them once.
#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_tensor;
struct ggml_compute_params;
struct ggml_threadpool;

namespace lp::kernels {

constexpr uint16_t kUnseen = 0xfc00;  // in masks: -infinity, in 16 bits

constexpr int kKeyBlock   = 32;  // cells whose keys are transposed together
constexpr int kValueBlock = 64;  // cells whose values are added together

// 30 bits below 1, which a weight is at most: the sum of any number of cells fits into 64 bits.
constexpr int kFixedPoint = 1 << 30;

// Forms of keys and values that the loops read. Others become F32 first.
enum Form { kFormF32, kFormF16, kFormQ8_0, kForms };

// The loops of one CPU level. Cells are pointers to a head's keys or values, of n_dims dimensions, a multiple of 8. Pointers need
// no alignment.
struct AttentionLevel {
    // keys[d][c] = cells[c][d] for kKeyBlock cells.
    void (*transpose[kForms])(const char *const *cells, const char *const *next, int64_t n_dims, float *keys);

    // results[r][d] += the sum of weights[r * stride + c] * cells[c][d] over n_cells cells.
    void (*add[kForms])(const float *weights, int64_t n_queries, int64_t stride, const char *const *cells,
                        const char *const *next, int64_t n_cells, int64_t n_dims, float *results);

    // Whether all values of n_cells cells are finite.
    bool (*are_finite[kForms])(const char *const *cells, int64_t n_cells, int64_t n_dims);

    // Lists the cells that any of the rows sees by their masks, in order. Returns how many they are.
    int64_t (*list)(const uint16_t *const *masks, int64_t n_rows, int64_t n_cells, int32_t *cells);

    // scores[r * stride + c] = the product of query r and the key of cell c, for kKeyBlock cells.
    void (*score)(const float *queries, int64_t n_queries, int64_t n_dims, const float *keys, float *scores, int64_t stride);

    // scores = scores * scale + slope * mask, for n cells, a multiple of kKeyBlock; -infinity where the mask is. Returns the
    // largest, or NaN if one is.
    float (*mask)(float *scores, int64_t n, float scale, float slope, const uint16_t *mask);

    // Replaces n scores, a multiple of kKeyBlock, by the exponentials of their distance to a finite maximum, and returns
    // kFixedPoint times their sum.
    int64_t (*exponentials)(float *scores, int64_t n, float maximum);
};

// The loops of this machine, or null.
const AttentionLevel *attention_level();

// Whether an operation is attention that is computed here.
bool is_attention(const ggml_tensor *op);

class SharedCells;

// The bytes of work memory that it needs, and the computation, on all of ggml's threads. The first one's `shares`: which streams
// have the same cells, and are computed together; null: nobody knows.
size_t attention_work_size(const ggml_tensor *op, int n_threads);
void   compute_attention(const ggml_compute_params *params, ggml_tensor *op, SharedCells *shares,
                         void (*barrier)(ggml_threadpool *));

}  // namespace lp::kernels

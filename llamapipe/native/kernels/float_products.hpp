// Products of weights that are not packed: F32, F16 and BF16, such as routers of experts, adapters and unquantized models.
// Open this file to add a CPU level.
//
// ggml multiplies one row by other loops than several, so a row's result depends on the others. Here each result is one
// chain of additions in eight lanes, whatever the number of rows and the level, and activations stay 32-bit floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml.h"

struct ggml_compute_params;
struct ggml_threadpool;

namespace lp::kernels {

// A product as addresses and strides in bytes: of one matrix of weights and the rows of activations that belong to it.
struct FloatMatrix {
    const char    *weights;
    const char    *rows;
    char          *results;
    size_t         weight_stride, row_stride, result_stride;
    int64_t        n_columns;
    const int32_t *row_numbers = nullptr;  // null: rows are one after another

    size_t number(int64_t row) const { return row_numbers ? row_numbers[row] : row; }
};

constexpr int64_t kManyRows = 24;  // the fewest for which panels of weights pay

// A thread's memory for panels. Results are the same without it.
struct Scratch {
    float  *floats   = nullptr;
    int64_t n_floats = 0;
};

// The loops of one CPU level, for weights [first, last) of a type with all rows.
struct FloatLevel {
    const char *name;
    void (*multiply)(ggml_type type, const FloatMatrix &m, int64_t first, int64_t last, int64_t n_rows, const Scratch &scratch);
};

// Whether this processor has the instructions.
bool has_float_products();

// Whether an operation is such a product.
bool is_float_product(const ggml_tensor *op);

// The bytes of work memory that it needs, and the computation, on all of ggml's threads.
size_t float_product_work_size(const ggml_tensor *op, int n_threads);
void   compute_float_product(const ggml_compute_params *params, ggml_tensor *op, void (*barrier)(ggml_threadpool *));

// Rows of activations, chosen by their numbers, times a matrix of weights. Strides are in bytes. The numbers are those of an
// operation that is such a product.
struct RowProduct {
    const ggml_tensor *weights;
    const char        *rows;
    size_t             row_stride;
    char              *results;
    size_t             result_stride;
    const int32_t     *row_numbers;
};

// Weights [first, last) with the first `n` rows.
void multiply_rows(const RowProduct &product, int64_t first, int64_t last, int64_t n);

}  // namespace lp::kernels

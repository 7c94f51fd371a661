// Products of F32, F16 and BF16 weights on AVX2, which reads them once for three rows of activations.
#include "float_products.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu/traits.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace llamapipe::kernels {
namespace {

constexpr int     most_weights = 4, most_rows = 3;   // of a tile: twelve sums, which stay in registers
constexpr int64_t piece_rows    = 32;                // of weights that a thread takes at once
constexpr int64_t block_columns = 256;               // which are added by themselves: errors grow with the length of a sum

struct F32 {
    using Value = float;
    static __m256 load(const float * from) { return _mm256_loadu_ps(from); }
    static float  load_one(const float * from) { return *from; }
};

struct F16 {
    using Value = uint16_t;
    static __m256 load(const uint16_t * from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) from)); }
    static float  load_one(const uint16_t * from) { return _cvtsh_ss(*from); }
};

struct BF16 {
    using Value = uint16_t;
    static __m256 load(const uint16_t * from) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) from)), 16));
    }
    static float load_one(const uint16_t * from) {
        return _mm256_cvtss_f32(_mm256_castsi256_ps(_mm256_set1_epi32((int) *from << 16)));
    }
};

inline float sum_of(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// sum_of of four, with the same additions.
inline __m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab   = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd   = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    const __m256 two  = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));  // of a, c, b, d
    const __m256 one  = _mm256_add_ps(two, _mm256_movehdup_ps(two));
    return _mm256_castps256_ps128(_mm256_permutevar8x32_ps(one, _mm256_setr_epi32(0, 4, 2, 6, 0, 0, 0, 0)));
}

// A product as pointers and strides in bytes: of one matrix of weights and the rows of activations that belong to it.
struct Matrix {
    const char * weights;
    const char * rows;
    char *       results;
    size_t       weight_stride, row_stride, result_stride;
    int64_t      n_columns;
    const int32_t * row_numbers = nullptr;  // null: rows are one after another

    size_t number(int64_t row) const { return (size_t) (row_numbers ? row_numbers[row] : row); }
};

template <class Type, int W, int R> void tile(const Matrix & m, int64_t weight, int64_t row) {
    const typename Type::Value * w[W];
    const float *                x[R];
    for (int i = 0; i < W; i++) {
        w[i] = (const typename Type::Value *) (m.weights + (size_t) (weight + i) * m.weight_stride);
    }
    for (int j = 0; j < R; j++) {
        x[j] = (const float *) (m.rows + m.number(row + j) * m.row_stride);
    }
    __m256  totals[W][R] = {};
    int64_t c            = 0;
    while (c + 8 <= m.n_columns) {
        __m256        sums[W][R] = {};
        const int64_t end        = std::min(c + block_columns, m.n_columns / 8 * 8);
        for (; c < end; c += 8) {
            __m256 values[R];
            for (int j = 0; j < R; j++) {
                values[j] = _mm256_loadu_ps(x[j] + c);
            }
#pragma GCC unroll 4
            for (int i = 0; i < W; i++) {
                const __m256 weights = Type::load(w[i] + c);
#pragma GCC unroll 4
                for (int j = 0; j < R; j++) {
                    sums[i][j] = _mm256_fmadd_ps(weights, values[j], sums[i][j]);
                }
            }
        }
        for (int i = 0; i < W; i++) {
            for (int j = 0; j < R; j++) {
                totals[i][j] = _mm256_add_ps(totals[i][j], sums[i][j]);
            }
        }
    }
    for (int j = 0; j < R; j++) {
        float * const results = (float *) (m.results + m.number(row + j) * m.result_stride) + weight;
        if constexpr (W == 4) {
            _mm_storeu_ps(results, sums_of(totals[0][j], totals[1][j], totals[2][j], totals[3][j]));
        } else {
            for (int i = 0; i < W; i++) {
                results[i] = sum_of(totals[i][j]);
            }
        }
        for (int64_t rest = c; rest < m.n_columns; rest++) {
            for (int i = 0; i < W; i++) {
                results[i] = __builtin_fmaf(Type::load_one(w[i] + rest), x[j][rest], results[i]);  // not at the compiler's choice
            }
        }
    }
}

template <class Type, int R> void multiply_tiles(const Matrix & m, int64_t first, int64_t last, int64_t row) {
    int64_t i = first;
    for (; i + most_weights <= last; i += most_weights) {
        tile<Type, most_weights, R>(m, i, row);
    }
    for (; i < last; i++) {
        tile<Type, 1, R>(m, i, row);
    }
}

// Weights [first, last) with all rows.
template <class Type> void multiply(const Matrix & m, int64_t first, int64_t last, int64_t n_rows) {
    int64_t row = 0;
    for (; row + most_rows <= n_rows; row += most_rows) {
        multiply_tiles<Type, most_rows>(m, first, last, row);
    }
    if (n_rows - row == 2) {
        multiply_tiles<Type, 2>(m, first, last, row);
    } else if (n_rows - row == 1) {
        multiply_tiles<Type, 1>(m, first, last, row);
    }
}

void multiply_any(ggml_type type, const Matrix & m, int64_t first, int64_t last, int64_t n_rows) {
    if (type == GGML_TYPE_F32) {
        multiply<F32>(m, first, last, n_rows);
    } else if (type == GGML_TYPE_F16) {
        multiply<F16>(m, first, last, n_rows);
    } else {
        multiply<BF16>(m, first, last, n_rows);
    }
}

}  // namespace

bool has_float_products() {
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has;
}

void multiply_rows(const RowProduct & product, int64_t first, int64_t last, int64_t n) {
    const ggml_tensor * w = product.weights;
    const Matrix        m = { (const char *) w->data, product.rows, product.results, w->nb[1], product.row_stride,
                              product.result_stride, w->ne[0], product.row_numbers };
    multiply_any(w->type, m, first, last, n);
}

bool is_float_product(const ggml_tensor * op) {
    if (op->op != GGML_OP_MUL_MAT || op->type != GGML_TYPE_F32) {
        return false;
    }
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const bool         is_float = w->type == GGML_TYPE_F32 || w->type == GGML_TYPE_F16 || w->type == GGML_TYPE_BF16;
    // Weights: what no operation has computed. Keys and values are views of memory that operations write.
    return has_float_products() && is_float && w->op == GGML_OP_NONE && !w->view_src && x->type == GGML_TYPE_F32 &&
           w->nb[0] == ggml_type_size(w->type) && x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
}

size_t float_product_work_size() { return 2 * sizeof(std::max_align_t) + sizeof(std::atomic<int64_t>); }

void compute_float_product(const ggml_compute_params * params, ggml_tensor * op, void (*barrier)(ggml_threadpool *)) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    constexpr size_t   alignment = alignof(std::max_align_t);
    auto & next = *(std::atomic<int64_t> *) (((size_t) params->wdata + alignment - 1) / alignment * alignment);
    if (params->ith == 0) {
        new (&next) std::atomic<int64_t>(params->nth);  // each thread begins with the piece of its number
    }
    barrier(params->threadpool);
    const int64_t n_pieces = (w->ne[1] + piece_rows - 1) / piece_rows, n = n_pieces * x->ne[2] * x->ne[3];
    for (int64_t i = params->ith; i < n; i = next.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t i2 = i / n_pieces % x->ne[2], i3 = i / n_pieces / x->ne[2];
        const int64_t first = i % n_pieces * piece_rows, last = std::min(w->ne[1], first + piece_rows);
        const int64_t w2 = i2 / (x->ne[2] / w->ne[2]), w3 = i3 / (x->ne[3] / w->ne[3]);
        const Matrix  m  = { (const char *) w->data + (size_t) w2 * w->nb[2] + (size_t) w3 * w->nb[3],
                             (const char *) x->data + (size_t) i2 * x->nb[2] + (size_t) i3 * x->nb[3],
                             (char *) op->data + (size_t) i2 * op->nb[2] + (size_t) i3 * op->nb[3],
                             w->nb[1], x->nb[1], op->nb[1], w->ne[0] };
        multiply_any(w->type, m, first, last, x->ne[1]);
    }
}

}  // namespace llamapipe::kernels
#pragma GCC pop_options

#else

namespace llamapipe::kernels {

bool has_float_products() { return false; }

void multiply_rows(const RowProduct &, int64_t, int64_t, int64_t) {}

bool is_float_product(const ggml_tensor *) { return false; }

size_t float_product_work_size() { return 0; }

void compute_float_product(const ggml_compute_params *, ggml_tensor *, void (*)(ggml_threadpool *)) {}

}  // namespace llamapipe::kernels

#endif

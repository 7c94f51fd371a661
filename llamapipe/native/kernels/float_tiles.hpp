// Products of floats in tiles of weights and rows. Include it after the level's target pragma, AVX2 or above.
//
// A result is a chain of additions in eight lanes for each block of columns; the blocks are added in their order, then the
// lanes, then the columns that fill no vector. A level may compute as many chains at once as it likes. Where many rows come,
// it takes weights from panels: converted to floats, and in the order in which a tile reads them.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "float_products.hpp"
#include "loads.hpp"

namespace lp::kernels {
namespace {

#define UNROLLED _Pragma("GCC unroll 8")  // sums stay in registers where all loops over them are unrolled

constexpr int64_t kBlockColumns = 256;  // which are added by themselves: errors grow with the length of a sum

struct F32 {
    using Value = float;
    static __m256 load(const float *from) { return _mm256_loadu_ps(from); }
    static float  load_one(const float *from) { return *from; }
};

struct F16 {
    using Value = uint16_t;
    static __m256 load(const uint16_t *from) { return _mm256_cvtph_ps(load128(from)); }
    static float  load_one(const uint16_t *from) { return _cvtsh_ss(*from); }
};

struct BF16 {
    using Value = uint16_t;
    static __m256 load(const uint16_t *from) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(from)), 16));
    }
    static float load_one(const uint16_t *from) {
        return _mm256_cvtss_f32(_mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(*from) << 16)));
    }
};

// Rows of activations from `row` on, and of results.
template <int R> struct Rows {
    const float *x[R];
    float       *results[R];

    Rows(const FloatMatrix &m, int64_t row) {
        for (int j = 0; j < R; j++) {
            x[j]       = reinterpret_cast<const float *>(m.rows + m.number(row + j) * m.row_stride);
            results[j] = reinterpret_cast<float *>(m.results + m.number(row + j) * m.result_stride);
        }
    }
};

// Weights from `first` on.
template <typename Type, int W> struct Weights {
    const typename Type::Value *w[W];

    __m256 load(int i, int64_t c) const { return Type::load(w[i] + c); }

    Weights(const FloatMatrix &m, int64_t first) {
        const char *from = m.weights + first * m.weight_stride;
        for (int i = 0; i < W; i++, from += m.weight_stride) {
            w[i] = reinterpret_cast<const typename Type::Value *>(from);
        }
    }
};

// The same in a panel: for each eight columns the lanes of one weight after another.
template <int W> struct Panel {
    const float *values;

    __m256 load(int i, int64_t c) const { return _mm256_loadu_ps(values + c * W + i * 8); }
};

template <typename Type, int W> void fill(float *panel, const Weights<Type, W> &weights, int64_t n_columns) {
    for (int64_t c = 0; c < n_columns; c += 8) {
        for (int i = 0; i < W; i++) {
            _mm256_storeu_ps(panel + c * W + i * 8, weights.load(i, c));
        }
    }
}

// The columns from `c` on, which fill no vector, are added to the results of the weights from `first` on.
template <typename Type, int W, int R>
inline void add_rest(const Weights<Type, W> &weights, const Rows<R> &rows, int64_t first, int64_t c, int64_t n_columns) {
    for (; c < n_columns; c++) {
        for (int i = 0; i < W; i++) {
            for (int j = 0; j < R; j++) {
                float &result = rows.results[j][first + i];
                result = __builtin_fmaf(Type::load_one(weights.w[i] + c), rows.x[j][c], result);  // not at the compiler's choice
            }
        }
    }
}

inline float sum_of(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// sum_of of four, with the same additions.
inline __m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab  = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd  = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));  // of a, c, b, d
    const __m256 one = _mm256_add_ps(two, _mm256_movehdup_ps(two));
    return _mm256_castps256_ps128(_mm256_permutevar8x32_ps(one, _mm256_setr_epi32(0, 4, 2, 6, 0, 0, 0, 0)));
}

template <int W, int R, typename From>
inline void sum_block(const From &weights, const Rows<R> &rows, int64_t c, int64_t end, __m256 (&sums)[W][R]) {
    UNROLLED for (int i = 0; i < W; i++) {
        UNROLLED for (int j = 0; j < R; j++) { sums[i][j] = _mm256_setzero_ps(); }
    }
    for (; c < end; c += 8) {
        __m256 values[R];
        UNROLLED for (int j = 0; j < R; j++) { values[j] = _mm256_loadu_ps(rows.x[j] + c); }
        UNROLLED for (int i = 0; i < W; i++) {
            const __m256 w = weights.load(i, c);
            UNROLLED for (int j = 0; j < R; j++) { sums[i][j] = _mm256_fmadd_ps(w, values[j], sums[i][j]); }
        }
    }
}

// Four weights, or one. `panel`: theirs, or null.
template <typename Type, int W, int R> void tile(const FloatMatrix &m, const Rows<R> &rows, int64_t first,
                                                 const float *panel = nullptr) {
    const Weights<Type, W> weights(m, first);
    const int64_t          whole = m.n_columns / 8 * 8;
    const auto             sum   = [&](int64_t c, __m256(&sums)[W][R]) {
        const int64_t end = std::min(c + kBlockColumns, whole);
        panel ? sum_block(Panel<W>{ panel }, rows, c, end, sums) : sum_block(weights, rows, c, end, sums);
    };
    __m256 totals[W][R];
    sum(0, totals);
    for (int64_t c = kBlockColumns; c < whole; c += kBlockColumns) {
        __m256 sums[W][R];
        sum(c, sums);
        UNROLLED for (int i = 0; i < W; i++) {
            UNROLLED for (int j = 0; j < R; j++) { totals[i][j] = _mm256_add_ps(totals[i][j], sums[i][j]); }
        }
    }
    UNROLLED for (int j = 0; j < R; j++) {
        if constexpr (W == 4) {
            _mm_storeu_ps(rows.results[j] + first, sums_of(totals[0][j], totals[1][j], totals[2][j], totals[3][j]));
        } else {
            rows.results[j][first] = sum_of(totals[0][j]);
        }
    }
    add_rest(weights, rows, first, whole, m.n_columns);
}

template <typename Type, int R> void tiles(const FloatMatrix &m, const Rows<R> &rows, int64_t first, int64_t last) {
    for (; first + 4 <= last; first += 4) {
        tile<Type, 4, R>(m, rows, first);
    }
    for (; first < last; first++) {
        tile<Type, 1, R>(m, rows, first);
    }
}

// Calls `done` with Rows<n>, for n at most R.
template <int R, typename Done> void with_rows(const FloatMatrix &m, int64_t row, int64_t n, const Done &done) {
    if constexpr (R > 0) {
        if (n == R) {
            done(Rows<R>(m, row));
        } else {
            with_rows<R - 1>(m, row, n, done);
        }
    }
}

// The same for all rows, in parts of nearly the same size: seven are four and three.
template <int R, typename Done> void for_rows(const FloatMatrix &m, int64_t n_rows, const Done &done) {
    const int64_t n_parts = (n_rows + R - 1) / R;
    for (int64_t i = 0, row = 0; i < n_parts; i++) {
        const int64_t end = n_rows * (i + 1) / n_parts;
        with_rows<R>(m, row, end - row, done);
        row = end;
    }
}

template <typename Level, typename Type>
void multiply_type(const FloatMatrix &m, int64_t first, int64_t last, int64_t n_rows, const Scratch &scratch) {
    constexpr int     n_weights = Level::kWeights;
    constexpr int64_t most_rows = Level::kMostRows;
    const int64_t     whole = m.n_columns / 8 * 8, n_each = n_weights * whole;
    const bool        has_panels = n_rows >= kManyRows && whole > 0;
    const int64_t     n_tiles    = has_panels ? std::min((last - first) / n_weights, scratch.n_floats / n_each) : 0;
    while (n_tiles > 0 && first + n_tiles * n_weights <= last) {
        for (int64_t i = 0; i < n_tiles; i++) {
            fill(scratch.floats + i * n_each, Weights<Type, n_weights>(m, first + i * n_weights), whole);
        }
        for_rows<most_rows>(m, n_rows, [&](const auto &rows) {
            for (int64_t i = 0; i < n_tiles; i++) {
                Level::template tile<Type>(m, rows, first + i * n_weights, scratch.floats + i * n_each);
            }
        });
        first += n_tiles * n_weights;
    }
    if (first < last) {
        for_rows<most_rows>(m, n_rows, [&](const auto &rows) { Level::template tiles<Type>(m, rows, first, last); });
    }
}

template <typename Level> void multiply(ggml_type type, const FloatMatrix &m, int64_t first, int64_t last, int64_t n_rows,
                                        const Scratch &scratch) {
    if (type == GGML_TYPE_F32) {
        multiply_type<Level, F32>(m, first, last, n_rows, scratch);
    } else if (type == GGML_TYPE_F16) {
        multiply_type<Level, F16>(m, first, last, n_rows, scratch);
    } else {
        multiply_type<Level, BF16>(m, first, last, n_rows, scratch);
    }
}

}  // namespace
}  // namespace lp::kernels

// Attention on AVX2: eight cells a vector for scores, eight dimensions for values.
#if defined(__x86_64__)
#include <cmath>
#include <cstring>
#include <utility>

#include "attention.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace llamapipe::kernels {
namespace {

void to_float(const uint16_t * from, int64_t n, float * to) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (from + i))));
    for (; i < n; i++) to[i] = _cvtsh_ss(from[i]);
}

// Eight rows of eight values, `stride` apart, become eight columns.
void transpose_8(const float * from, int64_t stride, float * to) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + i * stride);
    for (int i = 0; i < 4; i++) {
        b[2 * i]     = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            a[4 * i + 2 * j]     = _mm256_shuffle_ps(b[4 * i + j], b[4 * i + 2 + j], 0x44);
            a[4 * i + 2 * j + 1] = _mm256_shuffle_ps(b[4 * i + j], b[4 * i + 2 + j], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * kKeyBlock, _mm256_permute2f128_ps(a[i], a[4 + i], 0x20));
        _mm256_storeu_ps(to + (4 + i) * kKeyBlock, _mm256_permute2f128_ps(a[i], a[4 + i], 0x31));
    }
}

void transpose(const float * cells, int64_t n_dims, float * keys) {
    for (int64_t d = 0; d < n_dims; d += 8)
        for (int c = 0; c < kKeyBlock; c += 8) transpose_8(cells + c * n_dims + d, n_dims, keys + d * kKeyBlock + c);
}

// Sums of R rows and V vectors, at most twelve, which stay in registers where all loops over them are unrolled.
#define FOR_ROWS _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
#define FOR_VECTORS _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)

template <int R, int V>
inline void score_tile(const float * queries, int64_t n_dims, const float * keys, float * scores, int64_t stride) {
    __m256               sums[R][V], key[V];
    FOR_ROWS FOR_VECTORS sums[r][v] = _mm256_setzero_ps();
    for (int64_t d = 0; d < n_dims; d++) {
        FOR_VECTORS key[v] = _mm256_loadu_ps(keys + d * kKeyBlock + 8 * v);
        FOR_ROWS {
            const __m256 q          = _mm256_broadcast_ss(queries + r * n_dims + d);
            FOR_VECTORS  sums[r][v] = _mm256_fmadd_ps(q, key[v], sums[r][v]);
        }
    }
    FOR_ROWS FOR_VECTORS _mm256_storeu_ps(scores + r * stride + 8 * v, sums[r][v]);
}

template <int R> void score_rows(const float * queries, int64_t n_dims, const float * keys, float * scores, int64_t stride) {
    constexpr int V = R <= 3 ? 4 : 2;
    for (int c = 0; c < kKeyBlock; c += 8 * V) score_tile<R, V>(queries, n_dims, keys + c, scores + c, stride);
}

template <int R, int V>
inline void add_tile(const float * weights, int64_t stride, const float * values, int64_t n_cells, int64_t n_dims,
                     float * results) {
    __m256               sums[R][V], value[V];
    FOR_ROWS FOR_VECTORS sums[r][v] = _mm256_loadu_ps(results + r * n_dims + 8 * v);
    for (int64_t c = 0; c < n_cells; c++) {
        FOR_VECTORS value[v] = _mm256_loadu_ps(values + c * n_dims + 8 * v);
        FOR_ROWS {
            const __m256 w          = _mm256_broadcast_ss(weights + r * stride + c);
            FOR_VECTORS  sums[r][v] = _mm256_fmadd_ps(w, value[v], sums[r][v]);
        }
    }
    FOR_ROWS FOR_VECTORS _mm256_storeu_ps(results + r * n_dims + 8 * v, sums[r][v]);
}

template <int R>
void add_rows(const float * weights, int64_t stride, const float * values, int64_t n_cells, int64_t n_dims, float * results) {
    constexpr int V = R <= 3 ? 4 : 2;
    int64_t       d = 0;
    for (; d + 8 * V <= n_dims; d += 8 * V) add_tile<R, V>(weights, stride, values + d, n_cells, n_dims, results + d);
    for (; d < n_dims; d += 8) add_tile<R, 1>(weights, stride, values + d, n_cells, n_dims, results + d);
}

constexpr int kMostRows = 6;

template <int... R> void score_some(std::integer_sequence<int, R...>, int n, const float * queries, int64_t n_dims,
                                    const float * keys, float * scores, int64_t stride) {
    constexpr void (*of[])(const float *, int64_t, const float *, float *, int64_t) = { score_rows<R + 1>... };
    of[n - 1](queries, n_dims, keys, scores, stride);
}

template <int... R> void add_some(std::integer_sequence<int, R...>, int n, const float * weights, int64_t stride,
                                  const float * values, int64_t n_cells, int64_t n_dims, float * results) {
    constexpr void (*of[])(const float *, int64_t, const float *, int64_t, int64_t, float *) = { add_rows<R + 1>... };
    of[n - 1](weights, stride, values, n_cells, n_dims, results);
}

// Calls f(first, n) for parts of nearly the same size, n <= kMostRows: seven rows are four and three.
template <typename F> inline void in_parts(int64_t n_rows, F && f) {
    const int64_t n_parts = (n_rows + kMostRows - 1) / kMostRows;
    for (int64_t i = 0, first = 0; i < n_parts; i++) {
        const int64_t end = n_rows * (i + 1) / n_parts;
        f(first, (int) (end - first));
        first = end;
    }
}

void score(const float * queries, int64_t n_queries, int64_t n_dims, const float * keys, float * scores, int64_t stride) {
    in_parts(n_queries, [&](int64_t r, int n) {
        score_some(std::make_integer_sequence<int, kMostRows>(), n, queries + r * n_dims, n_dims, keys, scores + r * stride,
                   stride);
    });
}

void add(const float * weights, int64_t n_queries, int64_t stride, const float * values, int64_t n_cells, int64_t n_dims,
         float * results) {
    in_parts(n_queries, [&](int64_t r, int n) {
        add_some(std::make_integer_sequence<int, kMostRows>(), n, weights + r * stride, stride, values, n_cells, n_dims,
                 results + r * n_dims);
    });
}

float largest(__m256 v) {
    float all[8], found = -INFINITY;
    _mm256_storeu_ps(all, v);
    for (const float one : all) found = one > found ? one : found;
    return found;
}

float mask(float * scores, int64_t n, float scale, float slope, const uint16_t * mask) {
    const __m256 none = _mm256_set1_ps(-INFINITY), by = _mm256_set1_ps(scale), slopes = _mm256_set1_ps(slope);
    __m256       highest = none, unordered = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (mask + i)));
        __m256       s = _mm256_fmadd_ps(m, slopes, _mm256_mul_ps(_mm256_loadu_ps(scores + i), by));
        // Selected, not added: a cell that is not seen may hold anything.
        s         = _mm256_blendv_ps(s, none, _mm256_cmp_ps(m, none, _CMP_EQ_OQ));
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(s, s, _CMP_UNORD_Q));
        highest   = _mm256_max_ps(s, highest);
        _mm256_storeu_ps(scores + i, s);
    }
    return _mm256_movemask_ps(unordered) ? NAN : largest(highest);
}

// The exponential of x <= 0 within two units in the last place: 2^n times a polynomial, the series of the exponential. 0
// below -87, where results would be denormal.
inline __m256 exponential(__m256 x) {
    const __m256 lowest  = _mm256_set1_ps(-87.0f);
    const __m256 clamped = _mm256_max_ps(lowest, x);
    const __m256 n =
            _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), clamped);  // ln 2 in two parts, the first of few bits
    r        = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    __m256 y = _mm256_set1_ps(1.0f / 720);
    for (const float c : { 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f }) y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(c));
    const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, lowest, _CMP_LT_OQ), _mm256_castsi256_ps(bits));
}

float exponentials(float * scores, int64_t n, float maximum) {
    // 30 bits below 1, which the largest is at most: the sum of any number of cells fits into 64 bits.
    const __m256  m = _mm256_set1_ps(maximum), fixed = _mm256_set1_ps(1 << 30);
    const __m256i low   = _mm256_set1_epi64x(0xffffffff);
    __m256i       total = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 weight = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + i), m));
        _mm256_storeu_ps(scores + i, weight);
        const __m256i part = _mm256_cvtps_epi32(_mm256_mul_ps(weight, fixed));
        total              = _mm256_add_epi64(total, _mm256_add_epi64(_mm256_and_si256(part, low), _mm256_srli_epi64(part, 32)));
    }
    int64_t parts[4];
    _mm256_storeu_si256((__m256i *) parts, total);
    return (float) ((double) (parts[0] + parts[1] + parts[2] + parts[3]) / (1 << 30));
}

bool are_finite(const float * values, int64_t n) {
    const __m256 zero = _mm256_setzero_ps();
    __m256       bad  = zero;
    for (int64_t i = 0; i < n; i += 8)
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(_mm256_mul_ps(_mm256_loadu_ps(values + i), zero), zero, _CMP_NEQ_UQ));
    return _mm256_movemask_ps(bad) == 0;
}

}  // namespace

extern const AttentionLevel kAttentionAvx2 = { to_float, transpose, score, mask, exponentials, add, are_finite };

}  // namespace llamapipe::kernels
#pragma GCC pop_options
#endif

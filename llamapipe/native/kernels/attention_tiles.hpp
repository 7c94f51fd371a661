// The loops of attention over vectors of any width. Include it after the level's target pragma, AVX2 or above.
//
// A lane of a vector is a cell in scores, and a dimension in results. What a lane computes does not depend on the width, so all
// levels give the same bits.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "attention.hpp"
#include "floats8.hpp"

namespace lp::kernels {
namespace {

// Forms of keys and values: what loads a cell's dimensions from d on as floats, and says whether all of them are finite.
struct F32 {
    static int64_t bytes(int64_t d) { return 4 * d; }  // up to dimension d

    template <typename V> static typename V::Floats load(const char *cell, int64_t d) {
        return V::load(reinterpret_cast<const float *>(cell) + d);
    }

    static bool are_finite(const char *const *cells, int64_t n_cells, int64_t n_dims) {
        const __m256 zero = _mm256_setzero_ps();
        __m256       bad  = zero;
        for (int64_t c = 0; c < n_cells; c++) {
            for (int64_t d = 0; d < n_dims; d += 8) {
                const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(reinterpret_cast<const float *>(cells[c]) + d), zero);
                bad                  = _mm256_or_ps(bad, _mm256_cmp_ps(product, zero, _CMP_NEQ_UQ));
            }
        }
        return _mm256_movemask_ps(bad) == 0;
    }
};

struct F16 {
    static int64_t bytes(int64_t d) { return 2 * d; }  // up to dimension d

    template <typename V> static typename V::Floats load(const char *cell, int64_t d) {
        return V::load_halves(reinterpret_cast<const uint16_t *>(cell) + d);
    }

    static bool are_finite(const char *const *cells, int64_t n_cells, int64_t n_dims) {
        const __m128i exponent = _mm_set1_epi16(0x7c00);
        __m128i       bad      = _mm_setzero_si128();
        for (int64_t c = 0; c < n_cells; c++) {
            for (int64_t d = 0; d < n_dims; d += 8) {
                const __m128i values = load128(cells[c] + 2 * d);
                bad                  = _mm_or_si128(bad, _mm_cmpeq_epi16(_mm_and_si128(values, exponent), exponent));
            }
        }
        return _mm_movemask_epi8(bad) == 0;
    }
};

struct Q8_0 {
    static constexpr int64_t kColumns = 32, kBytes = 34;  // of a block: its scale in 16 bits, and bytes

    static int64_t bytes(int64_t d) { return d / kColumns * kBytes + d % kColumns; }

    static uint16_t scale(const char *block) {
        uint16_t bits;
        memcpy(&bits, block, sizeof(bits));
        return bits;
    }

    template <typename V> static typename V::Floats load(const char *cell, int64_t d) {
        const char *block = cell + d / kColumns * kBytes;
        return V::multiply(V::load_bytes(reinterpret_cast<const int8_t *>(block) + 2 + d % kColumns),
                           V::all(_cvtsh_ss(scale(block))));
    }

    static bool are_finite(const char *const *cells, int64_t n_cells, int64_t n_dims) {
        for (int64_t c = 0; c < n_cells; c++) {
            for (int64_t block = 0; block < n_dims / kColumns; block++) {
                if ((scale(cells[c] + block * kBytes) & 0x7c00) == 0x7c00) return false;
            }
        }
        return true;
    }
};

// Lists the cells that a row of masks sees, in their order. Returns how many they are.
int64_t list(const uint16_t *const *masks, int64_t n_rows, int64_t n_cells, int32_t *cells) {
    const __m256i unseen = _mm256_set1_epi16(static_cast<short>(kUnseen)), eight = _mm256_set1_epi32(8);
    int64_t       n = 0, c = 0;
    for (; c + 16 <= n_cells; c += 16) {
        __m256i hidden = _mm256_set1_epi16(-1);
        for (int64_t r = 0; r < n_rows; r++) {
            const __m256i mask = load256(masks[r] + c);
            hidden             = _mm256_and_si256(hidden, _mm256_cmpeq_epi16(mask, unseen));
        }
        uint32_t seen = ~static_cast<uint32_t>(_mm256_movemask_epi8(hidden));  // two bits a cell
        if (seen == 0xffffffff) {
            const __m256i first =
                    _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(c)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            store256(cells + n, first);
            store256(cells + n + 8, _mm256_add_epi32(first, eight));
            n += 16;
            continue;
        }
        for (; seen; seen &= ~(3u << __builtin_ctz(seen))) {
            cells[n++] = static_cast<int32_t>(c + __builtin_ctz(seen) / 2);
        }
    }
    for (; c < n_cells; c++) {
        bool is_seen = false;
        for (int64_t r = 0; r < n_rows; r++) is_seen |= masks[r][c] != kUnseen;
        cells[n] = static_cast<int32_t>(c);
        n += is_seen;
    }
    return n;
}

// Dimensions [d, d + kLanes) of all cells.
template <typename V, typename Type>
inline void transpose_some(const char *const *cells, const char *const *next, int64_t d, float *keys) {
    for (int c = 0; c < kKeyBlock; c += V::kLanes) {
        typename V::Floats values[V::kLanes];
        UNROLLED for (int i = 0; i < V::kLanes; i++) {
            values[i] = Type::template load<V>(cells[c + i], d);
            __builtin_prefetch(next[c + i] + Type::bytes(d));
        }
        V::transpose(values, keys + d * kKeyBlock + c, kKeyBlock);
    }
}

template <typename V, typename Type>
void transpose(const char *const *cells, const char *const *next, int64_t n_dims, float *keys) {
    int64_t d = 0;
    for (; d + V::kLanes <= n_dims; d += V::kLanes) transpose_some<V, Type>(cells, next, d, keys);
    if (d < n_dims) transpose_some<typename V::Half, Type>(cells, next, d, keys);  // dimensions are a multiple of 8
}

// Sums of R rows and N vectors.
template <typename V, int R, int N>
inline void score_tile(const float *queries, int64_t n_dims, const float *keys, float *scores, int64_t stride) {
    typename V::Floats sums[R][N], key[N];
    UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int v = 0; v < N; v++) sums[r][v] = V::all(0);
    for (int64_t d = 0; d < n_dims; d++) {
        UNROLLED for (int v = 0; v < N; v++) key[v] = V::load(keys + d * kKeyBlock + V::kLanes * v);
        UNROLLED for (int r = 0; r < R; r++) {
            const auto q                                    = V::all(queries[r * n_dims + d]);
            UNROLLED for (int v = 0; v < N; v++) sums[r][v] = V::add_product(q, key[v], sums[r][v]);
        }
    }
    UNROLLED for (int r = 0; r < R; r++) {
        UNROLLED for (int v = 0; v < N; v++) V::store(sums[r][v], scores + r * stride + V::kLanes * v);
    }
}

template <typename V, int R>
void score_rows(const float *queries, int64_t n_dims, const float *keys, float *scores, int64_t stride) {
    constexpr int n_blocks = kKeyBlock / V::kLanes, N = n_blocks * R <= V::kMostSums ? n_blocks : n_blocks / 2;
    for (int c = 0; c < kKeyBlock; c += V::kLanes * N) score_tile<V, R, N>(queries, n_dims, keys + c, scores + c, stride);
}

template <typename V, typename Type, int R, int N>
inline void add_tile(const float *weights, int64_t stride, const char *const *cells, const char *const *next, int64_t n_cells,
                     int64_t first, int64_t n_dims, float *results) {
    typename V::Floats sums[R][N], value[N];
    results += first;
    UNROLLED for (int r = 0; r < R; r++) {
        UNROLLED for (int v = 0; v < N; v++) sums[r][v] = V::load(results + r * n_dims + V::kLanes * v);
    }
    for (int64_t c = 0; c < n_cells; c++) {
        UNROLLED for (int v = 0; v < N; v++) {
            value[v] = Type::template load<V>(cells[c], first + V::kLanes * v);
            __builtin_prefetch(next[c] + Type::bytes(first + V::kLanes * v));
        }
        UNROLLED for (int r = 0; r < R; r++) {
            const auto w                                    = V::all(weights[r * stride + c]);
            UNROLLED for (int v = 0; v < N; v++) sums[r][v] = V::add_product(w, value[v], sums[r][v]);
        }
    }
    UNROLLED for (int r = 0; r < R; r++) {
        UNROLLED for (int v = 0; v < N; v++) V::store(sums[r][v], results + r * n_dims + V::kLanes * v);
    }
}

template <typename V, typename Type, int R> void add_rows(const float *weights, int64_t stride, const char *const *cells,
                                                          const char *const *next, int64_t n_cells, int64_t n_dims,
                                                          float *results) {
    constexpr int N = R * 4 <= V::kMostSums ? 4 : 2;
    int64_t       d = 0;
    for (; d + N * V::kLanes <= n_dims; d += N * V::kLanes) {
        add_tile<V, Type, R, N>(weights, stride, cells, next, n_cells, d, n_dims, results);
    }
    for (; d + V::kLanes <= n_dims; d += V::kLanes) {
        add_tile<V, Type, R, 1>(weights, stride, cells, next, n_cells, d, n_dims, results);
    }
    if (d < n_dims) add_tile<typename V::Half, Type, R, 1>(weights, stride, cells, next, n_cells, d, n_dims, results);
}

// Calls part<n>(first, ...) for parts of nearly the same size, n <= kMostRows: seven rows are four and three.
template <typename Part, int... N, typename... Arguments>
inline void in_parts(std::integer_sequence<int, N...>, int64_t n_rows, Arguments... arguments) {
    constexpr void (*of[])(int64_t, Arguments...) = { Part::template of<N + 1>... };
    const int64_t n_parts                         = (n_rows + int64_t{ sizeof...(N) } - 1) / int64_t{ sizeof...(N) };
    for (int64_t i = 0, first = 0; i < n_parts; i++) {
        const int64_t end = n_rows * (i + 1) / n_parts;
        of[end - first - 1](first, arguments...);
        first = end;
    }
}

template <typename V> struct ScorePart {
    template <int R> static void of(int64_t r, const float *queries, int64_t n_dims, const float *keys, float *scores,
                                    int64_t stride) {
        score_rows<V, R>(queries + r * n_dims, n_dims, keys, scores + r * stride, stride);
    }
};

template <typename V, typename Type> struct AddPart {
    template <int R> static void of(int64_t r, const float *weights, int64_t stride, const char *const *cells,
                                    const char *const *next, int64_t n_cells, int64_t n_dims, float *results) {
        add_rows<V, Type, R>(weights + r * stride, stride, cells, next, n_cells, n_dims, results + r * n_dims);
    }
};

template <typename V>
void score(const float *queries, int64_t n_queries, int64_t n_dims, const float *keys, float *scores, int64_t stride) {
    in_parts<ScorePart<V>>(std::make_integer_sequence<int, V::kMostRows>(), n_queries, queries, n_dims, keys, scores, stride);
}

template <typename V, typename Type> void add(const float *weights, int64_t n_queries, int64_t stride, const char *const *cells,
                                              const char *const *next, int64_t n_cells, int64_t n_dims, float *results) {
    in_parts<AddPart<V, Type>>(std::make_integer_sequence<int, V::kMostRows>(), n_queries, weights, stride, cells, next, n_cells,
                               n_dims, results);
}

template <typename V> float mask(float *scores, int64_t n, float scale, float slope, const uint16_t *mask) {
    const auto none = V::all(-INFINITY), by = V::all(scale), slopes = V::all(slope);
    auto       highest = none;
    bool       has_nan = false;
    for (int64_t i = 0; i < n; i += V::kLanes) {
        const auto m = V::load_halves(mask + i);
        // Selected, not added: a cell that is not seen may hold anything.
        const auto s = V::where_equal(m, none, none, V::add_product(m, slopes, V::multiply(V::load(scores + i), by)));
        has_nan |= V::has_nan(s);
        highest = V::largest(s, highest);
        V::store(s, scores + i);
    }
    float all[V::kLanes], largest = -INFINITY;
    V::store(highest, all);
    for (const float one : all) largest = one > largest ? one : largest;
    return has_nan ? NAN : largest;
}

// The exponential of x <= 0 within two units in the last place: 2^n times a polynomial, the series of the exponential. 0
// below -87, where results would be denormal.
template <typename V> inline typename V::Floats exponential(typename V::Floats x) {
    const auto lowest  = V::all(-87.0f);
    const auto clamped = V::largest(lowest, x);
    const auto n       = V::round(V::multiply(clamped, V::all(1.44269504f)));
    auto       r       = V::subtract_product(n, V::all(0.693145752f), clamped);  // ln 2 in two parts, the first of few bits
    r                  = V::subtract_product(n, V::all(1.42860677e-6f), r);
    auto y             = V::all(1.0f / 720);
    for (const float c : { 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f }) y = V::add_product(y, r, V::all(c));
    return V::zero_where_less(x, lowest, V::times_power_of_two(y, n));
}

template <typename V> int64_t exponentials(float *scores, int64_t n, float maximum) {
    const auto m = V::all(maximum), fixed = V::all(kFixedPoint);
    auto       total = V::no_sum();
    for (int64_t i = 0; i < n; i += V::kLanes) {
        const auto weight = exponential<V>(V::subtract(V::load(scores + i), m));
        V::store(weight, scores + i);
        total = V::add_integers(total, V::multiply(weight, fixed));
    }
    return V::sum(total);
}

template <typename V> constexpr AttentionLevel level_of() {
    return { { transpose<V, F32>, transpose<V, F16>, transpose<V, Q8_0> },
             { add<V, F32>, add<V, F16>, add<V, Q8_0> },
             { F32::are_finite, F16::are_finite, Q8_0::are_finite },
             list,
             score<V>,
             mask<V>,
             exponentials<V> };
}

}  // namespace
}  // namespace lp::kernels

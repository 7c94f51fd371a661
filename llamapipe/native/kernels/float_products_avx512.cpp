// Products of floats on AVX-512: a vector has the lanes of two weights.
#if defined(__x86_64__)
#include <algorithm>

#include "float_products.hpp"
#include "target.hpp"

// GCC 12 warns about its intrinsics, which begin with undefined vectors.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
LP_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
#include "float_tiles.hpp"

namespace lp::kernels {
namespace {

inline __m256i halves(const uint16_t *a, const uint16_t *b) {
    const __m128i first = load128(a), second = load128(b);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

inline __m512 load_two(F32, const float *a, const float *b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}

inline __m512 load_two(F16, const uint16_t *a, const uint16_t *b) { return _mm512_cvtph_ps(halves(a, b)); }

inline __m512 load_two(BF16, const uint16_t *a, const uint16_t *b) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(a, b)), 16));
}

// sum_of of the eight weights that four vectors have, with the same additions.
inline __m256 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512  ab    = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    const __m512  cd    = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
    const __m512  two   = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m512  one   = _mm512_add_ps(two, _mm512_movehdup_ps(two));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one));
}

template <typename Type> __m512 load_two(const Weights<Type, 8> &weights, int i, int64_t c) {
    return load_two(Type(), weights.w[i] + c, weights.w[i + 1] + c);
}

inline __m512 load_two(const Panel<8> &weights, int i, int64_t c) { return _mm512_loadu_ps(weights.values + c * 8 + i * 8); }

template <int R, typename From>
inline void sum_wide(const From &weights, const Rows<R> &rows, int64_t c, int64_t end, __m512 (&sums)[4][R]) {
    UNROLLED for (int i = 0; i < 4; i++) {
        UNROLLED for (int j = 0; j < R; j++) { sums[i][j] = _mm512_setzero_ps(); }
    }
    for (; c < end; c += 8) {
        __m512 values[R];
        UNROLLED for (int j = 0; j < R; j++) { values[j] = _mm512_broadcast_f32x8(_mm256_loadu_ps(rows.x[j] + c)); }
        UNROLLED for (int i = 0; i < 4; i++) {
            const __m512 w = load_two(weights, 2 * i, c);
            UNROLLED for (int j = 0; j < R; j++) { sums[i][j] = _mm512_fmadd_ps(w, values[j], sums[i][j]); }
        }
    }
}

template <typename Type, int R> void wide_tile(const FloatMatrix &m, const Rows<R> &rows, int64_t first, const float *panel) {
    const Weights<Type, 8> weights(m, first);
    const int64_t          whole = m.n_columns / 8 * 8;
    const auto             sum   = [&](int64_t c, __m512(&sums)[4][R]) {
        const int64_t end = std::min(c + kBlockColumns, whole);
        panel ? sum_wide(Panel<8>{ panel }, rows, c, end, sums) : sum_wide(weights, rows, c, end, sums);
    };
    __m512 totals[4][R];
    sum(0, totals);
    for (int64_t c = kBlockColumns; c < whole; c += kBlockColumns) {
        __m512 sums[4][R];
        sum(c, sums);
        UNROLLED for (int i = 0; i < 4; i++) {
            UNROLLED for (int j = 0; j < R; j++) { totals[i][j] = _mm512_add_ps(totals[i][j], sums[i][j]); }
        }
    }
    UNROLLED for (int j = 0; j < R; j++) {
        _mm256_storeu_ps(rows.results[j] + first, sums_of(totals[0][j], totals[1][j], totals[2][j], totals[3][j]));
    }
    add_rest(weights, rows, first, whole, m.n_columns);
}

struct Avx512 {
    static constexpr int kMostRows = 6, kWeights = 8;  // 24 vectors of sums

    template <typename Type, int R> static void tile(const FloatMatrix &m, const Rows<R> &rows, int64_t first,
                                                     const float *panel) {
        wide_tile<Type>(m, rows, first, panel);
    }

    template <typename Type, int R> static void tiles(const FloatMatrix &m, const Rows<R> &rows, int64_t first, int64_t last) {
        for (; first + 8 <= last; first += 8) {
            wide_tile<Type>(m, rows, first, nullptr);
        }
        kernels::tiles<Type>(m, rows, first, last);
    }
};

}  // namespace

extern const FloatLevel kFloatsAvx512 = { "avx512", multiply<Avx512> };

}  // namespace lp::kernels
LP_TARGET_END
#endif

// Eight floats a vector, for attention and for states. Include it after the level's target pragma, AVX2 or above.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "loads.hpp"

namespace lp::kernels {
namespace {

#define UNROLLED _Pragma("GCC unroll 16")  // sums stay in registers where all loops over them are unrolled

struct Vector8 {
    using Floats                = __m256;
    using Sum                   = __m256i;
    using Half                  = Vector8;
    static constexpr int kLanes = 8, kMostRows = 6, kMostSums = 12;

    static Floats load(const float *from) { return _mm256_loadu_ps(from); }
    static Floats load_halves(const uint16_t *from) { return _mm256_cvtph_ps(load128(from)); }
    static Floats load_bytes(const int8_t *from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(from))); }
    static void   store(Floats a, float *to) { _mm256_storeu_ps(to, a); }
    static Floats all(float a) { return _mm256_set1_ps(a); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats add_product(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static Floats largest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static Floats round(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static bool   has_nan(Floats a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
    static Floats where_equal(Floats a, Floats b, Floats then, Floats otherwise) {
        return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
    }
    static Floats zero_where_less(Floats a, Floats b, Floats otherwise) {
        return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), otherwise);
    }
    static Floats times_power_of_two(Floats a, Floats n) {
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
    }
    static Sum no_sum() { return _mm256_setzero_si256(); }
    static Sum add_integers(Sum total, Floats a) {
        const __m256i n = _mm256_cvtps_epi32(a);
        return _mm256_add_epi64(total,
                                _mm256_add_epi64(_mm256_and_si256(n, _mm256_set1_epi64x(0xffffffff)), _mm256_srli_epi64(n, 32)));
    }
    static int64_t sum(Sum total) {
        int64_t parts[4];
        store256(parts, total);
        return parts[0] + parts[1] + parts[2] + parts[3];
    }
    // Eight rows become eight columns, `stride` floats apart.
    static void transpose(const Floats *a, float *to, int64_t stride) {
        __m256 b[8], c[8];
        UNROLLED for (int i = 0; i < 4; i++) {
            b[2 * i]     = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        UNROLLED for (int i = 0; i < 2; i++) {
            UNROLLED for (int j = 0; j < 2; j++) {
                c[4 * i + 2 * j]     = _mm256_shuffle_ps(b[4 * i + j], b[4 * i + 2 + j], 0x44);
                c[4 * i + 2 * j + 1] = _mm256_shuffle_ps(b[4 * i + j], b[4 * i + 2 + j], 0xee);
            }
        }
        UNROLLED for (int i = 0; i < 4; i++) {
            store(_mm256_permute2f128_ps(c[i], c[4 + i], 0x20), to + i * stride);
            store(_mm256_permute2f128_ps(c[i], c[4 + i], 0x31), to + (4 + i) * stride);
        }
    }

    // out[r] = the sum of sums[r], for sixteen rows: halves are added until one number is left.
    static void add_up(const float (*sums)[16], float *out) {
        for (int i = 0; i < 16; i += 8) {
            Floats rows[8], pairs[4];
            UNROLLED for (int r = 0; r < 8; r++) rows[r] = add(load(sums[i + r]), load(sums[i + r] + 8));
            UNROLLED for (int r = 0; r < 4; r++) {
                const Floats low = _mm256_permute2f128_ps(rows[r], rows[r + 4], 0x20);
                pairs[r]         = add(low, _mm256_permute2f128_ps(rows[r], rows[r + 4], 0x31));
            }
            const Floats first = in_lanes(pairs[0], pairs[1]), second = in_lanes(pairs[2], pairs[3]);
            store(add(_mm256_shuffle_ps(first, second, 0x88), _mm256_shuffle_ps(first, second, 0xdd)), out + i);
        }
    }

private:
    static Floats in_lanes(Floats a, Floats b) { return add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee)); }
};

}  // namespace
}  // namespace lp::kernels

// Sixteen floats a vector, for attention and for states. Include it after the level's target pragma, AVX-512 with DQ and BW.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "floats8.hpp"

namespace lp::kernels {
namespace {

struct Vector16 {
    using Floats                = __m512;
    using Sum                   = __m512i;
    using Half                  = Vector8;
    static constexpr int kLanes = 16, kMostRows = 8, kMostSums = 24;

    static Floats load(const float *from) { return _mm512_loadu_ps(from); }
    static Floats load_halves(const uint16_t *from) { return _mm512_cvtph_ps(load256(from)); }
    static Floats load_bytes(const int8_t *from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(from))); }
    static void   store(Floats a, float *to) { _mm512_storeu_ps(to, a); }
    static Floats all(float a) { return _mm512_set1_ps(a); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats add_product(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats largest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static bool   has_nan(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
    static Floats where_equal(Floats a, Floats b, Floats then, Floats otherwise) {
        return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), then);
    }
    static Floats zero_where_less(Floats a, Floats b, Floats otherwise) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), otherwise);
    }
    static Floats times_power_of_two(Floats a, Floats n) {
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
    }
    static Sum no_sum() { return _mm512_setzero_si512(); }
    static Sum add_integers(Sum total, Floats a) {
        const __m512i n = _mm512_cvtps_epi32(a);
        return _mm512_add_epi64(total,
                                _mm512_add_epi64(_mm512_and_si512(n, _mm512_set1_epi64(0xffffffff)), _mm512_srli_epi64(n, 32)));
    }
    static int64_t sum(Sum total) { return _mm512_reduce_add_epi64(total); }

    // Sixteen rows become sixteen columns, `stride` floats apart.
    static void transpose(const Floats *a, float *to, int64_t stride) {
        __m512 b[16], c[16];
        UNROLLED for (int i = 0; i < 8; i++) {
            b[2 * i]     = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        UNROLLED for (int i = 0; i < 4; i++) {  // c[4 i + j] has column 4 l + j of rows 4 i to 4 i + 3 in its lane l of four
            UNROLLED for (int j = 0; j < 2; j++) {
                c[4 * i + 2 * j]     = _mm512_shuffle_ps(b[4 * i + j], b[4 * i + 2 + j], 0x44);
                c[4 * i + 2 * j + 1] = _mm512_shuffle_ps(b[4 * i + j], b[4 * i + 2 + j], 0xee);
            }
        }
        UNROLLED for (int j = 0; j < 4; j++) {
            const __m512 low_even  = _mm512_shuffle_f32x4(c[j], c[4 + j], 0x88),
                         low_odd   = _mm512_shuffle_f32x4(c[j], c[4 + j], 0xdd);
            const __m512 high_even = _mm512_shuffle_f32x4(c[8 + j], c[12 + j], 0x88);
            const __m512 high_odd  = _mm512_shuffle_f32x4(c[8 + j], c[12 + j], 0xdd);
            store(_mm512_shuffle_f32x4(low_even, high_even, 0x88), to + j * stride);
            store(_mm512_shuffle_f32x4(low_odd, high_odd, 0x88), to + (4 + j) * stride);
            store(_mm512_shuffle_f32x4(low_even, high_even, 0xdd), to + (8 + j) * stride);
            store(_mm512_shuffle_f32x4(low_odd, high_odd, 0xdd), to + (12 + j) * stride);
        }
    }

    // out[r] = the sum of sums[r], for sixteen rows, in the order of Vector8.
    static void add_up(const float (*sums)[16], float *out) {
        Floats eights[8], fours[4], twos[2];  // numbers that are left of each row
        UNROLLED for (int r = 0; r < 8; r++) {
            const int i = r % 4 + r / 4 * 8;
            eights[r]   = in_quarters<0x44, 0xee>(load(sums[i]), load(sums[i + 4]));
        }
        UNROLLED for (int r = 0; r < 4; r++) fours[r] = in_quarters<0x88, 0xdd>(eights[r], eights[r + 4]);
        UNROLLED for (int r = 0; r < 2; r++) twos[r]  = in_lanes<0x44, 0xee>(fours[2 * r], fours[2 * r + 1]);
        store(in_lanes<0x88, 0xdd>(twos[0], twos[1]), out);
    }

private:
    template <int low, int high> static Floats in_quarters(Floats a, Floats b) {
        return add(_mm512_shuffle_f32x4(a, b, low), _mm512_shuffle_f32x4(a, b, high));
    }
    template <int low, int high> static Floats in_lanes(Floats a, Floats b) {
        return add(_mm512_shuffle_ps(a, b, low), _mm512_shuffle_ps(a, b, high));
    }
};

}  // namespace
}  // namespace lp::kernels

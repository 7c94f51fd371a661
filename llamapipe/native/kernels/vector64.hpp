// Vectors of 64 bytes, for AVX-512 with VNNI: one has the 16 rows of a panel. Include it after the level's target pragma.
#pragma once

#include "vector32.hpp"

namespace lp::kernels {
namespace {

struct Vector64 {
    using Int                                  = __m512i;
    using Float                                = __m512;
    static constexpr int        kBytes         = 64;
    static constexpr int        kMostPlaces    = 256;
    static constexpr bool       kSignedProduct = false;
    static Int                  load(const void *address) { return _mm512_loadu_si512(address); }
    static void                 store(void *address, Int v) { _mm512_storeu_si512(address, v); }
    static Int                  bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
    static Int                  set(int32_t value) { return _mm512_set1_epi32(value); }
    static Int                  bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
    static Int                  bit_or(Int a, Int b) { return _mm512_or_si512(a, b); }
    static Int                  bit_xor(Int a, Int b) { return _mm512_xor_si512(a, b); }
    template <int n> static Int left(Int v) { return _mm512_slli_epi16(v, n); }
    template <int n> static Int right(Int v) { return _mm512_srli_epi16(v, n); }
    template <int n> static Int left_32(Int v) { return _mm512_slli_epi32(v, n); }
    template <int n> static Int arithmetic_right(Int v) { return _mm512_srai_epi32(v, n); }
    static Int                  look_up(const int8_t *table, Int codes) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_table(table)), codes);
    }
    static Int  add_bytes(Int a, Int b) { return _mm512_add_epi8(a, b); }
    static Int  subtract_to_zero(Int a, Int b) { return _mm512_subs_epu8(a, b); }
    static Int  average(Int a, Int b) { return _mm512_avg_epu8(a, b); }
    static void put_halves(const uint16_t *v, float factor, float *out) { store_floats(out, product(halves(v), floats(factor))); }
    static Int  left_16(Int v, int n) { return _mm512_sll_epi16(v, _mm_cvtsi32_si128(n)); }
    static Int  right_16(Int v, int n) { return _mm512_srl_epi16(v, _mm_cvtsi32_si128(n)); }
    static void widen_words(Int v, Int (&out)[2]) {
        out[0] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v));
        out[1] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1));
    }
    static Int subtract_where(const uint8_t *bits, Int from, Int v) {
        __mmask64 mask;
        memcpy(&mask, bits, 8);
        return _mm512_mask_sub_epi8(v, mask, from, v);
    }
    // A table is permuted, 64 numbers at a time.
    template <int n> static Int look_up_16(const uint16_t (&table)[n], Int index) {
        if constexpr (n == 64) {
            return _mm512_permutex2var_epi16(load(table), index, load(table + 32));
        } else {
            using HalfTable = const uint16_t (*)[n / 2];
            const Int low   = look_up_16<n / 2>(*reinterpret_cast<HalfTable>(table), index);
            const Int high  = look_up_16<n / 2>(*reinterpret_cast<HalfTable>(table + n / 2), index);
            return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(index, _mm512_set1_epi16(n / 2)), low, high);
        }
    }
    static void fours(const uint32_t *table, const uint16_t *i, Int (&out)[2]) {
        for (int k = 0; k < 2; k++) {
            const __m256i low = Vector32::eight_fours(table, i + 16 * k), high = Vector32::eight_fours(table, i + 16 * k + 8);
            out[k] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
    }
    static void eights(const uint64_t *table, const uint16_t *i, Int (&first)[2], Int (&second)[2]) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        for (int k = 0; k < 2; k++) {
            const __m512i a = eight_eights(table, i + 16 * k), b = eight_eights(table, i + 16 * k + 8);
            first[k]  = _mm512_permutex2var_epi32(a, even, b);
            second[k] = _mm512_permutex2var_epi32(a, _mm512_or_si512(even, _mm512_set1_epi32(1)), b);
        }
    }
    static Int eight_eights(const uint64_t *table, const uint16_t *i) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(Vector32::four_eights(table, i)), Vector32::four_eights(table, i + 4),
                                  1);
    }
    static Int   dpbusd(Int sum, Int weights, Int activations) { return _mm512_dpbusd_epi32(sum, weights, activations); }
    static Int   dpwssd(Int sum, Int a, Int b) { return _mm512_dpwssd_epi32(sum, a, b); }
    static Int   add(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static Int   subtract(Int a, Int b) { return _mm512_sub_epi32(a, b); }
    static Int   multiply(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
    static Int   widen_unsigned(const uint8_t *v) { return _mm512_cvtepu8_epi32(load128(v)); }
    static Int   widen_signed(const int8_t *v) { return _mm512_cvtepi8_epi32(load128(v)); }
    static Int   load_pairs_unsigned(const uint8_t *v) { return _mm512_cvtepu8_epi16(load256(v)); }
    static Int   load_pairs_signed(const int8_t *v) { return _mm512_cvtepi8_epi16(load256(v)); }
    static Int   greater(Int a, Int b) { return _mm512_max_epi32(a, b); }
    static Float as_floats(Int v) { return _mm512_castsi512_ps(v); }
    static Float to_floats(Int v) { return _mm512_cvtepi32_ps(v); }
    static Float floats(float value) { return _mm512_set1_ps(value); }
    static Float product(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float multiply_add(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Float load_floats(const float *v) { return _mm512_loadu_ps(v); }
    static void  store_floats(float *v, Float values) { _mm512_storeu_ps(v, values); }
    static Float halves(const uint16_t *v) { return _mm512_cvtph_ps(load256(v)); }
};

}  // namespace
}  // namespace lp::kernels

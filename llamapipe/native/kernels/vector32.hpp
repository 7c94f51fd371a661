// What panels are unpacked with where vectors have 32 bytes. Include it after the level's target pragma.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "loads.hpp"

namespace lp::kernels {
namespace {

struct Vector32 {
    using Int                                  = __m256i;
    static constexpr int        kBytes         = 32;
    static constexpr int        kFlip          = 0;  // bits of signed weights
    static constexpr int        kMostPlaces    = 0;  // of a grid that is looked up by them
    static constexpr bool       kSignedProduct = false;  // products take weights with signs
    static Int                  load(const void *address) { return load256(address); }
    static void                 store(void *address, Int v) { store256(address, v); }
    static Int                  bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
    static Int                  bit_and(Int a, Int b) { return _mm256_and_si256(a, b); }
    static Int                  bit_or(Int a, Int b) { return _mm256_or_si256(a, b); }
    template <int n> static Int left(Int v) { return _mm256_slli_epi16(v, n); }
    template <int n> static Int right(Int v) { return _mm256_srli_epi16(v, n); }
    static Int                  look_up(const int8_t *table, Int codes) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_table(table)), codes);
    }
    static Int  add_bytes(Int a, Int b) { return _mm256_add_epi8(a, b); }
    static Int  subtract_to_zero(Int a, Int b) { return _mm256_subs_epu8(a, b); }
    static Int  average(Int a, Int b) { return _mm256_avg_epu8(a, b); }  // rounded up
    static void put_halves(const uint16_t *v, float factor, float *out) {
        const __m256 values = _mm256_cvtph_ps(load128(v));
        _mm256_storeu_ps(out, _mm256_mul_ps(values, _mm256_set1_ps(factor)));
    }
    static Int                  set(int32_t value) { return _mm256_set1_epi32(value); }
    static Int                  bit_xor(Int a, Int b) { return _mm256_xor_si256(a, b); }
    template <int n> static Int left_32(Int v) { return _mm256_slli_epi32(v, n); }
    static Int                  left_16(Int v, int n) { return _mm256_sll_epi16(v, _mm_cvtsi32_si128(n)); }
    static Int                  right_16(Int v, int n) { return _mm256_srl_epi16(v, _mm_cvtsi32_si128(n)); }
    static Int                  load_pairs_unsigned(const uint8_t *v) { return _mm256_cvtepu8_epi16(load128(v)); }
    // 16-bit numbers in 32 bits.
    static void widen_words(Int v, Int (&out)[2]) {
        out[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(v));
        out[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1));
    }
    // Byte i of `from` less that of v where bit i is set, elsewhere that of v.
    static Int subtract_where(const uint8_t *bits, Int from, Int v) {
        int32_t all;
        memcpy(&all, bits, 4);
        const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i bit    = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
        const __m256i in     = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(all), places), bit);
        return _mm256_blendv_epi8(v, _mm256_sub_epi8(from, v), _mm256_cmpeq_epi8(in, bit));
    }
    // Entries of a table: out[0] is of the first eight rows.
    static void fours(const uint32_t *table, const uint16_t *i, Int (&out)[2]) {
        for (int k = 0; k < 2; k++) out[k] = eight_fours(table, i + 8 * k);
    }
    static Int eight_fours(const uint32_t *table, const uint16_t *i) {
        const auto at = [&](int k) { return static_cast<int>(table[i[k]]); };
        return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    }
    // The first four bytes of each, and the others.
    static void eights(const uint64_t *table, const uint16_t *i, Int (&first)[2], Int (&second)[2]) {
        for (int k = 0; k < 2; k++) {
            const __m256 a = _mm256_castsi256_ps(four_eights(table, i + 8 * k));
            const __m256 b = _mm256_castsi256_ps(four_eights(table, i + 8 * k + 4));
            first[k]       = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8);
            second[k]      = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
        }
    }
    static Int four_eights(const uint64_t *table, const uint16_t *i) {
        const auto at = [&](int k) { return static_cast<long long>(table[i[k]]); };
        return _mm256_setr_epi64x(at(0), at(1), at(2), at(3));
    }
};

}  // namespace
}  // namespace lp::kernels

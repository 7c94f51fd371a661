// What panels are unpacked with where vectors have 32 bytes. Include it after the level's target pragma.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace llamapipe::kernels {
namespace {

struct Vector32 {
    using Int                          = __m256i;
    static constexpr int        kBytes = 32;
    static Int                  load(const void * address) { return _mm256_loadu_si256((const __m256i *) address); }
    static void                 store(void * address, Int v) { _mm256_storeu_si256((__m256i *) address, v); }
    static Int                  bytes(int value) { return _mm256_set1_epi8((char) value); }
    static Int                  bit_and(Int a, Int b) { return _mm256_and_si256(a, b); }
    static Int                  bit_or(Int a, Int b) { return _mm256_or_si256(a, b); }
    template <int n> static Int left(Int v) { return _mm256_slli_epi16(v, n); }
    template <int n> static Int right(Int v) { return _mm256_srli_epi16(v, n); }
    static Int                  look_up(const int8_t * table, Int codes) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *) table)), codes);
    }
};

}  // namespace
}  // namespace llamapipe::kernels

// Vectors of any bytes in memory, at any address. Include it after the level's target pragma.
#pragma once

#include <immintrin.h>

namespace lp::kernels {
namespace {

inline __m128i load64(const void *from) { return _mm_loadl_epi64(static_cast<const __m128i *>(from)); }
inline __m128i load128(const void *from) { return _mm_loadu_si128(static_cast<const __m128i *>(from)); }
inline __m128i load_table(const void *from) { return _mm_load_si128(static_cast<const __m128i *>(from)); }  // aligned
inline __m256i load256(const void *from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }
inline void    store256(void *to, __m256i v) { _mm256_storeu_si256(static_cast<__m256i *>(to), v); }

}  // namespace
}  // namespace lp::kernels

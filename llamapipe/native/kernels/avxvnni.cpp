// AVX-VNNI, of CPUs without AVX-512: two vectors have the 16 rows of a panel.
#if defined(__x86_64__)
#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "target.hpp"

LP_TARGET("avxvnni,avx2,fma,f16c")

#include "vector32.hpp"
#include "vnni.hpp"

namespace lp::kernels {
namespace {

struct Vector : Vector32 {
    using Float = __m256;
    template <int n> static Int arithmetic_right(Int v) { return _mm256_srai_epi32(v, n); }
    static Int   dpbusd(Int sum, Int weights, Int activations) { return _mm256_dpbusd_avx_epi32(sum, weights, activations); }
    static Int   dpwssd(Int sum, Int a, Int b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
    static Int   add(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int   subtract(Int a, Int b) { return _mm256_sub_epi32(a, b); }
    static Int   multiply(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
    static Int   widen_unsigned(const uint8_t *v) { return _mm256_cvtepu8_epi32(load64(v)); }
    static Int   widen_signed(const int8_t *v) { return _mm256_cvtepi8_epi32(load64(v)); }
    static Int   load_pairs_signed(const int8_t *v) { return _mm256_cvtepi8_epi16(load128(v)); }
    static Int   greater(Int a, Int b) { return _mm256_max_epi32(a, b); }
    static Float as_floats(Int v) { return _mm256_castsi256_ps(v); }
    static Float to_floats(Int v) { return _mm256_cvtepi32_ps(v); }
    static Float floats(float value) { return _mm256_set1_ps(value); }
    static Float product(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float multiply_add(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Float load_floats(const float *v) { return _mm256_loadu_ps(v); }
    static void  store_floats(float *v, Float values) { _mm256_storeu_ps(v, values); }
    static Float halves(const uint16_t *v) { return _mm256_cvtph_ps(load128(v)); }
};

struct Tiles {
    static constexpr const char *kName = "avx-vnni";
    static constexpr Tile        kTile = { 4, 1 }, kSuperTile = kTile, kLowTile = kTile;
    static constexpr Tile        kDirectTile     = { 2, 1 };
    static constexpr int         kMostDirectRows = 2;
};

using AvxVnni = Vnni<Vector, Tiles>;

}  // namespace

extern const Kernel *const kAvxVnni = kKernels<AvxVnni>;

}  // namespace lp::kernels
LP_TARGET_END
#endif

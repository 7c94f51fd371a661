// AVX-512 with VNNI: a vector has the 16 rows of a panel.
#if defined(__x86_64__)
#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "target.hpp"

// GCC 12 warns about its intrinsics, which begin with undefined vectors.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
LP_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "vector64.hpp"
#include "vnni.hpp"

namespace lp::kernels {
namespace {

// Rows and panels of a tile whose sums fit the registers. Panels share the broadcasts of activations, so more of them help
// more than further rows; blocks of 256 columns need other sums beside.
struct Tiles {
    static constexpr const char *kName = "avx512-vnni";
    static constexpr Tile        kTile = { 4, 4 }, kSuperTile = { 8, 2 }, kLowTile = { 4, 2 };
    static constexpr Tile        kDirectTile     = { 4, 4 };
    static constexpr int         kMostDirectRows = 8;
};

using Avx512 = Vnni<Vector64, Tiles>;

}  // namespace

extern const Kernel *const kAvx512Vnni = kKernels<Avx512>;

}  // namespace lp::kernels
LP_TARGET_END
#endif

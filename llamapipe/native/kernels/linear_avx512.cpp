// States and convolutions on AVX-512: sixteen columns a vector.
#if defined(__x86_64__)
#include "linear.hpp"
#include "target.hpp"

// GCC 12 warns about its intrinsics, which begin with undefined vectors.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
LP_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
#include "floats16.hpp"
#include "linear_tiles.hpp"

namespace lp::kernels {

extern const LinearLevel kLinearAvx512 = linear_level_of<Vector16>();

}  // namespace lp::kernels
LP_TARGET_END
#endif

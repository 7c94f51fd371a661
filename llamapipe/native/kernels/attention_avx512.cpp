// Attention on AVX-512: sixteen cells a vector for scores, sixteen dimensions for values.
#if defined(__x86_64__)
#include "attention.hpp"
#include "target.hpp"

// GCC 12 warns about its intrinsics, which begin with undefined vectors.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
LP_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
#include "attention_tiles.hpp"
#include "floats16.hpp"

namespace lp::kernels {

extern const AttentionLevel kAttentionAvx512 = level_of<Vector16>();

}  // namespace lp::kernels
LP_TARGET_END
#endif

// Attention on AVX2: eight cells a vector for scores, eight dimensions for values.
#if defined(__x86_64__)
#include "attention.hpp"
#include "target.hpp"

LP_TARGET("avx2,fma,f16c")
#include "attention_tiles.hpp"

namespace lp::kernels {

extern const AttentionLevel kAttentionAvx2 = level_of<Vector8>();

}  // namespace lp::kernels
LP_TARGET_END
#endif

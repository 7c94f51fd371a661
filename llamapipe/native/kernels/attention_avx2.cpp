// Attention on AVX2: eight cells a vector for scores, eight dimensions for values.
#if defined(__x86_64__)
#include "attention.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "attention_tiles.hpp"

namespace llamapipe::kernels {

extern const AttentionLevel kAttentionAvx2 = level_of<Vector8>();

}  // namespace llamapipe::kernels
#pragma GCC pop_options
#endif

// States and convolutions on AVX2: eight columns a vector.
#if defined(__x86_64__)
#include "linear.hpp"
#include "target.hpp"

LP_TARGET("avx2,fma,f16c")
#include "linear_tiles.hpp"

namespace lp::kernels {

extern const LinearLevel kLinearAvx2 = linear_level_of<Vector8>();

}  // namespace lp::kernels
LP_TARGET_END
#endif

// Products of floats on AVX2: a vector has the lanes of one weight.
#if defined(__x86_64__)
#include <algorithm>

#include "float_products.hpp"
#include "target.hpp"

LP_TARGET("avx2,fma,f16c")
#include "float_tiles.hpp"

namespace lp::kernels {
namespace {

struct Avx2 {
    static constexpr int kMostRows = 3, kWeights = 4;  // twelve sums

    template <typename Type, int R> static void tile(const FloatMatrix &m, const Rows<R> &rows, int64_t first,
                                                     const float *panel) {
        kernels::tile<Type, 4, R>(m, rows, first, panel);
    }

    template <typename Type, int R> static void tiles(const FloatMatrix &m, const Rows<R> &rows, int64_t first, int64_t last) {
        kernels::tiles<Type>(m, rows, first, last);
    }
};

}  // namespace

extern const FloatLevel kFloatsAvx2 = { "avx2", multiply<Avx2> };

}  // namespace lp::kernels
LP_TARGET_END
#endif

// Products of floats on AVX2: a vector has the lanes of one weight.
#if defined(__x86_64__)
#include <algorithm>

#include "float_products.hpp"
#include "target.hpp"

LP_TARGET("avx2,fma,f16c")
#include "float_tiles.hpp"

namespace llamapipe::kernels {
namespace {

struct Avx2 {
    static constexpr int most_rows = 3, n_weights = 4;  // twelve sums

    template <class Type, int R> static void tile(const FloatMatrix & m, const Rows<R> & rows, int64_t first,
                                                  const float * panel) {
        kernels::tile<Type, 4, R>(m, rows, first, panel);
    }

    template <class Type, int R> static void tiles(const FloatMatrix & m, const Rows<R> & rows, int64_t first, int64_t last) {
        kernels::tiles<Type>(m, rows, first, last);
    }
};

}  // namespace

extern const FloatLevel kFloatsAvx2 = { "avx2", multiply<Avx2> };

}  // namespace llamapipe::kernels
LP_TARGET_END
#endif

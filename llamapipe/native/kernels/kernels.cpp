#include "kernels.hpp"

namespace llamapipe::kernels {

#if defined(__x86_64__)
extern const Kernel kAvx2[];  // ended by one without functions
#endif

const Kernel *find(ggml_type type, int64_t n_columns, int64_t n_rows) {
    if (n_rows % kPanelRows != 0) return nullptr;
#if defined(__x86_64__)
    static const Kernel *const level = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2 : nullptr;
    for (const Kernel *kernel = level; kernel && kernel->multiply; kernel++)
        if (kernel->type == type && n_columns % kernel->block_columns == 0) return kernel;
#endif
    return nullptr;
}

}  // namespace llamapipe::kernels

#include "kernels.hpp"

#include <initializer_list>

namespace llamapipe::kernels {

#if defined(__x86_64__)
extern const Kernel kQ4KAvx2, kQ5KAvx2, kQ6KAvx2, kQ4_0Avx2, kQ4_1Avx2, kQ5_0Avx2, kQ5_1Avx2, kQ8_0Avx2, kIQ4_NLAvx2;
#endif

const Kernel *find(ggml_type type, int64_t n_columns, int64_t n_rows) {
    if (n_rows % kPanelRows != 0) return nullptr;
#if defined(__x86_64__)
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2)
        for (const Kernel *kernel : {&kQ4KAvx2, &kQ5KAvx2, &kQ6KAvx2, &kQ4_0Avx2, &kQ4_1Avx2, &kQ5_0Avx2, &kQ5_1Avx2, &kQ8_0Avx2, &kIQ4_NLAvx2})
            if (kernel->type == type && n_columns % kernel->block_columns == 0) return kernel;
#endif
    return nullptr;
}

}  // namespace llamapipe::kernels

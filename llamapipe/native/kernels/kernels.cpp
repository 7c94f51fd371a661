#include "kernels.hpp"

#include "processor.hpp"

namespace llamapipe::kernels {

#if defined(__x86_64__)
extern const Kernel *const kAvx2, *const kAvxVnni, *const kAvx512Vnni;

static const Kernel * level() {
    if (processor().avx512_vnni) return kAvx512Vnni;
    if (processor().avx_vnni) return kAvxVnni;
    return processor().avx2 ? kAvx2 : nullptr;
}
#endif

const Kernel * find([[maybe_unused]] ggml_type type, [[maybe_unused]] int64_t n_columns, int64_t n_rows) {
    if (n_rows % kPanelRows != 0) return nullptr;
#if defined(__x86_64__)
    static const Kernel * const kernels = level();
    for (const Kernel * kernel = kernels; kernel && kernel->multiply; kernel++)
        if (kernel->type == type && n_columns % kernel->block_columns == 0) return kernel;
#endif
    return nullptr;
}

}  // namespace llamapipe::kernels

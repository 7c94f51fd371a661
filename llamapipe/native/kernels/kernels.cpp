#include "kernels.hpp"

#include "processor.hpp"
#include "system.hpp"

#include <cstdlib>

namespace lp::kernels {

#if defined(__x86_64__)
extern const Kernel *const kAvx2, *const kAvxVnni, *const kAvx512Vnni;

static const Kernel *level() {
    if (processor().avx512_vnni) return kAvx512Vnni;
    if (processor().avx_vnni) return kAvxVnni;
    return processor().avx2 ? kAvx2 : nullptr;
}
#elif defined(__aarch64__)
extern const Kernel *const kNeonDotprod;

// Nobody has measured them yet, and a kernel that loses must not be used: they are there for who asks for them.
static const Kernel *level() { return processor().dotprod && system::is_switched_on("LLAMAPIPE_NEON") ? kNeonDotprod : nullptr; }
#else
static const Kernel *level() { return nullptr; }
#endif

const Kernel *find(ggml_type type, int64_t n_columns, int64_t n_rows) {
    if (n_rows % kPanelRows != 0) return nullptr;
    static const Kernel *const kernels = level();
    for (const Kernel *kernel = kernels; kernel && kernel->multiply; kernel++)
        if (kernel->type == type && n_columns % kernel->block_columns == 0) return kernel;
    return nullptr;
}

}  // namespace lp::kernels

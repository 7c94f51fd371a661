// arm_products SIDE TYPE N_ROWS TIMES: multiplies 1,024 rows of 2,048 weights with N_ROWS rows of activations, TIMES times.
// SIDE is "ours", or the name of one of ggml's products of repacked weights. Built and run by count_arm_instructions.py.
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace lp::kernels {
extern const Kernel *const kNeonDotprod;
}

using Product = void (*)(int n, float *s, size_t stride, const void *weights, const void *activations, int n_rows, int n_out);
struct Theirs {
    const char *name;
    int         type;
    Product     of_one, of_four;
};

#define DECLARE(name)                                                                  \
    void ggml_gemv_##name(int, float *, size_t, const void *, const void *, int, int); \
    void ggml_gemm_##name(int, float *, size_t, const void *, const void *, int, int)
extern "C" {
DECLARE(q4_0_4x4_q8_0);
DECLARE(q4_0_4x8_q8_0);
DECLARE(q8_0_4x4_q8_0);
DECLARE(q8_0_4x8_q8_0);
DECLARE(q4_K_8x4_q8_K);
DECLARE(q4_K_8x8_q8_K);
DECLARE(q5_K_8x4_q8_K);
DECLARE(q5_K_8x8_q8_K);
DECLARE(q6_K_8x4_q8_K);
DECLARE(q6_K_8x8_q8_K);
}

#define ENTRY(type, name) { #name, GGML_TYPE_##type, ggml_gemv_##name, ggml_gemm_##name }
static const Theirs kTheirs[] = {
    ENTRY(Q4_0, q4_0_4x4_q8_0), ENTRY(Q4_0, q4_0_4x8_q8_0), ENTRY(Q8_0, q8_0_4x4_q8_0), ENTRY(Q8_0, q8_0_4x8_q8_0),
    ENTRY(Q4_K, q4_K_8x4_q8_K), ENTRY(Q4_K, q4_K_8x8_q8_K), ENTRY(Q5_K, q5_K_8x4_q8_K), ENTRY(Q5_K, q5_K_8x8_q8_K),
    ENTRY(Q6_K, q6_K_8x4_q8_K), ENTRY(Q6_K, q6_K_8x8_q8_K),
};

int main(int, char **arguments) {
    constexpr int     n = 2048, n_out = 1024;
    const std::string side = arguments[1];
    const int         type = atoi(arguments[2]), n_rows = atoi(arguments[3]), times = atoi(arguments[4]);

    // No instruction depends on the values. Larger than any type's weights, and than any activations.
    std::mt19937          random(1);
    std::vector<uint32_t> weights(1 << 20), rows(1 << 18);
    for (uint32_t &word : weights) word = random() & 0x3f3f3f3f;
    for (uint32_t &word : rows) word = random() & 0x3f3f3f3f;
    std::vector<float> out(static_cast<size_t>(n_out) * n_rows);

    if (side == "ours") {
        const lp::kernels::Kernel *kernel = lp::kernels::kNeonDotprod;
        while (kernel->multiply && kernel->type != type) kernel++;
        if (!kernel->multiply) return 2;
        std::vector<const void *> x;
        std::vector<float *>      y;
        for (int j = 0; j < n_rows; j++) {
            x.push_back(reinterpret_cast<const char *>(rows.data()) + kernel->row_bytes(n) * j);
            y.push_back(out.data() + static_cast<size_t>(n_out) * j);
        }
        for (int i = 0; i < times; i++)
            kernel->multiply(weights.data(), n_out / lp::kernels::kPanelRows, n, x.data(), n_rows, y.data());
        return 0;
    }
    for (const Theirs &one : kTheirs)
        if (side == one.name && type == one.type) {
            const int four = n_rows - n_rows % 4;  // the others one by one, as ggml does
            for (int i = 0; i < times; i++) {
                if (four > 0) one.of_four(n, out.data(), n_out, weights.data(), rows.data(), four, n_out);
                for (int j = four; j < n_rows; j++) one.of_one(n, out.data(), n_out, weights.data(), rows.data(), 1, n_out);
            }
            return 0;
        }
    return 3;
}

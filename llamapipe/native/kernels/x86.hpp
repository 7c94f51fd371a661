// What the files for x86 share. Include the standard library before it: what comes after is compiled for the level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.hpp"

#define GGML_COMMON_DECL_C
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"

namespace llamapipe::kernels {

// A quantized row of activations for K-quants: ggml's block_q8_K, and sums as the products need them.
struct RowBlockK {
    int8_t q[QK_K];
    float d;
    int16_t sums16[QK_K / 16];
    int16_t sums32[QK_K / 32];
};

// The same for types with blocks of 32 columns: ggml's block_q8_0 and block_q8_1, their floats rounded to float16 as there.
struct RowBlock32 {
    int8_t q[32];
    float d;
    int32_t sum;
    float d_sum;
};

// A type's blocks as plain integers, for packing.
inline void scale_and_min_k4(int j, const uint8_t *s, uint8_t &scale, uint8_t &min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (uint8_t)((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
        min = (uint8_t)((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
    }
}

size_t k_row_bytes(int64_t n_columns);
void k_quantize(const float *row, int64_t n_columns, int64_t first, int64_t last, void *quantized);
size_t row32_bytes(int64_t n_columns);
void quantize32(const float *row, int64_t n_columns, int64_t first, int64_t last, void *quantized);

}  // namespace llamapipe::kernels

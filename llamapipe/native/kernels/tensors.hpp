// Where a tensor's numbers are.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace lp::kernels {

// The first number of a row. T has const where the tensor is only read.
template <typename T> T *at(const ggml_tensor *tensor, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    const size_t offset = i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
    return reinterpret_cast<T *>(static_cast<char *>(tensor->data) + offset);
}

// The first address from `address` on that is a multiple of `alignment`: ggml's work memory begins anywhere.
inline char *aligned(void *address, size_t alignment) {
    return reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(address) + alignment - 1) / alignment * alignment);
}

}  // namespace lp::kernels

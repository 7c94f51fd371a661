// Brings our kernels into ggml's CPU backend, as a type of weight buffers. Open this file for what a load may ask for.
#pragma once

#include "ggml.h"

#include <cstdint>

namespace llamapipe::kernels {

// Puts our buffer type at the head of the list that llama.cpp asks for the CPU's weights; before the first model is loaded.
// It stays until the process ends. Returns null, or why ggml's kernels are used for everything. Any thread; may throw.
const char * install();

// The CPU level of the kernels, such as "avx2"; null where ggml's are used for everything.
const char * level();

// Whether a matrix of weights would be packed.
bool have(ggml_type type, int64_t n_columns, int64_t n_rows);

// What the models that a thread loads shall pack, and what they have packed.
struct Packing {
    int     n_threads = 1;
    int     n_tensors = 0;
    int64_t n_bytes   = 0;  // of anonymous memory
};

// While one lives, models that this thread loads have their weights packed where there is a kernel. Without one, our buffer
// type declines: other threads may load with ggml's kernels at the same time.
class PackingScope {
public:
    explicit PackingScope(Packing * packing) noexcept;
    ~PackingScope();
    PackingScope(const PackingScope &)             = delete;
    PackingScope & operator=(const PackingScope &) = delete;

private:
    Packing * outer_;
};

}  // namespace llamapipe::kernels

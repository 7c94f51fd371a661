// Which operations are products of floats, and how ggml's threads share one.
#include "float_products.hpp"

#include "processor.hpp"
#include "tensors.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu/traits.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace lp::kernels {

#if defined(__x86_64__)
extern const FloatLevel kFloatsAvx2, kFloatsAvx512;
#endif

namespace {

constexpr int64_t kPieceRows    = 32;          // of weights that a thread takes at once
constexpr size_t  kScratchBytes = 384 * 1024;  // of a thread: it stays in the second-level cache
constexpr size_t  kAlignment    = 64;

const FloatLevel *find_level() {
#if defined(__x86_64__)
    return processor().avx512 ? &kFloatsAvx512 : processor().avx2 ? &kFloatsAvx2 : nullptr;
#else
    return nullptr;
#endif
}

const FloatLevel *level() {
    static const FloatLevel *const found = find_level();
    return found;
}

}  // namespace

bool has_float_products() { return level() != nullptr; }

void multiply_rows(const RowProduct &product, int64_t first, int64_t last, int64_t n) {
    const ggml_tensor *w = product.weights;
    const FloatMatrix  m = { static_cast<const char *>(w->data),
                             product.rows,
                             product.results,
                             w->nb[1],
                             product.row_stride,
                             product.result_stride,
                             w->ne[0],
                             product.row_numbers };
    level()->multiply(w->type, m, first, last, n, Scratch());
}

bool is_float_product(const ggml_tensor *op) {
    if (op->op != GGML_OP_MUL_MAT || op->type != GGML_TYPE_F32) {
        return false;
    }
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const bool         is_float = w->type == GGML_TYPE_F32 || w->type == GGML_TYPE_F16 || w->type == GGML_TYPE_BF16;
    // Weights: what no operation has computed. Keys and values are views of memory that operations write.
    return has_float_products() && is_float && w->op == GGML_OP_NONE && !w->view_src && x->type == GGML_TYPE_F32 &&
           w->nb[0] == ggml_type_size(w->type) && x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
}

size_t float_product_work_size(const ggml_tensor *op, int n_threads) {
    return 2 * kAlignment + (op->src[1]->ne[1] < kManyRows ? 0 : n_threads * kScratchBytes);
}

void compute_float_product(const ggml_compute_params *params, ggml_tensor *op, void (*barrier)(ggml_threadpool *)) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    char *const        work = aligned(params->wdata, kAlignment);
    auto              &next = *reinterpret_cast<std::atomic<int64_t> *>(work);
    Scratch            scratch;
    if (x->ne[1] >= kManyRows) {
        scratch = { reinterpret_cast<float *>(work + kAlignment + params->ith * kScratchBytes), kScratchBytes / sizeof(float) };
    }
    if (params->ith == 0) {
        new (&next) std::atomic<int64_t>(params->nth);  // each thread begins with the piece of its number
    }
    barrier(params->threadpool);
    const int64_t n_pieces = (w->ne[1] + kPieceRows - 1) / kPieceRows, n = n_pieces * x->ne[2] * x->ne[3];
    for (int64_t i = params->ith; i < n; i = next.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t     i2 = i / n_pieces % x->ne[2], i3 = i / n_pieces / x->ne[2];
        const int64_t     first = i % n_pieces * kPieceRows, last = std::min(w->ne[1], first + kPieceRows);
        const int64_t     w2 = i2 / (x->ne[2] / w->ne[2]), w3 = i3 / (x->ne[3] / w->ne[3]);
        const FloatMatrix m = { at<const char>(w, 0, w2, w3),
                                at<const char>(x, 0, i2, i3),
                                at<char>(op, 0, i2, i3),
                                w->nb[1],
                                x->nb[1],
                                op->nb[1],
                                w->ne[0] };
        level()->multiply(w->type, m, first, last, x->ne[1], scratch);
    }
}

}  // namespace lp::kernels

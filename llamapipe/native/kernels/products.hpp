// The loops around the products of a level. Include it after the level's target pragma.
#pragma once

#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "unpack.hpp"

namespace llamapipe::kernels {
namespace {

constexpr int kBlocksAtOnce = 8;  // blocks of 32 columns that are unpacked at once
constexpr int kRowsAtOnce   = 64;   // rows that meet an unpacked part of a panel; their sums stay in the cache

// Rows of activations, and panels, that are multiplied together.
struct Tile {
    int rows, panels;
};

// What a level multiplies: `unpack` makes weights from `n` blocks of a panel, and `accumulate` adds the products of Q
// panels with M rows of activations to y[j][0 .. 16 Q - 1]. All M run the same instructions for a row, in the same order.
template <class P, class Weights, class R> struct Form {
    using Panel                    = P;
    using Unpacked                 = Weights;
    using Row                      = R;
    static constexpr bool kSuper   = sizeof(R) == sizeof(RowBlockK);
    static constexpr int  kColumns = kSuper ? QK_K : 32, kAtOnce = kSuper ? 1 : kBlocksAtOnce;
};

template <class Level, class F>
constexpr Tile kTile = std::is_same_v<typename F::Unpacked, Expanded> ? Level::kLowTile
                       : F::kSuper                                    ? Level::kSuperTile
                                                                      : Level::kTile;

template <class Level, class F, class W, int M, int Q>
__attribute__((noinline)) void tile(const typename F::Panel * const (&panel)[Q], const W * w, int64_t part, int n,
                                    const void * const * rows, float * const * y, int64_t at) {
    const typename F::Row * x[M];
    float *                 out[M];
    for (int j = 0; j < M; j++) {
        x[j]   = (const typename F::Row *) rows[j] + part;
        out[j] = y[j] + at;
    }
    Level::template accumulate<M, Q>(panel, w, n, x, out);
}

// The last rows, at most M.
template <class Level, class F, class W, int M, int Q, class... Arguments>
void rest(int64_t n_rows, const typename F::Panel * const (&panel)[Q], const W * w, const Arguments &... arguments) {
    if constexpr (M > 0) {
        if (n_rows == M)
            tile<Level, F, W, M, Q>(panel, w, arguments...);
        else
            rest<Level, F, W, M - 1, Q>(n_rows, panel, w, arguments...);
    }
}

// What comes next is read while this part is multiplied; the hardware does not look that far ahead.
inline void prefetch(const void * address, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i += 64) __builtin_prefetch((const char *) address + i, 0, 2);
}

// Few rows are multiplied with lines that are made in registers: writing them costs more than making them again.
template <class Level, class F> constexpr int kDirectRows = std::is_same_v<typename F::Unpacked, Lines> ? Level::kDirectRows : 0;

template <class F, class W>
constexpr bool kIsDirect = std::is_same_v<W, Direct> && !std::is_same_v<typename F::Unpacked, Direct>;

// The products of Q panels with the rows [first, last).
template <class Level, class F, class W, int Q>
void multiply_panels(const typename F::Panel * panels, int64_t n_blocks, const void * const * rows, int64_t first, int64_t last,
                     float * const * y, int64_t at) {
    constexpr int M = kIsDirect<F, W> ? kDirectRows<Level, F> : kTile<Level, F>.rows;
    for (int64_t j = first; j < last; j++) memset(y[j] + at, 0, Q * kPanelRows * sizeof(float));
    for (int64_t i = 0; i < n_blocks; i += F::kAtOnce) {
        const int                 n = n_blocks - i < F::kAtOnce ? (int) (n_blocks - i) : F::kAtOnce;
        const typename F::Panel * panel[Q];
        W                         w[Q];
        for (int q = 0; q < Q; q++) {
            panel[q] = panels + n_blocks * q + i;
            if constexpr (!std::is_same_v<W, Direct>) prefetch(panel[q] + n, sizeof(*panel[q]) * (size_t) n);
            Level::unpack(panel[q], n, w[q]);
        }
        int64_t j = first;
        for (; j + M <= last; j += M) tile<Level, F, W, M, Q>(panel, w, i, n, rows + j, y + j, at);
        rest<Level, F, W, M - 1, Q>(last - j, panel, w, i, n, rows + j, y + j, at);
    }
}

// The panels [p, n_panels), Q at a time.
template <class Level, class F, class W, int Q>
void multiply_all(const typename F::Panel * all, int64_t p, int64_t n_panels, int64_t n_blocks, const void * const * rows,
                  int64_t first, int64_t last, float * const * y) {
    for (; p + Q <= n_panels; p += Q)
        multiply_panels<Level, F, W, Q>(all + n_blocks * p, n_blocks, rows, first, last, y, kPanelRows * p);
    if constexpr (Q > 1) multiply_all<Level, F, W, kIsDirect<F, W> ? Q / 2 : 1>(all, p, n_panels, n_blocks, rows, first, last, y);
}

template <class Level, class F>
void multiply(const void * panels, int64_t n_panels, int64_t n_columns, const void * const * rows, int64_t n_rows,
              float * const * y) {
    constexpr int      Q        = kTile<Level, F>.panels;
    const int64_t      n_blocks = n_columns / F::kColumns;
    const auto * const all      = (const typename F::Panel *) panels;
    for (int64_t first = 0; first < n_rows; first += kRowsAtOnce) {
        const int64_t last = first + kRowsAtOnce < n_rows ? first + kRowsAtOnce : n_rows;
        if constexpr (kDirectRows<Level, F> > 0) {
            if (last - first <= kDirectRows<Level, F>) {
                multiply_all<Level, F, Direct, Level::kDirectPanels>(all, 0, n_panels, n_blocks, rows, first, last, y);
                continue;
            }
        }
        multiply_all<Level, F, typename F::Unpacked, Q>(all, 0, n_panels, n_blocks, rows, first, last, y);
    }
}

template <class Level, class P, class W, class R> constexpr Kernel kernel_of(ggml_type type, const char * level) {
    using F = Form<P, W, R>;
    return { type,
             level,
             std::is_same_v<P, PanelNVFP4> ? QK_NVFP4 : F::kColumns,
             kDirectRows<Level, F> > 0 && Level::kDirectPanels > kTile<Level, F>.panels ? Level::kDirectPanels
                                                                                        : kTile<Level, F>.panels,
             std::is_same_v<W, Expanded> ? kRowsAtOnce : 16,
             panel_bytes<P>,
             F::kSuper ? row_bytes_k : row_bytes_32,
             pack<P>,
             F::kSuper ? quantize_k : quantize_32,
             multiply<Level, F> };
}

// All of a level's kernels, ended by one without functions.
#define KERNELS(Level, name)                                                              \
    kernel_of<Level, PanelQ4K, Lines, RowBlockK>(GGML_TYPE_Q4_K, name),                   \
            kernel_of<Level, PanelQ5K, Lines, RowBlockK>(GGML_TYPE_Q5_K, name),           \
            kernel_of<Level, PanelQ6K, Lines, RowBlockK>(GGML_TYPE_Q6_K, name),           \
            kernel_of<Level, PanelQ8_0, Direct, RowBlock32>(GGML_TYPE_Q8_0, name),        \
            kernel_of<Level, PanelQ5_0, Lines, RowBlock32>(GGML_TYPE_Q5_0, name),         \
            kernel_of<Level, PanelQ5_1, Lines, RowBlock32>(GGML_TYPE_Q5_1, name),         \
            kernel_of<Level, PanelQ4_0, Lines, RowBlock32>(GGML_TYPE_Q4_0, name),         \
            kernel_of<Level, PanelQ4_1, Lines, RowBlock32>(GGML_TYPE_Q4_1, name),         \
            kernel_of<Level, PanelIQ4_NL, Lines, RowBlock32>(GGML_TYPE_IQ4_NL, name),     \
            kernel_of<Level, PanelMXFP4, Lines, RowBlock32>(GGML_TYPE_MXFP4, name),       \
            kernel_of<Level, PanelNVFP4, LinesNVFP4, RowBlock32>(GGML_TYPE_NVFP4, name),  \
            kernel_of<Level, PanelIQ4_XS, Lines, RowBlockK>(GGML_TYPE_IQ4_XS, name),      \
            kernel_of<Level, PanelQ3K, Expanded, RowBlockK>(GGML_TYPE_Q3_K, name),        \
            kernel_of<Level, PanelQ2K, Expanded, RowBlockK>(GGML_TYPE_Q2_K, name),        \
            kernel_of<Level, PanelIQ3_XXS, Expanded, RowBlockK>(GGML_TYPE_IQ3_XXS, name), \
            kernel_of<Level, PanelIQ3_S, Expanded, RowBlockK>(GGML_TYPE_IQ3_S, name),     \
            kernel_of<Level, PanelIQ2_XXS, Expanded, RowBlockK>(GGML_TYPE_IQ2_XXS, name), \
            kernel_of<Level, PanelIQ2_XS, Expanded, RowBlockK>(GGML_TYPE_IQ2_XS, name),   \
            kernel_of<Level, PanelIQ2_S, Expanded, RowBlockK>(GGML_TYPE_IQ2_S, name),     \
            kernel_of<Level, PanelIQ1_S, Expanded, RowBlockK>(GGML_TYPE_IQ1_S, name),     \
            kernel_of<Level, PanelIQ1_M, Expanded, RowBlockK>(GGML_TYPE_IQ1_M, name),     \
            kernel_of<Level, PanelTQ1_0, Expanded, RowBlockK>(GGML_TYPE_TQ1_0, name),     \
            kernel_of<Level, PanelTQ2_0, Expanded, RowBlockK>(GGML_TYPE_TQ2_0, name), {}

}  // namespace
}  // namespace llamapipe::kernels

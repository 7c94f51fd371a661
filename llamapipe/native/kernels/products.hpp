// The loops around the products of a level. Include it after the level's target pragma.
#pragma once

#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "unpack.hpp"

namespace lp::kernels {
namespace {

constexpr int kBlocksAtOnce = 8;  // blocks of 32 columns that are unpacked at once
constexpr int kRowsAtOnce   = 64;   // rows that meet an unpacked part of a panel; their sums stay in the cache

// Rows of activations, and panels, that are multiplied together.
struct Tile {
    int rows, panels;
};

// What a level multiplies: `unpack` makes weights from `n` blocks of a panel, and `accumulate` adds the products of Q
// panels with M rows of activations to y[j][0 .. 16 Q - 1]. All M run the same instructions for a row, in the same order.
template <typename P, typename Weights> struct Form {
    using Panel                    = P;
    using Unpacked                 = Weights;
    using Row                      = typename PanelType<P>::RowBlock;
    static constexpr bool kSuper   = kIsSuper<P>;
    static constexpr int  kColumns = PanelType<P>::kColumns, kAtOnce = kSuper ? 1 : kBlocksAtOnce / kBlocks<P>;
};

template <typename Level, typename F>
constexpr Tile kTile = std::is_same_v<typename F::Unpacked, Expanded> ? Level::kLowTile
                       : F::kSuper                                    ? Level::kSuperTile
                                                                      : Level::kTile;

template <typename Level, typename F, typename W, int M, int Q>
__attribute__((noinline)) void tile(const typename F::Panel *const (&panel)[Q], const W *w, int64_t part, int n,
                                    const void *const *rows, float *const *y, int64_t at) {
    const typename F::Row *x[M];
    float                 *out[M];
    for (int j = 0; j < M; j++) {
        x[j]   = static_cast<const typename F::Row *>(rows[j]) + part * kBlocks<typename F::Panel>;
        out[j] = y[j] + at;
    }
    Level::template accumulate<M, Q>(panel, w, n, x, out);
}

// The last rows, at most M.
template <typename Level, typename F, typename W, int M, int Q, typename... Arguments>
void rest(int64_t n_rows, const typename F::Panel *const (&panel)[Q], const W *w, const Arguments &...arguments) {
    if constexpr (M > 0) {
        if (n_rows == M)
            tile<Level, F, W, M, Q>(panel, w, arguments...);
        else
            rest<Level, F, W, M - 1, Q>(n_rows, panel, w, arguments...);
    }
}

// What comes next is read while this part is multiplied; the hardware does not look that far ahead.
inline void prefetch(const void *address, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i += 64) __builtin_prefetch(static_cast<const char *>(address) + i, 0, 2);
}

// Few rows are multiplied with lines that are made in registers: writing them costs more than making them again, and memory is
// read while rows are multiplied instead of before.
template <typename Level, typename F> constexpr int kMostDirectRows =
        std::is_same_v<typename F::Unpacked, Lines> ? Level::kMostDirectRows : 0;

template <typename F, typename W>
constexpr bool kIsDirect = std::is_same_v<W, Direct> && !std::is_same_v<typename F::Unpacked, Direct>;

// The products of Q panels with the rows [first, last), M at a time.
template <typename Level, typename F, typename W, int M, int Q>
void multiply_panels(const typename F::Panel *panels, int64_t n_blocks, const void *const *rows, int64_t first, int64_t last,
                     float *const *y, int64_t at) {
    for (int64_t j = first; j < last; j++) memset(y[j] + at, 0, Q * kPanelRows * sizeof(float));
    for (int64_t i = 0; i < n_blocks; i += F::kAtOnce) {
        const int                n = n_blocks - i < F::kAtOnce ? static_cast<int>(n_blocks - i) : F::kAtOnce;
        const typename F::Panel *panel[Q];
        W                        w[Q];
        for (int q = 0; q < Q; q++) {
            panel[q] = panels + n_blocks * q + i;
            if constexpr (!std::is_same_v<W, Direct>) prefetch(panel[q] + n, sizeof(*panel[q]) * n);
            Level::unpack(panel[q], n, w[q]);
        }
        int64_t j = first;
        for (; j + M <= last; j += M) tile<Level, F, W, M, Q>(panel, w, i, n, rows + j, y + j, at);
        rest<Level, F, W, M - 1, Q>(last - j, panel, w, i, n, rows + j, y + j, at);
    }
}

// The panels [p, n_panels), Q at a time.
template <typename Level, typename F, typename W, int M, int Q>
void multiply_all(const typename F::Panel *all, int64_t p, int64_t n_panels, int64_t n_blocks, const void *const *rows,
                  int64_t first, int64_t last, float *const *y) {
    for (; p + Q <= n_panels; p += Q)
        multiply_panels<Level, F, W, M, Q>(all + n_blocks * p, n_blocks, rows, first, last, y, kPanelRows * p);
    if constexpr (Q > 1)
        multiply_all<Level, F, W, M, kIsDirect<F, W> ? Q / 2 : 1>(all, p, n_panels, n_blocks, rows, first, last, y);
}

template <typename Level, typename F>
void multiply(const void *panels, int64_t n_panels, int64_t n_columns, const void *const *rows, int64_t n_rows, float *const *y) {
    constexpr Tile    few = Level::kDirectTile, more = kTile<Level, F>;
    const int64_t     n_blocks = n_columns / F::kColumns;
    const auto *const all      = static_cast<const typename F::Panel *>(panels);
    for (int64_t first = 0; first < n_rows; first += kRowsAtOnce) {
        const int64_t  last    = first + kRowsAtOnce < n_rows ? first + kRowsAtOnce : n_rows;
        constexpr auto most    = kMostDirectRows<Level, F>;
        const auto     compute = [&](auto function) { function(all, 0, n_panels, n_blocks, rows, first, last, y); };
        if constexpr (most > 0) {
            if (last - first <= few.rows) {
                compute(multiply_all<Level, F, Direct, few.rows, few.panels>);
                continue;
            }
        }
        if constexpr (most > few.rows) {
            if (last - first <= most) {
                compute(multiply_all<Level, F, Direct, more.rows, more.panels>);
                continue;
            }
        }
        compute(multiply_all<Level, F, typename F::Unpacked, more.rows, more.panels>);
    }
}

template <typename Level, typename P, typename W> constexpr Kernel kernel_of() {
    using F    = Form<P, W>;
    using Type = PanelType<P>;
    // Types of at most 3 bits: files leave out each eighth sign of some.
    static_assert(sizeof(P) * Type::kParts * 100 <=
                          kPanelRows * sizeof(typename Type::Block) * (std::is_same_v<W, Expanded> ? 107 : 103),
                  "a panel takes hardly more memory than its rows in a file");
    return { Type::kType,
             Level::kName,
             Type::kBlockColumns,
             kMostDirectRows<Level, F> > 0 && Level::kDirectTile.panels > kTile<Level, F>.panels ? Level::kDirectTile.panels
                                                                                                 : kTile<Level, F>.panels,
             std::is_same_v<W, Expanded> ? kRowsAtOnce : 16,
             panel_bytes<P>,
             F::kSuper ? row_bytes_k : row_bytes_32,
             pack<P>,
             F::kSuper ? quantize_k : quantize_32,
             multiply<Level, F> };
}

// All of a level's kernels, ended by one without functions.
#define KERNEL(name, block, n, weights, numbers) kernel_of<Level, Panel##name, weights>(),
template <typename Level> constexpr Kernel kKernels[] = { PANELS(KERNEL){} };
#undef KERNEL

}  // namespace
}  // namespace lp::kernels

// Products with vpdpbusd, for vectors of 32 or 64 bytes. Include it after the level's target pragma.
//
// vpdpbusd multiplies unsigned weights by signed activations and adds four products to a 32-bit lane, so sums of a block
// need no care for overflow. Signed weights are multiplied as unsigned ones that are 128 greater, and 128 times the sum of
// the activations is subtracted.
#pragma once

#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "products.hpp"
#include "unpack.hpp"

namespace llamapipe::kernels {
namespace {

template <> constexpr int kOffset<PanelQ8_0> = 128;
template <> constexpr int kOffset<PanelIQ4_NL> = 128;

inline int32_t four(const void *address) {
    int32_t bits;
    memcpy(&bits, address, 4);
    return bits;
}

// V: the vectors; P: how many of them hold the 16 rows of a panel.
template <class V, int tile_rows> struct Vnni {
    using Int = typename V::Int;
    using Float = typename V::Float;
    static constexpr int kTile = tile_rows, P = 64 / V::kBytes, kRows = V::kBytes / 4;

    template <class Panel> static void unpack(const Panel *panel, int n, Lines &out) {
        kernels::unpack<V>(panel, n, out);
        if constexpr (std::is_same_v<Panel, PanelIQ4_NL> || std::is_same_v<Panel, PanelIQ4_XS>)
            for (int line = 0; line < (std::is_same_v<Panel, PanelIQ4_XS> ? 64 : 8 * n); line++)
                for (int p = 0; p < 64; p += V::kBytes)
                    V::store(out.q[line] + p, V::bit_xor(V::load(out.q[line] + p), V::bytes(-128)));
    }
    static void unpack(const PanelQ8_0 *, int, InPlace &) {}

    // sum[j] += the products of n lines with activations from `column` on.
    template <int M, int n, class Row>
    static void add_lines(const uint8_t (*line)[64], const Row *const *x, int column, int flip, Int (&sum)[M][P]) {
#pragma GCC unroll 8
        for (int g = 0; g < n; g++) {
            Int w[P];
            for (int p = 0; p < P; p++) {
                w[p] = V::load(line[g] + V::kBytes * p);
                if (flip) w[p] = V::bit_xor(w[p], V::bytes(-128));
            }
            for (int j = 0; j < M; j++) {
                const Int a = V::set(four(x[j]->q + column + 4 * g));
                for (int p = 0; p < P; p++) sum[j][p] = V::dpbusd(sum[j][p], w[p], a);
            }
        }
    }

    static void add_float(float *y, Int sum, Float scale) {
        V::store_floats(y, V::multiply_add(V::to_floats(sum), scale, V::load_floats(y)));
    }

    template <class Panel> static Float row_scales(const Panel *panel, int r) { return V::halves(panel->d + r); }
    static Float row_scales(const PanelMXFP4 *panel, int r) {
        // Half of 2^(e - 127), which is a denormal for e below 2.
        int32_t bits[kRows];
        for (int i = 0; i < kRows; i++) {
            const int32_t e = panel->e[r + i];
            bits[i] = e < 2 ? 0x00200000 << e : (e - 1) << 23;
        }
        return V::load_floats((const float *)bits);
    }

    // The scales of sub-block s of 16 rows as 32-bit integers.
    template <class Panel> static Int scale(const Panel *panel, int b, int p) {
        return V::widen_unsigned(panel->scales[b] + kRows * p);
    }
    static Int scale(const PanelQ6K *panel, int s, int p) {
        const Int both = V::load_pairs_signed(panel->scales[s / 2][kRows * p]);
        return s % 2 ? V::template arithmetic_right<16>(both) : V::template arithmetic_right<16>(V::template left_32<16>(both));
    }

    template <int M, int in_block, class Panel>
    static void sum_super_block(const Panel *panel, const Lines &w, const RowBlockK *const *x, Int (&sum)[M][P]) {
        for (int j = 0; j < M; j++)
            for (int p = 0; p < P; p++) sum[j][p] = V::set(0);
        for (int b = 0; b < 64 / in_block; b++) {
            Int part[M][P];
            for (int j = 0; j < M; j++)
                for (int p = 0; p < P; p++) part[j][p] = V::set(0);
            add_lines<M, in_block>(w.q + in_block * b, x, 4 * in_block * b, 0, part);
            for (int p = 0; p < P; p++) {
                const Int s = scale(panel, b, p);
                for (int j = 0; j < M; j++) sum[j][p] = V::add(sum[j][p], V::multiply(part[j][p], s));
            }
        }
    }

    template <int M, class Panel>
    static void accumulate_with_minima(const Panel *panel, const Lines &w, const RowBlockK *const *x, float *const *y) {
        Int sum[M][P];
        sum_super_block<M, 8>(panel, w, x, sum);
        for (int p = 0; p < P; p++) {
            Int minima[M];
            for (int j = 0; j < M; j++) minima[j] = V::set(0);
            for (int i = 0; i < 4; i++) {
                const Int m = V::load_pairs_unsigned(panel->mins[i][kRows * p]);
                for (int j = 0; j < M; j++) minima[j] = V::dpwssd(minima[j], m, V::set(four(x[j]->sums32 + 2 * i)));
            }
            const Float d = V::halves(panel->d + kRows * p), dmin = V::halves(panel->dmin + kRows * p);
            for (int j = 0; j < M; j++) {
                add_float(y[j] + kRows * p, sum[j][p], V::product(d, V::floats(x[j]->d)));
                add_float(y[j] + kRows * p, minima[j], V::product(dmin, V::floats(-x[j]->d)));
            }
        }
    }

    template <int M>
    static void accumulate(const PanelQ4K *panel, const Lines &w, int, const RowBlockK *const *x, float *const *y) {
        accumulate_with_minima<M>(panel, w, x, y);
    }

    template <int M>
    static void accumulate(const PanelQ5K *panel, const Lines &w, int, const RowBlockK *const *x, float *const *y) {
        accumulate_with_minima<M>(panel, w, x, y);
    }

    template <int M>
    static void accumulate(const PanelQ6K *panel, const Lines &w, int, const RowBlockK *const *x, float *const *y) {
        Int sum[M][P];
        sum_super_block<M, 4>(panel, w, x, sum);
        for (int p = 0; p < P; p++) {
            // Weights are 32 less than what was multiplied.
            Int offset[M];
            for (int j = 0; j < M; j++) offset[j] = V::set(0);
            for (int i = 0; i < 8; i++) {
                const Int s = V::load_pairs_signed(panel->scales[i][kRows * p]);
                for (int j = 0; j < M; j++) offset[j] = V::dpwssd(offset[j], s, V::set(four(x[j]->sums16 + 2 * i)));
            }
            const Float d = V::halves(panel->d + kRows * p);
            for (int j = 0; j < M; j++) {
                const Int whole = V::subtract(sum[j][p], V::template left_32<5>(offset[j]));
                add_float(y[j] + kRows * p, whole, V::product(d, V::floats(x[j]->d)));
            }
        }
    }

    template <int M>
    static void accumulate(const PanelIQ4_XS *panel, const Lines &w, int, const RowBlockK *const *x, float *const *y) {
        Int sum[M][P];
        for (int j = 0; j < M; j++)
            for (int p = 0; p < P; p++) sum[j][p] = V::set(0);
        for (int b = 0; b < 8; b++) {
            Int part[M][P];
            for (int j = 0; j < M; j++)
                for (int p = 0; p < P; p++) part[j][p] = V::set(-128 * x[j]->sums32[b]);
            add_lines<M, 8>(w.q + 8 * b, x, 32 * b, 0, part);
            for (int p = 0; p < P; p++) {
                const Int s = V::widen_signed(panel->scales[b] + kRows * p);
                for (int j = 0; j < M; j++) sum[j][p] = V::add(sum[j][p], V::multiply(part[j][p], s));
            }
        }
        for (int p = 0; p < P; p++) {
            const Float d = V::halves(panel->d + kRows * p);
            for (int j = 0; j < M; j++) add_float(y[j] + kRows * p, sum[j][p], V::product(d, V::floats(x[j]->d)));
        }
    }

    template <int M, class Panel, class Weights>
    static void accumulate(const Panel *panel, const Weights &w, int n, const RowBlock32 *const *x, float *const *y) {
        const RowBlock32 *block[M];
        for (int j = 0; j < M; j++) block[j] = x[j];
        for (int b = 0; b < n; b++, panel++) {
            Int sum[M][P];
            for (int j = 0; j < M; j++)
                for (int p = 0; p < P; p++) sum[j][p] = V::set(-kOffset<Panel> * block[j]->sum);
            if constexpr (std::is_same_v<Panel, PanelQ8_0>)
                add_lines<M, 8>((const uint8_t(*)[64])panel->q, block, 0, 1, sum);
            else
                add_lines<M, 8>(w.q + 8 * b, block, 0, 0, sum);
            for (int p = 0; p < P; p++) {
                const Float d = row_scales(panel, kRows * p);
                for (int j = 0; j < M; j++) {
                    add_float(y[j] + kRows * p, sum[j][p], V::product(d, V::floats(block[j]->d)));
                    if constexpr (kOffset<Panel> == 0) {
                        const Float m = V::halves(panel->m + kRows * p), s = V::floats(block[j]->d_sum);
                        V::store_floats(y[j] + kRows * p, V::multiply_add(m, s, V::load_floats(y[j] + kRows * p)));
                    }
                }
            }
            for (int j = 0; j < M; j++) block[j]++;
        }
    }
};

}  // namespace
}  // namespace llamapipe::kernels

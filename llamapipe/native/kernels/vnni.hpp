// Products with vpdpbusd, for vectors of 32 or 64 bytes, or ARM's sdot, for 16. Include it after the level's target pragma.
//
// vpdpbusd multiplies unsigned weights by signed activations and adds four products to a 32-bit lane, so sums of a block
// need no care for overflow. Signed weights are multiplied as unsigned ones that are 128 greater, and 128 times the sum of
// the activations is subtracted. sdot multiplies signed weights, and unsigned ones of at most 7 bits are such, too.
#pragma once

#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "products.hpp"
#include "unpack.hpp"

namespace lp::kernels {
namespace {

inline int32_t four(const void *address) {
    int32_t bits;
    memcpy(&bits, address, 4);
    return bits;
}

// V: the vectors; P: how many of them hold the 16 rows of a panel. Q panels at once share the broadcasts of activations;
// i counts the vectors of all.
template <typename V, typename Tiles> struct Vnni : Tiles {
    using Int              = typename V::Int;
    using Float            = typename V::Float;
    static constexpr int P = 64 / V::kBytes, kRows = V::kBytes / 4;

    // Weights become what is multiplied.
    struct Factors : V {
        static constexpr int kFlip = V::kSignedProduct ? 0 : -128;
    };

    template <typename Panel, typename Weights> static void unpack(const Panel *panel, int n, Weights &out) {
        kernels::unpack<Factors>(panel, n, out);
    }
    template <typename Panel> static void unpack(const Panel *, int, Direct &) {}

    template <int M, int I> static void set_all(Int (&sum)[M][I], int value) {
        for (int j = 0; j < M; j++)
            for (int i = 0; i < I; i++) sum[j][i] = V::set(value);
    }

    // sum[j] += the products of a group of n lines of each panel with activations from `column` on.
    template <int n, int M, int Q, typename Panel, typename Weights, typename Row>
    static void add_lines(const Panel *const (&panel)[Q], const Weights *weights, int group, const Row *const *x, int column,
                          Int (&sum)[M][Q * P]) {
        each<n>([&](auto g) {
            Int w[Q * P];
            for (int i = 0; i < Q * P; i++) w[i] = line<Factors, n, g>(panel[i / P], weights + i / P, group, V::kBytes * (i % P));
            for (int j = 0; j < M; j++) {
                if constexpr (V::kSignedProduct) {  // sdot takes four bytes of a vector by their place
                    const Int a = V::load(x[j]->q + column + 16 * (g / 4));
                    for (int i = 0; i < Q * P; i++) sum[j][i] = V::template sdot<g % 4>(sum[j][i], w[i], a);
                } else {
                    const Int a = V::set(four(x[j]->q + column + 4 * g));
                    for (int i = 0; i < Q * P; i++) sum[j][i] = V::dpbusd(sum[j][i], w[i], a);
                }
            }
        });
    }

    static void add_float(float *y, Int sum, Float scale) {
        V::store_floats(y, V::multiply_add(V::to_floats(sum), scale, V::load_floats(y)));
    }

    template <typename Panel> static Float row_scales(const Panel *panel, int r) { return V::halves(panel->d + r); }
    static Float                           row_scales(const PanelMXFP4 *panel, int r) {
        // Half of 2^(e - 127), which is a denormal for e below 2: the greater of the two as integers.
        const Int e = V::widen_unsigned(panel->e + r), one = V::set(1);
        return V::as_floats(V::greater(V::template left_32<23>(V::subtract(e, one)), V::template left_32<21>(V::add(e, one))));
    }

    // The scales of sub-block s of 16 rows as 32-bit integers.
    template <typename Panel> static Int scale(const Panel *panel, int b, int p) {
        return V::widen_unsigned(panel->scales[b] + kRows * p);
    }
    static Int scale(const PanelQ6_K *panel, int s, int p) { return scale_of_pairs(panel->scales, s, p); }
    static Int scale(const Expanded *w, int s, int p) { return scale_of_pairs(w->scales, s, p); }
    static Int scale_of_pairs(const int8_t (*scales)[16][2], int s, int p) {
        const Int both = V::load_pairs_signed(scales[s / 2][kRows * p]);
        return s % 2 ? V::template arithmetic_right<16>(both) : V::template arithmetic_right<16>(V::template left_32<16>(both));
    }

    template <int in_block, int M, int Q, typename Panel, typename Weights>
    static void sum_super_block(const Panel *const (&panel)[Q], const Weights *w, const RowBlockK *const *x,
                                Int (&sum)[M][Q * P]) {
        set_all(sum, 0);
        constexpr bool is_scaled = in_block < 64;
        constexpr int  at_once   = is_scaled ? in_block : 16;
        for (int b = 0; b < 64 / at_once; b++) {
            Int part[M][Q * P];
            set_all(part, 0);
            add_lines<at_once, M, Q>(panel, w, b, x, 4 * at_once * b, part);
            for (int i = 0; i < Q * P; i++) {
                const Int s = is_scaled ? scale(panel[i / P], b, i % P) : V::set(1);
                for (int j = 0; j < M; j++) sum[j][i] = V::add(sum[j][i], is_scaled ? V::multiply(part[j][i], s) : part[j][i]);
            }
        }
    }

    template <int M, int Q, typename Panel, typename Weights>
    static void accumulate_with_minima(const Panel *const (&panel)[Q], const Weights *w, const RowBlockK *const *x,
                                       float *const *y) {
        Int sum[M][Q * P];
        sum_super_block<kNumbers<Panel>.lines, M, Q>(panel, w, x, sum);
        for (int i = 0; i < Q * P; i++) {
            const Panel *const one = panel[i / P];
            const int          row = kRows * (i % P);
            Int                minima[M];
            for (int j = 0; j < M; j++) minima[j] = V::set(0);
            for (int k = 0; k < 4; k++) {
                const Int m = V::load_pairs_unsigned(one->mins[k][row]);
                for (int j = 0; j < M; j++) minima[j] = V::dpwssd(minima[j], m, V::set(four(x[j]->sums32 + 2 * k)));
            }
            const Float d = V::halves(one->d + row), dmin = V::halves(one->dmin + row);
            for (int j = 0; j < M; j++) {
                add_float(y[j] + kRows * i, sum[j][i], V::product(d, V::floats(x[j]->d)));
                add_float(y[j] + kRows * i, minima[j], V::product(dmin, V::floats(-x[j]->d)));
            }
        }
    }

    template <int M, int Q, typename Panel, typename Weights>
    static void accumulate(const Panel *const (&panel)[Q], const Weights *w, int, const RowBlockK *const *x, float *const *y) {
        accumulate_with_minima<M, Q>(panel, w, x, y);
    }

    static Int pairs(const int8_t *v) { return V::load_pairs_signed(v); }
    static Int pairs(const uint8_t *v) { return V::load_pairs_unsigned(v); }

    // sum[j] += numbers of n adjacent sub-blocks of columns, in pairs, times the sums of activations.
    template <int n, int M, typename T>
    static void add_sums(const T (*numbers)[16][2], int row, const RowBlockK *const *x, Int (&sum)[M]) {
        for (int k = 0; k < n / 2; k++) {
            const Int s = pairs(numbers[k][row]);
            for (int j = 0; j < M; j++)
                sum[j] = V::dpwssd(sum[j], s, V::set(four((n == 16 ? x[j]->sums16 : x[j]->sums32) + 2 * k)));
        }
    }

    template <int M, int Q, typename Weights>
    static void accumulate(const PanelQ6_K *const (&panel)[Q], const Weights *w, int, const RowBlockK *const *x,
                           float *const *y) {
        Int sum[M][Q * P];
        sum_super_block<kNumbers<PanelQ6_K>.lines, M, Q>(panel, w, x, sum);
        for (int i = 0; i < Q * P; i++) {
            const PanelQ6_K *const one = panel[i / P];
            const int              row = kRows * (i % P);
            // Weights are 32 less than what was multiplied.
            Int offset[M];
            for (int j = 0; j < M; j++) offset[j] = V::set(0);
            add_sums<16>(one->scales, row, x, offset);
            const Float d = V::halves(one->d + row);
            for (int j = 0; j < M; j++) {
                const Int whole = V::subtract(sum[j][i], V::template left_32<5>(offset[j]));
                add_float(y[j] + kRows * i, whole, V::product(d, V::floats(x[j]->d)));
            }
        }
    }

    template <int M, int Q, typename Panel>
    static void accumulate(const Panel *const (&)[Q], const Expanded *w, int, const RowBlockK *const *x, float *const *y) {
        constexpr Numbers low = kNumbers<Panel>;
        const Expanded   *one[Q];
        for (int q = 0; q < Q; q++) one[q] = w + q;
        Int sum[M][Q * P];
        sum_super_block<low.lines, M, Q>(one, w, x, sum);
        for (int i = 0; i < Q * P; i++) {
            const Expanded &from = w[i / P];
            const int       row  = kRows * (i % P);
            Int             rest[M];
            for (int j = 0; j < M; j++) rest[j] = V::set(0);
            if constexpr (low.lines == 64)
                for (int j = 0; j < M; j++) rest[j] = V::set(sum_of(x[j]));
            else if constexpr (low.has_mins)
                add_sums<64 / low.lines>(from.mins, row, x, rest);
            else
                add_sums<64 / low.lines>(from.scales, row, x, rest);
            const Float d = V::load_floats(from.d + row);
            for (int j = 0; j < M; j++) {
                float *const out = y[j] + kRows * i;
                const Float  dx  = V::floats(x[j]->d);
                if constexpr (low.has_mins && low.factor == 1) {
                    add_float(out, sum[j][i], V::product(d, dx));
                    add_float(out, rest[j], V::product(V::load_floats(from.dmin + row), V::floats(-x[j]->d)));
                } else {
                    const Int whole = low.factor == 1 ? sum[j][i] : V::multiply(sum[j][i], V::set(low.factor));
                    const Int less  = low.has_mins ? rest[j] : V::multiply(rest[j], V::set(low.offset));
                    add_float(out, V::subtract(whole, less), V::product(d, dx));
                }
            }
        }
    }

    template <int M, int Q, typename Weights>
    static void accumulate(const PanelIQ4_XS *const (&panel)[Q], const Weights *w, int, const RowBlockK *const *x,
                           float *const *y) {
        Int sum[M][Q * P];
        set_all(sum, 0);
        for (int b = 0; b < 8; b++) {
            Int part[M][Q * P];
            for (int j = 0; j < M; j++)
                for (int i = 0; i < Q * P; i++) part[j][i] = V::set(-kOffset<Factors, PanelIQ4_XS> * x[j]->sums32[b]);
            add_lines<8, M, Q>(panel, w, b, x, 32 * b, part);
            for (int i = 0; i < Q * P; i++) {
                const Int s = V::widen_signed(panel[i / P]->scales[b] + kRows * (i % P));
                for (int j = 0; j < M; j++) sum[j][i] = V::add(sum[j][i], V::multiply(part[j][i], s));
            }
        }
        for (int i = 0; i < Q * P; i++) {
            const Float d = V::halves(panel[i / P]->d + kRows * (i % P));
            for (int j = 0; j < M; j++) add_float(y[j] + kRows * i, sum[j][i], V::product(d, V::floats(x[j]->d)));
        }
    }

    template <int M, int Q>
    static void accumulate(const PanelNVFP4 *const (&panel)[Q], const LinesNVFP4 *w, int n, const RowBlock32 *const *x,
                           float *const *y) {
        const RowBlock32 *block[M];
        for (int j = 0; j < M; j++) block[j] = x[j];
        for (int b = 0; b < n; b++) {
            for (int h = 0; h < 2; h++) {
                Int sum[M][Q * P];
                for (int j = 0; j < M; j++)
                    for (int i = 0; i < Q * P; i++) sum[j][i] = V::set(-kOffset<Factors, PanelNVFP4> * block[j]->sums16[h]);
                add_lines<4, M, Q>(panel, w, 2 * b + h, block, 16 * h, sum);
                for (int i = 0; i < Q * P; i++) {
                    const Float d = V::load_floats(w[i / P].d[b][h] + kRows * (i % P));
                    for (int j = 0; j < M; j++) add_float(y[j] + kRows * i, sum[j][i], V::product(d, V::floats(block[j]->d)));
                }
            }
            for (int j = 0; j < M; j++) block[j]++;
        }
    }

    template <int M, int Q, typename Panel, typename Weights>
    static void accumulate(const Panel *const (&panel)[Q], const Weights *w, int n, const RowBlock32 *const *x, float *const *y) {
        constexpr bool    in_registers = M * Q * P <= V::kBytes / 8;  // the results, while blocks are added
        const RowBlock32 *block[M];
        for (int j = 0; j < M; j++) block[j] = x[j];
        Float result[M][Q * P];
        for (int j = 0; in_registers && j < M; j++)
            for (int i = 0; i < Q * P; i++) result[j][i] = V::load_floats(y[j] + kRows * i);
        for (int b = 0; b < n * kBlocks<Panel>; b++) {
            Int sum[M][Q * P];
            for (int j = 0; j < M; j++)
                for (int i = 0; i < Q * P; i++) sum[j][i] = V::set(-kOffset<Factors, Panel> * block[j]->sum());
            add_lines<8, M, Q>(panel, w, b, block, 0, sum);
            for (int i = 0; i < Q * P; i++) {
                const Panel *const one = panel[i / P] + b / kBlocks<Panel>;
                const int          row = kRows * (i % P);
                const Float        d   = row_scales(one, row);
                for (int j = 0; j < M; j++) {
                    float *const out = y[j] + kRows * i;
                    Float        all = in_registers ? result[j][i] : V::load_floats(out);
                    all              = V::multiply_add(V::to_floats(sum[j][i]), V::product(d, V::floats(block[j]->d)), all);
                    if constexpr (kNumbers<Panel>.has_mins)
                        all = V::multiply_add(V::halves(one->m + row), V::floats(block[j]->d_sum), all);
                    if (in_registers)
                        result[j][i] = all;
                    else
                        V::store_floats(out, all);
                }
            }
            for (int j = 0; j < M; j++) block[j]++;
        }
        for (int j = 0; in_registers && j < M; j++)
            for (int i = 0; i < Q * P; i++) V::store_floats(y[j] + kRows * i, result[j][i]);
    }
};

}  // namespace
}  // namespace lp::kernels

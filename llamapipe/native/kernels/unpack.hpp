// Panels with their weights as bytes, for the vectors V of a level. Include it after the level's target pragma.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "panels.hpp"

namespace lp::kernels {
namespace {

// The values of IQ4_NL's codes, and the same as bytes that are 128 greater.
alignas(16) constexpr int8_t kCodes[2][16] = { { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 },
                                               { 1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15 } };

// Those of MXFP4's codes, doubled and 12 greater, so that they are unsigned.
alignas(16) constexpr int8_t kCodesMXFP4[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };

// What is subtracted from a weight's byte, also where the vectors V have made signed bytes unsigned.
template <typename V, typename Panel> constexpr int kOffset = kNumbers<Panel>.is_signed ? -V::kFlip : kNumbers<Panel>.offset;

// 256 columns: line g has the columns 4 g .. 4 g + 3. They stay in the first-level cache while all rows of activations are
// multiplied with them.
struct Lines {
    alignas(64) uint8_t q[64][64];
};

// The panels themselves, whose lines become bytes in registers when they are multiplied, for few rows of activations.
struct Direct {};

// Line g of a group of n.
template <typename V, int n, int g, typename Panel>
inline typename V::Int line(const Panel *panel, const Direct *, int group, int p);
template <typename V, int n, int g, typename Panel>
inline typename V::Int line(const Panel *, const Lines *w, int group, int p) {
    return V::load(w->q[n * group + g] + p);
}

// Types of at most 3 bits: 256 columns with a scale for each 4 lines (pairs of 16 columns, as in PanelQ6_K) or 8 (four pairs).
struct Expanded : Lines {
    int8_t  scales[8][16][2];  // of sub-blocks 2 i and 2 i + 1
    uint8_t mins[8][16][2];
    float   d[16], dmin[16];
};

template <typename V> inline typename V::Int low_nibbles(typename V::Int v) { return V::bit_and(v, V::bytes(15)); }
template <typename V> inline typename V::Int high_nibbles(typename V::Int v) {
    return V::bit_and(V::template right<4>(v), V::bytes(15));
}

// ---- line g of a group of lines, as bytes: a block of 32 columns has eight lines, a sub-block of Q6_K four

template <typename V, int g> inline typename V::Int nibbles(const uint8_t (*q)[64], int p) {
    const typename V::Int v = V::load(q[g % 4] + p);
    return g < 4 ? low_nibbles<V>(v) : high_nibbles<V>(v);
}

template <typename V, int g> inline typename V::Int fifth_bits(const uint8_t *high, int p) {
    const typename V::Int v = V::load(high + p);
    if constexpr (g < 4)
        return V::bit_and(V::template left<4 - g>(v), V::bytes(16));
    else
        return V::bit_and(V::template right<g - 4>(v), V::bytes(16));
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ4_K *panel, int b, int p) {
    return nibbles<V, g>(panel->q[b], p);
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ5_K *panel, int b, int p) {
    return V::bit_or(nibbles<V, g>(panel->q[b].low, p), fifth_bits<V, g>(panel->q[b].high, p));
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ6_K *panel, int s, int p) {
    const typename V::Int low = V::load(panel->q[s].low[g / 2] + p), high = V::load(panel->q[s].high + p);
    typename V::Int       two = high;
    if constexpr (g < 2) two = V::template left<4 - 2 * g>(high);
    if constexpr (g == 3) two = V::template right<2>(high);
    return V::bit_or(g % 2 ? high_nibbles<V>(low) : low_nibbles<V>(low), V::bit_and(two, V::bytes(0x30)));
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ4_0 *panel, int b, int p) {
    return nibbles<V, g>(panel[b].q, p);
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ4_1 *panel, int b, int p) {
    return nibbles<V, g>(panel[b].q, p);
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ5_0 *panel, int b, int p) {
    return V::bit_or(nibbles<V, g>(panel[b].q, p), fifth_bits<V, g>(panel[b].high, p));
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ5_1 *panel, int b, int p) {
    return V::bit_or(nibbles<V, g>(panel[b].q, p), fifth_bits<V, g>(panel[b].high, p));
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ8_0 *panel, int b, int p) {
    return V::bit_xor(V::load(panel[b].q[g] + p), V::bytes(V::kFlip));
}

template <typename V, int g> inline typename V::Int line_of(const PanelIQ4_NL *panel, int b, int p) {
    return V::look_up(kCodes[V::kFlip != 0], nibbles<V, g>(panel[b].q, p));
}

template <typename V, int g> inline typename V::Int line_of(const PanelIQ4_XS *panel, int b, int p) {
    return V::look_up(kCodes[V::kFlip != 0], nibbles<V, g>(panel->q[b], p));
}

template <typename V, int g> inline typename V::Int line_of(const PanelMXFP4 *panel, int b, int p) {
    return V::look_up(kCodesMXFP4, nibbles<V, g>(panel[b].q, p));
}

template <typename V, int g> inline typename V::Int line_of(const PanelNVFP4 *panel, int b, int p) {
    return V::look_up(kCodesMXFP4, nibbles<V, g>(panel[b].q, p));
}

// Doubled, so that 1 less is the weight.
template <typename V, int g> inline typename V::Int line_of(const PanelQ1_0 *panel, int b, int p) {
    const typename V::Int v = V::load(panel[b / 4].q[b % 4] + p);
    if constexpr (g == 0)
        return V::bit_and(V::template left<1>(v), V::bytes(2));
    else if constexpr (g == 1)
        return V::bit_and(v, V::bytes(2));
    else
        return V::bit_and(V::template right<g - 1>(v), V::bytes(2));
}

template <typename V, int g> inline typename V::Int line_of(const PanelQ2_0 *panel, int b, int p) {
    const typename V::Int v = V::load(panel[b / 2].q[b % 2][g / 4] + p);
    if constexpr (g % 4 == 0)
        return V::bit_and(v, V::bytes(3));
    else
        return V::bit_and(V::template right<2 * (g % 4)>(v), V::bytes(3));
}

template <typename Panel> constexpr bool kIsSuper      = PanelType<Panel>::kColumns == QK_K;
template <typename Panel> constexpr int  kLinesOfGroup = kIsSuper<Panel> ? kNumbers<Panel>.lines : 8;
template <typename Panel> constexpr int  kGroups       = kIsSuper<Panel> ? 64 / kLinesOfGroup<Panel> : 1;
template <typename Panel> constexpr int  kBlocks       = kIsSuper<Panel> ? 1 : PanelType<Panel>::kColumns / 32;  // of activations

// What follows in the panel is read while this group is multiplied, line by line: with few rows the hardware does not look far
// enough ahead, and many requests at once wait for each other. 8-bit weights gain nothing.
constexpr size_t kAhead = 4096;

template <typename V, int n, int g, typename Panel>
inline typename V::Int line(const Panel *panel, const Direct *, int group, int p) {
    constexpr size_t n_bytes = sizeof(Panel) / (kGroups<Panel> * kBlocks<Panel>);
    if constexpr (64 * g < n_bytes && !std::is_same_v<Panel, PanelQ8_0>)
        if (p == 0) __builtin_prefetch(reinterpret_cast<const char *>(panel) + n_bytes * group + 64 * g + kAhead, 0, 2);
    return line_of<V, g>(panel, group, p);
}

// f(std::integral_constant<int, i>) for i below n.
template <typename F, int... i> inline __attribute__((always_inline)) void each(F &&f, std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, i>()), ...);
}
template <int n, typename F> inline __attribute__((always_inline)) void each(F &&f) {
    each(f, std::make_integer_sequence<int, n>());
}

// n groups of lines.
template <typename V, typename Panel> inline void unpack_groups(const Panel *panel, int n, uint8_t (*to)[64]) {
    constexpr int lines = kLinesOfGroup<Panel>;
    for (int b = 0; b < n; b++)
        for (int p = 0; p < 64; p += V::kBytes) {
            typename V::Int of[lines];
            each<lines>([&](auto g) { of[g] = line_of<V, g>(panel, b, p); });
            for (int g = 0; g < lines; g++) V::store(to[lines * b + g] + p, of[g]);
        }
}

// A super-block, or n panels of one block of 32 columns, or of a few.
template <typename V, typename Panel> inline void unpack(const Panel *panel, int n, Lines &out) {
    unpack_groups<V>(panel, kGroups<Panel> > 1 ? kGroups<Panel> : n * kBlocks<Panel>, out.q);
}

// The scales of rows, times a power of two.
template <typename V> inline void expand_floats(const uint16_t *halves, float factor, float *out) {
    for (int r = 0; r < 16; r += V::kBytes / 4) V::put_halves(halves + r, factor, out + r);
}

// Lines of 8 blocks of NVFP4, which has two scales each.
struct LinesNVFP4 : Lines {
    float d[8][2][16];
};

template <typename V> inline void unpack(const PanelNVFP4 *panel, int n, LinesNVFP4 &out) {
    unpack_groups<V>(panel, n, out.q);
    for (int b = 0; b < n; b++) {
        // As 16-bit floats they are 2^8 times as small. Codes are doubled.
        uint16_t halves[32];
        for (int i = 0; i < 32; i += V::kBytes / 2)
            V::store(halves + i, V::left_16(V::load_pairs_unsigned(panel[b].scales[0] + i), 7));
        for (int h = 0; h < 2; h++) expand_floats<V>(halves + 16 * h, 128, out.d[b][h]);
    }
}

// ---- types of at most 3 bits

// Two bits of each line, and for types with three the third.
template <typename V, typename Panel> inline void expand_low(const Panel *panel, Expanded &out) {
    constexpr bool has_high = std::is_same_v<Panel, PanelQ3_K>;
    const auto     three    = V::bytes(3);
    for (int s = 0; s < 16; s++) {
        for (int p = 0; p < 64; p += V::kBytes) {
            const typename V::Int v = V::load(panel->low[s] + p);
            typename V::Int of[4]   = { V::bit_and(v, three), V::bit_and(V::template right<2>(v), three),
                                        V::bit_and(V::template right<4>(v), three), V::bit_and(V::template right<6>(v), three) };
            if constexpr (has_high) {
                const auto            third = V::bytes(4);
                const typename V::Int all   = V::load(panel->high[s / 2] + p);
                const typename V::Int high  = s % 2 ? V::template right<4>(all) : all;
                of[0]                       = V::bit_or(of[0], V::bit_and(V::template left<2>(high), third));
                of[1]                       = V::bit_or(of[1], V::bit_and(V::template left<1>(high), third));
                of[2]                       = V::bit_or(of[2], V::bit_and(high, third));
                of[3]                       = V::bit_or(of[3], V::bit_and(V::template right<1>(high), third));
            }
            for (int g = 0; g < 4; g++) V::store(out.q[4 * s + g] + p, of[g]);
        }
    }
}

template <typename V> inline void unpack(const PanelQ3_K *panel, int, Expanded &out) {
    expand_low<V>(panel, out);
    memcpy(out.scales, panel->scales, sizeof out.scales);
    expand_floats<V>(panel->d, 1, out.d);
}

template <typename V> inline void unpack(const PanelQ2_K *panel, int, Expanded &out) {
    expand_low<V>(panel, out);
    const uint8_t *both = panel->scales[0][0];
    for (int i = 0; i < 256; i += V::kBytes) {
        const typename V::Int v = V::load(both + i);
        V::store(out.scales[0][0] + i, low_nibbles<V>(v));
        V::store(out.mins[0][0] + i, high_nibbles<V>(v));
    }
    expand_floats<V>(panel->d, 1, out.d);
    expand_floats<V>(panel->dmin, 1, out.dmin);
}

template <typename V> inline void unpack(const PanelTQ2_0 *panel, int, Expanded &out) {
    expand_low<V>(panel, out);
    expand_floats<V>(panel->d, 1, out.d);
}

template <typename V> inline void unpack(const PanelTQ1_0 *panel, int, Expanded &out) {
    const auto three = V::bytes(3), one = V::bytes(1), zero = V::bytes(0);
    for (int n = 0; n < 13; n++) {
        for (int p = 0; p < 64; p += V::kBytes) {
            typename V::Int v = V::load(panel->q[n] + p);
            for (int g = 5 * n; g < (n < 12 ? 5 * n + 5 : 64); g++) {
                // 3 v / 256, rounded down: averages are rounded up, of numbers that are 1 less.
                const typename V::Int less  = V::subtract_to_zero(v, one);
                const typename V::Int digit = V::template right<6>(V::average(less, V::average(less, zero)));
                V::store(out.q[g] + p, V::bit_and(digit, three));
                v = V::add_bytes(v, V::add_bytes(v, v));
            }
        }
    }
    expand_floats<V>(panel->d, 1, out.d);
}

// Scales 2 s + 1 of nibbles.
template <typename V, typename Panel> inline void expand_nibbles(const Panel *panel, int mask, Expanded &out) {
    const uint8_t *scales = panel->scales[0];
    for (int i = 0; i < static_cast<int>(sizeof(panel->scales)); i += V::kBytes / 2) {
        const typename V::Int both = V::load_pairs_unsigned(scales + i);
        const typename V::Int s    = V::bit_and(V::bit_or(both, V::template left<4>(both)), V::bytes(mask));
        V::store(out.scales[0][0] + 2 * i, V::bit_or(V::add_bytes(s, s), V::bytes(1)));
    }
}

// Bits of indices, from `shift` on, as 16-bit numbers: n of each, in the order of PanelIQ3_S.
template <typename V, int n> inline typename V::Int bits_of(const uint8_t *packed, int i, int shift) {
    constexpr int         per_byte = 8 / n;
    const typename V::Int bytes    = V::load_pairs_unsigned(packed + i / (32 * per_byte) * 32 + i % 32);
    const typename V::Int bits     = V::right_16(bytes, n * (i / 32 % per_byte));
    return V::left_16(V::bit_and(bits, V::set(0x00010001 * ((1 << n) - 1))), shift);
}

// As many of the indices, from the i-th on, as a vector has 16-bit numbers.
template <typename V, typename Panel> inline typename V::Int indices(const Panel *panel, int i) {
    typename V::Int v      = V::load_pairs_unsigned(panel->index[0] + i);
    constexpr bool  is_iq1 = std::is_same_v<Panel, PanelIQ1_S> || std::is_same_v<Panel, PanelIQ1_M>;
    if constexpr (is_iq1 || std::is_same_v<Panel, PanelIQ2_S>) v = V::bit_or(v, bits_of<V, 2>(panel->ten[0][0], i, 8));
    if constexpr (is_iq1) v = V::bit_or(v, bits_of<V, 1>(panel->nine[0][0], i, 10));
    if constexpr (std::is_same_v<Panel, PanelIQ3_S> || std::is_same_v<Panel, PanelIQ2_XS>)
        v = V::bit_or(v, bits_of<V, 1>(panel->nine[0][0], i, 8));
    return v;
}

// Places in a grid of as many indices as a vector has 16-bit numbers, as bytes.
template <typename V, int n> inline void look_up_places(const uint16_t (&table)[n], typename V::Int index,
                                                        typename V::Int (&out)[2]) {
    V::widen_words(V::template look_up_16<n>(table, index), out);
    for (typename V::Int &v : out) v = V::bit_and(V::bit_or(v, V::template left_32<12>(v)), V::bytes(15));
}

// To the bytes from `at` on: `greatest` less v where the sign is negative.
template <typename V, typename Panel> inline void put_signed(const Panel *panel, int at, typename V::Int v, Expanded &out) {
    V::store(out.q[0] + at, V::subtract_where(panel->signs[0] + at / 8, V::bytes(kNumbers<Panel>.greatest), v));
}

// Writes all indices, well before they are read one by one. The compiler would take them out of the vectors instead.
template <typename V, int n, typename Panel> inline void store_indices(const Panel *panel, uint16_t (&out)[n]) {
    for (int i = 0; i < n; i += V::kBytes / 2) V::store(out + i, indices<V>(panel, i));
    __asm__("" : "+m"(out));
}

// Grids of four columns.
template <typename V, int n, typename Panel>
inline void expand_fours(const Panel *panel, const Grid<uint32_t, n> &grid, const int8_t *values, Expanded &out) {
    constexpr int        step        = V::kBytes;
    constexpr bool       is_permuted = n <= V::kMostPlaces;
    alignas(64) uint16_t index[64 * 16];
    if constexpr (!is_permuted) store_indices<V>(panel, index);
    for (int i = 0; i < 64 * 16; i += step / 2) {
        typename V::Int v[2];
        if constexpr (is_permuted) {
            look_up_places<V>(grid.places, indices<V>(panel, i), v);
            for (typename V::Int &of : v) of = V::look_up(values, of);
        } else {
            V::fours(grid.bytes, index + i, v);
        }
        for (int k = 0; k < 2; k++) put_signed<V>(panel, 4 * i + step * k, v[k], out);
    }
}

// Grids of eight columns: f(i, k, at, first, second) puts the two lines of some rows, k of the indices from the i-th on.
template <typename V, int n, typename Panel, typename F>
inline void expand_eights(const Panel *panel, const Grid<uint64_t, n> &grid, const int8_t (&values)[2][16], F &&f) {
    constexpr int        step        = V::kBytes;
    constexpr bool       is_permuted = n <= V::kMostPlaces;
    alignas(64) uint16_t index[32 * 16];
    if constexpr (!is_permuted) store_indices<V>(panel, index);
    for (int i = 0; i < 32 * 16; i += step / 2) {
        typename V::Int first[2], second[2];
        if constexpr (is_permuted) {
            look_up_places<V>(grid.places, indices<V>(panel, i), first);
            for (int k = 0; k < 2; k++) {
                second[k] = V::look_up(values[1], first[k]);
                first[k]  = V::look_up(values[0], first[k]);
            }
        } else {
            V::eights(grid.bytes, index + i, first, second);
        }
        // Sixteen indices are two lines.
        for (int k = 0; k < 2; k++) {
            const int from = i + step / 4 * k;
            f(i, k, from / 16 * 128 + from % 16 * 4, first[k], second[k]);
        }
    }
}

template <typename V> inline void unpack(const PanelIQ3_XXS *panel, int, Expanded &out) {
    expand_fours<V>(panel, kGrids.iq3_xxs, kIQ3_XXS, out);
    expand_nibbles<V>(panel, 15, out);
    expand_floats<V>(panel->d, 0.25f, out.d);
}

template <typename V> inline void unpack(const PanelIQ3_S *panel, int, Expanded &out) {
    expand_fours<V>(panel, kGrids.iq3_s, kIQ3_S, out);
    expand_nibbles<V>(panel, 15, out);
    expand_floats<V>(panel->d, 1, out.d);
}

template <typename V, int n, typename Panel> inline void expand_iq2(const Panel *panel, const Grid<uint64_t, n> &grid,
                                                                    Expanded &out) {
    using Int = typename V::Int;
    expand_eights<V>(panel, grid, kIQ2, [&](int, int, int at, Int first, Int second) {
        put_signed<V>(panel, at, first, out);
        put_signed<V>(panel, at + 64, second, out);
    });
    expand_nibbles<V>(panel, 15, out);
    expand_floats<V>(panel->d, 0.125f, out.d);
}

template <typename V> inline void unpack(const PanelIQ2_XXS *panel, int, Expanded &out) {
    expand_iq2<V>(panel, kGrids.iq2_xxs, out);
}
template <typename V> inline void unpack(const PanelIQ2_XS *panel, int, Expanded &out) {
    expand_iq2<V>(panel, kGrids.iq2_xs, out);
}
template <typename V> inline void unpack(const PanelIQ2_S *panel, int, Expanded &out) { expand_iq2<V>(panel, kGrids.iq2_s, out); }

// A weight of IQ1 is its place in the grid, 0 to 2, less 1 plus or minus an eighth. In blocks of 32 columns that is a minimum.
template <typename V> inline void unpack(const PanelIQ1_S *panel, int, Expanded &out) {
    using Int = typename V::Int;
    expand_eights<V>(panel, kGrids.iq1, kIQ1, [&](int, int, int at, Int first, Int second) {
        V::store(out.q[0] + at, first);
        V::store(out.q[0] + at + 64, second);
    });
    expand_nibbles<V>(panel, 7, out);
    alignas(16) static constexpr int8_t minus[16] = { 0, 0, 0, 0, 0, 0, 0, 0, -1 };
    for (int i = 0; i < static_cast<int>(sizeof(panel->scales)); i += V::kBytes / 2) {
        const Int both = V::load_pairs_unsigned(panel->scales[0] + i);
        const Int bits = V::bit_and(V::bit_or(both, V::template left<4>(both)), V::bytes(8));
        const Int one = V::load(out.scales[0][0] + 2 * i), two = V::add_bytes(one, one), four = V::add_bytes(two, two);
        const Int seven = V::add_bytes(one, V::add_bytes(two, four));  // and nine where the eighth is subtracted
        V::store(out.mins[0][0] + 2 * i, V::add_bytes(seven, V::bit_and(two, V::look_up(minus, bits))));
    }
    expand_floats<V>(panel->d, 0.125f, out.d);
}

// With one for 8 columns it is added to their bytes.
template <typename V> inline void unpack(const PanelIQ1_M *panel, int, Expanded &out) {
    using Int = typename V::Int;
    Int more[2];  // 2 or 0
    expand_eights<V>(panel, kGrids.iq1, kIQ1, [&](int i, int k, int at, Int first, Int second) {
        if (k == 0) V::widen_words(V::bit_xor(bits_of<V, 1>(panel->negative[0][0], i, 1), V::set(0x00020002)), more);
        Int two = V::bit_or(more[k], V::template left_32<8>(more[k]));
        two     = V::bit_or(two, V::template left_32<16>(two));
        V::store(out.q[0] + at, V::add_bytes(V::template left<3>(first), two));
        V::store(out.q[0] + at + 64, V::add_bytes(V::template left<3>(second), two));
    });
    expand_nibbles<V>(panel, 7, out);
    expand_floats<V>(panel->d, 0.125f, out.d);
}

}  // namespace
}  // namespace lp::kernels

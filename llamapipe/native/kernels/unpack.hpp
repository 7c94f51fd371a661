// Panels with their weights as bytes, for the vectors V of a level. Include it after the level's target pragma.
#pragma once

#include "panels.hpp"

namespace llamapipe::kernels {
namespace {

// The values of IQ4_NL's codes.
alignas(16) constexpr int8_t kCodes[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

// Those of MXFP4's codes, doubled and 12 greater, so that they are unsigned.
alignas(16) constexpr int8_t kCodesMXFP4[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };

// What is subtracted from a weight's byte.
template <class Panel> constexpr int kOffset             = 0;
template <> constexpr int            kOffset<PanelQ4_0>  = 8;
template <> constexpr int            kOffset<PanelQ5_0>  = 16;
template <> constexpr int            kOffset<PanelMXFP4> = 12;

// 256 columns: line g has the columns 4 g .. 4 g + 3. They stay in the first-level cache while all rows of activations are
// multiplied with them.
struct Lines {
    alignas(64) uint8_t q[64][64];
};

template <class V> inline typename V::Int low_nibbles(typename V::Int v) { return V::bit_and(v, V::bytes(15)); }
template <class V> inline typename V::Int high_nibbles(typename V::Int v) {
    return V::bit_and(V::template right<4>(v), V::bytes(15));
}

// Lines g and 4 + g of a block, from line g of nibbles; bit n of `high`, where there is one, is the fifth bit of line n.
template <class V, int g, bool has_high>
inline void unpack_line(const uint8_t (*q)[64], typename V::Int high, int p, uint8_t (*to)[64]) {
    const typename V::Int v     = V::load(q[g] + p);
    typename V::Int       first = low_nibbles<V>(v), second = high_nibbles<V>(v);
    if constexpr (has_high) {
        const auto fifth = V::bytes(16);
        first            = V::bit_or(first, V::bit_and(V::template left<4 - g>(high), fifth));
        second           = V::bit_or(second, V::bit_and(V::template right<g>(high), fifth));
    }
    V::store(to[g] + p, first);
    V::store(to[4 + g] + p, second);
}

template <class V, bool has_high = false>
inline void unpack_block(const uint8_t (*q)[64], const uint8_t * high, uint8_t (*to)[64]) {
    for (int p = 0; p < 64; p += V::kBytes) {
        const auto bits = has_high ? V::load(high + p) : V::bytes(0);
        unpack_line<V, 0, has_high>(q, bits, p, to);
        unpack_line<V, 1, has_high>(q, bits, p, to);
        unpack_line<V, 2, has_high>(q, bits, p, to);
        unpack_line<V, 3, has_high>(q, bits, p, to);
    }
}

template <class V> inline void unpack(const PanelQ4K * panel, int, Lines & out) {
    for (int b = 0; b < 8; b++) unpack_block<V>(panel->q[b], nullptr, out.q + 8 * b);
}

template <class V> inline void unpack(const PanelQ5K * panel, int, Lines & out) {
    for (int b = 0; b < 8; b++) unpack_block<V, true>(panel->q[b], panel->high[b], out.q + 8 * b);
}

template <class V> inline typename V::Int six_bits(typename V::Int low, typename V::Int high) {
    return V::bit_or(low, V::bit_and(high, V::bytes(0x30)));
}

template <class V> inline void unpack(const PanelQ6K * panel, int, Lines & out) {
    for (int s = 0; s < 16; s++) {
        for (int p = 0; p < 64; p += V::kBytes) {
            const typename V::Int high = V::load(panel->high[s] + p);
            const typename V::Int v0 = V::load(panel->low[s][0] + p), v1 = V::load(panel->low[s][1] + p);
            V::store(out.q[4 * s] + p, six_bits<V>(low_nibbles<V>(v0), V::template left<4>(high)));
            V::store(out.q[4 * s + 1] + p, six_bits<V>(high_nibbles<V>(v0), V::template left<2>(high)));
            V::store(out.q[4 * s + 2] + p, six_bits<V>(low_nibbles<V>(v1), high));
            V::store(out.q[4 * s + 3] + p, six_bits<V>(high_nibbles<V>(v1), V::template right<2>(high)));
        }
    }
}

template <class V> inline void unpack(const PanelQ4_0 * panel, int n, Lines & out) {
    for (int b = 0; b < n; b++) unpack_block<V>(panel[b].q, nullptr, out.q + 8 * b);
}

template <class V> inline void unpack(const PanelQ4_1 * panel, int n, Lines & out) {
    for (int b = 0; b < n; b++) unpack_block<V>(panel[b].q, nullptr, out.q + 8 * b);
}

template <class V> inline void unpack(const PanelQ5_0 * panel, int n, Lines & out) {
    for (int b = 0; b < n; b++) unpack_block<V, true>(panel[b].q, panel[b].high, out.q + 8 * b);
}

template <class V> inline void unpack(const PanelQ5_1 * panel, int n, Lines & out) {
    for (int b = 0; b < n; b++) unpack_block<V, true>(panel[b].q, panel[b].high, out.q + 8 * b);
}

template <class V> inline void look_up_block(const uint8_t (*q)[64], const int8_t * table, uint8_t (*to)[64]) {
    for (int p = 0; p < 64; p += V::kBytes)
        for (int g = 0; g < 4; g++) {
            const typename V::Int v = V::load(q[g] + p);
            V::store(to[g] + p, V::look_up(table, low_nibbles<V>(v)));
            V::store(to[4 + g] + p, V::look_up(table, high_nibbles<V>(v)));
        }
}

template <class V> inline void unpack(const PanelIQ4_NL * panel, int n, Lines & out) {
    for (int b = 0; b < n; b++) look_up_block<V>(panel[b].q, kCodes, out.q + 8 * b);
}

template <class V> inline void unpack(const PanelIQ4_XS * panel, int, Lines & out) {
    for (int b = 0; b < 8; b++) look_up_block<V>(panel->q[b], kCodes, out.q + 8 * b);
}

template <class V> inline void unpack(const PanelMXFP4 * panel, int n, Lines & out) {
    for (int b = 0; b < n; b++) look_up_block<V>(panel[b].q, kCodesMXFP4, out.q + 8 * b);
}

}  // namespace
}  // namespace llamapipe::kernels

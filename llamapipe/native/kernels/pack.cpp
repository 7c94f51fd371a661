// From a file's blocks to panels: once, while a model loads.
#if defined(__x86_64__)
#include <cstring>
#include <type_traits>

#include "panels.hpp"

namespace llamapipe::kernels {
namespace {

void scale_and_min_k4(int j, const uint8_t * s, uint8_t & scale, uint8_t & min) {
    if (j < 4) {
        scale = s[j] & 63;
        min   = s[j + 4] & 63;
    } else {
        scale = (uint8_t) ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
        min   = (uint8_t) ((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
    }
}

// Four adjacent columns as one number, a byte each.
uint32_t four(const uint8_t * q) {
    uint32_t word;
    memcpy(&word, q, 4);
    return word;
}

// A super-block of a row as integers: q, and what the type has beside.
struct Plain {
    uint8_t  q[QK_K];
    uint8_t  scales[16], mins[8];
    uint16_t d, dmin;
};

void low_and_high(const uint8_t * bytes, uint8_t * low, uint8_t * high, int n) {
    for (int i = 0; i < n; i++) {
        low[i]  = bytes[i] & 15;
        high[i] = bytes[i] >> 4;
    }
}

void plain(const block_q4_K * b, Plain & out) {
    for (int c = 0; c < 4; c++) low_and_high(b->qs + 32 * c, out.q + 64 * c, out.q + 64 * c + 32, 32);
    for (int j = 0; j < 8; j++) scale_and_min_k4(j, b->scales, out.scales[j], out.mins[j]);
    memcpy(&out.d, &b->d, 2);
    memcpy(&out.dmin, &b->dmin, 2);
}

// Bits `shift` and up of `bytes`, as many as `mask` has, become bits 4 and up of q.
template <int shift, int mask> void add_high(const uint8_t * bytes, uint8_t * q) {
    for (int i = 0; i < 32; i += 4) {
        const uint32_t word = four(q + i) | (four(bytes + i) >> shift & mask * 0x01010101u) << 4;
        memcpy(q + i, &word, 4);
    }
}

void plain(const block_q5_K * b, Plain & out) {
    for (int c = 0; c < 4; c++) low_and_high(b->qs + 32 * c, out.q + 64 * c, out.q + 64 * c + 32, 32);
    add_high<0, 1>(b->qh, out.q);
    add_high<1, 1>(b->qh, out.q + 32);
    add_high<2, 1>(b->qh, out.q + 64);
    add_high<3, 1>(b->qh, out.q + 96);
    add_high<4, 1>(b->qh, out.q + 128);
    add_high<5, 1>(b->qh, out.q + 160);
    add_high<6, 1>(b->qh, out.q + 192);
    add_high<7, 1>(b->qh, out.q + 224);
    for (int j = 0; j < 8; j++) scale_and_min_k4(j, b->scales, out.scales[j], out.mins[j]);
    memcpy(&out.d, &b->d, 2);
    memcpy(&out.dmin, &b->dmin, 2);
}

void plain(const block_q6_K * b, Plain & out) {
    for (int half = 0; half < 2; half++) {
        uint8_t * q = out.q + 128 * half;
        low_and_high(b->ql + 64 * half, q, q + 64, 64);
        const uint8_t * high = b->qh + 32 * half;
        add_high<0, 3>(high, q);
        add_high<2, 3>(high, q + 32);
        add_high<4, 3>(high, q + 64);
        add_high<6, 3>(high, q + 96);
    }
    memcpy(out.scales, b->scales, 16);
    memcpy(&out.d, &b->d, 2);
}

// Four groups of four columns to row r of four lines.
void put_lines(const uint8_t * columns, int r, uint8_t (*lines)[64]) {
    for (int g = 0; g < 4; g++) memcpy(lines[g] + 4 * r, columns + 4 * g, 4);
}

void put_nibbles(const uint8_t * q, int r, uint8_t (*lines)[64]) {
    uint8_t both[16];
    for (int i = 0; i < 16; i++) both[i] = (uint8_t) ((q[i] & 15) | q[16 + i] << 4);
    put_lines(both, r, lines);
}

void put(const Plain & in, int r, PanelQ4K * out) {
    for (int b = 0; b < 8; b++) {
        put_nibbles(in.q + 32 * b, r, out->q[b]);
        out->scales[b][r]          = in.scales[b];
        out->mins[b / 2][r][b % 2] = in.mins[b];
    }
    out->d[r]    = in.d;
    out->dmin[r] = in.dmin;
}

void put(const Plain & in, int r, PanelQ5K * out) {
    for (int b = 0; b < 8; b++) {
        const uint8_t * q = in.q + 32 * b;
        put_nibbles(q, r, out->q[b]);
        uint32_t bits = 0;
        for (int g = 0; g < 8; g++) bits |= (four(q + 4 * g) >> 4 & 0x01010101) << g;
        memcpy(out->high[b] + 4 * r, &bits, 4);
        out->scales[b][r]          = in.scales[b];
        out->mins[b / 2][r][b % 2] = in.mins[b];
    }
    out->d[r]    = in.d;
    out->dmin[r] = in.dmin;
}

void put(const Plain & in, int r, PanelQ6K * out) {
    for (int s = 0; s < 16; s++) {
        const uint8_t * q      = in.q + 16 * s;
        uint32_t        low[2] = {}, high = 0;
        for (int g = 0; g < 4; g++) {
            low[g / 2] |= (four(q + 4 * g) & 0x0f0f0f0f) << 4 * (g % 2);
            high |= (four(q + 4 * g) >> 4 & 0x03030303) << 2 * g;
        }
        memcpy(out->low[s][0] + 4 * r, &low[0], 4);
        memcpy(out->low[s][1] + 4 * r, &low[1], 4);
        memcpy(out->high[s] + 4 * r, &high, 4);
        out->scales[s / 2][r][s % 2] = (int8_t) in.scales[s];
    }
    out->d[r] = in.d;
}

// Column i of a block of nibbles is in byte i % 16, the lower nibble first.
template <class Block, class Panel> void put(const Block * in, int r, Panel * out) {
    put_lines(in->qs, r, out->q);
    memcpy(&out->d[r], &in->d, 2);
    if constexpr (std::is_same_v<Panel, PanelQ5_0> || std::is_same_v<Panel, PanelQ5_1>) {
        for (int c = 0; c < 4; c++) {
            // Every fourth bit, brought together.
            uint32_t bits        = four(in->qh) >> c & 0x11111111;
            bits                 = (bits | bits >> 3) & 0x03030303;
            bits                 = (bits | bits >> 6) & 0x000f000f;
            out->high[4 * r + c] = (uint8_t) (bits | bits >> 12);
        }
    }
    if constexpr (std::is_same_v<Panel, PanelQ4_1> || std::is_same_v<Panel, PanelQ5_1>) memcpy(&out->m[r], &in->m, 2);
}

void put(const block_mxfp4 * in, int r, PanelMXFP4 * out) {
    put_lines(in->qs, r, out->q);
    out->e[r] = in->e;
}

void put(const block_iq4_xs * in, int r, PanelIQ4_XS * out) {
    for (int b = 0; b < 8; b++) {
        put_lines(in->qs + 16 * b, r, out->q[b]);
        const int scale   = (in->scales_l[b / 2] >> 4 * (b % 2) & 15) | (in->scales_h >> 2 * b & 3) << 4;
        out->scales[b][r] = (int8_t) (scale - 32);
    }
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_q8_0 * in, int r, PanelQ8_0 * out) {
    for (int g = 0; g < 8; g++) memcpy(out->q[g] + 4 * r, in->qs + 4 * g, 4);
    memcpy(&out->d[r], &in->d, 2);
}

// The file's block, and its columns, for each form of panel.
template <class Panel> struct Source;
template <> struct Source<PanelQ4K> {
    using Block                   = block_q4_K;
    static constexpr int kColumns = QK_K;
};
template <> struct Source<PanelQ5K> {
    using Block                   = block_q5_K;
    static constexpr int kColumns = QK_K;
};
template <> struct Source<PanelQ6K> {
    using Block                   = block_q6_K;
    static constexpr int kColumns = QK_K;
};
template <> struct Source<PanelQ4_0> {
    using Block                   = block_q4_0;
    static constexpr int kColumns = 32;
};
template <> struct Source<PanelQ4_1> {
    using Block                   = block_q4_1;
    static constexpr int kColumns = 32;
};
template <> struct Source<PanelQ5_0> {
    using Block                   = block_q5_0;
    static constexpr int kColumns = 32;
};
template <> struct Source<PanelQ5_1> {
    using Block                   = block_q5_1;
    static constexpr int kColumns = 32;
};
template <> struct Source<PanelQ8_0> {
    using Block                   = block_q8_0;
    static constexpr int kColumns = 32;
};
template <> struct Source<PanelIQ4_NL> {
    using Block                   = block_iq4_nl;
    static constexpr int kColumns = 32;
};

template <> struct Source<PanelMXFP4> {
    using Block                   = block_mxfp4;
    static constexpr int kColumns = 32;
};
template <> struct Source<PanelIQ4_XS> {
    using Block                   = block_iq4_xs;
    static constexpr int kColumns = QK_K;
};

}  // namespace

template <class Panel> size_t panel_bytes(int64_t n_columns) {
    return sizeof(Panel) * (size_t) (n_columns / Source<Panel>::kColumns);
}

template <class Panel> void pack(const void * rows, size_t stride, int64_t n_columns, void * panel) {
    using From             = Source<Panel>;
    const int64_t n_blocks = n_columns / From::kColumns;
    for (int r = 0; r < kPanelRows; r++) {
        const auto * block = (const typename From::Block *) ((const char *) rows + (size_t) r * stride);
        for (int64_t i = 0; i < n_blocks; i++) {
            Panel * out = (Panel *) panel + i;
            if constexpr (From::kColumns == QK_K && !std::is_same_v<Panel, PanelIQ4_XS>) {
                Plain values;
                plain(block + i, values);
                put(values, r, out);
            } else {
                put(block + i, r, out);
            }
        }
    }
}

#define PACKED(Panel)                                      \
    template size_t panel_bytes<Panel>(int64_t n_columns); \
    template void   pack<Panel>(const void * rows, size_t stride, int64_t n_columns, void * panel);
PACKED(PanelQ4K)
PACKED(PanelQ5K)
PACKED(PanelQ6K)
PACKED(PanelQ4_0)
PACKED(PanelQ4_1)
PACKED(PanelQ5_0)
PACKED(PanelQ5_1)
PACKED(PanelQ8_0)
PACKED(PanelIQ4_NL)
PACKED(PanelMXFP4)
PACKED(PanelIQ4_XS)

}  // namespace llamapipe::kernels
#endif

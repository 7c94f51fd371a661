// From a file's blocks to panels: once, while a model loads.
#if defined(__x86_64__)
#include <cstring>
#include <type_traits>

#include "panels.hpp"

namespace llamapipe::kernels {
namespace {

void scale_and_min_k4(int j, const uint8_t *s, uint8_t &scale, uint8_t &min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (uint8_t)((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
        min = (uint8_t)((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
    }
}

// A super-block of a row as integers: q, and what the type has beside.
struct Plain {
    uint8_t q[QK_K];
    uint8_t scales[16], mins[8];
    uint16_t d, dmin;
};

void plain(const block_q4_K *b, Plain &out) {
    for (int i = 0; i < QK_K; i++) out.q[i] = (b->qs[32 * (i / 64) + i % 32] >> (i % 64 < 32 ? 0 : 4)) & 15;
    for (int j = 0; j < 8; j++) scale_and_min_k4(j, b->scales, out.scales[j], out.mins[j]);
    memcpy(&out.d, &b->d, 2);
    memcpy(&out.dmin, &b->dmin, 2);
}

void plain(const block_q5_K *b, Plain &out) {
    for (int i = 0; i < QK_K; i++) {
        const int low = (b->qs[32 * (i / 64) + i % 32] >> (i % 64 < 32 ? 0 : 4)) & 15;
        out.q[i] = (uint8_t)(low | ((b->qh[i % 32] >> (i / 32)) & 1) << 4);
    }
    for (int j = 0; j < 8; j++) scale_and_min_k4(j, b->scales, out.scales[j], out.mins[j]);
    memcpy(&out.d, &b->d, 2);
    memcpy(&out.dmin, &b->dmin, 2);
}

void plain(const block_q6_K *b, Plain &out) {
    for (int i = 0; i < QK_K; i++) {
        const int in = i % 128, quarter = in / 32;
        const int low = (b->ql[64 * (i / 128) + in % 64] >> (in < 64 ? 0 : 4)) & 15;
        out.q[i] = (uint8_t)(low | ((b->qh[32 * (i / 128) + in % 32] >> (2 * quarter)) & 3) << 4);
    }
    memcpy(out.scales, b->scales, 16);
    memcpy(&out.d, &b->d, 2);
}

void put(const Plain &in, int r, PanelQ4K *out) {
    for (int b = 0; b < 8; b++) {
        const uint8_t *q = in.q + 32 * b;
        for (int i = 0; i < 16; i++) out->q[b][i / 4][4 * r + i % 4] = (uint8_t)(q[i] | q[16 + i] << 4);
        out->scales[b][r] = in.scales[b];
        out->mins[b / 2][r][b % 2] = in.mins[b];
    }
    out->d[r] = in.d;
    out->dmin[r] = in.dmin;
}

void put(const Plain &in, int r, PanelQ5K *out) {
    for (int b = 0; b < 8; b++) {
        const uint8_t *q = in.q + 32 * b;
        for (int c = 0; c < 4; c++) {
            uint8_t bits = 0;
            for (int g = 0; g < 4; g++) {
                out->q[b][g][4 * r + c] = (uint8_t)((q[4 * g + c] & 15) | (q[16 + 4 * g + c] & 15) << 4);
                bits |= (uint8_t)(q[4 * g + c] >> 4 << g | q[16 + 4 * g + c] >> 4 << (4 + g));
            }
            out->high[b][4 * r + c] = bits;
        }
        out->scales[b][r] = in.scales[b];
        out->mins[b / 2][r][b % 2] = in.mins[b];
    }
    out->d[r] = in.d;
    out->dmin[r] = in.dmin;
}

void put(const Plain &in, int r, PanelQ6K *out) {
    for (int s = 0; s < 16; s++) {
        const uint8_t *q = in.q + 16 * s;
        for (int c = 0; c < 4; c++) {
            for (int h = 0; h < 2; h++)
                out->low[s][h][4 * r + c] = (uint8_t)((q[8 * h + c] & 15) | (q[8 * h + 4 + c] & 15) << 4);
            out->high[s][4 * r + c] = (uint8_t)(q[c] >> 4 | q[4 + c] >> 4 << 2 | q[8 + c] >> 4 << 4 | q[12 + c] >> 4 << 6);
        }
        out->scales[s / 2][r][s % 2] = (int8_t)in.scales[s];
    }
    out->d[r] = in.d;
}

// Column i of a block of nibbles is in byte i % 16, the lower nibble first.
template <class Block, class Panel> void put(const Block *in, int r, Panel *out) {
    for (int i = 0; i < 16; i++) out->q[i / 4][4 * r + i % 4] = in->qs[i];
    memcpy(&out->d[r], &in->d, 2);
    if constexpr (std::is_same_v<Panel, PanelQ5_0> || std::is_same_v<Panel, PanelQ5_1>) {
        uint32_t high;
        memcpy(&high, in->qh, 4);
        for (int c = 0; c < 4; c++) {
            uint8_t bits = 0;
            for (int g = 0; g < 8; g++) bits |= (uint8_t)((high >> (4 * g + c) & 1) << g);
            out->high[4 * r + c] = bits;
        }
    }
    if constexpr (std::is_same_v<Panel, PanelQ4_1> || std::is_same_v<Panel, PanelQ5_1>) memcpy(&out->m[r], &in->m, 2);
}

void put(const block_q8_0 *in, int r, PanelQ8_0 *out) {
    for (int g = 0; g < 8; g++) memcpy(out->q[g] + 4 * r, in->qs + 4 * g, 4);
    memcpy(&out->d[r], &in->d, 2);
}

// The file's block, and its columns, for each form of panel.
template <class Panel> struct Source;
template <> struct Source<PanelQ4K> { using Block = block_q4_K; static constexpr int kColumns = QK_K; };
template <> struct Source<PanelQ5K> { using Block = block_q5_K; static constexpr int kColumns = QK_K; };
template <> struct Source<PanelQ6K> { using Block = block_q6_K; static constexpr int kColumns = QK_K; };
template <> struct Source<PanelQ4_0> { using Block = block_q4_0; static constexpr int kColumns = 32; };
template <> struct Source<PanelQ4_1> { using Block = block_q4_1; static constexpr int kColumns = 32; };
template <> struct Source<PanelQ5_0> { using Block = block_q5_0; static constexpr int kColumns = 32; };
template <> struct Source<PanelQ5_1> { using Block = block_q5_1; static constexpr int kColumns = 32; };
template <> struct Source<PanelQ8_0> { using Block = block_q8_0; static constexpr int kColumns = 32; };
template <> struct Source<PanelIQ4_NL> { using Block = block_iq4_nl; static constexpr int kColumns = 32; };

}  // namespace

template <class Panel> size_t panel_bytes(int64_t n_columns) {
    return sizeof(Panel) * (size_t)(n_columns / Source<Panel>::kColumns);
}

template <class Panel> void pack(const void *rows, size_t stride, int64_t n_columns, void *panel) {
    using From = Source<Panel>;
    const int64_t n_blocks = n_columns / From::kColumns;
    for (int r = 0; r < kPanelRows; r++) {
        const auto *block = (const typename From::Block *)((const char *)rows + (size_t)r * stride);
        for (int64_t i = 0; i < n_blocks; i++) {
            Panel *out = (Panel *)panel + i;
            if constexpr (From::kColumns == QK_K) {
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
    template void pack<Panel>(const void *rows, size_t stride, int64_t n_columns, void *panel);
PACKED(PanelQ4K)
PACKED(PanelQ5K)
PACKED(PanelQ6K)
PACKED(PanelQ4_0)
PACKED(PanelQ4_1)
PACKED(PanelQ5_0)
PACKED(PanelQ5_1)
PACKED(PanelQ8_0)
PACKED(PanelIQ4_NL)

}  // namespace llamapipe::kernels
#endif

// From a file's blocks to panels: once, while a model loads. And ggml's tables, of which blocks of at most 3 bits have places.
#if defined(__x86_64__) || defined(__aarch64__)
#include <cstring>
#include <type_traits>

#define GGML_COMMON_IMPL_C
#include "panels.hpp"

namespace lp::kernels {
namespace {

void scale_and_min_k4(int j, const uint8_t *s, uint8_t &scale, uint8_t &min) {
    if (j < 4) {
        scale = s[j] & 63;
        min   = s[j + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
        min   = static_cast<uint8_t>((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
    }
}

// Four adjacent columns as one number, a byte each.
uint32_t four(const uint8_t *q) {
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

void low_and_high(const uint8_t *bytes, uint8_t *low, uint8_t *high, int n) {
    for (int i = 0; i < n; i++) {
        low[i]  = bytes[i] & 15;
        high[i] = bytes[i] >> 4;
    }
}

void plain(const block_q4_K *b, Plain &out) {
    for (int c = 0; c < 4; c++) low_and_high(b->qs + 32 * c, out.q + 64 * c, out.q + 64 * c + 32, 32);
    for (int j = 0; j < 8; j++) scale_and_min_k4(j, b->scales, out.scales[j], out.mins[j]);
    memcpy(&out.d, &b->d, 2);
    memcpy(&out.dmin, &b->dmin, 2);
}

// Bits `shift` and up of `bytes`, as many as `mask` has, become bits 4 and up of q.
template <int shift, int mask> void add_high(const uint8_t *bytes, uint8_t *q) {
    for (int i = 0; i < 32; i += 4) {
        const uint32_t word = four(q + i) | (four(bytes + i) >> shift & mask * 0x01010101u) << 4;
        memcpy(q + i, &word, 4);
    }
}

void plain(const block_q5_K *b, Plain &out) {
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

void plain(const block_q6_K *b, Plain &out) {
    for (int half = 0; half < 2; half++) {
        uint8_t *q = out.q + 128 * half;
        low_and_high(b->ql + 64 * half, q, q + 64, 64);
        const uint8_t *high = b->qh + 32 * half;
        add_high<0, 3>(high, q);
        add_high<2, 3>(high, q + 32);
        add_high<4, 3>(high, q + 64);
        add_high<6, 3>(high, q + 96);
    }
    memcpy(out.scales, b->scales, 16);
    memcpy(&out.d, &b->d, 2);
}

// Four groups of four columns to row r of four lines.
void put_lines(const uint8_t *columns, int r, uint8_t (*lines)[64]) {
    for (int g = 0; g < 4; g++) memcpy(lines[g] + 4 * r, columns + 4 * g, 4);
}

void put_nibbles(const uint8_t *q, int r, uint8_t (*lines)[64]) {
    uint8_t both[16];
    for (int i = 0; i < 16; i++) both[i] = static_cast<uint8_t>((q[i] & 15) | q[16 + i] << 4);
    put_lines(both, r, lines);
}

void put(const Plain &in, int r, PanelQ4_K *out) {
    for (int b = 0; b < 8; b++) {
        put_nibbles(in.q + 32 * b, r, out->q[b]);
        out->scales[b][r]          = in.scales[b];
        out->mins[b / 2][r][b % 2] = in.mins[b];
    }
    out->d[r]    = in.d;
    out->dmin[r] = in.dmin;
}

void put(const Plain &in, int r, PanelQ5_K *out) {
    for (int b = 0; b < 8; b++) {
        const uint8_t *q = in.q + 32 * b;
        put_nibbles(q, r, out->q[b].low);
        uint32_t bits = 0;
        for (int g = 0; g < 8; g++) bits |= (four(q + 4 * g) >> 4 & 0x01010101) << g;
        memcpy(out->q[b].high + 4 * r, &bits, 4);
        out->scales[b][r]          = in.scales[b];
        out->mins[b / 2][r][b % 2] = in.mins[b];
    }
    out->d[r]    = in.d;
    out->dmin[r] = in.dmin;
}

void put(const Plain &in, int r, PanelQ6_K *out) {
    for (int s = 0; s < 16; s++) {
        const uint8_t *q      = in.q + 16 * s;
        uint32_t       low[2] = {}, high = 0;
        for (int g = 0; g < 4; g++) {
            low[g / 2] |= (four(q + 4 * g) & 0x0f0f0f0f) << 4 * (g % 2);
            high |= (four(q + 4 * g) >> 4 & 0x03030303) << 2 * g;
        }
        memcpy(out->q[s].low[0] + 4 * r, &low[0], 4);
        memcpy(out->q[s].low[1] + 4 * r, &low[1], 4);
        memcpy(out->q[s].high + 4 * r, &high, 4);
        out->scales[s / 2][r][s % 2] = static_cast<int8_t>(in.scales[s]);
    }
    out->d[r] = in.d;
}

template <typename Block, typename Panel> void put_plain(const Block *in, int r, Panel *out) {
    Plain values;
    plain(in, values);
    put(values, r, out);
}

// Column i of a block of nibbles is in byte i % 16, the lower nibble first.
template <typename Block, typename Panel> void put(const Block *in, int r, Panel *out) {
    put_lines(in->qs, r, out->q);
    memcpy(&out->d[r], &in->d, 2);
    if constexpr (std::is_same_v<Panel, PanelQ5_0> || std::is_same_v<Panel, PanelQ5_1>) {
        for (int c = 0; c < 4; c++) {
            // Every fourth bit, brought together.
            uint32_t bits        = four(in->qh) >> c & 0x11111111;
            bits                 = (bits | bits >> 3) & 0x03030303;
            bits                 = (bits | bits >> 6) & 0x000f000f;
            out->high[4 * r + c] = static_cast<uint8_t>(bits | bits >> 12);
        }
    }
    if constexpr (kNumbers<Panel>.has_mins) memcpy(&out->m[r], &in->m, 2);
}

void put(const block_mxfp4 *in, int r, PanelMXFP4 *out) {
    put_lines(in->qs, r, out->q);
    out->e[r] = in->e;
}

// Half h of a block. A scale that is no number is 0, as for ggml, which reads no sign.
void put(const block_nvfp4 *in, int h, int r, PanelNVFP4 *out) {
    uint8_t q[32];
    for (int s = 0; s < 2; s++) {
        low_and_high(in->qs + 16 * h + 8 * s, q + 16 * s, q + 16 * s + 8, 8);
        const uint8_t scale = in->d[2 * h + s];
        out->scales[s][r]   = scale == 0x7f ? 0 : scale & 0x7f;
    }
    put_nibbles(q, r, out->q);
}

void put(const block_iq4_xs *in, int r, PanelIQ4_XS *out) {
    for (int b = 0; b < 8; b++) {
        put_lines(in->qs + 16 * b, r, out->q[b]);
        const int scale   = (in->scales_l[b / 2] >> 4 * (b % 2) & 15) | (in->scales_h >> 2 * b & 3) << 4;
        out->scales[b][r] = static_cast<int8_t>(scale - 32);
    }
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_q1_0 *in, int r, PanelQ1_0 *out) {
    for (int b = 0; b < 4; b++)
        for (int c = 0; c < 4; c++) {
            const uint32_t word = four(in->qs + 4 * b);
            int            bits = 0;
            for (int g = 0; g < 8; g++) bits |= static_cast<int>(word >> (4 * g + c) & 1) << g;
            out->q[b][4 * r + c] = static_cast<uint8_t>(bits);
        }
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_q2_0 *in, int r, PanelQ2_0 *out) {
    for (int h = 0; h < 4; h++)
        for (int c = 0; c < 4; c++) {
            const uint32_t word = four(in->qs + 4 * h);
            int            bits = 0;
            for (int g = 0; g < 4; g++) bits |= static_cast<int>(word >> (8 * g + 2 * c) & 3) << 2 * g;
            out->q[h / 2][h % 2][4 * r + c] = static_cast<uint8_t>(bits);
        }
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_q8_0 *in, int r, PanelQ8_0 *out) {
    for (int g = 0; g < 8; g++) memcpy(out->q[g] + 4 * r, in->qs + 4 * g, 4);
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_q4_K *in, int r, PanelQ4_K *out) { put_plain(in, r, out); }
void put(const block_q5_K *in, int r, PanelQ5_K *out) { put_plain(in, r, out); }
void put(const block_q6_K *in, int r, PanelQ6_K *out) { put_plain(in, r, out); }

// ---- types of at most 3 bits

void put_low(const uint8_t *q, int r, uint8_t (*low)[64]) {
    for (int s = 0; s < 16; s++) {
        uint32_t bits = 0;
        for (int g = 0; g < 4; g++) bits |= (four(q + 16 * s + 4 * g) & 0x03030303) << 2 * g;
        memcpy(low[s] + 4 * r, &bits, 4);
    }
}

// Two bits of each column, in bytes that have columns 32 apart.
void two_bits(const uint8_t *bytes, uint8_t *q) {
    for (int half = 0; half < 2; half++)
        for (int l = 0; l < 4; l++)
            for (int m = 0; m < 32; m++) *q++ = bytes[32 * half + m] >> 2 * l & 3;
}

void put(const block_q3_K *in, int r, PanelQ3_K *out) {
    uint8_t q[QK_K];
    two_bits(in->qs, q);
    put_low(q, r, out->low);
    for (int b = 0; b < 8; b++) {
        uint32_t bits = 0;
        for (int g = 0; g < 8; g++) bits |= (four(in->hmask + 4 * g) >> b & 0x01010101) << g;
        memcpy(out->high[b] + 4 * r, &bits, 4);
    }
    for (int s = 0; s < 16; s++) {
        const int low = in->scales[s % 8] >> 4 * (s / 8) & 15, high = in->scales[8 + s % 4] >> 2 * (s / 4) & 3;
        out->scales[s / 2][r][s % 2] = static_cast<int8_t>((low | high << 4) - 32);
    }
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_q2_K *in, int r, PanelQ2_K *out) {
    uint8_t q[QK_K];
    two_bits(in->qs, q);
    put_low(q, r, out->low);
    for (int s = 0; s < 16; s++) out->scales[s / 2][r][s % 2] = in->scales[s];
    memcpy(&out->d[r], &in->d, 2);
    memcpy(&out->dmin[r], &in->dmin, 2);
}

void put(const block_tq2_0 *in, int r, PanelTQ2_0 *out) {
    uint8_t q[QK_K];
    two_bits(in->qs, q);
    put_low(q, r, out->low);
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_tq1_0 *in, int r, PanelTQ1_0 *out) {
    constexpr uint8_t powers[5] = { 1, 3, 9, 27, 81 };
    uint8_t           q[QK_K], *to = q;
    const auto        digits = [&](const uint8_t *bytes, int n_bytes, int n_digits) {
        for (int n = 0; n < n_digits; n++)
            for (int m = 0; m < n_bytes; m++) *to++ = static_cast<uint8_t>(static_cast<uint8_t>(bytes[m] * powers[n]) * 3 >> 8);
    };
    digits(in->qs, 32, 5);
    digits(in->qs + 32, 16, 5);
    digits(in->qh, 4, 4);
    for (int n = 0; n < 13; n++)
        for (int c = 0; c < 4; c++) {
            int value = 0;
            for (int g = 5 * n; g < 5 * n + 5; g++) value = 3 * value + (g < 64 ? q[4 * g + c] : 0);
            out->q[n][4 * r + c] = static_cast<uint8_t>((value * 256 + 242) / 243);  // so that multiplying gives the digits again
        }
    memcpy(&out->d[r], &in->d, 2);
}

// The places of groups of columns; those of 8 columns are 32. A place has 8 bits, and others in `nine` and `ten`.
template <typename Panel> void put_index(const uint16_t *index, int r, Panel *out) {
    constexpr int n = static_cast<int>(sizeof(out->index) / 16);
    for (int g = 0; g < n; g++) out->index[g][r] = static_cast<uint8_t>(index[g]);
}

// n bits of each, from `shift` on; in a byte are those of every second index.
template <int n, int size> void put_bits(const uint16_t *index, int shift, int r, uint8_t (&to)[size][2][16]) {
    constexpr int per_byte = 8 / n;
    for (int j = 0; j < size; j++)
        for (int e = 0; e < 2; e++) {
            int bits = 0;
            for (int l = 0; l < per_byte; l++) bits |= (index[2 * per_byte * j + 2 * l + e] >> shift & ((1 << n) - 1)) << n * l;
            to[j][e][r] = static_cast<uint8_t>(bits);
        }
}

// The signs of each eight columns. Rows come in order.
void put_signs(const uint8_t *signs, int r, uint8_t (*to)[8]) {
    for (int g = 0; g < 64; g++) {
        const int bits = signs[g / 2] >> 4 * (g % 2) & 15;
        to[g][r / 2]   = static_cast<uint8_t>(r % 2 ? to[g][r / 2] | bits << 4 : bits);
    }
}

void put(const block_iq3_xxs *in, int r, PanelIQ3_XXS *out) {
    uint8_t signs[32];
    for (int g = 0; g < 64; g++) out->index[g][r] = in->qs[g];
    for (int b = 0; b < 8; b++) {
        const uint32_t word = four(in->qs + 64 + 4 * b);
        for (int l = 0; l < 4; l++) signs[4 * b + l] = ksigns_iq2xs[word >> 7 * l & 127];
        const uint32_t scale  = word >> 28;
        out->scales[b / 2][r] = static_cast<uint8_t>(b % 2 ? out->scales[b / 2][r] | scale << 4 : scale);
    }
    put_signs(signs, r, out->signs);
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_iq3_s *in, int r, PanelIQ3_S *out) {
    uint16_t index[64];
    for (int g = 0; g < 64; g++) index[g] = static_cast<uint16_t>(in->qs[g] | (in->qh[g / 8] >> g % 8 & 1) << 8);
    put_index(index, r, out);
    put_bits<1>(index, 8, r, out->nine);
    put_signs(in->signs, r, out->signs);
    for (int i = 0; i < 4; i++) out->scales[i][r] = in->scales[i];
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_iq2_xxs *in, int r, PanelIQ2_XXS *out) {
    uint8_t signs[32];
    for (int b = 0; b < 8; b++) {
        uint32_t words[2];
        memcpy(words, in->qs + 4 * b, 8);
        for (int l = 0; l < 4; l++) {
            out->index[4 * b + l][r] = static_cast<uint8_t>(words[0] >> 8 * l);
            signs[4 * b + l]         = ksigns_iq2xs[words[1] >> 7 * l & 127];
        }
        const uint32_t scale  = words[1] >> 28;
        out->scales[b / 2][r] = static_cast<uint8_t>(b % 2 ? out->scales[b / 2][r] | scale << 4 : scale);
    }
    put_signs(signs, r, out->signs);
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_iq2_xs *in, int r, PanelIQ2_XS *out) {
    uint8_t signs[32];
    for (int g = 0; g < 32; g++) signs[g] = ksigns_iq2xs[in->qs[g] >> 9];
    put_index(in->qs, r, out);
    put_bits<1>(in->qs, 8, r, out->nine);
    put_signs(signs, r, out->signs);
    for (int i = 0; i < 8; i++) out->scales[i][r] = in->scales[i];
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_iq2_s *in, int r, PanelIQ2_S *out) {
    uint16_t index[32];
    for (int g = 0; g < 32; g++) index[g] = static_cast<uint16_t>(in->qs[g] | (in->qh[g / 4] >> 2 * (g % 4) & 3) << 8);
    put_index(index, r, out);
    put_bits<2>(index, 8, r, out->ten);
    for (int i = 0; i < 8; i++) out->scales[i][r] = in->scales[i];
    put_signs(in->qs + 32, r, out->signs);
    memcpy(&out->d[r], &in->d, 2);
}

template <typename Panel> void put_eleven(const uint16_t *index, int r, Panel *out) {
    put_index(index, r, out);
    put_bits<2>(index, 8, r, out->ten);
    put_bits<1>(index, 10, r, out->nine);
}

void put(const block_iq1_s *in, int r, PanelIQ1_S *out) {
    uint16_t index[32];
    for (int g = 0; g < 32; g++) index[g] = static_cast<uint16_t>(in->qs[g] | (in->qh[g / 4] >> 3 * (g % 4) & 7) << 8);
    put_eleven(index, r, out);
    for (int i = 0; i < 4; i++) out->scales[i][r] = static_cast<uint8_t>(in->qh[2 * i] >> 12 | in->qh[2 * i + 1] >> 12 << 4);
    memcpy(&out->d[r], &in->d, 2);
}

void put(const block_iq1_m *in, int r, PanelIQ1_M *out) {
    uint16_t index[32], negative[32], words[4];
    for (int g = 0; g < 32; g++) {
        const int bits = in->qh[g / 2] >> 4 * (g % 2);
        index[g]       = static_cast<uint16_t>(in->qs[g] | (bits & 7) << 8);
        negative[g]    = static_cast<uint16_t>(bits >> 3 & 1);
    }
    put_eleven(index, r, out);
    put_bits<1>(negative, 0, r, out->negative);
    memcpy(words, in->scales, 8);
    for (int i = 0; i < 8; i++) {
        const int both    = words[i / 2] >> 6 * (i % 2);
        out->scales[i][r] = static_cast<uint8_t>((both & 7) | (both >> 3 & 7) << 4);
    }
    int d = 0;
    for (int i = 0; i < 4; i++) d |= words[i] >> 12 << 4 * i;
    out->d[r] = static_cast<uint16_t>(d);
}

}  // namespace

template <typename Panel> size_t panel_bytes(int64_t n_columns) {
    return sizeof(Panel) * (n_columns / PanelType<Panel>::kColumns);
}

template <typename Panel> void pack(const void *rows, size_t stride, int64_t n_columns, void *panel) {
    using Type             = PanelType<Panel>;
    const int64_t n_panels = n_columns / Type::kColumns;
    for (int r = 0; r < kPanelRows; r++) {
        const auto *block = reinterpret_cast<const typename Type::Block *>(static_cast<const char *>(rows) + r * stride);
        for (int64_t i = 0; i < n_panels; i++) {
            Panel *out = static_cast<Panel *>(panel) + i;
            if constexpr (Type::kParts > 1)
                put(block + i / Type::kParts, static_cast<int>(i % Type::kParts), r, out);
            else
                put(block + i, r, out);
        }
    }
}

#define PACKED(name, block, n, weights, numbers)                 \
    template size_t panel_bytes<Panel##name>(int64_t n_columns); \
    template void   pack<Panel##name>(const void *rows, size_t stride, int64_t n_columns, void *panel);
PANELS(PACKED)

// Makes a grid of ggml's table, for whose bytes `place` finds places in `values`.
template <typename T, int n, typename F> static void put_grid(const T (&table)[n], const int8_t *values, F &&place,
                                                              Grid<T, n> &out) {
    constexpr int shifts[4] = { 0, 8, 4, 12 };
    for (int i = 0; i < n; i++) {
        T   bytes  = 0;
        int places = 0;
        for (int c = 0; c < static_cast<int>(sizeof(T)); c++) {
            const int at = place(static_cast<int8_t>(table[i] >> 8 * c));
            bytes |= static_cast<T>(values[at]) << 8 * c;
            places |= at << (shifts[c % 4] + 2 * (c / 4));
        }
        out.bytes[i]  = bytes;
        out.places[i] = static_cast<uint16_t>(places);
    }
}

static Grids make_grids() {
    Grids out;
    put_grid(iq3xxs_grid, kIQ3_XXS, [](int value) { return value == 62 ? 7 : (value - 4) / 8; }, out.iq3_xxs);
    put_grid(iq3s_grid, kIQ3_S, [](int value) { return value / 2; }, out.iq3_s);
    const auto of_iq2 = [](int value) { return value == 8 ? 0 : value == 25 ? 1 : 2; };
    put_grid(iq2xxs_grid, kIQ2[0], of_iq2, out.iq2_xxs);
    put_grid(iq2xs_grid, kIQ2[0], of_iq2, out.iq2_xs);
    put_grid(iq2s_grid, kIQ2[0], of_iq2, out.iq2_s);
    put_grid(iq1s_grid, kIQ1[0], [](int value) { return value + 1; }, out.iq1);
    return out;
}

const Grids kGrids = make_grids();

}  // namespace lp::kernels
#endif

// Q4_K, Q5_K and Q6_K on AVX2.
//
// A panel holds 16 rows of weights. A line is 64 bytes: for each row in turn, the four bytes of four adjacent columns, so
// that a vector of 32 bytes times four broadcast activations gives one 32-bit lane a row. vpmaddubsw adds two products in
// 16 bits without overflow while weights have at most 6 bits; the block's scale is applied by vpmaddwd, which also widens.
// Sums of a super-block of 256 columns are exact integers, as in ggml's own products.
#if defined(__x86_64__)
#include "x86.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "avx2.hpp"

namespace llamapipe::kernels {
namespace {

// 16 rows x 256 columns. Line g of block b: low nibbles are columns 32 b + 4 g .. + 3, high nibbles 32 b + 16 + 4 g .. + 3.
struct PanelQ4K {
    uint8_t q[8][4][64];
    uint8_t scales[8][16];
    uint8_t mins[4][16][2];  // of blocks 2 i and 2 i + 1
    uint16_t d[16], dmin[16];
};

// As PanelQ4K; bit g of a byte of `high` is the fifth bit of the columns 32 b + 4 g .. + 3.
struct PanelQ5K {
    uint8_t q[8][4][64];
    uint8_t high[8][64];
    uint8_t scales[8][16];
    uint8_t mins[4][16][2];
    uint16_t d[16], dmin[16];
};

// Sub-blocks of 16 columns. Line h of sub-block s: low nibbles are columns 16 s + 8 h .. + 3, high nibbles the next four;
// bits 2 g and 2 g + 1 of a byte of `high` belong to the columns 16 s + 4 g .. + 3.
struct PanelQ6K {
    uint8_t low[16][2][64];
    uint8_t high[16][64];
    int8_t scales[8][16][2];  // of sub-blocks 2 i and 2 i + 1
    uint16_t d[16];
};

static_assert(sizeof(PanelQ4K) * 100 <= sizeof(block_q4_K) * 16 * 103);
static_assert(sizeof(PanelQ5K) * 100 <= sizeof(block_q5_K) * 16 * 103);
static_assert(sizeof(PanelQ6K) == sizeof(block_q6_K) * 16);

// The scales of 16 rows, each twice as 16 bits.
inline void twice(const uint8_t *scales, int16_t *out) {
    const __m128i s = _mm_loadu_si128((const __m128i *)scales);
    store(out, _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(s, s)));
    store(out + 16, _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(s, s)));
}

// A super-block of a panel with its weights as bytes: line g has the columns 4 g .. 4 g + 3. It stays in the first-level
// cache while all rows of activations are multiplied with it.
struct Unpacked {
    alignas(64) uint8_t q[64][64];
    alignas(64) int16_t scales[16][32];  // of each block, twice for each row
};

inline void unpack(const PanelQ4K *panel, int, Unpacked &out) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int b = 0; b < 8; b++) {
        for (int g = 0; g < 4; g++) {
            for (int p = 0; p < 64; p += 32) {
                const __m256i v = load(panel->q[b][g] + p);
                store(out.q[8 * b + g] + p, _mm256_and_si256(v, nibble));
                store(out.q[8 * b + 4 + g] + p, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
            }
        }
        twice(panel->scales[b], out.scales[b]);
    }
}

inline void unpack(const PanelQ5K *panel, int, Unpacked &out) {
    const __m256i nibble = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16);
    for (int b = 0; b < 8; b++) {
        for (int p = 0; p < 64; p += 32) {
            const __m256i bits = load(panel->high[b] + p), up = _mm256_slli_epi16(bits, 4);
            for (int g = 0; g < 4; g++) {
                const __m256i v = load(panel->q[b][g] + p);
                store(out.q[8 * b + g] + p, _mm256_or_si256(_mm256_and_si256(v, nibble),
                                                            _mm256_and_si256(_mm256_srli_epi16(up, g), fifth)));
                store(out.q[8 * b + 4 + g] + p, _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(v, 4), nibble),
                                                                _mm256_and_si256(_mm256_srli_epi16(bits, g), fifth)));
            }
        }
        twice(panel->scales[b], out.scales[b]);
    }
}

inline void unpack(const PanelQ6K *panel, int, Unpacked &out) {
    const __m256i nibble = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    for (int s = 0; s < 16; s++) {
        for (int p = 0; p < 64; p += 32) {
            const __m256i high = load(panel->high[s] + p);
            const __m256i v0 = load(panel->low[s][0] + p), v1 = load(panel->low[s][1] + p);
            const auto join = [&](__m256i low, __m256i up) {
                return _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(up, two));
            };
            store(out.q[4 * s] + p, join(v0, _mm256_slli_epi16(high, 4)));
            store(out.q[4 * s + 1] + p, join(_mm256_srli_epi16(v0, 4), _mm256_slli_epi16(high, 2)));
            store(out.q[4 * s + 2] + p, join(v1, high));
            store(out.q[4 * s + 3] + p, join(_mm256_srli_epi16(v1, 4), _mm256_srli_epi16(high, 2)));
        }
    }
    const __m256i lanes = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    const __m256i even = _mm256_add_epi8(_mm256_set1_epi32(0x01000100), lanes);
    const __m256i odd = _mm256_add_epi8(_mm256_set1_epi32(0x03020302), lanes);
    for (int i = 0; i < 8; i++) {
        for (int r = 0; r < 16; r += 8) {
            const __m256i both = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)panel->scales[i][r]));
            store(out.scales[2 * i] + 2 * r, _mm256_shuffle_epi8(both, even));
            store(out.scales[2 * i + 1] + 2 * r, _mm256_shuffle_epi8(both, odd));
        }
    }
}

// The integer sums of a super-block: a scale for each `in_block` lines, of which `in_part` are added in 16 bits.
template <int M, int in_block, int in_part>
inline void products(const Unpacked &w, const RowBlockK *const *x, __m256i (&sum)[M][2]) {
    for (int j = 0; j < M; j++) sum[j][0] = sum[j][1] = _mm256_setzero_si256();
    for (int at = 0; at < 64; at += in_part) {
        __m256i part[M][2];
#pragma GCC unroll 8
        for (int g = 0; g < in_part; g++) {
            const __m256i w0 = load(w.q[at + g]), w1 = load(w.q[at + g] + 32);
            for (int j = 0; j < M; j++) {
                const __m256i a = broadcast(x[j]->q + 4 * (at + g));
                const __m256i p0 = _mm256_maddubs_epi16(w0, a), p1 = _mm256_maddubs_epi16(w1, a);
                if (g == 0) {
                    part[j][0] = p0;
                    part[j][1] = p1;
                } else {
                    add(part[j][0], p0);
                    add(part[j][1], p1);
                }
            }
        }
        const int16_t *scales = w.scales[at / in_block];
        const __m256i s0 = load(scales), s1 = load(scales + 16);
        for (int j = 0; j < M; j++) {
            sum[j][0] = _mm256_add_epi32(sum[j][0], _mm256_madd_epi16(part[j][0], s0));
            sum[j][1] = _mm256_add_epi32(sum[j][1], _mm256_madd_epi16(part[j][1], s1));
        }
    }
}

// Adds the products of a super-block with M rows to their sums in floats.
template <int M, int in_part, class Panel>
inline void add_with_minima(const Panel *panel, const Unpacked &w, const RowBlockK *const *x, float *const *y) {
    __m256i sum[M][2], minima[M][2];
    products<M, 8, in_part>(w, x, sum);
    for (int j = 0; j < M; j++) minima[j][0] = minima[j][1] = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        const __m256i m0 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)panel->mins[i][0]));
        const __m256i m1 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)panel->mins[i][8]));
        for (int j = 0; j < M; j++) {
            const __m256i sums = broadcast(x[j]->sums32 + 2 * i);
            minima[j][0] = _mm256_add_epi32(minima[j][0], _mm256_madd_epi16(m0, sums));
            minima[j][1] = _mm256_add_epi32(minima[j][1], _mm256_madd_epi16(m1, sums));
        }
    }
    for (int p = 0; p < 2; p++) {
        const __m256 d = halves(panel->d + 8 * p), dmin = halves(panel->dmin + 8 * p);
        for (int j = 0; j < M; j++) {
            const __m256 dx = _mm256_set1_ps(x[j]->d);
            __m256 s = _mm256_loadu_ps(y[j] + 8 * p);
            s = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[j][p]), _mm256_mul_ps(d, dx), s);
            s = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(minima[j][p]), _mm256_mul_ps(dmin, dx), s);
            _mm256_storeu_ps(y[j] + 8 * p, s);
        }
    }
}

template <int M>
inline void accumulate(const PanelQ4K *panel, const Unpacked &w, int, const RowBlockK *const *x, float *const *y) {
    add_with_minima<M, 8>(panel, w, x, y);  // 16 x 15 x 127 = 30,480 fits 16 bits
}

template <int M>
inline void accumulate(const PanelQ5K *panel, const Unpacked &w, int, const RowBlockK *const *x, float *const *y) {
    add_with_minima<M, 4>(panel, w, x, y);  // 8 x 31 x 127 = 31,496
}

template <int M>
inline void accumulate(const PanelQ6K *panel, const Unpacked &w, int, const RowBlockK *const *x, float *const *y) {
    __m256i sum[M][2], offset[M][2];
    products<M, 4, 2>(w, x, sum);  // 4 x 63 x 127 = 32,004
    // Weights are 32 less than what was multiplied.
    for (int j = 0; j < M; j++) offset[j][0] = offset[j][1] = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
        const __m256i s0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)panel->scales[i][0]));
        const __m256i s1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)panel->scales[i][8]));
        for (int j = 0; j < M; j++) {
            const __m256i sums = broadcast(x[j]->sums16 + 2 * i);
            offset[j][0] = _mm256_add_epi32(offset[j][0], _mm256_madd_epi16(s0, sums));
            offset[j][1] = _mm256_add_epi32(offset[j][1], _mm256_madd_epi16(s1, sums));
        }
    }
    for (int p = 0; p < 2; p++) {
        const __m256 d = halves(panel->d + 8 * p);
        for (int j = 0; j < M; j++) {
            const __m256i whole = _mm256_sub_epi32(sum[j][p], _mm256_slli_epi32(offset[j][p], 5));
            const __m256 s = _mm256_loadu_ps(y[j] + 8 * p);
            _mm256_storeu_ps(y[j] + 8 * p, _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole),
                                                           _mm256_mul_ps(d, _mm256_set1_ps(x[j]->d)), s));
        }
    }
}

template <class P> struct Form {
    using Panel = P;
    using Unpacked = kernels::Unpacked;
    using Row = RowBlockK;
    static constexpr int kColumns = QK_K, kAtOnce = 1;
    template <int M>
    static void accumulate(const Panel *panel, const Unpacked &w, int n, const Row *const *x, float *const *y) {
        kernels::accumulate<M>(panel, w, n, x, y);
    }
};

template <class Panel> size_t panel_bytes(int64_t n_columns) { return sizeof(Panel) * (n_columns / QK_K); }

// A super-block of a row as integers: q, and what the type has beside.
struct Plain {
    uint8_t q[QK_K];
    uint8_t scales[16], mins[8];
    uint16_t d, dmin;
};

inline void plain(const block_q4_K *b, Plain &out) {
    for (int i = 0; i < QK_K; i++) out.q[i] = (b->qs[32 * (i / 64) + i % 32] >> (i % 64 < 32 ? 0 : 4)) & 15;
    for (int j = 0; j < 8; j++) scale_and_min_k4(j, b->scales, out.scales[j], out.mins[j]);
    memcpy(&out.d, &b->d, 2);
    memcpy(&out.dmin, &b->dmin, 2);
}

inline void plain(const block_q5_K *b, Plain &out) {
    for (int i = 0; i < QK_K; i++) {
        const int low = (b->qs[32 * (i / 64) + i % 32] >> (i % 64 < 32 ? 0 : 4)) & 15;
        out.q[i] = (uint8_t)(low | ((b->qh[i % 32] >> (i / 32)) & 1) << 4);
    }
    for (int j = 0; j < 8; j++) scale_and_min_k4(j, b->scales, out.scales[j], out.mins[j]);
    memcpy(&out.d, &b->d, 2);
    memcpy(&out.dmin, &b->dmin, 2);
}

inline void plain(const block_q6_K *b, Plain &out) {
    for (int i = 0; i < QK_K; i++) {
        const int in = i % 128, quarter = in / 32;
        const int low = (b->ql[64 * (i / 128) + in % 64] >> (in < 64 ? 0 : 4)) & 15;
        out.q[i] = (uint8_t)(low | ((b->qh[32 * (i / 128) + in % 32] >> (2 * quarter)) & 3) << 4);
    }
    memcpy(out.scales, b->scales, 16);
    memcpy(&out.d, &b->d, 2);
}

inline void put(const Plain &in, int r, PanelQ4K *out) {
    for (int b = 0; b < 8; b++) {
        const uint8_t *q = in.q + 32 * b;
        for (int i = 0; i < 16; i++) out->q[b][i / 4][4 * r + i % 4] = (uint8_t)(q[i] | q[16 + i] << 4);
        out->scales[b][r] = in.scales[b];
        out->mins[b / 2][r][b % 2] = in.mins[b];
    }
    out->d[r] = in.d;
    out->dmin[r] = in.dmin;
}

inline void put(const Plain &in, int r, PanelQ5K *out) {
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

inline void put(const Plain &in, int r, PanelQ6K *out) {
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

template <class Block, class Panel> void pack(const void *rows, size_t stride, int64_t n_columns, void *panel) {
    for (int r = 0; r < kPanelRows; r++) {
        const Block *block = (const Block *)((const char *)rows + r * stride);
        Panel *out = (Panel *)panel;
        for (int64_t i = 0; i < n_columns / QK_K; i++) {
            Plain values;
            plain(block + i, values);
            put(values, r, out + i);
        }
    }
}

}  // namespace

size_t k_row_bytes(int64_t n_columns) { return sizeof(RowBlockK) * (n_columns / QK_K); }

// As ggml's quantize_row_q8_K: the value of greatest magnitude becomes -127.
void k_quantize(const float *row, int64_t, int64_t first, int64_t last, void *quantized) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    RowBlockK *out = (RowBlockK *)quantized + first / QK_K;
    for (int64_t i = first; i < last; i += QK_K, out++) {
        const float *x = row + i;
        __m256 top = _mm256_setzero_ps();
        for (int k = 0; k < QK_K; k += 8) top = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + k)), top);
        __m128 top4 = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        top4 = _mm_max_ps(top4, _mm_movehl_ps(top4, top4));
        const float greatest = _mm_cvtss_f32(_mm_max_ss(top4, _mm_movehdup_ps(top4)));
        if (greatest == 0) {
            memset(out, 0, sizeof *out);
            continue;
        }
        // The first value of that magnitude gives the sign.
        float value = greatest;
        for (int k = 0; k < QK_K; k += 8) {
            const __m256 v = _mm256_loadu_ps(x + k);
            const int same = _mm256_movemask_ps(
                _mm256_cmp_ps(_mm256_andnot_ps(sign, v), _mm256_set1_ps(greatest), _CMP_EQ_OQ));
            if (same) {
                value = x[k + __builtin_ctz((unsigned)same)];
                break;
            }
        }
        const float inverse = -127.f / value;
        const __m256 factor = _mm256_set1_ps(inverse);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (int k = 0; k < QK_K; k += 32) {
            __m256i v[4];
            for (int n = 0; n < 4; n++)
                v[n] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k + 8 * n), factor));
            const __m256i low = _mm256_packs_epi32(v[0], v[1]), high = _mm256_packs_epi32(v[2], v[3]);
            const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
            _mm256_storeu_si256((__m256i *)(out->q + k), bytes);
            // Sums of 16 bytes: vpmaddubsw with ones, vpmaddwd with ones, then across four lanes.
            const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
            const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
            const __m256i whole = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
            const int a = _mm256_extract_epi32(whole, 0), b = _mm256_extract_epi32(whole, 4);
            out->sums16[k / 16] = (int16_t)a;
            out->sums16[k / 16 + 1] = (int16_t)b;
            out->sums32[k / 32] = (int16_t)(a + b);
        }
        out->d = 1 / inverse;
    }
}

extern const Kernel kQ4KAvx2{GGML_TYPE_Q4_K, "avx2", QK_K, panel_bytes<PanelQ4K>, k_row_bytes,
                             pack<block_q4_K, PanelQ4K>, k_quantize, multiply<Form<PanelQ4K>>};
extern const Kernel kQ5KAvx2{GGML_TYPE_Q5_K, "avx2", QK_K, panel_bytes<PanelQ5K>, k_row_bytes,
                             pack<block_q5_K, PanelQ5K>, k_quantize, multiply<Form<PanelQ5K>>};
extern const Kernel kQ6KAvx2{GGML_TYPE_Q6_K, "avx2", QK_K, panel_bytes<PanelQ6K>, k_row_bytes,
                             pack<block_q6_K, PanelQ6K>, k_quantize, multiply<Form<PanelQ6K>>};

}  // namespace llamapipe::kernels
#pragma GCC pop_options
#endif

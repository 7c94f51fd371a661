// Q8_0, Q5_0, Q4_0, Q5_1, Q4_1 and IQ4_NL on AVX2: blocks of 32 columns with a scale each.
//
// Panels and lines are those of k_quants_avx2.cpp. Weights of at most 5 bits are multiplied unsigned, and the sum of the
// activations times their offset is subtracted. Weights of 8 bits are multiplied by magnitude, with their signs moved to
// the activations: two products fill 16 bits, so each pair is widened at once.
#if defined(__x86_64__)
#include "x86.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "avx2.hpp"

namespace llamapipe::kernels {
namespace {

// Line g: low nibbles are the columns 4 g .. 4 g + 3, high nibbles 16 + 4 g .. 16 + 4 g + 3.
struct PanelQ4_0 {
    uint8_t q[4][64];
    uint16_t d[16];
};

struct PanelQ4_1 {
    uint8_t q[4][64];
    uint16_t d[16], m[16];
};

// Bit g of a byte of `high` is the fifth bit of the columns 4 g .. 4 g + 3.
struct PanelQ5_0 {
    uint8_t q[4][64];
    uint8_t high[64];
    uint16_t d[16];
};

struct PanelQ5_1 {
    uint8_t q[4][64];
    uint8_t high[64];
    uint16_t d[16], m[16];
};

struct PanelQ8_0 {
    int8_t q[8][64];
    uint16_t d[16];
};

struct PanelIQ4_NL {
    uint8_t q[4][64];
    uint16_t d[16];
};

static_assert(sizeof(PanelQ4_0) == 16 * sizeof(block_q4_0) && sizeof(PanelQ4_1) == 16 * sizeof(block_q4_1));
static_assert(sizeof(PanelQ5_0) == 16 * sizeof(block_q5_0) && sizeof(PanelQ5_1) == 16 * sizeof(block_q5_1));
static_assert(sizeof(PanelQ8_0) == 16 * sizeof(block_q8_0) && sizeof(PanelIQ4_NL) == 16 * sizeof(block_iq4_nl));

constexpr int kBlocks = 8;  // that are unpacked at once

struct Unpacked {
    alignas(64) uint8_t q[8 * kBlocks][64];
};

template <class Panel> inline void unpack(const Panel *panel, int n, Unpacked &out) {
    const __m256i nibble = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16);
    for (int b = 0; b < n; b++) {
        for (int p = 0; p < 64; p += 32) {
            uint8_t(*to)[64] = out.q + 8 * b;
            for (int g = 0; g < 4; g++) {
                const __m256i v = load(panel[b].q[g] + p);
                __m256i low = _mm256_and_si256(v, nibble), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
                if constexpr (std::is_same_v<Panel, PanelQ5_0> || std::is_same_v<Panel, PanelQ5_1>) {
                    const __m256i bits = load(panel[b].high + p);
                    const __m256i up = _mm256_srli_epi16(_mm256_slli_epi16(bits, 4), g);
                    low = _mm256_or_si256(low, _mm256_and_si256(up, fifth));
                    high = _mm256_or_si256(high, _mm256_and_si256(_mm256_srli_epi16(bits, g), fifth));
                }
                if constexpr (std::is_same_v<Panel, PanelIQ4_NL>) {
                    const __m256i values =
                        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)kvalues_iq4nl));
                    low = _mm256_shuffle_epi8(values, low);
                    high = _mm256_shuffle_epi8(values, high);
                }
                store(to[g] + p, low);
                store(to[4 + g] + p, high);
            }
        }
    }
}

// Signed weights need no form beside the panel's.
struct InPlace {};
inline void unpack(const PanelQ8_0 *, int, InPlace &) {}

inline const uint8_t (*lines(const PanelQ8_0 *panel, const InPlace &, int b))[64] {
    return (const uint8_t(*)[64])panel[b].q;
}
inline const uint8_t (*lines(const PanelIQ4_NL *, const Unpacked &w, int b))[64] { return w.q + 8 * b; }

template <int M, class Panel, class Weights>
inline void accumulate_signed(const Panel *panel, const Weights &w, int n, const RowBlock32 *const *x, float *const *y) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int b = 0; b < n; b++) {
        const uint8_t(*line)[64] = lines(panel, w, b);
        __m256i sum[M][2];
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const __m256i w0 = load(line[g]), w1 = load(line[g] + 32);
            const __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
            for (int j = 0; j < M; j++) {
                const __m256i a = broadcast(x[j][b].q + 4 * g);
                const __m256i p0 = _mm256_madd_epi16(_mm256_maddubs_epi16(size0, _mm256_sign_epi8(a, w0)), ones);
                const __m256i p1 = _mm256_madd_epi16(_mm256_maddubs_epi16(size1, _mm256_sign_epi8(a, w1)), ones);
                sum[j][0] = g == 0 ? p0 : _mm256_add_epi32(sum[j][0], p0);
                sum[j][1] = g == 0 ? p1 : _mm256_add_epi32(sum[j][1], p1);
                __asm__("" : "+x"(sum[j][0]), "+x"(sum[j][1]));  // as in `add`
            }
        }
        const __m256 d0 = halves(panel[b].d), d1 = halves(panel[b].d + 8);
        for (int j = 0; j < M; j++) {
            const __m256 dx = _mm256_set1_ps(x[j][b].d);
            const __m256 s0 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[j][0]), _mm256_mul_ps(d0, dx), _mm256_loadu_ps(y[j]));
            const __m256 s1 =
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[j][1]), _mm256_mul_ps(d1, dx), _mm256_loadu_ps(y[j] + 8));
            _mm256_storeu_ps(y[j], s0);
            _mm256_storeu_ps(y[j] + 8, s1);
        }
    }
}

template <class Panel> constexpr int kOffset = std::is_same_v<Panel, PanelQ4_0> ? 8 : std::is_same_v<Panel, PanelQ5_0> ? 16 : 0;
template <class Panel> constexpr int kInPart =
    std::is_same_v<Panel, PanelQ5_0> || std::is_same_v<Panel, PanelQ5_1> ? 4 : 8;  // 8 x 31 x 127, 16 x 15 x 127

template <int M, class Panel>
inline void accumulate(const Panel *panel, const Unpacked &w, int n, const RowBlock32 *const *x, float *const *y) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int b = 0; b < n; b++) {
        __m256i sum[M][2];
#pragma GCC unroll 2
        for (int at = 0; at < 8; at += kInPart<Panel>) {
            __m256i part[M][2];
#pragma GCC unroll 8
            for (int g = 0; g < kInPart<Panel>; g++) {
                const uint8_t *line = w.q[8 * b + at + g];
                const __m256i w0 = load(line), w1 = load(line + 32);
                for (int j = 0; j < M; j++) {
                    const __m256i a = broadcast(x[j][b].q + 4 * (at + g));
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
            for (int j = 0; j < M; j++) {
                for (int p = 0; p < 2; p++) {
                    const __m256i wide = _mm256_madd_epi16(part[j][p], ones);
                    sum[j][p] = at == 0 ? wide : _mm256_add_epi32(sum[j][p], wide);
                }
            }
        }
        for (int p = 0; p < 2; p++) {
            const __m256 d = halves(panel[b].d + 8 * p);
            for (int j = 0; j < M; j++) {
                const __m256 dx = _mm256_set1_ps(x[j][b].d);
                __m256i whole = sum[j][p];
                if constexpr (kOffset<Panel> != 0)
                    whole = _mm256_sub_epi32(whole, _mm256_set1_epi32(kOffset<Panel> * x[j][b].sum));
                __m256 s = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), _mm256_mul_ps(d, dx), _mm256_loadu_ps(y[j] + 8 * p));
                if constexpr (kOffset<Panel> == 0)
                    s = _mm256_fmadd_ps(halves(panel[b].m + 8 * p), _mm256_set1_ps(x[j][b].d_sum), s);
                _mm256_storeu_ps(y[j] + 8 * p, s);
            }
        }
    }
}

template <int M>
inline void accumulate(const PanelQ8_0 *panel, const InPlace &w, int n, const RowBlock32 *const *x, float *const *y) {
    accumulate_signed<M>(panel, w, n, x, y);
}

template <int M>
inline void accumulate(const PanelIQ4_NL *panel, const Unpacked &w, int n, const RowBlock32 *const *x, float *const *y) {
    accumulate_signed<M>(panel, w, n, x, y);
}

template <class P, class W> struct Form {
    using Panel = P;
    using Unpacked = W;
    using Row = RowBlock32;
    static constexpr int kColumns = 32, kAtOnce = kBlocks;
    template <int M>
    static void accumulate(const Panel *panel, const W &w, int n, const Row *const *x, float *const *y) {
        kernels::accumulate<M>(panel, w, n, x, y);
    }
};

template <class Panel> size_t panel_bytes(int64_t n_columns) { return sizeof(Panel) * (n_columns / 32); }

// Column i of a block of nibbles is in byte i % 16, the lower nibble first.
template <class Block, class Panel> inline void put(const Block *in, int r, Panel *out) {
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

inline void put(const block_q8_0 *in, int r, PanelQ8_0 *out) {
    for (int g = 0; g < 8; g++) memcpy(out->q[g] + 4 * r, in->qs + 4 * g, 4);
    memcpy(&out->d[r], &in->d, 2);
}

template <class Block, class Panel> void pack(const void *rows, size_t stride, int64_t n_columns, void *panel) {
    for (int r = 0; r < kPanelRows; r++) {
        const Block *block = (const Block *)((const char *)rows + r * stride);
        for (int64_t i = 0; i < n_columns / 32; i++) put(block + i, r, (Panel *)panel + i);
    }
}

}  // namespace

size_t row32_bytes(int64_t n_columns) { return sizeof(RowBlock32) * (n_columns / 32); }

// As ggml's quantize_row_q8_0 and quantize_row_q8_1 for x86.
void quantize32(const float *row, int64_t, int64_t first, int64_t last, void *quantized) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    RowBlock32 *out = (RowBlock32 *)quantized + first / 32;
    for (int64_t i = first; i < last; i += 32, out++) {
        __m256 v[4], top = _mm256_setzero_ps();
        for (int n = 0; n < 4; n++) {
            v[n] = _mm256_loadu_ps(row + i + 8 * n);
            top = _mm256_max_ps(top, _mm256_andnot_ps(sign, v[n]));
        }
        __m128 top4 = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        top4 = _mm_max_ps(top4, _mm_movehl_ps(top4, top4));
        const float greatest = _mm_cvtss_f32(_mm_max_ss(top4, _mm_movehdup_ps(top4)));
        const __m256 factor = _mm256_set1_ps(greatest != 0 ? 127.f / greatest : 0);
        __m256i q[4];
        for (int n = 0; n < 4; n++) q[n] = _mm256_cvtps_epi32(_mm256_mul_ps(v[n], factor));
        const __m256i low = _mm256_packs_epi32(q[0], q[1]), high = _mm256_packs_epi32(q[2], q[3]);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        store(out->q, bytes);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
        out->sum = _mm_cvtsi128_si32(sum);
        const float d = greatest / 127.f;
        out->d = _cvtsh_ss(_cvtss_sh(d, 0));
        out->d_sum = _cvtsh_ss(_cvtss_sh(d * (float)out->sum, 0));
    }
}

extern const Kernel kQ4_0Avx2{GGML_TYPE_Q4_0, "avx2", 32, panel_bytes<PanelQ4_0>, row32_bytes,
                              pack<block_q4_0, PanelQ4_0>, quantize32, multiply<Form<PanelQ4_0, Unpacked>>};
extern const Kernel kQ4_1Avx2{GGML_TYPE_Q4_1, "avx2", 32, panel_bytes<PanelQ4_1>, row32_bytes,
                              pack<block_q4_1, PanelQ4_1>, quantize32, multiply<Form<PanelQ4_1, Unpacked>>};
extern const Kernel kQ5_0Avx2{GGML_TYPE_Q5_0, "avx2", 32, panel_bytes<PanelQ5_0>, row32_bytes,
                              pack<block_q5_0, PanelQ5_0>, quantize32, multiply<Form<PanelQ5_0, Unpacked>>};
extern const Kernel kQ5_1Avx2{GGML_TYPE_Q5_1, "avx2", 32, panel_bytes<PanelQ5_1>, row32_bytes,
                              pack<block_q5_1, PanelQ5_1>, quantize32, multiply<Form<PanelQ5_1, Unpacked>>};
extern const Kernel kQ8_0Avx2{GGML_TYPE_Q8_0, "avx2", 32, panel_bytes<PanelQ8_0>, row32_bytes,
                              pack<block_q8_0, PanelQ8_0>, quantize32, multiply<Form<PanelQ8_0, InPlace>>};
extern const Kernel kIQ4_NLAvx2{GGML_TYPE_IQ4_NL, "avx2", 32, panel_bytes<PanelIQ4_NL>, row32_bytes,
                                pack<block_iq4_nl, PanelIQ4_NL>, quantize32, multiply<Form<PanelIQ4_NL, Unpacked>>};

}  // namespace llamapipe::kernels
#pragma GCC pop_options
#endif

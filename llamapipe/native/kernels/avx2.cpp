// Products on AVX2: eight rows of weights a vector.
//
// vpmaddubsw multiplies unsigned weights by signed activations and adds pairs in 16 bits. Weights of at most 6 bits leave
// room for several such sums; vpmaddwd then widens them and applies an integer scale. Weights of 8 bits are multiplied by
// magnitude, with their signs moved to the activations, and each pair of products is widened at once.
#if defined(__x86_64__)
#include <cstring>
#include <type_traits>

#include "panels.hpp"
#include "target.hpp"

LP_TARGET("avx2,fma,f16c")

#include "products.hpp"
#include "unpack.hpp"
#include "vector32.hpp"

namespace lp::kernels {
namespace {

inline __m256i load(const void *address) { return Vector32::load(address); }

inline __m256i broadcast(const void *address) {
    int32_t bits;
    memcpy(&bits, address, 4);
    return _mm256_set1_epi32(bits);
}

inline __m256 halves(const uint16_t *values) { return _mm256_cvtph_ps(load128(values)); }

// Adds 16-bit products. The empty assembly keeps the order: GCC would reassociate the sums of a block and, with no
// registers left for the products, spill each of them.
inline void add(__m256i &part, __m256i products) {
    part = _mm256_add_epi16(part, products);
    __asm__("" : "+x"(part));
}

// The scales of eight rows from r on.
template <typename Panel> inline __m256 row_scales(const Panel *panel, int r) { return halves(panel->d + r); }

template <> inline __m256 row_scales(const PanelMXFP4 *panel, int r) {
    // Half of 2^(e - 127), which is a denormal for e below 2.
    const __m256i e     = _mm256_cvtepu8_epi32(load64(panel->e + r));
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

inline void add_float(float *y, __m256i sum, __m256 scale) {
    _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, _mm256_loadu_ps(y)));
}

// The scales of a block of 16 rows as 16 bits, each for both halves of a 32-bit lane.
struct Scales {
    __m256i of[2];
};

template <typename Panel> inline Scales scales(const Panel *panel, int b) {
    const __m128i s = load128(panel->scales[b]);
    return { { _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(s, s)), _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(s, s)) } };
}

// Of two interleaved sub-blocks.
inline Scales scales_of_pairs(const int8_t (*pairs)[16][2], int s) {
    const __m256i lanes  = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    const __m256i choose = _mm256_add_epi8(lanes, _mm256_set1_epi32(s % 2 ? 0x03020302 : 0x01000100));
    const __m256i s0     = _mm256_cvtepi8_epi16(load128(pairs[s / 2][0]));
    const __m256i s1     = _mm256_cvtepi8_epi16(load128(pairs[s / 2][8]));
    return { { _mm256_shuffle_epi8(s0, choose), _mm256_shuffle_epi8(s1, choose) } };
}

template <> inline Scales scales(const PanelQ6_K *panel, int s) { return scales_of_pairs(panel->scales, s); }
template <> inline Scales scales(const Expanded *w, int s) { return scales_of_pairs(w->scales, s); }

// Sums in 16 bits over the lines [at, at + n) of weights, n known when compiled.
template <int M, int n, typename Row>
inline void sum_lines(const Lines &w, int at, const Row *const *x, int column, __m256i (&part)[M][2]) {
#pragma GCC unroll 8
    for (int g = 0; g < n; g++) {
        const __m256i w0 = load(w.q[at + g]), w1 = load(w.q[at + g] + 32);
        for (int j = 0; j < M; j++) {
            const __m256i a  = broadcast(x[j]->q + column + 4 * g);
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
}

// How many of the lines that have a scale in common can be added in 16 bits.
constexpr int lines_in_16_bits(int lines, int greatest) {
    return lines * 2 * greatest * 127 <= INT16_MAX ? lines : lines_in_16_bits(lines / 2, greatest);
}
template <typename Panel> constexpr int kLinesIn16Bits = lines_in_16_bits(kNumbers<Panel>.lines, kNumbers<Panel>.greatest);

// The integer sums of a super-block. `scaled` has the scales: the panel itself, or what it is expanded to.
template <int M, typename Panel, typename Scaled>
inline void sum_super_block(const Panel *, const Scaled *scaled, const Lines &w, const RowBlockK *const *x,
                            __m256i (&sum)[M][2]) {
    constexpr int in_block = kNumbers<Panel>.lines, in_part = kLinesIn16Bits<Panel>;
    for (int j = 0; j < M; j++) sum[j][0] = sum[j][1] = _mm256_setzero_si256();
    for (int b = 0; b < 64 / in_block; b++) {
        Scales scale = { { _mm256_set1_epi16(1), _mm256_set1_epi16(1) } };
        if constexpr (in_block < 64) scale = scales(scaled, b);
#pragma GCC unroll 2
        for (int at = in_block * b; at < in_block * (b + 1); at += in_part) {
            __m256i part[M][2];
            sum_lines<M, in_part>(w, at, x, 4 * at, part);
            for (int j = 0; j < M; j++)
                for (int p = 0; p < 2; p++) sum[j][p] = _mm256_add_epi32(sum[j][p], _mm256_madd_epi16(part[j][p], scale.of[p]));
        }
    }
}

// sum[j] += pairs of 16-bit values of each row times pairs of sums of activations.
template <int M> inline void add_pairs(__m256i v0, __m256i v1, const int16_t *const (&sums)[M], int i, __m256i (&sum)[M][2]) {
    for (int j = 0; j < M; j++) {
        const __m256i pair = broadcast(sums[j] + 2 * i);
        sum[j][0]          = _mm256_add_epi32(sum[j][0], _mm256_madd_epi16(v0, pair));
        sum[j][1]          = _mm256_add_epi32(sum[j][1], _mm256_madd_epi16(v1, pair));
    }
}

inline __m256i widened(const int8_t *v) { return _mm256_cvtepi8_epi16(load128(v)); }
inline __m256i widened(const uint8_t *v) { return _mm256_cvtepu8_epi16(load128(v)); }

// sum[j] = numbers of n adjacent sub-blocks of columns, in pairs, times the sums of activations.
template <int n, int M, typename T> inline void sum_sums(const T (*numbers)[16][2], const RowBlockK *const *x,
                                                         __m256i (&sum)[M][2]) {
    const int16_t *sums[M];
    for (int j = 0; j < M; j++) {
        sum[j][0] = sum[j][1] = _mm256_setzero_si256();
        sums[j]               = n == 16 ? x[j]->sums16 : x[j]->sums32;
    }
    for (int i = 0; i < n / 2; i++) add_pairs<M>(widened(numbers[i][0]), widened(numbers[i][8]), sums, i, sum);
}

template <int M, typename Panel>
inline void accumulate_with_minima(const Panel *panel, const Lines &w, const RowBlockK *const *x, float *const *y) {
    __m256i sum[M][2], minima[M][2];
    sum_super_block<M>(panel, panel, w, x, sum);
    sum_sums<8>(panel->mins, x, minima);
    for (int p = 0; p < 2; p++) {
        const __m256 d = halves(panel->d + 8 * p), dmin = halves(panel->dmin + 8 * p);
        for (int j = 0; j < M; j++) {
            const __m256 dx = _mm256_set1_ps(x[j]->d);
            add_float(y[j] + 8 * p, sum[j][p], _mm256_mul_ps(d, dx));
            add_float(y[j] + 8 * p, minima[j][p], _mm256_mul_ps(dmin, _mm256_sub_ps(_mm256_setzero_ps(), dx)));
        }
    }
}

// The integer sums of a block of 32 signed columns.
template <int M, typename Row>
inline void sum_signed(const uint8_t (*line)[64], const Row *const *x, int column, __m256i (&sum)[M][2]) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        const __m256i w0 = load(line[g]), w1 = load(line[g] + 32);
        const __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
        for (int j = 0; j < M; j++) {
            const __m256i a  = broadcast(x[j]->q + column + 4 * g);
            const __m256i p0 = _mm256_madd_epi16(_mm256_maddubs_epi16(size0, _mm256_sign_epi8(a, w0)), ones);
            const __m256i p1 = _mm256_madd_epi16(_mm256_maddubs_epi16(size1, _mm256_sign_epi8(a, w1)), ones);
            sum[j][0]        = g == 0 ? p0 : _mm256_add_epi32(sum[j][0], p0);
            sum[j][1]        = g == 0 ? p1 : _mm256_add_epi32(sum[j][1], p1);
            __asm__("" : "+x"(sum[j][0]), "+x"(sum[j][1]));  // as in `add`
        }
    }
}

inline const uint8_t (*lines(const PanelQ8_0 *panel, const Direct &, int b))[64] {
    return reinterpret_cast<const uint8_t (*)[64]>(panel[b].q);
}

template <typename Panel> inline const uint8_t (*lines(const Panel *, const Lines &w, int b))[64] { return w.q + 8 * b; }

template <int M, typename Panel, typename Weights>
inline void accumulate_signed(const Panel *panel, const Weights &w, int n, const RowBlock32 *const *x, float *const *y) {
    const RowBlock32 *block[M];
    for (int j = 0; j < M; j++) block[j] = x[j];
    for (int b = 0; b < n; b++) {
        __m256i sum[M][2];
        sum_signed<M>(lines(panel, w, b), block, 0, sum);
        for (int p = 0; p < 2; p++) {
            const __m256 d = halves(panel[b].d + 8 * p);
            for (int j = 0; j < M; j++) add_float(y[j] + 8 * p, sum[j][p], _mm256_mul_ps(d, _mm256_set1_ps(block[j]->d)));
        }
        for (int j = 0; j < M; j++) block[j]++;
    }
}

struct Avx2 {
    static constexpr const char *kName = "avx2";

    static constexpr Tile kTile = { 4, 1 }, kSuperTile = kTile, kLowTile = kTile;  // whose sums fit the registers
    // None: code for both kinds of lines was measured to make tiles of four rows slower.
    static constexpr Tile kDirectTile     = { 0, 1 };
    static constexpr int  kMostDirectRows = 0;

    template <typename Panel, typename Weights> static void unpack(const Panel *panel, int n, Weights &out) {
        kernels::unpack<Vector32>(panel, n, out);
    }
    template <typename Panel> static void unpack(const Panel *, int, Direct &) {}

    template <int M, int Q, typename Panel, typename Weights, typename Row>
    static void accumulate(const Panel *const (&panel)[Q], const Weights *w, int n, const Row *const *x, float *const *y) {
        static_assert(Q == 1);
        accumulate<M>(panel[0], w[0], n, x, y);
    }

    template <int M, typename Panel>
    static void accumulate(const Panel *panel, const Lines &w, int, const RowBlockK *const *x, float *const *y) {
        accumulate_with_minima<M>(panel, w, x, y);
    }

    template <int M>
    static void accumulate(const PanelQ6_K *panel, const Lines &w, int, const RowBlockK *const *x, float *const *y) {
        __m256i sum[M][2], offset[M][2];
        sum_super_block<M>(panel, panel, w, x, sum);
        // Weights are 32 less than what was multiplied.
        sum_sums<16>(panel->scales, x, offset);
        for (int p = 0; p < 2; p++) {
            const __m256 d = halves(panel->d + 8 * p);
            for (int j = 0; j < M; j++) {
                const __m256i whole = _mm256_sub_epi32(sum[j][p], _mm256_slli_epi32(offset[j][p], 5));
                add_float(y[j] + 8 * p, whole, _mm256_mul_ps(d, _mm256_set1_ps(x[j]->d)));
            }
        }
    }

    template <int M, typename Panel>
    static void accumulate(const Panel *panel, const Expanded &w, int, const RowBlockK *const *x, float *const *y) {
        constexpr Numbers low = kNumbers<Panel>;
        __m256i           sum[M][2], rest[M][2];
        sum_super_block<M>(panel, &w, w, x, sum);
        if constexpr (low.lines == 64)
            for (int j = 0; j < M; j++) rest[j][0] = rest[j][1] = _mm256_set1_epi32(sum_of(x[j]));
        else if constexpr (low.has_mins)
            sum_sums<64 / low.lines>(w.mins, x, rest);
        else
            sum_sums<64 / low.lines>(w.scales, x, rest);
        for (int p = 0; p < 2; p++) {
            const __m256 d = _mm256_loadu_ps(w.d + 8 * p);
            for (int j = 0; j < M; j++) {
                const __m256 dx = _mm256_set1_ps(x[j]->d);
                if constexpr (low.has_mins && low.factor == 1) {
                    const __m256 dmin = _mm256_loadu_ps(w.dmin + 8 * p);
                    add_float(y[j] + 8 * p, sum[j][p], _mm256_mul_ps(d, dx));
                    add_float(y[j] + 8 * p, rest[j][p], _mm256_mul_ps(dmin, _mm256_sub_ps(_mm256_setzero_ps(), dx)));
                } else {
                    const __m256i whole = _mm256_mullo_epi32(sum[j][p], _mm256_set1_epi32(low.factor));
                    const __m256i less  = _mm256_mullo_epi32(rest[j][p], _mm256_set1_epi32(low.has_mins ? 1 : low.offset));
                    add_float(y[j] + 8 * p, _mm256_sub_epi32(whole, less), _mm256_mul_ps(d, dx));
                }
            }
        }
    }

    template <int M>
    static void accumulate(const PanelIQ4_XS *panel, const Lines &w, int, const RowBlockK *const *x, float *const *y) {
        __m256i sum[M][2];
        for (int j = 0; j < M; j++) sum[j][0] = sum[j][1] = _mm256_setzero_si256();
        for (int b = 0; b < 8; b++) {
            __m256i part[M][2];
            sum_signed<M>(w.q + 8 * b, x, 32 * b, part);
            for (int p = 0; p < 2; p++) {
                const __m256i scale = _mm256_cvtepi8_epi32(load64(panel->scales[b] + 8 * p));
                for (int j = 0; j < M; j++) sum[j][p] = _mm256_add_epi32(sum[j][p], _mm256_mullo_epi32(part[j][p], scale));
            }
        }
        for (int p = 0; p < 2; p++) {
            const __m256 d = halves(panel->d + 8 * p);
            for (int j = 0; j < M; j++) add_float(y[j] + 8 * p, sum[j][p], _mm256_mul_ps(d, _mm256_set1_ps(x[j]->d)));
        }
    }

    template <int M>
    static void accumulate(const PanelNVFP4 *, const LinesNVFP4 &w, int n, const RowBlock32 *const *x, float *const *y) {
        const __m256i     ones = _mm256_set1_epi16(1);
        const RowBlock32 *block[M];
        for (int j = 0; j < M; j++) block[j] = x[j];
        for (int b = 0; b < n; b++) {
            for (int h = 0; h < 2; h++) {
                __m256i part[M][2];
                sum_lines<M, 4>(w, 8 * b + 4 * h, block, 16 * h, part);
                for (int p = 0; p < 2; p++) {
                    const __m256 d = _mm256_loadu_ps(w.d[b][h] + 8 * p);
                    for (int j = 0; j < M; j++) {
                        const __m256i offset = _mm256_set1_epi32(kNumbers<PanelNVFP4>.offset * block[j]->sums16[h]);
                        const __m256i whole  = _mm256_sub_epi32(_mm256_madd_epi16(part[j][p], ones), offset);
                        add_float(y[j] + 8 * p, whole, _mm256_mul_ps(d, _mm256_set1_ps(block[j]->d)));
                    }
                }
            }
            for (int j = 0; j < M; j++) block[j]++;
        }
    }

    template <int M, typename Panel>
    static void accumulate(const Panel *panel, const Lines &w, int n, const RowBlock32 *const *x, float *const *y) {
        if constexpr (kNumbers<Panel>.is_signed) {
            accumulate_signed<M>(panel, w, n, x, y);
            return;
        } else {
            const __m256i     ones    = _mm256_set1_epi16(1);
            constexpr int     in_part = kLinesIn16Bits<Panel>;
            const RowBlock32 *block[M];
            for (int j = 0; j < M; j++) block[j] = x[j];
            for (int b = 0; b < n * kBlocks<Panel>; b++, panel += b % kBlocks<Panel> == 0) {
                __m256i sum[M][2];
#pragma GCC unroll 2
                for (int at = 0; at < 8; at += in_part) {
                    __m256i part[M][2];
                    sum_lines<M, in_part>(w, 8 * b + at, block, 4 * at, part);
                    for (int j = 0; j < M; j++)
                        for (int p = 0; p < 2; p++) {
                            const __m256i wide = _mm256_madd_epi16(part[j][p], ones);
                            sum[j][p]          = at == 0 ? wide : _mm256_add_epi32(sum[j][p], wide);
                        }
                }
                for (int p = 0; p < 2; p++) {
                    const __m256 d = row_scales(panel, 8 * p);
                    for (int j = 0; j < M; j++) {
                        __m256i whole = sum[j][p];
                        if constexpr (!kNumbers<Panel>.has_mins)
                            whole = _mm256_sub_epi32(whole, _mm256_set1_epi32(kNumbers<Panel>.offset * block[j]->sum()));
                        add_float(y[j] + 8 * p, whole, _mm256_mul_ps(d, _mm256_set1_ps(block[j]->d)));
                        if constexpr (kNumbers<Panel>.has_mins) {
                            const __m256 m = halves(panel->m + 8 * p), s = _mm256_set1_ps(block[j]->d_sum);
                            _mm256_storeu_ps(y[j] + 8 * p, _mm256_fmadd_ps(m, s, _mm256_loadu_ps(y[j] + 8 * p)));
                        }
                    }
                }
                for (int j = 0; j < M; j++) block[j]++;
            }
        }
    }

    template <int M>
    static void accumulate(const PanelQ8_0 *panel, const Direct &w, int n, const RowBlock32 *const *x, float *const *y) {
        accumulate_signed<M>(panel, w, n, x, y);
    }
};

}  // namespace

extern const Kernel *const kAvx2 = kKernels<Avx2>;

}  // namespace lp::kernels
LP_TARGET_END
#endif

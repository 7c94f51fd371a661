// The form of packed weights and of quantized activations. Open it to see what a kernel reads, or to add a
// type: its panel, and its row of PANELS.
//
// A panel has 16 rows of weights. A line is 64 bytes: for each row in turn, the bytes of four adjacent columns. So a vector
// of 32 or 64 bytes times four broadcast activations gives one 32-bit lane a row, and no sums across lanes are needed.
// Scales and minima are stored row by row beside them, as the file has them; only the 6-bit ones are widened to bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels.hpp"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"

namespace lp::kernels {

// 16 rows x 256 columns. Line g of block b: low nibbles are columns 32 b + 4 g .. + 3, high nibbles 32 b + 16 + 4 g .. + 3.
struct PanelQ4_K {
    uint8_t  q[8][4][64];
    uint8_t  scales[8][16];
    uint8_t  mins[4][16][2];  // of blocks 2 i and 2 i + 1
    uint16_t d[16], dmin[16];
};

// As PanelQ4_K; bit g of a byte of `high` is the fifth bit of the columns 32 b + 4 g .. + 3.
struct PanelQ5_K {
    struct {
        uint8_t low[4][64], high[64];
    } q[8];
    uint8_t  scales[8][16];
    uint8_t  mins[4][16][2];
    uint16_t d[16], dmin[16];
};

// Sub-blocks of 16 columns. Line h of sub-block s: low nibbles are columns 16 s + 8 h .. + 3, high nibbles the next four;
// bits 2 g and 2 g + 1 of a byte of `high` belong to the columns 16 s + 4 g .. + 3.
struct PanelQ6_K {
    struct {
        uint8_t low[2][64], high[64];
    } q[16];
    int8_t   scales[8][16][2];  // of sub-blocks 2 i and 2 i + 1
    uint16_t d[16];
};

// Line g: low nibbles are the columns 4 g .. 4 g + 3, high nibbles 16 + 4 g .. 16 + 4 g + 3.
struct PanelQ4_0 {
    uint8_t  q[4][64];
    uint16_t d[16];
};

struct PanelQ4_1 {
    uint8_t  q[4][64];
    uint16_t d[16], m[16];
};

// Bit g of a byte of `high` is the fifth bit of the columns 4 g .. 4 g + 3.
struct PanelQ5_0 {
    uint8_t  q[4][64];
    uint8_t  high[64];
    uint16_t d[16];
};

struct PanelQ5_1 {
    uint8_t  q[4][64];
    uint8_t  high[64];
    uint16_t d[16], m[16];
};

struct PanelQ8_0 {
    int8_t   q[8][64];
    uint16_t d[16];
};

struct PanelIQ4_NL {
    uint8_t  q[4][64];
    uint16_t d[16];
};

struct PanelMXFP4 {
    uint8_t q[4][64];
    uint8_t e[16];  // exponents
};

// 256 columns in blocks as of PanelIQ4_NL, with an integer scale each.
struct PanelIQ4_XS {
    uint8_t  q[8][4][64];
    int8_t   scales[8][16];
    uint16_t d[16];
};

// 128 columns. Bit g of a byte of q[b] is that of the columns 32 b + 4 g .. + 3.
struct PanelQ1_0 {
    uint8_t  q[4][64];
    uint16_t d[16];
};

// 64 columns. Bits 2 g and 2 g + 1 of a byte of q[b][h] belong to the columns 32 b + 16 h + 4 g .. + 3.
struct PanelQ2_0 {
    uint8_t  q[2][2][64];
    uint16_t d[16];
};

// Half of a block of the file.
struct PanelNVFP4 {
    uint8_t q[4][64];
    uint8_t scales[2][16];  // of 16 columns each: 4 bits of exponent, 3 of fraction
};

// Types of at most 3 bits. What a panel has is expanded to bytes and scales, `Expanded`, before rows are multiplied with it.
// Bits 2 g and 2 g + 1 of a byte of `low` belong to the columns 16 s + 4 g .. + 3 of sub-block s, bit g of a byte of `high`
// to the columns 32 b + 4 g .. + 3 of block b.
struct PanelQ3_K {
    uint8_t  low[16][64];
    uint8_t  high[8][64];
    int8_t   scales[8][16][2];  // of sub-blocks 2 i and 2 i + 1
    uint16_t d[16];
};

struct PanelQ2_K {
    uint8_t  low[16][64];
    uint8_t  scales[8][16][2];  // the lower nibble; the higher one is the minimum
    uint16_t d[16], dmin[16];
};

struct PanelTQ2_0 {
    uint8_t  low[16][64];
    uint16_t d[16];
};

// Byte n of `q` has the lines 5 n .. 5 n + 4 as digits of base 3: a fraction of 256 whose first digit is that of the first line.
struct PanelTQ1_0 {
    uint8_t  q[13][64];
    uint16_t d[16];
};

// Grids: index[g][r] is the place in the type's table of the columns that row r has in line g, or, for tables of eight columns,
// in lines 2 g and 2 g + 1. Further bits of an index: bit l of nine[j][e][r] for g = 16 j + 2 l + e, bits 2 l and 2 l + 1 of
// ten[j][e][r] for g = 8 j + 2 l + e. A bit of `signs` is that of a byte of the line. Scales of two adjacent blocks are nibbles
// of a byte.
struct PanelIQ3_XXS {
    uint8_t  index[64][16];
    uint8_t  signs[64][8];
    uint8_t  scales[4][16];
    uint16_t d[16];
};

struct PanelIQ3_S {
    uint8_t  index[64][16], nine[4][2][16];
    uint8_t  signs[64][8];
    uint8_t  scales[4][16];
    uint16_t d[16];
};

struct PanelIQ2_XXS {
    uint8_t  index[32][16];
    uint8_t  signs[64][8];
    uint8_t  scales[4][16];
    uint16_t d[16];
};

struct PanelIQ2_XS {
    uint8_t  index[32][16], nine[2][2][16];
    uint8_t  signs[64][8];
    uint8_t  scales[8][16];  // of blocks of 16 columns
    uint16_t d[16];
};

struct PanelIQ2_S {
    uint8_t  index[32][16], ten[4][2][16];
    uint8_t  signs[64][8];
    uint8_t  scales[8][16];
    uint16_t d[16];
};

// `nine` has the eleventh bit.
struct PanelIQ1_S {
    uint8_t  index[32][16], ten[4][2][16], nine[2][2][16];
    uint8_t  scales[4][16];  // three bits; the fourth is set if what is added to the grid is negative
    uint16_t d[16];
};

struct PanelIQ1_M {
    uint8_t  index[32][16], ten[4][2][16], nine[2][2][16];
    uint8_t  negative[2][2][16];  // as `nine`: what is added to the grid
    uint8_t  scales[8][16];
    uint16_t d[16];
};

// ggml's tables of grids, of four or eight columns: the bytes that are multiplied, and 16 bits, of which processors with long
// vectors look up many at once. Entries of four columns have a nibble for each, a place in the list of the type's
// magnitudes; those of eight have columns c and 4 + c in a nibble, two bits each. The order of nibbles is 0, 2, 1, 3. pack.cpp.
template <typename Bytes, int n> struct Grid {
    Bytes    bytes[n];
    uint16_t places[n];
};

struct Grids {
    Grid<uint32_t, 256>  iq3_xxs;
    Grid<uint32_t, 512>  iq3_s;
    Grid<uint64_t, 256>  iq2_xxs;
    Grid<uint64_t, 512>  iq2_xs;
    Grid<uint64_t, 1024> iq2_s;
    Grid<uint64_t, 2048> iq1;
};
extern const Grids kGrids;

// What the places in a grid stand for, plus the offset; of eight columns first the lower two bits of a nibble.
alignas(16) constexpr int8_t kIQ3_XXS[16] = { 66, 74, 82, 90, 98, 106, 114, 124 };
alignas(16) constexpr int8_t kIQ3_S[16]   = { 16, 18, 20, 22, 24, 26, 28, 30 };
alignas(16) constexpr int8_t kIQ2[2][16]  = { { 51, 68, 86, 0, 51, 68, 86, 0, 51, 68, 86, 0 },
                                              { 51, 51, 51, 51, 68, 68, 68, 68, 86, 86, 86, 86 } };
alignas(16) constexpr int8_t kIQ1[2][16]  = { { 0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 2, 0 }, { 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2 } };

// A quantized row of activations for K-quants: ggml's block_q8_K, and sums as the products need them.
struct RowBlockK {
    int8_t  q[QK_K];
    float   d;
    int16_t sums16[QK_K / 16];
    int16_t sums32[QK_K / 32];
};

inline int sum_of(const RowBlockK *x) {
    int sum = 0;
    for (const int16_t one : x->sums32) sum += one;
    return sum;
}

// The same for types with blocks of 32 columns: ggml's block_q8_0 and block_q8_1, their floats rounded to float16 as there.
struct RowBlock32 {
    int8_t  q[32];
    float   d;
    int16_t sums16[2];
    float   d_sum;

    int sum() const { return sums16[0] + sums16[1]; }
};

// What the bytes of a type's lines are, how they are scaled, and what is subtracted.
struct Numbers {
    int  lines;              // that have a scale in common; 64: there are none
    int  greatest;           // byte: AVX2 adds as many products in 16 bits as fit
    int  offset    = 0;      // what is subtracted from a byte
    bool has_mins  = false;  // a minimum is added or subtracted instead
    bool is_signed = false;
    int  factor    = 1;  // of the bytes, but not of the minima
};
constexpr Numbers less(int lines, int greatest, int offset) { return { lines, greatest, offset }; }
constexpr Numbers with_mins(int lines, int greatest, int factor = 1) { return { lines, greatest, 0, true, false, factor }; }
constexpr Numbers with_signs(int lines) { return { lines, 128, 0, false, true }; }

// The types of weights, a row each: ggml's name, which is that of the panel, the file's block and its columns, how a panel is
// unpacked (unpack.hpp), its numbers. All else follows from the rows: kernels of each level, packing, tests, benchmarks.
#define PANELS(ROW)                                                \
    ROW(Q4_K, block_q4_K, QK_K, Lines, with_mins(8, 15))           \
    ROW(Q5_K, block_q5_K, QK_K, Lines, with_mins(8, 31))           \
    ROW(Q6_K, block_q6_K, QK_K, Lines, less(4, 63, 32))            \
    ROW(Q8_0, block_q8_0, 32, Direct, with_signs(8))               \
    ROW(Q5_0, block_q5_0, 32, Lines, less(8, 31, 16))              \
    ROW(Q5_1, block_q5_1, 32, Lines, with_mins(8, 31))             \
    ROW(Q4_0, block_q4_0, 32, Lines, less(8, 15, 8))               \
    ROW(Q4_1, block_q4_1, 32, Lines, with_mins(8, 15))             \
    ROW(IQ4_NL, block_iq4_nl, 32, Lines, with_signs(8))            \
    ROW(MXFP4, block_mxfp4, 32, Lines, less(8, 24, 12))            \
    ROW(Q1_0, block_q1_0, QK1_0, Lines, less(8, 2, 1))             \
    ROW(Q2_0, block_q2_0, QK2_0, Lines, less(8, 3, 1))             \
    ROW(NVFP4, block_nvfp4, QK_NVFP4, LinesNVFP4, less(4, 24, 12)) \
    ROW(IQ4_XS, block_iq4_xs, QK_K, Lines, with_signs(8))          \
    ROW(Q3_K, block_q3_K, QK_K, Expanded, less(4, 7, 4))           \
    ROW(Q2_K, block_q2_K, QK_K, Expanded, with_mins(4, 3))         \
    ROW(IQ3_XXS, block_iq3_xxs, QK_K, Expanded, less(8, 124, 62))  \
    ROW(IQ3_S, block_iq3_s, QK_K, Expanded, less(8, 30, 15))       \
    ROW(IQ2_XXS, block_iq2_xxs, QK_K, Expanded, less(8, 86, 43))   \
    ROW(IQ2_XS, block_iq2_xs, QK_K, Expanded, less(4, 86, 43))     \
    ROW(IQ2_S, block_iq2_s, QK_K, Expanded, less(4, 86, 43))       \
    ROW(IQ1_S, block_iq1_s, QK_K, Expanded, with_mins(8, 2, 8))    \
    ROW(IQ1_M, block_iq1_m, QK_K, Expanded, less(4, 18, 9))        \
    ROW(TQ1_0, block_tq1_0, QK_K, Expanded, less(64, 2, 1))        \
    ROW(TQ2_0, block_tq2_0, QK_K, Expanded, less(64, 3, 1))

// What a row says of a panel. Activations have blocks of 256 columns if the weights have, else of 32. A panel has a block's
// columns; those of NVFP4 are its halves.
template <typename Panel> struct PanelType;
template <typename Panel> constexpr bool kIsHalf = std::is_same_v<Panel, PanelNVFP4>;
#define PANEL_TYPE(name, block, n, weights, numbers)                                                                      \
    template <> struct PanelType<Panel##name> {                                                                           \
        using Block                              = block;                                                                 \
        using RowBlock                           = std::conditional_t<n == QK_K, RowBlockK, RowBlock32>;                  \
        static constexpr ggml_type kType         = GGML_TYPE_##name;                                                      \
        static constexpr int       kBlockColumns = n, kColumns = kIsHalf<Panel##name> ? n / 2 : n, kParts = n / kColumns; \
        static constexpr Numbers   kNumbers = numbers;                                                                    \
    };
PANELS(PANEL_TYPE)
#undef PANEL_TYPE

template <typename Panel> constexpr Numbers kNumbers = PanelType<Panel>::kNumbers;

// Packing, in plain C++ (pack.cpp), and quantizing with AVX2 (quantize.cpp).
template <typename Panel> void   pack(const void *rows, size_t stride, int64_t n_columns, void *panel);
template <typename Panel> size_t panel_bytes(int64_t n_columns);
void                             quantize_k(const float *row, int64_t n_columns, int64_t first, int64_t last, void *quantized);
void                             quantize_32(const float *row, int64_t n_columns, int64_t first, int64_t last, void *quantized);
size_t                           row_bytes_k(int64_t n_columns);
size_t                           row_bytes_32(int64_t n_columns);

}  // namespace lp::kernels

// Vector helpers of the files for AVX2. Include it after the level's target pragma.
#pragma once

#include <immintrin.h>

#include "x86.hpp"

namespace llamapipe::kernels {
namespace {

constexpr int kTile = 4;         // rows of activations whose sums fit the registers
constexpr int kRowsAtOnce = 64;  // rows that meet an unpacked part of a panel; their sums stay in the cache

inline __m256i load(const void *address) { return _mm256_loadu_si256((const __m256i *)address); }

inline void store(void *address, __m256i value) { _mm256_storeu_si256((__m256i *)address, value); }

inline __m256i broadcast(const void *address) {
    int32_t bits;
    memcpy(&bits, address, 4);
    return _mm256_set1_epi32(bits);
}

inline __m256 halves(const uint16_t *values) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)values)); }

// Adds 16-bit products. The empty assembly keeps the order: GCC would reassociate the sums of a block and, with no
// registers left for the products, spill each of them.
inline void add(__m256i &part, __m256i products) {
    part = _mm256_add_epi16(part, products);
    __asm__("" : "+x"(part));
}

// y[j][0 .. 15] for M rows: adds their products with one unpacked part of a panel.
template <int M, class Form>
__attribute__((noinline)) void tile(const typename Form::Panel *panel, const typename Form::Unpacked &w, int64_t part,
                                    int n, const void *const *rows, float *const *y, int64_t at) {
    const typename Form::Row *x[M];
    float *out[M];
    for (int j = 0; j < M; j++) {
        x[j] = (const typename Form::Row *)rows[j] + part;
        out[j] = y[j] + at;
    }
    Form::template accumulate<M>(panel, w, n, x, out);
}

// Panel by panel, Form::kAtOnce blocks at a time: unpacks them, then multiplies them with all rows.
template <class Form>
void multiply(const void *panels, int64_t n_panels, int64_t n_columns, const void *const *rows, int64_t n_rows,
              float *const *y) {
    const int64_t n_blocks = n_columns / Form::kColumns;
    for (int64_t first = 0; first < n_rows; first += kRowsAtOnce) {
        const int64_t last = first + kRowsAtOnce < n_rows ? first + kRowsAtOnce : n_rows;
        const typename Form::Panel *panel = (const typename Form::Panel *)panels;
        for (int64_t p = 0; p < n_panels; p++) {
            const int64_t at = kPanelRows * p;
            for (int64_t j = first; j < last; j++) memset(y[j] + at, 0, kPanelRows * sizeof(float));
            for (int64_t i = 0; i < n_blocks; i += Form::kAtOnce) {
                const int n = n_blocks - i < Form::kAtOnce ? (int)(n_blocks - i) : Form::kAtOnce;
                typename Form::Unpacked w;
                unpack(panel, n, w);
                int64_t j = first;
                for (; j + kTile <= last; j += kTile)
                    tile<kTile, Form>(panel, w, i, n, rows + j, y + j, at);
                switch (last - j) {
                    case 3: tile<3, Form>(panel, w, i, n, rows + j, y + j, at); break;
                    case 2: tile<2, Form>(panel, w, i, n, rows + j, y + j, at); break;
                    case 1: tile<1, Form>(panel, w, i, n, rows + j, y + j, at); break;
                }
                panel += n;
            }
        }
    }
}

}  // namespace
}  // namespace llamapipe::kernels

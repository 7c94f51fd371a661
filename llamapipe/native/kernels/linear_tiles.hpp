// The loops of states and convolutions over vectors of any width. Include it after the level's target pragma, AVX2 or above.
//
// A sum over columns has a chain for each of sixteen columns, in one vector or two, so all levels give the same bits.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "floats8.hpp"
#include "linear.hpp"

namespace lp::kernels {
namespace {

enum Rule { kDeltaNet, kScan, kWkv7 };

// Partial sums of sixteen rows.
struct alignas(64) PartialSums {
    float of[kStateRows][16];
};

// The products of rows and a vector, as partial sums.
template <typename V, int R> inline void multiply_rows(const float *rows, int64_t n_columns, const float *by, float (*sums)[16]) {
    constexpr int      P = 16 / V::kLanes;
    typename V::Floats sum[R][P];
    UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int p = 0; p < P; p++) sum[r][p] = V::all(0);
    for (int64_t i = 0; i < n_columns; i += 16) {
        UNROLLED for (int p = 0; p < P; p++) {
            const int64_t at                               = i + p * V::kLanes;
            const auto    x                                = V::load(by + at);
            UNROLLED for (int r = 0; r < R; r++) sum[r][p] = V::add_product(V::load(rows + r * n_columns + at), x, sum[r][p]);
        }
    }
    UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int p = 0; p < P; p++) V::store(sum[r][p], sums[r] + p * V::kLanes);
}

// What a token does to R rows.
struct Change {
    const float *k, *q, *next;  // next: what the changed rows are multiplied with for the next token, or null
    float        decay;
    const float *decay_row, *b;
};

template <typename V, Rule rule, bool has_next, int R>
inline void change_rows(const float *from, float *to, int64_t n_columns, const Change &by, const float *factors,
                        const float *products, float (*y)[16], float (*next)[16]) {
    constexpr int      P = 16 / V::kLanes;
    typename V::Floats y_sum[R][P], next_sum[R][P];
    UNROLLED for (int r = 0; r < R; r++) { UNROLLED for (int p = 0; p < P; p++) y_sum[r][p] = next_sum[r][p] = V::all(0); }
    // Loaded once: what is stored in between might be the same memory for all that the compiler knows.
    const auto         decay = V::all(by.decay);
    typename V::Floats factor[R], product[R];
    UNROLLED for (int r = 0; r < R; r++) {
        factor[r] = V::all(factors[r]);
        if constexpr (rule == kWkv7) product[r] = V::all(products[r]);
    }
    for (int64_t i = 0; i < n_columns; i += 16) {
        UNROLLED for (int p = 0; p < P; p++) {
            const int64_t at = i + p * V::kLanes;
            const auto    k = V::load(by.k + at), q = V::load(by.q + at);
            const auto    next_by = has_next ? V::load(by.next + at) : q, b = rule == kWkv7 ? V::load(by.b + at) : q;
            const auto    kept = rule == kWkv7 ? V::load(by.decay_row + at) : decay;
            UNROLLED for (int r = 0; r < R; r++) {
                auto row = V::add_product(factor[r], k, V::multiply(V::load(from + r * n_columns + at), kept));
                if constexpr (rule == kWkv7) row = V::add_product(product[r], b, row);
                V::store(row, to + r * n_columns + at);
                y_sum[r][p] = V::add_product(row, q, y_sum[r][p]);
                if constexpr (has_next) next_sum[r][p] = V::add_product(row, next_by, next_sum[r][p]);
            }
        }
    }
    UNROLLED for (int r = 0; r < R; r++) {
        UNROLLED for (int p = 0; p < P; p++) {
            V::store(y_sum[r][p], y[r] + p * V::kLanes);
            if constexpr (has_next) V::store(next_sum[r][p], next[r] + p * V::kLanes);
        }
    }
}

inline void fetch(const float *from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(from + i);
}

template <typename V, Rule rule> struct States {
    static constexpr bool kHasProducts = rule != kScan;
    static constexpr int  R            = V::kLanes == 16 ? 4 : 2;  // rows whose sums fit the registers

    static const float *multiplied_with(const StateRows &s, int64_t token) { return rule == kWkv7 ? s.a[token] : s.k[token]; }

    static void compute(const StateRows &s) {
        alignas(64) float products[kMostStateRows];  // of rows before the next token
        if (kHasProducts) {
            PartialSums sums;
            for (int64_t row = 0; row < s.n_rows; row += kStateRows) {
                for (int r = 0; r < kStateRows; r += R) {
                    const float *rows = s.before + (row + r) * s.n_columns;
                    multiply_rows<V, R>(rows, s.n_columns, multiplied_with(s, 0), sums.of + r);
                }
                V::add_up(sums.of, products + row);
            }
        }
        const float *from = s.before;
        for (int64_t t = 0; t < s.n_tokens; t++) {
            const bool has_next = t + 1 < s.n_tokens;
            if (has_next) fetch_inputs(s, t + 1);
            for (int64_t row = 0; row < s.n_rows; row += kStateRows) {
                if (kHasProducts && has_next) {
                    change<true>(s, t, row, from, products + row);
                } else {
                    change<false>(s, t, row, from, products + row);
                }
            }
            from = s.after[t];
        }
    }

    static void fetch_inputs(const StateRows &s, int64_t token) {
        fetch(s.k[token], s.n_columns);
        fetch(s.q[token], s.n_columns);
        fetch(s.v[token], s.n_rows);
        if (rule == kWkv7) {
            fetch(s.decay_row[token], s.n_columns);
            fetch(s.a[token], s.n_columns);
            fetch(s.b[token], s.n_columns);
        }
    }

    // Sixteen rows, from `row` on; makes their products with the next token's vector of those with this token's.
    template <bool has_next>
    static void change(const StateRows &s, int64_t t, int64_t row, const float *from, float *products) {
        alignas(64) float factors[kStateRows];
        const Change      by = { s.k[t],
                                 s.q[t],
                                 has_next ? multiplied_with(s, t + 1) : nullptr,
                                 rule == kWkv7 ? 0 : s.decays[t],
                                 rule == kWkv7 ? s.decay_row[t] : nullptr,
                                 rule == kWkv7 ? s.b[t] : nullptr };
        UNROLLED for (int r = 0; r < kStateRows; r += V::kLanes) {
            auto v = V::load(s.v[t] + row + r);
            if constexpr (rule == kDeltaNet) v = V::subtract_product(V::all(by.decay), V::load(products + r), v);
            V::store(rule == kWkv7 ? v : V::multiply(v, V::all(s.factors[t])), factors + r);
        }
        PartialSums y, next;
        for (int r = 0; r < kStateRows; r += R) {
            const int64_t at = (row + r) * s.n_columns;
            change_rows<V, rule, has_next, R>(from + at, s.after[t] + at, s.n_columns, by, factors + r, products + r, y.of + r,
                                              next.of + r);
        }
        alignas(64) float sums[kStateRows];
        V::add_up(y.of, sums);
        UNROLLED for (int r = 0; r < kStateRows; r += V::kLanes) {
            V::store(V::multiply(V::load(sums + r), V::all(s.scale)), s.y + t * s.y_stride + row + r);
        }
        if constexpr (has_next) V::add_up(next.of, products);
    }
};

inline float convolve_at(const float *x, const float *weights, int64_t width) {
    float sum = x[0] * weights[0];
    for (int64_t i = 1; i < width; i++) sum = __builtin_fmaf(x[i], weights[i], sum);
    return sum;
}

template <typename V> void convolve(const float *x, int64_t x_stride, const float *weights, int64_t width, int64_t n_channels,
                                    int64_t n_tokens, float *y, int64_t y_stride) {
    constexpr int L       = V::kLanes;
    const int64_t n_tiled = n_tokens < L ? 0 : n_channels / L * L;
    for (int64_t c = 0; c < n_tiled; c += L) {
        for (int64_t t = 0; t < n_tokens; t += L) {
            const int64_t      first = std::min(t, n_tokens - L);  // the last tile may overlap the one before
            typename V::Floats sums[L];
            UNROLLED for (int i = 0; i < L; i++) {
                const float *from = x + (c + i) * x_stride + first, *w = weights + (c + i) * width;
                sums[i] = V::multiply(V::load(from), V::all(w[0]));
                for (int64_t j = 1; j < width; j++) sums[i] = V::add_product(V::load(from + j), V::all(w[j]), sums[i]);
            }
            V::transpose(sums, y + first * y_stride + c, y_stride);
        }
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        for (int64_t c = n_tiled; c < n_channels; c++) {
            y[t * y_stride + c] = convolve_at(x + c * x_stride + t, weights + c * width, width);
        }
    }
}

template <typename V>
void transpose(const float *from, int64_t from_stride, int64_t n_channels, int64_t n_tokens, float *to, int64_t to_stride) {
    constexpr int L       = V::kLanes;
    const int64_t n_tiled = n_tokens < L ? 0 : n_channels / L * L;
    for (int64_t c = 0; c < n_tiled; c += L) {
        for (int64_t t = 0; t < n_tokens; t += L) {
            const int64_t      first = std::min(t, n_tokens - L);
            typename V::Floats rows[L];
            UNROLLED for (int i = 0; i < L; i++) rows[i] = V::load(from + (first + i) * from_stride + c);
            V::transpose(rows, to + c * to_stride + first, to_stride);
        }
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        for (int64_t c = n_tiled; c < n_channels; c++) to[c * to_stride + t] = from[t * from_stride + c];
    }
}

template <typename V> constexpr LinearLevel linear_level_of() {
    return { States<V, kDeltaNet>::compute, States<V, kScan>::compute, States<V, kWkv7>::compute, convolve<V>, transpose<V> };
}

}  // namespace
}  // namespace lp::kernels

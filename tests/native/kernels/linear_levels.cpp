// States and convolutions at each level of this processor, against the chains of additions that define a result, in plain C++:
// how many numbers of each level are equal; fails if one is not. Arrays end at pages that cannot be read. Built and run by
// test_levels.py.
#include "guarded.hpp"
#include "linear.hpp"
#include "target.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace lp::kernels {

extern const LinearLevel kLinearAvx2, kLinearAvx512;

namespace {

enum Rule { kDeltaNet, kScan, kWkv7 };

// Guarded floats, which are NaN or random.
class Floats : public Guarded<float> {
public:
    explicit Floats(int64_t n) : Guarded(n) { std::fill(begin(), end(), NAN); }
    Floats(int64_t n, std::mt19937 &random) : Guarded(n) {
        for (float &x : *this) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 1500;
    }
};

LP_TARGET("fma")  // else each addition would be a call

float product(const float *row, const float *by, int64_t n) {
    float sums[16] = {};
    for (int64_t i = 0; i < n; i++) sums[i % 16] = std::fmaf(row[i], by[i], sums[i % 16]);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

void plain(Rule rule, const StateRows &s, float *row, int64_t j) {
    const int64_t n = s.n_columns;
    for (int64_t t = 0; t < s.n_tokens; t++) {
        const float of = rule == kScan ? 0 : product(row, (rule == kWkv7 ? s.a : s.k)[t], n);
        const float v  = s.v[t][j];
        const float c  = rule == kWkv7 ? v : rule == kDeltaNet ? std::fmaf(-s.decays[t], of, v) * s.factors[t] : v * s.factors[t];
        for (int64_t i = 0; i < n; i++) {
            row[i] *= rule == kWkv7 ? s.decay_row[t][i] : s.decays[t];
            row[i] = std::fmaf(c, s.k[t][i], row[i]);
            if (rule == kWkv7) row[i] = std::fmaf(of, s.b[t][i], row[i]);
        }
        s.y[t * s.y_stride + j] = product(row, s.q[t], n) * s.scale;
        memcpy(s.after[t] + j * n, row, n * 4);
    }
}

LP_TARGET_END

bool same(const Floats &a, const Floats &b, long &n) {
    n += a.size();
    return memcmp(a + 0, b + 0, a.size() * 4) == 0;
}

// In place, or with the states after the last two tokens kept; in one call, or in two.
bool check(const LinearLevel &level, Rule rule, int64_t n_rows, int64_t n_columns, int64_t n_tokens, bool keeps, bool is_cut,
           std::mt19937 &random, long &n) {
    const auto    compute = rule == kDeltaNet ? level.delta_net : rule == kScan ? level.scan : level.wkv7;
    const int64_t stride = n_columns + random() % 9, y_stride = n_rows + random() % 9;
    const auto    series = [&] { return stride * (n_tokens - 1) + n_columns; };
    const Floats  k(series(), random), q(series(), random), w(series(), random), a(series(), random), b(series(), random);
    const Floats  v(stride * (n_tokens - 1) + n_rows, random), decays(n_tokens, random), factors(n_tokens, random);
    const Floats  before(n_rows * n_columns, random);
    const Floats  ours(n_rows * n_columns), ours_kept(n_rows * n_columns), y_ours(y_stride * (n_tokens - 1) + n_rows);
    const Floats  theirs(n_rows * n_columns), theirs_kept(n_rows * n_columns), y_theirs(y_stride * (n_tokens - 1) + n_rows);
    const auto    run = [&](const Floats &state, const Floats &kept, const Floats &y, auto &&f) {
        memcpy(state + 0, before + 0, before.size() * 4);
        memset(kept + 0, 0, kept.size() * 4);
        for (int64_t i = 0; i < y.size(); i++) y[i] = 0;
        std::vector<float *> after(n_tokens, state + 0);
        if (keeps && n_tokens > 1) after[n_tokens - 2] = kept + 0;
        const int64_t cut  = is_cut ? n_tokens / 2 : n_tokens;
        const float  *from = state + 0;
        for (int64_t first = 0, end = cut; first < n_tokens; first = end, end = n_tokens) {
            const auto at = [&](const Floats &all) { return Series{ all + first * stride, stride }; };
            if (first == end) continue;
            f(StateRows{ n_rows, n_columns, end - first, from, after.data() + first, at(k), at(q), at(v), decays + first,
                         factors + first, at(w), at(a), at(b), y + first * y_stride, y_stride, 0.25f });
            from = after[end - 1];
        }
    };
    run(ours, ours_kept, y_ours, [&](const StateRows &s) { compute(s); });
    run(theirs, theirs_kept, y_theirs, [&](const StateRows &s) {
        for (int64_t j = 0; j < n_rows; j++) {
            std::vector<float> row(s.before + j * n_columns, s.before + (j + 1) * n_columns);
            plain(rule, s, row.data(), j);
        }
    });
    return same(ours, theirs, n) && same(ours_kept, theirs_kept, n) && same(y_ours, y_theirs, n);
}

bool check_convolution(const LinearLevel &level, int64_t width, int64_t n_channels, int64_t n_tokens, std::mt19937 &random,
                       long &n) {
    const int64_t x_stride = n_tokens + width - 1, stride = n_channels + random() % 5;
    const Floats  x(n_channels * x_stride, random), weights(n_channels * width, random);
    const Floats  y(stride * (n_tokens - 1) + n_channels), expected(y.size());
    for (int64_t i = 0; i < y.size(); i++) y[i] = expected[i] = 0;
    level.convolve(x + 0, x_stride, weights + 0, width, n_channels, n_tokens, y + 0, stride);
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t c = 0; c < n_channels; c++) {
            float sum = x[c * x_stride + t] * weights[c * width];
            for (int64_t i = 1; i < width; i++) sum = std::fmaf(x[c * x_stride + t + i], weights[c * width + i], sum);
            expected[t * stride + c] = sum;
        }
    // Rows of channels become rows of tokens.
    const Floats from(y.size(), random), to(n_channels * n_tokens), turned(to.size());
    level.transpose(from + 0, stride, n_channels, n_tokens, to + 0, n_tokens);
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t c = 0; c < n_channels; c++) turned[c * n_tokens + t] = from[t * stride + c];
    return same(y, expected, n) && same(to, turned, n);
}

bool check(const char *name, const LinearLevel &level) {
    std::mt19937 random(1);
    long         n  = 0;
    bool         ok = true;
    for (const Rule rule : { kDeltaNet, kScan, kWkv7 })
        for (const int64_t n_rows : { 16, 32, 48 })
            for (const int64_t n_columns : { 16, 48, 64, 128 })
                for (const int64_t n_tokens : { 1, 2, 5, 17 })
                    for (int kind = 0; kind < 4; kind++)
                        ok = ok && check(level, rule, n_rows, n_columns, n_tokens, kind & 1, kind & 2, random, n);
    for (const int64_t width : { 1, 3, 4, 7 })
        for (const int64_t n_channels : { 1, 8, 15, 16, 40, 100 })
            for (const int64_t n_tokens : { 1, 2, 7, 8, 15, 16, 17, 33, 100 })
                ok = ok && check_convolution(level, width, n_channels, n_tokens, random, n);
    printf("%s: %ld numbers are %s\n", name, n, ok ? "equal" : "different");
    return ok;
}

}  // namespace
}  // namespace lp::kernels

int main() {
    using namespace lp::kernels;
    bool ok = check("avx2", kLinearAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        ok = check("avx512", kLinearAvx512) && ok;
    return ok ? 0 : 1;
}

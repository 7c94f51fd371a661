// Scans of a logits row: argmax, top-K and sums without an array of all candidates.
#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

// The plain loops below become vector instructions; where the compiler can, a version for wider ones is compiled too
// and chosen when the module is loaded, so that a build for any machine of the architecture is not slow on this one.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define LP_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LP_WIDE
#endif

namespace {

constexpr int   lanes = 64;
constexpr int   block = 32;  // looked through value by value when it holds a candidate
constexpr float none  = -std::numeric_limits<float>::infinity();

// The largest value; NaN never wins, so a row of nothing else gives minus infinity.
LP_WIDE float largest(const float * row, int n) {
    float best[lanes];
    for (int j = 0; j < lanes; j++) {
        best[j] = none;
    }
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (int j = 0; j < lanes; j++) {
            best[j] = row[i + j] > best[j] ? row[i + j] : best[j];
        }
    }
    float top = none;
    for (int j = 0; j < lanes; j++) {
        top = best[j] > top ? best[j] : top;
    }
    for (; i < n; i++) {
        top = row[i] > top ? row[i] : top;
    }
    return top;
}

// The first block from i on with a value above the bar; the last, shorter block is never looked into: its start, or n.
LP_WIDE int next_above(const float * row, int i, int n, float bar) {
    for (; i + block <= n; i += block) {
        int any = 0;
        for (int j = 0; j < block; j++) {
            any |= row[i + j] > bar;
        }
        if (any) {
            return i;
        }
    }
    return i;
}

// exp(x) for x <= 0, to about 1e-7 of it; 0 for what is no number and below where float32 has no normal numbers.
// Cody and Waite's reduction by ln 2 in two parts, then the series of the exponential function.
inline float exp_of(float x) {
    const float clamped = x > -87.0f ? x : -87.0f;
    const float turns   = clamped * 1.44269504f;
    const int   n       = (int) (turns - 0.5f);  // turns <= 0, and truncation is towards it: the nearest
    const float r       = (clamped - (float) n * 0.693359375f) + (float) n * 2.12194440e-4f;
    float       e       = 1.0f / 5040;
    e                   = e * r + 1.0f / 720;
    e                   = e * r + 1.0f / 120;
    e                   = e * r + 1.0f / 24;
    e                   = e * r + 1.0f / 6;
    e                   = e * r + 0.5f;
    e                   = e * r + 1.0f;
    e                   = e * r + 1.0f;
    const int32_t bits  = (n + 127) << 23;
    float         scale;
    memcpy(&scale, &bits, sizeof(scale));
    return x > -87.0f ? e * scale : 0.0f;
}

constexpr int run = 256;

// Sums of exp((row[i] - top) * scale), one for each run of 256 and one for the rest. Sixteen numbers are added up in
// float32, which keeps seven digits; all beyond in float64.
LP_WIDE void sums_of_exp(const float * row, int n, float top, float scale, double * sums) {
    constexpr int wide = 16;
    int           i    = 0;
    for (; i + run <= n; i += run) {
        float sum[wide] = {};
        for (int k = 0; k < run; k += wide) {
            for (int j = 0; j < wide; j++) {
                sum[j] += exp_of((row[i + k + j] - top) * scale);
            }
        }
        double total = 0;
        for (int j = 0; j < wide; j++) {
            total += (double) sum[j];
        }
        *sums++ = total;
    }
    double total = 0;
    for (; i < n; i++) {
        total += (double) exp_of((row[i] - top) * scale);
    }
    *sums = total;
}

// The largest finite value, minus infinity if there is none.
float largest_finite(const float * row, int n) {
    float top = largest(row, n);
    if (top == -none) {  // damaged: only what is finite counts, as for every other way of choosing
        top = none;
        for (int i = 0; i < n; i++) {
            top = std::isfinite(row[i]) && row[i] > top ? row[i] : top;
        }
    }
    return top;
}

// sums_of_exp of a row in which only what is finite counts.
std::vector<double> & run_sums(const float * row, int n, float top, float scale) {
    thread_local std::vector<double> sums;
    thread_local std::vector<float>  clean;
    if (largest(row, n) != top) {  // positive infinity is in it
        clean.assign(row, row + n);
        for (float & l : clean) {
            l = std::isfinite(l) ? l : none;
        }
        row = clean.data();
    }
    sums.resize((size_t) (n / run) + 1);
    sums_of_exp(row, n, top, scale, sums.data());
    return sums;
}

bool better(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

int32_t lp::argmax(const float * logits, int n) {
    const float top = largest_finite(logits, n);
    if (top == none) {
        return -1;
    }
    int i = next_above(logits, 0, n, std::nextafter(top, none));
    while (!(logits[i] == top)) {
        i++;
    }
    return i;
}

void lp::top_k(const float * logits, int n, int k, std::vector<llama_token_data> & out) {
    // Collect what beats the k-th best so far; cut back to k whenever twice as many came together. Later ids never
    // displace equal earlier ones, so a strict comparison keeps the lowest ids on ties.
    const size_t full = (size_t) k * 2 + block;
    float        bar  = none;
    out.clear();
    out.reserve(full + block);
    const auto cut = [&] {
        std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), better);
        out.resize(k);
        bar = out[k - 1].logit;
    };
    for (int i = 0; (i = next_above(logits, i, n, bar)) < n; i += block) {
        const int end = std::min(i + block, n);
        for (int j = i; j < end; j++) {
            if (logits[j] > bar && logits[j] < -none) {
                out.push_back({ j, logits[j], 0.0f });
            }
        }
        if (out.size() >= full) {
            cut();
        }
    }
    if (out.size() > (size_t) k) {
        cut();
    }
    std::sort(out.begin(), out.end(), better);
}

double lp::log_sum_exp(const float * logits, int n) {
    const float top = largest_finite(logits, n);
    if (top == none) {
        return none;
    }
    std::vector<double> & sums = run_sums(logits, n, top, 1.0f);
    return (double) top + std::log(std::accumulate(sums.begin(), sums.end(), 0.0));
}

int32_t lp::draw(const float * logits, int n, float temperature, double u) {
    const float top = largest_finite(logits, n);
    if (top == none) {
        return -1;
    }
    const float           scale = 1.0f / temperature;
    std::vector<double> & sums  = run_sums(logits, n, top, scale);
    double                left  = u * std::accumulate(sums.begin(), sums.end(), 0.0);
    int                   i     = 0;
    for (size_t k = 0; k + 1 < sums.size() && left >= sums[k]; k++) {
        left -= sums[k];
        i += run;
    }
    int32_t last = -1;  // the last bin of nonzero width: rounding must never choose an impossible token
    for (; i < n && left >= 0; i++) {
        const double w = std::isfinite(logits[i]) ? (double) exp_of((logits[i] - top) * scale) : 0;
        if (w > 0) {
            last = i;
            left -= w;
        }
    }
    return last >= 0 ? last : argmax(logits, n);
}

void lp::at_least(const float * logits, int n, float p, std::vector<llama_token_data> & out) {
    const float bar = largest_finite(logits, n) + std::log(p);
    out.clear();
    for (int i = 0; (i = next_above(logits, i, n, std::nextafter(bar, none))) < n; i += block) {
        for (int j = i; j < std::min(i + block, n); j++) {
            if (logits[j] >= bar && std::isfinite(logits[j])) {
                out.push_back({ j, logits[j], 0.0f });
            }
        }
    }
}

void lp::all(const float * logits, int n, std::vector<llama_token_data> & out) {
    out.clear();
    out.reserve(n);
    for (int i = 0; i < n; i++) {
        if (std::isfinite(logits[i])) {
            out.push_back({ i, logits[i], 0.0f });
        }
    }
}

// Scans of a logits row: argmax, top-k and sums without an array of all candidates.
#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

// Where the compiler can, it also compiles versions for wider instructions, and one is chosen when the module is loaded. So a
// build for every machine of an architecture is not slow on a newer one.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define LP_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LP_WIDE
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed: never, all of it is inlined

namespace {

// Sixteen values at a time, in the compiler's vector types, which it maps to the available instructions.
constexpr int   lanes = 16;
typedef float   Floats __attribute__((vector_size(4 * lanes)));
typedef float   Loose __attribute__((vector_size(4 * lanes), aligned(4)));  // anywhere in memory
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));

constexpr int   block = 32;  // searched value by value if it holds a candidate
constexpr float none  = -std::numeric_limits<float>::infinity();

#define LP_INLINE __attribute__((always_inline)) inline

LP_INLINE Floats load(const float * row) { return *(const Loose *) row; }

LP_INLINE Floats larger(const Floats & a, const Floats & b) { return a > b ? a : b; }  // b if either is not a number

LP_INLINE float largest_of(const Floats & values) {
    float top = none;
    for (int j = 0; j < lanes; j++) {
        top = values[j] > top ? values[j] : top;
    }
    return top;
}

// The largest value; NaN never wins, so a row of nothing else gives minus infinity.
LP_WIDE float largest(const float * row, int n) {
    Floats best[4];
    for (Floats & b : best) {
        b = Floats{} + none;
    }
    int i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
        for (int k = 0; k < 4; k++) {
            best[k] = larger(load(row + i + k * lanes), best[k]);
        }
    }
    float top = largest_of(larger(larger(best[0], best[1]), larger(best[2], best[3])));
    for (; i < n; i++) {
        top = row[i] > top ? row[i] : top;
    }
    return top;
}

constexpr int min_block = 4 * lanes, max_block = 16 * lanes;

// The largest value of each block of `size` values, a multiple of 64; NaN never wins.
LP_WIDE void block_maxima(const float * row, int n, int size, float * maxima) {
    int i = 0;
    for (; i + size <= n; i += size) {
        Floats best = Floats{} + none, other = best;
        for (int k = i; k < i + size; k += 2 * lanes) {
            best  = larger(load(row + k), best);
            other = larger(load(row + k + lanes), other);
        }
        *maxima++ = largest_of(larger(best, other));
    }
    if (i < n) {
        float top = none;
        for (; i < n; i++) {
            top = row[i] > top ? row[i] : top;
        }
        *maxima = top;
    }
}

// exp(x) for x <= 0, with a relative error of about 1e-7; 0 for NaN and for results below float32's normal numbers.
// Cody and Waite's reduction by ln 2 in two parts, then the series of the exponential function.
LP_INLINE Floats exp_of(const Floats & x) {
    const Floats least   = Floats{} - 87.0f;
    const Floats clamped = x > least ? x : least;
    const Ints   n       = __builtin_convertvector(clamped * 1.44269504f - 0.5f, Ints);  // <= 0, and cut towards it
    const Floats turns   = __builtin_convertvector(n, Floats);
    const Floats r       = (clamped - turns * 0.693359375f) + turns * 2.12194440e-4f;
    Floats       e       = r * (1.0f / 5040) + 1.0f / 720;
    e                    = e * r + 1.0f / 120;
    e                    = e * r + 1.0f / 24;
    e                    = e * r + 1.0f / 6;
    e                    = e * r + 0.5f;
    e                    = e * r + 1.0f;
    e                    = e * r + 1.0f;
    const Floats scale   = (Floats) ((n + 127) << 23);
    return x > least ? e * scale : Floats{};
}

float exp_of_one(float x) {
    const Floats e = exp_of(Floats{} + x);
    return e[0];
}

constexpr int run = 16 * lanes;

// Sums of exp((row[i] - top) * scale), one for each run and one for the rest. Sixteen numbers at a time are added in float32,
// which keeps seven digits; their sums in float64.
LP_WIDE void sums_of_exp(const float * row, int n, float top, float scale, double * sums) {
    int i = 0;
    for (; i + run <= n; i += run) {
        Floats sum = {};
        for (int k = 0; k < run; k += lanes) {
            sum += exp_of((load(row + i + k) - top) * scale);
        }
        double total = 0;
        for (int j = 0; j < lanes; j++) {
            total += (double) sum[j];
        }
        *sums++ = total;
    }
    double total = 0;
    for (; i < n; i++) {
        const Floats e = exp_of(Floats{} + (row[i] - top) * scale);
        total += (double) e[0];
    }
    *sums = total;
}

// The largest finite value, minus infinity if there is none.
float largest_finite(const float * row, int n) {
    float top = largest(row, n);
    if (top == -none) {  // a damaged row: only finite logits count, here as everywhere
        top = none;
        for (int i = 0; i < n; i++) {
            top = std::isfinite(row[i]) && row[i] > top ? row[i] : top;
        }
    }
    return top;
}

// sums_of_exp of the finite values of a row.
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

// The start of the first block from i on with a value above the bar. The last, shorter block is not searched: its start, or n.
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

// Adds every finite value of row[begin:end] that is not below the bar.
void collect(const float * row, int begin, int end, float bar, std::vector<llama_token_data> & out) {
    const float below = bar > none ? std::nextafter(bar, none) : none;
    for (int i = begin; (i = next_above(row, i, end, below)) < end; i += block) {
        for (int j = i; j < std::min(i + block, end); j++) {
            if (row[j] > below && row[j] < -none) {
                out.push_back({ j, row[j], 0.0f });
            }
        }
    }
}

LP_WIDE int count_from(const float * values, int n, float bar) {
    Ints counts = {};
    int  i      = 0;
    for (; i + lanes <= n; i += lanes) {
        counts -= load(values + i) >= Floats{} + bar;  // true is -1
    }
    int count = 0;
    for (int j = 0; j < lanes; j++) {
        count += counts[j];
    }
    for (; i < n; i++) {
        count += values[i] >= bar;
    }
    return count;
}

// A bar that at least k of the values reach, and not many more where they differ; found by bisection. Minus infinity when
// fewer are finite.
float reached_by(const float * values, int n, int k) {
    float low = std::numeric_limits<float>::infinity(), high = none;
    for (int i = 0; i < n; i++) {
        low  = values[i] > none && values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
    }
    if (count_from(values, n, low) < k) {
        return none;
    }
    for (int i = 0; i < 32 && low < high; i++) {
        const float middle = low + (high - low) / 2;
        const int   count  = count_from(values, n, middle);
        if (count < k) {
            high = middle;
        } else {
            low = middle;
            if (count <= k + k / 8) {
                break;
            }
        }
    }
    return low;
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
    // A bar that at least k of the blocks' maxima reach, and so at least k values. Most blocks do not reach it.
    out.clear();
    int size = max_block;
    while (size > min_block && n / size < 8 * k) {
        size /= 2;
    }
    float bar = none;
    if (n / size > k) {
        thread_local std::vector<float> maxima;
        maxima.resize((size_t) ((n + size - 1) / size));
        block_maxima(logits, n, size, maxima.data());
        for (size_t b = 0; b < maxima.size(); b++) {
            if (maxima[b] == -none) {  // a damaged row: only finite logits count
                const int first = (int) b * size;
                maxima[b]       = largest_finite(logits + first, std::min(size, n - first));
            }
        }
        bar = reached_by(maxima.data(), (int) maxima.size(), k);
        for (size_t b = 0; b < maxima.size(); b++) {
            if (maxima[b] >= bar && maxima[b] > none) {
                collect(logits, (int) b * size, std::min((int) b * size + size, n), bar, out);
            }
        }
    } else {
        collect(logits, 0, n, none, out);
    }
    // Later ids come after equal earlier ones, so that the lowest ids are kept on ties.
    if (out.size() > (size_t) k) {
        std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), better);
        out.resize((size_t) k);
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
        const double w = std::isfinite(logits[i]) ? (double) exp_of_one((logits[i] - top) * scale) : 0;
        if (w > 0) {
            last = i;
            left -= w;
        }
    }
    return last >= 0 ? last : argmax(logits, n);
}

void lp::nucleus(const float * logits, int n, float p, std::vector<llama_token_data> & out) {
    const float  top   = largest_finite(logits, n);
    const double total = top == none ? 0 : log_sum_exp(logits, n) - top;
    out.clear();
    if (top == none) {
        return;
    }
    // A histogram of the probabilities tells which logits are needed, so that no others are sorted.
    constexpr int   n_bins       = 512;
    constexpr float depth        = 32.0f;  // logits further below the largest are in the last bin
    double          mass[n_bins] = {};
    for (int i = 0; i < n; i++) {
        if (logits[i] > top - depth && logits[i] <= top) {
            const int below = (int) ((top - logits[i]) * (n_bins / depth));  // may round up to the depth
            mass[std::min(below, n_bins - 1)] += (double) exp_of_one(logits[i] - top);
        }
    }
    const double wanted = (double) p * std::exp(total);
    double       sum    = 0;
    int          bin    = 0;
    while (bin < n_bins && sum < wanted) {
        sum += mass[bin++];
    }
    // One more bin, for rounding; the full row where the histogram ends.
    const float bar = bin < n_bins ? top - (float) (bin + 1) * (depth / n_bins) : none;
    collect(logits, 0, n, bar, out);
    std::sort(out.begin(), out.end(), better);
    sum = 0;
    for (size_t i = 0; i < out.size(); i++) {
        sum += std::exp((double) out[i].logit - top);
        if (sum >= wanted) {
            out.resize(i + 1);
            return;
        }
    }
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

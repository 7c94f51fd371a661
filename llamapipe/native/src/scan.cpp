// Scans of a logits row: argmax, top-k and sums without an array of all candidates.
//
// A sum has one order, whatever the width of vectors. So all processors with FMA, for which the compiler makes one instruction
// of a multiplication and an addition, give the same bits.
#include "scan.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

// Where the compiler can, it also compiles versions for wider instructions, and one is chosen when the module is loaded. So a
// build for every machine of an architecture is not slow on a newer one.
#ifdef LP_ONE_LEVEL  // a test compiles each by itself
#define LP_WIDE
#elif defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define LP_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // which cannot combine AVX2 with FMA
#define LP_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define LP_WIDE
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors are passed: never, all of it is inlined

namespace {

// Sixteen values at a time, in the compiler's vector types, which it maps to the available instructions.
constexpr int   kLanes = 16;
typedef float   Floats __attribute__((vector_size(4 * kLanes)));
typedef float   Loose __attribute__((vector_size(4 * kLanes), aligned(4)));  // anywhere in memory
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float   Half __attribute__((vector_size(2 * kLanes)));
typedef double  Doubles __attribute__((vector_size(4 * kLanes)));

constexpr int   kBlock = 32;  // searched value by value if it holds a candidate
constexpr float kNone  = -std::numeric_limits<float>::infinity();

#define LP_INLINE __attribute__((always_inline)) inline

LP_INLINE Floats load(const float *row) { return *reinterpret_cast<const Loose *>(row); }

LP_INLINE Floats larger(const Floats &a, const Floats &b) { return a > b ? a : b; }  // b if either is not a number

// All lanes combined, each with the one half of the lanes further on, until one is left.
template <int half, typename T, typename Combine> LP_INLINE T folded(T *values, const Combine &combine) {
    for (int j = 0; j < half; j++) {
        values[j] = combine(values[j], values[j + half]);
    }
    if constexpr (half == 1) {
        return values[0];
    } else {
        return folded<half / 2>(values, combine);
    }
}

LP_INLINE float largest_of(const Floats &values) {
    float tops[kLanes];
    memcpy(tops, &values, sizeof tops);
    return folded<kLanes / 2>(tops, [](float a, float b) { return a > b ? a : b; });
}

LP_INLINE double sum_of(const Floats &values) {
    Half halves[2];
    memcpy(halves, &values, sizeof values);
    const Doubles pairs = __builtin_convertvector(halves[0], Doubles) + __builtin_convertvector(halves[1], Doubles);
    double        sums[kLanes / 2];
    memcpy(sums, &pairs, sizeof pairs);
    return folded<kLanes / 4>(sums, [](double a, double b) { return a + b; });
}

LP_INLINE bool any_of(const Ints &truths) {
    int64_t pairs[kLanes / 2];
    memcpy(pairs, &truths, sizeof pairs);
    return folded<kLanes / 4>(pairs, [](int64_t a, int64_t b) { return a | b; }) != 0;
}

constexpr int kChunk = 4096;

// The largest value, and the start of the chunk that it comes first in; NaN never wins, so a row of nothing else gives minus
// infinity.
LP_WIDE float largest(const float *row, int n, int *begin) {
    float top = kNone;
    *begin    = 0;
    for (int first = 0; first < n; first += kChunk) {
        const int end = n - first < kChunk ? n : first + kChunk;
        Floats    best[4];
        for (Floats &b : best) {
            b = Floats{} + kNone;
        }
        int i = first;
        for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
            for (int k = 0; k < 4; k++) {
                best[k] = larger(load(row + i + k * kLanes), best[k]);
            }
        }
        float most = largest_of(larger(larger(best[0], best[1]), larger(best[2], best[3])));
        for (; i < end; i++) {
            most = row[i] > most ? row[i] : most;
        }
        if (most > top) {
            top    = most;
            *begin = first;
        }
    }
    return top;
}

constexpr int kMinBlock = 4 * kLanes, kMaxBlock = 16 * kLanes;

// The largest value of each block of `size` values, a multiple of 64; NaN never wins.
LP_WIDE void block_maxima(const float *row, int n, int size, float *maxima) {
    int i = 0;
    for (; i + size <= n; i += size) {
        Floats best = Floats{} + kNone, other = best;
        for (int k = i; k < i + size; k += 2 * kLanes) {
            best  = larger(load(row + k), best);
            other = larger(load(row + k + kLanes), other);
        }
        *maxima++ = largest_of(larger(best, other));
    }
    if (i < n) {
        float top = kNone;
        for (; i < n; i++) {
            top = row[i] > top ? row[i] : top;
        }
        *maxima = top;
    }
}

// 2^x for x <= 0, with a relative error of about 2e-7; 0 for NaN and below 2^-127.
LP_INLINE Floats power_of_two(const Floats &x) {
    const Floats least   = Floats{} - 127.0f;
    const Floats clamped = x > least ? x : least;
    // Adding a number whose last bit is worth 1 rounds. The sum's last bits are then those of the exponent.
    const float  ones    = 0x1.8p23f + 127;
    const Floats rounded = clamped + ones;
    const Floats f       = clamped - (rounded - ones);  // from -0.5 to 0.5, exact
    Floats       e       = f * 0.001326472731307149f + 0.009671512991189957f;  // of the least relative error, and 1 for 0
    e                    = e * f + 0.05550733581185341f;
    e                    = e * f + 0.24022242426872253f;
    e                    = e * f + 0.6931470036506653f;
    e                    = e * f + 1.0f;
    return e * reinterpret_cast<Floats>(reinterpret_cast<Ints>(rounded) << 23);
}

constexpr float kLog2E = 1.44269504f;

constexpr int kRun = 16 * kLanes;

// Sums of 2^((row[i] - top) * scale), one for each run and one for the rest. Sixteen numbers at a time are added in float32,
// which keeps seven digits; their sums in float64.
LP_WIDE void sums_of_powers(const float *row, int n, float top, float scale, double *sums) {
    int i = 0;
    for (; i + kRun <= n; i += kRun) {
        Floats sum = {};
        for (int k = 0; k < kRun; k += kLanes) {
            sum += power_of_two((load(row + i + k) - top) * scale);
        }
        *sums++ = sum_of(sum);
    }
    double total = 0;
    for (; i < n; i++) {
        const Floats e = power_of_two(Floats{} + (row[i] - top) * scale);
        total += e[0];
    }
    *sums = total;
}

// For each value of a run its weight exp(value - top), and how many bins it is below the top, at most `last`.
LP_WIDE void weigh(const float *row, float top, float bins_per_unit, float last, float *weights, int32_t *bins) {
    const Floats most = Floats{} + last;
    for (int k = 0; k < kRun; k += kLanes) {
        const Floats above  = load(row + k) - top;
        const Floats bin    = above * -bins_per_unit;
        const Floats weight = power_of_two(above * kLog2E);
        const Ints   number = __builtin_convertvector(bin < most ? bin : most, Ints);
        memcpy(weights + k, &weight, sizeof weight);
        memcpy(bins + k, &number, sizeof number);
    }
}

// ---- rows with what is not finite: only finite logits count
struct Top {
    float logit;  // the largest that is finite; minus infinity: there is none
    int   begin;  // it comes first in the chunk from here on, or after it if the row is damaged
    bool  is_damaged;  // positive infinity is in the row
};

Top top_of(const float *row, int n) {
    Top top   = {};
    top.logit = largest(row, n, &top.begin);
    if (top.logit == -kNone) {
        top = { kNone, 0, true };
        for (int i = 0; i < n; i++) {
            top.logit = std::isfinite(row[i]) && row[i] > top.logit ? row[i] : top.logit;
        }
    }
    return top;
}

// The row, or a copy in which minus infinity stands for everything that is not finite, until the thread's next call. NaN and
// minus infinity do no harm.
const float *repaired(const float *row, int n, const Top &top) {
    thread_local std::vector<float> clean;
    if (!top.is_damaged) {
        return row;
    }
    clean.assign(row, row + n);
    for (float &l : clean) {
        l = std::isfinite(l) ? l : kNone;
    }
    return clean.data();
}

// sums_of_powers of a repaired row, until the thread's next call.
std::vector<double> &run_sums(const float *row, int n, float top, float scale) {
    thread_local std::vector<double> sums;
    sums.resize(n / kRun + 1);
    sums_of_powers(row, n, top, scale, sums.data());
    return sums;
}

// The start of the first block from i on with a value above the bar. The last, shorter block is not searched: its start, or n.
LP_WIDE int next_above(const float *row, int i, int n, float bar) {
    static_assert(kBlock == 2 * kLanes);
    for (; i + kBlock <= n; i += kBlock) {
        const Floats most = larger(load(row + i), larger(load(row + i + kLanes), Floats{} + kNone));
        if (any_of(most > Floats{} + bar)) {
            return i;
        }
    }
    return i;
}

// Adds every finite value of row[begin:end] above the bar, and the first `n_equal` that equal it, of which as many remain as
// were not found.
void collect(const float *row, int begin, int end, float bar, int &n_equal, std::vector<llama_token_data> &out) {
    const float below = bar > kNone ? std::nextafter(bar, kNone) : kNone;
    for (int i = begin; (i = next_above(row, i, end, below)) < end; i += kBlock) {
        for (int j = i; j < std::min(i + kBlock, end); j++) {
            if (row[j] > below && row[j] < -kNone && (row[j] > bar || n_equal-- > 0)) {
                out.push_back({ j, row[j], 0.0f });
            }
        }
    }
}

void collect(const float *row, int n, float bar, std::vector<llama_token_data> &out) {
    int n_equal = INT_MAX;
    collect(row, 0, n, bar, n_equal, out);
}

LP_WIDE int count_from(const float *values, int n, float bar) {
    Ints counts = {};
    int  i      = 0;
    for (; i + kLanes <= n; i += kLanes) {
        counts -= load(values + i) >= Floats{} + bar;  // true is -1
    }
    int count = 0;
    for (int j = 0; j < kLanes; j++) {
        count += counts[j];
    }
    for (; i < n; i++) {
        count += values[i] >= bar;
    }
    return count;
}

// A bar that at least k of the values reach, and not many more; where they are equal, the bar is that value. Found by
// bisection. Minus infinity when fewer are finite.
float reached_by(const float *values, int n, int k) {
    float low = std::numeric_limits<float>::infinity(), high = kNone;
    for (int i = 0; i < n; i++) {
        low  = values[i] > kNone && values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
    }
    if (count_from(values, n, low) < k) {
        return kNone;
    }
    for (int i = 0; i < 32 && low < high; i++) {
        const float middle = low + (high - low) / 2;
        const int   count  = count_from(values, n, middle);
        if (count < k) {
            high = middle;
        } else {
            low = middle;
            if (count <= k + k / 8) {
                return low;
            }
        }
    }
    float least = -kNone;
    for (int i = 0; i < n; i++) {
        least = values[i] >= low && values[i] < least ? values[i] : least;
    }
    return least;
}

bool better(const llama_token_data &a, const llama_token_data &b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Sorts candidates that come by id, best first: by radix where there are many, as of a nearly flat row.
void sort_by_logit(std::vector<llama_token_data> &candidates) {
    constexpr int      n_bits = 11, n_passes = 3;
    constexpr uint32_t n_digits = 1u << n_bits;
    if (candidates.size() < n_digits) {
        std::sort(candidates.begin(), candidates.end(), better);
        return;
    }
    const auto digit = [](float logit, int pass) {
        const float number = logit + 0.0f;  // not minus zero
        uint32_t    bits;
        memcpy(&bits, &number, sizeof bits);
        bits = bits >> 31 ? bits : ~bits & 0x7fffffffu;  // rising where logits fall
        return bits >> (pass * n_bits) & (n_digits - 1);
    };
    thread_local std::vector<llama_token_data> sorted;
    thread_local std::vector<uint32_t>         begins;
    sorted.resize(candidates.size());
    for (int pass = 0; pass < n_passes; pass++) {
        begins.assign(n_digits + 1, 0);
        for (const llama_token_data &c : candidates) {
            begins[digit(c.logit, pass) + 1]++;
        }
        std::partial_sum(begins.begin(), begins.end(), begins.begin());
        for (const llama_token_data &c : candidates) {
            sorted[begins[digit(c.logit, pass)]++] = c;
        }
        candidates.swap(sorted);
    }
}

}  // namespace

int32_t lp::argmax(const float *logits, int n) {
    const Top top = top_of(logits, n);
    if (top.logit == kNone) {
        return -1;
    }
    int i = top.begin;
    while (!(logits[i] == top.logit)) {
        i++;
    }
    return i;
}

void lp::top_k(const float *logits, int n, int k, std::vector<llama_token_data> &out) {
    // A bar that at least k of the blocks' maxima reach, and so at least k values. Most blocks do not reach it.
    out.clear();
    int size = kMaxBlock;
    while (size > kMinBlock && n / size < 8 * k) {
        size /= 2;
    }
    float bar = kNone;
    if (n / size > k) {
        thread_local std::vector<float> maxima;
        maxima.resize((n + size - 1) / size);
        block_maxima(logits, n, size, maxima.data());
        for (size_t b = 0; b < maxima.size(); b++) {
            if (maxima[b] == -kNone) {  // a damaged row: only finite logits count
                const int first = static_cast<int>(b) * size;
                maxima[b]       = top_of(logits + first, std::min(size, n - first)).logit;
            }
        }
        bar         = reached_by(maxima.data(), static_cast<int>(maxima.size()), k);
        int n_equal = k;  // a row of few different values has thousands that equal the bar
        for (size_t b = 0; b < maxima.size(); b++) {
            if (maxima[b] > bar || (maxima[b] == bar && n_equal > 0 && bar > kNone)) {
                collect(logits, static_cast<int>(b) * size, std::min(static_cast<int>(b) * size + size, n), bar, n_equal, out);
            }
        }
    } else {
        collect(logits, n, kNone, out);
    }
    // Later ids come after equal earlier ones, so that the lowest ids are kept on ties.
    if (out.size() > static_cast<size_t>(k)) {
        std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), better);
        out.resize(k);
    }
    std::sort(out.begin(), out.end(), better);
}

double lp::log_sum_exp(const float *logits, int n) {
    const Top top = top_of(logits, n);
    if (top.logit == kNone) {
        return kNone;
    }
    std::vector<double> &sums = run_sums(repaired(logits, n, top), n, top.logit, kLog2E);
    return top.logit + std::log(std::accumulate(sums.begin(), sums.end(), 0.0));
}

int32_t lp::draw(const float *logits, int n, float temperature, double u) {
    const Top top = top_of(logits, n);
    if (top.logit == kNone) {
        return -1;
    }
    const float *const   row   = repaired(logits, n, top);
    const float          scale = kLog2E / temperature;
    std::vector<double> &sums  = run_sums(row, n, top.logit, scale);
    double               left  = u * std::accumulate(sums.begin(), sums.end(), 0.0);
    int                  i     = 0;
    for (size_t k = 0; k + 1 < sums.size() && left >= sums[k]; k++) {
        left -= sums[k];
        i += kRun;
    }
    int32_t last = -1;  // the last bin of nonzero width: rounding must never choose an impossible token
    for (; i < n && left >= 0; i++) {
        const Floats weight = power_of_two(Floats{} + (row[i] - top.logit) * scale);
        if (weight[0] > 0) {
            last = i;
            left -= weight[0];
        }
    }
    return last >= 0 ? last : argmax(logits, n);
}

void lp::nucleus(const float *logits, int n, float p, std::vector<llama_token_data> &out) {
    out.clear();
    const Top top = top_of(logits, n);
    if (top.logit == kNone) {
        return;
    }
    // A histogram of the probabilities tells which logits are needed, so that no others are sorted. Those further below the
    // largest than `depth` have not even together the mass that is not wanted; they are in the last bin.
    const float *const   row             = repaired(logits, n, top);
    std::vector<double> &sums            = run_sums(row, n, top.logit, kLog2E);
    const double         total           = std::accumulate(sums.begin(), sums.end(), 0.0);
    const double         wanted          = p * total;
    const double         depth           = std::clamp(std::log(n / std::max(total - wanted, 1e-30)), 1.0, 80.0);
    const double         least           = std::exp(-depth) * 0.999;  // a run of a smaller sum has no logit above the depth
    constexpr int        n_bins          = 512;
    double               mass[4][n_bins] = {};  // by place, so that an addition does not wait for the one before
    for (size_t k = 0; k < sums.size(); k++) {
        if (sums[k] < least) {
            mass[0][n_bins - 1] += sums[k];
            continue;
        }
        const int    first = static_cast<int>(k) * kRun, n_left = n - first;
        const float *values = row + first;
        float        padded[kRun], weights[kRun];
        int32_t      bins[kRun];
        if (n_left < kRun) {
            std::fill(std::copy_n(values, n_left, padded), padded + kRun, kNone);
            values = padded;
        }
        weigh(values, top.logit, static_cast<float>(n_bins / depth), n_bins - 1, weights, bins);
        for (int j = 0; j < kRun; j += 4) {
            for (int i = 0; i < 4; i++) {
                mass[i][bins[j + i]] += weights[j + i];
            }
        }
    }
    double sum = 0;
    int    bin = 0;
    for (; bin < n_bins && sum < wanted; bin++) {
        sum += (mass[0][bin] + mass[1][bin]) + (mass[2][bin] + mass[3][bin]);
    }
    // One more bin, for rounding; the full row where the histogram ends.
    const float bar = bin < n_bins ? top.logit - static_cast<float>((bin + 1) * (depth / n_bins)) : kNone;
    collect(logits, n, bar, out);
    sort_by_logit(out);
    sum = 0;
    for (size_t i = 0; i < out.size(); i++) {
        sum += std::exp(double{ out[i].logit } - top.logit);
        if (sum >= wanted) {
            out.resize(i + 1);
            return;
        }
    }
}

void lp::at_least(const float *logits, int n, float p, std::vector<llama_token_data> &out) {
    out.clear();
    collect(logits, n, top_of(logits, n).logit + std::log(p), out);
}

void lp::all(const float *logits, int n, std::vector<llama_token_data> &out) {
    out.clear();
    out.reserve(n);
    for (int i = 0; i < n; i++) {
        if (std::isfinite(logits[i])) {
            out.push_back({ i, logits[i], 0.0f });
        }
    }
}

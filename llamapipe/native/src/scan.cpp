// Scans of a logits row: argmax and top-K without an array of all candidates.
#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

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

bool better(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

int32_t lp::argmax(const float * logits, int n) {
    float top = largest(logits, n);
    if (top == -none) {  // damaged: only what is finite counts, as for every other way of choosing
        top = none;
        for (int i = 0; i < n; i++) {
            top = std::isfinite(logits[i]) && logits[i] > top ? logits[i] : top;
        }
    }
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

void lp::all(const float * logits, int n, std::vector<llama_token_data> & out) {
    out.clear();
    out.reserve(n);
    for (int i = 0; i < n; i++) {
        if (std::isfinite(logits[i])) {
            out.push_back({ i, logits[i], 0.0f });
        }
    }
}

// Scans of a logits row: argmax and top-K without an array of all candidates.
#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

constexpr int   lanes = 32;
constexpr float none  = -std::numeric_limits<float>::infinity();

bool better(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

int32_t lp::argmax(const float * logits, int n) {
    float best[lanes];
    std::fill(best, best + lanes, none);
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (int j = 0; j < lanes; j++) {
            best[j] = logits[i + j] > best[j] ? logits[i + j] : best[j];  // false for NaN: it never wins
        }
    }
    float top = none;
    for (int j = 0; j < lanes; j++) {
        top = best[j] > top ? best[j] : top;
    }
    for (; i < n; i++) {
        top = logits[i] > top ? logits[i] : top;
    }
    if (top == none || !std::isfinite(top)) {
        return -1;
    }
    return (int32_t) (std::find(logits, logits + n, top) - logits);
}

void lp::top_k(const float * logits, int n, int k, std::vector<llama_token_data> & out) {
    // Collect what beats the k-th best so far; cut back to k whenever twice as many came together. Later ids never
    // displace equal earlier ones, so a strict comparison keeps the lowest ids on ties.
    const size_t full = (size_t) k * 2 + lanes;
    float        bar  = none;
    out.clear();
    out.reserve(full + lanes);
    const auto cut = [&] {
        std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), better);
        out.resize(k);
        bar = out[k - 1].logit;
    };
    const auto take = [&](int i) {
        if (logits[i] > bar && logits[i] < -none) {
            out.push_back({ i, logits[i], 0.0f });
        }
    };
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        int any = 0;
        for (int j = 0; j < lanes; j++) {
            any |= logits[i + j] > bar;
        }
        if (any) {
            for (int j = 0; j < lanes; j++) {
                take(i + j);
            }
            if (out.size() >= full) {
                cut();
            }
        }
    }
    for (; i < n; i++) {
        take(i);
    }
    if ((int) out.size() > k) {
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

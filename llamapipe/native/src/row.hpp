// The logits of one output that are on the host: the full row, or a partial row of the largest logits and a few others.
#pragma once

#include "native.h"

#include <cmath>
#include <cstdint>

namespace lp {

class Row {
public:
    Row() = default;
    explicit Row(const float * all) : all_(all) {}
    // A partial row: `ids` (as floats) and `logits` of the `n` largest, finite and in descending order, on ties the lower ids
    // first. Any logits that equal the last one may be missing. `other_ids` may be among `ids`. `best`: the most probable token.
    Row(const float * ids, const float * logits, int n, const float * other_ids, const float * other_logits, int n_others,
        int32_t best, double log_sum_exp)
        : ids_(ids), logits_(logits), other_ids_(other_ids), other_logits_(other_logits), n_(n), n_others_(n_others),
          best_(best), log_sum_exp_(log_sum_exp) {}

    // The full row by token, or null.
    const float * all() const { return all_; }

    // ---- of a partial row
    int     n() const { return n_; }
    int32_t id(int i) const { return (int32_t) ids_[i]; }
    float   logit(int i) const { return logits_[i]; }
    float   bar() const { return n_ > 0 ? logits_[n_ - 1] : INFINITY; }  // no missing logit is larger
    bool    is_exact(int n) const { return n == 0 || (n < n_ && logits_[n - 1] > bar()); }  // whether the n largest are known
    int32_t best() const { return best_; }
    double  log_sum_exp() const { return log_sum_exp_; }  // of all, float32

    // Whether a token's logit is known; if not, `logit` is its upper bound.
    bool find(int32_t token, float * logit) const {
        if (all_) {
            *logit = all_[token];
            return true;
        }
        for (int i = 0; i < n_; i++) {
            if (ids_[i] == (float) token) {
                *logit = logits_[i];
                return true;
            }
        }
        for (int i = 0; i < n_others_; i++) {
            if (other_ids_[i] == (float) token) {
                *logit = other_logits_[i];
                return true;
            }
        }
        *logit = bar();
        return false;
    }

private:
    const float * all_ = nullptr;
    const float * ids_ = nullptr, * logits_ = nullptr, * other_ids_ = nullptr, * other_logits_ = nullptr;
    int           n_ = 0, n_others_ = 0;
    int32_t       best_ = -1;
    double        log_sum_exp_ = 0;
};

}  // namespace lp

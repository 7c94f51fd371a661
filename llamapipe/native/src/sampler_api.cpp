// The C entries that use a sampler: accepting tokens, and drawing from a row.
#include "guard.hpp"
#include "native_test.h"
#include "sampler.hpp"

#include <algorithm>

int lp_sampler_set_mask(lp_sampler * s, const uint32_t * mask) {
    s->mask = mask;
    return 0;
}

int lp_sampler_accept(lp_sampler * s, int n, const int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accept(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_accept_grammar(lp_sampler * s, int n, const int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accept_grammar(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_accept_drawn(lp_sampler * s, int n, const int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accepted(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_reset(lp_sampler * s) {
    return lp::guard(LP_ERROR, [&] {
        s->reset();
        return 0;
    });
}

int lp_sampler_draw(lp_sampler * s, const float * logits, int32_t * token) {
    return lp::guard(LP_ERROR, [&] { return s->draw(lp::Row(logits), token); });
}

int lp_sampler_draw_partial(lp_sampler * s, int n, const float * ids, const float * logits, int n_others, const float * other_ids,
                          const float * other_logits, double log_sum_exp, int32_t * token) {
    return lp::guard(LP_ERROR, [&] {
        return s->draw(lp::Row(ids, logits, n, other_ids, other_logits, n_others, (int32_t) ids[0], log_sum_exp), token);
    });
}

int lp_sampler_note(lp_sampler * s, const float * logits, int32_t token) {
    return lp::guard(LP_ERROR, [&] {
        if (s->n_logprobs >= 0) {
            s->note(lp::Row(logits), token);
        }
        return 0;
    });
}

int lp_sampler_logprobs(const lp_sampler * s, int n_max, float * logprob, int32_t * ids, float * logprobs) {
    *logprob    = s->logprob;
    const int n = std::min((int) s->top.size(), n_max);
    for (int i = 0; i < n; i++) {
        ids[i]      = s->top[(size_t) i].id;
        logprobs[i] = s->top[(size_t) i].p;
    }
    return n;
}

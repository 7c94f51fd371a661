// The C entries of samplers: their options, and drawing from a row.
#include "guard.hpp"
#include "native_test.h"
#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

namespace {

const char * likely_name(const llama_sampler *) { return "likely"; }

// Drops what has no probability in float32, before a sampler that takes the logarithm of it: no such token would be kept
// anyway, but the sum of all is not a number then.
void keep_likely(llama_sampler *, llama_token_data_array * a) {
    float top = -INFINITY;
    for (size_t i = 0; i < a->size; i++) {
        top = std::max(top, a->data[i].logit);
    }
    size_t n = 0;
    for (size_t i = 0; i < a->size; i++) {
        if (a->data[i].logit >= top - 80.0f) {
            a->data[n++] = a->data[i];
        }
    }
    a->size = n;
}

llama_sampler * likely() {
    static llama_sampler_i interface = [] {
        llama_sampler_i i = {};
        i.name            = likely_name;
        i.apply           = keep_likely;
        return i;
    }();
    return llama_sampler_init(&interface, nullptr);
}

// llama.cpp's infill ends the text where nothing else is likely, also where that is forbidden: then nothing is merged.
struct Infill {
    lp_sampler *                  owner;
    lp::SamplerPtr                inner;
    std::vector<llama_token_data> before;
};

const char * infill_name(const llama_sampler *) { return "infill"; }

void apply_infill(llama_sampler * s, llama_token_data_array * a) {
    auto & infill = *(Infill *) s->ctx;
    infill.before.assign(a->data, a->data + a->size);
    if (a->size == 0) {
        return;
    }
    llama_sampler_apply(infill.inner.get(), a);
    if (a->size != 1 || infill.owner->is_forbidden(a->data[0].id)) {
        bool left = false;
        for (size_t i = 0; i < a->size; i++) {
            left = left || (std::isfinite(a->data[i].logit) && !infill.owner->is_forbidden(a->data[i].id));
        }
        if (!left) {
            std::copy(infill.before.begin(), infill.before.end(), a->data);
            a->size = infill.before.size();
        }
    }
}

llama_sampler * infill_of(lp_sampler * owner) {
    static llama_sampler_i interface = [] {
        llama_sampler_i i = {};
        i.name            = infill_name;
        i.apply           = apply_infill;
        i.free            = [](llama_sampler * s) { delete (Infill *) s->ctx; };
        return i;
    }();
    auto made = std::make_unique<Infill>();
    made->owner = owner;
    made->inner.reset(llama_sampler_init_infill(owner->vocab));
    return llama_sampler_init(&interface, made.release());
}

// llama.cpp's generators take 32 bits, one value of which means that they choose a seed themselves.
uint32_t short_seed(const lp_sampler * s, uint32_t which) {
    uint64_t z = (s->seed + which) * 0xff51afd7ed558ccdull;
    z ^= z >> 33;
    z *= 0xc4ceb9fe1a85ec53ull;
    const auto seed = (uint32_t) (z >> 32);
    return seed == LLAMA_DEFAULT_SEED ? 0 : seed;
}

template <typename Body> int add(lp_sampler * s, lp::Kind kind, float value, Body && make) {
    return lp::guard(LP_ERROR, [&] {
        llama_sampler * stage = make();
        if (!stage) {
            throw std::runtime_error("llama.cpp made no sampler of these options");
        }
        s->add(kind, value, stage);
        return 0;
    });
}

template <typename Body> int add_other(lp_sampler * s, Body && make) { return add(s, lp::Kind::other, 0, make); }

}  // namespace

lp_sampler * lp_sampler_new(const llama_vocab * vocab, uint64_t seed) {
    return lp::guard((lp_sampler *) nullptr, [&] { return new lp_sampler(vocab, seed); });
}

void lp_sampler_free(lp_sampler * s) { delete s; }

// ---- changes of logits
int lp_sampler_set_bias(lp_sampler * s, int n, const int32_t * tokens, const float * biases) {
    return lp::guard(LP_ERROR, [&] {
        s->biases.clear();
        s->forbidden.clear();
        for (int i = 0; i < n; i++) {
            if (std::isfinite(biases[i])) {
                s->biases[tokens[i]] += biases[i];
            } else {
                s->forbidden.push_back(tokens[i]);
            }
        }
        return 0;
    });
}

int lp_sampler_set_allowed(lp_sampler * s, int n, const int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        s->allowed.assign((size_t) (s->n_vocab + 31) / 32, 0);
        for (int i = 0; i < n; i++) {
            s->allowed[(size_t) tokens[i] / 32] |= 1u << (tokens[i] % 32);
        }
        return 0;
    });
}

int lp_sampler_set_mask(lp_sampler * s, const uint32_t * mask) {
    s->mask = mask;
    return 0;
}

void lp_sampler_set_python(lp_sampler * s, bool needs_row, bool guided) {
    s->needs_row = needs_row;
    s->guided    = guided;
}

int lp_sampler_add_bad_word(lp_sampler * s, int n, const int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        if (n == 1) {
            s->bad_tokens.push_back(tokens[0]);
        } else {
            s->bad_words.emplace_back(tokens, tokens + n);
        }
        return 0;
    });
}

int lp_sampler_set_min_tokens(lp_sampler * s, int min_tokens, int n_ends, const int32_t * ends) {
    return lp::guard(LP_ERROR, [&] {
        s->min_tokens = min_tokens;
        s->ends.assign(ends, ends + n_ends);
        return 0;
    });
}

int lp_sampler_set_grammar(lp_sampler * s, const char * text, const char * root) {
    return lp::guard(LP_ERROR, [&] {
        llama_sampler * grammar = llama_sampler_init_grammar(s->vocab, text, root);
        if (!grammar) {
            throw std::runtime_error("llama.cpp cannot parse the grammar");
        }
        s->grammar.reset(grammar);
        return 0;
    });
}

int lp_sampler_set_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence) {
    s->set_penalties(last_n, repeat, frequency, presence);
    return 0;
}

lp_dry * lp_dry_new(const llama_vocab * vocab, float multiplier, float base, int allowed_length, int last_n, int n_breakers,
                    const char ** breakers) {
    return lp::guard((lp_dry *) nullptr, [&] {
        return (lp_dry *) llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n, breakers,
                                                 (size_t) n_breakers);
    });
}

void lp_dry_free(lp_dry * dry) { llama_sampler_free((llama_sampler *) dry); }

int lp_sampler_set_dry(lp_sampler * s, const lp_dry * dry) {
    return lp::guard(LP_ERROR, [&] {
        s->dry.reset(llama_sampler_clone((const llama_sampler *) dry));
        return 0;
    });
}

// ---- stages
int lp_sampler_add_dry(lp_sampler * s, const lp_dry * dry) {
    return add(s, lp::Kind::other, 0, [&] { return llama_sampler_clone((const llama_sampler *) dry); });
}

int lp_sampler_add_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence) {
    return add_other(
        s, [&] { return llama_sampler_init_penalties(s->n_vocab, last_n, repeat, frequency, presence); });
}

int lp_sampler_add_top_k(lp_sampler * s, int k) {
    k = std::min(k, s->n_vocab);
    return k <= 0 ? 0 : add(s, lp::Kind::top_k, (float) k, [&] { return llama_sampler_init_top_k(k); });
}

int lp_sampler_add_typical(lp_sampler * s, float p) {
    const int code = add_other(s, likely);
    return code < 0 ? code : add_other(s, [&] { return llama_sampler_init_typical(p, 1); });
}

int lp_sampler_add_top_p(lp_sampler * s, float p) {
    return add(s, lp::Kind::top_p, p, [&] { return llama_sampler_init_top_p(p, 1); });
}

int lp_sampler_add_min_p(lp_sampler * s, float p) {
    return add(s, lp::Kind::min_p, p, [&] { return llama_sampler_init_min_p(p, 1); });
}

int lp_sampler_add_temperature(lp_sampler * s, float t) {
    if (t < 1e-6f) {  // dividing by less could make logits infinite, and would choose the same token
        s->make_greedy();
        return 0;
    }
    return t == 1.0f ? 0 : add(s, lp::Kind::temperature, t, [&] { return llama_sampler_init_temp(t); });
}

int lp_sampler_add_dynamic_temperature(lp_sampler * s, float t, float range, float exponent) {
    const int code = add_other(s, likely);
    return code < 0 ? code : add_other(s, [&] { return llama_sampler_init_temp_ext(t, range, exponent); });
}

int lp_sampler_add_top_n_sigma(lp_sampler * s, float n) {
    const int code = add_other(s, [&] { return llama_sampler_init_top_n_sigma(n); });
    return code < 0 ? code : add_other(s, likely);  // it leaves what it cut off, as minus infinity
}

int lp_sampler_add_xtc(lp_sampler * s, float probability, float threshold) {
    return add_other(s, [&] { return llama_sampler_init_xtc(probability, threshold, 1, short_seed(s, 1)); });
}

int lp_sampler_add_infill(lp_sampler * s) { return add_other(s, [&] { return infill_of(s); }); }

int lp_sampler_add_mirostat(lp_sampler * s, int version, float tau, float eta) {
    const int code = add_other(s, likely);
    return code < 0 ? code : add_other(s, [&] {
        return version == 1 ? llama_sampler_init_mirostat(s->n_vocab, short_seed(s, 2), tau, eta, 100)
                            : llama_sampler_init_mirostat_v2(short_seed(s, 2), tau, eta);
    });
}

int lp_sampler_add_adaptive_p(lp_sampler * s, float target, float decay) {
    return add_other(s, [&] { return llama_sampler_init_adaptive_p(target, decay, short_seed(s, 3)); });
}

// ---- use
int lp_sampler_set_logprobs(lp_sampler * s, int n) {
    s->n_logprobs = n;
    s->top.clear();
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

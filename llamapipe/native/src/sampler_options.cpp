// From a request's options to its sampler: one place for every stage.
#include "faults.hpp"
#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

namespace {

using lp::Kind;
using lp::SamplerPtr;

// Drops tokens that have no probability in float32, before a sampler that takes the logarithm of it. No sampler would keep
// such a token, but the sum over all of them would be NaN.
void keep_likely(llama_sampler *, llama_token_data_array *a) {
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

llama_sampler *likely() {
    static llama_sampler_i interface = [] {
        llama_sampler_i i = {};
        i.name            = [](const llama_sampler *) { return "likely"; };
        i.apply           = keep_likely;
        return i;
    }();
    return llama_sampler_init(&interface, nullptr);
}

// llama.cpp's infill ends the text where nothing else is likely, also where that is forbidden. Then nothing is merged.
struct Infill {
    lp_sampler                   *owner;
    SamplerPtr                    inner;
    std::vector<llama_token_data> before;
};

void apply_infill(llama_sampler *s, llama_token_data_array *a) {
    auto &infill = *static_cast<Infill *>(s->ctx);
    infill.before.assign(a->data, a->data + a->size);
    if (a->size == 0) {
        return;
    }
    llama_sampler_apply(infill.inner.get(), a);
    if (a->size != 1 || infill.owner->is_forbidden(a->data[0].id)) {
        const bool any_allowed = std::any_of(a->data, a->data + a->size, [&](const llama_token_data &t) {
            return std::isfinite(t.logit) && !infill.owner->is_forbidden(t.id);
        });
        if (!any_allowed) {
            std::copy(infill.before.begin(), infill.before.end(), a->data);
            a->size = infill.before.size();
        }
    }
}

llama_sampler *infill_of(lp_sampler *owner) {
    static llama_sampler_i interface = [] {
        llama_sampler_i i = {};
        i.name            = [](const llama_sampler *) { return "infill"; };
        i.apply           = apply_infill;
        i.free            = [](llama_sampler *s) { delete static_cast<Infill *>(s->ctx); };
        return i;
    }();
    auto made   = std::make_unique<Infill>();
    made->owner = owner;
    made->inner.reset(llama_sampler_init_infill(owner->vocab));
    return llama_sampler_init(&interface, made.release());
}

// A seed for llama.cpp's generators: they take 32 bits, and choose a seed themselves for one value of them.
uint32_t short_seed(const lp_sampler &s, uint32_t which) {
    uint64_t z = (s.seed + which) * 0xff51afd7ed558ccdull;
    z ^= z >> 33;
    z *= 0xc4ceb9fe1a85ec53ull;
    const auto seed = static_cast<uint32_t>(z >> 32);
    return seed == LLAMA_DEFAULT_SEED ? 0 : seed;
}

bool penalizes(const lp_sampling_options &o) {
    return o.repeat_penalty != 1.0f || o.frequency_penalty != 0.0f || o.presence_penalty != 0.0f;
}

// Adds the stage of one sampler, unless its options are neutral.
//
// A stage gets the tokens that are left, at least one unless an earlier stage removed all. Their logits are finite, unless
// the stage before cuts tokens off with minus infinity: `likely` drops those. `p` is not set, or old. The array may be
// unsorted; `sorted` says so. A stage keeps the order or, if it sorts, sets `sorted`. It should keep a token: llama.cpp's
// samplers may abort on an empty array, and an empty result is LP_ERROR_MASK. Only stages that draw by themselves, such as
// mirostat, set `selected`.
void add_stage(lp_sampler &s, lp_sampler_name name, const lp_sampling_options &o) {
    const auto other = [&](llama_sampler *stage) { s.add(Kind::other, 0, stage); };
    const auto keep  = static_cast<size_t>(std::max(o.min_keep, 1));
    // A stage that may keep more than its value says is llama.cpp's own: scans and the graph keep what the value says.
    const auto cut = [&](Kind kind, float value, llama_sampler *stage) { s.add(keep > 1 ? Kind::other : kind, value, stage); };
    switch (name) {
        case LP_SAMPLER_PENALTIES:
            if (penalizes(o)) {
                other(llama_sampler_init_penalties(s.n_vocab, o.repeat_last_n, o.repeat_penalty, o.frequency_penalty,
                                                   o.presence_penalty));
            }
            return;
        case LP_SAMPLER_DRY:
            if (o.dry) {
                other(llama_sampler_clone(reinterpret_cast<const llama_sampler *>(o.dry)));
            }
            return;
        case LP_SAMPLER_TOP_N_SIGMA:
            if (o.top_n_sigma > 0) {
                other(llama_sampler_init_top_n_sigma(o.top_n_sigma));
                other(likely());  // it leaves the tokens that it cuts off, with logits of minus infinity
            }
            return;
        case LP_SAMPLER_TOP_K:
            if (const int k = std::min(o.top_k, s.n_vocab); k > 0) {
                s.add(Kind::top_k, static_cast<float>(k), llama_sampler_init_top_k(k));
            }
            return;
        case LP_SAMPLER_TYPICAL_P:
            if (o.typical_p < 1) {
                other(likely());
                other(llama_sampler_init_typical(o.typical_p, keep));
            }
            return;
        case LP_SAMPLER_TOP_P:
            if (o.top_p < 1) {
                cut(Kind::top_p, o.top_p, llama_sampler_init_top_p(o.top_p, keep));
            }
            return;
        case LP_SAMPLER_MIN_P:
            if (o.min_p > 0) {
                cut(Kind::min_p, o.min_p, llama_sampler_init_min_p(o.min_p, keep));
            }
            return;
        case LP_SAMPLER_XTC:
            if (o.xtc_probability > 0) {
                other(llama_sampler_init_xtc(o.xtc_probability, o.xtc_threshold, keep, short_seed(s, 1)));
            }
            return;
        case LP_SAMPLER_TEMPERATURE:
            if (o.dynatemp_range > 0) {
                other(likely());
                other(llama_sampler_init_temp_ext(o.temperature, o.dynatemp_range, o.dynatemp_exponent));
            } else if (o.temperature < 1e-6f) {  // a division by less could make logits infinite, and has the same result
                s.make_greedy();
            } else if (o.temperature != 1) {
                s.add(Kind::temperature, o.temperature, llama_sampler_init_temp(o.temperature));
            }
            return;
        case LP_SAMPLER_INFILL:
            if (o.infill) {
                other(infill_of(&s));
            }
            return;
    }
    throw std::runtime_error("there is no such sampler");
}

// Adds the samplers of a request in their order, with two exceptions: penalties and DRY at the front are changes of a few
// logits, not stages, and so they always are for a greedy draw, which needs no other sampler.
void add_samplers(lp_sampler &s, const lp_sampling_options &o) {
    std::vector<lp_sampler_name> order;
    for (int i = 0; i < o.n_order; i++) {
        order.push_back(static_cast<lp_sampler_name>(o.order[i]));
    }
    const auto find      = [&](lp_sampler_name name) { return std::find(order.begin(), order.end(), name); };
    const bool is_greedy = o.temperature == 0 && find(LP_SAMPLER_TEMPERATURE) != order.end();
    bool       has_dry = false, has_penalties = false;
    for (const lp_sampler_name name : { LP_SAMPLER_PENALTIES, LP_SAMPLER_DRY }) {
        const auto found = find(name);
        if (found == order.end() || !(is_greedy || found == order.begin())) {
            continue;
        }
        order.erase(found);
        (name == LP_SAMPLER_DRY ? has_dry : has_penalties) = true;
    }
    if (has_penalties) {
        s.set_penalties(o.repeat_last_n, o.repeat_penalty, o.frequency_penalty, o.presence_penalty);
    } else {
        s.set_penalties(0, 1.0f, 0.0f, 0.0f);
    }
    if (!has_dry) {
        s.dry.reset();
    } else if (o.dry) {
        s.dry.reset(llama_sampler_clone(reinterpret_cast<const llama_sampler *>(o.dry)));
    }
    s.clear_stages();
    if (is_greedy) {
        s.make_greedy();
        return;
    }
    for (const lp_sampler_name name : order) {
        const bool is_kept = name == LP_SAMPLER_PENALTIES || name == LP_SAMPLER_DRY || name == LP_SAMPLER_TEMPERATURE;
        if (!o.mirostat || is_kept) {
            add_stage(s, name, o);
        }
    }
    // The last stage may draw by itself.
    if (o.mirostat) {
        s.add(Kind::other, 0, likely());
        s.add(Kind::other, 0,
              o.mirostat == 1 ? llama_sampler_init_mirostat(s.n_vocab, short_seed(s, 2), o.mirostat_tau, o.mirostat_eta, 100)
                              : llama_sampler_init_mirostat_v2(short_seed(s, 2), o.mirostat_tau, o.mirostat_eta));
    } else if (o.adaptive_target >= 0) {
        s.add(Kind::other, 0, llama_sampler_init_adaptive_p(o.adaptive_target, o.adaptive_decay, short_seed(s, 3)));
    }
}

}  // namespace

void lp_sampler::configure(const lp_sampling_options &o) {
    // What may fail comes first.
    if (!o.grammar) {
        grammar.reset();
        grammar_text_.clear();
    } else if (const std::string text = std::string(o.grammar_root) + '\n' + o.grammar; text != grammar_text_) {
        SamplerPtr made(llama_sampler_init_grammar(vocab, o.grammar, o.grammar_root));
        if (!made) {
            throw std::runtime_error("llama.cpp cannot parse the grammar");
        }
        grammar       = std::move(made);
        grammar_text_ = text;
    }
    biases.clear();
    forbidden.clear();
    for (int i = 0; i < o.n_biases; i++) {
        if (std::isfinite(o.biases[i])) {
            biases[o.bias_tokens[i]] += o.biases[i];
        } else {
            forbidden.push_back(o.bias_tokens[i]);
        }
    }
    allowed.assign(o.allowed ? static_cast<size_t>(n_vocab + 31) / 32 : 0, 0);
    for (int i = 0; i < o.n_allowed; i++) {
        allowed[static_cast<size_t>(o.allowed[i]) / 32] |= 1u << (o.allowed[i] % 32);
    }
    bad_tokens.clear();
    bad_words.clear();
    for (int i = 0, begin = 0; i < o.n_bad_words; begin = o.bad_word_ends[i++]) {
        if (o.bad_word_ends[i] - begin == 1) {
            bad_tokens.push_back(o.bad_word_tokens[begin]);
        } else {
            bad_words.emplace_back(o.bad_word_tokens + begin, o.bad_word_tokens + o.bad_word_ends[i]);
        }
    }
    min_tokens = o.min_tokens;
    ends.assign(o.end_tokens, o.end_tokens + o.n_end_tokens);
    reasoning.reset();
    if (o.reasoning_budget >= 0 && o.n_reasoning_close > 0) {
        reasoning = std::make_unique<lp::ReasoningLimit>(
                vocab, o.reasoning_budget, o.reasoning_opens, o.reasoning_ends,
                std::vector<int32_t>(o.reasoning_close, o.reasoning_close + o.n_reasoning_close), o.reasoning_is_open);
    }
    needs_row  = o.needs_row;
    has_guide  = o.has_guide;
    n_logprobs = o.n_logprobs;
    n_noted    = 0;
    add_samplers(*this, o);
}

// ---- C entries
lp_sampling_options lp_sampling_default_options(void) {
    lp_sampling_options o = {};
    o.repeat_penalty = o.typical_p = o.top_p = o.temperature = o.dynatemp_exponent = 1.0f;
    o.top_n_sigma = o.adaptive_target = -1.0f;
    o.n_logprobs = o.reasoning_budget = -1;
    return o;
}

lp_sampler *lp_sampler_new(const llama_vocab *vocab, uint64_t seed, const lp_sampling_options *options) {
    return lp::guard(nullptr, [&] {
        auto made = std::make_unique<lp_sampler>(vocab, seed);
        made->configure(*options);
        return made.release();
    });
}

void lp_sampler_free(lp_sampler *s) { delete s; }

int lp_sampler_configure(lp_sampler *s, const lp_sampling_options *options) {
    return lp::guard(LP_ERROR, [&] {
        s->configure(*options);
        return 0;
    });
}

lp_dry *lp_dry_new(const llama_vocab *vocab, float multiplier, float base, int allowed_length, int last_n, int n_breakers,
                   const char **breakers) {
    return lp::guard(nullptr, [&] {
        return reinterpret_cast<lp_dry *>(
                llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n, breakers, n_breakers));
    });
}

void lp_dry_free(lp_dry *dry) { llama_sampler_free(reinterpret_cast<llama_sampler *>(dry)); }

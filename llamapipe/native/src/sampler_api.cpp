// The C entries of samplers: their options, and drawing for the rows of a step.
#include "guard.hpp"
#include "pipeline.hpp"
#include "sampler.hpp"
#include "scan.hpp"

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

void lp_sampler_needs_row(lp_sampler * s) { s->needs_row = true; }

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
    return lp::guard(LP_ERROR, [&] { return s->draw(logits, token); });
}

int lp_sampler_note(lp_sampler * s, const float * logits, int32_t token) {
    return lp::guard(LP_ERROR, [&] {
        if (s->n_logprobs >= 0) {
            s->note(logits, token);
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

namespace {

// Draws and accepts a token for each row that has none yet; how many could not be drawn (their requests fail, the others go on), whose
// token is the code of the error then.
template <typename Row> int draw_rows(int n_rows, lp_sampler ** samplers, int32_t * tokens, Row && row) {
    int n_failed = 0;
    for (int i = 0; i < n_rows; i++) {
        if (tokens[i] >= 0) {
            samplers[i]->take(tokens[i]);
            continue;
        }
        const float * logits = row(i);
        if (!logits) {
            lp::set_error("this entry of the step is not an output");
            return LP_ERROR;
        }
        const int code = lp::guard(LP_ERROR, [&] {
            const int failed = samplers[i]->draw(logits, &tokens[i]);
            if (failed == 0) {
                samplers[i]->accepted(tokens[i]);
            }
            return failed;
        });
        if (code != 0) {
            tokens[i] = code == LP_ERROR_LOGITS ? -1 : code == LP_ERROR_MASK ? -2 : -3;
            n_failed++;
        }
    }
    return n_failed;
}

}  // namespace

namespace {

// Runs `body` with a step that was waited for; its code if it failed.
template <typename Body> int with_step(lp_pipeline * pipeline, int64_t number, Body && body) {
    return lp::guard(LP_ERROR, [&] {
        lp::Core & core = *pipeline->shared;
        lp::Step * step = core.finish(number);
        if (!step) {
            return (int) LP_ERROR;
        }
        if (step->state == lp::State::failed) {
            lp::set_error(step->error.c_str());
            return step->code;
        }
        const int64_t begin_ns = core.tracing() ? lp::now_ns() : 0;
        const int     code     = body(core, *step);
        if (core.tracing()) {
            core.note_span(*step, lp::Stage::sample, begin_ns, lp::now_ns());
        }
        return code;
    });
}

}  // namespace

int lp_sample_rows(lp_pipeline * pipeline, int64_t number, int n_rows, const int32_t * entries, lp_sampler ** samplers,
                   int32_t * tokens) {
    return with_step(pipeline, number, [&](lp::Core & core, lp::Step & step) {
        int n_drawn = 0;
        for (int i = 0; i < n_rows; i++) {
            tokens[i] = core.drawn(step, entries[i], samplers[i]);
            n_drawn += tokens[i] >= 0;
        }
        if (n_drawn > 0) {
            core.note_drawn(n_drawn);
        }
        return draw_rows(n_rows, samplers, tokens, [&](int i) { return core.row(step, entries[i]); });
    });
}

const float * lp_step_row(lp_pipeline * pipeline, int64_t number, int entry) {
    const float * row = nullptr;
    with_step(pipeline, number, [&](lp::Core & core, lp::Step & step) {
        row = core.row(step, entry);
        return 0;
    });
    return row;
}

int lp_candidates(const float * rows, int n_rows, int n_vocab, int k, int32_t * ids, float * logits, double * log_sum_exp) {
    return lp::guard(LP_ERROR, [&] {
        std::vector<llama_token_data> top;
        for (int i = 0; i < n_rows; i++) {
            const float * row = rows + (size_t) i * (size_t) n_vocab;
            log_sum_exp[i]    = lp::log_sum_exp(row, n_vocab);
            lp::top_k(row, n_vocab, k, top);
            top.resize((size_t) k, { -1, -INFINITY, 0.0f });
            for (int j = 0; j < k; j++) {
                ids[(size_t) i * (size_t) k + (size_t) j]    = top[(size_t) j].id;
                logits[(size_t) i * (size_t) k + (size_t) j] = top[(size_t) j].logit;
            }
        }
        return 0;
    });
}

int lp_score_rows(lp_pipeline * pipeline, int64_t number, int n, const int32_t * entries, const int32_t * targets,
                  float * logprobs, int8_t * greedy, int n_top, int32_t * top_ids, float * top_logprobs) {
    return with_step(pipeline, number, [&](lp::Core & core, lp::Step & step) {
        std::vector<llama_token_data> top;
        double                        total = 0;
        int32_t                       best  = -1;
        for (int i = 0; i < n; i++) {
            const float * row = core.row(step, entries[i]);
            if (!row) {
                lp::set_error("this entry of the step is not an output");
                return (int) LP_ERROR;
            }
            if (i == 0 || entries[i] != entries[i - 1]) {
                total = lp::log_sum_exp(row, core.n_vocab());
                best  = lp::argmax(row, core.n_vocab());
                if (n_top > 0) {
                    lp::top_k(row, core.n_vocab(), n_top, top);
                    top.resize((size_t) n_top, { -1, -INFINITY, 0.0f });
                }
            }
            logprobs[i] = (float) (row[targets[i]] - total);
            greedy[i]   = targets[i] == best;
            for (int k = 0; k < n_top; k++) {
                top_ids[i * n_top + k]      = top[(size_t) k].id;
                top_logprobs[i * n_top + k] = (float) (top[(size_t) k].logit - total);
            }
        }
        return 0;
    });
}

int lp_sample_plain(llama_context * ctx, int n_rows, const int32_t * rows, lp_sampler ** samplers, int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        std::fill(tokens, tokens + n_rows, -1);
        return draw_rows(n_rows, samplers, tokens, [&](int i) { return llama_get_logits_ith(ctx, rows[i]); });
    });
}

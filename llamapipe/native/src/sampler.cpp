// One request's sampling: changes of logits, truncation by llama.cpp's samplers, and the final draw, which is ours.
//
// The draw takes one uniform number in [0, 1) per token from the request's own generator (splitmix64: Steele, Lea,
// Flood, "Fast splittable pseudorandom number generators", 2014), so a seed gives the same text whatever else is in
// the batch. Penalties and biases touch few tokens, so they are applied to a copy of the row token by token rather
// than by looking up every token of the vocabulary.
#include "guard.hpp"
#include "pipeline.hpp"
#include "sampler_graph.hpp"
#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

namespace {

const char * likely_name(const llama_sampler *) { return "likely"; }

// Drops what has no probability in float32, before a sampler that takes the logarithm of it: no such token would be kept
// anyway, but the sum of all is not a number then.
void keep_likely(llama_sampler *, llama_token_data_array * a) {
    float top = a->data[0].logit;
    for (size_t i = 1; i < a->size; i++) {
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

}  // namespace

struct lp_sampler {
    struct chain_free {
        void operator()(llama_sampler * s) const { llama_sampler_free(s); }
    };

    int      n_vocab;
    uint64_t state;               // of the generator
    bool     greedy        = false;
    int      top_k         = 0;   // > 0: the chain starts with it, so only that many candidates are gathered
    bool     has_chain     = false;
    int      last_n        = 0;   // penalty window in tokens
    float    repeat        = 1.0f;
    float    frequency     = 0.0f;
    float    presence      = 0.0f;

    std::vector<std::pair<int32_t, float>>     biases;
    std::unique_ptr<llama_sampler, chain_free> chain;
    std::deque<int32_t>                        window;  // the last accepted tokens, oldest first
    std::unordered_map<int32_t, int>           counts;  // of the tokens in the window
    std::vector<float>                         row;     // the changed copy
    std::vector<llama_token_data>              candidates;
    lp::GraphStages                            stages;

    bool in_graph(lp::GraphRow * row) {
        if (!biases.empty() || penalizes()) {
            return false;
        }
        const uint64_t before = state;
        const double   next   = stages.greedy() ? 0.0 : uniform();
        state                 = before;  // it is used up when the token is taken
        return stages.row(n_vocab, next, row);
    }

    void take(int32_t token) {
        if (!stages.greedy()) {
            uniform();
        }
        accept(token);
    }

    bool penalizes() const { return last_n > 0 && (repeat != 1.0f || frequency != 0.0f || presence != 0.0f); }

    double uniform() {
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z          = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return (double) ((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
    }

    void add(llama_sampler * stage) {
        if (!chain) {
            chain.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
        }
        llama_sampler_chain_add(chain.get(), stage);
        has_chain = true;
    }

    void accept(int32_t token) {
        if (!penalizes()) {
            return;
        }
        window.push_back(token);
        counts[token]++;
        while ((int) window.size() > last_n) {
            const auto oldest = counts.find(window.front());
            if (--oldest->second == 0) {
                counts.erase(oldest);
            }
            window.pop_front();
        }
    }

    // The row with biases and penalties applied; the row itself when there are none.
    const float * changed(const float * logits) {
        if (biases.empty() && counts.empty()) {
            return logits;
        }
        row.assign(logits, logits + n_vocab);
        for (const auto & [token, bias] : biases) {
            row[token] += bias;
        }
        for (const auto & [token, count] : counts) {
            float & l = row[token];
            l         = l <= 0 ? l * repeat : l / repeat;
            l -= (float) count * frequency + presence;
            l = std::min(l, 1e8f);  // llama.cpp sorts by a rounded multiple of it, an int
        }
        return row.data();
    }

    int draw(const float * logits, int32_t * token) {
        logits = changed(logits);
        if (greedy) {
            *token = lp::argmax(logits, n_vocab);
            return *token < 0 ? LP_ERROR_LOGITS : 0;
        }
        const bool some = top_k > 0 && top_k < n_vocab;
        if (some) {
            lp::top_k(logits, n_vocab, top_k, candidates);
        } else {
            lp::all(logits, n_vocab, candidates);
        }
        if (candidates.empty()) {
            return LP_ERROR_LOGITS;
        }
        llama_token_data_array a = { candidates.data(), candidates.size(), -1, some };
        if (has_chain) {
            llama_sampler_apply(chain.get(), &a);
        }
        *token = pick(a);
        return 0;
    }

    int32_t pick(const llama_token_data_array & a) {
        float top = a.data[0].logit;
        for (size_t i = 1; i < a.size; i++) {
            top = std::max(top, a.data[i].logit);
        }
        double sum = 0;
        for (size_t i = 0; i < a.size; i++) {
            sum += std::exp((double) a.data[i].logit - top);
        }
        double left = uniform() * sum;
        size_t last = 0;  // the last bin of nonzero width: rounding must never choose an impossible token
        for (size_t i = 0; i < a.size; i++) {
            const double w = std::exp((double) a.data[i].logit - top);
            if (w > 0) {
                last = i;
                left -= w;
                if (left < 0) {
                    break;
                }
            }
        }
        return a.data[last].id;
    }
};

lp_sampler * lp_sampler_new(const llama_vocab * vocab, uint64_t seed) {
    return lp::guard((lp_sampler *) nullptr, [&] {
        auto s     = std::make_unique<lp_sampler>();
        s->n_vocab = llama_vocab_n_tokens(vocab);
        s->state   = seed;
        return s.release();
    });
}

void lp_sampler_free(lp_sampler * s) { delete s; }

int lp_sampler_set_bias(lp_sampler * s, int n, const int32_t * tokens, const float * biases) {
    return lp::guard(LP_ERROR, [&] {
        s->biases.clear();
        for (int i = 0; i < n; i++) {
            s->biases.emplace_back(tokens[i], biases[i]);
        }
        return 0;
    });
}

int lp_sampler_set_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence) {
    s->last_n    = last_n;
    s->repeat    = repeat;
    s->frequency = frequency;
    s->presence  = presence;
    return 0;
}

int lp_sampler_add_top_k(lp_sampler * s, int k) {
    if (k <= 0) {
        return 0;
    }
    return lp::guard(LP_ERROR, [&] {
        s->stages.add_top_k(k);
        if (s->has_chain) {
            s->add(llama_sampler_init_top_k(k));
        } else {
            s->top_k = s->top_k > 0 ? std::min(k, s->top_k) : k;
        }
        return 0;
    });
}

int lp_sampler_add_typical(lp_sampler * s, float p) {
    return lp::guard(LP_ERROR, [&] {
        s->stages.add_other();
        s->add(likely());
        s->add(llama_sampler_init_typical(p, 1));
        return 0;
    });
}

int lp_sampler_add_top_p(lp_sampler * s, float p) {
    return lp::guard(LP_ERROR, [&] { s->stages.add_top_p(p); s->add(llama_sampler_init_top_p(p, 1)); return 0; });
}

int lp_sampler_add_min_p(lp_sampler * s, float p) {
    return lp::guard(LP_ERROR, [&] { s->stages.add_min_p(p); s->add(llama_sampler_init_min_p(p, 1)); return 0; });
}

int lp_sampler_add_temperature(lp_sampler * s, float t) {
    return lp::guard(LP_ERROR, [&] {
        if (t < 1e-6f) {  // dividing by less could make logits infinite, and would choose the same token
            s->greedy = true;
            s->stages.add_greedy();
        } else if (t != 1.0f) {
            s->stages.add_temperature(t);
            s->add(llama_sampler_init_temp(t));
        }
        return 0;
    });
}

bool lp::in_graph(lp_sampler * s, GraphRow * row) { return s->in_graph(row); }

int lp_sampler_accept(lp_sampler * s, int n, const int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accept(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_reset(lp_sampler * s) {
    return lp::guard(LP_ERROR, [&] {
        s->window.clear();
        s->counts.clear();
        if (s->chain) {
            llama_sampler_reset(s->chain.get());
        }
        return 0;
    });
}

int lp_sampler_draw(lp_sampler * s, const float * logits, int32_t * token) {
    return lp::guard(LP_ERROR, [&] { return s->draw(logits, token); });
}

namespace {

// Draws and accepts a token for each row that has none; how many rows had no finite logit (their request fails, the others
// go on).
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
        if (samplers[i]->draw(logits, &tokens[i]) == 0) {
            samplers[i]->accept(tokens[i]);
        } else {
            tokens[i] = -1;
            n_failed++;
        }
    }
    return n_failed;
}

}  // namespace

int lp_sample_rows(lp_pipeline * pipeline, int64_t number, int n_rows, const int32_t * entries, lp_sampler ** samplers,
                   int32_t * tokens) {
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
        int           n_drawn  = 0;
        for (int i = 0; i < n_rows; i++) {
            tokens[i] = core.drawn(*step, entries[i], samplers[i]);
            n_drawn += tokens[i] >= 0;
        }
        const int     n_failed =
            draw_rows(n_rows, samplers, tokens, [&](int i) { return core.row(*step, entries[i]); });
        if (n_drawn > 0) {
            core.note_drawn(n_drawn);
        }
        if (core.tracing()) {
            core.note_span(*step, lp::Stage::sample, begin_ns, lp::now_ns());
        }
        return n_failed;
    });
}

int lp_sample_plain(llama_context * ctx, int n_rows, const int32_t * rows, lp_sampler ** samplers, int32_t * tokens) {
    return lp::guard(LP_ERROR, [&] {
        std::fill(tokens, tokens + n_rows, -1);
        return draw_rows(n_rows, samplers, tokens, [&](int i) { return llama_get_logits_ith(ctx, rows[i]); });
    });
}

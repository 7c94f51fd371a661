// One request's sampling: changes of logits, then truncation, then the final draw, which is ours.
//
//   changes      forbidden tokens (biases of minus infinity, allowed tokens, bad words, a mask, a grammar), biases,
//                penalties and DRY. They concern few tokens, or are checked token by token.
//   truncation   top_k, top_p or min_p as the first stage scan the row itself, without an array of all tokens. Every other
//                stage is llama.cpp's own sampler, over the tokens that are left.
//   draw         one uniform number in [0, 1) per token from the request's own generator
//
// Only the top candidates by raw logit, plus the tokens whose logits were modified, are examined. This is exact as long as
// the requested number of candidates, after all modifications, still ranks above the smallest unmodified one. It is also
// exact with fewer candidates if the top_p or min_p that follows the top_k cuts off all others, whatever they are.
// Otherwise more candidates are examined, up to the full row. With a partial row the same rule says whether the full row
// must be fetched.
#pragma once

#include "guesser.hpp"
#include "native.h"
#include "reasoning_limit.hpp"

#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace lp {

// ---- the logits of one output that are on the host: the full row, or a partial row of the largest logits and a few others
class Row {
public:
    Row() = default;
    explicit Row(const float *all) : all_(all) {}
    // A partial row: `ids` (as floats) and `logits` of the `n` largest, finite and in descending order, on ties the lower ids
    // first. Any logits that equal the last one may be missing. `other_ids` may be among `ids`. `best`: the most probable token.
    Row(const float *ids, const float *logits, int n, const float *other_ids, const float *other_logits, int n_others,
        int32_t best, double log_sum_exp)
        : ids_(ids), logits_(logits), other_ids_(other_ids), other_logits_(other_logits), n_(n), n_others_(n_others), best_(best),
          log_sum_exp_(log_sum_exp) {}

    // The full row by token, or null.
    const float *all() const { return all_; }

    // ---- of a partial row
    int     n() const { return n_; }
    int32_t id(int i) const { return static_cast<int32_t>(ids_[i]); }
    float   logit(int i) const { return logits_[i]; }
    float   bar() const { return n_ > 0 ? logits_[n_ - 1] : INFINITY; }  // no missing logit is larger
    bool    is_exact(int n) const { return n == 0 || (n < n_ && logits_[n - 1] > bar()); }  // whether the n largest are known
    int32_t best() const { return best_; }
    double  log_sum_exp() const { return log_sum_exp_; }  // of all, float32

    // Whether a token's logit is known; if not, `logit` is its upper bound.
    bool find(int32_t token, float *logit) const {
        if (all_) {
            *logit = all_[token];
            return true;
        }
        for (int i = 0; i < n_; i++) {
            if (ids_[i] == static_cast<float>(token)) {
                *logit = logits_[i];
                return true;
            }
        }
        for (int i = 0; i < n_others_; i++) {
            if (other_ids_[i] == static_cast<float>(token)) {
                *logit = other_logits_[i];
                return true;
            }
        }
        *logit = bar();
        return false;
    }

private:
    const float *all_ = nullptr;
    const float *ids_ = nullptr, *logits_ = nullptr, *other_ids_ = nullptr, *other_logits_ = nullptr;
    int          n_ = 0, n_others_ = 0;
    int32_t      best_        = -1;
    double       log_sum_exp_ = 0;
};

enum class Kind { none, top_k, top_p, min_p, temperature, other };  // in llama.cpp's order

struct StageInfo {  // a stage of the chain
    Kind  kind;
    float value;
};

struct SamplerFree {
    void operator()(llama_sampler *s) const { llama_sampler_free(s); }
};
using SamplerPtr = std::unique_ptr<llama_sampler, SamplerFree>;

}  // namespace lp

struct lp_sampler {
    lp_sampler(const llama_vocab *vocab, uint64_t seed);

    // Draws a token; does not accept it. Returns 0, LP_ERROR_LOGITS, LP_ERROR_MASK, or `kNeedsFullRow` with nothing changed.
    static constexpr int kNeedsFullRow = 1;
    int                  draw(const lp::Row &row, int32_t *token);

    void accept(int32_t token);          // a token of the sequence: for penalties, DRY and bad words
    void accept_grammar(int32_t token);  // throws where the grammar does not allow it, and refuses everything from then on
    int  n_allowed(int n, const int32_t *tokens) const;  // how many of these the grammar allows, one after the other
    void accepted(int32_t token);        // a drawn token: both of the above, and counts it
    void accept_reasoning(int32_t token);  // a token of the answer so far, for the limit of reasoning
    void reset();                        // forgets the accepted tokens
    // Records log-probabilities of a token: 0, or `kNeedsFullRow`.
    int note(const lp::Row &row, int32_t token);

    // The next number of the generator (splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
    // generators", 2014), and taking it.
    double peek() const;
    void   advance() { state += 0x9e3779b97f4a7c15ull; }

    // Takes a request's options; see lp_sampler_configure. Throws std::runtime_error.
    void configure(const lp_sampling_options &options);
    void add(lp::Kind kind, float value, llama_sampler *stage);  // takes ownership; throws if there is no stage
    void clear_stages();
    bool greedy() const { return greedy_; }
    // Whether this one token must not be drawn next.
    bool is_forbidden(int32_t token);
    void set_penalties(int n, float repeat, float frequency, float presence);
    // Whether the next draw uses the unchanged row and stages only.
    bool is_plain() const {
        return !needs_row && !has_guide && biases.empty() && forbidden.empty() && bad_tokens.empty() && bad_words.empty() &&
               !checks() && !penalizes() && n_accepted_ >= min_tokens && forced() < 0;
    }
    void take(int32_t token) {  // drawn by the graph, with the uniform number that `peek` returned
        if (!greedy_) {
            advance();
        }
        accepted(token);
    }
    void make_greedy() { greedy_ = true; }
    // The token that ends reasoning over its limit; -1: the next token is drawn.
    int32_t forced() const { return reasoning ? reasoning->forced() : -1; }

    const llama_vocab *const vocab;
    const int                n_vocab;
    const uint64_t           seed;
    uint64_t                 state;

    // changes
    std::unordered_map<int32_t, float> biases;        // finite
    std::vector<int32_t>               forbidden;     // by biases
    std::vector<int32_t>               bad_tokens;    // bad words of one token
    std::vector<uint32_t>              allowed;       // a bit for each token; empty: all
    const uint32_t                    *mask = nullptr; // the same for the next draws; the caller's
    std::vector<std::vector<int32_t>>  bad_words;     // of at least two tokens
    bool                               needs_row  = false;  // a logits processor looks at the row first
    bool                               has_guide  = false;  // a mask will be set before the draw
    int                                min_tokens = 0;
    std::vector<int32_t>               ends;          // forbidden until min_tokens were drawn
    lp::SamplerPtr                     grammar, dry;

    // of the last draws, if asked for: log-probabilities in the unchanged row
    int n_logprobs = -1;      // of that many most probable tokens, too; < 0: not asked for
    struct Noted {
        float                         logprob = 0;      // of the token drawn
        std::vector<llama_token_data> top;              // p is the log-probability
    };
    std::vector<Noted> noted;                // of the first `n_noted` draws since `n_noted` was set to 0
    size_t             n_noted = 0;

    std::vector<lp::StageInfo> stages;

    std::unique_ptr<lp::Guesser>        guesser;  // of the tokens that follow; null: none is wanted
    std::unique_ptr<lp::ReasoningLimit> reasoning;  // null: reasoning is not limited

    bool penalizes() const { return last_n_ > 0 && (repeat_ != 1.0f || frequency_ != 0.0f || presence_ != 0.0f); }
    // Fills in at most `n` tokens whose logits the changes may raise; returns how many.
    int raised(float *tokens, int n) const;
    // How many candidates the first stage needs; n_vocab if it needs the full row.
    int n_wanted() const;

private:
    bool        checks() const { return !allowed.empty() || mask || grammar || dry; }
    static bool has_bit(const uint32_t *bits, int32_t token) { return bits[token / 32] >> (token % 32) & 1; }
    bool        may(int32_t token) const {
        return (allowed.empty() || has_bit(allowed.data(), token)) && (!mask || has_bit(mask, token));
    }
    bool                               allowed_by_grammar(int32_t token) const;
    bool                               is_allowed(int32_t token) const;
    void                               collect_changes(const lp::Row &row, bool with_ends);
    int                                choose(const lp::Row &row, int32_t *token);
    void                               collect_allowed(const float *logits);
    void                               check(std::vector<llama_token_data> &candidates);
    const float                       *change(const float *logits);
    int                                gather(const lp::Row &row, size_t n_wanted);
    bool                               cuts_off(size_t n, size_t n_missing, float bar);
    int32_t                            pick(const llama_token_data_array &a);
    bool                               greedy_ = false, broken_ = false;
    int                                last_n_ = 0;  // penalty window in tokens
    float                              repeat_ = 1.0f, frequency_ = 0.0f, presence_ = 0.0f;
    std::string                        grammar_text_;
    lp::SamplerPtr                     first_;      // the first stage, unless a scan of the row replaces it
    lp::SamplerPtr                     chain_;      // the stages after it
    std::deque<int32_t>                window_;     // the last accepted tokens, for penalties, oldest first
    std::deque<int32_t>                tail_;       // the last accepted tokens, for bad words
    std::unordered_map<int32_t, int>   counts_;     // of the tokens in the window
    int                                n_accepted_ = 0;
    std::unordered_map<int32_t, float> changed_;    // logits that differ from the row's; minus infinity: forbidden
    std::vector<llama_token_data>      candidates_;
    std::vector<float>                 row_;        // the changed copy
    std::vector<double>                weights_;
};

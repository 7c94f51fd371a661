// One request's sampling: changes of logits, then truncation, then the final draw, which is ours.
//
//   changes      what is forbidden (biases of minus infinity, allowed tokens, bad words, a mask, a grammar), biases,
//                penalties, DRY: all of it known for few tokens, or checked token by token
//   truncation   top_k, top_p or min_p as the first stage are looked for in the row itself, without an array of all
//                tokens; every other stage is llama.cpp's own sampler, over what is left
//   draw         one uniform number in [0, 1) per token from the request's own generator
//
// Candidates: the largest raw logits are enough when, after all changes, as many of them as are wanted lie above the
// smallest of them, because nothing else was raised; or fewer, if a top_p or min_p behind the top_k cuts the others off
// whatever they are. Otherwise more are taken, up to the whole row. Where only candidates are on the host (a Row that is not
// whole) the same rule says whether the rest must be fetched.
#pragma once

#include "native.h"
#include "row.hpp"

#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace lp {

enum class Kind { none, top_k, top_p, min_p, temperature, other };  // in llama.cpp's order

struct StageInfo {  // what was added to a chain, in its order
    Kind  kind;
    float value;
};

struct SamplerFree {
    void operator()(llama_sampler * s) const { llama_sampler_free(s); }
};
using SamplerPtr = std::unique_ptr<llama_sampler, SamplerFree>;

}  // namespace lp

struct lp_sampler {
    lp_sampler(const llama_vocab * vocab, uint64_t seed);

    // Draws a token; does not accept it. 0, or LP_ERROR_LOGITS, LP_ERROR_MASK; `needs_full_row`, with nothing changed, where the
    // whole row is needed.
    static constexpr int needs_full_row = 1;
    int draw(const lp::Row & row, int32_t * token);

    void accept(int32_t token);     // of the sequence: for penalties, DRY and bad words
    void accept_grammar(int32_t token);  // throws where the grammar does not go on with it, which is of no use then
    void accepted(int32_t token);   // drawn: for both, and counted
    void reset();                   // forgets what was accepted
    // What the row says of a token, for those who want to know: 0, or `needs_full_row`.
    int note(const lp::Row & row, int32_t token);

    // The next number of the generator (splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
    // generators", 2014), and taking it.
    double peek() const;
    void   advance() { state += 0x9e3779b97f4a7c15ull; }

    void add(lp::Kind kind, float value, llama_sampler * stage);
    bool greedy() const { return greedy_; }
    // Whether this token must not be drawn next, found out for itself.
    bool is_forbidden(int32_t token);
    void set_penalties(int n, float repeat, float frequency, float presence);
    // Whether the next draw is from the unchanged row, by stages alone.
    bool is_plain() const {
        return !needs_row && !guided && biases.empty() && forbidden.empty() && bad_tokens.empty() && bad_words.empty() && !checks() &&
               !penalizes() && n_accepted_ >= min_tokens;
    }
    void take(int32_t token) {  // drawn elsewhere with the number that was peeked at
        if (!greedy_) {
            advance();
        }
        accepted(token);
    }
    void make_greedy() { greedy_ = true; }

    const llama_vocab * const vocab;
    const int                 n_vocab;
    const uint64_t            seed;
    uint64_t                  state;

    // changes
    std::unordered_map<int32_t, float>   biases;        // finite
    std::vector<int32_t>                 forbidden;     // by biases
    std::vector<int32_t>                 bad_tokens;    // bad words of one token
    std::vector<uint32_t>                allowed;       // a bit for each token; empty: all
    const uint32_t *                     mask = nullptr; // the same for the next draws; the caller's
    std::vector<std::vector<int32_t>>    bad_words;     // of at least two tokens
    bool                                 needs_row = false;  // something outside looks at the row first
    bool                                 guided    = false;  // there will be a mask when it is drawn from
    int                                  min_tokens = 0;
    std::vector<int32_t>                 ends;          // forbidden until there are so many
    lp::SamplerPtr                       grammar, dry;

    // of the row drawn from last, where asked for: log-probabilities of the unchanged row
    int                           n_logprobs = -1;      // how many of the most probable; < 0: not asked for
    double                        log_sum_exp = 0;
    float                         logprob = 0;          // of the token drawn
    std::vector<llama_token_data> top;                  // p is the log-probability

    std::vector<lp::StageInfo> stages;

    bool penalizes() const { return last_n_ > 0 && (repeat_ != 1.0f || frequency_ != 0.0f || presence_ != 0.0f); }
    // Tokens whose logits the changes may raise: at most `n` of them.
    int raised(float * tokens, int n) const;
    // How many candidates the first stage wants; all if it needs the row.
    int n_wanted() const;

private:
    bool checks() const { return !allowed.empty() || mask || grammar || dry; }
    bool may(int32_t token) const;
    bool allowed_by_grammar(int32_t token) const;
    void collect_changes(const lp::Row & row, bool with_ends);
    int  choose(const lp::Row & row, int32_t * token);
    void collect_allowed(const float * logits);
    void check(std::vector<llama_token_data> & candidates);
    const float * change(const float * logits);
    int  gather(const lp::Row & row, size_t n_wanted);
    bool cuts_off(size_t n, size_t n_missing, float bar);
    int32_t pick(const llama_token_data_array & a);
    bool  greedy_ = false, broken_ = false;
    int   last_n_ = 0;  // penalty window in tokens
    float repeat_ = 1.0f, frequency_ = 0.0f, presence_ = 0.0f;
    lp::SamplerPtr                       first_;      // the first stage, where it was not looked for in the row
    lp::SamplerPtr                       chain_;      // of what comes after it
    std::deque<int32_t>                  window_;     // the last accepted tokens that penalties look at, oldest first
    std::deque<int32_t>                  tail_;       // as many as the longest bad word has before its last
    std::unordered_map<int32_t, int>     counts_;     // of the tokens in the window
    int                                  n_accepted_ = 0;
    std::unordered_map<int32_t, float>   changed_;    // logits that are not those of the row; minus infinity: forbidden
    std::vector<llama_token_data>        candidates_;
    std::vector<float>                   row_;        // the changed copy
    std::vector<double>                  weights_;
};

// Guesses which tokens follow, from the request's own text and from a text that it is expected to be like.
//
// The guess is what followed an earlier place with the same last tokens. While it is right, it moves along with the text,
// which costs a comparison a token. Where it is wrong, the newest place with the same last three tokens is looked up. Every
// guess is compared with the token that came, whether it was used or not: so the share of right ones is known beforehand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lp {

class Guesser {
public:
    // `prediction`: the expected output; empty: none. `text`: what it follows. `own`: whether the text itself is looked at.
    Guesser(std::vector<int32_t> prediction, const std::vector<int32_t> & text, bool own);

    void add(int32_t token);  // the next token of the text

    bool has_guess() const { return n_matched_ > 0 && next_ < end_ && share() >= least_share; }
    // Fills in at most `n` tokens and the share of such guesses that were right; returns how many.
    int  guess(int n, int32_t * tokens, double * share) const;

private:
    static constexpr size_t n_gram      = 3;
    static constexpr size_t n_sure      = 4;    // tokens that match a prediction at its place, not by chance
    static constexpr double least_share = 0.3;  // with less, no step is that cheap

    // The kind of guess: by the length of the match in the text (under 8, under 24, longer) or the prediction.
    size_t kind() const { return is_predicted_ ? (n_matched_ < n_sure ? 3 : 4) : n_matched_ < 8 ? 0 : n_matched_ < 24 ? 1 : 2; }
    double share() const { return shares_[kind()]; }
    bool   find_in_prediction();
    bool   find_in_text();
    size_t slot(size_t place) const;  // of the n-gram that ends before this place
    void   learn(size_t place);

    std::vector<int32_t>  text_;             // the prediction, a gap, and the text
    std::vector<uint32_t> places_;           // by hash: the newest place after an n-gram; 0: none
    size_t                n_predicted_, n_learned_;
    bool                  own_;
    size_t                next_ = 0, end_ = 0;  // the guessed place, and where what it belongs to ends
    size_t                n_matched_ = 0;    // tokens before it that are the same
    size_t                anchor_    = 0;    // where the prediction was left
    bool                  is_predicted_ = false;
    double                shares_[5] = { 0.4, 0.6, 0.8, 0.5, 0.85 };  // right guesses of one, by kind
};

}  // namespace lp

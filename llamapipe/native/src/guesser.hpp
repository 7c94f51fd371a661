// Guesses which tokens follow, from the request's own text and from a text that it is expected to be like.
//
// The guess is what followed an earlier place with the same last tokens. While it is right, it moves along with the text,
// which costs a comparison a token. Where it is wrong, a copy with a change is the likeliest: the guess continues behind the
// token that was replaced, or from a place nearby where the last tokens are the same. What replaced what is remembered, and
// guessed where the same tokens would come again: a name that was changed once is changed everywhere. Else the newest place
// with the same last three tokens is looked up. Every guess is compared with the token that came, whether it was used or not:
// so the share of right ones is known beforehand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lp {

class Guesser {
public:
    // `prediction`: the expected output; empty: none. `text`: what it follows. `own`: whether the text itself is looked at.
    Guesser(std::vector<int32_t> prediction, const std::vector<int32_t> &text, bool own);

    void add(int32_t token);  // the next token of the text

    bool has_guess() const { return n_matched_ > 0 && next_ < end_ && share() >= kLeastShare; }
    // Fills in at most `n` tokens and the share of such guesses that were right; returns how many.
    int guess(int n, int32_t *tokens, double *share) const;

private:
    static constexpr size_t kGram       = 3;
    static constexpr size_t kSure       = 4;    // tokens that match a prediction at its place, not by chance
    static constexpr size_t kCopy       = 8;    // tokens that match a place in the text, not by chance
    static constexpr double kLeastShare = 0.3;  // with less, no step is that cheap

    struct Change {
        std::vector<int32_t> from, to;
    };

    // The kind of guess: by the length of the match in the text (under 8, under 24, longer) or the prediction, or just
    // behind a change.
    size_t kind() const {
        return n_matched_ < kGram       ? 3
               : is_predicted_          ? (n_matched_ < kSure ? 3 : 4)
               : n_matched_ < kCopy     ? 0
               : n_matched_ < 3 * kCopy ? 1
                                        : 2;
    }
    double  share() const { return shares_[kind()]; }
    int32_t expected() const { return change_ ? changes_[change_ - 1].to[offset_] : text_[next_]; }
    size_t  source_end() const { return is_predicted_ ? n_predicted_ : text_.size(); }
    void    follow(size_t place);                                              // guesses from there
    bool    follow_near(size_t place, size_t first, size_t stop);              // or from where the last tokens are the same
    bool    find_in_text();
    size_t  change_at(size_t place) const;  // the number of the remembered change of the tokens from there on; 0: none
    void    learn_change();                 // once guesses are right again
    size_t  slot(size_t place) const;       // of the n-gram that ends before this place
    void    learn(size_t place);

    std::vector<int32_t>  text_;             // the prediction, a gap, and the text
    std::vector<uint32_t> places_;           // by hash: the newest place after an n-gram; 0: none
    std::vector<Change>   changes_;          // the newest last
    size_t                n_predicted_, n_learned_;
    bool                  own_;
    size_t                next_ = 0, end_ = 0;       // the guessed place, and where what it belongs to ends
    size_t                change_ = 0, offset_ = 0;  // the change there, and how many of its tokens have come
    size_t                n_matched_ = 0;    // tokens before it that are the same
    size_t                anchor_    = 0;    // where the prediction was left
    size_t                lost_ = 0, lost_text_ = 0;  // where a copy was left, and the text then; 0: nowhere
    bool                  is_predicted_ = false;
    double                shares_[5]    = { 0.4, 0.6, 0.8, 0.5, 0.85 };  // right guesses of one, by kind
};

}  // namespace lp

// A limit of the tokens between two markers of an answer, which are those of reasoning.
//
// Tokens count while the part is open. When the limit is reached, the tokens that close it are given one after another in
// place of draws; then the answer continues as usual. Markers are looked for in the text, where a token may hold more than
// a marker or a part of one. A part that is opened again has what the earlier ones left.
#pragma once

#include "llama.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lp {

class ReasoningLimit {
public:
    // `opens`, `ends`: the markers, control tokens as their names. `close`: tokens that write the end. `is_open`: at the start.
    ReasoningLimit(const llama_vocab *vocab, int limit, std::string opens, std::string ends, std::vector<int32_t> close,
                   bool is_open)
        : vocab_(vocab), limit_(limit), opens_(std::move(opens)), ends_(std::move(ends)), close_(std::move(close)),
          begins_open_(is_open) {
        reset();
    }

    // The token that must be next; -1: any may be.
    int32_t forced() const { return is_open_ && n_ >= limit_ ? close_[n_closed_] : -1; }

    // The next token of the answer.
    void add(int32_t token) {
        if (token == forced()) {
            if (++n_closed_ == close_.size()) {
                change(false);
            }
            return;
        }
        n_ += is_open_;
        n_closed_ = 0;
        append(token);
        const std::string &marker = is_open_ ? ends_ : opens_;
        if (marker.empty()) {
            return;
        }
        if (const size_t at = tail_.find(marker); at != std::string::npos) {
            tail_.erase(0, at + marker.size());
            const std::string rest = tail_;
            change(!is_open_);
            tail_ = rest;
        } else if (tail_.size() >= marker.size()) {
            tail_.erase(0, tail_.size() - (marker.size() - 1));
        }
    }

    // Another constraint forbids what closes the part: it stays open, and is not limited any more.
    void give_up() { change(false); }

    void reset() {
        n_ = 0;
        change(begins_open_);
    }

private:
    void change(bool is_open) {
        is_open_  = is_open;
        n_closed_ = 0;
        tail_.clear();
    }

    void append(int32_t token) {
        char    piece[64];
        int32_t n = llama_token_to_piece(vocab_, token, piece, sizeof(piece), 0, true);
        if (n >= 0) {
            tail_.append(piece, n);
            return;
        }
        std::string longer(-n, '\0');
        n = llama_token_to_piece(vocab_, token, &longer[0], -n, 0, true);
        tail_.append(longer, 0, std::max(n, 0));
    }

    const llama_vocab   *vocab_;
    int                  limit_;
    std::string          opens_, ends_;
    std::vector<int32_t> close_;
    bool                 begins_open_, is_open_ = false;
    int                  n_        = 0;  // tokens while it was open
    size_t               n_closed_ = 0;  // of `close_`
    std::string          tail_;          // of the text: what a marker may begin with
};

}  // namespace lp

#include "guesser.hpp"

#include <algorithm>
#include <utility>

namespace lp {

namespace {
constexpr double weight     = 0.9;  // of what was seen before
constexpr size_t n_searched = 256;  // tokens of the prediction after the place where it was left
constexpr size_t n_before   = 16;   // and before it
}  // namespace

Guesser::Guesser(std::vector<int32_t> prediction, const std::vector<int32_t> & text, bool own)
    : text_(std::move(prediction)), n_predicted_(text_.size()), n_learned_(0), own_(own) {
    text_.push_back(-1);  // no token: nothing matches across it
    n_learned_ = text_.size();
    text_.insert(text_.end(), text.begin(), text.end());
    size_t n_places = 256;
    while (own_ && n_places < 2 * text_.size()) {
        n_places *= 2;
    }
    places_.assign(own_ ? n_places : 0, 0);
    for (size_t place = n_learned_ + n_gram; own_ && place < text_.size(); place++) {
        learn(place);
    }
    if (n_predicted_ > 0) {
        next_         = 0;
        end_          = n_predicted_;
        n_matched_    = n_sure;
        is_predicted_ = true;
    } else if (own_) {
        find_in_text();
    }
}

size_t Guesser::slot(size_t place) const {
    uint64_t hash = 0;
    for (size_t i = place - n_gram; i < place; i++) {
        hash = (hash ^ (uint32_t) text_[i]) * 0x9e3779b97f4a7c15ull;
    }
    return (hash >> 32) & (places_.size() - 1);
}

void Guesser::learn(size_t place) {
    places_[slot(place)] = (uint32_t) place;
}

void Guesser::add(int32_t token) {
    const bool had_guess = n_matched_ > 0 && next_ < end_;
    const bool is_right  = had_guess && text_[next_] == token;
    if (had_guess) {
        shares_[kind()] = weight * share() + (1 - weight) * (is_right ? 1 : 0);
    }
    const bool was_predicted = is_predicted_;
    text_.push_back(token);
    if (own_ && text_.size() > n_learned_ + n_gram) {
        if (text_.size() > places_.size()) {
            places_.assign(4 * places_.size(), 0);
            for (size_t place = n_learned_ + n_gram; place + 1 < text_.size(); place++) {
                learn(place);
            }
        }
        learn(text_.size() - 1);  // the place of the token that came, after the n-gram before it
    }
    if (own_ && !was_predicted && had_guess) {
        end_ = text_.size();
    }
    if (is_right) {
        next_++;
        n_matched_++;
        if (next_ < end_) {
            return;
        }
    } else if (was_predicted && had_guess && n_matched_ >= n_sure) {
        anchor_    = next_++;  // perhaps one token for another
        n_matched_ = 1;
        if (next_ < end_) {
            return;
        }
    }
    if (n_predicted_ > 0 && find_in_prediction()) {
        return;
    }
    n_matched_ = 0;
    if (own_) {
        find_in_text();
    }
}

// The place around where the prediction was left with the most tokens before it that are the last ones of the text, at least
// two; of several the nearest after it.
bool Guesser::find_in_prediction() {
    const size_t n     = text_.size();
    const size_t first = anchor_ > n_before ? anchor_ - n_before : 1;
    const size_t stop  = std::min(anchor_ + n_searched, n_predicted_);
    size_t       best = 1, found = 0;
    for (size_t place = first; place < stop; place++) {
        size_t n_same = 0;
        while (n_same < n_sure && n_same < place && text_[place - 1 - n_same] == text_[n - 1 - n_same]) {
            n_same++;
        }
        if (n_same > best || (n_same == best && n_same > 1 && found <= anchor_)) {
            best  = n_same;
            found = place;
        }
    }
    if (found == 0) {
        return false;
    }
    next_         = found;
    end_          = n_predicted_;
    n_matched_    = best;
    is_predicted_ = true;
    return true;
}

bool Guesser::find_in_text() {
    const size_t n = text_.size();
    n_matched_     = 0;
    is_predicted_  = false;
    if (n < n_learned_ + n_gram) {
        return false;
    }
    const size_t place = places_[slot(n)];
    if (place == 0 || place >= n) {
        return false;
    }
    size_t n_same = 0;  // up to 32: longer matches are all alike
    while (n_same < 32 && place - n_same > n_learned_ && text_[place - 1 - n_same] == text_[n - 1 - n_same]) {
        n_same++;
    }
    if (n_same < n_gram) {
        return false;
    }
    next_      = place;
    end_       = n;
    n_matched_ = n_same;
    return true;
}

int Guesser::guess(int n, int32_t * tokens, double * share) const {
    *share = this->share();
    if (!has_guess()) {
        return 0;
    }
    // At the end of the text the guess continues with itself, as a repetition does.
    int          count = 0;
    const size_t size  = is_predicted_ ? end_ : text_.size();
    for (size_t place = next_; count < n; place++, count++) {
        if (place < size) {
            tokens[count] = text_[place];
        } else if (!is_predicted_ && place - size < (size_t) count) {
            tokens[count] = tokens[place - size];
        } else {
            break;
        }
    }
    return count;
}

}  // namespace lp

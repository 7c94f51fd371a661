#include "guesser.hpp"

#include <algorithm>
#include <utility>

namespace lp {

namespace {
constexpr double kWeight   = 0.9;  // of what was seen before
constexpr size_t kSearched = 256;  // tokens after the place where a copy was left
constexpr size_t kBefore   = 16;   // and before it
constexpr size_t kNear     = 32;   // the same in the text, where other copies may follow
constexpr size_t kChanges  = 16;   // that are remembered
constexpr size_t kChanged  = 8;    // tokens of a change
constexpr size_t kForOne   = 4;    // tokens that may have replaced one
constexpr size_t kLost     = 16;   // tokens after which a copy has ended
}  // namespace

Guesser::Guesser(std::vector<int32_t> prediction, const std::vector<int32_t> &text, bool own)
    : text_(std::move(prediction)), n_predicted_(text_.size()), n_learned_(0), own_(own) {
    text_.push_back(-1);  // no token: nothing matches across it
    n_learned_ = text_.size();
    text_.insert(text_.end(), text.begin(), text.end());
    size_t n_places = 256;
    while (own_ && n_places < 2 * text_.size()) {
        n_places *= 2;
    }
    places_.assign(own_ ? n_places : 0, 0);
    for (size_t place = n_learned_ + kGram; own_ && place < text_.size(); place++) {
        learn(place);
    }
    if (n_predicted_ > 0) {
        next_         = 0;
        end_          = n_predicted_;
        n_matched_    = kSure;
        is_predicted_ = true;
    } else if (own_) {
        find_in_text();
    }
}

size_t Guesser::slot(size_t place) const {
    uint64_t hash = 0;
    for (size_t i = place - kGram; i < place; i++) {
        hash = (hash ^ static_cast<uint32_t>(text_[i])) * 0x9e3779b97f4a7c15ull;
    }
    return (hash >> 32) & (places_.size() - 1);
}

void Guesser::learn(size_t place) { places_[slot(place)] = static_cast<uint32_t>(place); }

void Guesser::follow(size_t place) {
    next_   = place;
    offset_ = 0;
    change_ = change_at(place);
}

size_t Guesser::change_at(size_t place) const {
    for (size_t i = changes_.size(); i > 0; i--) {
        const std::vector<int32_t> &from = changes_[i - 1].from;
        if (place + from.size() <= source_end() && std::equal(from.begin(), from.end(), text_.begin() + place)) {
            return i;
        }
    }
    return 0;
}

void Guesser::add(int32_t token) {
    const bool had_guess = n_matched_ > 0 && next_ < end_;
    const bool is_right  = had_guess && expected() == token;
    if (had_guess) {
        shares_[kind()] = kWeight * share() + (1 - kWeight) * (is_right ? 1 : 0);
    }
    const bool was_predicted = is_predicted_;
    text_.push_back(token);
    if (own_ && text_.size() > n_learned_ + kGram) {
        if (text_.size() > places_.size()) {
            places_.assign(4 * places_.size(), 0);
            for (size_t place = n_learned_ + kGram; place + 1 < text_.size(); place++) {
                learn(place);
            }
        }
        learn(text_.size() - 1);  // the place of the token that came, after the n-gram before it
    }
    if (own_ && !was_predicted && had_guess) {
        end_ = text_.size();
    }
    if (is_right) {
        n_matched_++;
        if (change_ == 0) {
            follow(next_ + 1);
        } else if (++offset_ == changes_[change_ - 1].to.size()) {
            follow(next_ + changes_[change_ - 1].from.size());
        }
        learn_change();
        if (next_ < end_) {
            return;
        }
    } else if (had_guess && change_ > 0 && offset_ == 0 && text_[next_] == token) {
        changes_.erase(changes_.begin() + change_ - 1);  // not everywhere
        n_matched_++;
        follow(next_ + 1);
        if (next_ < end_) {
            return;
        }
    } else if (had_guess && n_matched_ >= (was_predicted ? kSure : kCopy)) {
        if (change_ > 0) {
            changes_.erase(changes_.begin() + change_ - 1);
        }
        lost_      = next_;
        lost_text_ = text_.size() - 1 - offset_;
        if (was_predicted) {
            anchor_ = next_;
        }
        n_matched_ = 1;
        follow(next_ + 1);  // perhaps one token for another
        if (next_ < end_) {
            return;
        }
    }
    if (text_.size() - lost_text_ > kLost) {
        lost_text_ = 0;
    }
    if (n_predicted_ > 0 && follow_near(anchor_, 1, n_predicted_)) {
        return;
    }
    if (own_ && lost_text_ > 0 && lost_ >= n_learned_ &&
        follow_near(lost_, n_learned_ + 1, std::min(lost_ + kNear, lost_text_))) {
        return;
    }
    if (lost_text_ > 0 && text_.size() - lost_text_ <= kForOne && (lost_ < n_predicted_ || own_)) {
        is_predicted_ = lost_ < n_predicted_;
        end_          = source_end();
        n_matched_    = 1;
        follow(lost_ + 1);  // perhaps several tokens for one
        if (next_ < end_) {
            return;
        }
    }
    n_matched_ = 0;
    if (own_) {
        find_in_text();
    }
}

// Of the tokens since the copy was left, those that are not the same again have replaced those of the source.
void Guesser::learn_change() {
    if (lost_text_ == 0 || change_ > 0 || (lost_ < n_predicted_) != is_predicted_) {
        return;
    }
    size_t n_same = 0;
    while (next_ > lost_ + n_same && text_.size() > lost_text_ + n_same &&
           text_[next_ - 1 - n_same] == text_[text_.size() - 1 - n_same]) {
        n_same++;
    }
    if (n_same < 2) {
        return;
    }
    const auto from = text_.begin() + lost_, to = text_.begin() + lost_text_;
    Change     change{ { from, text_.begin() + (next_ - n_same) }, { to, text_.end() - n_same } };
    lost_text_ = 0;
    if (change.from.empty() || change.to.empty() || std::max(change.from.size(), change.to.size()) > kChanged) {
        return;
    }
    if (changes_.size() == kChanges) {
        changes_.erase(changes_.begin());
    }
    changes_.push_back(std::move(change));
    follow(next_);
}

// The place around `place` with the most tokens before it that are the last ones of the text, at least two; of several the
// nearest after it.
bool Guesser::follow_near(size_t place, size_t first, size_t stop) {
    const size_t n    = text_.size();
    size_t       best = 1, found = 0;
    for (size_t i = std::max(first, place > kBefore ? place - kBefore : 0); i < std::min(place + kSearched, stop); i++) {
        size_t n_same = 0;
        while (n_same < kSure && n_same < i && text_[i - 1 - n_same] == text_[n - 1 - n_same]) {
            n_same++;
        }
        if (n_same > best || (n_same == best && n_same > 1 && found <= place)) {
            best  = n_same;
            found = i;
        }
    }
    if (found == 0) {
        return false;
    }
    is_predicted_ = found < n_predicted_;
    end_          = source_end();
    n_matched_    = best;
    follow(found);
    learn_change();
    return true;
}

bool Guesser::find_in_text() {
    const size_t n = text_.size();
    n_matched_     = 0;
    is_predicted_  = false;
    if (n < n_learned_ + kGram) {
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
    if (n_same < kGram) {
        return false;
    }
    end_       = n;
    n_matched_ = n_same;
    follow(place);
    return true;
}

int Guesser::guess(int n, int32_t *tokens, double *share) const {
    *share = this->share();
    if (!has_guess()) {
        return 0;
    }
    int          count = 0;
    const size_t size  = is_predicted_ ? end_ : text_.size();
    size_t       place = next_, change = change_, offset = offset_;
    while (count < n) {
        if (change > 0) {
            const Change &its = changes_[change - 1];
            tokens[count++]   = its.to[offset++];
            if (offset < its.to.size()) {
                continue;
            }
            place += its.from.size();
            offset = 0;
        } else if (place < size) {
            tokens[count++] = text_[place++];
        } else if (!is_predicted_ && place - size < static_cast<size_t>(count)) {
            // At the end of the text the guess continues with itself, as a repetition does.
            tokens[count] = tokens[place++ - size];
            count++;
        } else {
            break;
        }
        change = change_at(place);
    }
    return count;
}

}  // namespace lp

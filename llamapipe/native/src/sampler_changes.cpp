// The tokens a sampler has accepted, and the changes of logits that follow from them and from its options.
#include "sampler.hpp"

#include "scan.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace {

constexpr float none      = -std::numeric_limits<float>::infinity();
constexpr float max_logit = 1e8f;  // llama.cpp sorts by a rounded multiple of it, an int

}  // namespace

// ---- the sequence
void lp_sampler::accept(int32_t token) {
    if (penalizes()) {
        window_.push_back(token);
        counts_[token]++;
        while (window_.size() > (size_t) last_n_) {
            const auto oldest = counts_.find(window_.front());
            if (--oldest->second == 0) {
                counts_.erase(oldest);
            }
            window_.pop_front();
        }
    }
    if (!bad_words.empty()) {
        tail_.push_back(token);
        size_t longest = 0;
        for (const auto & word : bad_words) {
            longest = std::max(longest, word.size());
        }
        if (tail_.size() >= longest) {
            tail_.pop_front();
        }
    }
    if (dry) {
        llama_sampler_accept(dry.get(), token);
    }
    for (llama_sampler * s : { first_.get(), chain_.get() }) {
        if (s) {
            llama_sampler_accept(s, token);
        }
    }
}

void lp_sampler::accept_grammar(int32_t token) {
    if (!grammar) {
        return;
    }
    // llama.cpp aborts the process at an end that the grammar does not allow, and crashes after any other refused token.
    if (broken_ || !allowed_by_grammar(token)) {
        broken_ = true;
        throw std::runtime_error("the grammar does not go on with token " + std::to_string(token));
    }
    llama_sampler_accept(grammar.get(), token);
}

bool lp_sampler::allowed_by_grammar(int32_t token) const {
    llama_token_data       one = { token, 0.0f, 0.0f };
    llama_token_data_array a   = { &one, 1, -1, false };
    llama_sampler_apply(grammar.get(), &a);
    return std::isfinite(one.logit);
}

void lp_sampler::accepted(int32_t token) {
    accept_grammar(token);
    accept(token);
    n_accepted_++;
}

void lp_sampler::set_penalties(int n, float repeat, float frequency, float presence) {
    last_n_    = n;
    repeat_    = repeat;
    frequency_ = frequency;
    presence_  = presence;
    if (!penalizes()) {
        window_.clear();
        counts_.clear();
    }
}

// Stages that draw by themselves continue from where they are, as our own generator does.
static void forget(llama_sampler * s) {
    const std::string name = llama_sampler_name(s);
    if (name == "penalties" || name == "dry") {
        llama_sampler_reset(s);
    }
}

void lp_sampler::reset() {
    window_.clear();
    tail_.clear();
    counts_.clear();
    n_accepted_ = 0;
    broken_     = false;
    for (llama_sampler * s : { first_.get(), dry.get() }) {
        if (s) {
            forget(s);
        }
    }
    for (int i = 0; chain_ && i < llama_sampler_chain_n(chain_.get()); i++) {
        forget(llama_sampler_chain_get(chain_.get(), i));
    }
    if (grammar) {
        llama_sampler_reset(grammar.get());
    }
}

// ---- changes
// Collects the logits that differ from the row's.
void lp_sampler::collect_changes(const lp::Row & row, bool with_ends) {
    // For a logit that is not known, its upper bound: no change reverses the order of two logits.
    const auto raw = [&](int32_t token) {
        float logit;
        row.find(token, &logit);
        return logit;
    };
    changed_.clear();
    for (const auto & [token, bias] : biases) {
        changed_[token] = raw(token) + bias;
    }
    for (const auto & [token, count] : counts_) {
        const auto biased = changed_.find(token);
        float      l      = biased == changed_.end() ? raw(token) : biased->second;
        l                 = l <= 0 ? l * repeat_ : l / repeat_;
        l -= (float) count * frequency_ + presence_;
        changed_[token] = l;
    }
    for (auto & [token, l] : changed_) {
        l = std::min(l, max_logit);
    }
    for (const auto * tokens : { &forbidden, &bad_tokens }) {
        for (const int32_t token : *tokens) {
            changed_[token] = none;
        }
    }
    if (with_ends && n_accepted_ < min_tokens) {
        for (const int32_t token : ends) {
            changed_[token] = none;
        }
    }
    for (const auto & word : bad_words) {
        const size_t n = word.size() - 1;
        if (tail_.size() >= n && std::equal(word.begin(), word.end() - 1, tail_.end() - (std::ptrdiff_t) n)) {
            changed_[word.back()] = none;
        }
    }
}

int lp_sampler::raised(float * tokens, int n) const {
    int n_found = 0;
    for (const auto & [token, bias] : biases) {
        if (bias > 0 && n_found < n) {
            tokens[n_found++] = (float) token;
        }
    }
    const bool raises = penalizes() && (repeat_ < 1.0f || frequency_ < 0.0f || presence_ < 0.0f);
    for (auto it = counts_.begin(); raises && it != counts_.end() && n_found < n; ++it) {
        tokens[n_found++] = (float) it->first;
    }
    return n_found;
}

bool lp_sampler::is_forbidden(int32_t token) {
    const auto changed = changed_.find(token);
    return (changed != changed_.end() && !std::isfinite(changed->second)) || !may(token) ||
           (grammar && !allowed_by_grammar(token));
}

// Collects every finite logit that the masks allow; in structured output they often allow few.
void lp_sampler::collect_allowed(const float * logits) {
    if (allowed.empty() && !mask) {
        lp::all(logits, n_vocab, candidates_);
        return;
    }
    candidates_.clear();
    for (int32_t first = 0; first < n_vocab; first += 32) {
        uint32_t bits = allowed.empty() ? ~0u : allowed[(size_t) first / 32];
        bits &= mask ? mask[first / 32] : ~0u;
        for (int32_t token = first; bits && token < n_vocab; token++, bits >>= 1) {
            if (bits & 1 && std::isfinite(logits[token])) {
                candidates_.push_back({ token, logits[token], 0.0f });
            }
        }
    }
}

// Keeps the candidates that the grammar allows, and lowers those that DRY penalizes.
void lp_sampler::check(std::vector<llama_token_data> & candidates) {
    llama_token_data_array a = { candidates.data(), candidates.size(), -1, false };
    for (llama_sampler * s : { grammar.get(), dry.get() }) {
        if (s && a.size > 0) {
            llama_sampler_apply(s, &a);
        }
    }
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                    [](const llama_token_data & c) { return !std::isfinite(c.logit); }),
                     candidates.end());
}

// The full row with all changes; forbidden tokens are minus infinity.
const float * lp_sampler::change(const float * logits) {
    if (changed_.empty() && !checks()) {
        return logits;
    }
    row_.assign(logits, logits + n_vocab);
    for (const auto & [token, logit] : changed_) {
        row_[(size_t) token] = std::isfinite(logits[token]) ? logit : none;
    }
    const uint32_t * const masks[] = { allowed.empty() ? nullptr : allowed.data(), mask };
    for (const uint32_t * bits : masks) {
        for (int32_t token = 0; bits && token < n_vocab; token++) {
            row_[(size_t) token] = has_bit(bits, token) ? row_[(size_t) token] : none;
        }
    }
    if (grammar || dry) {
        lp::all(row_.data(), n_vocab, candidates_);
        check(candidates_);
        std::fill(row_.begin(), row_.end(), none);
        for (const llama_token_data & c : candidates_) {
            row_[(size_t) c.id] = c.logit;
        }
    }
    return row_.data();
}

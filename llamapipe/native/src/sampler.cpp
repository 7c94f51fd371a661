// One request's sampling; see sampler.hpp for how it is done.
#include "sampler.hpp"

#include "scan.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

bool better(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

lp_sampler::lp_sampler(const llama_vocab * v, uint64_t s)
    : vocab(v), n_vocab(llama_vocab_n_tokens(v)), seed(s), state(s) {}

double lp_sampler::peek() const {
    uint64_t z = state + 0x9e3779b97f4a7c15ull;
    z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z          = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (double) ((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

void lp_sampler::add(lp::Kind kind, float value, llama_sampler * stage) {
    lp::SamplerPtr owned(stage);
    if (!stage) {
        throw std::runtime_error("llama.cpp made no sampler of these options");
    }
    stages.push_back({ kind, value });
    if (!first_) {
        first_ = std::move(owned);
        return;
    }
    if (!chain_) {
        chain_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    }
    llama_sampler_chain_add(chain_.get(), owned.release());
}

void lp_sampler::clear_stages() {
    stages.clear();
    first_.reset();
    chain_.reset();
    greedy_ = false;
}

// Whether the stage after the first top_k keeps only some of the `n` largest candidates, whatever the `n_missing` other logits
// are that top_k would keep (none of which is above `bar`). With a margin, so that rounding cannot decide.
bool lp_sampler::cuts_off(size_t n, size_t n_missing, float bar) {
    constexpr double margin = 1e-5;
    if (stages.size() < 2 || stages[0].kind != lp::Kind::top_k) {
        return false;
    }
    const lp::StageInfo & next = stages[1];
    if (next.kind != lp::Kind::min_p && next.kind != lp::Kind::top_p) {
        return false;
    }
    std::partial_sort(candidates_.begin(), candidates_.begin() + (std::ptrdiff_t) n, candidates_.end(), better);
    const double top = candidates_[0].logit;
    if (next.kind == lp::Kind::min_p) {
        return bar + margin * std::max(1.0, std::abs(top)) < top + std::log((double) next.value);
    }
    // top_p keeps the fewest candidates whose share suffices. The share lies between two bounds: of the known candidates only,
    // and of these plus all missing ones at `bar`.
    const double most  = (double) n_missing * std::exp((double) bar - top);
    double       known = 0, sum = 0;
    for (size_t i = 0; i < n; i++) {
        known += std::exp((double) candidates_[i].logit - top);
    }
    for (size_t i = 0; i < n; i++) {
        const double before = sum;
        sum += std::exp((double) candidates_[i].logit - top);
        if (sum >= next.value * known * (1 - margin)) {
            return sum >= next.value * (known + most) * (1 + margin) && before < next.value * known * (1 - margin);
        }
    }
    return false;
}

// Fills candidates_ with the `n_wanted` largest changed logits (or all allowed ones, if those are fewer), sorted, on ties the
// lower ids first.
int lp_sampler::gather(const lp::Row & row, size_t n_wanted) {
    const float * const logits = row.all();
    const bool plain = changed_.empty() && !checks();
    size_t     n     = plain ? n_wanted : n_wanted + changed_.size() + 1 + (checks() ? 2 * n_wanted + 32 : 0);
    for (;;) {
        bool  whole = logits && n >= (size_t) n_vocab / 2;
        float bar   = none;  // no token that was left out is above it
        if (!logits) {
            candidates_.clear();
            for (int i = 0; i < row.n(); i++) {
                candidates_.push_back({ row.id(i), row.logit(i), 0.0f });
            }
            bar = row.bar();
        } else if (whole) {
            collect_allowed(logits);
        } else {
            lp::top_k(logits, n_vocab, (int) n, candidates_);
            whole = candidates_.size() < n;
            bar   = candidates_.empty() ? none : candidates_.back().logit;
        }
        if (logits && candidates_.empty() && bar == none && lp::argmax(logits, n_vocab) < 0) {
            return LP_ERROR_LOGITS;
        }
        if (plain && logits && !whole) {
            return 0;  // sorted already
        }
        if (!changed_.empty()) {
            const size_t n_raw = candidates_.size();
            size_t       n_kept = 0;
            for (size_t i = 0; i < n_raw; i++) {
                if (changed_.find(candidates_[i].id) == changed_.end()) {
                    candidates_[n_kept++] = candidates_[i];
                }
            }
            candidates_.resize(n_kept);
            for (const auto & [token, logit] : changed_) {
                float raw;
                if (!std::isfinite(logit)) {
                    continue;
                }
                if (!row.find(token, &raw)) {
                    bar = std::max(bar, logit);
                } else if (std::isfinite(raw)) {
                    candidates_.push_back({ token, logit, 0.0f });
                }
            }
        }
        if (checks()) {
            candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(),
                                             [&](const llama_token_data & c) { return !may(c.id); }),
                              candidates_.end());
            check(candidates_);
        }
        const auto above = (size_t) std::count_if(candidates_.begin(), candidates_.end(),
                                                  [&](const llama_token_data & c) { return c.logit > bar; });
        if (whole || above >= n_wanted) {
            break;
        }
        if (above > 0 && cuts_off(above, n_wanted - above, bar)) {
            n_wanted = above;
            break;
        }
        if (!logits) {
            return needs_full_row;
        }
        // A mask may leave few tokens, so the full row is looked up at once. A grammar costs more for each token.
        n = (mask || !allowed.empty()) && !grammar ? (size_t) n_vocab : n * 8;
    }
    if (candidates_.empty()) {
        return LP_ERROR_MASK;
    }
    const size_t n_kept = std::min(n_wanted, candidates_.size());
    std::partial_sort(candidates_.begin(), candidates_.begin() + (std::ptrdiff_t) n_kept, candidates_.end(), better);
    candidates_.resize(n_kept);
    return 0;
}

// ---- the draw
int lp_sampler::draw(const lp::Row & row, int32_t * token) {
    if (broken_) {
        return LP_ERROR_MASK;
    }
    if (!row.all() && n_logprobs > 0 && !row.is_exact(n_logprobs)) {
        return needs_full_row;
    }
    const bool too_early = n_accepted_ < min_tokens;
    changed_.clear();
    if (!biases.empty() || !counts_.empty() || !forbidden.empty() || !bad_tokens.empty() || !bad_words.empty() || too_early) {
        collect_changes(row, true);
    }
    int code = choose(row, token);
    if (code == LP_ERROR_MASK && too_early) {  // a constraint allows only tokens that end the text
        collect_changes(row, false);
        code = choose(row, token);
    }
    return code == 0 && n_logprobs >= 0 ? note(row, *token) : code;
}

int lp_sampler::n_wanted() const {
    if (greedy_) {
        return 1;
    }
    const bool cuts = !stages.empty() && stages[0].kind == lp::Kind::top_k && stages[0].value < (float) n_vocab;
    return cuts ? (int) stages[0].value : n_vocab;  // a larger k may not fit an int
}

int lp_sampler::choose(const lp::Row & row, int32_t * token) {
    const float * const logits = row.all();
    const lp::StageInfo first  = stages.empty() ? lp::StageInfo{ lp::Kind::other, 0 } : stages[0];
    bool                found  = true;  // candidates_ holds the result of the first stage
    bool                sorted = true;
    const size_t        n_wanted = (size_t) this->n_wanted();
    if (logits && greedy_ && changed_.empty() && !checks()) {
        *token = lp::argmax(logits, n_vocab);
        return *token < 0 ? LP_ERROR_LOGITS : 0;
    }
    if (n_wanted < (size_t) n_vocab) {
        if (const int code = gather(row, n_wanted)) {
            return code;
        }
        if (greedy_) {
            *token = candidates_[0].id;
            return 0;
        }
    } else {
        if (!logits) {
            return needs_full_row;
        }
        if (lp::argmax(logits, n_vocab) < 0) {
            return LP_ERROR_LOGITS;
        }
        const float * changed = change(logits);
        if (lp::argmax(changed, n_vocab) < 0) {
            return LP_ERROR_MASK;
        }
        const bool alone = !chain_ && (stages.empty() || first.kind == lp::Kind::temperature || first.kind == lp::Kind::top_k);
        if (alone) {  // no token is cut off
            *token = lp::draw(changed, n_vocab, first.kind == lp::Kind::temperature ? first.value : 1.0f, peek());
            advance();
            return 0;
        }
        if (first.kind == lp::Kind::top_p) {
            lp::nucleus(changed, n_vocab, first.value, candidates_);
        } else if (first.kind == lp::Kind::min_p) {
            lp::at_least(changed, n_vocab, first.value, candidates_);
            sorted = false;
        } else {
            lp::all(changed, n_vocab, candidates_);
            sorted = false;
            found  = first.kind == lp::Kind::top_k;  // k is at least n_vocab: it keeps all
        }
    }
    llama_token_data_array a = { candidates_.data(), candidates_.size(), -1, sorted };
    if (!found && first_) {
        llama_sampler_apply(first_.get(), &a);
    }
    if (chain_ && a.size > 0) {
        llama_sampler_apply(chain_.get(), &a);
    }
    if (a.size == 0) {
        return LP_ERROR_MASK;
    }
    *token = pick(a);
    return 0;
}

int32_t lp_sampler::pick(const llama_token_data_array & a) {
    if (a.selected >= 0) {  // mirostat and adaptive-p draw themselves
        return a.data[a.selected].id;
    }
    float top = none;
    for (size_t i = 0; i < a.size; i++) {
        top = std::max(top, a.data[i].logit);
    }
    weights_.resize(a.size);
    double sum = 0;
    for (size_t i = 0; i < a.size; i++) {
        sum += weights_[i] = std::exp((double) a.data[i].logit - top);
    }
    double left = peek() * sum;
    size_t last = 0;  // the last bin of nonzero width: rounding must never choose an impossible token
    advance();
    for (size_t i = 0; i < a.size; i++) {
        if (weights_[i] > 0) {
            last = i;
            left -= weights_[i];
            if (left < 0) {
                break;
            }
        }
    }
    return a.data[last].id;
}

// Records the drawn token's log-probability in the unchanged row, and the most probable tokens.
int lp_sampler::note(const lp::Row & row, int32_t token) {
    float logit;
    if (!row.find(token, &logit) || (!row.all() && !row.is_exact(n_logprobs))) {
        return needs_full_row;
    }
    log_sum_exp = row.all() ? lp::log_sum_exp(row.all(), n_vocab) : row.log_sum_exp();
    logprob     = (float) (logit - log_sum_exp);
    top.clear();
    if (row.all() && n_logprobs > 0) {
        lp::top_k(row.all(), n_vocab, std::min(n_logprobs, n_vocab), top);
    }
    for (int i = 0; !row.all() && i < n_logprobs; i++) {
        top.push_back({ row.id(i), row.logit(i), 0.0f });
    }
    for (llama_token_data & t : top) {
        t.p = (float) (t.logit - log_sum_exp);
    }
    return 0;
}

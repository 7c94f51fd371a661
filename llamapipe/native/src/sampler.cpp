// A sampler chain: drawing from a row, what each sampler changes, and the C entries.
#include "sampler.hpp"

#include "faults.hpp"
#include "native.h"
#include "scan.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace {

constexpr float kNone     = -std::numeric_limits<float>::infinity();
constexpr float kMaxLogit = 1e8f;  // llama.cpp sorts by a rounded multiple of it, an int

bool better(const llama_token_data &a, const llama_token_data &b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

lp_sampler::lp_sampler(const llama_vocab *v, uint64_t s) : vocab(v), n_vocab(llama_vocab_n_tokens(v)), seed(s), state(s) {}

double lp_sampler::peek() const {
    uint64_t z = state + 0x9e3779b97f4a7c15ull;
    z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z          = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return ((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

void lp_sampler::add(lp::Kind kind, float value, llama_sampler *stage) {
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
    const lp::StageInfo &next = stages[1];
    if (next.kind != lp::Kind::min_p && next.kind != lp::Kind::top_p) {
        return false;
    }
    std::partial_sort(candidates_.begin(), candidates_.begin() + n, candidates_.end(), better);
    const double top = candidates_[0].logit;
    if (next.kind == lp::Kind::min_p) {
        return bar + margin * std::max(1.0, std::abs(top)) < top + std::log(double{ next.value });
    }
    // top_p keeps the fewest candidates whose share suffices. The share lies between two bounds: of the known candidates only,
    // and of these plus all missing ones at `bar`.
    const double most  = n_missing * std::exp(bar - top);
    double       known = 0, sum = 0;
    for (size_t i = 0; i < n; i++) {
        known += std::exp(candidates_[i].logit - top);
    }
    for (size_t i = 0; i < n; i++) {
        const double before = sum;
        sum += std::exp(candidates_[i].logit - top);
        if (sum >= next.value * known * (1 - margin)) {
            return sum >= next.value * (known + most) * (1 + margin) && before < next.value * known * (1 - margin);
        }
    }
    return false;
}

// Fills candidates_ with the `n_wanted` largest changed logits (or all allowed ones, if those are fewer), sorted, on ties the
// lower ids first.
int lp_sampler::gather(const lp::Row &row, size_t n_wanted) {
    const float *const logits = row.all();
    const bool         plain  = changed_.empty() && !checks();
    size_t             n      = plain ? n_wanted : n_wanted + changed_.size() + 1 + (checks() ? 2 * n_wanted + 32 : 0);
    for (;;) {
        bool  whole  = logits && n >= static_cast<size_t>(n_vocab) / 2;
        float bar    = kNone;  // no token that was left out is above it, nor equal to it with an id of at most `bar_id`
        int   bar_id = -1;
        if (!logits) {
            candidates_.clear();
            for (int i = 0; i < row.n(); i++) {
                candidates_.push_back({ row.id(i), row.logit(i), 0.0f });
            }
            bar = row.bar();
        } else if (whole) {
            collect_allowed(logits);
        } else {
            lp::top_k(logits, n_vocab, static_cast<int>(n), candidates_);
            whole = candidates_.size() < n;
            if (!candidates_.empty()) {
                bar    = candidates_.back().logit;
                bar_id = candidates_.back().id;
            }
        }
        if (logits && candidates_.empty() && bar == kNone && lp::argmax(logits, n_vocab) < 0) {
            return LP_ERROR_LOGITS;
        }
        if (plain && logits && !whole) {
            return 0;  // sorted already
        }
        if (!changed_.empty()) {
            const size_t n_raw  = candidates_.size();
            size_t       n_kept = 0;
            for (size_t i = 0; i < n_raw; i++) {
                if (changed_.find(candidates_[i].id) == changed_.end()) {
                    candidates_[n_kept++] = candidates_[i];
                }
            }
            candidates_.resize(n_kept);
            for (const auto &[token, logit] : changed_) {
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
            candidates_.erase(
                    std::remove_if(candidates_.begin(), candidates_.end(), [&](const llama_token_data &c) { return !may(c.id); }),
                    candidates_.end());
            check(candidates_);
        }
        const llama_token_data last = { bar_id, bar, 0.0f };
        const auto above = static_cast<size_t>(std::count_if(candidates_.begin(), candidates_.end(),
                                                             [&](const llama_token_data &c) { return !better(last, c); }));
        if (whole || above >= n_wanted) {
            break;
        }
        if (above > 0 && cuts_off(above, n_wanted - above, bar)) {
            n_wanted = above;
            break;
        }
        if (!logits) {
            return kNeedsFullRow;
        }
        // A mask may leave few tokens, so the full row is looked up at once. A grammar costs more for each token.
        n = (mask || !allowed.empty()) && !grammar ? static_cast<size_t>(n_vocab) : n * 8;
    }
    if (candidates_.empty()) {
        return LP_ERROR_MASK;
    }
    const size_t n_kept = std::min(n_wanted, candidates_.size());
    std::partial_sort(candidates_.begin(), candidates_.begin() + n_kept, candidates_.end(), better);
    candidates_.resize(n_kept);
    return 0;
}

// ---- the draw
int lp_sampler::draw(const lp::Row &row, int32_t *token) {
    if (broken_) {
        return LP_ERROR_MASK;
    }
    if (!row.all() && n_logprobs > 0 && !row.is_exact(n_logprobs)) {
        return kNeedsFullRow;
    }
    if (const int32_t closing = forced(); closing >= 0) {
        if (is_allowed(closing)) {
            *token = closing;
            return n_logprobs >= 0 ? note(row, closing) : 0;
        }
        reasoning->give_up();
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
    const bool cuts = !stages.empty() && stages[0].kind == lp::Kind::top_k && stages[0].value < static_cast<float>(n_vocab);
    return cuts ? static_cast<int>(stages[0].value) : n_vocab;  // a larger k may not fit an int
}

int lp_sampler::choose(const lp::Row &row, int32_t *token) {
    const float *const  logits   = row.all();
    const lp::StageInfo first    = stages.empty() ? lp::StageInfo{ lp::Kind::other, 0 } : stages[0];
    bool                found    = true;  // candidates_ holds the result of the first stage
    bool                sorted   = true;
    const size_t        n_wanted = this->n_wanted();
    if (logits && greedy_ && changed_.empty() && !checks()) {
        *token = lp::argmax(logits, n_vocab);
        return *token < 0 ? LP_ERROR_LOGITS : 0;
    }
    if (n_wanted < static_cast<size_t>(n_vocab)) {
        if (const int code = gather(row, n_wanted)) {
            return code;
        }
        if (greedy_) {
            *token = candidates_[0].id;
            return 0;
        }
    } else {
        if (!logits) {
            return kNeedsFullRow;
        }
        if (lp::argmax(logits, n_vocab) < 0) {
            return LP_ERROR_LOGITS;
        }
        const float *changed = change(logits);
        if (changed != logits && lp::argmax(changed, n_vocab) < 0) {
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

int32_t lp_sampler::pick(const llama_token_data_array &a) {
    if (a.selected >= 0) {  // mirostat and adaptive-p draw themselves
        return a.data[a.selected].id;
    }
    float top = kNone;
    for (size_t i = 0; i < a.size; i++) {
        top = std::max(top, a.data[i].logit);
    }
    weights_.resize(a.size);
    double sum = 0;
    for (size_t i = 0; i < a.size; i++) {
        sum += weights_[i] = std::exp(double{ a.data[i].logit } - top);
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
int lp_sampler::note(const lp::Row &row, int32_t token) {
    float logit;
    if (!row.find(token, &logit) || (!row.all() && !row.is_exact(n_logprobs))) {
        return kNeedsFullRow;
    }
    if (n_noted == noted.size()) {
        noted.emplace_back();
    }
    const double log_sum_exp = row.all() ? lp::log_sum_exp(row.all(), n_vocab) : row.log_sum_exp();
    auto        &top         = noted[n_noted].top;
    noted[n_noted].logprob   = static_cast<float>(logit - log_sum_exp);
    n_noted++;
    top.clear();
    if (row.all() && n_logprobs > 0) {
        lp::top_k(row.all(), n_vocab, std::min(n_logprobs, n_vocab), top);
    }
    for (int i = 0; !row.all() && i < n_logprobs; i++) {
        top.push_back({ row.id(i), row.logit(i), 0.0f });
    }
    for (llama_token_data &t : top) {
        t.p = static_cast<float>(t.logit - log_sum_exp);
    }
    return 0;
}

// ---- the tokens a sampler has accepted, and the changes of logits that follow from them and from its options
void lp_sampler::accept(int32_t token) {
    if (penalizes()) {
        window_.push_back(token);
        counts_[token]++;
        while (window_.size() > static_cast<size_t>(last_n_)) {
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
        for (const auto &word : bad_words) {
            longest = std::max(longest, word.size());
        }
        if (tail_.size() >= longest) {
            tail_.pop_front();
        }
    }
    if (dry) {
        llama_sampler_accept(dry.get(), token);
    }
    for (llama_sampler *s : { first_.get(), chain_.get() }) {
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

static bool allows(llama_sampler *grammar, int32_t token) {
    llama_token_data       one = { token, 0.0f, 0.0f };
    llama_token_data_array a   = { &one, 1, -1, false };
    llama_sampler_apply(grammar, &a);
    return std::isfinite(one.logit);
}

bool lp_sampler::allowed_by_grammar(int32_t token) const { return allows(grammar.get(), token); }

bool lp_sampler::is_allowed(int32_t token) const { return may(token) && (!grammar || allowed_by_grammar(token)); }

int lp_sampler::n_allowed(int n, const int32_t *tokens) const {
    if (!grammar || n == 0) {
        return n;
    }
    const lp::SamplerPtr ahead(llama_sampler_clone(grammar.get()));
    for (int i = 0; i < n; i++) {
        if (!allows(ahead.get(), tokens[i])) {
            return i;
        }
        llama_sampler_accept(ahead.get(), tokens[i]);
    }
    return n;
}

void lp_sampler::accepted(int32_t token) {
    accept_grammar(token);
    accept(token);
    n_accepted_++;
    accept_reasoning(token);
    if (guesser) {
        guesser->add(token);
    }
}

void lp_sampler::accept_reasoning(int32_t token) {
    if (reasoning) {
        reasoning->add(token);
    }
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
static void forget(llama_sampler *s) {
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
    if (reasoning) {
        reasoning->reset();
    }
    for (llama_sampler *s : { first_.get(), dry.get() }) {
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
void lp_sampler::collect_changes(const lp::Row &row, bool with_ends) {
    // For a logit that is not known, its upper bound: no change reverses the order of two logits.
    const auto raw = [&](int32_t token) {
        float logit;
        row.find(token, &logit);
        return logit;
    };
    changed_.clear();
    for (const auto &[token, bias] : biases) {
        changed_[token] = raw(token) + bias;
    }
    for (const auto &[token, count] : counts_) {
        const auto biased = changed_.find(token);
        float      l      = biased == changed_.end() ? raw(token) : biased->second;
        l                 = l <= 0 ? l * repeat_ : l / repeat_;
        l -= static_cast<float>(count) * frequency_ + presence_;
        changed_[token] = l;
    }
    for (auto &[token, l] : changed_) {
        l = std::min(l, kMaxLogit);
    }
    for (const auto *tokens : { &forbidden, &bad_tokens }) {
        for (const int32_t token : *tokens) {
            changed_[token] = kNone;
        }
    }
    if (with_ends && n_accepted_ < min_tokens) {
        for (const int32_t token : ends) {
            changed_[token] = kNone;
        }
    }
    for (const auto &word : bad_words) {
        const size_t n = word.size() - 1;
        if (tail_.size() >= n && std::equal(word.begin(), word.end() - 1, tail_.end() - n)) {
            changed_[word.back()] = kNone;
        }
    }
}

int lp_sampler::raised(float *tokens, int n) const {
    int n_found = 0;
    for (const auto &[token, bias] : biases) {
        if (bias > 0 && n_found < n) {
            tokens[n_found++] = static_cast<float>(token);
        }
    }
    const bool raises = penalizes() && (repeat_ < 1.0f || frequency_ < 0.0f || presence_ < 0.0f);
    for (auto it = counts_.begin(); raises && it != counts_.end() && n_found < n; ++it) {
        tokens[n_found++] = static_cast<float>(it->first);
    }
    return n_found;
}

bool lp_sampler::is_forbidden(int32_t token) {
    const auto changed = changed_.find(token);
    return (changed != changed_.end() && !std::isfinite(changed->second)) || !may(token) ||
           (grammar && !allowed_by_grammar(token));
}

// Collects every finite logit that the masks allow; in structured output they often allow few.
void lp_sampler::collect_allowed(const float *logits) {
    if (allowed.empty() && !mask) {
        lp::all(logits, n_vocab, candidates_);
        return;
    }
    candidates_.clear();
    for (int32_t first = 0; first < n_vocab; first += 32) {
        uint32_t bits = allowed.empty() ? ~0u : allowed[static_cast<size_t>(first) / 32];
        bits &= mask ? mask[first / 32] : ~0u;
        for (int32_t token = first; bits && token < n_vocab; token++, bits >>= 1) {
            if (bits & 1 && std::isfinite(logits[token])) {
                candidates_.push_back({ token, logits[token], 0.0f });
            }
        }
    }
}

// Keeps the candidates that the grammar allows, and lowers those that DRY penalizes.
void lp_sampler::check(std::vector<llama_token_data> &candidates) {
    llama_token_data_array a = { candidates.data(), candidates.size(), -1, false };
    for (llama_sampler *s : { grammar.get(), dry.get() }) {
        if (s && a.size > 0) {
            llama_sampler_apply(s, &a);
        }
    }
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                    [](const llama_token_data &c) { return !std::isfinite(c.logit); }),
                     candidates.end());
}

// The full row with all changes; forbidden tokens are minus infinity.
const float *lp_sampler::change(const float *logits) {
    if (changed_.empty() && !checks()) {
        return logits;
    }
    row_.assign(logits, logits + n_vocab);
    for (const auto &[token, logit] : changed_) {
        row_[token] = std::isfinite(logits[token]) ? logit : kNone;
    }
    const uint32_t *const masks[] = { allowed.empty() ? nullptr : allowed.data(), mask };
    for (const uint32_t *bits : masks) {
        for (int32_t token = 0; bits && token < n_vocab; token++) {
            row_[token] = has_bit(bits, token) ? row_[token] : kNone;
        }
    }
    if (grammar || dry) {
        lp::all(row_.data(), n_vocab, candidates_);
        check(candidates_);
        std::fill(row_.begin(), row_.end(), kNone);
        for (const llama_token_data &c : candidates_) {
            row_[c.id] = c.logit;
        }
    }
    return row_.data();
}

// ---- the C entries that use a sampler: accepting tokens, and drawing from a row
int lp_sampler_set_mask(lp_sampler *s, const uint32_t *mask) {
    s->mask = mask;
    return 0;
}

int lp_sampler_accept(lp_sampler *s, int n, const int32_t *tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accept(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_accept_grammar(lp_sampler *s, int n, const int32_t *tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accept_grammar(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_accept_reasoning(lp_sampler *s, int n, const int32_t *tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accept_reasoning(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_accept_drawn(lp_sampler *s, int n, const int32_t *tokens) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n; i++) {
            s->accepted(tokens[i]);
        }
        return 0;
    });
}

int lp_sampler_watch(lp_sampler *s, int n_predicted, const int32_t *predicted, int n_text, const int32_t *text, bool own) {
    return lp::guard(LP_ERROR, [&] {
        s->guesser = std::make_unique<lp::Guesser>(std::vector<int32_t>(predicted, predicted + n_predicted),
                                                   std::vector<int32_t>(text, text + n_text), own);
        return 0;
    });
}

int lp_sampler_guess(const lp_sampler *s, int n, int32_t *tokens, double *share) {
    *share = 0;
    return s->guesser ? s->guesser->guess(n, tokens, share) : 0;
}

int lp_sampler_n_allowed(const lp_sampler *s, int n, const int32_t *tokens) {
    return lp::guard(LP_ERROR, [&] { return s->n_allowed(n, tokens); });
}

int lp_sampler_reset(lp_sampler *s) {
    return lp::guard(LP_ERROR, [&] {
        s->reset();
        return 0;
    });
}

int lp_sampler_draw(lp_sampler *s, const float *logits, int32_t *token) {
    return lp::guard(LP_ERROR, [&] {
        s->n_noted = 0;
        return s->draw(lp::Row(logits), token);
    });
}

int lp_sampler_note(lp_sampler *s, const float *logits, int32_t token) {
    return lp::guard(LP_ERROR, [&] {
        if (s->n_logprobs >= 0) {
            s->n_noted = 0;
            s->note(lp::Row(logits), token);
        }
        return 0;
    });
}

int lp_sampler_logprobs(const lp_sampler *s, int i_draw, int n_max, float *logprob, int32_t *ids, float *logprobs) {
    *logprob = 0;
    if (i_draw < 0 || static_cast<size_t>(i_draw) >= s->n_noted) {
        return 0;
    }
    const lp_sampler::Noted &one = s->noted[i_draw];
    *logprob                     = one.logprob;
    const int n                  = std::min(static_cast<int>(one.top.size()), n_max);
    for (int i = 0; i < n; i++) {
        ids[i]      = one.top[i].id;
        logprobs[i] = one.top[i].p;
    }
    return n;
}

// The positions that each sequence holds: the one place that knows them.
#include "sequence_positions.hpp"

#include "guard.hpp"
#include "step.hpp"

#include <algorithm>
#include <string>

namespace lp {

// ---- the positions of one sequence
void PositionRanges::append() {
    if (ranges_.empty()) {
        ranges_.push_back({ 0, 0 });
    }
    ranges_.back().second++;
}

void PositionRanges::remove(int64_t p0, int64_t p1) {
    std::vector<Range> kept;
    const int64_t      end = p1 < 0 ? INT64_MAX : p1;
    for (const auto & [a, b] : ranges_) {
        if (a < std::min(b, p0)) {
            kept.push_back({ a, std::min(b, p0) });
        }
        if (std::max(a, end) < b) {
            kept.push_back({ std::max(a, end), b });
        }
    }
    ranges_ = std::move(kept);
}

void PositionRanges::copy(const PositionRanges & from, int64_t p0, int64_t p1, bool replaces) {
    PositionRanges part = from;
    part.remove(0, p0);
    if (p1 >= 0) {
        part.remove(p1, -1);
    }
    if (replaces) {
        ranges_.clear();
    }
    ranges_.insert(ranges_.end(), part.ranges_.begin(), part.ranges_.end());
    join();
}

void PositionRanges::shift(int64_t p0, int64_t p1, int64_t delta) {
    PositionRanges moved, stay = *this;
    moved.copy(*this, p0, p1, true);
    stay.remove(p0, p1);
    for (auto & [a, b] : moved.ranges_) {
        a += delta;
        b += delta;
    }
    moved.remove(INT64_MIN, 0);
    ranges_ = std::move(stay.ranges_);
    ranges_.insert(ranges_.end(), moved.ranges_.begin(), moved.ranges_.end());
    join();
}

void PositionRanges::set(int64_t first, int64_t end) {
    ranges_.clear();
    if (first < end) {
        ranges_.push_back({ first, end });
    }
}

void PositionRanges::join() {
    std::sort(ranges_.begin(), ranges_.end());
    std::vector<Range> joined;
    for (const Range & range : ranges_) {
        if (!joined.empty() && range.first <= joined.back().second) {
            joined.back().second = std::max(joined.back().second, range.second);
        } else {
            joined.push_back(range);
        }
    }
    ranges_ = std::move(joined);
}

// ---- the positions of all sequences
SequencePositions::SequencePositions(llama_context * ctx) : ctx_(ctx) {
    const llama_model * model = llama_get_model(ctx);
    const bool          is_unified = llama_n_ctx_seq(ctx) == llama_n_ctx(ctx);
    copy_replaces_ = !is_unified || llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
    const size_t n = llama_n_seq_max(ctx);
    ranges_.resize(n);
    shares_.assign(n, std::vector<char>(n));
}

bool SequencePositions::append(const Step & step) {
    std::vector<int64_t> next(ranges_.size(), -1);
    for (int i = 0; i < step.n_tokens; i++) {
        const size_t s = (size_t) step.seq_ids[(size_t) i];
        if (next[s] < 0) {
            next[s] = ranges_[s].next();
        }
        if (step.positions[(size_t) i] != next[s]++) {
            const std::string text = "positions of sequence " + std::to_string(s) + " must go on from "
                + std::to_string(next[s] - 1) + " without gaps, not " + std::to_string(step.positions[(size_t) i]);
            set_error(text.c_str());
            return false;
        }
    }
    for (int i = 0; i < step.n_tokens; i++) {
        ranges_[(size_t) step.seq_ids[(size_t) i]].append();
    }
    return true;
}

bool SequencePositions::matches_memory(const Step & step) const {
    std::vector<int64_t> next(ranges_.size(), -1);
    for (int i = 0; i < step.n_tokens; i++) {
        const size_t s = (size_t) step.seq_ids[(size_t) i];
        if (next[s] < 0) {
            next[s] = (int64_t) llama_memory_seq_pos_max(llama_get_memory(ctx_), (llama_seq_id) s) + 1;
        }
        if (step.positions[(size_t) i] != next[s]++) {
            return false;
        }
    }
    return true;
}

void SequencePositions::reread() {
    llama_memory_t memory = llama_get_memory(ctx_);
    for (size_t s = 0; s < ranges_.size(); s++) {
        const int64_t last = llama_memory_seq_pos_max(memory, (llama_seq_id) s);
        ranges_[s].set(last < 0 ? 0 : llama_memory_seq_pos_min(memory, (llama_seq_id) s), last + 1);
    }
}

void SequencePositions::set(int seq_id, int n) {
    ranges_[(size_t) seq_id].set(0, n);
    separate((size_t) seq_id);
}

void SequencePositions::separate(size_t seq_id) {
    for (size_t s = 0; s < ranges_.size(); s++) {
        shares_[seq_id][s] = shares_[s][seq_id] = 0;
    }
}

bool SequencePositions::apply(const MemoryOp & op) {
    const size_t     a = (size_t) op.seq_id, b = (size_t) op.other;
    PositionRanges & mine = ranges_[a];
    switch (op.op) {
        case LP_REMOVE:
            mine.remove(op.p0, op.p1);
            if (mine.next() == 0) {
                separate(a);
            }
            return true;
        case LP_COPY:
            ranges_[b].copy(mine, op.p0, op.p1, copy_replaces_);
            if (!copy_replaces_) {
                for (size_t s = 0; s < ranges_.size(); s++) {  // b may now share cells with every sequence that a does
                    shares_[b][s] = shares_[s][b] = shares_[b][s] || shares_[a][s];
                }
                shares_[a][b] = shares_[b][a] = 1;
            }
            return true;
        case LP_SHIFT: {
            for (size_t s = 0; s < ranges_.size(); s++) {
                if (shares_[a][s] && s != a) {
                    const std::string text = "sequence " + std::to_string(a) + " shares cells with sequence "
                        + std::to_string(s) + ", which would be shifted with it; remove one of them first";
                    set_error(text.c_str());
                    return false;
                }
            }
            PositionRanges shifted = mine;
            shifted.shift(op.p0, op.p1, op.delta);
            if (shifted.next() > INT32_MAX) {
                set_error("the shift leads beyond the largest position");
                return false;
            }
            mine = std::move(shifted);
            return true;
        }
        case LP_KEEP:
        case LP_CLEAR:
            for (size_t s = 0; s < ranges_.size(); s++) {
                if (op.op == LP_CLEAR || s != a) {
                    ranges_[s].set(0, 0);
                    separate(s);
                }
            }
            return true;
    }
    return true;
}

}  // namespace lp

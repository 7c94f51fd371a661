// One step: a batch, the ubatches it is cut into, and where its output rows are.
#include "step.hpp"

#include "faults.hpp"
#include "sampler.hpp"

#include <algorithm>
#include <atomic>
#include <string>

namespace lp {

// ---- how llama.cpp cuts a batch into ubatches
namespace {

// With a unified KV cache: runs of at most n_ubatch entries, in the order of the batch.
void cut_runs(int n_tokens, const int8_t *outputs, const UbatchLimits &limits, std::vector<int32_t> &order,
              std::vector<Ubatch> &ubatches) {
    Ubatch ubatch = { 0, 0, 0, 0 };
    for (int i = 0; i < n_tokens; i++) {
        order.push_back(i);
        const int n_more = outputs[i] ? 1 : 0;
        if (ubatch.n == limits.n_ubatch || ubatch.n_outputs + n_more > limits.n_rows) {
            ubatches.push_back(ubatch);
            ubatch = { i, 0, ubatch.first_output + ubatch.n_outputs, 0 };
        }
        ubatch.n++;
        ubatch.n_outputs += n_more;
    }
    ubatches.push_back(ubatch);
}

// With per-sequence KV streams: equally long parts of consecutive sequences. A ubatch starts at the first entry that is
// left; it takes further sequences as long as each has the next id.
void cut_streams(int n_tokens, const int32_t *ids, const int8_t *flags, const UbatchLimits &limits, std::vector<int32_t> &order,
                 std::vector<Ubatch> &ubatches) {
    // The remaining entries of each sequence as a linked list.
    int32_t top = 0;
    for (int i = 0; i < n_tokens; i++) {
        top = std::max(top, ids[i]);
    }
    std::vector<int32_t> head(top + 1, -1), tail(top + 1, -1), n_left(top + 1, 0);
    std::vector<int32_t> next(n_tokens, -1);
    std::vector<char>    used(n_tokens, 0);
    for (int i = 0; i < n_tokens; i++) {
        const int32_t s                         = ids[i];
        (tail[s] < 0 ? head[s] : next[tail[s]]) = i;
        tail[s]                                 = i;
        n_left[s]++;
    }
    int    first  = 0;
    Ubatch ubatch = { 0, 0, 0, 0 };
    while (ubatch.first < n_tokens) {
        while (used[first]) {
            first++;
        }
        const int32_t first_seq = ids[first];
        int32_t       last_seq  = first_seq;
        for (int i = first; i < n_tokens && last_seq - first_seq + 1 < limits.n_ubatch; i++) {
            if (!used[i] && ids[i] == last_seq + 1) {
                last_seq++;
            }
        }
        const int n_seqs = last_seq - first_seq + 1;
        int       length = std::max(limits.n_ubatch / n_seqs, 1);
        for (int32_t s = first_seq; s <= last_seq; s++) {
            length = std::min(length, static_cast<int>(n_left[s]));
        }
        // Shorter parts where they would have too many outputs; one entry of each sequence always has room.
        std::vector<int32_t> at(head.begin() + first_seq, head.begin() + last_seq + 1);
        for (int j = 0, n_rows = 0; j < length; j++) {
            for (int32_t &e : at) {
                n_rows += flags[e] ? 1 : 0;
                e = next[e];
            }
            if (n_rows > limits.n_rows && j > 0) {
                length = j;
            }
        }
        for (int32_t s = first_seq; s <= last_seq; s++) {
            for (int j = 0; j < length; j++) {
                const int32_t e = head[s];
                order.push_back(e);
                used[e] = 1;
                ubatch.n_outputs += flags[e] ? 1 : 0;
                head[s] = next[e];
            }
            n_left[s] -= length;
        }
        ubatch.n = n_seqs * length;
        ubatches.push_back(ubatch);
        ubatch = { ubatch.first + ubatch.n, 0, ubatch.first_output + ubatch.n_outputs, 0 };
    }
}

}  // namespace

void cut_into_ubatches(int n, const int32_t *seq_ids, const int8_t *outputs, const UbatchLimits &limits,
                       std::vector<int32_t> &order, std::vector<Ubatch> &ubatches) {
    if (limits.kv_streams) {
        cut_streams(n, seq_ids, outputs, limits, order, ubatches);
    } else {
        cut_runs(n, outputs, limits, order, ubatches);
    }
}

// ---- host memory that output rows are copied to
HostBuffer::HostBuffer(size_t n, ggml_backend_buffer_type_t pinned_type) : n_floats(n) {
    if (pinned_type && n_floats > 0) {
        pinned = ggml_backend_buft_alloc_buffer(pinned_type, n_floats * sizeof(float));
        data   = pinned ? static_cast<float *>(ggml_backend_buffer_get_base(pinned)) : nullptr;
    }
    if (!data) {
        plain.reset(new float[std::max<size_t>(n_floats, 1)]);
        data = plain.get();
    }
}

HostBuffer::~HostBuffer() {
    if (pinned) {
        ggml_backend_buffer_free(pinned);
    }
}

std::shared_ptr<HostBuffer> HostMemoryPool::take(size_t n_floats) {
    if (!pinned_type_) {
        return std::make_shared<HostBuffer>(n_floats, nullptr);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto &kept : kept_) {
        if (kept.use_count() == 1 && kept->n_floats >= n_floats) {
            std::atomic_thread_fence(std::memory_order_acquire);  // the last reader's loads come before our writes
            return kept;
        }
    }
    auto made = std::make_shared<HostBuffer>(n_floats, pinned_type_);
    for (auto &kept : kept_) {
        if (kept.use_count() == 1) {  // unused, and too small
            kept = made;
            return made;
        }
    }
    if (kept_.size() < n_kept_) {
        kept_.push_back(made);
    }
    return made;
}

void Step::clear() {
    state  = State::queued;
    code   = 0;
    slot   = -1;
    n_left = n_exposed = 0;
    data               = nullptr;
    released = awaited = computed = pending = observed = fetching = moving = false;
    stamps                                                                 = {};
    host.reset();
    results.reset();
    top.reset();
    graph.clear();
    wanted.clear();
    fetched.clear();
    needs_rows = needs_all = true;
    needs_candidates       = false;
    error.clear();
}

void Step::set(const BatchArrays &batch, const UbatchLimits &limits) {
    const int n = n_tokens = batch.n;
    ubatches.clear();
    order.clear();
    output_of_entry.resize(n);
    n_outputs = 0;
    for (int i = 0; i < n; i++) {
        output_of_entry[i] = batch.outputs[i] ? n_outputs++ : -1;
    }
    cut_into_ubatches(n, batch.seq_ids, batch.outputs, limits, order, ubatches);
    tokens.resize(n);
    positions.resize(n);
    seq_ids.resize(n);
    outputs.resize(n);
    embeddings.resize(batch.embeddings ? n : 0);
    grid.resize(batch.grid ? 2 * static_cast<size_t>(n) : 0);
    is_causal = batch.is_causal;
    places.clear();
    for (size_t i = 0; i < static_cast<size_t>(n); i++) {
        const size_t e = order[i];
        tokens[i]      = batch.tokens[e];
        positions[i]   = batch.positions[e];
        seq_ids[i]     = batch.seq_ids[e];
        outputs[i]     = batch.outputs[e];
        if (batch.embeddings) {
            embeddings[i] = batch.embeddings[e];
        }
        if (batch.grid) {
            grid[2 * i]     = batch.grid[2 * e];
            grid[2 * i + 1] = batch.grid[2 * e + 1];
        }
        if (batch.outputs[e]) {
            places.push_back(output_of_entry[e]);
        }
    }
}

void Step::advance(const Step &last, const int32_t *sampled) {
    n_tokens  = last.n_tokens;
    n_outputs = last.n_outputs;
    tokens    = last.tokens;
    positions = last.positions;
    seq_ids   = last.seq_ids;
    order     = last.order;
    outputs   = last.outputs;
    ubatches  = last.ubatches;
    embeddings.clear();
    grid.clear();
    is_causal       = true;
    output_of_entry = last.output_of_entry;
    places          = last.places;
    for (size_t i = 0; i < static_cast<size_t>(n_tokens); i++) {
        tokens[i] = sampled[order[i]];
        positions[i]++;
    }
}

void Step::choose_wanted(lp_sampler **samplers, const int32_t *targets, int n_top, int n_vocab, bool stays) {
    graph.assign(n_outputs, {});
    wanted.assign(n_outputs, 0);
    int n_rows = 0;
    for (size_t i = 0; i < static_cast<size_t>(n_outputs); i++) {
        lp_sampler *sampler = samplers ? samplers[i] : nullptr;
        char       &mine    = wanted[i];
        // Log-probabilities come from the candidates, which may not suffice; then the whole row must still be there.
        const bool wants_logprobs = sampler && sampler->n_logprobs >= 0;
        if (sampler && (stays || !wants_logprobs) && in_graph(sampler, &graph[i])) {
            mine |= wants_logprobs ? token | candidates : token;
        } else if (sampler && stays && from_candidates(sampler, &graph[i])) {
            mine |= candidates;
        } else if (sampler) {
            mine |= row;
            graph[i] = {};
        }
        const int32_t *scored = targets ? targets + i * GraphRow::kTargets : nullptr;
        if (scored && scored[0] >= 0) {
            for (int j = 0; j < GraphRow::kTargets; j++) {
                graph[i].targets[j] = static_cast<float>(std::clamp(scored[j], 0, n_vocab - 1));
            }
            mine |= n_top == 0 ? target : stays && n_top < GraphSampler::kMaxCandidates ? target | candidates : row;
        }
        mine |= mine ? 0 : row;
        n_rows += (mine & row) != 0;
        needs_candidates = needs_candidates || mine & candidates;
    }
    needs_rows = n_rows > 0;
    needs_all  = n_rows == n_outputs;
    if (std::all_of(wanted.begin(), wanted.end(), [](char flags) { return flags == row; })) {
        graph.clear();
        wanted.clear();
    }
}

// ---- the positions that each sequence holds: the one place that knows them
// ---- the positions of one sequence
void PositionRanges::append(int64_t position) {
    if (ranges_.empty() || position > ranges_.back().second) {
        ranges_.push_back({ position, position });
    }
    ranges_.back().second = position + 1;
}

void PositionRanges::remove(int64_t p0, int64_t p1) {
    std::vector<Range> kept;
    const int64_t      end = p1 < 0 ? INT64_MAX : p1;
    for (const auto &[a, b] : ranges_) {
        if (a < std::min(b, p0)) {
            kept.push_back({ a, std::min(b, p0) });
        }
        if (std::max(a, end) < b) {
            kept.push_back({ std::max(a, end), b });
        }
    }
    ranges_ = std::move(kept);
}

void PositionRanges::copy(const PositionRanges &from, int64_t p0, int64_t p1, bool replaces) {
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
    for (auto &[a, b] : moved.ranges_) {
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
    for (const Range &range : ranges_) {
        if (!joined.empty() && range.first <= joined.back().second) {
            joined.back().second = std::max(joined.back().second, range.second);
        } else {
            joined.push_back(range);
        }
    }
    ranges_ = std::move(joined);
}

// ---- the positions of all sequences
SequencePositions::SequencePositions(llama_context *ctx) : ctx_(ctx) {
    const llama_model *model      = llama_get_model(ctx);
    const bool         is_unified = llama_n_ctx_seq(ctx) == llama_n_ctx(ctx);
    copy_replaces_                = !is_unified || llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
    const size_t n                = llama_n_seq_max(ctx);
    ranges_.resize(n);
    shares_.assign(n, std::vector<char>(n));
}

bool SequencePositions::follows(const Step &step, size_t i, int64_t next) const {
    const int64_t position = step.positions[i];
    const bool    is_row   = !step.embeddings.empty() && step.embeddings[i];
    return position == next || (has_grids_ && (position > next || (is_row && position == next - 1)));
}

bool SequencePositions::append(const Step &step) {
    has_grids_ = has_grids_ || !step.grid.empty();
    std::vector<int64_t> next(ranges_.size(), -1);
    for (int i = 0; i < step.n_tokens; i++) {
        const size_t s = step.seq_ids[i];
        if (next[s] < 0) {
            next[s] = ranges_[s].next();
            ranges_[s].make_room();
        }
        const int64_t position = step.positions[i];
        if (!follows(step, i, next[s])) {
            const std::string text = "positions of sequence " + std::to_string(s) + " must go on from " +
                                     std::to_string(next[s]) + " without gaps, not " + std::to_string(position);
            set_error(text.c_str());
            return false;
        }
        next[s] = position + 1;
    }
    for (int i = 0; i < step.n_tokens; i++) {
        ranges_[step.seq_ids[i]].append(step.positions[i]);
    }
    return true;
}

bool SequencePositions::matches_memory(const Step &step) const {
    std::vector<int64_t> next(ranges_.size(), -1);
    for (int i = 0; i < step.n_tokens; i++) {
        const size_t s = step.seq_ids[i];
        if (next[s] < 0) {
            next[s] = int64_t{ llama_memory_seq_pos_max(llama_get_memory(ctx_), s) } + 1;
        }
        if (!follows(step, i, next[s])) {
            return false;
        }
        next[s] = step.positions[i] + 1;
    }
    return true;
}

void SequencePositions::reread() {
    llama_memory_t memory = llama_get_memory(ctx_);
    for (size_t s = 0; s < ranges_.size(); s++) {
        const int64_t last = llama_memory_seq_pos_max(memory, s);
        ranges_[s].set(last < 0 ? 0 : llama_memory_seq_pos_min(memory, s), last + 1);
    }
}

void SequencePositions::set(int seq_id, int n) {
    ranges_[seq_id].set(0, n);
    separate(seq_id);
}

void SequencePositions::separate(size_t seq_id) {
    for (size_t s = 0; s < ranges_.size(); s++) {
        shares_[seq_id][s] = shares_[s][seq_id] = 0;
    }
}

bool SequencePositions::apply(const MemoryOp &op) {
    const size_t    a = op.seq_id, b = op.other;
    PositionRanges &mine = ranges_[a];
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
                    const std::string text = "sequence " + std::to_string(a) + " shares cells with sequence " +
                                             std::to_string(s) + ", which would be shifted with it; remove one of them first";
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

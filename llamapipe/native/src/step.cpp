// How a batch is cut into decodes: as llama.cpp would cut it into ubatches.
#include "step.hpp"

#include "sampler.hpp"

#include <algorithm>
#include <new>

namespace lp {

HostRows::HostRows(size_t n_floats, ggml_backend_buffer_type_t buft) : n_floats(n_floats) {
    if (buft && n_floats > 0) {
        pinned = ggml_backend_buft_alloc_buffer(buft, n_floats * sizeof(float));
        data   = pinned ? (float *) ggml_backend_buffer_get_base(pinned) : nullptr;
    }
    if (!data) {
        plain.reset(new float[std::max<size_t>(n_floats, 1)]);
        data = plain.get();
    }
}

HostRows::~HostRows() {
    if (pinned) {
        ggml_backend_buffer_free(pinned);
    }
}

void Step::clear() {
    state    = State::queued;
    code     = 0;
    slot     = -1;
    n_left   = n_exposed = 0;
    data     = nullptr;
    released = wanted = computed = pending = observed = fetching = moving = false;
    stamps   = {};
    host.reset();
    results.reset();
    found.reset();
    graph.clear();
    wishes.clear();
    fetched.clear();
    needs_rows = needs_all = true;
    needs_candidates       = false;
    error.clear();
}

void Step::set(int n, const int32_t * tokens_, const int32_t * positions_, const int32_t * seq_ids_,
               const int8_t * outputs_, const Shape & shape) {
    n_tokens = n;
    parts.clear();
    order.clear();
    output_of_entry.resize((size_t) n);
    n_outputs = 0;
    for (int i = 0; i < n; i++) {
        output_of_entry[i] = outputs_[i] ? n_outputs++ : -1;
    }
    outputs.assign(outputs_, outputs_ + n);
    if (shape.streams) {
        cut_streams(seq_ids_, outputs_, shape);
    } else {
        for (int i = 0; i < n; i++) {
            order.push_back(i);
        }
        cut_runs(shape);
    }
    tokens.resize((size_t) n);
    positions.resize((size_t) n);
    seq_ids.resize((size_t) n);
    places.clear();
    for (int i = 0; i < n; i++) {
        const int e  = order[i];
        tokens[i]    = tokens_[e];
        positions[i] = positions_[e];
        seq_ids[i]   = seq_ids_[e];
        outputs[i]   = outputs_[e];
        if (outputs_[e]) {
            places.push_back(output_of_entry[e]);
        }
    }
}

void Step::advance(const Step & last, const int32_t * sampled) {
    n_tokens        = last.n_tokens;
    n_outputs       = last.n_outputs;
    tokens          = last.tokens;
    positions       = last.positions;
    seq_ids         = last.seq_ids;
    order           = last.order;
    outputs         = last.outputs;
    parts           = last.parts;
    output_of_entry = last.output_of_entry;
    places          = last.places;
    for (int i = 0; i < n_tokens; i++) {
        tokens[i] = sampled[order[i]];
        positions[i]++;
    }
}

void Step::wish(lp_sampler ** samplers, const int32_t * targets, int n_top, int n_vocab, bool stays) {
    graph.assign((size_t) n_outputs, {});
    wishes.assign((size_t) n_outputs, 0);
    int n_rows = 0;
    for (size_t i = 0; i < (size_t) n_outputs; i++) {
        lp_sampler * sampler = samplers ? samplers[i] : nullptr;
        char &       wish    = wishes[i];
        const bool notes = sampler && sampler->n_logprobs >= 0;  // from candidates, which may not be enough for it
        if (sampler && (stays || !notes) && in_graph(sampler, &graph[i])) {
            wish |= notes ? token | candidates : token;
        } else if (sampler && stays && from_candidates(sampler, &graph[i])) {
            wish |= candidates;
        } else if (sampler) {
            wish |= row;
            graph[i] = {};
        }
        const int32_t * mine = targets ? targets + i * GraphRow::n_targets : nullptr;
        if (mine && mine[0] >= 0) {
            for (int j = 0; j < GraphRow::n_targets; j++) {
                graph[i].targets[j] = (float) std::clamp(mine[j], 0, n_vocab - 1);
            }
            wish |= n_top == 0 ? target : stays && n_top < GraphSampler::max_candidates ? target | candidates : row;
        }
        wish |= wish ? 0 : row;
        n_rows += (wish & row) != 0;
        needs_candidates = needs_candidates || wish & candidates;
    }
    needs_rows = n_rows > 0;
    needs_all  = n_rows == n_outputs;
    if (std::all_of(wishes.begin(), wishes.end(), [](char wish) { return wish == row; })) {
        graph.clear();
        wishes.clear();
    }
}

// Runs of at most n_ubatch entries, as they come.
void Step::cut_runs(const Shape & shape) {
    Part part = { 0, 0, 0, 0 };
    for (int i = 0; i < n_tokens; i++) {
        const int n_more = outputs[i] ? 1 : 0;
        if (part.n == shape.n_ubatch || part.n_outputs + n_more > shape.n_rows) {
            parts.push_back(part);
            part = { i, 0, part.first_output + part.n_outputs, 0 };
        }
        part.n++;
        part.n_outputs += n_more;
    }
    parts.push_back(part);
}

// Equally long parts of consecutive sequences: those whose first entries left come in that order.
void Step::cut_streams(const int32_t * ids, const int8_t * flags, const Shape & shape) {
    // The entries of each sequence as a list: the first one left, and the next of each.
    int32_t top = 0;
    for (int i = 0; i < n_tokens; i++) {
        top = std::max(top, ids[i]);
    }
    std::vector<int32_t> head((size_t) top + 1, -1), tail((size_t) top + 1, -1), n_left((size_t) top + 1, 0);
    std::vector<int32_t> next((size_t) n_tokens, -1);
    std::vector<char>    used((size_t) n_tokens, 0);
    for (int i = 0; i < n_tokens; i++) {
        const int32_t s = ids[i];
        (tail[s] < 0 ? head[s] : next[tail[s]]) = i;
        tail[s]                                 = i;
        n_left[s]++;
    }
    int  first = 0;
    Part part  = { 0, 0, 0, 0 };
    while (part.first < n_tokens) {
        while (used[first]) {
            first++;
        }
        const int32_t first_seq = ids[first];
        int32_t       last_seq  = first_seq;
        for (int i = first; i < n_tokens && last_seq - first_seq + 1 < shape.n_ubatch; i++) {
            if (!used[i] && ids[i] == last_seq + 1) {
                last_seq++;
            }
        }
        const int n_seqs = last_seq - first_seq + 1;
        int       length = std::max(shape.n_ubatch / n_seqs, 1);
        for (int32_t s = first_seq; s <= last_seq; s++) {
            length = std::min(length, (int) n_left[s]);
        }
        // Fewer where their outputs would be too many; one of each always has room.
        std::vector<int32_t> at(head.begin() + first_seq, head.begin() + last_seq + 1);
        for (int j = 0, n_rows = 0; j < length; j++) {
            for (int32_t & e : at) {
                n_rows += flags[e] ? 1 : 0;
                e = next[e];
            }
            if (n_rows > shape.n_rows && j > 0) {
                length = j;
            }
        }
        for (int32_t s = first_seq; s <= last_seq; s++) {
            for (int j = 0; j < length; j++) {
                const int32_t e = head[s];
                order.push_back(e);
                used[e] = 1;
                part.n_outputs += flags[e] ? 1 : 0;
                head[s] = next[e];
            }
            n_left[s] -= length;
        }
        part.n = n_seqs * length;
        parts.push_back(part);
        part = { part.first + part.n, 0, part.first_output + part.n_outputs, 0 };
    }
}

}  // namespace lp

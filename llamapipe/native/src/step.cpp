// One step: a batch, the ubatches it is cut into, and where its output rows are.
#include "step.hpp"

#include "sampler.hpp"

#include <algorithm>

namespace lp {

void Step::clear() {
    state    = State::queued;
    code     = 0;
    slot     = -1;
    n_left   = n_exposed = 0;
    data     = nullptr;
    released = awaited = computed = pending = observed = fetching = moving = false;
    stamps   = {};
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

void Step::set(const BatchArrays & batch, const UbatchLimits & limits) {
    const int n = n_tokens = batch.n;
    ubatches.clear();
    order.clear();
    output_of_entry.resize((size_t) n);
    n_outputs = 0;
    for (int i = 0; i < n; i++) {
        output_of_entry[(size_t) i] = batch.outputs[i] ? n_outputs++ : -1;
    }
    cut_into_ubatches(n, batch.seq_ids, batch.outputs, limits, order, ubatches);
    tokens.resize((size_t) n);
    positions.resize((size_t) n);
    seq_ids.resize((size_t) n);
    outputs.resize((size_t) n);
    places.clear();
    for (size_t i = 0; i < (size_t) n; i++) {
        const size_t e = (size_t) order[i];
        tokens[i]      = batch.tokens[e];
        positions[i]   = batch.positions[e];
        seq_ids[i]     = batch.seq_ids[e];
        outputs[i]     = batch.outputs[e];
        if (batch.outputs[e]) {
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
    ubatches        = last.ubatches;
    output_of_entry = last.output_of_entry;
    places          = last.places;
    for (size_t i = 0; i < (size_t) n_tokens; i++) {
        tokens[i] = sampled[order[i]];
        positions[i]++;
    }
}

void Step::choose_wanted(lp_sampler ** samplers, const int32_t * targets, int n_top, int n_vocab, bool stays) {
    graph.assign((size_t) n_outputs, {});
    wanted.assign((size_t) n_outputs, 0);
    int n_rows = 0;
    for (size_t i = 0; i < (size_t) n_outputs; i++) {
        lp_sampler * sampler = samplers ? samplers[i] : nullptr;
        char &       mine    = wanted[i];
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
        const int32_t * scored = targets ? targets + i * GraphRow::n_targets : nullptr;
        if (scored && scored[0] >= 0) {
            for (int j = 0; j < GraphRow::n_targets; j++) {
                graph[i].targets[j] = (float) std::clamp(scored[j], 0, n_vocab - 1);
            }
            mine |= n_top == 0 ? target : stays && n_top < GraphSampler::max_candidates ? target | candidates : row;
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

}  // namespace lp

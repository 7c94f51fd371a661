// What a request's sampling asks of the graph, kept while its stages are added.
#include "sampler_graph.hpp"

#include <algorithm>
#include <cmath>

namespace lp {

void GraphStages::follows(Stage stage) {
    other_ = other_ || stage <= last_;
    last_  = stage;
}

void GraphStages::add_top_k(int k) {
    if (last_ == top_k) {  // several in a row are the smallest
        top_k_ = std::min(top_k_, k);
        return;
    }
    follows(top_k);
    top_k_ = k;
}

void GraphStages::add_top_p(float p) {
    follows(top_p);
    top_p_ = p;
}

void GraphStages::add_min_p(float p) {
    follows(min_p);
    min_p_ = p;
}

void GraphStages::add_temperature(float t) {
    follows(temperature);
    temperature_ = t;
}

bool GraphStages::row(int n_vocab, double uniform, GraphRow * row) const {
    *row = {};
    if (greedy_) {
        return true;
    }
    const int k = top_k_ > 0 ? std::min(top_k_, n_vocab) : n_vocab;
    const bool sorted = k < n_vocab || top_p_ < 1.0f;  // else the other route draws in the order of the vocabulary
    if (other_ || !sorted || k > GraphSampler::max_candidates) {
        return false;
    }
    row->inverse_temperature = 1.0f / temperature_;
    row->top_k               = (float) k;
    if (top_p_ < 1.0f) {
        row->top_p = std::max(top_p_, std::numeric_limits<float>::min());  // the first token stays
    }
    if (min_p_ > 0.0f) {
        // What equals the bar is kept, and comparisons are strict: a bar one step lower, and not in what may be flushed to 0.
        row->log_min_p = std::min(std::nextafter(std::log(min_p_), -1e9f), -1e-30f);
    }
    row->uniform = std::min((float) uniform, std::nextafter(1.0f, 0.0f));  // it may round up to 1
    return true;
}

}  // namespace lp

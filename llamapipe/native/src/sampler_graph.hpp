// What a request's sampling asks of the graph, kept while its stages are added.
#pragma once

#include "graph_sampler.hpp"

namespace lp {

// Only top_k, top_p, min_p and temperature, each at most once and in this order, can be done in the graph.
class GraphStages {
public:
    void add_top_k(int k);
    void add_top_p(float p);
    void add_min_p(float p);
    void add_temperature(float t);
    void add_greedy() { greedy_ = true; }  // whatever came before
    void add_other() { other_ = true; }

    bool greedy() const { return greedy_; }
    // What a draw with this uniform number needs; false: it is not for the graph.
    bool row(int n_vocab, double uniform, GraphRow * row) const;

private:
    enum Stage { none, top_k, top_p, min_p, temperature };
    void follows(Stage stage);

    Stage last_        = none;
    int   top_k_       = 0;
    float top_p_       = 1.0f;
    float min_p_       = 0.0f;
    float temperature_ = 1.0f;
    bool  greedy_ = false, other_ = false;
};

}  // namespace lp

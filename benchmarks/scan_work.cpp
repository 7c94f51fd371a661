// The row scans of sampling, over and over: for count_instructions.py, which has its instructions counted.
#include "scan.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>

int main(int, char **arguments) {
    const int          n_vocab = 32000, n_rounds = std::atoi(arguments[1]);
    std::vector<float> row(n_vocab);
    uint32_t           state = 1;
    for (float &logit : row) {
        state = state * 1664525u + 1013904223u;  // Numerical Recipes' generator; any spread of values does
        logit = static_cast<float>(state >> 8) * (12.0f / (1 << 24)) - 6.0f;
    }
    std::vector<float> coarse = row;  // of few values: thousands equal the last candidate
    for (float &logit : coarse) {
        logit = std::round(logit * 8) / 8;
    }
    std::vector<llama_token_data> out;
    double                        sum = 0;
    for (int i = 0; i < n_rounds; i++) {
        row[i] += 1.0f;
        lp::top_k(row.data(), n_vocab, 40, out);
        sum += out.back().logit + lp::log_sum_exp(row.data(), n_vocab) + lp::argmax(row.data(), n_vocab);
        lp::top_k(coarse.data(), n_vocab, 40, out);
        sum += out.back().id;
        lp::at_least(row.data(), n_vocab, 0.05f, out);
        sum += out.size();
        lp::nucleus(row.data(), n_vocab, 0.5f, out);
        sum += out.size() + lp::draw(row.data(), n_vocab, 0.8f, 0.5);
    }
    std::printf("%f\n", sum);
}

// Scans of a logits row, with the compiler's vector types.
#pragma once

#include "native.h"

#include <vector>

namespace lp {

// Index of the largest finite logit, the lowest such index on ties; -1 when no logit is finite.
int32_t argmax(const float *logits, int n);

// The k largest finite logits in descending order, on ties the lower id first. out is reused.
void top_k(const float *logits, int n, int k, std::vector<llama_token_data> &out);

// The logarithm of the sum of exp over all finite logits, to about 3e-7; minus infinity when none is finite.
double log_sum_exp(const float *logits, int n);

// The token at `u` in [0, 1) of the distribution of logits / temperature, bins by id; -1 when no logit is finite.
int32_t draw(const float *logits, int n, float temperature, double u);

// The fewest of the largest finite logits whose probabilities come to p, in descending order, on ties the lower id first.
// out is reused.
void nucleus(const float *logits, int n, float p, std::vector<llama_token_data> &out);

// Every finite logit of a token at least p times as probable as the first, by id. out is reused.
void at_least(const float *logits, int n, float p, std::vector<llama_token_data> &out);

// Every finite logit, by id. out is reused.
void all(const float *logits, int n, std::vector<llama_token_data> &out);

}  // namespace lp

// Scans of a logits row, written as plain loops over fixed lanes that the compiler turns into vector instructions.
#pragma once

#include "native.h"

#include <vector>

namespace lp {

// Index of the largest finite logit, the lowest such index on ties; -1 when no logit is finite.
int32_t argmax(const float * logits, int n);

// The k largest finite logits in descending order, on ties the lower id first. out is reused.
void top_k(const float * logits, int n, int k, std::vector<llama_token_data> & out);

// Every finite logit, by id. out is reused.
void all(const float * logits, int n, std::vector<llama_token_data> & out);

}  // namespace lp

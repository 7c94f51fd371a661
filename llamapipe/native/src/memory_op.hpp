// An operation on the KV cells of sequences, between steps.
#pragma once

#include "native.h"

namespace lp {

// `p0` and `p1` are positions, `p1` exclusive and negative for the end.
struct MemoryOp {
    lp_memory_op op;
    int          seq_id, other, p0, p1, delta;
};

// Changes llama.cpp's memory; not while a graph is computed. 1 done, 0 refused, LP_ERROR.
int apply_memory_op(llama_context * ctx, const MemoryOp & op);

}  // namespace lp

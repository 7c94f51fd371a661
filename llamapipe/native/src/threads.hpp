// The compute threads of a context: a ggml threadpool of its own, so that nothing is created for each graph.
#pragma once

#include "native.h"

namespace lp {

// Makes a pool of n_threads and has the context use it. poll: how eagerly idle workers spin, 0 to 100.
void attach_threads(llama_context * ctx, int n_threads, int poll);

// Has the pool's idle workers sleep now; the next graph wakes them.
void rest_threads(llama_context * ctx);

// Frees the pool of a context that is freed already.
void free_threads(llama_context * ctx);

}  // namespace lp

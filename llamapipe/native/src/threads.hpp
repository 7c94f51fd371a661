// The compute threads of a context: a ggml threadpool of its own, so that nothing is created for each graph.
#pragma once

#include "native.h"

#include <memory>

namespace lp {

// Makes a pool of n_threads and has the context use it. poll: how eagerly idle workers spin, 0 to 100.
void attach_threads(llama_context * ctx, int n_threads, int poll);

// Has the pool's workers sleep until the next graph. Not while one is computed: it would never end.
void rest_threads(llama_context * ctx);

// What a context computes with, to be kept until it is freed; it has no threads then.
std::shared_ptr<void> take_threads(llama_context * ctx);

}  // namespace lp

// The one name of llama.cpp that its public headers do not declare: llama_context::get_sched(). Through a context's scheduler
// we find the backend that computes, to record events on. Without it everything works, with more waiting.
#include "llama_internals.hpp"

#include "llama-context.h"

ggml_backend_t lp::compute_backend(llama_context * ctx, ggml_backend_dev_t device) {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == device) {
            return backend;
        }
    }
    return nullptr;
}

size_t lp::scratch_bytes(llama_context * ctx) {
    ggml_backend_sched_t sched = ctx->get_sched();
    size_t               n     = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        n += ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i));
    }
    return n;
}

// The C entries of contexts: their life, one decode from flat arrays, rows of logits, memory operations.
#include "assertions.hpp"
#include "faults.hpp"
#include "guard.hpp"
#include "handles.hpp"
#include "llama_internals.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

lp_context * lp_context_new(llama_model * model, const llama_context_params * params, int poll, int64_t n_ring_rows,
                            bool samples, bool attends, bool multiplies) {
    return lp::guard((lp_context *) nullptr, [&] {
        const lp::AssertionsThrow  throwing;
        const lp::Context::Options options = { poll, n_ring_rows, samples, attends, multiplies };
        return lp::without_faults((lp_context *) nullptr, [&] {
            return new lp_context{ std::make_shared<lp::Context>(model, *params, options) };
        });
    });
}

void lp_context_free(lp_context * context) {
    lp::guard(0, [&] {
        delete context;
        return 0;
    });
}

llama_context * lp_context_llama(const lp_context * context) { return context->shared->llama(); }

bool lp_context_has_ring(const lp_context * context) { return context->shared->stager() != nullptr; }

bool lp_context_ring_in_host_memory(const lp_context * context) {
    const auto & stager = context->shared->stager();
    return stager && stager->host();
}

const char * lp_context_staging_problem(const lp_context * context) { return context->shared->staging_problem(); }

const char * lp_context_sampler_problem(const lp_context * context) {
    const auto & stager = context->shared->stager();
    return stager ? stager->sampler_problem() : context->shared->staging_problem();
}

void lp_context_rest(lp_context * context) {
    lp::guard(0, [&] {
        context->shared->threads().rest();
        return 0;
    });
}

int lp_context_set_threads(lp_context * context, int n_threads, int n_threads_batch) {
    return lp::guard(LP_ERROR, [&] {
        context->shared->threads().set(n_threads, n_threads_batch);
        return 0;
    });
}

int lp_context_thread_ids(lp_context * context, int n_max, int32_t * ids) {
    return lp::guard(LP_ERROR, [&] {
        const std::vector<int> found = context->shared->threads().thread_ids();
        const int              n     = std::min(n_max, (int) found.size());
        std::copy(found.begin(), found.begin() + n, ids);
        return n;
    });
}

int lp_decode(lp_context * context, int n_tokens, const int32_t * tokens, const int32_t * positions,
              const int32_t * seq_ids, const int8_t * outputs) {
    return lp::guard(LP_ERROR, [&] { return context->shared->decode({ n_tokens, tokens, positions, seq_ids, outputs }); });
}

int lp_embeddings(lp_context * context, int n, bool pooled, int width, float * out) {
    return lp::guard(LP_ERROR, [&] {
        llama_context * llama = context->shared->llama();
        for (int i = 0; i < n; i++) {
            const float * row = pooled ? llama_get_embeddings_seq(llama, i) : llama_get_embeddings_ith(llama, i);
            if (!row) {
                lp::set_error("the last batch has no such embedding");
                return (int) LP_ERROR;
            }
            memcpy(out + (size_t) i * (size_t) width, row, sizeof(float) * (size_t) width);
        }
        return 0;
    });
}

int lp_logits(lp_context * context, int n_rows, const int32_t * rows, int n_vocab, float * out) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n_rows; i++) {
            const float * row = llama_get_logits_ith(context->shared->llama(), rows[i]);
            if (!row) {
                lp::set_error("this entry of the last batch is not an output");
                return (int) LP_ERROR;
            }
            memcpy(out + (size_t) i * (size_t) n_vocab, row, sizeof(float) * (size_t) n_vocab);
        }
        return 0;
    });
}

int lp_context_memory(lp_context * context, enum lp_memory_op op, int seq_id, int other, int p0, int p1) {
    return lp::apply_memory_op(context->shared->llama(), { op, seq_id, other, p0, p1, 0 });
}

// ---- tests
int64_t lp_context_scratch_bytes(lp_context * context) {
    return lp::guard((int64_t) LP_ERROR, [&] { return (int64_t) lp::scratch_bytes(context->shared->llama()); });
}

int64_t lp_context_ring_bytes(const lp_context * context) {
    const auto & stager = context->shared->stager();
    return stager && stager->buffer() ? (int64_t) ggml_backend_buffer_get_size(stager->buffer()) : 0;
}

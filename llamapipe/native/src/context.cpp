// Contexts: creation, one decode from flat arrays, logits rows, memory operations.
#include "accessor.hpp"
#include "collector.hpp"
#include "guard.hpp"
#include "pipeline.hpp"
#include "threads.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

lp_collector * lp_collector_new(const llama_model * model, int n_seq_max, int64_t n_rows, bool samples) {
    return lp::guard((lp_collector *) nullptr, [&] {
        const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        return new lp_collector{ std::make_shared<lp::Collector>(n_vocab, n_seq_max, n_rows, samples) };
    });
}

const char * lp_collector_problem(const lp_collector * collector) {
    return collector->shared->attached() ? nullptr : collector->shared->problem();
}

const char * lp_collector_sampler_problem(const lp_collector * collector) { return collector->shared->sampler_problem(); }

int64_t lp_collector_bytes(const lp_collector * collector) {
    ggml_backend_buffer_t buffer = collector->shared->buffer();
    return buffer ? (int64_t) ggml_backend_buffer_get_size(buffer) : 0;
}

bool lp_collector_in_host_memory(const lp_collector * collector) { return collector->shared->host() != nullptr; }

void lp_collector_free(lp_collector * collector) { delete collector; }

llama_context * lp_context_new(llama_model * model, const llama_context_params * given, int poll,
                               lp_collector * collector) {
    lp::set_error("llama.cpp could not create the context");
    llama_context_params   copy   = *given;
    llama_context_params * params = &copy;
    llama_context *        ctx    = lp::guard((llama_context *) nullptr, [&] {
        if (collector) {
            collector->shared->configure(copy);
        }
        return llama_init_from_model(model, copy);
    });
    if (!ctx) {
        return nullptr;
    }
    const bool attached = lp::guard(false, [&] {
        lp::attach_threads(ctx, params->n_threads, params->n_threads_batch, poll);
        return true;
    });
    if (!attached) {
        lp_context_free(ctx);
        return nullptr;
    }
    return ctx;
}

void lp_context_free(llama_context * ctx) {
    lp::guard(0, [&] {
        const auto threads = lp::take_threads(ctx);  // first: another context may get this one's address
        llama_free(ctx);
        return 0;
    });
}

void lp_context_rest(llama_context * ctx) {
    lp::guard(0, [&] {
        if (const auto threads = lp::threads_of(ctx)) {
            threads->rest();
        }
        return 0;
    });
}

int lp_context_set_threads(llama_context * ctx, int n_threads, int n_threads_batch) {
    return lp::guard(LP_ERROR, [&] {
        if (const auto threads = lp::threads_of(ctx)) {
            threads->set(n_threads, n_threads_batch);
        }
        return 0;
    });
}

int64_t lp_context_scratch_bytes(llama_context * ctx) {
    return lp::guard((int64_t) LP_ERROR, [&] { return (int64_t) lp::scratch_bytes(ctx); });
}

int lp_decode(llama_context * ctx, int n_tokens, const int32_t * tokens, const int32_t * positions,
              const int32_t * seq_ids, const int8_t * outputs) {
    return lp::guard(LP_ERROR, [&] {
        // llama_batch wants a pointer to a list of sequences for each token; ours have exactly one.
        thread_local std::vector<int32_t>        n_seq_id;
        thread_local std::vector<llama_seq_id *> seq_id;
        if ((int) n_seq_id.size() < n_tokens) {
            n_seq_id.resize(n_tokens, 1);
            seq_id.resize(n_tokens);
        }
        for (int i = 0; i < n_tokens; i++) {
            seq_id[i] = const_cast<int32_t *>(seq_ids + i);
        }
        llama_batch batch = {};
        batch.n_tokens    = n_tokens;
        batch.token       = const_cast<int32_t *>(tokens);
        batch.pos         = const_cast<int32_t *>(positions);
        batch.n_seq_id    = n_seq_id.data();
        batch.seq_id      = seq_id.data();
        batch.logits      = const_cast<int8_t *>(outputs);
        if (const auto threads = lp::threads_of(ctx)) {
            threads->apply();
        }
        lp::set_error("see the log llamapipe.native");
        return (int) llama_decode(ctx, batch);
    });
}

int lp_logits(llama_context * ctx, int n_rows, const int32_t * rows, int n_vocab, float * out) {
    return lp::guard(LP_ERROR, [&] {
        for (int i = 0; i < n_rows; i++) {
            const float * row = llama_get_logits_ith(ctx, rows[i]);
            if (!row) {
                lp::set_error("this entry of the last batch is not an output");
                return (int) LP_ERROR;
            }
            memcpy(out + (size_t) i * n_vocab, row, sizeof(float) * n_vocab);
        }
        return 0;
    });
}

int lp_memory_remove(llama_context * ctx, int seq_id, int p0, int p1) {
    return lp::guard(LP_ERROR, [&] { return (int) llama_memory_seq_rm(llama_get_memory(ctx), seq_id, p0, p1); });
}

int lp_memory_copy(llama_context * ctx, int src, int dst, int p0, int p1) {
    return lp::guard(LP_ERROR, [&] {
        llama_memory_seq_cp(llama_get_memory(ctx), src, dst, p0, p1);
        return 0;
    });
}

int lp_memory_clear(llama_context * ctx) {
    return lp::guard(LP_ERROR, [&] {
        llama_memory_clear(llama_get_memory(ctx), false);
        return 0;
    });
}

// Contexts: creation, one decode from flat arrays, logits rows, memory operations.
#include "guard.hpp"
#include "threads.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

llama_context * lp_context_new(llama_model * model, const llama_context_params * params, int poll) {
    lp::set_error("llama.cpp could not create the context");
    llama_context * ctx =
        lp::guard((llama_context *) nullptr, [&] { return llama_init_from_model(model, *params); });
    const int n_threads = std::max(params->n_threads, params->n_threads_batch);
    if (!ctx || n_threads < 2) {
        return ctx;
    }
    const bool attached = lp::guard(false, [&] {
        lp::attach_threads(ctx, n_threads, poll);
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
        llama_free(ctx);
        lp::free_threads(ctx);
        return 0;
    });
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
        lp::set_error("see the log llamapipe.native");
        return (int) llama_decode(ctx, batch);
    });
}

int lp_decode_next(llama_context * ctx, int n_tokens, int32_t * tokens, int32_t * positions, const int32_t * seq_ids,
                   const int8_t * outputs, const int32_t * sampled) {
    for (int i = 0; i < n_tokens; i++) {
        tokens[i] = sampled[i];
        positions[i]++;
    }
    return lp_decode(ctx, n_tokens, tokens, positions, seq_ids, outputs);
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

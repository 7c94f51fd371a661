// An operation on the KV cells of sequences, between steps.
#include "memory_op.hpp"

#include "guard.hpp"

int lp::apply_memory_op(llama_context * ctx, const MemoryOp & op) {
    return guard(LP_ERROR, [&] {
        llama_memory_t memory = llama_get_memory(ctx);
        switch (op.op) {
            case LP_REMOVE: return (int) llama_memory_seq_rm(memory, op.seq_id, op.p0, op.p1);
            case LP_COPY: llama_memory_seq_cp(memory, op.seq_id, op.other, op.p0, op.p1); break;
            case LP_KEEP:  // not llama_memory_seq_keep: it looks at the cells of one stream only
                for (int s = 0; s < (int) llama_n_seq_max(ctx); s++) {
                    if (s != op.seq_id) {
                        llama_memory_seq_rm(memory, s, -1, -1);
                    }
                }
                break;
            case LP_SHIFT: llama_memory_seq_add(memory, op.seq_id, op.p0, op.p1, op.delta); break;
            case LP_CLEAR: llama_memory_clear(memory, false); break;
        }
        return 1;
    });
}

// The KV cells of a sequence, copied to host memory and back.
#include "saved_cells.hpp"

#include <algorithm>

namespace lp {

void SavedCells::resize(size_t n) {
    if (n > capacity) {
        // A buffer that is used again grows by half at least: touching new pages takes longer than copying to them.
        const size_t more = std::max(n, capacity + capacity / 2);
        size = capacity = 0;
        bytes.reset();  // first: both together may not fit
        bytes.reset(new uint8_t[more]);
        capacity = more;
    }
    size = n;
}

int save_cells(llama_context * ctx, int seq_id, int64_t max_bytes, SavedCells & to) {
    const size_t n = llama_state_seq_get_size_ext(ctx, seq_id, 0);
    if (n == 0 || (max_bytes >= 0 && n > (size_t) max_bytes)) {
        return 0;
    }
    to.resize(n);
    return llama_state_seq_get_data_ext(ctx, to.bytes.get(), n, seq_id, 0) == n;
}

int load_cells(llama_context * ctx, int seq_id, int n, const SavedCells & from) {
    llama_memory_t memory = llama_get_memory(ctx);
    llama_memory_seq_rm(memory, seq_id, -1, -1);
    const bool is_loaded = llama_state_seq_set_data_ext(ctx, from.bytes.get(), from.size, seq_id, 0) == from.size;
    if (is_loaded && llama_memory_seq_rm(memory, seq_id, n, -1)
        && llama_memory_seq_pos_max(memory, seq_id) == n - 1) {
        return 1;
    }
    llama_memory_seq_rm(memory, seq_id, -1, -1);
    return 0;
}

}  // namespace lp

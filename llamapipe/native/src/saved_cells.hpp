// The KV cells of a sequence, copied to host memory and back.
#pragma once

#include "native.h"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace lp {

struct SavedCells {
    std::unique_ptr<uint8_t[]> bytes;  // in llama.cpp's format
    size_t                     size = 0, capacity = 0;

    // Makes room for `n` bytes, which are not initialised. Throws std::bad_alloc.
    void resize(size_t n);
};

// These wait for the device. Not while a graph is computed on another thread.

// Copies a sequence's cells to `to`. 1 done; 0 if they take more than `max_bytes` (negative: no limit) or cannot be read.
int save_cells(llama_context * ctx, int seq_id, int64_t max_bytes, SavedCells & to);
// Replaces a sequence's cells by the first `n` of these. 1 done; 0 refused: the sequence is empty then.
int load_cells(llama_context * ctx, int seq_id, int n, const SavedCells & from);

}  // namespace lp

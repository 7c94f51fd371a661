// LoRAs of which each row of a step has its own. Open this file for how requests with different adapters share a step.
//
// llama.cpp adds to each product of the layers B (A x) * scale, for the adapters of a whole context. Here a context is given
// one of them, the carrier, so that its graph has these operations; and each row is computed with the matrices and the scale
// of its own adapter. A row without one gets -0, which added to any number leaves it as it is. So a graph need not be planned
// anew when the adapters change, and has as many operations as for one adapter.
//
// A row's numbers are those that it has alone: they are computed by float_products.cpp, in which rows do not depend on each
// other, and multiplied and added up as llama.cpp does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

struct ggml_tensor;
struct ggml_compute_params;

namespace llamapipe::kernels {

struct LoraPair {
    const ggml_tensor *a = nullptr, *b = nullptr;  // null: the matrix is left as it is
};

// A LoRA, with a pair for each matrix that its carrier changes.
struct Lora {
    const void           *id;
    float                 alpha;
    std::vector<LoraPair> pairs;
    int64_t               most_rank = 0;

    Lora(const void *id, float alpha, std::vector<LoraPair> pairs);
};

// Whether rows can have adapters of their own: ours is the list of buffer types, and there are kernels.
bool can_mix_adapters();

// The adapters of a context's rows. One thread at a time.
class RowAdapters {
public:
    enum class Part : int32_t { none, a, b, scale };

    // The pairs of the carrier. Nobody has an adapter then. Empty: rows have none of their own.
    void carry(const std::vector<LoraPair> &pairs);

    bool is_on() const { return !parts_.empty(); }

    // From the next decode on, the rows of a sequence have this adapter, or none.
    void assign(int seq_id, std::shared_ptr<const Lora> lora, float scale);

    // One that a sequence has; null: none has it.
    std::shared_ptr<const Lora> find(const void *id) const;

    // Before a decode of these entries, which llama.cpp computes in this order.
    void prepare(int n_tokens, const int32_t *seq_ids, const int8_t *outputs);

    // Which part of a product with an adapter an operation is, and of which matrix.
    Part part_of(const ggml_tensor *op, int32_t &matrix) const;

    // On all of ggml's threads.
    void compute(Part part, int32_t matrix, const ggml_compute_params *params, ggml_tensor *op) const;

private:
    struct Owned {
        std::shared_ptr<const Lora> lora;
        float                       scale = 0;
    };
    // Rows [first, first + n) of a list have the same adapter; null: none.
    struct Group {
        const Lora *lora;
        int64_t     first, n;
    };
    // The rows of a product: all entries of a decode, or its outputs.
    struct Rows {
        std::vector<int32_t> of_group;  // by group
        std::vector<float>   scales;    // by row
        std::vector<Group>   groups;

        void set(const std::vector<const Owned *> &owners);
    };
    struct Place {
        Part    part;
        int32_t matrix;
    };

    const Rows &rows_of(const ggml_tensor *op) const;

    std::unordered_map<const ggml_tensor *, Place> parts_;  // of the carrier's tensors
    std::vector<Owned>                             by_seq_;
    std::vector<const Owned *>                     owners_, output_owners_;  // scratch
    Rows                                           entries_, outputs_;
    int64_t                                        stride_ = 0;  // of `products_`
    mutable std::vector<float>                     products_;    // A x of each row, read by the operation after it
};

}  // namespace llamapipe::kernels

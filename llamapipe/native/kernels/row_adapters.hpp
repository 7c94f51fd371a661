// LoRAs of which each row of a step has its own. Open this file for how requests with different adapters share a step.
//
// llama.cpp adds to each product of the layers B (A x) * scale, for the adapters of a whole context. Here a context is given
// one of them, the carrier, so that its graph has these operations; and each row is computed with the matrices and the scale
// of its own adapter. A row without one gets -0, which added to any number leaves it as it is; a row with several gets the
// sum of all. So a graph need not be planned anew when the adapters change, and has as many operations as for one adapter.
//
// A row's numbers are those that it has alone: they are computed by float_products.cpp, in which rows do not depend on each
// other, and multiplied and added up as llama.cpp does. Only where a row has several, llama.cpp adds one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

struct ggml_tensor;
struct ggml_compute_params;

namespace lp::kernels {

struct LoraPair {
    const ggml_tensor *a = nullptr, *b = nullptr;  // null: the matrix is left as it is
};

// A LoRA, with a pair for each matrix that its carrier changes.
struct Lora {
    const void           *id;
    float                 alpha;
    std::vector<LoraPair> pairs;
    int64_t               most_rank = 0, most_rows = 0;  // of all A, of all B

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

    struct Scaled {
        std::shared_ptr<const Lora> lora;
        float                       scale;
    };

    // From the next decode on, the rows of a sequence have these adapters, or none.
    void assign(int seq_id, std::vector<Scaled> adapters);

    // One that a sequence has; null: none has it.
    std::shared_ptr<const Lora> find(const void *id) const;

    // Before a decode of these entries, which llama.cpp computes in this order.
    void prepare(int n_tokens, const int32_t *seq_ids, const int8_t *outputs);

    // Which part of a product with an adapter an operation is, and of which matrix.
    Part part_of(const ggml_tensor *op, int32_t &matrix) const;

    // On all of ggml's threads.
    void compute(Part part, int32_t matrix, const ggml_compute_params *params, ggml_tensor *op) const;

private:
    // Rows [first, first + n) of a list have the same adapter at this place among theirs; null: they have none.
    struct Group {
        const Lora *lora;
        size_t      place;
        int64_t     first, n;
    };
    // The rows of a product: all entries of a decode, or its outputs.
    struct Rows {
        std::vector<int32_t>                     of_group;  // by group
        std::vector<const std::vector<Scaled> *> owned;     // by row; null: none
        std::vector<Group>                       groups;

        void group();
    };
    struct Place {
        Part    part;
        int32_t matrix;
    };

    const Rows &rows_of(const ggml_tensor *op) const;
    // A x of each row with the adapters at a place; and of those after the first, B A x.
    float *inner(size_t place) const { return products_.data() + place * n_tokens_ * stride_; }
    float *outer(size_t place) const { return others_.data() + (place - 1) * n_tokens_ * others_stride_; }
    void   scale(int32_t matrix, ggml_tensor *op, int64_t row, const std::vector<Scaled> *owned) const;

    std::unordered_map<const ggml_tensor *, Place> parts_;  // of the carrier's tensors
    std::vector<std::vector<Scaled>>               by_seq_;
    Rows                                           entries_, outputs_;
    int64_t                                        n_tokens_ = 0, stride_ = 0, others_stride_ = 0;
    mutable std::vector<float>                     products_, others_;  // read by the operation after the one that writes
};

}  // namespace lp::kernels

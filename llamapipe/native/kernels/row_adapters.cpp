#include "row_adapters.hpp"

#include "float_products.hpp"
#include "weight_buffer.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu/traits.h"

#include <algorithm>

namespace llamapipe::kernels {
namespace {

// What a thread takes at once: rows of a matrix, and rows of activations, a multiple of those that are computed together.
constexpr int64_t piece_of_a = 8, piece_of_b = 64, piece_rows = 48;

int64_t n_pieces(int64_t n, int64_t each) { return (n + each - 1) / each; }

}  // namespace

Lora::Lora(const void * id, float alpha, std::vector<LoraPair> given) : id(id), alpha(alpha), pairs(std::move(given)) {
    for (const LoraPair & pair : pairs) {
        most_rank = std::max(most_rank, pair.a ? pair.a->ne[1] : 0);
    }
}

bool can_mix_adapters() { return !install() && has_float_products(); }

void RowAdapters::carry(const std::vector<LoraPair> & pairs) {
    parts_.clear();
    by_seq_.clear();
    for (size_t i = 0; i < pairs.size(); i++) {
        parts_[pairs[i].a] = { Part::a, (int32_t) i };
        parts_[pairs[i].b] = { Part::b, (int32_t) i };
    }
}

void RowAdapters::assign(int seq_id, std::shared_ptr<const Lora> lora, float scale) {
    if (by_seq_.size() <= (size_t) seq_id) {
        by_seq_.resize((size_t) seq_id + 1);
    }
    by_seq_[(size_t) seq_id] = { std::move(lora), scale };
}

std::shared_ptr<const Lora> RowAdapters::find(const void * id) const {
    for (const Owned & owned : by_seq_) {
        if (owned.lora && owned.lora->id == id) {
            return owned.lora;
        }
    }
    return nullptr;
}

void RowAdapters::Rows::set(const std::vector<const Owned *> & owners) {
    const auto lora_of = [&](int32_t row) { return owners[(size_t) row] ? owners[(size_t) row]->lora.get() : nullptr; };
    of_group.clear();
    scales.clear();
    groups.clear();
    for (size_t i = 0; i < owners.size(); i++) {
        of_group.push_back((int32_t) i);
        scales.push_back(owners[i] ? owners[i]->scale : 0);
    }
    std::stable_sort(of_group.begin(), of_group.end(), [&](int32_t a, int32_t b) { return lora_of(a) < lora_of(b); });
    for (size_t i = 0; i < of_group.size(); i++) {
        const Lora * lora = lora_of(of_group[i]);
        if (groups.empty() || groups.back().lora != lora) {
            groups.push_back({ lora, (int64_t) i, 0 });
        }
        groups.back().n++;
    }
}

void RowAdapters::prepare(int n_tokens, const int32_t * seq_ids, const int8_t * outputs) {
    owners_.clear();
    output_owners_.clear();
    int64_t most_rank = 1;
    for (int i = 0; i < n_tokens; i++) {
        const auto    seq_id = (size_t) seq_ids[i];
        const Owned * owner  = seq_id < by_seq_.size() && by_seq_[seq_id].lora ? &by_seq_[seq_id] : nullptr;
        owners_.push_back(owner);
        if (outputs[i]) {
            output_owners_.push_back(owner);
        }
        if (owner) {
            most_rank = std::max(most_rank, owner->lora->most_rank);
        }
    }
    entries_.set(owners_);
    outputs_.set(output_owners_);
    stride_ = (most_rank + 15) / 16 * 16;
    if (products_.size() < (size_t) (stride_ * n_tokens)) {
        products_.resize((size_t) (stride_ * n_tokens));
    }
}

RowAdapters::Part RowAdapters::part_of(const ggml_tensor * op, int32_t & matrix) const {
    const bool          is_scale = op->op == GGML_OP_SCALE;
    const ggml_tensor * product  = is_scale ? op->src[0] : op;
    const auto          found    = product->op == GGML_OP_MUL_MAT ? parts_.find(product->src[0]) : parts_.end();
    if (found == parts_.end() || (is_scale && found->second.part != Part::b)) {
        return Part::none;
    }
    matrix = found->second.matrix;
    return is_scale ? Part::scale : found->second.part;
}

const RowAdapters::Rows & RowAdapters::rows_of(const ggml_tensor * op) const {
    const auto n = (size_t) ggml_nrows(op);
    const ggml_tensor * from = op->src[1] ? op->src[1] : op->src[0];
    GGML_ASSERT(from->nb[2] == from->nb[1] * (size_t) from->ne[1] && from->nb[3] == from->nb[2] * (size_t) from->ne[2]);
    // The last layer computes outputs only. If all entries are outputs, both are the same.
    GGML_ASSERT((n == entries_.scales.size() || n == outputs_.scales.size()) && "these rows are no entries of the batch");
    return n == entries_.scales.size() ? entries_ : outputs_;
}

void RowAdapters::compute(Part part, int32_t matrix, const ggml_compute_params * params, ggml_tensor * op) const {
    const Rows &  rows = rows_of(op);
    const int64_t ith = params->ith, nth = params->nth;
    int64_t       next = 0;  // pieces are numbered; each thread has those of its number
    for (const Group & group : rows.groups) {
        const int32_t *  in_group = rows.of_group.data() + group.first;
        const LoraPair   pair     = group.lora ? group.lora->pairs[(size_t) matrix] : LoraPair();
        if (part == Part::scale) {
            for (int64_t j = 0; j < group.n; j++) {
                const int32_t row = in_group[j];
                if (row % nth != ith) {
                    continue;
                }
                float *       to   = (float *) ((char *) op->data + (size_t) row * op->nb[1]);
                const float * from = (const float *) ((const char *) op->src[0]->data + (size_t) row * op->src[0]->nb[1]);
                if (!pair.a) {
                    std::fill_n(to, op->ne[0], -0.0f);
                    continue;
                }
                // As llama_adapter_lora_weight::get_scale has it.
                const float rank  = (float) pair.b->ne[0], given = rows.scales[(size_t) row];
                const float scale = group.lora->alpha != 0 ? given * group.lora->alpha / rank : given;
                for (int64_t i = 0; i < op->ne[0]; i++) {
                    to[i] = from[i] * scale;
                }
            }
            continue;
        }
        if (!pair.a) {
            continue;
        }
        const bool          is_a   = part == Part::a;
        const ggml_tensor * weight = is_a ? pair.a : pair.b;
        RowProduct          product;
        product.weights       = weight;
        product.rows          = is_a ? (const char *) op->src[1]->data : (const char *) products_.data();
        product.row_stride    = is_a ? op->src[1]->nb[1] : (size_t) stride_ * sizeof(float);
        product.results       = is_a ? (char *) products_.data() : (char *) op->data;
        product.result_stride = is_a ? (size_t) stride_ * sizeof(float) : op->nb[1];
        const int64_t each = is_a ? piece_of_a : piece_of_b, n_of_weights = n_pieces(weight->ne[1], each);
        const int64_t n_all = n_of_weights * n_pieces(group.n, piece_rows);
        for (int64_t i = (ith - next % nth + nth) % nth; i < n_all; i += nth) {
            const int64_t first = i % n_of_weights * each, row = i / n_of_weights * piece_rows;
            product.row_numbers = in_group + row;
            multiply_rows(product, first, std::min(weight->ne[1], first + each), std::min(piece_rows, group.n - row));
        }
        next += n_all;
    }
}

}  // namespace llamapipe::kernels

#include "row_adapters.hpp"

#include "float_products.hpp"
#include "tensors.hpp"
#include "weight_buffer.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu/traits.h"

#include <algorithm>

namespace lp::kernels {
namespace {

// What a thread takes at once: rows of a matrix, and rows of activations, a multiple of those that are computed together.
constexpr int64_t kPieceOfA = 8, kPieceOfB = 64, kPieceRows = 48;

int64_t n_pieces(int64_t n, int64_t each) { return (n + each - 1) / each; }

}  // namespace

Lora::Lora(const void *its_id, float its_alpha, std::vector<LoraPair> its_pairs)
    : id(its_id), alpha(its_alpha), pairs(std::move(its_pairs)) {
    for (const LoraPair &pair : pairs) {
        most_rank = std::max(most_rank, pair.a ? pair.a->ne[1] : 0);
        most_rows = std::max(most_rows, pair.a ? pair.b->ne[1] : 0);
    }
}

bool can_mix_adapters() { return !install() && has_float_products(); }

void RowAdapters::carry(const std::vector<LoraPair> &pairs) {
    parts_.clear();
    by_seq_.clear();
    for (size_t i = 0; i < pairs.size(); i++) {
        parts_[pairs[i].a] = { Part::a, static_cast<int32_t>(i) };
        parts_[pairs[i].b] = { Part::b, static_cast<int32_t>(i) };
    }
}

void RowAdapters::assign(int seq_id, std::vector<Scaled> adapters) {
    if (by_seq_.size() <= static_cast<size_t>(seq_id)) {
        by_seq_.resize(seq_id + 1);
    }
    by_seq_[seq_id] = std::move(adapters);
}

std::shared_ptr<const Lora> RowAdapters::find(const void *id) const {
    for (const std::vector<Scaled> &owned : by_seq_) {
        for (const Scaled &one : owned) {
            if (one.lora->id == id) {
                return one.lora;
            }
        }
    }
    return nullptr;
}

void RowAdapters::Rows::group() {
    of_group.clear();
    groups.clear();
    size_t n_places = 1;
    for (size_t place = 0; place < n_places; place++) {
        const auto lora_of = [&](int32_t row) -> const Lora * {
            const std::vector<Scaled> *given = owned[row];
            return given && place < given->size() ? (*given)[place].lora.get() : nullptr;
        };
        const size_t first = of_group.size();
        for (size_t i = 0; i < owned.size(); i++) {
            n_places = std::max(n_places, owned[i] ? owned[i]->size() : 0);
            if (place == 0 || lora_of(static_cast<int32_t>(i))) {
                of_group.push_back(static_cast<int32_t>(i));
            }
        }
        std::stable_sort(of_group.begin() + first, of_group.end(), [&](int32_t a, int32_t b) { return lora_of(a) < lora_of(b); });
        for (size_t i = first; i < of_group.size(); i++) {
            const Lora *lora = lora_of(of_group[i]);
            if (i == first || groups.back().lora != lora) {
                groups.push_back({ lora, place, static_cast<int64_t>(i), 0 });
            }
            groups.back().n++;
        }
    }
}

void RowAdapters::prepare(int n_tokens, const int32_t *seq_ids, const int8_t *outputs) {
    entries_.owned.clear();
    outputs_.owned.clear();
    int64_t most_rank = 1, most_rows = 0;
    size_t  n_places = 1;
    for (int i = 0; i < n_tokens; i++) {
        const auto                 seq_id = static_cast<size_t>(seq_ids[i]);
        const std::vector<Scaled> *owned  = seq_id < by_seq_.size() && !by_seq_[seq_id].empty() ? &by_seq_[seq_id] : nullptr;
        entries_.owned.push_back(owned);
        if (outputs[i]) {
            outputs_.owned.push_back(owned);
        }
        for (size_t place = 0; owned && place < owned->size(); place++) {
            const Lora &lora = *(*owned)[place].lora;
            most_rank        = std::max(most_rank, lora.most_rank);
            most_rows        = place > 0 ? std::max(most_rows, lora.most_rows) : most_rows;
            n_places         = std::max(n_places, place + 1);
        }
    }
    entries_.group();
    outputs_.group();
    n_tokens_      = n_tokens;
    stride_        = (most_rank + 15) / 16 * 16;
    others_stride_ = (most_rows + 15) / 16 * 16;
    products_.resize(std::max<size_t>(products_.size(), n_places * stride_ * n_tokens));
    others_.resize(std::max<size_t>(others_.size(), (n_places - 1) * others_stride_ * n_tokens));
}

RowAdapters::Part RowAdapters::part_of(const ggml_tensor *op, int32_t &matrix) const {
    const bool         is_scale = op->op == GGML_OP_SCALE;
    const ggml_tensor *product  = is_scale ? op->src[0] : op;
    const auto         found    = product->op == GGML_OP_MUL_MAT ? parts_.find(product->src[0]) : parts_.end();
    if (found == parts_.end() || (is_scale && found->second.part != Part::b)) {
        return Part::none;
    }
    matrix = found->second.matrix;
    return is_scale ? Part::scale : found->second.part;
}

const RowAdapters::Rows &RowAdapters::rows_of(const ggml_tensor *op) const {
    const size_t       n    = ggml_nrows(op);
    const ggml_tensor *from = op->src[1] ? op->src[1] : op->src[0];
    GGML_ASSERT(from->nb[2] == from->nb[1] * from->ne[1] && from->nb[3] == from->nb[2] * from->ne[2]);
    // The last layer computes outputs only. If all entries are outputs, both are the same.
    GGML_ASSERT((n == entries_.owned.size() || n == outputs_.owned.size()) && "these rows are no entries of the batch");
    return n == entries_.owned.size() ? entries_ : outputs_;
}

void RowAdapters::scale(int32_t matrix, ggml_tensor *op, int64_t row, const std::vector<Scaled> *owned) const {
    float *to       = at<float>(op, row);
    bool   is_first = true;
    for (size_t place = 0; owned && place < owned->size(); place++) {
        const Lora    &lora = *(*owned)[place].lora;
        const LoraPair pair = lora.pairs[matrix];
        if (!pair.a) {
            continue;
        }
        // As llama_adapter_lora_weight::get_scale has it.
        const float  rank = static_cast<float>(pair.b->ne[0]), given = (*owned)[place].scale;
        const float  by   = lora.alpha != 0 ? given * lora.alpha / rank : given;
        const float *from = place > 0 ? outer(place) + row * others_stride_ : at<const float>(op->src[0], row);
        if (is_first && from != to) {
            std::copy_n(from, op->ne[0], to);
        }
        for (int64_t i = 0; i < op->ne[0]; i++) {
            to[i] = is_first ? to[i] * by : to[i] + from[i] * by;
        }
        is_first = false;
    }
    if (is_first) {
        std::fill_n(to, op->ne[0], -0.0f);
    }
}

void RowAdapters::compute(Part part, int32_t matrix, const ggml_compute_params *params, ggml_tensor *op) const {
    const Rows   &rows = rows_of(op);
    const int64_t ith = params->ith, nth = params->nth;
    if (part == Part::scale) {
        for (int64_t row = ith; row < static_cast<int64_t>(rows.owned.size()); row += nth) {
            scale(matrix, op, row, rows.owned[row]);
        }
        return;
    }
    int64_t next = 0;  // pieces are numbered; each thread has those of its number
    for (const Group &group : rows.groups) {
        const LoraPair pair = group.lora ? group.lora->pairs[matrix] : LoraPair();
        if (!pair.a) {
            continue;
        }
        const bool         is_a = part == Part::a, is_first = group.place == 0;
        const int32_t     *in_group     = rows.of_group.data() + group.first;
        const ggml_tensor *weight       = is_a ? pair.a : pair.b;
        const size_t       inner_stride = stride_ * sizeof(float), outer_stride = others_stride_ * sizeof(float);
        RowProduct         product;
        product.weights = weight;
        product.rows    = is_a ? static_cast<const char *>(op->src[1]->data) : reinterpret_cast<const char *>(inner(group.place));
        product.row_stride    = is_a ? op->src[1]->nb[1] : inner_stride;
        product.results       = is_first && !is_a ? static_cast<char *>(op->data)
                                                  : reinterpret_cast<char *>(is_a ? inner(group.place) : outer(group.place));
        product.result_stride = is_a ? inner_stride : is_first ? op->nb[1] : outer_stride;
        const int64_t each = is_a ? kPieceOfA : kPieceOfB, n_of_weights = n_pieces(weight->ne[1], each);
        const int64_t n_all = n_of_weights * n_pieces(group.n, kPieceRows);
        for (int64_t i = (ith - next % nth + nth) % nth; i < n_all; i += nth) {
            const int64_t first = i % n_of_weights * each, row = i / n_of_weights * kPieceRows;
            product.row_numbers = in_group + row;
            multiply_rows(product, first, std::min(weight->ne[1], first + each), std::min(kPieceRows, group.n - row));
        }
        next += n_all;
    }
}

}  // namespace lp::kernels

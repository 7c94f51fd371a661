// States and convolutions: which operations, where their states are, and how threads divide them.
#include "linear.hpp"

#include "processor.hpp"
#include "tensors.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu/traits.h"

#include <algorithm>
#include <cmath>

namespace lp::kernels {

#if defined(__x86_64__)
extern const LinearLevel kLinearAvx2, kLinearAvx512;
#endif

const LinearLevel *linear_level() {
#if defined(__x86_64__)
    return !processor().avx2 ? nullptr : processor().avx512 ? &kLinearAvx512 : &kLinearAvx2;
#else
    return nullptr;
#endif
}

namespace {

constexpr int64_t kRowsBytes = 16 << 10;  // of a state's rows that are computed together: they stay in the first-level cache

int64_t floats(size_t bytes) { return bytes / sizeof(float); }

bool are_floats(const ggml_tensor *op, int n) {
    bool all = op->type == GGML_TYPE_F32;
    for (int i = 0; i < n; i++) {
        all = all && op->src[i]->type == GGML_TYPE_F32;
    }
    return all;
}

bool is_stateful(const ggml_tensor *op) {
    return op->op == GGML_OP_GATED_DELTA_NET || op->op == GGML_OP_SSM_SCAN || op->op == GGML_OP_RWKV_WKV7;
}

bool is_supported_state(int64_t n_rows, int64_t n_columns) { return n_rows % kStateRows == 0 && n_columns % kStateRows == 0; }

// The states of an operation. Its result has first a row of each token, then the states after the last token, and before them if
// earlier ones are kept: those of all sequences after the last but one, and so on.
struct StateShape {
    int64_t            n_seqs, n_heads, n_tokens, n_rows, n_columns, n_kept;
    const ggml_tensor *states;         // before the first token
    const ggml_tensor *ids = nullptr;  // which of them each sequence has; null: in order
    size_t             stride;         // bytes

    explicit StateShape(const ggml_tensor *op) {
        if (op->op == GGML_OP_SSM_SCAN) {
            const ggml_tensor *x = op->src[1];
            states               = op->src[0];
            ids                  = op->src[6];
            stride               = states->nb[3];
            set(x->ne[3], x->ne[1], x->ne[2], states->ne[1], states->ne[0], op->op_params[0]);
            return;
        }
        if (op->op == GGML_OP_GATED_DELTA_NET) {
            const ggml_tensor *v = op->src[2];
            states               = op->src[5];
            stride               = states->nb[3];
            set(v->ne[3], v->ne[1], v->ne[2], v->ne[0], v->ne[0], op->op_params[0]);
        } else {
            const ggml_tensor *w = op->src[1];
            states               = op->src[6];
            stride               = states->nb[1];
            set(states->ne[1], w->ne[1], w->ne[2] / states->ne[1], w->ne[0], w->ne[0], 1);
        }
    }

    int64_t n_state() const { return n_heads * n_rows * n_columns; }  // floats of a sequence

    int64_t n_written() const { return std::min(n_tokens, n_kept); }

    int64_t n_results() const { return n_seqs * n_tokens * n_heads * n_rows; }  // floats before the states

    const float *before(int64_t seq) const {
        const int64_t i = ids ? static_cast<const int32_t *>(ids->data)[seq] : seq;
        return reinterpret_cast<const float *>(static_cast<const char *>(states->data) + i * stride);
    }

    // `kept`: of how many tokens before the last.
    float *after(const ggml_tensor *op, const ggml_tensor *copy, int64_t seq, int64_t kept) const {
        const int64_t i = (kept * n_seqs + seq) * n_state();
        if (!copy) {
            return static_cast<float *>(op->data) + n_results() + i;
        }
        const ggml_tensor *to  = copy->src[1];
        const int64_t      row = i / to->ne[0];
        return at<float>(to, row % to->ne[1], row / to->ne[1] % to->ne[2], row / to->ne[1] / to->ne[2]) + i % to->ne[0];
    }

private:
    void set(int64_t seqs, int64_t heads, int64_t tokens, int64_t rows, int64_t columns, int64_t kept) {
        n_seqs    = seqs;
        n_heads   = heads;
        n_tokens  = tokens;
        n_rows    = rows;
        n_columns = columns;
        n_kept    = kept;
    }
};

class States {
public:
    States(const ggml_compute_params *params, ggml_tensor *op, const ggml_tensor *gather, const ggml_tensor *copy)
        : op_(op), gather_(gather), shape_(op), copy_(copy && is_in_place(copy) ? copy : nullptr), level_(*linear_level()),
          ith_(params->ith), nth_(params->nth),
          rows_each_(std::clamp<int64_t>(kRowsBytes / (shape_.n_columns * int64_t{ sizeof(float) }) / kStateRows * kStateRows,
                                         kStateRows, kMostStateRows)) {}

    void compute() {
        const int64_t n_parts = (shape_.n_rows + rows_each_ - 1) / rows_each_, n = n_parts * shape_.n_heads * shape_.n_seqs;
        for (int64_t i = n * ith_ / nth_; i < n * (ith_ + 1) / nth_; i++) {
            const int64_t row = i % n_parts * rows_each_;
            compute(i / n_parts / shape_.n_heads, i / n_parts % shape_.n_heads, row, std::min(rows_each_, shape_.n_rows - row));
        }
    }

    bool is_in_place() const { return copy_ != nullptr; }

private:
    const float *before(int64_t seq) const {
        return gather_ ? static_cast<const float *const *>(gather_->data)[seq] : shape_.before(seq);
    }

    // Whether states can be written where they are copied to: no sequence reads what another writes.
    bool is_in_place(const ggml_tensor *copy) const {
        for (int64_t reader = 0; reader < shape_.n_seqs; reader++) {
            const float *read = before(reader);
            for (int64_t writer = 0; writer < shape_.n_seqs; writer++) {
                for (int64_t kept = 0; writer != reader && kept < shape_.n_written(); kept++) {
                    const float *written = shape_.after(op_, copy, writer, kept);
                    if (read < written + shape_.n_state() && written < read + shape_.n_state()) {
                        return false;
                    }
                }
            }
        }
        return true;
    }

    void compute(int64_t seq, int64_t head, int64_t row, int64_t n_rows) const {
        const int64_t place = (head * shape_.n_rows + row) * shape_.n_columns;
        const float  *from  = before(seq) + place;
        float        *after[kMostTokens];
        float         decays[kMostTokens], factors[kMostTokens];
        StateRows     rows = {};
        rows.n_rows        = n_rows;
        rows.n_columns     = shape_.n_columns;
        rows.after         = after;
        rows.decays        = decays;
        rows.factors       = factors;
        rows.y_stride      = shape_.n_heads * shape_.n_rows;
        rows.scale         = op_->op == GGML_OP_GATED_DELTA_NET ? 1.0f / std::sqrt(static_cast<float>(shape_.n_columns)) : 1.0f;
        for (int64_t t = 0; t < shape_.n_tokens; t += rows.n_tokens, from = after[rows.n_tokens - 1]) {
            rows.n_tokens = std::min<int64_t>(kMostTokens, shape_.n_tokens - t);
            for (int64_t i = 0; i < rows.n_tokens; i++) {
                const int64_t from_end = shape_.n_tokens - 1 - t - i;
                after[i]               = shape_.after(op_, copy_, seq, from_end < shape_.n_kept ? from_end : 0) + place;
            }
            rows.before = from;
            rows.y =
                    static_cast<float *>(op_->data) + ((seq * shape_.n_tokens + t) * shape_.n_heads + head) * shape_.n_rows + row;
            switch (op_->op) {
                case GGML_OP_GATED_DELTA_NET: delta_net(rows, decays, factors, seq, head, row, t); break;
                case GGML_OP_SSM_SCAN: scan(rows, decays, factors, seq, head, row, t); break;
                default: wkv7(rows, seq, head, row, t);
            }
        }
    }

    static Series series(const ggml_tensor *t, int64_t head, int64_t token, int64_t seq, int64_t row = 0) {
        return { at<const float>(t, head, token, seq) + row, floats(t->nb[2]) };
    }

    void delta_net(StateRows &rows, float *decays, float *factors, int64_t seq, int64_t head, int64_t row, int64_t t) const {
        const ggml_tensor *q = op_->src[0], *k = op_->src[1], *v = op_->src[2], *g = op_->src[3], *beta = op_->src[4];
        rows.q = series(q, head % q->ne[1], t, seq / (v->ne[3] / q->ne[3]));
        rows.k = series(k, head % k->ne[1], t, seq / (v->ne[3] / k->ne[3]));
        rows.v = series(v, head, t, seq, row);
        for (int64_t i = 0; i < rows.n_tokens; i++) {
            decays[i]  = std::exp(*at<const float>(g, head, t + i, seq));
            factors[i] = *at<const float>(beta, head, t + i, seq);
        }
        level_.delta_net(rows);
    }

    void scan(StateRows &rows, float *decays, float *factors, int64_t seq, int64_t head, int64_t row, int64_t t) const {
        const ggml_tensor *x = op_->src[1], *dt = op_->src[2], *a = op_->src[3], *b = op_->src[4], *c = op_->src[5];
        const int64_t      group = head / (shape_.n_heads / b->ne[1]);
        rows.q                   = series(c, group, t, seq);
        rows.k                   = series(b, group, t, seq);
        rows.v                   = series(x, head, t, seq, row);
        for (int64_t i = 0; i < rows.n_tokens; i++) {
            const float step = at<const float>(dt, t + i, seq)[head];
            factors[i]       = step > 20.0f ? step : std::log(1 + std::exp(step));
            decays[i]        = std::exp(factors[i] * *at<const float>(a, head, 0));
        }
        level_.scan(rows);
    }

    void wkv7(StateRows &rows, int64_t seq, int64_t head, int64_t row, int64_t t) const {
        const auto series_of = [&](int i) { return series(op_->src[i], head, seq * shape_.n_tokens + t, 0); };
        rows.q               = series_of(0);
        rows.decay_row       = series_of(1);
        rows.k               = series_of(2);
        rows.v               = series_of(3);
        rows.v.first += row;
        rows.a = series_of(4);
        rows.b = series_of(5);
        level_.wkv7(rows);
    }

    ggml_tensor       *op_;
    const ggml_tensor *gather_;
    const StateShape   shape_;
    const ggml_tensor *copy_;
    const LinearLevel &level_;
    const int          ith_, nth_;
    const int64_t      rows_each_;
};

// Calls f(first, n) for this thread's part of n_channels, cut at sixteen.
template <typename F> void in_channels(const ggml_compute_params *params, int64_t n_channels, F &&f) {
    const int64_t n     = (n_channels + 15) / 16;
    const int64_t first = n * params->ith / params->nth * 16,
                  end   = std::min(n * (params->ith + 1) / params->nth * 16, n_channels);
    if (first < end) {
        f(first, end - first);
    }
}

void convolve(const ggml_compute_params *params, ggml_tensor *op) {
    const ggml_tensor *x = op->src[0], *w = op->src[1];
    in_channels(params, op->ne[0], [&](int64_t first, int64_t n) {
        for (int64_t seq = 0; seq < op->ne[2]; seq++) {
            linear_level()->convolve(at<const float>(x, first, seq), floats(x->nb[1]), at<const float>(w, first, 0), w->ne[0], n,
                                     op->ne[1], at<float>(op, 0, seq) + first, floats(op->nb[1]));
        }
    });
}

// The inputs of a convolution: those of earlier tokens, and those of these tokens, which are rows of channels.
void concat(const ggml_compute_params *params, ggml_tensor *op) {
    const ggml_tensor *old = op->src[0], *tokens = op->src[1];
    in_channels(params, op->ne[1], [&](int64_t first, int64_t n) {
        for (int64_t seq = 0; seq < op->ne[2]; seq++) {
            for (int64_t c = first; c < first + n; c++) {
                std::copy_n(at<const float>(old, c, seq), old->ne[0], at<float>(op, c, seq));
            }
            linear_level()->transpose(at<const float>(tokens, first, seq), floats(tokens->nb[0]), n, tokens->ne[0],
                                      at<float>(op, first, seq) + old->ne[0], floats(op->nb[1]));
        }
    });
}

bool is_supported_delta_net(const ggml_tensor *op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    return are_floats(op, 6) && op->src[3]->ne[0] == 1 && q->ne[0] == v->ne[0] && k->ne[0] == v->ne[0] &&
           is_supported_state(v->ne[0], v->ne[0]) && q->nb[0] == sizeof(float) && k->nb[0] == sizeof(float) &&
           v->nb[0] == sizeof(float) && ggml_is_contiguous(op->src[3]) && ggml_is_contiguous(op->src[4]) &&
           ggml_is_contiguous(op->src[5]);
}

bool is_supported_scan(const ggml_tensor *op) {
    const ggml_tensor *s = op->src[0], *x = op->src[1], *b = op->src[4];
    return are_floats(op, 6) && op->src[3]->ne[0] == 1 && is_supported_state(s->ne[1], s->ne[0]) && s->ne[2] % b->ne[1] == 0 &&
           ggml_is_contiguous(s) && op->src[2]->nb[0] == sizeof(float) && x->nb[0] == sizeof(float);
}

bool is_supported_wkv7(const ggml_tensor *op) {
    const ggml_tensor *w         = op->src[1];
    bool               are_alike = ggml_is_contiguous(op->src[6]);
    for (int i = 0; i < 6; i++) {
        are_alike = are_alike && ggml_is_contiguous(op->src[i]) && ggml_are_same_shape(op->src[i], w);
    }
    return are_floats(op, 7) && are_alike && is_supported_state(w->ne[0], w->ne[0]) && w->ne[2] % op->src[6]->ne[1] == 0;
}

}  // namespace

bool is_linear(const ggml_tensor *op) {
    const auto is_row = [](const ggml_tensor *t) { return t->nb[0] == sizeof(float); };
    switch (op->op) {
        case GGML_OP_GATED_DELTA_NET: return linear_level() && is_supported_delta_net(op);
        case GGML_OP_SSM_SCAN: return linear_level() && is_supported_scan(op);
        case GGML_OP_RWKV_WKV7: return linear_level() && is_supported_wkv7(op);
        case GGML_OP_SSM_CONV: return linear_level() && are_floats(op, 2) && is_row(op->src[0]) && ggml_is_contiguous(op->src[1]);
        case GGML_OP_CONCAT:
            return linear_level() && op->op_params[0] == 0 && are_floats(op, 2) && is_row(op) && is_row(op->src[0]) &&
                   op->src[1]->nb[1] == sizeof(float) && op->ne[3] == 1;
        default: return false;
    }
}

const ggml_tensor *gather_of_states(const ggml_tensor *op) {
    if (op->op != GGML_OP_GATED_DELTA_NET && op->op != GGML_OP_RWKV_WKV7) {
        return nullptr;
    }
    const ggml_tensor *states = op->src[op->op == GGML_OP_GATED_DELTA_NET ? 5 : 6];
    const ggml_tensor *gather = states->view_src;
    // More rows than those of the operation are those of other sequences, which change their places.
    const bool is_all        = gather && gather->op == GGML_OP_GET_ROWS && states->view_offs == 0 &&
                               ggml_nelements(states) == ggml_nelements(gather) && gather->ne[1] == StateShape(op).n_seqs;
    const bool is_whole_rows = is_all && gather->src[0]->type == GGML_TYPE_F32 && gather->src[0]->nb[0] == sizeof(float) &&
                               gather->src[1]->nb[0] == sizeof(int32_t) && gather->ne[2] == 1 && gather->ne[3] == 1;
    return is_whole_rows ? gather : nullptr;
}

void write_places(ggml_tensor *gather) {
    const ggml_tensor *rows    = gather->src[0];
    const auto        *numbers = static_cast<const int32_t *>(gather->src[1]->data);
    auto              *places  = static_cast<const float **>(gather->data);
    for (int64_t i = 0; i < gather->ne[1]; i++) {
        places[i] = at<const float>(rows, numbers[i]);
    }
}

const ggml_tensor *gather_of_nothing(const ggml_tensor *op) {
    const ggml_tensor *from   = op->op == GGML_OP_CPY && ggml_nelements(op) == 0 ? op->src[0] : nullptr;
    const ggml_tensor *gather = from ? from->view_src : nullptr;
    if (!gather || gather->op != GGML_OP_GET_ROWS || from->view_offs != ggml_nbytes(gather)) {
        return nullptr;
    }
    const ggml_tensor *ids = gather->src[1], *all = ids->view_src;
    return all && ids->view_offs == all->nb[0] && ids->ne[0] + 1 == all->ne[0] ? gather : nullptr;
}

const ggml_tensor *source_of_copy(const ggml_tensor *op) {
    const bool         is_copy = op->op == GGML_OP_CPY && (op->flags & GGML_TENSOR_FLAG_COMPUTE);
    const ggml_tensor *from    = is_copy ? op->src[0] : nullptr;
    const ggml_tensor *of      = from ? from->view_src : nullptr;
    if (!of || !is_stateful(of) || !is_linear(of)) {
        return nullptr;
    }
    const ggml_tensor *to = op->src[1];
    const StateShape   shape(of);
    const bool         is_all = floats(from->view_offs) == shape.n_results() && ggml_is_contiguous(from) &&
                                ggml_nelements(from) == shape.n_written() * shape.n_seqs * shape.n_state();
    // The scan's graph moves states of other sequences after it.
    const ggml_tensor *others = of->op == GGML_OP_SSM_SCAN ? shape.ids->view_src : nullptr;
    return is_all && to->type == GGML_TYPE_F32 && to->nb[0] == sizeof(float) && to->ne[0] % shape.n_state() == 0 &&
                           (!others || others->ne[0] == shape.n_seqs)
                   ? of
                   : nullptr;
}

bool compute_linear(const ggml_compute_params *params, ggml_tensor *op, const ggml_tensor *gather, const ggml_tensor *copy) {
    if (is_stateful(op)) {
        States states(params, op, gather, copy);
        states.compute();
        return states.is_in_place();
    }
    (op->op == GGML_OP_SSM_CONV ? convolve : concat)(params, op);
    return false;
}

}  // namespace lp::kernels

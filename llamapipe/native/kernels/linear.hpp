// The linear part of hybrids: layers that keep a state instead of cells, and the short convolutions before them. Open this
// file to add an operation or a CPU level.
//
// A head's state is a matrix that each token changes and reads. ggml goes over it four times a token. Here a few rows of it
// stay in the processor's first-level cache for all tokens of a sequence, and a token goes over them once. Results depend on
// nothing but the state before a token and its inputs, however a prompt is cut: sums over the columns of a row are sixteen
// chains of additions, whose results are added in halves. A matrix form for several tokens would save a fifth of the
// multiplications at best, by count, and would depend on where prompts are cut.
//
// While few tokens are computed, most of the time is memory's. Graphs gather the states of a step's sequences, change the
// copies, and copy them back; here they are read where they lie and changed in place, if no sequence reads what another writes.
#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_tensor;
struct ggml_compute_params;

namespace lp::kernels {

constexpr int kStateRows     = 16;  // that are computed together: rows of a state are a multiple, and its columns
constexpr int kMostStateRows = 64;  // of a call
constexpr int kMostTokens    = 64;

// Floats of a token, those of the next token `stride` after them.
struct Series {
    const float *first  = nullptr;
    int64_t      stride = 0;

    const float *operator[](int64_t token) const { return first + token * stride; }
};

// What tokens do to rows of a head's state, one after another: row j becomes decay * row + c[j] * k, and y[j] is its product with
// q, times the scale. Pointers need no alignment.
struct StateRows {
    int64_t       n_rows, n_columns, n_tokens;
    const float  *before;  // the rows before the first token
    float *const *after;   // and where to write them after each; may be `before`, and the same for several tokens
    Series        k, q, v;
    const float  *decays;   // of each token
    const float  *factors;  // of each token
    Series        decay_row, a, b;  // of RWKV
    float        *y;
    int64_t       y_stride;
    float         scale;
};

// The loops of one CPU level.
struct LinearLevel {
    void (*delta_net)(const StateRows &rows);  // c[j] = (v[j] - decay * the product of row j and k) * factor
    void (*scan)(const StateRows &rows);       // c[j] = v[j] * factor
    // Row j becomes decay_row * row + v[j] * k + the product of row j and a, times b.
    void (*wkv7)(const StateRows &rows);

    // y[t * y_stride + c] = the sum of x[c * x_stride + t + i] * weights[c * width + i] over i < width.
    void (*convolve)(const float *x, int64_t x_stride, const float *weights, int64_t width, int64_t n_channels, int64_t n_tokens,
                     float *y, int64_t y_stride);

    // to[c * to_stride + t] = from[t * from_stride + c].
    void (*transpose)(const float *from, int64_t from_stride, int64_t n_channels, int64_t n_tokens, float *to, int64_t to_stride);
};

// The loops of this machine, or null.
const LinearLevel *linear_level();

// Whether an operation is computed here.
bool is_linear(const ggml_tensor *op);

// The operation that gathers the states that this one changes, or null. Instead of them it may write where they are.
const ggml_tensor *gather_of_states(const ggml_tensor *op);
void               write_places(ggml_tensor *gather);

// What gathers the states of all sequences but the first, where this operation copies none of them and others read them where
// they are: in graphs of scans; or null.
const ggml_tensor *gather_of_nothing(const ggml_tensor *op);

// The operation whose states this one copies to where they are kept, or null.
const ggml_tensor *source_of_copy(const ggml_tensor *op);

// This thread's part of an operation. `gather`: has written where the states are, or null. `copy`: what copies the states
// afterwards, or null. Returns whether they were written where it would copy them; then it need not be computed. All threads get
// the same answer.
bool compute_linear(const ggml_compute_params *params, ggml_tensor *op, const ggml_tensor *gather, const ggml_tensor *copy);

}  // namespace lp::kernels

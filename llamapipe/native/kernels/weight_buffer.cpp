// How our kernels come into ggml's CPU backend: as a type of weight buffers, which llama.cpp asks before its own.
//
// 1. `install` puts the type at the head of the list of CPU weight buffers. llama.cpp copies that list once per process.
// 2. A model is loaded. For each weight llama.cpp asks `supports_op`, with the operation the weight is for and a buffer of 0
//    bytes. We take weights of matrix products that `find` has a kernel for, if the loading thread has a PackingScope.
// 3. `init_tensor` notes what a buffer will hold. `set_tensor` packs a weight, and lets go of the pages of the file that it was
//    read from. If the load was given a file in which the buffer's weights are packed already, it is mapped, and nothing is
//    packed.
// 4. A graph is planned and computed. ggml asks `get_tensor_traits` for each operation and calls `work_size` and
//    `compute_forward` for ours, the latter on all of its threads. Nobody else may read packed weights: the buffer says that it
//    is not host memory, and refuses to be read.
//
// A product has three parts: all threads quantize the activations, while the first one writes down what is multiplied with
// what; ggml's barrier; then threads take pieces of work, which are a few panels of a matrix and all rows for it.
// ggml_cpu.hpp has what this takes of ggml's inside.
#include "weight_buffer.hpp"

#include "attention.hpp"
#include "float_products.hpp"
#include "ggml_cpu.hpp"
#include "kernels.hpp"
#include "linear.hpp"
#include "row_adapters.hpp"
#include "shared_cells.hpp"
#include "system.hpp"
#include "tensors.hpp"
#include "tile_products.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace lp::kernels {
namespace {

// Increase it if panels are arranged otherwise in a buffer, so that files of packed weights are written again. `layout_of_panels`
// notices by itself if the panels change.
constexpr uint64_t kLayoutVersion = 1;

constexpr size_t kAlignment     = 64;
constexpr size_t kHugePageBytes = 2u << 20;
constexpr size_t kPieceBytes    = 128u << 10;  // of weights that are multiplied with all rows before the next
constexpr size_t kRowsBytes     = 256u << 10;  // of rows that are multiplied with a piece: both stay in the second-level cache
constexpr int    kMaxRows       = 256;  // the same as a number

thread_local Packing *t_packing = nullptr;
thread_local bool t_attends = false, t_multiplies = false;  // the graphs of this thread use our attention, our products of floats
thread_local bool t_varies                 = false;  // and their results may depend on the number of rows
thread_local bool t_is_planning            = false;  // this thread plans a graph
thread_local uint32_t           t_plan     = 0;
thread_local const RowAdapters *t_adapters = nullptr;  // of the rows of these graphs
thread_local SharedCells       *t_shares   = nullptr;  // of their sequences; only a graph's first thread has them

extern ggml_backend_buffer_type buffer_type;

bool is_ours(const ggml_tensor *tensor) { return tensor && tensor->buffer && tensor->buffer->buft == &buffer_type; }

size_t padded(size_t n, size_t to = kAlignment) { return (n + to - 1) / to * to; }

// ---- weights: matrices of panels, one after another

struct Weights {
    const Kernel *kernel    = nullptr;  // null: there is none
    int64_t       n_columns = 0, n_rows = 0, n_panels = 0, n_matrices = 0;  // rows and panels of one matrix
    size_t        panel_bytes = 0;

    Weights(ggml_type type, int64_t columns, int64_t rows, int64_t matrices)
        : n_columns(columns), n_rows(rows), n_panels((n_rows + kPanelRows - 1) / kPanelRows), n_matrices(matrices) {
        const int64_t n_padding = n_panels * kPanelRows - n_rows;
        kernel                  = n_padding * 32 <= n_rows ? find(type, n_columns, n_panels * kPanelRows) : nullptr;
        panel_bytes             = kernel ? kernel->panel_bytes(n_columns) : 0;
    }

    explicit Weights(const ggml_tensor *t) : Weights(t->type, t->ne[0], t->ne[1], t->ne[2] * t->ne[3]) {}

    size_t bytes() const { return panel_bytes * n_panels * n_matrices; }

    // The first of the panels that hold the rows of a tensor or of a view of it, which begin `offset` bytes after it in the
    // file's own form; -1 if they do not begin and end as panels do.
    int64_t panel_of(const ggml_tensor *part, size_t offset) const {
        const size_t  row_bytes = ggml_row_size(part->type, n_columns);
        const int64_t row = offset / row_bytes, in_matrix = row % n_rows;
        const bool    is_one = in_matrix + part->ne[1] == n_rows || part->ne[1] % kPanelRows == 0;
        const bool    fits   = in_matrix + part->ne[1] <= n_rows || n_rows % kPanelRows == 0;
        if (offset % row_bytes || in_matrix % kPanelRows || !is_one || !fits) {
            return -1;
        }
        return row / n_rows * n_panels + in_matrix / kPanelRows;
    }
};

const ggml_tensor *whole(const ggml_tensor *tensor) { return tensor->view_src ? tensor->view_src : tensor; }

// Whether a product can use these weights: a whole tensor, or a view whose matrices are panels.
bool can_multiply(const ggml_tensor *tensor) {
    const ggml_tensor *all = whole(tensor);
    const Weights      weights(all);
    if (!weights.kernel) {
        return false;
    }
    if (tensor == all) {
        return true;
    }
    bool is_panels = tensor->type == all->type && tensor->ne[0] == all->ne[0] && tensor->nb[1] == all->nb[1];
    for (int64_t i3 = 0; is_panels && i3 < tensor->ne[3]; i3++) {
        for (int64_t i2 = 0; is_panels && i2 < tensor->ne[2]; i2++) {
            const size_t offset = tensor->view_offs + i2 * tensor->nb[2] + i3 * tensor->nb[3];
            is_panels           = weights.panel_of(tensor, offset) >= 0;
        }
    }
    return is_panels;
}

// ---- products

// A matrix of weights and the rows that it is multiplied with: [first, first + n) of the lists in the work buffer.
struct Group {
    const char *panels;
    int64_t     first, n;
};

// An operation's own place for what is decided when its graph is planned: the end of its parameters, where ggml has none.
template <typename T> char *place_of(const ggml_tensor *op) {
    static_assert(sizeof(T) <= GGML_MAX_OP_PARAMS - 4 * sizeof(int32_t));
    return reinterpret_cast<char *>(const_cast<int32_t *>(op->op_params)) + GGML_MAX_OP_PARAMS - sizeof(T);
}

template <typename T> T read_mark(const ggml_tensor *op) {
    T mark;
    memcpy(&mark, place_of<T>(op), sizeof mark);
    return mark;
}

template <typename T> void write_mark(const ggml_tensor *op, const T &mark) { memcpy(place_of<T>(op), &mark, sizeof mark); }

// Tiles multiply all rows of a product with one matrix.
const TileKernel *tiles_for(const ggml_tensor *op) {
    const ggml_tensor *w = op->src[0];
    const bool         fits =
            t_varies && op->op == GGML_OP_MUL_MAT && w->ne[2] * w->ne[3] == 1 && ggml_nrows(op->src[1]) >= kLeastTileRows;
    return fits ? find_tiles(w->type) : nullptr;
}

// Where things are in the work buffer, which ggml's threads share.
struct Layout {
    size_t row_bytes, counter = 0, n_groups, groups, starts, rows, results, quantized, scratch, bytes;

    Layout(const Kernel *kernel, const TileKernel *tiles, const ggml_tensor *op, int n_threads)
        : row_bytes(padded(kernel->row_bytes(op->src[1]->ne[0]))) {
        const size_t n_matrices = op->src[0]->ne[2] * op->src[0]->ne[3];
        const size_t n_results = ggml_nrows(op), n_rows = ggml_nrows(op->src[1]);
        n_groups  = counter + kAlignment;
        groups    = n_groups + kAlignment;
        starts    = groups + padded(n_matrices * sizeof(Group));
        rows      = starts + padded((n_matrices + 1) * sizeof(int64_t));
        results   = rows + padded(n_results * sizeof(void *));
        quantized = results + padded(n_results * sizeof(float *));
        scratch   = quantized + (tiles ? tile_rows_bytes(op->src[1]->ne[0], n_rows) : n_rows * row_bytes);
        bytes     = scratch + (tiles ? n_threads * tile_scratch_bytes : 0);
    }
};

class Product {
public:
    Product(const ggml_compute_params *params, ggml_tensor *op)
        : op_(op), all_(whole(op->src[0])), weights_(all_), tiles_(read_mark<const TileKernel *>(op)),
          layout_(weights_.kernel, tiles_, op, params->nth), ith_(params->ith), nth_(params->nth),
          work_(aligned(params->wdata, kAlignment)), pool_(params->threadpool) {
        GGML_ASSERT(params->wsize >= layout_.bytes + kAlignment);
    }

    void compute() {
        if (ith_ == 0) {
            write_groups();
            new (work_ + layout_.counter) std::atomic<int64_t>(nth_);  // each thread begins with the piece of its number
        }
        quantize();
        barrier(pool_);
        if (tiles_)
            multiply_tiles();
        else
            multiply();
    }

private:
    template <typename T> T *at(size_t offset) const { return reinterpret_cast<T *>(work_ + offset); }

    char *quantized(int64_t row) const { return work_ + layout_.quantized + row * layout_.row_bytes; }

    // Calls f(matrix, row, result) for each row of the result, with the row of activations it is computed from.
    template <typename F> void for_each_result(F &&f) const {
        const ggml_tensor *w = op_->src[0], *x = op_->src[1];
        const auto         result = [&](int64_t i1, int64_t i2, int64_t i3) { return kernels::at<float>(op_, i1, i2, i3); };
        if (op_->op == GGML_OP_MUL_MAT_ID) {
            const ggml_tensor *ids = op_->src[2];
            for (int64_t token = 0; token < ids->ne[1]; token++) {
                for (int64_t i = 0; i < ids->ne[0]; i++) {
                    const char   *id     = kernels::at<const char>(ids, token) + i * ids->nb[0];
                    const int64_t matrix = *reinterpret_cast<const int32_t *>(id);
                    if (0 <= matrix && matrix < w->ne[2]) {
                        f(matrix, token * x->ne[1] + i % x->ne[1], result(i, token, 0));
                    }
                }
            }
            return;
        }
        const int64_t r2 = x->ne[2] / w->ne[2], r3 = x->ne[3] / w->ne[3];
        for (int64_t i3 = 0, row = 0; i3 < x->ne[3]; i3++) {
            for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
                for (int64_t i1 = 0; i1 < x->ne[1]; i1++, row++) {
                    f(i3 / r3 * w->ne[2] + i2 / r2, row, result(i1, i2, i3));
                }
            }
        }
    }

    // Sorts results by the matrix that they need.
    void write_groups() const {
        const ggml_tensor *w      = op_->src[0];
        const auto         n      = w->ne[2] * w->ne[3];
        auto              *starts = at<int64_t>(layout_.starts);
        std::fill_n(starts, n + 1, 0);
        for_each_result([&](int64_t matrix, int64_t, float *) { starts[matrix + 1]++; });
        auto   *groups   = at<Group>(layout_.groups);
        int64_t n_groups = 0;
        for (int64_t i = 0; i < n; i++) {
            if (starts[i + 1] > 0) {
                const size_t  offset = w->view_offs + i % w->ne[2] * w->nb[2] + i / w->ne[2] * w->nb[3];
                const int64_t panel  = weights_.panel_of(w, offset);
                GGML_ASSERT(panel >= 0 && "a view of packed weights");
                groups[n_groups++] = { static_cast<const char *>(all_->data) + panel * weights_.panel_bytes, starts[i],
                                       starts[i + 1] };
            }
            starts[i + 1] += starts[i];
        }
        *at<int64_t>(layout_.n_groups) = n_groups;
        for_each_result([&](int64_t matrix, int64_t row, float *result) {
            const int64_t i                   = starts[matrix]++;
            at<const void *>(layout_.rows)[i] = quantized(row);
            at<float *>(layout_.results)[i]   = result;
        });
    }

    // This thread's part of the activations: rows one after another are cut at blocks, so that one row has parts, too.
    void quantize() const {
        const ggml_tensor *x     = op_->src[1];
        const int64_t      block = weights_.kernel->block_columns, n_blocks = x->ne[0] / block, n = n_blocks * ggml_nrows(x);
        int64_t            i   = n * ith_ / nth_;
        const int64_t      end = n * (ith_ + 1) / nth_;
        while (i < end) {
            const int64_t row = i / n_blocks, first = i % n_blocks, last = std::min(n_blocks, first + end - i);
            const int64_t i1 = row % x->ne[1], i2 = row / x->ne[1] % x->ne[2], i3 = row / x->ne[1] / x->ne[2];
            const float  *from = kernels::at<const float>(x, i1, i2, i3);
            if (tiles_)
                put_row(from, x->ne[0], first * block, last * block, work_ + layout_.quantized, row);
            else
                weights_.kernel->quantize(from, x->ne[0], first * block, last * block, quantized(row));
            i += last - first;
        }
    }

    // Takes pieces of work until none is left.
    void multiply() const {
        const auto   *groups = at<Group>(layout_.groups);
        const int64_t n_rows = op_->src[0]->ne[1], n_panels = (n_rows + kPanelRows - 1) / kPanelRows;
        const int64_t n_all       = n_panels * *at<int64_t>(layout_.n_groups);
        const int64_t for_cache   = std::max<int64_t>(1, kPieceBytes / weights_.panel_bytes);
        const int64_t for_balance = std::max<int64_t>(1, n_all / (8 * nth_));
        const int64_t wanted      = nth_ > 1 ? std::min(for_cache, for_balance) : for_cache;
        const int64_t at_once     = weights_.kernel->panels_at_once;
        // Few panels on many threads are divided more evenly one by one, which is worth more.
        const int64_t busiest  = ((n_all + at_once - 1) / at_once + nth_ - 1) / nth_ * at_once;
        const bool    is_even  = busiest * nth_ * 4 <= n_all * 5;
        const int64_t n_each   = is_even ? std::max(wanted / at_once * at_once, at_once) : wanted;
        const int64_t n_pieces = (n_panels + n_each - 1) / n_each;  // of a group
        auto         &next     = *at<std::atomic<int64_t>>(layout_.counter);
        for (int64_t i = ith_; i < n_pieces * *at<int64_t>(layout_.n_groups); i = next.fetch_add(1, std::memory_order_relaxed)) {
            const int64_t first = i % n_pieces * n_each;
            multiply(groups[i / n_pieces], first, std::min(n_panels, first + n_each), n_rows);
        }
    }

    void multiply(const Group &group, int64_t first, int64_t last, int64_t n_rows) const {
        const void *const *rows      = at<const void *>(layout_.rows) + group.first;
        float *const      *results   = at<float *>(layout_.results) + group.first;
        const int64_t      for_cache = kRowsBytes / layout_.row_bytes / 16 * 16;
        const int64_t      most      = std::clamp<int64_t>(for_cache, weights_.kernel->least_rows, kMaxRows);
        const bool         is_cut    = last * kPanelRows > n_rows;  // the last panel has rows of padding
        const int64_t      n_whole   = last - first - is_cut;
        float             *y[kMaxRows];
        for (int64_t i = 0; i < group.n; i += most) {
            const int64_t n = std::min(most, group.n - i);
            if (n_whole > 0) {
                for (int64_t j = 0; j < n; j++) {
                    y[j] = results[i + j] + first * kPanelRows;
                }
                const char *panels = group.panels + first * weights_.panel_bytes;
                weights_.kernel->multiply(panels, n_whole, weights_.n_columns, rows + i, n, y);
            }
            if (is_cut) {
                multiply_cut(group.panels + (last - 1) * weights_.panel_bytes, rows + i, results + i, n, (last - 1) * kPanelRows,
                             n_rows);
            }
        }
    }

    void multiply_cut(const char *panel, const void *const *rows, float *const *results, int64_t n, int64_t begin,
                      int64_t end) const {
        float  y[kMaxRows][kPanelRows];
        float *pointers[kMaxRows];
        for (int64_t j = 0; j < n; j++) {
            pointers[j] = y[j];
        }
        weights_.kernel->multiply(panel, 1, weights_.n_columns, rows, n, pointers);
        for (int64_t j = 0; j < n; j++) {
            std::copy_n(y[j], end - begin, results[j] + begin);
        }
    }

    // Takes pieces of the one matrix, which are some panels, until none is left.
    void multiply_tiles() const {
        const Group  &group  = *at<Group>(layout_.groups);
        const int64_t n_rows = op_->src[0]->ne[1], n_panels = (n_rows + kPanelRows - 1) / kPanelRows;
        const int64_t n_each  = std::clamp<int64_t>(n_panels / (4 * nth_) / 2 * 2, 2, kTilePanels);
        auto         &next    = *at<std::atomic<int64_t>>(layout_.counter);
        void         *scratch = work_ + layout_.scratch + ith_ * tile_scratch_bytes;
        for (int64_t i = ith_; i * n_each < n_panels; i = next.fetch_add(1, std::memory_order_relaxed)) {
            const int64_t p = i * n_each, n = std::min(n_each, n_panels - p);
            for (int64_t row = 0; row < group.n; row += kTileRows) {
                const int64_t n_at_once = std::min<int64_t>(kTileRows, group.n - row);
                float        *y[kTileRows];
                for (int64_t j = 0; j < n_at_once; j++) {
                    y[j] = at<float *>(layout_.results)[row + j] + p * kPanelRows;
                }
                tiles_->multiply(group.panels + p * weights_.panel_bytes, n, std::min(n * kPanelRows, n_rows - p * kPanelRows),
                                 weights_.n_columns, tile_rows(work_ + layout_.quantized, weights_.n_columns, row), n_at_once, y,
                                 scratch);
            }
        }
    }

    ggml_tensor       *op_;
    const ggml_tensor *all_;
    const Weights      weights_;
    const TileKernel  *tiles_;  // or null
    const Layout       layout_;
    const int          ith_, nth_;
    char              *work_;
    ggml_threadpool   *pool_;
};

struct Traits : ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        GGML_ASSERT(can_multiply(op->src[0]) && "packed weights can be multiplied only");
        const TileKernel *tiles = tiles_for(op);
        write_mark(op, tiles);
        size = Layout(Weights(whole(op->src[0])).kernel, tiles, op, n_threads).bytes + kAlignment;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        Product(params, op).compute();
        return true;
    }
};

Traits traits;

// Operations without packed weights do not tell whose they are. A graph is planned on the thread that computes it, each time:
// there the operation gets a mark, which all of ggml's threads see. Returning false leaves it to ggml.
struct OtherTraits : ggml::cpu::tensor_traits {
    struct Mark {
        const RowAdapters *adapters   = nullptr;  // not null: it is this part of a product with them
        RowAdapters::Part  part       = RowAdapters::Part::none;
        int32_t            matrix     = 0;
        bool               is_ours    = false;
        bool               has_places = false;  // of an operation with states: what gathers them has written where they are
        bool               is_done    = false;  // of what copies states: they are there
        uint32_t           plan       = 0;
        const ggml_tensor *copy       = nullptr;  // of an operation with states
    };

    static Mark read(const ggml_tensor *op) { return read_mark<Mark>(op); }

    static void write(const ggml_tensor *op, const Mark &mark) { write_mark(op, mark); }

    // Nobody reads the states that it would gather.
    static void replace(const ggml_tensor *gather) {
        Mark mark    = read(gather);
        mark.is_ours = true;
        write(gather, mark);
    }

    // Operations with the same number are planned, and then computed, together.
    static uint32_t this_plan() {
        static std::atomic<uint32_t> n_plans = 0;
        if (!t_is_planning) {
            t_is_planning = true;
            t_plan        = ++n_plans;
        }
        return t_plan;
    }

    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        Mark mark;
        mark.plan = this_plan();
        if (t_adapters && (mark.part = t_adapters->part_of(op, mark.matrix)) != RowAdapters::Part::none) {
            mark.adapters = t_adapters;
            mark.is_ours  = true;
        } else if (is_attention(op)) {
            mark.is_ours = t_attends;
            size         = t_attends ? attention_work_size(op, n_threads) : size;
        } else if (is_float_product(op)) {
            mark.is_ours = t_multiplies;
            size         = t_multiplies ? float_product_work_size(op, n_threads) : size;
        } else if (t_attends && is_linear(op)) {
            const ggml_tensor *gather = gather_of_states(op);
            mark.is_ours              = true;
            mark.has_places           = gather && read(gather).plan == mark.plan;
            if (mark.has_places) {
                replace(gather);
            }
        } else if (const ggml_tensor *gather = t_attends ? gather_of_nothing(op) : nullptr) {
            if (read(gather).plan == mark.plan) {
                replace(gather);
            }
        } else if (const ggml_tensor *source = t_attends ? source_of_copy(op) : nullptr) {
            Mark other = read(source);
            if (other.is_ours && other.plan == mark.plan) {
                other.copy = op;
                write(source, other);
                mark.is_ours = true;
            }
        }
        write(op, mark);
        return mark.is_ours;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const Mark mark = read(op);
        t_is_planning   = false;
        if (mark.adapters) {
            mark.adapters->compute(mark.part, mark.matrix, params, op);
        } else if (op->op == GGML_OP_CPY) {
            return mark.is_done;
        } else if (mark.is_ours && op->op == GGML_OP_GET_ROWS) {
            if (params->ith == 0) {
                write_places(op);
            }
        } else if (mark.is_ours && is_linear(op)) {
            const bool is_in_place = compute_linear(params, op, mark.has_places ? gather_of_states(op) : nullptr, mark.copy);
            if (is_in_place && params->ith == 0) {
                Mark other    = read(mark.copy);
                other.is_done = true;
                write(mark.copy, other);
            }
        } else if (mark.is_ours && is_attention(op)) {
            compute_attention(params, op, t_shares, barrier);
        } else if (mark.is_ours) {
            compute_float_product(params, op, barrier);
        }
        return mark.is_ours;
    }
};

OtherTraits other_traits;

// Writes of cells, which ggml computes.
struct WriteTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        if (params->ith == 0 && t_shares) {
            t_shares->written(op);
        }
        return false;
    }
};

WriteTraits write_traits;

// Tensors of one value. The graph of a draft with a vocabulary of its own fills a row of the whole vocabulary for each
// token: as rows of one element, for which ggml divides three times each. That took a third of a draft's time.
struct FillTraits : ggml::cpu::tensor_traits {
    static bool is_fill(const ggml_tensor *op) {
        return op->op == GGML_OP_FILL && op->type == GGML_TYPE_F32 && ggml_is_contiguous(op);
    }

    bool work_size(int, const ggml_tensor *, size_t &) override { return true; }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        float value;
        memcpy(&value, op->op_params, sizeof value);
        float *const  to = static_cast<float *>(op->data);
        const int64_t n  = ggml_nelements(op);
        std::fill(to + n * params->ith / params->nth, to + n * (params->ith + 1) / params->nth, value);
        return true;
    }
};

FillTraits fill_traits;

// Whether an operation may be the end of a product with an adapter.
bool is_scaled_product(const ggml_tensor *op) {
    return op->op == GGML_OP_SCALE && op->src[0]->op == GGML_OP_MUL_MAT && is_float_product(op->src[0]);
}

struct BufferType : ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *op) override {
        if (op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) {
            return false;
        }
        const ggml_tensor *w = op->src[0], *x = op->src[1];
        if (!is_ours(w) || is_ours(x) || is_ours(op->src[2]) || op->type != GGML_TYPE_F32 || x->type != GGML_TYPE_F32 ||
            x->nb[0] != sizeof(float) || !can_multiply(w)) {
            return false;
        }
        const bool is_question = w->buffer->size == 0;  // by a load
        return !is_question || t_packing;
    }

    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        if (is_attention(op) || is_float_product(op) || is_scaled_product(op) || is_linear(op) || op->op == GGML_OP_GET_ROWS ||
            op->op == GGML_OP_CPY) {
            return &other_traits;
        }
        if (is_write_of_keys(op)) {
            return &write_traits;
        }
        if (FillTraits::is_fill(op)) {
            return &fill_traits;
        }
        const bool is_product = op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID;
        return is_product && is_ours(op->src[0]) ? &traits : nullptr;
    }
};

// ---- buffers

// A hash (FNV-1a): it tells files apart that differ by chance, not by intent.
class Hash {
public:
    void add(const void *data, size_t size) {
        for (size_t i = 0; i < size; i++) {
            value_ = (value_ ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3;
        }
    }
    template <typename T> void add(T value) { add(&value, sizeof value); }

    uint64_t value() const { return value_; }

private:
    uint64_t value_ = 0xcbf29ce484222325;
};

// What all types are packed to, as a number: the hash of the panels of some bytes.
uint64_t layout_of_panels() {
    static const uint64_t layout = [] {
        constexpr int64_t n_columns = 512;
        Hash              hash;
        hash.add(kLayoutVersion);
        for (int type = 0; type < GGML_TYPE_COUNT; type++) {
            const Kernel *kernel = find(static_cast<ggml_type>(type), n_columns, kPanelRows);
            if (!kernel) {
                continue;
            }
            const size_t      row_bytes = ggml_row_size(static_cast<ggml_type>(type), n_columns);
            std::vector<char> rows(kPanelRows * row_bytes), panel(kernel->panel_bytes(n_columns));
            uint32_t          state = 1;
            for (char &byte : rows) {
                state = state * 1664525 + 1013904223;
                byte  = static_cast<char>(state >> 24);
            }
            kernel->pack(rows.data(), row_bytes, n_columns, panel.data());
            hash.add(type);
            hash.add(panel.data(), panel.size());
        }
        return hash.value();
    }();
    return layout;
}

struct Memory {
    void    *base;
    size_t   size;
    Packing *packing;  // of the load that allocated it, and only during it
    Hash     layout    = {};
    bool     is_mapped = false;
};

Memory *memory_of(ggml_backend_buffer_t buffer) { return static_cast<Memory *>(buffer->context); }

// Where it is large, it begins at a huge page, as a file that is mapped over it can have them. It asks for none itself: virtual
// machines may have to get them from their host, which took several times as long as packing.
void *map_memory(size_t size) { return lp::system::reserve(size, size >= 8 * kHugePageBytes ? kHugePageBytes : kAlignment); }

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor) {
    if (!tensor->view_src) {
        Hash &layout = memory_of(buffer)->layout;
        layout.add(tensor->name, strlen(tensor->name) + 1);
        layout.add(tensor->type);
        layout.add(tensor->ne, sizeof tensor->ne);
        const auto *base = static_cast<const char *>(memory_of(buffer)->base);
        layout.add(static_cast<uint64_t>(static_cast<const char *>(tensor->data) - base));
        layout.add(static_cast<uint64_t>(Weights(tensor).bytes()));
    }
    return GGML_STATUS_SUCCESS;
}

// Once all tensors are known, and before the first is set: maps the file that the load was given, if it has these tensors.
void use_file(Memory &memory) {
    Packing &packing       = *memory.packing;
    memory.packing         = nullptr;
    packing.data           = memory.base;
    packing.n_data         = memory.size;
    packing.layout         = memory.layout.value();
    const PackedFile &file = packing.file;
    if (file.fd >= 0 && file.n_bytes == packing.n_data && file.layout == packing.layout) {
        memory.is_mapped = packing.is_mapped = map_file(memory.base, packing.n_data, file.fd, file.offset);
    }
}

void free_buffer(ggml_backend_buffer_t buffer) {
    lp::system::release(memory_of(buffer)->base, memory_of(buffer)->size);
    delete memory_of(buffer);
}

void *get_base(ggml_backend_buffer_t buffer) { return memory_of(buffer)->base; }

// Packs on this thread and others, which read the pages of the file, too.
void pack(const Weights &weights, const ggml_tensor *tensor, const char *data, int n_threads) {
    const size_t         stride   = tensor->nb[1];
    const int64_t        n_panels = weights.n_panels * weights.n_matrices, n_whole = weights.n_rows / kPanelRows;
    const int64_t        n_each = std::max<int64_t>(1, kPieceBytes / weights.panel_bytes);
    std::atomic<int64_t> next   = 0;

    const auto rows_of = [&](int64_t i) {
        return data + (i / weights.n_panels * weights.n_rows + i % weights.n_panels * kPanelRows) * stride;
    };
    const auto panel_of = [&](int64_t i) { return static_cast<char *>(tensor->data) + i * weights.panel_bytes; };
    const auto work     = [&] {
        for (int64_t first; (first = next.fetch_add(n_each, std::memory_order_relaxed)) < n_panels;) {
            for (int64_t i = first; i < std::min(n_panels, first + n_each); i++) {
                if (i % weights.n_panels < n_whole) {
                    weights.kernel->pack(rows_of(i), stride, weights.n_columns, panel_of(i));
                }
            }
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(std::max(n_threads, 1));
    try {
        for (int64_t i = 1; i < std::min<int64_t>(n_threads, n_panels / n_each); i++) {
            threads.emplace_back(work);
        }
    } catch (const std::system_error &) {
        // the system allows no more threads
    }
    work();
    for (std::thread &thread : threads) {
        thread.join();
    }
    if (n_whole == weights.n_panels) {
        return;
    }
    // The last panel of each matrix is filled up with zeros, which are weights of 0 in all types.
    std::vector<char> rows(kPanelRows * stride);
    for (int64_t i = n_whole; i < n_panels; i += weights.n_panels) {
        memcpy(rows.data(), rows_of(i), (weights.n_rows - n_whole * kPanelRows) * stride);
        weights.kernel->pack(rows.data(), stride, weights.n_columns, panel_of(i));
    }
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    const Weights weights(tensor);
    GGML_ASSERT(weights.kernel && tensor->view_src == nullptr && "only whole weights can be packed");
    // llama.cpp sets tensors of buffers like this one as a whole, whether it maps or reads the file.
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor) && "weights can only be packed at once");
    Memory &memory = *memory_of(buffer);
    if (memory.packing) {
        use_file(memory);
    }
    if (!memory.is_mapped) {
        pack(weights, tensor, static_cast<const char *>(data), t_packing ? t_packing->n_threads : 1);
    }
    lp::system::let_go(data, size);  // the kernel keeps them in its cache, as long as it likes
    if (t_packing) {
        t_packing->n_tensors++;
        t_packing->n_bytes += weights.bytes();
    }
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor *tensor, void *, size_t, size_t) {
    GGML_ABORT("%s: packed weights cannot be read", tensor->name);
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t, size_t, size_t) {
    GGML_ABORT("%s: packed weights cannot be changed", tensor->name);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    GGML_ASSERT(!memory_of(buffer)->is_mapped && "packed weights of a file cannot be changed");
    memset(memory_of(buffer)->base, value, memory_of(buffer)->size);
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    const size_t n_bytes = std::max<size_t>(size, 1);
    void        *base    = map_memory(n_bytes);
    if (!base) {
        return nullptr;
    }
    Memory *memory = new Memory{ base, n_bytes, nullptr };
    if (size > 0 && t_packing && !t_packing->has_buffer) {
        memory->packing       = t_packing;
        t_packing->has_buffer = true;
        memory->layout.add(layout_of_panels());
    }
    ggml_backend_buffer_i functions = {};
    functions.free_buffer           = free_buffer;
    functions.get_base              = get_base;
    functions.init_tensor           = init_tensor;
    functions.set_tensor            = set_tensor;
    functions.get_tensor            = get_tensor;
    functions.memset_tensor         = memset_tensor;
    functions.clear                 = clear;
    return ggml_backend_buffer_init(type, functions, memory, size);
}

size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *tensor) {
    return std::max(ggml_nbytes(tensor), Weights(tensor).bytes());
}

const char *get_name(ggml_backend_buffer_type_t) { return "CPU_LLAMAPIPE"; }

size_t get_alignment(ggml_backend_buffer_type_t) { return kAlignment; }

ggml_backend_buffer_type buffer_type = {};

// ---- installation

const char *find_level() {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        if (const Kernel *kernel = find(static_cast<ggml_type>(type), 4096, 4096)) {
            return kernel->level;
        }
    }
    return nullptr;
}

// Why the list could not be changed; empty if it was.
std::string put_into_list() {
    if (!find_level()) {
        return "there are none for this processor";
    }
    static BufferType context;
    buffer_type.iface.get_name       = get_name;
    buffer_type.iface.alloc_buffer   = alloc_buffer;
    buffer_type.iface.get_alignment  = get_alignment;
    buffer_type.iface.get_alloc_size = get_alloc_size;
    return offer(buffer_type, context);
}

std::once_flag installed;
std::string    problem;

}  // namespace

const char *install() {
    std::call_once(installed, [] { problem = put_into_list(); });
    return problem.empty() ? nullptr : problem.c_str();
}

bool have(ggml_type type, int64_t n_columns, int64_t n_rows) { return !install() && Weights(type, n_columns, n_rows, 1).kernel; }

const char *level() { return install() ? nullptr : find_level(); }

bool attends() { return !install() && attention_level(); }

bool map_file(void *data, int64_t n_bytes, int fd, int64_t offset) { return lp::system::put_file(data, n_bytes, fd, offset); }

PackingScope::PackingScope(Packing *packing) noexcept : outer_(t_packing) { t_packing = packing; }

PackingScope::~PackingScope() { t_packing = outer_; }

ComputeScope::ComputeScope(bool attends, bool multiplies, bool varies, const RowAdapters *adapters, SharedCells *shares) noexcept
    : outer_attends_(t_attends), outer_multiplies_(t_multiplies), outer_varies_(t_varies), outer_adapters_(t_adapters),
      outer_shares_(t_shares) {
    t_attends    = attends;
    t_multiplies = multiplies;
    t_varies     = varies;
    t_adapters   = adapters;
    t_shares     = shares;
}

ComputeScope::~ComputeScope() {
    t_attends    = outer_attends_;
    t_multiplies = outer_multiplies_;
    t_varies     = outer_varies_;
    t_adapters   = outer_adapters_;
    t_shares     = outer_shares_;
}

}  // namespace lp::kernels

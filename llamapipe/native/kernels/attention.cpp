// Attention: which rows and heads are computed together, and which cells they see.
#include "attention.hpp"

#include "processor.hpp"
#include "shared_cells.hpp"
#include "tensors.hpp"

#include "ggml-backend-impl.h"
#include "ggml-cpu/traits.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

namespace lp::kernels {

#if defined(__x86_64__)
extern const AttentionLevel kAttentionAvx2, kAttentionAvx512;
#endif

const AttentionLevel *attention_level() {
#if defined(__x86_64__)
    return !processor().avx2 ? nullptr : processor().avx512 ? &kAttentionAvx512 : &kAttentionAvx2;
#else
    return nullptr;
#endif
}

namespace {

constexpr int64_t kScoresBytes = 4 << 20;  // of a tile: more cost less than reading cells again for some of the rows
constexpr int64_t kMostQueries = 48;  // of a tile
constexpr size_t  kAlignment   = 64;

int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool is_supported(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || ggml_get_type_traits(type)->to_float;
}

// A tile: rows [row, row + n_rows) of a stream, or of a part of several, and n_heads heads from `head` on, which read the keys
// and values of one head.
struct Tile {
    int64_t stream, head, n_heads, row, n_rows, n_shared;  // first cells that all streams of the part have

    int64_t n_queries() const { return n_heads * n_rows; }
};

// Which rows are computed together: parts that see mostly the same cells. Rows of several sequences may see none in common, and
// then a tile of both would compute every cell for both. Sequences are in one range of cells, or each is a stream.
struct RowParts {
    static constexpr int64_t kMost = 64;  // rows; more are a prompt's, whose neighbours see the same cells

    int64_t n                = 0;                // 0: rows are cut evenly
    int64_t first[kMost + 1] = {};
    bool    has_streams      = false;            // rows are those of all streams, in this order
    int64_t rows[kMost]      = {};
    int64_t n_shared[kMost]  = {};               // of each part: first cells that its streams have in common

    // Whether queries [0, a) and [a, a + b) cost less together. Reading a cell, and making floats of its keys, costs as much as
    // its products with kRead queries, by measurement.
    static bool belong_together(int64_t a, int64_t a_cells, int64_t b, int64_t b_cells, int64_t all_cells) {
        constexpr int64_t kRead = 6;
        return (kRead + a + b) * all_cells <= (kRead + a) * a_cells + (kRead + b) * b_cells;
    }
};

// How an operation is cut into tiles. Results do not depend on it.
struct Tiling {
    int64_t         n_rows, n_heads, n_kv_heads, n_streams, n_cells, group;  // heads that share keys
    int64_t         heads_each, rows_each;  // of a tile
    int64_t         most_queries_each, most_rows_each;  // whatever the number of threads
    int64_t         head_tiles, row_tiles, n;  // of a head of keys, of a stream, of all
    const RowParts *parts = nullptr;

    // `as_one`: the rows of all streams are cut as those of one.
    Tiling(const ggml_tensor *op, int n_threads, bool as_one = false)
        : n_rows(op->src[0]->ne[1] * (as_one ? op->src[0]->ne[3] : 1)), n_heads(op->src[0]->ne[2]), n_kv_heads(op->src[1]->ne[2]),
          n_streams(as_one ? 1 : op->src[0]->ne[3]), n_cells(padded(op->src[1]->ne[1], kKeyBlock)), group(n_heads / n_kv_heads) {
        const int64_t most =
                std::clamp<int64_t>(kScoresBytes / int64_t{ sizeof(float) } / std::max<int64_t>(n_cells, 1), 6, kMostQueries);
        heads_each        = std::min(group, most);
        rows_each         = std::clamp<int64_t>(most / heads_each, 1, n_rows);
        most_queries_each = heads_each * rows_each;
        most_rows_each    = rows_each;
        count();
        // As many tiles for each thread, or two at least, so that none waits long for another; not by loading all keys for
        // single heads.
        while (n < 2 * n_threads && n % n_threads && rows_each > 1) {
            rows_each = (rows_each + 1) / 2;
            count();
        }
        while (n < 2 * n_threads && n % n_threads && heads_each > (n < n_threads ? 1 : 4)) {
            heads_each = (heads_each + 1) / 2;
            count();
        }
    }

    void count() {
        head_tiles = (group + heads_each - 1) / heads_each;
        row_tiles  = parts ? parts->n : (n_rows + rows_each - 1) / rows_each;
        n          = head_tiles * row_tiles * n_kv_heads * n_streams;
    }

    Tile tile(int64_t i) const {
        const int64_t row_tile = i % row_tiles, part = i / row_tiles % head_tiles * heads_each;
        const int64_t row     = parts ? parts->first[row_tile] : row_tile * rows_each;
        const int64_t end     = parts ? parts->first[row_tile + 1] : std::min(row + rows_each, n_rows);
        const int64_t kv_head = i / row_tiles / head_tiles % n_kv_heads, stream = i / row_tiles / head_tiles / n_kv_heads;
        return { stream,
                 kv_head * group + part,
                 std::min(heads_each, group - part),
                 row,
                 end - row,
                 parts ? parts->n_shared[row_tile] : 0 };
    }

    // Cuts rows as they were listed.
    void cut(const RowParts &by) {
        parts = by.n ? &by : nullptr;
        count();
    }
};

// Whether rows of several streams may be computed together.
bool can_join(const Tiling &t) { return t.n_streams > 1 && t.n_streams * t.n_rows <= RowParts::kMost; }

// A thread's part of the work memory.
struct Scratch {
    size_t queries, results, scores, masks, cells, keys, rows, bytes = kAlignment;

    int64_t n_cells;  // most that a tile lists

    Scratch(const Tiling &t, const Tiling &as_one, int64_t key_dims, int64_t value_dims)
        : n_cells(can_join(t) ? 2 * t.n_cells : t.n_cells) {
        const int64_t n      = can_join(t) ? std::max(t.most_queries_each, as_one.most_queries_each) : t.most_queries_each;
        const int64_t n_rows = can_join(t) ? std::max(t.most_rows_each, as_one.most_rows_each) : t.most_rows_each;
        queries              = take<float>(n * key_dims);
        results              = take<float>(n * value_dims);
        scores               = take<float>(n * n_cells);
        masks                = take<uint16_t>(n_rows * n_cells);
        cells                = take<int32_t>(n_cells);
        keys                 = take<float>(kKeyBlock * key_dims);
        rows                 = take<float>(std::max(kKeyBlock * key_dims, kValueBlock * value_dims));  // of forms without loops
    }

private:
    template <typename T> size_t take(int64_t n) {
        const size_t at = bytes;
        bytes += padded(n * int64_t{ sizeof(T) }, kAlignment);
        return at;
    }
};

class Attention {
public:
    Attention(const ggml_compute_params *params, ggml_tensor *op, SharedCells *shares)
        : op_(op), q_(op->src[0]), k_(op->src[1]), v_(op->src[2]), mask_(op->src[3]), sinks_(op->src[4]),
          level_(*attention_level()), tiling_(op, params->nth), as_one_(op, params->nth, true),
          at_(tiling_, as_one_, q_->ne[0], v_->ne[0]), ith_(params->ith) {
        GGML_ASSERT(params->wsize >= work_size(at_, params->nth));
        char *begin = aligned(params->wdata, kAlignment);
        shared_     = reinterpret_cast<Shared *>(begin);
        scratch_    = begin + padded(sizeof(Shared), kAlignment) + params->ith * at_.bytes;
        float options[3];
        memcpy(options, op->op_params, sizeof(options));
        softcap_  = options[2];
        scale_    = softcap_ != 0 ? options[0] / softcap_ : options[0];
        max_bias_ = options[1];
        if (ith_ == 0) {
            new (shared_) Shared{ { params->nth }, {} };  // each thread begins with the tile of its number
            if (shares) {
                join_streams(*shares, shared_->parts);
            }
            list_parts(shared_->parts);
        }
    }

    static size_t work_size(const Scratch &scratch, int n_threads) {
        return kAlignment + padded(sizeof(Shared), kAlignment) + n_threads * scratch.bytes;
    }

    // After the first thread's constructor.
    void compute() {
        if (shared_->parts.has_streams) {
            tiling_ = as_one_;
        }
        tiling_.cut(shared_->parts);
        for (int64_t i = ith_; i < tiling_.n; i = shared_->next.fetch_add(1, std::memory_order_relaxed)) {
            compute(tiling_.tile(i));
        }
    }

private:
    struct Shared {
        std::atomic<int64_t> next;
        RowParts             parts;
    };

    template <typename T> T *at(size_t offset) const { return reinterpret_cast<T *>(scratch_ + offset); }

    const uint16_t *mask_of(int64_t stream, int64_t row) const {
        return kernels::at<const uint16_t>(mask_, row, 0, stream % mask_->ne[3]);
    }

    void list_parts(RowParts &parts) const {
        if (!mask_ || tiling_.n_streams > 1 || tiling_.n_rows < 2 || tiling_.n_rows > RowParts::kMost) {
            return;
        }
        uint16_t     *seen    = at<uint16_t>(at_.masks);  // a mask of all cells of the part
        int32_t      *cells   = at<int32_t>(at_.cells);
        const int64_t n_cells = k_->ne[1];
        int64_t       n_seen  = 0;
        for (int64_t row = 0; row < tiling_.n_rows; row++) {
            const uint16_t *masks[]   = { mask_of(0, row), seen };
            const int64_t   n         = level_.list(masks, 1, n_cells, cells);
            const int64_t   n_before  = parts.n ? row - parts.first[parts.n - 1] : 0;
            bool            is_joined = n_before > 0 && n_before < tiling_.rows_each;
            if (is_joined) {
                const int64_t n_all = level_.list(masks, 2, n_cells, cells);
                is_joined = RowParts::belong_together(n_before * tiling_.heads_each, n_seen, tiling_.heads_each, n, n_all);
                n_seen    = n_all;
            }
            if (!is_joined) {
                parts.first[parts.n++] = row;
                std::fill_n(seen, n_cells, kUnseen);
                n_seen = level_.list(masks, 1, n_cells, cells);
            }
            for (int64_t i = 0; i < n_seen; i++) {
                seen[cells[i]] = 0;
            }
        }
        parts.first[parts.n] = tiling_.n_rows;
    }

    // The cells of the streams of an operation, if they are in a cache of llama.cpp's: not in a copy of a part of it.
    bool find_range(SharedCells::Range &range) const {
        const ggml_tensor *keys = k_->view_src, *values = v_->view_src;
        const auto         is_cache = [this](const ggml_tensor *cache, const ggml_tensor *part, const char *name) {
            return cache && strncmp(cache->name, name, strlen(name)) == 0 && part->nb[3] == cache->nb[2] &&
                   part->nb[3] % part->nb[1] == 0 && part->nb[2] * part->ne[2] <= part->nb[1] && part->ne[3] == q_->ne[3];
        };
        if (!mask_ || mask_->ne[3] != q_->ne[3] || !is_cache(keys, k_, "cache_k_l") ||
            !(values == keys || is_cache(values, v_, "cache_v_l")) || v_->nb[3] % v_->nb[1] || v_->ne[3] != q_->ne[3] ||
            v_->nb[3] / v_->nb[1] != k_->nb[3] / k_->nb[1]) {
            return false;
        }
        const size_t             offset = kernels::at<const char>(k_, 0) - kernels::at<const char>(keys, 0);
        const ggml_tensor *const v      = values == keys ? k_ : v_;  // with MLA a value is a part of its key
        range = { keys->data, kernels::at<const char>(k_, 0),       kernels::at<const char>(v, 0), k_->nb[1], v->nb[1], k_->nb[3],
                  v->nb[3],   static_cast<int>(offset / k_->nb[3]), static_cast<int>(q_->ne[3]) };
        return offset % k_->nb[3] == 0;
    }

    // Lists which streams are computed together: those whose first cells are the same.
    void join_streams(SharedCells &shares, RowParts &parts) const {
        SharedCells::Range range;
        if (!find_range(range)) {
            return;
        }
        const int64_t n_rows = tiling_.n_rows;
        if (range.n * n_rows > RowParts::kMost) {
            return;
        }
        int32_t          *cells = at<int32_t>(at_.cells);
        int64_t           n_seen[RowParts::kMost], n_first[RowParts::kMost];  // cells, and how many from the first one on
        SharedCells::Link links[RowParts::kMost];
        for (int i = 0; i < range.n; i++) {
            const uint16_t *masks[RowParts::kMost];
            n_first[i] = INT64_MAX;
            for (int64_t row = 0; row < n_rows; row++) {
                masks[row]      = mask_of(i, row);
                const int64_t n = level_.list(masks + row, 1, k_->ne[1], cells);
                // Cells are listed in their order, so those that are at their own number are the first ones.
                const auto is_first = [cells](const int32_t &cell) { return cell == &cell - cells; };
                n_first[i]          = std::min<int64_t>(n_first[i], std::partition_point(cells, cells + n, is_first) - cells);
                n_seen[i]           = n;
            }
            if (n_rows > 1) {
                n_seen[i] = level_.list(masks, n_rows, k_->ne[1], cells);
            }
        }
        shares.find(range, n_first, links);
        if (n_rows > as_one_.rows_each) {
            return;
        }
        const int64_t n_queries                 = n_rows * as_one_.heads_each;
        bool          is_taken[RowParts::kMost] = {};
        int64_t       n_taken                   = 0;
        for (int i = 0; i < range.n; i++) {
            if (is_taken[i]) {
                continue;
            }
            int64_t n_streams = 0, n_shared = 0, n_all = 0, n_sum = 0;
            parts.first[parts.n] = n_taken;
            for (int j = i; j < range.n; j++) {
                if (is_taken[j]) {
                    continue;
                }
                const int64_t with = n_streams ? std::min(n_shared, SharedCells::common(links, i, j)) : n_seen[i];
                const int64_t all  = n_sum + n_seen[j] - n_streams * with;
                if (n_streams && ((n_streams + 1) * n_rows > as_one_.rows_each || all > at_.n_cells ||
                                  !RowParts::belong_together(n_streams * n_queries, n_all, n_queries, n_seen[j], all))) {
                    continue;
                }
                is_taken[j] = true;
                n_streams++;
                n_shared = with;
                n_all    = all;
                n_sum += n_seen[j];
                for (int64_t row = 0; row < n_rows; row++) {
                    parts.rows[n_taken++] = j * n_rows + row;
                }
            }
            parts.n_shared[parts.n++] = n_streams > 1 ? n_shared : 0;
            shares.n_spared += (n_streams - 1) * n_shared;
        }
        parts.first[parts.n] = n_taken;
        parts.has_streams    = parts.n < range.n;
        if (!parts.has_streams) {
            parts.n = 0;
        }
    }

    void compute(const Tile &tile) const {
        const int64_t n = list_cells(tile), n_padded = padded(n, kKeyBlock);
        read_queries(tile);
        Softmax softmax[kMostQueries];
        for (int64_t r = 0; r < tile.n_queries(); r++) {
            softmax[r].slope = slope(tile.head + r % tile.n_heads);
        }
        score(tile, n, softmax);
        for (int64_t r = 0; r < tile.n_queries(); r++) {
            Softmax &s = softmax[r];
            s.sink     = sinks_ ? static_cast<const float *>(sinks_->data)[tile.head + r % tile.n_heads] : -INFINITY;
            s.maximum  = s.sink > s.maximum ? s.sink : s.maximum;
            if (!std::isfinite(s.maximum)) {  // no cell is seen, or the result is not a number
                std::fill_n(at<float>(at_.scores) + r * n_padded, n_padded, s.maximum == -INFINITY ? 0.0f : NAN);
            }
        }
        add_values(tile, n, softmax);
        for (int64_t r = 0; r < tile.n_queries(); r++) {
            write(place_of(tile, r / tile.n_heads), tile.head + r % tile.n_heads, at<float>(at_.results) + r * v_->ne[0],
                  softmax[r].sum());
        }
    }

    // Of a query: what its scores become weights with, and the weights' sum in the fixed point of `exponentials`. `sink`: the
    // score of a cell without a value.
    struct Softmax {
        float   maximum = -INFINITY, sink = -INFINITY, slope = 1;
        int64_t total = 0;

        float sum() const {
            if (!std::isfinite(maximum)) {
                return maximum == -INFINITY ? 0.0f : NAN;
            }
            const float of_cells = static_cast<float>(static_cast<double>(total) / kFixedPoint);
            return sink == -INFINITY ? of_cells : of_cells + std::exp(sink - maximum);
        }
    };

    struct Place {
        int64_t stream, row;
    };

    Place place_of(const Tile &tile, int64_t r) const {
        if (!shared_->parts.has_streams) {
            return { tile.stream, tile.row + r };
        }
        const int64_t row = shared_->parts.rows[tile.row + r];
        return { row / q_->ne[1], row % q_->ne[1] };
    }

    // `list_cells` for rows of several streams. First are the cells that all of them have, which are read from the first
    // stream, then the others of each. The cells of all streams are numbered on.
    int64_t list_cells_of_streams(const Tile &tile) const {
        const int64_t   n_each = static_cast<int64_t>(k_->nb[3] / k_->nb[1]);
        int32_t        *cells  = at<int32_t>(at_.cells);
        const uint16_t *rows[kMostQueries];
        int64_t         first[kMostQueries + 1] = {};  // in the list, of the cells of row r's stream and the next one's
        int64_t         n                       = 0;
        for (int64_t r = 0; r < tile.n_rows; r++) {
            const Place place = place_of(tile, r);
            rows[r]           = mask_of(place.stream, place.row);
        }
        for (int64_t begin = 0, end; begin < tile.n_rows; begin = end) {
            const int64_t stream = place_of(tile, begin).stream, from = begin ? tile.n_shared : 0;
            for (end = begin + 1; end < tile.n_rows && place_of(tile, end).stream == stream;) {
                end++;
            }
            const uint16_t *masks[kMostQueries];
            for (int64_t r = begin; r < end; r++) {
                first[r]         = n;
                masks[r - begin] = rows[r] + from;
            }
            const int64_t n_own = level_.list(masks, end - begin, k_->ne[1] - from, cells + n);
            for (int64_t i = n; i < n + n_own; i++) {
                cells[i] += static_cast<int32_t>(stream * n_each + from);
            }
            n += n_own;
        }
        const int64_t n_padded = padded(n, kKeyBlock);
        for (int64_t r = 0; r < tile.n_rows; r++) {
            uint16_t     *masks  = at<uint16_t>(at_.masks) + r * n_padded;
            const int64_t stream = place_of(tile, r).stream, offset = stream * n_each, begin = first[r];
            int64_t       end = begin;
            std::fill_n(masks, n_padded, kUnseen);
            memcpy(masks, rows[r], tile.n_shared * sizeof(*masks));
            for (; end < n && cells[end] >= offset && cells[end] < offset + n_each; end++) {
                masks[end] = rows[r][cells[end] - offset];
            }
        }
        return n;
    }

    // Lists the cells that any of the tile's rows sees, with the masks of each row for them. Returns how many they are.
    int64_t list_cells(const Tile &tile) const {
        if (shared_->parts.has_streams) {
            return list_cells_of_streams(tile);
        }
        int32_t  *cells = at<int32_t>(at_.cells);
        uint16_t *masks = at<uint16_t>(at_.masks);
        int64_t   n     = 0;
        if (!mask_) {
            for (; n < k_->ne[1]; n++) {
                cells[n] = static_cast<int32_t>(n);
            }
            const int64_t n_padded = padded(n, kKeyBlock);
            for (int64_t r = 0; r < tile.n_rows; r++) {
                std::fill_n(masks + r * n_padded, n, uint16_t{ 0 });
                std::fill_n(masks + r * n_padded + n, n_padded - n, kUnseen);
            }
            return n;
        }
        const uint16_t *rows[kMostQueries];
        for (int64_t r = 0; r < tile.n_rows; r++) {
            rows[r] = mask_of(tile.stream, tile.row + r);
        }
        n                      = level_.list(rows, tile.n_rows, k_->ne[1], cells);
        const int64_t n_padded = padded(n, kKeyBlock);
        const bool    is_range = n > 0 && cells[n - 1] - cells[0] == n - 1;
        for (int64_t r = 0; r < tile.n_rows; r++) {
            if (is_range) {
                memcpy(masks + r * n_padded, rows[r] + cells[0], n * sizeof(*masks));
            } else {
                for (int64_t i = 0; i < n; i++) {
                    masks[r * n_padded + i] = rows[r][cells[i]];
                }
            }
            std::fill_n(masks + r * n_padded + n, n_padded - n, kUnseen);
        }
        return n;
    }

    void read_queries(const Tile &tile) const {
        float *to = at<float>(at_.queries);
        for (int64_t r = 0; r < tile.n_queries(); r++, to += q_->ne[0]) {
            const Place place = place_of(tile, r / tile.n_heads);
            memcpy(to, kernels::at<const float>(q_, place.row, tile.head + r % tile.n_heads, place.stream),
                   q_->ne[0] * sizeof(float));
        }
    }

    // The keys or values of a head, in the order of a tile's list of cells.
    class Cells {
    public:
        Cells(const Attention &attention, const ggml_tensor *from, const Tile &tile, int64_t n)
            : list_(attention.at<int32_t>(attention.at_.cells)), rows_(attention.at<float>(attention.at_.rows)), n_(n),
              n_dims_(from->ne[0]), stride_(from->nb[1]),
              to_float_(form_of(from->type) == kForms ? ggml_get_type_traits(from->type)->to_float : nullptr),
              form_(to_float_ ? kFormF32 : form_of(from->type)) {
            const int64_t head   = tile.head / (attention.q_->ne[2] / from->ne[2]);
            const int64_t stream = tile.stream / (attention.q_->ne[3] / from->ne[3]);
            data_                = kernels::at<const char>(from, 0, head, stream);
        }

        Form form() const { return form_; }

        // Where up to `block` cells from `first` on are, and where those are that follow; the last one again instead of missing
        // ones. Returns how many there are.
        int64_t read(int64_t first, int64_t block, const char **cells, const char **next) const {
            const int64_t n = std::min(block, n_ - first);
            for (int64_t i = 0; i < block; i++) {
                cells[i] = at(first + i);
                next[i]  = at(first + block + i);
            }
            if (to_float_) {
                for (int64_t i = 0; i < n; i++) {
                    to_float_(cells[i], rows_ + i * n_dims_, n_dims_);
                    cells[i] = reinterpret_cast<const char *>(rows_ + i * n_dims_);
                }
                std::fill(cells + n, cells + block, cells[n - 1]);
            }
            return n;
        }

    private:
        const char *at(int64_t i) const { return data_ + list_[std::min(i, n_ - 1)] * stride_; }

        static Form form_of(ggml_type type) {
            return type == GGML_TYPE_F32    ? kFormF32
                   : type == GGML_TYPE_F16  ? kFormF16
                   : type == GGML_TYPE_Q8_0 ? kFormQ8_0
                                            : kForms;
        }

        const int32_t  *list_;
        float          *rows_;
        int64_t         n_, n_dims_;
        size_t          stride_;
        ggml_to_float_t to_float_;
        Form            form_;
        const char     *data_;
    };

    // Scores stay in the first-level cache until they are masked.
    void score(const Tile &tile, int64_t n, Softmax *softmax) const {
        const int64_t n_dims = k_->ne[0], n_padded = padded(n, kKeyBlock);
        const Cells   all(*this, k_, tile, n);
        const char   *cells[kKeyBlock], *next[kKeyBlock];
        for (int64_t c = 0; c < n; c += kKeyBlock) {
            all.read(c, kKeyBlock, cells, next);
            level_.transpose[all.form()](cells, next, n_dims, at<float>(at_.keys));
            level_.score(at<float>(at_.queries), tile.n_queries(), n_dims, at<float>(at_.keys), at<float>(at_.scores) + c,
                         n_padded);
            for (int64_t r = 0; r < tile.n_queries(); r++) {
                const uint16_t *mask  = at<uint16_t>(at_.masks) + r / tile.n_heads * n_padded + c;
                const float     found = mask_scores(at<float>(at_.scores) + r * n_padded + c, mask, softmax[r].slope);
                if (!(found <= softmax[r].maximum) && !std::isnan(softmax[r].maximum)) {
                    softmax[r].maximum = found;
                }
            }
        }
    }

    // Of a block of cells. Returns the largest, or NaN if one is.
    float mask_scores(float *scores, const uint16_t *mask, float slope) const {
        if (softcap_ != 0) {
            for (int64_t i = 0; i < kKeyBlock; i++) {
                scores[i] = softcap_ * std::tanh(scores[i] * scale_);
            }
        }
        return level_.mask(scores, kKeyBlock, softcap_ != 0 ? 1.0f : scale_, slope, mask);
    }

    // What a mask is multiplied with: other than 1 with ALiBi, whose masks hold distances.
    float slope(int64_t head) const {
        if (max_bias_ <= 0) {
            return 1;
        }
        const int64_t half = int64_t{ 1 } << static_cast<int>(std::floor(std::log2(q_->ne[2])));
        return head < half ? std::pow(std::exp2(-max_bias_ / static_cast<float>(half)), static_cast<float>(head + 1))
                           : std::pow(std::exp2(-max_bias_ / 2 / static_cast<float>(half)),
                                      static_cast<float>(2 * (head - half) + 1));
    }

    // Scores become weights just before they are used.
    void add_values(const Tile &tile, int64_t n, Softmax *softmax) const {
        const int64_t n_dims = v_->ne[0], n_padded = padded(n, kKeyBlock);
        const Cells   all(*this, v_, tile, n);
        const char   *cells[kValueBlock], *next[kValueBlock];
        float        *weights = at<float>(at_.scores);
        float        *results = at<float>(at_.results);
        const auto    add     = level_.add[all.form()];
        std::fill_n(results, tile.n_queries() * n_dims, 0.0f);
        for (int64_t c = 0; c < n; c += kValueBlock) {
            const int64_t n_read = all.read(c, kValueBlock, cells, next);
            for (int64_t r = 0; r < tile.n_queries(); r++) {
                if (std::isfinite(softmax[r].maximum)) {
                    softmax[r].total += level_.exponentials(weights + r * n_padded + c,
                                                            std::min<int64_t>(kValueBlock, n_padded - c), softmax[r].maximum);
                }
            }
            if (level_.are_finite[all.form()](cells, n_read, n_dims)) {
                add(weights + c, tile.n_queries(), n_padded, cells, next, n_read, n_dims, results);
                continue;
            }
            // Such values are a row's own, and times 0 they are not 0: each row gets those of the cells that it sees.
            for (int64_t r = 0; r < tile.n_queries(); r++) {
                const uint16_t *mask = at<uint16_t>(at_.masks) + r / tile.n_heads * n_padded + c;
                for (int64_t i = 0; i < n_read; i++) {
                    if (mask[i] != kUnseen) {
                        add(weights + r * n_padded + c + i, 1, n_padded, cells + i, next + i, 1, n_dims, results + r * n_dims);
                    }
                }
            }
        }
    }

    void write(const Place &place, int64_t head, const float *result, float sum) const {
        float      *to = kernels::at<float>(op_, head, place.row, place.stream);
        const float by = sum == 0 ? 0 : 1 / sum;
        for (int64_t d = 0; d < v_->ne[0]; d++) {
            to[d] = result[d] * by;
        }
    }

    ggml_tensor          *op_;
    const ggml_tensor    *q_, *k_, *v_, *mask_, *sinks_;
    const AttentionLevel &level_;
    Tiling                tiling_, as_one_;
    const Scratch         at_;
    const int             ith_;
    float                 scale_, softcap_, max_bias_;
    Shared               *shared_;
    char                 *scratch_;
};

}  // namespace

bool is_attention(const ggml_tensor *op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT || !attention_level()) {
        return false;
    }
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const auto         is_contiguous = [](const ggml_tensor *t) { return t->nb[0] == ggml_type_size(t->type); };
    return q->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 && is_supported(k->type) && is_supported(v->type) &&
           is_contiguous(q) && is_contiguous(k) && is_contiguous(v) && k->ne[0] % 8 == 0 && v->ne[0] % 8 == 0 &&
           k->ne[2] == v->ne[2] && k->ne[1] > 0 && (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1));
}

size_t attention_work_size(const ggml_tensor *op, int n_threads) {
    const Scratch scratch(Tiling(op, n_threads), Tiling(op, n_threads, true), op->src[0]->ne[0], op->src[2]->ne[0]);
    return Attention::work_size(scratch, n_threads);
}

void compute_attention(const ggml_compute_params *params, ggml_tensor *op, SharedCells *shares,
                       void (*barrier)(ggml_threadpool *)) {
    Attention attention(params, op, shares);
    barrier(params->threadpool);
    attention.compute();
}

}  // namespace lp::kernels

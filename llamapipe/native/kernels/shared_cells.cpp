// Comparing the cells of sequences. The header says when what was compared counts.
#include "shared_cells.hpp"

#include "tensors.hpp"

#include <algorithm>
#include <cstring>

namespace lp::kernels {
namespace {

// From cell `begin` on, the first one before `end` that differs in two sequences, or `end`.
int64_t first_difference(const SharedCells::Range &range, int a, int b, int64_t begin, int64_t end) {
    constexpr int64_t block = 64;
    const auto        equal = [&](int64_t from, int64_t to) {
        const auto same = [&](const char *cells, size_t bytes, size_t stride) {
            const char *at = cells + from * bytes;
            return memcmp(at + a * stride, at + b * stride, (to - from) * bytes) == 0;
        };
        return same(range.keys, range.key_bytes, range.key_stride) && same(range.values, range.value_bytes, range.value_stride);
    };
    while (begin < end) {
        const int64_t next = std::min(begin + block, end);
        if (equal(begin, next)) {
            begin = next;
            continue;
        }
        while (equal(begin, begin + 1)) {
            begin++;
        }
        return begin;
    }
    return end;
}

}  // namespace

bool is_write_of_keys(const ggml_tensor *op) {
    const ggml_tensor *cache = op->view_src;
    return op->op == GGML_OP_SET_ROWS && cache && strncmp(cache->name, "cache_k_l", 9) == 0;
}

SharedCells::SharedCells(int n_sequences, int n_layers) : layers_(n_layers), versions_(n_sequences, 1) {
    for (Layer &layer : layers_) {
        layer.sequences.resize(n_sequences);
    }
}

void SharedCells::changed(int sequence) {
    if (sequence >= 0 && sequence < static_cast<int>(versions_.size())) {
        versions_[sequence]++;
        n_changes_++;
    }
}

void SharedCells::written(const ggml_tensor *op) {
    const auto layer = std::find_if(layers_.begin(), layers_.end(), [op](const Layer &l) { return l.key == op->view_src->data; });
    if (layer == layers_.end()) {
        return;  // nothing was compared
    }
    const ggml_tensor *ids    = op->src[1];
    const int64_t      n_each = op->view_src->ne[1];
    for (int64_t i = 0; i < ids->ne[0]; i++) {
        const int64_t cell = ids->type == GGML_TYPE_I64 ? at<const int64_t>(ids, 0)[i] : at<const int32_t>(ids, 0)[i];
        Sequence     &s    = layer->sequences[cell / n_each];
        s.written          = std::min(s.written, cell % n_each);
    }
}

void SharedCells::find(const Range &range, const int64_t *n_seen, Link *links) {
    std::fill_n(links, range.n, Link{ -1, 0 });
    const auto layer = std::find_if(layers_.begin(), layers_.end(), [&](Layer &l) { return l.key == range.layer || !l.key; });
    if (layer == layers_.end()) {
        return;
    }
    layer->key      = range.layer;
    auto &sequences = layer->sequences;
    for (Sequence &s : sequences) {
        const int64_t written = s.parent < 0 ? INT64_MAX : std::min(s.written, sequences[s.parent].written);
        s.differs             = s.differs && s.n < written;
        s.n                   = std::min(s.n, written);
    }
    for (Sequence &s : sequences) {
        s.written = INT64_MAX;
    }
    const bool is_known = layer->first == range.first && layer->n == range.n && layer->n_changes == n_changes_;
    layer->first        = range.first;
    layer->n            = range.n;
    layer->n_changes    = n_changes_;
    const auto version  = [&](int place) { return versions_[range.first + place]; };
    for (int i = 1; i < range.n; i++) {
        Sequence &s      = sequences[range.first + i];
        Link      best   = { s.parent - range.first, s.n };
        bool      is_all = s.differs;  // the cells that the two have in common
        if (best.parent < 0 || best.parent >= i || s.version != version(i) || s.parent_version != version(best.parent)) {
            best = { -1, 0 };
        } else if (const int64_t end = std::min(n_seen[i], n_seen[best.parent]); !is_all && best.n < end) {
            best.n = first_difference(range, best.parent, i, best.n, end);
            is_all = best.n < end;
        }
        for (int other = 0; other < i && !(is_known && best.parent >= 0); other++) {
            // If it has fewer cells of the best one's than this sequence has, it differs from both there.
            if (other == best.parent || (best.parent >= 0 && common(links, other, best.parent) < best.n)) {
                continue;
            }
            const int64_t end = std::min(n_seen[i], n_seen[other]);
            if (end < best.n) {
                continue;
            }
            const int64_t n = first_difference(range, other, i, best.n, end);
            if (best.parent < 0 || n > best.n) {
                best   = { other, n };
                is_all = n < end;
            }
        }
        s = { range.first + best.parent, best.n, is_all, version(i), version(best.parent), s.written };
        // All that is known may be more than what these rows see.
        links[i] = { best.parent, std::min({ best.n, n_seen[i], n_seen[best.parent] }) };
    }
}

int64_t SharedCells::common(const Link *links, int a, int b) {
    int64_t n = INT64_MAX;
    while (a != b) {
        int &later = a > b ? a : b;
        if (links[later].parent < 0) {
            return 0;
        }
        n     = std::min(n, links[later].n);
        later = links[later].parent;
    }
    return n;
}

}  // namespace lp::kernels

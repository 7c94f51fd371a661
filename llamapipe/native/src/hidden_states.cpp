// Hidden states for drafting layers: the only file that uses llama-ext.h, which may change with any commit of llama.cpp.
#include "hidden_states.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <type_traits>

#if __has_include("llama-ext.h")
#include "llama-ext.h"
#define LP_HAS_STATES 1

// Another signature is a mistake at the build, and a library without them is found when it is loaded.
static_assert(std::is_same<decltype(&llama_set_embeddings_nextn), void (*)(llama_context *, bool, bool)>::value, "llama-ext.h");
static_assert(std::is_same<decltype(&llama_get_embeddings_nextn), float * (*)(llama_context *)>::value, "llama-ext.h");
static_assert(std::is_same<decltype(&llama_get_embeddings_nextn_ith), float * (*)(llama_context *, int32_t)>::value,
              "llama-ext.h");
#if defined(__ELF__)
extern decltype(llama_set_embeddings_nextn)     llama_set_embeddings_nextn __attribute__((weak));
extern decltype(llama_get_embeddings_nextn)     llama_get_embeddings_nextn __attribute__((weak));
extern decltype(llama_get_embeddings_nextn_ith) llama_get_embeddings_nextn_ith __attribute__((weak));
#endif
#else
#define LP_HAS_STATES 0
static void    llama_set_embeddings_nextn(llama_context *, bool, bool) {}
static float * llama_get_embeddings_nextn(llama_context *) { return nullptr; }
static float * llama_get_embeddings_nextn_ith(llama_context *, int32_t) { return nullptr; }
#endif

namespace lp {

const char * states_problem() {
    if (!LP_HAS_STATES) {
        return "llamapipe was built with a llama.cpp that has no llama-ext.h";
    }
#if LP_HAS_STATES && defined(__ELF__)
    if (!&llama_set_embeddings_nextn || !&llama_get_embeddings_nextn || !&llama_get_embeddings_nextn_ith) {
        return "the llama.cpp that was loaded does not export llama_get_embeddings_nextn";
    }
#endif
    return nullptr;
}

static void check_states() {
    if (const char * problem = states_problem()) {
        throw std::runtime_error(problem);
    }
}

HiddenStates::HiddenStates(llama_context * llama, int n_most)
    : llama_(llama), width_(llama_model_n_embd_out(llama_get_model(llama))), n_most_(n_most), sequences_(llama_n_seq_max(llama)) {
    check_states();
    llama_set_embeddings_nextn(llama, true, false);
}

int HiddenStates::end(int seq_id) const {
    const Sequence & sequence = sequences_[(size_t) seq_id];
    return sequence.begin + (int) (sequence.rows.size() / (size_t) width_);
}

const float * HiddenStates::of(int seq_id, int position) const {
    const Sequence & sequence = sequences_[(size_t) seq_id];
    const bool       is_kept  = position >= sequence.begin && position < end(seq_id);
    return is_kept ? sequence.rows.data() + (size_t) (position - sequence.begin) * (size_t) width_ : nullptr;
}

void HiddenStates::take(const BatchArrays & batch) {
    const float * rows = llama_get_embeddings_nextn(llama_);
    if (!rows) {
        throw std::runtime_error("llama.cpp gave out no hidden states");
    }
    for (int i = 0; i < batch.n; i++) {
        put(batch.seq_ids[i], batch.positions[i], rows + (size_t) i * (size_t) width_);
    }
}

void HiddenStates::put(int seq_id, int position, const float * row) {
    Sequence & sequence = sequences_[(size_t) seq_id];
    cut(seq_id, position);
    if (position != end(seq_id)) {
        sequence.rows.clear();  // those between are not known
    }
    if (sequence.rows.empty()) {
        sequence.begin = position;
    }
    const size_t width = (size_t) width_, n = sequence.rows.size() / width;
    if (n >= 2 * (size_t) n_most_) {
        const size_t n_dropped = n - (size_t) n_most_ + 1;
        sequence.rows.erase(sequence.rows.begin(), sequence.rows.begin() + (ptrdiff_t) (n_dropped * width));
        sequence.begin += (int) n_dropped;
    }
    try {
        sequence.rows.insert(sequence.rows.end(), row, row + width);
    } catch (const std::bad_alloc &) {  // the step was computed: only a draft is lost
        sequence.rows = {};
    }
}

void HiddenStates::cut(int seq_id, int position) {
    Sequence & sequence = sequences_[(size_t) seq_id];
    if (position < end(seq_id)) {
        sequence.rows.resize((size_t) std::max(position - sequence.begin, 0) * (size_t) width_);
    }
}

void HiddenStates::copy(int from, int to, int last) {
    if (from == to) {
        return;
    }
    Sequence & copied = sequences_[(size_t) to];
    try {
        copied = sequences_[(size_t) from];
    } catch (const std::bad_alloc &) {
        copied = {};
    }
    cut(to, last);
}

void HiddenStates::follow(const MemoryOp & op) {
    switch (op.op) {
        case LP_REMOVE: cut(op.seq_id, std::max(op.p0, 0)); break;
        case LP_COPY:
            if (op.p0 <= 0) {
                copy(op.seq_id, op.other, op.p1 < 0 ? end(op.seq_id) : op.p1);
            } else {
                cut(op.other, 0);
            }
            break;
        case LP_SHIFT: cut(op.seq_id, 0); break;
        case LP_KEEP:
        case LP_CLEAR:
            for (size_t s = 0; s < sequences_.size(); s++) {
                if (op.op == LP_CLEAR || (int) s != op.seq_id) {
                    cut((int) s, 0);
                }
            }
            break;
    }
}

void give_out_states(llama_context * llama) {
    check_states();
    // Not only those of outputs: the graphs of MTP layers keep all rows, and llama.cpp would take the first ones.
    llama_set_embeddings_nextn(llama, true, false);
}

const float * given_state(llama_context * llama, int entry) { return llama_get_embeddings_nextn_ith(llama, entry); }

}  // namespace lp

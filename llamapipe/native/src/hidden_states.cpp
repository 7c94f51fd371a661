// Hidden states for drafting layers: the only file that uses llama-ext.h, which may change with any commit of llama.cpp.
#include "hidden_states.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <type_traits>

#if __has_include("llama-ext.h")
#include "llama-ext.h"
#define LP_HAS_STATES 1

// Another signature is a mistake at the build, and a library without them is found when it is loaded.
static_assert(std::is_same<decltype(&llama_set_embeddings_nextn), void (*)(llama_context *, bool, bool)>::value, "llama-ext.h");
static_assert(std::is_same<decltype(&llama_get_embeddings_nextn), float *(*)(llama_context *)>::value, "llama-ext.h");
static_assert(std::is_same<decltype(&llama_get_embeddings_nextn_ith), float *(*)(llama_context *, int32_t)>::value,
              "llama-ext.h");
static_assert(std::is_same<decltype(&llama_set_embeddings_layer_inp), void (*)(llama_context *, uint32_t, bool)>::value,
              "llama-ext.h");
static_assert(std::is_same<decltype(&llama_get_embeddings_layer_inp), float *(*)(llama_context *, uint32_t)>::value,
              "llama-ext.h");
#if defined(__ELF__)
extern decltype(llama_set_embeddings_nextn)     llama_set_embeddings_nextn __attribute__((weak));
extern decltype(llama_get_embeddings_nextn)     llama_get_embeddings_nextn __attribute__((weak));
extern decltype(llama_get_embeddings_nextn_ith) llama_get_embeddings_nextn_ith __attribute__((weak));
extern decltype(llama_set_embeddings_layer_inp) llama_set_embeddings_layer_inp __attribute__((weak));
extern decltype(llama_get_embeddings_layer_inp) llama_get_embeddings_layer_inp __attribute__((weak));
#endif
#else
#define LP_HAS_STATES 0
static void   llama_set_embeddings_nextn(llama_context *, bool, bool) {}
static float *llama_get_embeddings_nextn(llama_context *) { return nullptr; }
static float *llama_get_embeddings_nextn_ith(llama_context *, int32_t) { return nullptr; }
static void   llama_set_embeddings_layer_inp(llama_context *, uint32_t, bool) {}
static float *llama_get_embeddings_layer_inp(llama_context *, uint32_t) { return nullptr; }
#endif

namespace lp {

const char *states_problem() {
    if (!LP_HAS_STATES) {
        return "llamapipe was built with a llama.cpp that has no llama-ext.h";
    }
#if LP_HAS_STATES && defined(__ELF__)
    if (!&llama_set_embeddings_nextn || !&llama_get_embeddings_nextn || !&llama_get_embeddings_nextn_ith) {
        return "the llama.cpp that was loaded does not export llama_get_embeddings_nextn";
    }
    if (!&llama_set_embeddings_layer_inp || !&llama_get_embeddings_layer_inp) {
        return "the llama.cpp that was loaded does not export llama_get_embeddings_layer_inp";
    }
#endif
    return nullptr;
}

static void check_states() {
    if (const char *problem = states_problem()) {
        throw std::runtime_error(problem);
    }
}

HiddenStates::HiddenStates(llama_context *llama, int n_most, const std::vector<int32_t> &layers)
    : llama_(llama), layers_(layers),
      n_embd_(layers.empty() ? llama_model_n_embd_out(llama_get_model(llama)) : llama_model_n_embd(llama_get_model(llama))),
      width_(n_embd_ * std::max(static_cast<int>(layers.size()), 1)), n_most_(n_most), sequences_(llama_n_seq_max(llama)) {
    check_states();
    if (layers.empty()) {
        llama_set_embeddings_nextn(llama, true, false);
    }
    for (const int32_t layer : layers) {
        llama_set_embeddings_layer_inp(llama, layer, true);
    }
}

int HiddenStates::end(int seq_id) const {
    const Sequence &sequence = sequences_[seq_id];
    return sequence.begin + static_cast<int>(sequence.rows.size() / width_);
}

const float *HiddenStates::of(int seq_id, int position) const {
    const Sequence &sequence = sequences_[seq_id];
    const bool      is_kept  = position >= sequence.begin && position < end(seq_id);
    return is_kept ? sequence.rows.data() + static_cast<size_t>(position - sequence.begin) * width_ : nullptr;
}

void HiddenStates::take(const BatchArrays &batch) {
    std::vector<const float *> parts;
    if (layers_.empty()) {
        parts.push_back(llama_get_embeddings_nextn(llama_));
    }
    for (const int32_t layer : layers_) {
        parts.push_back(llama_get_embeddings_layer_inp(llama_, layer));
    }
    if (std::find(parts.begin(), parts.end(), nullptr) != parts.end()) {
        throw std::runtime_error("llama.cpp gave out no hidden states");
    }
    for (int i = 0; i < batch.n; i++) {
        put(batch.seq_ids[i], batch.positions[i], parts, i);
    }
}

void HiddenStates::put(int seq_id, int position, const std::vector<const float *> &parts, size_t i) {
    Sequence &sequence = sequences_[seq_id];
    cut(seq_id, position);
    if (position != end(seq_id)) {
        sequence.rows.clear();  // those between are not known
    }
    if (sequence.rows.empty()) {
        sequence.begin = position;
    }
    const size_t width = width_, n = sequence.rows.size() / width;
    if (n >= 2 * static_cast<size_t>(n_most_)) {
        const size_t n_dropped = n - n_most_ + 1;
        sequence.rows.erase(sequence.rows.begin(), sequence.rows.begin() + static_cast<ptrdiff_t>(n_dropped * width));
        sequence.begin += static_cast<int>(n_dropped);
    }
    const size_t n_embd = n_embd_;
    try {
        for (const float *const part : parts) {
            sequence.rows.insert(sequence.rows.end(), part + i * n_embd, part + (i + 1) * n_embd);
        }
    } catch (const std::bad_alloc &) {  // the step was computed: only a draft is lost
        sequence.rows = {};
    }
}

void HiddenStates::cut(int seq_id, int position) {
    Sequence &sequence = sequences_[seq_id];
    if (position < end(seq_id)) {
        sequence.rows.resize(static_cast<size_t>(std::max(position - sequence.begin, 0)) * width_);
    }
}

void HiddenStates::copy(int from, int to, int last) {
    if (from == to) {
        return;
    }
    Sequence &copied = sequences_[to];
    try {
        copied = sequences_[from];
    } catch (const std::bad_alloc &) {
        copied = {};
    }
    cut(to, last);
}

void HiddenStates::follow(const MemoryOp &op) {
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
                if (op.op == LP_CLEAR || static_cast<int>(s) != op.seq_id) {
                    cut(static_cast<int>(s), 0);
                }
            }
            break;
    }
}

// Whether the graph of an architecture's drafting layers keeps the rows of outputs only.
static bool keeps_outputs_only(const llama_model *model) {
    char name[32] = "";
    llama_model_meta_val_str(model, "general.architecture", name, sizeof name);
    const char *const known[] = { "qwen3next", "mimo2", "step35" };
    return std::any_of(std::begin(known), std::end(known), [&](const char *other) { return strcmp(name, other) == 0; });
}

void give_out_states(llama_context *llama) {
    check_states();
    // llama.cpp must be told which rows there are: it takes as many as that, from the first one.
    llama_set_embeddings_nextn(llama, true, keeps_outputs_only(llama_get_model(llama)));
}

const float *given_states(llama_context *llama) { return llama_get_embeddings_nextn(llama); }

const float *given_state(llama_context *llama, int entry) { return llama_get_embeddings_nextn_ith(llama, entry); }

}  // namespace lp

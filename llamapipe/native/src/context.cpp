// Contexts: their life, one decode from flat arrays, operations on KV cells, and the C entries of these.
#include "context.hpp"

#include "adapters.hpp"
#include "faults.hpp"
#include "handles.hpp"
#include "llama-adapter.h"
#include "llama-context.h"
#include "scan.hpp"
#include "step.hpp"
#include "system.hpp"
#include "weight_buffer.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

// Tiles round otherwise than the kernels for few rows, so a request's text may change with others': users ask for them.
static bool wants_tiles() {
    static const bool wanted = lp::system::is_switched_on("LLAMAPIPE_AMX");
    return wanted;
}

ggml_backend_t lp::compute_backend(llama_context *ctx, ggml_backend_dev_t device) {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == device) {
            return backend;
        }
    }
    return nullptr;
}

size_t lp::scratch_bytes(llama_context *ctx) {
    ggml_backend_sched_t sched = ctx->get_sched();
    size_t               n     = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        n += ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i));
    }
    return n;
}

// ---- an operation on the KV cells of sequences, between steps
int lp::apply_memory_op(llama_context *ctx, const MemoryOp &op) {
    return guard(LP_ERROR, [&]() -> int {
        llama_memory_t memory = llama_get_memory(ctx);
        switch (op.op) {
            case LP_REMOVE: return llama_memory_seq_rm(memory, op.seq_id, op.p0, op.p1);
            case LP_COPY: llama_memory_seq_cp(memory, op.seq_id, op.other, op.p0, op.p1); break;
            case LP_KEEP:  // not llama_memory_seq_keep: it looks at the cells of one stream only
                for (int s = 0; s < static_cast<int>(llama_n_seq_max(ctx)); s++) {
                    if (s != op.seq_id) {
                        llama_memory_seq_rm(memory, s, -1, -1);
                    }
                }
                break;
            case LP_SHIFT: llama_memory_seq_add(memory, op.seq_id, op.p0, op.p1, op.delta); break;
            case LP_CLEAR: llama_memory_clear(memory, false); break;
        }
        return 1;
    });
}

namespace lp {

// ---- the KV cells of a sequence, copied to host memory and back
void SavedCells::resize(size_t n) {
    if (n > capacity) {
        // A buffer that is used again grows by half at least: touching new pages takes longer than copying to them.
        const size_t more = std::max(n, capacity + capacity / 2);
        size = capacity = 0;
        bytes.reset();  // first: both together may not fit
        bytes.reset(new uint8_t[more]);
        capacity = more;
    }
    size = n;
}

static llama_state_seq_flags flags_of(Part part) {
    return part == Part::state ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
}

int save_cells(llama_context *ctx, int seq_id, int64_t max_bytes, Part part, SavedCells &to) {
    const size_t n = llama_state_seq_get_size_ext(ctx, seq_id, flags_of(part));
    if (n == 0 || (max_bytes >= 0 && n > static_cast<size_t>(max_bytes))) {
        return 0;
    }
    to.resize(n);
    return llama_state_seq_get_data_ext(ctx, to.bytes.get(), n, seq_id, flags_of(part)) == n;
}

static bool set_data(llama_context *ctx, int seq_id, Part part, const SavedCells &from) {
    return llama_state_seq_set_data_ext(ctx, from.bytes.get(), from.size, seq_id, flags_of(part)) == from.size;
}

// Whether the layers with a sliding window have the cells that position `n` attends to. llama.cpp does not save those
// that the window of the last token has left, and gives them to other tokens if memory is short. Llama 4's windows do
// not slide: each position attends to those of its chunk. The first position suffices: llama.cpp removes all before one
// that it gives away (apply_ubatch), and states have no gaps, so none is missing between the first and the last.
static bool has_window(llama_context *ctx, int seq_id, int n) {
    const llama_model *model = llama_get_model(ctx);
    const int          n_swa = llama_model_n_swa(model);
    if (n_swa <= 0 || n == 0 || llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return true;
    }
    char      architecture[64] = "";
    const int first            = llama_memory_seq_pos_min(llama_get_memory(ctx), seq_id);
    llama_model_meta_val_str(model, "general.architecture", architecture, sizeof architecture);
    const int needed = strcmp(architecture, "llama4") == 0 ? n / n_swa * n_swa : std::max(n - n_swa + 1, 0);
    return first >= 0 && (first <= needed || needed == n);
}

int load_cells(llama_context *ctx, int seq_id, int n, const SavedCells *cells, const SavedCells *state) {
    llama_memory_t memory = llama_get_memory(ctx);
    bool           done   = true;
    if (cells) {
        llama_memory_seq_rm(memory, seq_id, -1, -1);
        done = set_data(ctx, seq_id, Part::all, *cells);
    }
    if (done && state) {
        // The state says nothing of the cells before it; a memory of states alone has none.
        const bool has_cells = !llama_model_is_recurrent(llama_get_model(ctx));
        done = (!has_cells || llama_memory_seq_pos_max(memory, seq_id) >= n - 1) && set_data(ctx, seq_id, Part::state, *state);
    }
    // A recurrent memory that keeps the states of the last step's tokens would go back to one of another step.
    const bool is_whole = llama_n_rs_seq(ctx) == 0 || llama_memory_seq_pos_max(memory, seq_id) <= n - 1;
    if (done && is_whole && has_window(ctx, seq_id, n) && llama_memory_seq_rm(memory, seq_id, n, -1)) {
        const int last = llama_memory_seq_pos_max(memory, seq_id);
        if (last == n - 1 || (!cells && !state && last < n)) {
            return 1;
        }
    }
    if (cells || state) {
        llama_memory_seq_rm(memory, seq_id, -1, -1);
    }
    return 0;
}

Context::Context(llama_model *model, const llama_context_params &params, const Options &options)
    : attends_(options.attends), multiplies_(options.multiplies) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (options.n_ring_rows > 0) {
        llama_context_params with_stager = params;
        stager_ =
                std::make_shared<LogitsStager>(n_vocab, static_cast<int>(params.n_seq_max), options.n_ring_rows, options.samples);
        stager_->configure(with_stager);
        llama_.reset(llama_init_from_model(model, with_stager));
        if (llama_ && !stager_->attached()) {
            staging_problem_ = stager_->problem();
            llama_.reset();
            stager_.reset();
        }
    }
    if (!llama_ && !stager_) {
        llama_.reset(llama_init_from_model(model, params));
    }
    if (!llama_) {
        throw std::runtime_error("llama.cpp could not create the context");
    }
    threads_   = std::make_unique<ComputeThreads>(llama_.get(), params.n_threads, params.n_threads_batch, options.poll);
    n_encoded_ = static_cast<int>(std::min(llama_n_ubatch(llama_.get()), std::max(params.n_outputs_max, 1u)));
    if (attends_ && params.n_seq_max > 1 && !params.kv_unified) {
        const int n_sequences = static_cast<int>(params.n_seq_max);
        shares_               = std::make_unique<lp::kernels::SharedCells>(n_sequences, llama_model_n_layer(model));
    }
}

int Context::decode(const BatchArrays &batch) {
    const int code = decode(batch, {});
    if (states_ && code == 0) {
        states_->take(batch);
    }
    return code;
}

template <typename Body> int Context::compute(const BatchArrays *mixed, Body &&body) {
    if (is_broken_) {
        throw std::runtime_error("llama.cpp failed inside an earlier step; close this engine and make another");
    }
    threads_->apply();
    set_error("see the log llamapipe.native");
    const DecodeAssertionsThrow throwing;
    const bool                  is_mixed = mixed && row_adapters_.is_on();
    if (is_mixed) {
        row_adapters_.prepare(mixed->n, mixed->seq_ids, mixed->outputs);
    }
    const bool                      varies = !multiplies_ && wants_tiles();
    const lp::kernels::ComputeScope scope(attends_, multiplies_, varies, is_mixed ? &row_adapters_ : nullptr, shares_.get());
    std::unique_lock<std::mutex>    lock(adapters_mutex(), std::defer_lock);
    if (reserves_) {
        lock.lock();
        reserves_ = false;
    }
    try {
        return body();
    } catch (...) {
        is_broken_ = throwing.happened();
        throw;
    }
}

int Context::decode(const BatchArrays &batch, const std::vector<const float *> &states) {
    // llama_batch wants a list of sequences for each token; ours have exactly one.
    const size_t n = batch.n;
    if (n_seq_id_.size() < n) {
        seq_id_.resize(n);  // first: if memory is missing for the other, both are resized next time
        n_seq_id_.resize(n, 1);
    }
    for (size_t i = 0; i < n; i++) {
        seq_id_[i] = const_cast<int32_t *>(batch.seq_ids + i);
    }
    llama_batch given = {};
    given.n_tokens    = batch.n;
    given.token       = const_cast<int32_t *>(batch.tokens);
    given.pos         = const_cast<int32_t *>(batch.positions);
    given.n_seq_id    = n_seq_id_.data();
    given.seq_id      = seq_id_.data();
    given.logits      = const_cast<int8_t *>(batch.outputs);
    return compute(&batch, [&] {
        if (batch.embeddings || !states.empty()) {
            return decode_rows(batch, states);
        }
        return llama_decode(llama_.get(), given);
    });
}

int Context::set_adapters(const lp_adapter_set &set) {
    llama_context *llama = llama_.get();
    llama_synchronize(llama);
    reserves_ = true;
    row_adapters_.carry({});
    changed_matrices_.clear();
    if (set.carries) {
        std::vector<lp::kernels::LoraPair> pairs;
        for (const auto &[name, pair] : set.adapters[0]->ab_map) {
            changed_matrices_.push_back(name);
            pairs.push_back({ pair.a, pair.b });
        }
        row_adapters_.carry(pairs);
    }
    if (llama_set_adapters_lora(llama, set.adapters, set.n, set.scales) != 0) {
        throw std::runtime_error("llama.cpp refused the adapters");
    }
    if (set.control || has_control_) {
        const float *data = set.control;
        if (llama_set_adapter_cvec(llama, data, data ? set.n_control : 0, set.n_embd, set.first, set.last) != 0) {
            throw std::runtime_error("llama.cpp refused the control vector");
        }
        has_control_ = data != nullptr;
    }
    return 1;
}

bool Context::mixes_adapters() const {
    ggml_backend_sched_t sched = llama_->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_dev_t device = ggml_backend_get_device(ggml_backend_sched_get_backend(sched, i));
        if (ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return false;  // it may compute large products of the CPU's weights, too
        }
    }
    return attends_ && lp::kernels::can_mix_adapters();
}

int Context::assign_adapters(int seq_id, const lp_adapter_set &set) {
    using namespace lp::kernels;
    std::vector<RowAdapters::Scaled> adapters;
    for (int i = 0; i < set.n; i++) {
        const llama_adapter_lora   *adapter = set.adapters[i];
        std::shared_ptr<const Lora> lora    = row_adapters_.find(adapter);
        if (!lora) {
            std::vector<LoraPair> pairs;
            for (const std::string &name : changed_matrices_) {
                const auto pair = adapter->ab_map.find(name);
                pairs.push_back(pair == adapter->ab_map.end() ? LoraPair() : LoraPair{ pair->second.a, pair->second.b });
            }
            lora = std::make_shared<Lora>(adapter, adapter->alpha, std::move(pairs));
        }
        adapters.push_back({ std::move(lora), set.scales[i] });
    }
    row_adapters_.assign(seq_id, std::move(adapters));
    return 1;
}

// `decode` of entries of which some are rows of an image or a sound, or which have states.
int Context::decode_rows(const BatchArrays &batch, const std::vector<const float *> &states) {
    llama_context *const llama = llama_.get();
    if (!rows_) {
        rows_.reset(llama_batch_ext_init(llama));
    }
    llama_batch_ext *const rows = rows_.get();
    llama_batch_ext_clear(rows);
    const llama_model *const model   = llama_get_model(llama);
    const size_t             n_embd  = llama_model_n_embd_inp(model);
    const size_t             n_state = llama_model_n_embd_out(model);
    // EAGLE-3 takes the state in place of the token's embedding.
    const auto set_state = llama_model_has_encoder(model) ? llama_batch_ext_set_embd_token : llama_batch_ext_set_embd_state;
    for (int i = 0; i < batch.n; i++) {
        const float *const row = batch.embeddings ? batch.embeddings[i] : nullptr;
        const int          at  = row ? llama_batch_ext_add_embd(rows, batch.seq_ids[i], { row, 1, n_embd })
                                     : llama_batch_ext_add_token(rows, batch.seq_ids[i], batch.tokens[i]);
        // Time, height, width, and one that no model uses; llama.cpp reads as many as the model has, of a token one.
        const int32_t *const grid        = batch.grid && batch.grid[2 * i] >= 0 ? batch.grid + 2 * i : nullptr;
        const int32_t        p           = batch.positions[i];
        const int32_t        position[4] = { p, grid ? grid[0] : p, grid ? grid[1] : p, grid ? 0 : p };
        if (at != i || !llama_batch_ext_set_pos(rows, i, position)) {
            throw std::runtime_error("llama.cpp refused an entry of a batch");
        }
        if (!states.empty() && !set_state(rows, i, { states[i], 1, n_state })) {
            throw std::runtime_error("llama.cpp refused the state of an entry");
        }
        llama_batch_ext_set_output_logits(rows, i, batch.outputs[i] != 0);
    }
    struct Causal {
        llama_context *const ctx;
        const bool           is_causal;
        Causal(llama_context *of, bool is) : ctx(of), is_causal(is) {
            if (!is_causal) {
                llama_set_causal_attn(ctx, false);
            }
        }
        ~Causal() {
            if (!is_causal) {
                llama_set_causal_attn(ctx, true);
            }
        }
    } const causal(llama, batch.is_causal);
    return llama_process(llama, LLAMA_PROCESS_TYPE_DECODE, rows);
}

int Context::apply(const MemoryOp &op) {
    const int done = apply_memory_op(llama_.get(), op);
    if (shares_ && (op.op == LP_SHIFT || op.op == LP_COPY)) {
        shares_->changed(op.op == LP_COPY ? op.other : op.seq_id);
    }
    if (states_) {
        states_->follow(op);
    }
    return done;
}

int Context::load(int seq_id, int n, const SavedCells *cells, const SavedCells *state) {
    if (states_) {
        states_->cut(seq_id, cells ? 0 : n);
    }
    if (shares_) {
        shares_->changed(seq_id);
    }
    return load_cells(llama_.get(), seq_id, n, cells, state);
}

int Context::copy(int from, int to, int n, SavedCells &scratch, const SavedCells *state) {
    const bool done = save_cells(llama_.get(), from, -1, Part::all, scratch) && load(to, n, &scratch, state);
    if (states_ && done) {
        states_->copy(from, to, n);
    }
    return done;
}

int Context::encode(const std::vector<const float *> &states, size_t width, float *out) {
    llama_context *const llama = llama_.get();
    if (!rows_) {
        rows_.reset(llama_batch_ext_init(llama));
    }
    const size_t n_embd = llama_model_n_embd_out(llama_get_model(llama));
    for (size_t begin = 0; begin < states.size(); begin += n_encoded_) {
        const size_t end = std::min(states.size(), begin + n_encoded_);
        llama_batch_ext_clear(rows_.get());
        int32_t position = llama_memory_seq_pos_max(llama_get_memory(llama), 0);  // not used, but llama.cpp checks it
        for (size_t i = begin; i < end; i++) {
            const int at = llama_batch_ext_add_embd(rows_.get(), 0, { states[i], 1, width });
            position++;
            if (at < 0 || !llama_batch_ext_set_pos(rows_.get(), at, &position)) {
                throw std::runtime_error("llama.cpp refused the state of an entry");
            }
            llama_batch_ext_set_output_logits(rows_.get(), at, true);
        }
        const int code = compute(nullptr, [&] { return llama_process(llama, LLAMA_PROCESS_TYPE_ENCODE, rows_.get()); });
        if (code != 0) {
            return code;
        }
        const float *const encoded = given_states(llama);
        if (!encoded) {
            throw std::runtime_error("llama.cpp gave out no encoded states");
        }
        memcpy(out + begin * n_embd, encoded, (end - begin) * n_embd * sizeof(float));
    }
    return 0;
}

int Context::draft(const BatchArrays &batch, const int32_t *before, const HiddenStates &target) {
    const llama_model *const model   = llama_get_model(llama_.get());
    const bool               encodes = llama_model_has_encoder(model);  // what is kept of the target is not yet a state
    const size_t             width = llama_model_n_embd_out(model), n = batch.n;
    if (!gives_states_) {
        give_out_states(llama_.get());
        gives_states_ = true;
    }
    // The first token of all has a state of zeros before it; the rest of `own_states_` are copies, because the batch may
    // overwrite those of the last one.
    own_states_.assign((n + 1) * width, 0.0f);
    std::vector<const float *> states(n, own_states_.data()), kept;
    for (size_t i = 0; i < n; i++) {
        float *const own = own_states_.data() + (i + 1) * width;
        if (before[i] >= 0) {
            const float *const row = given_state(llama_.get(), before[i]);
            if (!row) {
                throw std::runtime_error("an entry of the last batch is not an output");
            }
            states[i] = own;
            memcpy(own, row, width * sizeof(float));
        } else if (batch.positions[i] > 0) {
            states[i] = target.of(batch.seq_ids[i], batch.positions[i] - 1);
            if (!states[i]) {
                throw std::runtime_error("a hidden state is not kept any more");
            }
            if (encodes) {
                kept.push_back(states[i]);
            }
        }
    }
    if (!kept.empty()) {
        encoded_.resize(kept.size() * width);
        if (const int code = encode(kept, target.width(), encoded_.data())) {
            return code;
        }
        const float *next = encoded_.data();
        for (size_t i = 0; i < n; i++) {
            if (before[i] < 0 && batch.positions[i] > 0) {
                states[i] = next;
                next += width;
            }
        }
    }
    return decode(batch, states);
}

int Context::inject(int n, const int32_t *positions, const int32_t *seq_ids, const HiddenStates &target) {
    llama_context *const llama = llama_.get();
    if (!rows_) {
        rows_.reset(llama_batch_ext_init(llama));
    }
    const size_t width = target.width();
    // A batch is not cut where tokens attend to later ones.
    const int n_most = static_cast<int>(llama_n_ubatch(llama));
    for (int begin = 0; begin < n; begin += n_most) {
        llama_batch_ext_clear(rows_.get());
        for (int i = begin; i < std::min(n, begin + n_most); i++) {
            const int32_t      p           = positions[i];
            const int32_t      position[4] = { p, p, p, 0 };
            const float *const state       = target.of(seq_ids[i], p);
            if (!state) {
                throw std::runtime_error("a hidden state is not kept any more");
            }
            const int at = llama_batch_ext_add_embd(rows_.get(), seq_ids[i], { state, 1, width });
            if (at < 0 || !llama_batch_ext_set_pos(rows_.get(), at, position)) {
                throw std::runtime_error("llama.cpp refused the state of an entry");
            }
            llama_batch_ext_set_output_logits(rows_.get(), at, false);
        }
        const int code = compute(nullptr, [&] { return llama_process(llama, LLAMA_PROCESS_TYPE_DECODE, rows_.get()); });
        if (code != 0) {
            return code;
        }
    }
    return 0;
}

int Context::best(int entry, float *share) const {
    const float *const row = llama_get_logits_ith(llama_.get(), entry);
    if (!row) {
        throw std::runtime_error("this entry of the last batch is not an output");
    }
    const int     n    = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(llama_.get())));
    const int32_t best = argmax(row, n);
    *share             = best < 0 ? 0.0f : static_cast<float>(std::exp(row[best] - log_sum_exp(row, n)));
    return best;
}

Context::~Context() {
    if (is_broken_) {
        (void)llama_.release();  // its scheduler may point to memory that was freed
    }
}

}  // namespace lp

// ---- the C entries of contexts: their life, one decode from flat arrays, rows of logits, memory operations
lp_context *lp_context_new(llama_model *model, const llama_context_params *params, int poll, int64_t n_ring_rows, bool samples,
                           bool attends, bool multiplies) {
    return lp::guard(nullptr, [&] {
        const std::lock_guard<std::mutex> lock(lp::adapters_mutex());
        const lp::AssertionsThrow         throwing;
        const lp::Context::Options        options = { poll, n_ring_rows, samples, attends, multiplies };
        return lp::without_faults(nullptr,
                                  [&] { return new lp_context{ std::make_shared<lp::Context>(model, *params, options) }; });
    });
}

void lp_context_free(lp_context *context) {
    lp::guard(0, [&] {
        delete context;
        return 0;
    });
}

llama_context *lp_context_llama(const lp_context *context) { return context->shared->llama(); }

bool lp_context_has_ring(const lp_context *context) { return context->shared->stager() != nullptr; }

bool lp_context_ring_in_host_memory(const lp_context *context) {
    const auto &stager = context->shared->stager();
    return stager && stager->host();
}

const char *lp_context_staging_problem(const lp_context *context) { return context->shared->staging_problem(); }

const char *lp_context_sampler_problem(const lp_context *context) {
    const auto &stager = context->shared->stager();
    return stager ? stager->sampler_problem() : context->shared->staging_problem();
}

void lp_context_rest(lp_context *context) {
    lp::guard(0, [&] {
        context->shared->threads().rest();
        return 0;
    });
}

int lp_context_set_threads(lp_context *context, int n_threads, int n_threads_batch) {
    return lp::guard(LP_ERROR, [&] {
        context->shared->threads().set(n_threads, n_threads_batch);
        return 0;
    });
}

int lp_context_thread_ids(lp_context *context, int n_max, int32_t *ids) {
    return lp::guard(LP_ERROR, [&] {
        const std::vector<int> found = context->shared->threads().thread_ids();
        const int              n     = std::min(n_max, static_cast<int>(found.size()));
        std::copy(found.begin(), found.begin() + n, ids);
        return n;
    });
}

int lp_decode(lp_context *context, int n_tokens, const int32_t *tokens, const int32_t *positions, const int32_t *seq_ids,
              const int8_t *outputs) {
    return lp::guard(LP_ERROR, [&] { return context->shared->decode({ n_tokens, tokens, positions, seq_ids, outputs }); });
}

int lp_embeddings(lp_context *context, int n, bool pooled, int width, float *out) {
    return lp::guard(LP_ERROR, [&]() -> int {
        llama_context *llama = context->shared->llama();
        for (int i = 0; i < n; i++) {
            const float *row = pooled ? llama_get_embeddings_seq(llama, i) : llama_get_embeddings_ith(llama, i);
            if (!row) {
                lp::set_error("the last batch has no such embedding");
                return LP_ERROR;
            }
            memcpy(out + static_cast<size_t>(i) * width, row, sizeof(float) * width);
        }
        return 0;
    });
}

int lp_logits(lp_context *context, int n_rows, const int32_t *rows, int n_vocab, float *out) {
    return lp::guard(LP_ERROR, [&]() -> int {
        for (int i = 0; i < n_rows; i++) {
            const float *row = llama_get_logits_ith(context->shared->llama(), rows[i]);
            if (!row) {
                lp::set_error("this entry of the last batch is not an output");
                return LP_ERROR;
            }
            memcpy(out + static_cast<size_t>(i) * n_vocab, row, sizeof(float) * n_vocab);
        }
        return 0;
    });
}

int lp_context_set_adapters(lp_context *context, const lp_adapter_set *set) {
    return lp::guard(LP_ERROR, [&] { return context->shared->set_adapters(*set); });
}

bool lp_context_mixes_adapters(const lp_context *context) {
    return lp::guard(false, [&] { return context->shared->mixes_adapters(); });
}

int64_t lp_context_n_spared(const lp_context *context) { return context->shared->n_spared(); }

int lp_context_assign_adapters(lp_context *context, int seq_id, const lp_adapter_set *set) {
    return lp::guard(LP_ERROR, [&] { return context->shared->assign_adapters(seq_id, *set); });
}

int lp_context_memory(lp_context *context, enum lp_memory_op op, int seq_id, int other, int p0, int p1) {
    return lp::guard(LP_ERROR, [&] { return context->shared->apply({ op, seq_id, other, p0, p1, 0 }); });
}

const char *lp_states_problem(void) { return lp::states_problem(); }

int lp_context_keep_states(lp_context *context, int n_most, int n_layers, const int32_t *layers) {
    return lp::guard(LP_ERROR, [&] {
        context->shared->keep_states(n_most, { layers, layers + n_layers });
        return 0;
    });
}

int lp_context_state_width(const lp_context *context) { return context->shared->states()->width(); }

const float *lp_context_state(const lp_context *context, int seq_id, int32_t position) {
    return context->shared->states()->of(seq_id, position);
}

int lp_best(lp_context *context, int entry, float *share) {
    return lp::guard(LP_ERROR, [&] { return context->shared->best(entry, share); });
}

int lp_context_states(const lp_context *context, int seq_id, int32_t *end) {
    const lp::HiddenStates &states = *context->shared->states();
    *end                           = states.end(seq_id);
    return states.begin(seq_id);
}

int lp_inject(lp_context *context, const lp_context *target, int n, const int32_t *positions, const int32_t *seq_ids) {
    return lp::guard(LP_ERROR, [&] { return context->shared->inject(n, positions, seq_ids, *target->shared->states()); });
}

int lp_draft(lp_context *context, const lp_context *target, int n_tokens, const int32_t *tokens, const int32_t *positions,
             const int32_t *seq_ids, const int8_t *outputs, const int32_t *before) {
    return lp::guard(LP_ERROR, [&] {
        return context->shared->draft({ n_tokens, tokens, positions, seq_ids, outputs }, before, *target->shared->states());
    });
}

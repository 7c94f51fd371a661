// Stages the logits of each decode in rows of our own, using only public headers of llama.cpp.
#include "logits_stager.hpp"

#include "clock.hpp"

#include <algorithm>

namespace lp {

LogitsStager::LogitsStager(int n_vocab, int n_seq_max, int64_t n_rows, bool samples)
    : n_vocab_(n_vocab), n_seq_max_(n_seq_max), n_rows_(n_rows) {
    if (samples) {
        sampler_ = std::make_unique<GraphSampler>(n_vocab);
    }
}

LogitsStager::~LogitsStager() {
    for (llama_sampler *chain : samplers_) {
        llama_sampler_free(chain);
    }
    if (buffer_) {
        ggml_backend_buffer_free(buffer_);
    }
    if (ctx_) {
        ggml_free(ctx_);
    }
}

const llama_sampler_i &LogitsStager::interface() {
    static const llama_sampler_i iface = [] {
        llama_sampler_i i = {};
        i.name            = [](const llama_sampler *) { return "logits_stager"; };
        i.apply           = [](llama_sampler *, llama_token_data_array *) {};
        i.free            = [](llama_sampler *) {};
        i.backend_init    = [](llama_sampler *s, ggml_backend_buffer_type_t buft, uint32_t) { return of(s).init(buft); };
        i.backend_apply   = [](llama_sampler *s, ggml_context *ctx, ggml_cgraph *graph, llama_sampler_data *data) {
            of(s).apply(ctx, graph, data);
        };
        i.backend_set_input = [](llama_sampler *s) { of(s).set_input(); };
        i.backend_reset     = [](llama_sampler *s) {
            of(s).first_   = true;
            of(s).index_   = nullptr;
            of(s).outputs_ = nullptr;
            if (of(s).sampler_) {
                of(s).sampler_->forget();
            }
        };
        return i;
    }();
    return iface;
}

void LogitsStager::configure(llama_context_params &params) {
    for (int seq_id = 0; seq_id < n_seq_max_; seq_id++) {
        llama_sampler *chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
        samplers_.push_back(chain);
        llama_sampler_chain_add(chain, llama_sampler_init(const_cast<llama_sampler_i *>(&interface()), this));
        configs_.push_back({ seq_id, chain });
    }
    params.samplers              = configs_.data();
    params.n_samplers            = configs_.size();
    params.n_outputs_max_per_seq = params.n_outputs_max;
}

const char *LogitsStager::problem() const {
    if (!staging_) {
        return supported_ ? "llama.cpp accepted no sampler for this model's devices" : "there is no memory for the output rows";
    }
    if (!supported_) {
        return "the device cannot copy rows in its graph";
    }
    return n_unknown_ ? "llama.cpp's graph has another form than expected" : "llama.cpp built no graph with outputs";
}

const char *LogitsStager::sampler_problem() const {
    return sampler() ? nullptr : !attached() ? problem() : sampler_problem_.c_str();
}

bool LogitsStager::init(ggml_backend_buffer_type_t buft) {
    if (staging_ || !supported_) {  // once for all sequences
        return staging_ != nullptr;
    }
    ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
    if (!device && ggml_backend_buft_is_host(buft)) {  // plain memory has none
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    if (sampler_ && !(device && sampler_->probe(device))) {
        sampler_problem_ = device ? sampler_->problem() : "the output rows are on no device";
        sampler_.reset();
    }
    ctx_                 = ggml_init({ ggml_tensor_overhead() * (4 + GraphSampler::kTensors), nullptr, true });
    ggml_tensor *staging = ctx_ ? ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, n_vocab_, n_rows_ + 1) : nullptr;
    if (staging && sampler_) {
        sampler_->declare(ctx_, n_rows_ + 1);
    }
    buffer_ = staging ? ggml_backend_alloc_ctx_tensors_from_buft(ctx_, buft) : nullptr;
    if (!buffer_) {
        supported_ = false;
        return false;
    }
    staging_  = staging;
    host_     = ggml_backend_buffer_is_host(buffer_) ? static_cast<float *>(staging_->data) : nullptr;
    in_place_ = host_ && !sampler_;
    // llama.cpp computes a tensor that already has memory on the first device that can use that memory, wherever its weights
    // are. So rows are computed in place only if no other device could be chosen.
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        in_place_ = in_place_ && ggml_backend_dev_type(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_CPU;
    }
    if (sampler_) {
        sampler_->fill();
    }
    if (device) {
        ggml_tensor *row   = ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, n_vocab_, 1);
        ggml_tensor *index = ggml_new_tensor_1d(ctx_, GGML_TYPE_I64, 1);
        supported_         = ggml_backend_dev_supports_op(device, ggml_set_rows(ctx_, staging_, row, index));
    }
    return true;
}

void LogitsStager::apply(ggml_context *ctx, ggml_cgraph *graph, llama_sampler_data *data) {
    ggml_tensor *row = data->logits;
    data->logits = data->probs = data->candidates = data->sampled = nullptr;  // so llama.cpp copies none of it out
    if (!first_ || !staging_ || !supported_) {
        return;
    }
    first_ = false;
    // The row is a view of all rows and one row of padding. llama.cpp's probe passes a tensor of its own instead.
    ggml_tensor *padded = row ? row->view_src : nullptr;
    if (!padded) {
        return;
    }
    ggml_tensor *rows = padded->op == GGML_OP_PAD ? padded->src[0] : nullptr;
    if (!rows || rows->type != GGML_TYPE_F32 || rows->ne[0] != n_vocab_ || rows->ne[2] != 1 || rows->ne[3] != 1) {
        n_unknown_++;
        return;
    }
    n_graphs_++;
    if (rows->ne[1] == 0) {
        return;
    }
    if (in_place_ && !rows->view_src && !rows->data && rows->ne[1] <= n_rows_) {
        ggml_backend_tensor_alloc(buffer_, rows, host_);  // llama.cpp's scheduler skips tensors that have memory
        outputs_ = rows;
        return;
    }
    index_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, rows->ne[1]);
    ggml_set_name(index_, "lp_rows");
    ggml_set_input(index_);
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, staging_, rows, index_));
    if (sampler_) {
        sampler_->build(ctx, graph, rows, index_);
    }
}

// llama.cpp calls this once for every sequence that has an output, and does not say which ubatch it is setting inputs for.
// That is why one decode of ours is one ubatch. Where llama.cpp cuts a batch otherwise, the number of rows differs; then the
// extra row is written, and no row in use.
void LogitsStager::set_input() {
    if (outputs_ && n_written_ == 0) {
        inputs_ns_ = now_ns();
        set_place();
    }
    if (!index_ || !index_->buffer || n_written_ > 0) {
        return;
    }
    inputs_ns_      = now_ns();
    const int64_t n = index_->ne[0];
    if (n == n_expected_) {
        n_written_ = n_expected_;
        ggml_backend_tensor_set(index_, rows_, 0, n * sizeof(int64_t));
        if (sampler_) {
            sampler_->set_input(parameters_);
        }
        return;
    }
    n_wrong_++;
    astray_.assign(n, n_rows_);
    ggml_backend_tensor_set(index_, astray_.data(), 0, n * sizeof(int64_t));
    if (sampler_) {
        sampler_->set_input(nullptr);
    }
}

void LogitsStager::expect(const int64_t *rows, const GraphRow *parameters, int n) {
    rows_       = rows;
    parameters_ = parameters;
    n_expected_ = n;
    n_written_ = n_wrong_ = 0;
    inputs_ns_            = 0;
    is_scattered_         = false;
    for (int i = 1; in_place_ && i < n; i++) {
        is_scattered_ = is_scattered_ || rows[i] != rows[0] + i;
    }
    if (is_scattered_) {
        scattered_.resize(std::max(scattered_.size(), static_cast<size_t>(n) * n_vocab_));
    }
}

// Rows computed in place are contiguous. If their destinations are too, they are computed there; else `settle` copies them.
void LogitsStager::set_place() {
    const int64_t n     = outputs_->ne[1];
    const bool    known = n == n_expected_;
    if (!known) {
        is_scattered_ = true;
        scattered_.resize(std::max(scattered_.size(), static_cast<size_t>(n) * n_vocab_));
    }
    outputs_->data = is_scattered_ ? scattered_.data() : host_ + rows_[0] * n_vocab_;
    n_written_     = known ? n_expected_ : n_written_;
    n_wrong_ += !known;
}

bool LogitsStager::settle() {
    if (n_written_ != n_expected_ || n_wrong_ > 0) {
        return false;
    }
    if (is_scattered_) {
        for (int i = 0; i < n_expected_; i++) {
            const float *row = scattered_.data() + static_cast<size_t>(i) * n_vocab_;
            std::copy(row, row + n_vocab_, host_ + rows_[i] * n_vocab_);
        }
        is_scattered_ = false;
    }
    return true;
}

}  // namespace lp

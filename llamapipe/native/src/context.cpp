// The owner of a llama_context, its logits stager and its compute threads.
#include "context.hpp"

#include "assertions.hpp"
#include "guard.hpp"
#include "weight_buffer.hpp"

#include <stdexcept>

namespace lp {

Context::Context(llama_model * model, const llama_context_params & params, const Options & options)
    : attends_(options.attends), multiplies_(options.multiplies) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (options.n_ring_rows > 0) {
        llama_context_params with_stager = params;
        stager_ = std::make_shared<LogitsStager>(n_vocab, (int) params.n_seq_max, options.n_ring_rows, options.samples);
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
    threads_ = std::make_unique<ComputeThreads>(llama_.get(), params.n_threads, params.n_threads_batch, options.poll);
}

int Context::decode(const BatchArrays & batch) {
    // llama_batch wants a list of sequences for each token; ours have exactly one.
    const size_t n = (size_t) batch.n;
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
    if (is_broken_) {
        throw std::runtime_error("llama.cpp failed inside an earlier step; close this engine and make another");
    }
    threads_->apply();
    set_error("see the log llamapipe.native");
    const DecodeAssertionsThrow          throwing;
    const llamapipe::kernels::ComputeScope scope(attends_, multiplies_);
    try {
        return (int) llama_decode(llama_.get(), given);
    } catch (...) {
        is_broken_ = throwing.happened();
        throw;
    }
}

Context::~Context() {
    if (is_broken_) {
        (void) llama_.release();  // its scheduler may point to memory that was freed
    }
}

}  // namespace lp

// From llama.h: the declarations that Python uses. Functions that may throw are called through llamapipe's own entries.
#define LLAMA_STATE_SEQ_VERSION ...
typedef int32_t llama_pos;
typedef int32_t llama_token;
typedef int32_t llama_seq_id;
typedef struct llama_memory_i * llama_memory_t;
struct llama_vocab;
struct llama_model;
struct llama_context;
struct llama_adapter_lora;

enum llama_vocab_type { LLAMA_VOCAB_TYPE_NONE, LLAMA_VOCAB_TYPE_SPM, LLAMA_VOCAB_TYPE_BPE, ... };
enum llama_split_mode { LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_ROW, LLAMA_SPLIT_MODE_TENSOR, ... };
enum llama_load_mode { LLAMA_LOAD_MODE_AUTO = -1, LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP, LLAMA_LOAD_MODE_MLOCK,
                       LLAMA_LOAD_MODE_MMAP_MLOCK, ... };
enum llama_attention_type { LLAMA_ATTENTION_TYPE_NON_CAUSAL, ... };
enum llama_flash_attn_type { LLAMA_FLASH_ATTN_TYPE_AUTO = -1, LLAMA_FLASH_ATTN_TYPE_DISABLED,
                             LLAMA_FLASH_ATTN_TYPE_ENABLED, ... };

enum llama_token_attr { LLAMA_TOKEN_ATTR_UNKNOWN, LLAMA_TOKEN_ATTR_CONTROL, LLAMA_TOKEN_ATTR_USER_DEFINED,
                        LLAMA_TOKEN_ATTR_LSTRIP, LLAMA_TOKEN_ATTR_RSTRIP, ... };

enum llama_rope_type { LLAMA_ROPE_TYPE_NONE = -1, LLAMA_ROPE_TYPE_NORM, LLAMA_ROPE_TYPE_MROPE, ... };
enum llama_pooling_type { LLAMA_POOLING_TYPE_UNSPECIFIED = -1, LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN,
                          LLAMA_POOLING_TYPE_CLS, LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_RANK, ... };

typedef bool (*llama_progress_callback)(float progress, void * user_data);

enum llama_model_kv_override_type { LLAMA_KV_OVERRIDE_TYPE_INT, LLAMA_KV_OVERRIDE_TYPE_FLOAT,
                                    LLAMA_KV_OVERRIDE_TYPE_BOOL, LLAMA_KV_OVERRIDE_TYPE_STR, ... };
struct llama_model_kv_override {
    enum llama_model_kv_override_type tag;
    char key[128];
    union { int64_t val_i64; double val_f64; bool val_bool; char val_str[128]; };
};
struct llama_model_tensor_buft_override { const char * pattern; ggml_backend_buffer_type_t buft; };

enum llama_context_type { LLAMA_CONTEXT_TYPE_MTP, ... };
struct llama_model_params {
    ggml_backend_dev_t * devices;
    const struct llama_model_tensor_buft_override * tensor_buft_overrides;
    const struct llama_model_kv_override * kv_overrides;
    int32_t n_gpu_layers;
    enum llama_split_mode split_mode;
    enum llama_load_mode load_mode;
    int32_t main_gpu;
    const float * tensor_split;
    llama_progress_callback progress_callback;
    void * progress_callback_user_data;
    bool vocab_only;
    bool load_mtp;
    ...;
};

struct llama_context_params {
    uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    int32_t n_threads; int32_t n_threads_batch;
    enum llama_attention_type attention_type;
    enum llama_flash_attn_type flash_attn_type;
    enum ggml_type type_k; enum ggml_type type_v;
    enum llama_pooling_type pooling_type;
    int32_t rope_scaling_type;
    float rope_freq_base; float rope_freq_scale;
    float yarn_ext_factor; float yarn_attn_factor; float yarn_beta_fast; float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    enum llama_context_type ctx_type;
    struct llama_context * ctx_other;
    size_t moe_cache_size;
    bool no_perf; bool swa_full; bool kv_unified; bool embeddings;
    ...;
};

struct llama_perf_context_data { int32_t n_p_eval; int32_t n_eval; int32_t n_reused; ...; };

struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
const char * llama_print_system_info(void);
size_t llama_max_devices(void);
size_t llama_max_parallel_sequences(void);

void llama_model_free(struct llama_model * model);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_model_n_ctx_train(const struct llama_model * model);
int32_t llama_model_n_embd(const struct llama_model * model);
int32_t llama_model_n_embd_out(const struct llama_model * model);
uint32_t llama_model_n_cls_out(const struct llama_model * model);
int32_t llama_model_n_layer(const struct llama_model * model);
uint64_t llama_model_size(const struct llama_model * model);
uint64_t llama_model_n_params(const struct llama_model * model);
int32_t llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
bool llama_model_has_encoder(const struct llama_model * model);
bool llama_model_has_decoder(const struct llama_model * model);
bool llama_model_is_recurrent(const struct llama_model * model);
int llama_model_n_embd_inp(const struct llama_model * model);
enum llama_rope_type llama_model_rope_type(const struct llama_model * model);
int32_t llama_model_n_layer_nextn(const struct llama_model * model);
int32_t llama_model_n_swa(const struct llama_model * model);
bool llama_model_is_hybrid(const struct llama_model * model);
int32_t llama_model_meta_count(const struct llama_model * model);
int32_t llama_model_meta_key_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
int32_t llama_model_meta_val_str_by_index(const struct llama_model * model, int32_t i, char * buf, size_t buf_size);
const char * llama_model_chat_template(const struct llama_model * model, const char * name);

enum llama_vocab_type llama_vocab_type(const struct llama_vocab * vocab);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
bool llama_vocab_is_eog(const struct llama_vocab * vocab, llama_token token);
enum llama_token_attr llama_vocab_get_attr(const struct llama_vocab * vocab, llama_token token);
const char * llama_vocab_get_text(const struct llama_vocab * vocab, llama_token token);
bool llama_vocab_is_control(const struct llama_vocab * vocab, llama_token token);
llama_token llama_vocab_bos(const struct llama_vocab * vocab);
llama_token llama_vocab_eos(const struct llama_vocab * vocab);
llama_token llama_vocab_eot(const struct llama_vocab * vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab * vocab);
llama_token llama_vocab_sep(const struct llama_vocab * vocab);
bool llama_vocab_get_add_eos(const struct llama_vocab * vocab);
bool llama_vocab_get_add_sep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_pre(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_suf(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_mid(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_rep(const struct llama_vocab * vocab);
llama_token llama_vocab_fim_sep(const struct llama_vocab * vocab);

uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_ctx_seq(const struct llama_context * ctx);
uint32_t llama_n_batch(const struct llama_context * ctx);
uint32_t llama_n_ubatch(const struct llama_context * ctx);
uint32_t llama_n_seq_max(const struct llama_context * ctx);
uint32_t llama_n_rs_seq(const struct llama_context * ctx);
struct llama_perf_context_data llama_perf_context(const struct llama_context * ctx);
llama_memory_t llama_get_memory(const struct llama_context * ctx);
bool llama_memory_can_shift(llama_memory_t mem);
llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);

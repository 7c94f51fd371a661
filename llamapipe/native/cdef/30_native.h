// llamapipe's own entries: see src/native.h for what each does.
#define LP_ERROR ...
#define LP_ERROR_LOGITS ...

const char * lp_last_error(void);
void lp_log_start(void);
int lp_log_next(char * text, int n_bytes, int * level);
uint64_t lp_log_dropped(void);

int lp_load_backends(const char * folder);
struct llama_model * lp_model_load(const char * path, const struct llama_model_params * params);
int lp_tokenize(const struct llama_vocab * vocab, const char * text, int n_bytes, int32_t * tokens, int n_max,
                bool add_special, bool parse_special);
int lp_detokenize(const struct llama_vocab * vocab, const int32_t * tokens, int n_tokens, char * text, int n_max,
                  bool remove_special, bool unparse_special);
int lp_piece(const struct llama_vocab * vocab, int32_t token, char * bytes, int n_max, bool special);

struct llama_context * lp_context_new(struct llama_model * model, const struct llama_context_params * params, int poll);
void lp_context_free(struct llama_context * ctx);
int lp_decode(struct llama_context * ctx, int n_tokens, const int32_t * tokens, const int32_t * positions,
              const int32_t * seq_ids, const int8_t * outputs);
int lp_decode_next(struct llama_context * ctx, int n_tokens, int32_t * tokens, int32_t * positions,
                   const int32_t * seq_ids, const int8_t * outputs, const int32_t * sampled);
int lp_logits(struct llama_context * ctx, int n_rows, const int32_t * rows, int n_vocab, float * out);
int lp_memory_remove(struct llama_context * ctx, int seq_id, int p0, int p1);
int lp_memory_copy(struct llama_context * ctx, int src, int dst, int p0, int p1);
int lp_memory_clear(struct llama_context * ctx);

typedef struct lp_sampler lp_sampler;
lp_sampler * lp_sampler_new(const struct llama_vocab * vocab, uint64_t seed);
void lp_sampler_free(lp_sampler * s);
int lp_sampler_set_bias(lp_sampler * s, int n, const int32_t * tokens, const float * biases);
int lp_sampler_set_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence);
int lp_sampler_add_top_k(lp_sampler * s, int k);
int lp_sampler_add_typical(lp_sampler * s, float p);
int lp_sampler_add_top_p(lp_sampler * s, float p);
int lp_sampler_add_min_p(lp_sampler * s, float p);
int lp_sampler_add_temperature(lp_sampler * s, float t);
int lp_sampler_accept(lp_sampler * s, int n, const int32_t * tokens);
int lp_sampler_reset(lp_sampler * s);
int lp_sampler_draw(lp_sampler * s, const float * logits, int32_t * token);
int lp_sample_rows(struct llama_context * ctx, int n_rows, const int32_t * rows, lp_sampler ** samplers, int32_t * tokens);

// Called while a model loads, on the loading thread; returning false stops the load.
extern "Python" bool lp_on_progress(float progress, void * user_data);

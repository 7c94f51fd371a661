// llamapipe's own entries: see src/native.h for what each does.
#define LP_ERROR ...
#define LP_ERROR_LOGITS ...
#define LP_ERROR_MASK ...
#define LP_ERROR_FULL ...
#define LP_ERROR_ABORTED ...
#define LP_ERROR_ROWS ...
#define LP_ERROR_POSITIONS ...
#define LP_ERROR_CLOSED ...
#define LP_ERROR_STEP ...

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
int lp_pieces(const struct llama_vocab * vocab, int32_t first, int n, char * bytes, int n_max, int32_t * ends);

typedef struct lp_collector lp_collector;
lp_collector * lp_collector_new(const struct llama_model * model, int n_seq_max, int64_t n_rows, bool samples);
const char *   lp_collector_problem(const lp_collector * collector);
const char *   lp_collector_sampler_problem(const lp_collector * collector);
int64_t        lp_collector_bytes(const lp_collector * collector);
void           lp_collector_free(lp_collector * collector);
struct llama_context * lp_context_new(struct llama_model * model, const struct llama_context_params * params, int poll,
                                      lp_collector * collector);
void lp_context_free(struct llama_context * ctx);
void lp_context_rest(struct llama_context * ctx);
int  lp_context_set_threads(struct llama_context * ctx, int n_threads, int n_threads_batch);
int64_t lp_context_scratch_bytes(struct llama_context * ctx);
int  lp_decode(struct llama_context * ctx, int n_tokens, const int32_t * tokens, const int32_t * positions,
               const int32_t * seq_ids, const int8_t * outputs);
int  lp_logits(struct llama_context * ctx, int n_rows, const int32_t * rows, int n_vocab, float * out);
int  lp_memory_remove(struct llama_context * ctx, int seq_id, int p0, int p1);
int  lp_memory_copy(struct llama_context * ctx, int src, int dst, int p0, int p1);
int  lp_memory_clear(struct llama_context * ctx);
typedef struct lp_waiter lp_waiter;
typedef struct lp_turns lp_turns;
lp_waiter * lp_waiter_new(void);
void lp_waiter_free(lp_waiter * waiter);
bool lp_waiter_wait(lp_waiter * waiter, lp_turns * turns, double timeout_s);
bool lp_waiter_asleep(const lp_waiter * waiter);
lp_turns * lp_turns_new(int64_t patience_ns);
void lp_turns_free(lp_turns * turns);
int  lp_turns_add(lp_turns * turns, lp_waiter * const * waiters, int n);
void lp_turns_next(lp_turns * turns);
void lp_turns_all(lp_turns * turns);
void lp_turns_hurry(lp_turns * turns);
typedef struct lp_sampler lp_sampler;
typedef struct lp_pipeline lp_pipeline;
typedef struct lp_step lp_step;
typedef struct {
    int64_t n_steps, n_decodes, n_waits, n_syncs, n_copies, n_bytes, n_moved, n_memory_ops;
    int64_t n_graph, compute_ns, wait_ns;
} lp_counters;
typedef struct {
    int64_t step, begin_ns, end_ns;
    int     stage, n_tokens, n_rows;
    char    sequences[...];
} lp_span;
enum { LP_HOST, LP_EVENTS, LP_SYNC, LP_STOCK };
enum { LP_REMOVE, LP_COPY, LP_KEEP, LP_SHIFT, LP_CLEAR };
enum { LP_FAULT_NONE, LP_FAULT_LAUNCH, LP_FAULT_ROWS, LP_FAULT_COPY };
lp_pipeline * lp_pipeline_new(struct llama_context * ctx, lp_collector * collector, int mode, int depth, int n_slots,
                              int slot_rows, int n_ubatch, bool streams, bool threaded);
void lp_pipeline_stop(lp_pipeline * pipeline);
void lp_pipeline_close(lp_pipeline * pipeline, bool drain);
void lp_pipeline_free(lp_pipeline * pipeline);
bool lp_collector_in_host_memory(const lp_collector * collector);
lp_step *     lp_submit(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                        const int32_t * seq_ids, const int8_t * outputs, int * code);
int           lp_next_position(lp_pipeline * pipeline, int seq_id);
bool          lp_step_ready(lp_step * step);
bool          lp_step_wait(lp_step * step, int64_t timeout_ns);
int           lp_step_code(lp_step * step);
const char *  lp_step_error(const lp_step * step);
int64_t       lp_step_number(const lp_step * step);
const float * lp_step_expose(lp_step * step, bool * in_place);
void          lp_step_unexpose(lp_step * step);
void          lp_step_release(lp_step * step);
void          lp_step_free(lp_step * step);
int64_t lp_launch(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                  const int32_t * seq_ids, const int8_t * outputs, lp_sampler ** samplers, const int32_t * targets, int n_top);
typedef struct {
    int n_fds, n_waiters;
    const int * fds;
    lp_waiter * const * waiters;
    lp_turns * turns;
} lp_wakes;
void    lp_wake_at_launch(lp_pipeline * pipeline, lp_wakes * wakes);
void    lp_wakes_begin(lp_wakes * wakes);                             // what a launch does at its beginning
void    lp_wakes_now(lp_wakes * wakes);                               // wakes all of them
int64_t lp_launch_again(lp_pipeline * pipeline, const int32_t * sampled, lp_sampler ** samplers);
int     lp_memory(lp_pipeline * pipeline, int op, int seq_id, int other, int p0, int p1, int delta);
void    lp_abort(lp_pipeline * pipeline, int64_t number);
int64_t lp_launching(const lp_pipeline * pipeline);
void    lp_fail_next(lp_pipeline * pipeline, int fault, int code);
void    lp_get_counters(lp_pipeline * pipeline, lp_counters * counters);
void    lp_trace(lp_pipeline * pipeline, int64_t n_max);
bool    lp_next_span(lp_pipeline * pipeline, lp_span * span);
int64_t lp_now_ns(void);

typedef struct lp_dry lp_dry;
lp_sampler * lp_sampler_new(const struct llama_vocab * vocab, uint64_t seed);
void lp_sampler_free(lp_sampler * s);
int  lp_sampler_set_bias(lp_sampler * s, int n, const int32_t * tokens, const float * biases);
int  lp_sampler_set_allowed(lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_set_mask(lp_sampler * s, const uint32_t * mask);
void lp_sampler_set_python(lp_sampler * s, bool needs_row, bool guided);
int  lp_sampler_add_bad_word(lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_set_min_tokens(lp_sampler * s, int min_tokens, int n_ends, const int32_t * ends);
int  lp_sampler_set_grammar(lp_sampler * s, const char * text, const char * root);
int  lp_sampler_set_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence);
int  lp_sampler_set_dry(lp_sampler * s, const lp_dry * dry);
int  lp_sampler_add_dry(lp_sampler * s, const lp_dry * dry);
int  lp_sampler_add_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence);
int  lp_sampler_add_top_k(lp_sampler * s, int k);
int  lp_sampler_add_typical(lp_sampler * s, float p);
int  lp_sampler_add_top_p(lp_sampler * s, float p);
int  lp_sampler_add_min_p(lp_sampler * s, float p);
int  lp_sampler_add_temperature(lp_sampler * s, float t);
int  lp_sampler_add_dynamic_temperature(lp_sampler * s, float t, float range, float exponent);
int  lp_sampler_add_top_n_sigma(lp_sampler * s, float n);
int  lp_sampler_add_xtc(lp_sampler * s, float probability, float threshold);
int  lp_sampler_add_infill(lp_sampler * s);
int  lp_sampler_add_mirostat(lp_sampler * s, int version, float tau, float eta);
int  lp_sampler_add_adaptive_p(lp_sampler * s, float target, float decay);
int  lp_sampler_set_logprobs(lp_sampler * s, int n);
int  lp_sampler_accept(lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_accept_grammar(lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_accept_drawn(lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_reset(lp_sampler * s);
int  lp_sampler_draw(lp_sampler * s, const float * logits, int32_t * token);
int  lp_sampler_draw_known(lp_sampler * s, int n, const float * ids, const float * logits, int n_others,
                           const float * other_ids, const float * other_logits, double log_sum_exp, int32_t * token);
int  lp_sampler_note(lp_sampler * s, const float * logits, int32_t token);
int  lp_sampler_logprobs(const lp_sampler * s, int n_max, float * logprob, int32_t * ids, float * logprobs);
lp_dry * lp_dry_new(const struct llama_vocab * vocab, float multiplier, float base, int allowed_length, int last_n,
                    int n_breakers, const char ** breakers);
void lp_dry_free(lp_dry * dry);
int lp_sample_rows(lp_pipeline * pipeline, int64_t step, int n_rows, const int32_t * entries, lp_sampler ** samplers,
                   int32_t * tokens);
const float * lp_step_row(lp_pipeline * pipeline, int64_t step, int entry);
int lp_candidates(const float * rows, int n_rows, int n_vocab, int k, int32_t * ids, float * logits, double * log_sum_exp);
int lp_score_rows(lp_pipeline * pipeline, int64_t step, int n, const int32_t * entries, const int32_t * targets,
                  float * logprobs, int8_t * greedy, int n_top, int32_t * top_ids, float * top_logprobs);
bool lp_in_graph(lp_sampler * s);
#define LP_GRAPH_RESULTS ...
#define LP_TARGETS ...
int lp_graph_sample(ggml_backend_dev_t device, int n_vocab, int n, const float * logits, lp_sampler ** samplers,
                    const int32_t * targets, float * results, float * candidates);
int lp_sample_plain(struct llama_context * ctx, int n_rows, const int32_t * rows, lp_sampler ** samplers, int32_t * tokens);

// Called while a model loads, on the loading thread; returning false stops the load.
extern "Python" bool lp_on_progress(float progress, void * user_data);

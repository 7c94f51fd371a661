// The C entries of llamapipe's native module; all that may throw in llama.cpp is called behind one of these.
//
// Conventions: an entry that can fail returns a negative code (or NULL) and leaves a message for lp_last_error() on the
// calling thread; no exception leaves an entry. Nothing here enters Python except the progress callback of lp_model_load.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LP_ERROR        (-1000)  // an exception was caught; lp_last_error() has its text
#define LP_ERROR_LOGITS (-1001)  // a row has no finite logit
#define LP_ERROR_MASK   (-1008)  // no token of a row is allowed
#define LP_ERROR_FULL      (-1002)  // no KV cells are left; nothing changed
#define LP_ERROR_ABORTED   (-1003)  // a step was aborted; what it had computed before may have stayed
#define LP_ERROR_ROWS      (-1004)  // llama.cpp cut a batch otherwise than expected
#define LP_ERROR_POSITIONS (-1005)  // a sequence would not go on from where it is
#define LP_ERROR_CLOSED    (-1006)  // the pipeline is closed
#define LP_ERROR_STEP      (-1007)  // an exception while a step was launched or copied

// ---- errors and log (error.cpp, log.cpp)
const char * lp_last_error(void);
void         lp_log_start(void);                                    // route llama.cpp's and ggml's log into a ring
int          lp_log_next(char * text, int n_bytes, int * level);    // oldest record: its length, or -1 when there is none
uint64_t     lp_log_dropped(void);                                  // records overwritten before they were read

// ---- backends, model, vocabulary (model.cpp)
int                  lp_load_backends(const char * folder);         // number of devices known afterwards
struct llama_model * lp_model_load(const char * path, const struct llama_model_params * params);
int  lp_tokenize(const struct llama_vocab * vocab, const char * text, int n_bytes, int32_t * tokens, int n_max,
                 bool add_special, bool parse_special);
int  lp_detokenize(const struct llama_vocab * vocab, const int32_t * tokens, int n_tokens, char * text, int n_max,
                   bool remove_special, bool unparse_special);
int  lp_pieces(const struct llama_vocab * vocab, int32_t first, int n, char * bytes, int n_max, int32_t * ends);

// ---- context (context.cpp)
typedef struct lp_collector lp_collector;
lp_collector * lp_collector_new(const struct llama_model * model, int n_seq_max, int64_t n_rows, bool samples);
const char *   lp_collector_problem(const lp_collector * collector);  // why rows cannot be staged; NULL if they will be
const char *   lp_collector_sampler_problem(const lp_collector * collector);  // why the graph does not sample; NULL if it does
int64_t        lp_collector_bytes(const lp_collector * collector);    // of its buffer on the device
void           lp_collector_free(lp_collector * collector);           // after the context
struct llama_context * lp_context_new(struct llama_model * model, const struct llama_context_params * params, int poll,
                                      lp_collector * collector);      // NULL for none
void lp_context_free(struct llama_context * ctx);
void lp_context_rest(struct llama_context * ctx);  // its compute threads sleep until the next graph; not during one
// Computes with other numbers of threads (1 to 512) from the next decode on, for single tokens and for batches. Any thread, at any
// time, also while a decode runs. Threads that are left out sleep.
int  lp_context_set_threads(struct llama_context * ctx, int n_threads, int n_threads_batch);
int64_t lp_context_scratch_bytes(struct llama_context * ctx);         // the buffers that graphs are computed in
int  lp_decode(struct llama_context * ctx, int n_tokens, const int32_t * tokens, const int32_t * positions,
               const int32_t * seq_ids, const int8_t * outputs);
int  lp_logits(struct llama_context * ctx, int n_rows, const int32_t * rows, int n_vocab, float * out);
int  lp_memory_remove(struct llama_context * ctx, int seq_id, int p0, int p1);   // 1 removed, 0 refused
int  lp_memory_copy(struct llama_context * ctx, int src, int dst, int p0, int p1);
int  lp_memory_clear(struct llama_context * ctx);

// ---- threads that wait for results (turns.cpp; turns.hpp says what each does)
typedef struct lp_waiter lp_waiter;
typedef struct lp_turns lp_turns;
lp_waiter * lp_waiter_new(void);
void lp_waiter_free(lp_waiter * waiter);
bool lp_waiter_wait(lp_waiter * waiter, lp_turns * turns, double timeout_s);   // passes the turn on first
bool lp_waiter_asleep(const lp_waiter * waiter);
lp_turns * lp_turns_new(int64_t patience_ns);
void lp_turns_free(lp_turns * turns);
int  lp_turns_add(lp_turns * turns, lp_waiter * const * waiters, int n);
void lp_turns_next(lp_turns * turns);
void lp_turns_all(lp_turns * turns);
void lp_turns_hurry(lp_turns * turns);

// ---- pipeline (pipeline.cpp; core.hpp says what each does)
typedef struct lp_sampler lp_sampler;
typedef struct lp_pipeline lp_pipeline;
typedef struct lp_step lp_step;
typedef struct {
    int64_t n_steps, n_decodes, n_waits, n_syncs, n_copies, n_bytes, n_moved, n_memory_ops;
    int64_t n_graph;              // tokens that the graph sampled
    int64_t compute_ns, wait_ns;  // computing (where it is known), and blocked in a wait
} lp_counters;
#define LP_SEQUENCES 48
typedef struct {
    int64_t step, begin_ns, end_ns;                                   // the step is -1 between steps
    int     stage, n_tokens, n_rows;
    char    sequences[LP_SEQUENCES];
} lp_span;
enum { LP_HOST, LP_EVENTS, LP_SYNC, LP_STOCK };                       // modes
enum { LP_STAGE_LAUNCH, LP_STAGE_COMPUTE, LP_STAGE_COPY, LP_STAGE_WAIT, LP_STAGE_SAMPLE, LP_STAGE_MEMORY };
enum { LP_REMOVE, LP_COPY, LP_KEEP, LP_SHIFT, LP_CLEAR };             // memory operations
enum { LP_FAULT_NONE, LP_FAULT_LAUNCH, LP_FAULT_ROWS, LP_FAULT_COPY };
lp_pipeline * lp_pipeline_new(struct llama_context * ctx, lp_collector * collector, int mode, int depth, int n_slots,
                              int slot_rows, int n_ubatch, bool streams, bool threaded);
void lp_pipeline_stop(lp_pipeline * pipeline);                          // what is under way fails
void lp_pipeline_close(lp_pipeline * pipeline, bool drain);           // before the context is freed
void lp_pipeline_free(lp_pipeline * pipeline);
bool lp_collector_in_host_memory(const lp_collector * collector);
lp_step *     lp_submit(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                        const int32_t * seq_ids, const int8_t * outputs, int * code);
int           lp_next_position(lp_pipeline * pipeline, int seq_id);   // once all that is queued is done
bool          lp_step_ready(lp_step * step);
bool          lp_step_wait(lp_step * step, int64_t timeout_ns);
int           lp_step_code(lp_step * step);                           // of a finished step: 0 or why it failed
const char *  lp_step_error(const lp_step * step);
int64_t       lp_step_number(const lp_step * step);                   // -1 until it was launched
const float * lp_step_expose(lp_step * step, bool * in_place);
void          lp_step_unexpose(lp_step * step);
void          lp_step_release(lp_step * step);
void          lp_step_free(lp_step * step);
// For each output in the order of the batch: a sampler, and LP_TARGETS tokens that will be scored (-1: none, or no more), with
// the n_top most probable ones. Either may be NULL, and so may a sampler. Where the graph samples, tokens of those samplers
// whose stages it knows are drawn there, and of the others, and of rows with targets, what is likely to be enough comes to
// the host. Whole rows of all others come, too. The next uniform number of each sampler is looked at here and used up by
// lp_sample_rows.
#define LP_TARGETS 4
int64_t lp_launch(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                  const int32_t * seq_ids, const int8_t * outputs, lp_sampler ** samplers, const int32_t * targets, int n_top);
// Whom each launch wakes before anything else, where no lock of the interpreter's is held: it writes a byte into each of
// the files (non-blocking pipes), adds the waiters to the turns, sets both numbers to 0, and begins the turns. It
// hurries them while a CPU computes, and wakes who is left at its end. Kept by the caller and changed between launches:
// a call for each change would give that lock away.
typedef struct {
    int n_fds, n_waiters;
    const int * fds;
    lp_waiter * const * waiters;
    lp_turns * turns;
} lp_wakes;
void    lp_wake_at_launch(lp_pipeline * pipeline, lp_wakes * wakes);
void    lp_wakes_begin(lp_wakes * wakes);                             // what a launch does at its beginning
void    lp_wakes_now(lp_wakes * wakes);                               // wakes all of them
// All entries are outputs, and `samplers` (or NULL) are those of the entries in their order.
int64_t lp_launch_again(lp_pipeline * pipeline, const int32_t * sampled, lp_sampler ** samplers);
int     lp_memory(lp_pipeline * pipeline, int op, int seq_id, int other, int p0, int p1, int delta);
void    lp_abort(lp_pipeline * pipeline, int64_t number);
int64_t lp_launching(const lp_pipeline * pipeline);                   // the step that is being computed, or -1
void    lp_fail_next(lp_pipeline * pipeline, int fault, int code);
void    lp_get_counters(lp_pipeline * pipeline, lp_counters * counters);
void    lp_trace(lp_pipeline * pipeline, int64_t n_max);              // most spans kept; 0: off
bool    lp_next_span(lp_pipeline * pipeline, lp_span * span);
int64_t lp_now_ns(void);

// ---- sampling (sampler.cpp)
typedef struct lp_dry lp_dry;                                       // DRY with its sequence breakers looked up, to be cloned
lp_sampler * lp_sampler_new(const struct llama_vocab * vocab, uint64_t seed);
void lp_sampler_free(lp_sampler * s);
int  lp_sampler_set_bias(lp_sampler * s, int n, const int32_t * tokens, const float * biases);  // minus infinity forbids
int  lp_sampler_set_allowed(lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_set_mask(lp_sampler * s, const uint32_t * mask);    // a bit for each token, kept by the caller; NULL: none
void lp_sampler_set_python(lp_sampler * s, bool needs_row, bool guided);  // it looks at each row first; it will set a mask
int  lp_sampler_add_bad_word(lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_set_min_tokens(lp_sampler * s, int min_tokens, int n_ends, const int32_t * ends);
int  lp_sampler_set_grammar(lp_sampler * s, const char * text, const char * root);
int  lp_sampler_set_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence);
int  lp_sampler_set_dry(lp_sampler * s, const lp_dry * dry);        // the stages below: in the order they are added
int  lp_sampler_add_dry(lp_sampler * s, const lp_dry * dry);
int  lp_sampler_add_penalties(lp_sampler * s, int last_n, float repeat, float frequency, float presence);
int  lp_sampler_add_top_k(lp_sampler * s, int k);
int  lp_sampler_add_typical(lp_sampler * s, float p);
int  lp_sampler_add_top_p(lp_sampler * s, float p);
int  lp_sampler_add_min_p(lp_sampler * s, float p);
int  lp_sampler_add_temperature(lp_sampler * s, float t);           // < 1e-6: greedy
int  lp_sampler_add_dynamic_temperature(lp_sampler * s, float t, float range, float exponent);
int  lp_sampler_add_top_n_sigma(lp_sampler * s, float n);
int  lp_sampler_add_xtc(lp_sampler * s, float probability, float threshold);
int  lp_sampler_add_infill(lp_sampler * s);
int  lp_sampler_add_mirostat(lp_sampler * s, int version, float tau, float eta);  // these two draw themselves: last
int  lp_sampler_add_adaptive_p(lp_sampler * s, float target, float decay);
int  lp_sampler_set_logprobs(lp_sampler * s, int n);                // of the n most probable tokens, too; < 0: none at all
int  lp_sampler_accept(lp_sampler * s, int n, const int32_t * tokens);        // of the sequence
int  lp_sampler_accept_grammar(lp_sampler * s, int n, const int32_t * tokens);  // generated ones; refuses what it forbids
int  lp_sampler_accept_drawn(lp_sampler * s, int n, const int32_t * tokens);  // both, and counted
int  lp_sampler_reset(lp_sampler * s);                              // forgets accepted tokens, keeps the generator's state
int  lp_sampler_draw(lp_sampler * s, const float * logits, int32_t * token);
// The same where only the n largest logits and some others are known, as on a device (see Row): 1, and nothing changed, where
// the whole row is needed.
int  lp_sampler_draw_known(lp_sampler * s, int n, const float * ids, const float * logits, int n_others, const float * other_ids,
                           const float * other_logits, double log_sum_exp, int32_t * token);
int  lp_sampler_note(lp_sampler * s, const float * logits, int32_t token);   // for lp_sampler_logprobs, where it was drawn from another row
int  lp_sampler_logprobs(const lp_sampler * s, int n_max, float * logprob, int32_t * ids, float * logprobs);  // of the last draw: n
lp_dry * lp_dry_new(const struct llama_vocab * vocab, float multiplier, float base, int allowed_length, int last_n,
                    int n_breakers, const char ** breakers);
void lp_dry_free(lp_dry * dry);
// Waits for a launched step and draws a token from the row of each of these entries; -1 where no logit is finite, -2
// where no token is allowed, -3 where something was thrown.
int  lp_sample_rows(lp_pipeline * pipeline, int64_t step, int n_rows, const int32_t * entries, lp_sampler ** samplers,
                    int32_t * tokens);
// The row of an output entry; NULL if it is none or the step failed. Valid as long as the step's rows.
const float * lp_step_row(lp_pipeline * pipeline, int64_t step, int entry);
// The k largest logits of each row of n_vocab, sorted, on ties the lower ids first (-1 where fewer are finite), and each row's
// log-sum-exp.
int lp_candidates(const float * rows, int n_rows, int n_vocab, int k, int32_t * ids, float * logits, double * log_sum_exp);
// How probable the rows of entries hold tokens: log-probabilities, whether each is the most probable, and the n_top most
// probable of each. Entries of the same row come one after another.
int lp_score_rows(lp_pipeline * pipeline, int64_t step, int n, const int32_t * entries, const int32_t * targets,
                  float * logprobs, int8_t * greedy, int n_top, int32_t * top_ids, float * top_logprobs);
// The same from llama.cpp's own buffer, of a context without a pipeline.
int  lp_sample_plain(struct llama_context * ctx, int n_rows, const int32_t * rows, lp_sampler ** samplers, int32_t * tokens);
bool lp_in_graph(lp_sampler * s);                                   // whether the graph can make its next draw
#define LP_GRAPH_RESULTS 8
// The same subgraph on given rows, float32 (n, n_vocab), without a model. Samplers, of vocabularies of that size, may be NULL
// and keep their uniform numbers. For each row: token, its log-probability, the row's log-sum-exp, the target's logit and
// the most probable token (see GraphResult).
int  lp_graph_sample(ggml_backend_dev_t device, int n_vocab, int n, const float * logits, lp_sampler ** samplers,
                     const int32_t * targets, float * results, float * candidates);

#ifdef __cplusplus
}
#endif

// llamapipe's own C entries, as cffi reads them and src/native.h includes them: plain C, without directives but #define.
//
// Conventions: an entry that can fail returns a negative code (or NULL) and leaves a message for lp_last_error() on the
// calling thread. No exception leaves an entry. Nothing here enters Python except the progress callback of lp_model_load.

// Result codes. Python uses the same names (lib.LP_ERROR...).
enum lp_error {
    LP_ERROR           = -1000,  // an exception was caught; lp_last_error() has its text
    LP_ERROR_LOGITS    = -1001,  // no logit of a row is finite
    LP_ERROR_FULL      = -1002,  // no KV cells are left; nothing changed
    LP_ERROR_ABORTED   = -1003,  // a step was aborted; parts computed before may have stayed in the KV cache
    LP_ERROR_ROWS      = -1004,  // llama.cpp cut a batch otherwise than expected
    LP_ERROR_POSITIONS = -1005,  // a batch does not continue its sequence
    LP_ERROR_CLOSED    = -1006,  // the pipeline is closed
    LP_ERROR_STEP      = -1007,  // an exception while a step was launched or copied
    LP_ERROR_MASK      = -1008   // no token of a row is allowed
};

// ---- errors and log (log.cpp)
const char * lp_last_error(void);
void         lp_log_start(void);                                  // routes llama.cpp's and ggml's log into a ring
int          lp_log_next(char * text, int n_bytes, int * level);  // the oldest record: its length, or -1 if there is none

// ---- our kernels (kernels/weight_buffer.hpp says what they do)
const char * lp_kernels_level(void);    // the CPU level, such as "avx2"; NULL where ggml's are used for everything
bool         lp_kernels_attend(void);   // whether this level has attention and linear layers, too
const char * lp_kernels_problem(void);  // why ggml's are used for everything; NULL if ours can be used
bool lp_kernels_have(enum ggml_type type, int64_t n_columns, int64_t n_rows);  // whether weights would be packed
// What a load shall pack for our kernels, on how many threads; and what it has packed. A file that holds the same weights,
// packed, is mapped instead: `fd` (negative: there is none), from `offset` on, a multiple of the page size.
typedef struct {
    int      n_threads;
    int      fd;
    int64_t  offset, n_in_file;
    uint64_t layout_in_file;
    int      n_tensors;
    int64_t  n_bytes;  // of packed weights
    void *   data;     // a buffer with all of them that can be in a file, as long as the model lives; NULL: none
    int64_t  n_data;
    uint64_t layout;  // which tensors are in that buffer, and in which form
    bool     is_mapped;
} lp_packing;

// ---- backends, model, vocabulary (model.cpp)
int                  lp_load_backends(const char * folder);  // number of devices known afterwards
bool                 lp_load_backend(const char * path);      // one backend module; the log says why it was refused
struct llama_model * lp_model_load(const char * path, const struct llama_model_params * params, lp_packing * packing);  // NULL: ggml's kernels
// Replaces packed weights by a mapping of a file with the same bytes; false: that is not possible, and nothing has changed.
bool lp_packing_map(lp_packing * packing, int fd, int64_t offset);
int lp_tokenize(const struct llama_vocab * vocab, const char * text, int n_bytes, int32_t * tokens, int n_max,
                bool add_special, bool parse_special);
int lp_detokenize(const struct llama_vocab * vocab, const int32_t * tokens, int n_tokens, char * text, int n_max,
                  bool remove_special, bool unparse_special);
int lp_pieces(const struct llama_vocab * vocab, int32_t first, int n, char * bytes, int n_max, int32_t * ends);

// ---- adapters (adapters.cpp)
// Loads a LoRA of a model: NULL where llama.cpp refuses it; the log says why. It lives as long as the model, or until it is
// freed, which no context may use it for any more. Any thread.
struct llama_adapter_lora * lp_adapter_load(struct llama_model * model, const char * path);
void                        lp_adapter_free(struct llama_adapter_lora * adapter);
// What a context computes with besides the model: LoRAs with their scales, and a control vector (or NULL): n_embd numbers for
// each layer from the second on, of which those from layer `first` to `last` are added. `carries`: of the one LoRA only its
// shape counts, for rows with adapters of their own (lp_assign_adapters).
typedef struct {
    int                          n;
    struct llama_adapter_lora ** adapters;
    float *                      scales;
    const float *                control;
    int64_t                      n_control;
    int                          n_embd, first, last;
    bool                         carries;
} lp_adapter_set;

// ---- devices of other machines (rpc.cpp)
// `library`: the path of ggml-rpc's, which the first call opens. `address`: a numeric IPv4 address and a port.
typedef struct lp_rpc lp_rpc;
lp_rpc * lp_rpc_connect(const char * library, const char * address);  // NULL if that fails; may block, so check first
void     lp_rpc_disconnect(lp_rpc * rpc);  // the connection is closed when the models that use its devices are freed, too
int      lp_rpc_devices(const lp_rpc * rpc, int n_max, ggml_backend_dev_t * devices);  // their number; valid for ever
// Serves these devices, one client at a time, and returns only if that fails. `cache`: a folder for large tensors, or NULL.
int      lp_rpc_serve(const char * library, const char * address, const char * cache, int n_threads, int n_devices,
                      ggml_backend_dev_t * devices);

// ---- images and sounds (media.cpp)
// `library`: the path of libmtmd, which the first call opens. NULL: the file was refused, the log says why. Any thread may make
// chunks, several at once.
typedef struct lp_media lp_media;
typedef struct lp_media_chunks lp_media_chunks;  // what an image or a sound becomes in a prompt
typedef struct {
    bool            is_text;  // `tokens`, valid as long as the chunks; else `n_tokens` rows
    const int32_t * tokens;
    int             n_tokens, n_positions;
    bool            is_causal;   // else all rows see each other, and have to be in one ubatch
    bool            has_grid;    // all rows have one position, and a height and a width (M-RoPE)
} lp_media_part;
// `has_kernels`: attention and products of floats are computed by our kernels. `image_min_tokens`, `image_max_tokens`: of an
// image; -1: the projector's own limit.
lp_media *        lp_media_open(const char * library, const char * path, const struct llama_model * model, bool use_gpu, bool has_kernels, int image_min_tokens, int image_max_tokens);
void              lp_media_close(lp_media * media);  // after its chunks
bool              lp_media_sees(const lp_media * media);         // takes images
int               lp_media_sample_rate(const lp_media * media);  // of sounds, in Hz; -1: it takes none
lp_media_chunks * lp_media_image(lp_media * media, int width, int height, const uint8_t * rgb);
lp_media_chunks * lp_media_sound(lp_media * media, int64_t n, const float * samples);  // mono
void              lp_media_chunks_free(lp_media_chunks * chunks);
int               lp_media_n_chunks(const lp_media_chunks * chunks);
int               lp_media_chunk(const lp_media * media, const lp_media_chunks * chunks, int i, lp_media_part * part);
// The height and the width of each row of a chunk that has a grid, counted from 0.
int               lp_media_grid(const lp_media_chunks * chunks, int i, int32_t * grid);
// The rows of a chunk: llama_model_n_embd_inp() numbers for each of its tokens. One at a time, others wait. `n_threads`: on the CPU.
int               lp_media_encode(lp_media * media, const lp_media_chunks * chunks, int i, int n_threads, float * rows);

// ---- files that shrink while they are mapped (mapping_guard.cpp)
// Between the two, pages beyond the end of a mapped file read as zeros instead of ending the process: on this thread those
// of all files, on others those of `paths`, which are absolute and without symbolic links (at most 64 files at once).
int lp_mapping_guard_begin(const char * const * paths, int n_paths);  // LP_ERROR: no handler of SIGBUS can be installed
int lp_mapping_guard_end(void);                                       // not 0 if pages were missing

// ---- context (context_api.cpp): a llama_context with its logits ring and its compute threads
typedef struct lp_context lp_context;
// `poll`: how eagerly idle compute threads spin for the next graph, 0 to 100. `n_ring_rows`: rows to stage logits in, or 0.
// `samples`: with a ring, the graph shall sample, too. `attends`, `multiplies`: attention, and products of floats, are computed
// by llamapipe's kernels where they can.
// Where rows cannot be staged the context has no ring.
lp_context * lp_context_new(struct llama_model * model, const struct llama_context_params * params, int poll,
                            int64_t n_ring_rows, bool samples, bool attends, bool multiplies);
void         lp_context_free(lp_context * context);  // in any order with its pipeline, which keeps it until it is closed
struct llama_context * lp_context_llama(const lp_context * context);
bool         lp_context_has_ring(const lp_context * context);
bool         lp_context_ring_in_host_memory(const lp_context * context);
const char * lp_context_staging_problem(const lp_context * context);  // why there is no ring; NULL if one was not wanted
const char * lp_context_sampler_problem(const lp_context * context);  // why the graph does not sample; NULL if it does
// The compute threads sleep until the next graph. Not while one is computed.
void         lp_context_rest(lp_context * context);
// Computes with other numbers of threads (1 to 512) from the next decode on, for single tokens and for batches. Any thread,
// at any time, also while a decode runs. Threads that are left out sleep.
int          lp_context_set_threads(lp_context * context, int n_threads, int n_threads_batch);
// The kernel's ids of the compute threads: the thread that decoded last, and its workers. Returns their number; 0 where the
// system has no such ids, or before the first decode.
int          lp_context_thread_ids(lp_context * context, int n_max, int32_t * ids);
int lp_decode(lp_context * context, int n_tokens, const int32_t * tokens, const int32_t * positions,
              const int32_t * seq_ids, const int8_t * outputs);  // llama_decode's code
// Rows of `width` numbers: of each of n sequences (pooled), or of each of n entries of the last batch.
int lp_embeddings(lp_context * context, int n, bool pooled, int width, float * out);
int lp_logits(lp_context * context, int n_rows, const int32_t * rows, int n_vocab, float * out);

// Operations on the KV cells of a sequence: positions from p0 to before p1 (negative: the end).
enum lp_memory_op {
    LP_REMOVE,
    LP_COPY,   // to the sequence `other`
    LP_KEEP,   // removes all other sequences
    LP_SHIFT,  // adds `delta` to positions
    LP_CLEAR   // removes all sequences
};
// From the next decode on, which reserves the graphs anew. 1 done, or LP_ERROR.
int lp_context_set_adapters(lp_context * context, const lp_adapter_set * set);
// Whether sequences can have LoRAs of their own: our kernels compute all of the graph.
bool lp_context_mixes_adapters(const lp_context * context);
int64_t lp_context_n_spared(const lp_context * context);  // cells that attention did not read for each sequence that has them
// The LoRAs of a sequence's rows from the next decode on; n may be 0. What they had is not used any more after it. A set
// that carries is given before, whose LoRA changes all matrices that these change; nobody has a LoRA then. 1 done, or
// LP_ERROR.
int lp_context_assign_adapters(lp_context * context, int seq_id, const lp_adapter_set * set);
int lp_context_memory(lp_context * context, enum lp_memory_op op, int seq_id, int other, int p0, int p1);  // 1 done, 0 refused

// ---- hidden states, for the layers of a model that draft (hidden_states.cpp)
const char * lp_states_problem(void);  // why llama.cpp does not give them out; NULL if it does
// Keeps states of the tokens that are decoded from now on, of the last `n_most` of each sequence: the inputs of `n_layers`
// layers, one after the other, or with 0 the last hidden state. llama.cpp ends the process if its graph has no such inputs.
int lp_context_keep_states(lp_context * context, int n_most, int n_layers, const int32_t * layers);
int lp_context_state_width(const lp_context * context);  // numbers of a state; of a context that keeps states, as the next
// The state of a position, as long as nothing is decoded or removed; NULL if it is not kept.
const float * lp_context_state(const lp_context * context, int seq_id, int32_t position);
// The first position of a sequence whose state is kept, and the one after the last; of a context that keeps states.
int lp_context_states(const lp_context * context, int seq_id, int32_t * end);
// lp_decode for a context of drafting layers: each entry reads the state of the token before it. That is the one of the
// entry `before[i]`, an output of this context's last batch, or (-1) the one that `target` has kept.
int lp_draft(lp_context * context, const lp_context * target, int n_tokens, const int32_t * tokens, const int32_t * positions,
             const int32_t * seq_ids, const int8_t * outputs, const int32_t * before);
// Computes the cells of n positions from the states that `target` has kept of them, for a draft that reads the model's states
// in place of tokens (DFlash). llama_decode's code.
int lp_inject(lp_context * context, const lp_context * target, int n, const int32_t * positions, const int32_t * seq_ids);
// The most probable token of an output of the last batch, and its probability; -1 if no logit is finite, or LP_ERROR.
int lp_best(lp_context * context, int entry, float * share);

// ---- readers that wait for results (wake_queue_api.cpp; wake_queue.hpp says what each entry does)
typedef struct lp_waiter lp_waiter;
typedef struct lp_wake_queue lp_wake_queue;
lp_waiter * lp_waiter_new(void);
void lp_waiter_free(lp_waiter * waiter);
bool lp_waiter_wait(lp_waiter * waiter, lp_wake_queue * queue, double timeout_s);  // yields its turn first
bool lp_waiter_asleep(const lp_waiter * waiter);
lp_wake_queue * lp_wake_queue_new(int64_t patience_ns);
void lp_wake_queue_free(lp_wake_queue * queue);
int  lp_wake_queue_add(lp_wake_queue * queue, lp_waiter * const * waiters, int n);
void lp_wake_queue_yield_turn(lp_wake_queue * queue);
void lp_wake_queue_wake_all(lp_wake_queue * queue);
void lp_wake_queue_wake_all_if_stalled(lp_wake_queue * queue);

// The readers that each launch wakes. Kept by the caller in shared memory and changed between launches: a call for each
// change would release the GIL each time. A launch first writes a byte into each of the non-blocking pipes `fds`, adds the
// waiters to the queue, sets both numbers to 0 and wakes the first waiter. It wakes the others if that one stalls while a
// CPU computes, and those that are left when the launch ends.
typedef struct {
    int n_fds, n_waiters;
    const int * fds;
    lp_waiter * const * waiters;
    lp_wake_queue * queue;
} lp_wake_list;
void lp_wake_list_begin(lp_wake_list * wakes);     // does what a launch does at its beginning
void lp_wake_list_wake_all(lp_wake_list * wakes);  // the same, and wakes all waiters

// ---- pipeline (pipeline_api.cpp; pipeline.hpp says what each entry does)
// Where output rows are, and which thread waits for what.
enum lp_mode {
    LP_HOST,    // the ring is host memory, and a decode returns when it is computed: readers look into the slot itself
    LP_EVENTS,  // the device copies rows out after the graph, and an event says when they have arrived
    LP_SYNC,    // the same without events: llama_synchronize, at most once a step
    LP_DIRECT   // llama.cpp's own output buffer; no ring
};
// Stages of a step in the trace.
enum lp_stage { LP_STAGE_LAUNCH, LP_STAGE_COMPUTE, LP_STAGE_COPY, LP_STAGE_WAIT, LP_STAGE_SAMPLE, LP_STAGE_MEMORY };

typedef struct lp_pipeline lp_pipeline;
typedef struct lp_step lp_step;
typedef struct {
    int64_t n_steps, n_decodes, n_waits, n_syncs, n_copies, n_bytes, n_moved, n_memory_ops;
    int64_t n_graph;              // tokens that the graph sampled
    int64_t compute_ns, wait_ns;  // computing (where it is known), and blocked in a wait
} lp_counters;
#define LP_SEQUENCES 48
typedef struct {
    int64_t step, begin_ns, end_ns;  // the step is -1 between steps
    int     stage, n_tokens, n_rows;
    char    sequences[LP_SEQUENCES];  // such as "0-3,7"
} lp_span;

lp_pipeline * lp_pipeline_new(lp_context * context, enum lp_mode mode, int depth, int n_slots, int slot_rows, int n_ubatch,
                              bool kv_streams, bool threaded);
void lp_pipeline_stop(lp_pipeline * pipeline);               // steps that are not done fail
void lp_pipeline_close(lp_pipeline * pipeline, bool drain);  // ends its threads and lets go of the context
void lp_pipeline_free(lp_pipeline * pipeline);

lp_step * lp_submit(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                    const int32_t * seq_ids, const int8_t * outputs, int * code);
int       lp_next_position(lp_pipeline * pipeline, int seq_id);  // once everything queued is done
int       lp_memory(lp_pipeline * pipeline, enum lp_memory_op op, int seq_id, int other, int p0, int p1, int delta);

int       lp_set_adapters(lp_pipeline * pipeline, const lp_adapter_set * set);  // between steps: lp_context_set_adapters
int       lp_assign_adapters(lp_pipeline * pipeline, int seq_id, const lp_adapter_set * set);  // lp_context_assign_adapters

int       lp_sequence_end(lp_pipeline * pipeline, int seq_id);  // between steps: the position after its last one, or LP_ERROR...

// One sequence in host memory, or only the state of its end: what cannot go back. These entries run between steps and
// wait for the steps before them.
typedef struct lp_saved lp_saved;
lp_saved * lp_save(lp_pipeline * pipeline, int seq_id, int64_t max_bytes, bool only_state);  // null: larger, or an error
bool       lp_save_state(lp_pipeline * pipeline, int seq_id, lp_saved * to);  // in place of what it had, in the same memory
lp_saved * lp_saved_new(const void * bytes, int64_t n);  // of bytes that `lp_saved_data` gave; null: no memory
int64_t    lp_saved_bytes(const lp_saved * saved);
const void * lp_saved_data(const lp_saved * saved);
void       lp_saved_free(lp_saved * saved);
// 1: the sequence has the first n cells (null: of its own) and a state (null: that of the cells); 0: refused, and it is
// empty, or as it was if both are null.
int        lp_load(lp_pipeline * pipeline, int seq_id, int n, const lp_saved * cells, const lp_saved * state);
int        lp_copy(lp_pipeline * pipeline, int from, int to, int n, const lp_saved * state);  // the same, of another stream
// lp_save_state and lp_load for a context without a pipeline. `to`: null: a new copy. Returns it; null: an error.
lp_saved * lp_context_save_state(lp_context * context, int seq_id, lp_saved * to);
int        lp_context_load_state(lp_context * context, int seq_id, int n, const lp_saved * state);

bool          lp_step_ready(lp_step * step);
bool          lp_step_wait(lp_step * step, int64_t timeout_ns);
int           lp_step_code(lp_step * step);          // of a finished step: 0, or why it failed
const char *  lp_step_error(const lp_step * step);
int64_t       lp_step_number(const lp_step * step);  // -1 until it was launched
const float * lp_step_expose(lp_step * step, bool * in_place);
void          lp_step_unexpose(lp_step * step);
void          lp_step_release(lp_step * step);
void          lp_step_free(lp_step * step);

// `samplers` and `targets` have an element for each output, in the order of the batch: a sampler, and LP_TARGETS tokens to
// score (-1: no more) with the n_top most probable ones. Either may be NULL, and so may a sampler. With graph sampling,
// per output row: (a) supported samplers are drawn in the graph and only the token is copied; (b) other samplers, and rows
// with targets, get the top candidates copied; (c) everything else gets the whole row. A draw in the graph looks at the
// sampler's next uniform number, which lp_sample_rows uses up.
#define LP_TARGETS 4
// `embeddings` (or NULL): for each entry its input row, which stays valid until the step is done, or NULL where it is a token.
// `grid` (or NULL): for each entry its positions of height and width if they differ from its position, or -1, -1.
// `is_causal`: entries see those before them; else all of a sequence, and the batch is one ubatch.
int64_t lp_launch(lp_pipeline * pipeline, int n, const int32_t * tokens, const int32_t * positions,
                  const int32_t * seq_ids, const int8_t * outputs, lp_sampler ** samplers, const int32_t * targets, int n_top,
                  const float * const * embeddings, const int32_t * grid, bool is_causal);
// The last batch with each entry one position further. All entries are outputs; `samplers` (or NULL) are in their order.
int64_t lp_launch_again(lp_pipeline * pipeline, const int32_t * sampled, lp_sampler ** samplers);
void    lp_wake_at_launch(lp_pipeline * pipeline, lp_wake_list * wakes);
void    lp_abort(lp_pipeline * pipeline, int64_t number);
int64_t lp_launching(const lp_pipeline * pipeline);  // the step that is being computed, or -1

// Why no token was drawn from a row, in place of the token. Python: errors.NoToken.
enum lp_no_token {
    LP_NO_FINITE_LOGIT  = -1,
    LP_NO_ALLOWED_TOKEN = -2,
    LP_SAMPLER_FAILED   = -3, // an exception, or the sampler's Python part failed
    // Only in Python:
    LP_LATER            = -4, // another thread draws
    LP_FINISHED         = -5, // the constraint allows no further token
    LP_SETTLED          = -6, // whether a further token is allowed is known now
    // In both:
    LP_NOT_DRAWN        = -7, // the row follows a guess that was wrong
};
// Waits for a launched step, then draws and accepts a token from the row of each entry: a token or an lp_no_token.
// `guessed` (or NULL): the token that was computed after each entry, -1 where none was. Rows of one sampler that follow one
// another are drawn from until a token is not the guessed one. Returns how many samplers can guess what follows, or a
// negative code.
int lp_sample_rows(lp_pipeline * pipeline, int64_t step, int n_rows, const int32_t * entries, lp_sampler ** samplers,
                   const int32_t * guessed, int32_t * tokens);
// The row of an output entry; NULL if the entry is not an output or the step failed. Valid as long as the step's rows.
const float * lp_step_row(lp_pipeline * pipeline, int64_t step, int entry);
// Scores tokens by the rows of entries: log-probabilities, whether each token is the most probable, and the n_top most
// probable tokens of each row. Entries of the same row must be adjacent.
int lp_score_rows(lp_pipeline * pipeline, int64_t step, int n, const int32_t * entries, const int32_t * targets,
                  float * logprobs, int8_t * greedy, int n_top, int32_t * top_ids, float * top_logprobs);
// The k largest logits of each row of n_vocab, sorted, on ties the lower ids first (-1 where fewer are finite), and each
// row's log-sum-exp.
int lp_candidates(const float * rows, int n_rows, int n_vocab, int k, int32_t * ids, float * logits, double * log_sum_exp);

// ---- counters and trace
void    lp_get_counters(lp_pipeline * pipeline, lp_counters * counters);
void    lp_trace(lp_pipeline * pipeline, int64_t n_max);  // most spans kept; 0: off
bool    lp_next_span(lp_pipeline * pipeline, lp_span * span);
int64_t lp_now_ns(void);

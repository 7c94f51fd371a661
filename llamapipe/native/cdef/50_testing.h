// Entries that only tests and benchmarks call. Builds with testing=on have them (native_build/options.py).

uint64_t lp_log_dropped(void);  // log records overwritten before they were read

// ---- contexts
int64_t lp_context_scratch_bytes(lp_context * context);     // of the buffers that graphs are computed in
int64_t lp_context_ring_bytes(const lp_context * context);  // of the ring's buffer on the device

// ---- faults: the next launch, row count or copy of a pipeline fails with a code
enum lp_fault { LP_FAULT_NONE, LP_FAULT_LAUNCH, LP_FAULT_ROWS, LP_FAULT_COPY };
void lp_fail_next(lp_pipeline * pipeline, enum lp_fault fault, int code);

// ---- null pointers and divisions by zero, as code for a file that does not fit has them: what is said, if it is survived
// LP_CAUSE_C_LIBRARY: in the library of malloc. LP_CAUSE_ELSEWHERE: an address that is nobody's.
enum lp_cause { LP_CAUSE_NULL, LP_CAUSE_DIVISION, LP_CAUSE_C_LIBRARY, LP_CAUSE_ELSEWHERE };
const char * lp_cause_fault(enum lp_cause cause);

// ---- sampling
// lp_sample_rows from llama.cpp's own buffer, of a context without a pipeline; `rows` are entries of its last batch.
int  lp_sample_context(lp_context * context, int n_rows, const int32_t * rows, lp_sampler ** samplers, int32_t * tokens);
// A draw where only the n largest logits and some others are known, as on a device (see Row): 1, and nothing changed,
// where the whole row is needed.
int  lp_sampler_draw_partial(lp_sampler * s, int n, const float * ids, const float * logits, int n_others,
                             const float * other_ids, const float * other_logits, double log_sum_exp, int32_t * token);
bool lp_in_graph(lp_sampler * s);  // whether the graph can make its next draw
#define LP_GRAPH_RESULTS 8
// The sampling subgraph on given rows, float32 (n, n_vocab), without a model. Samplers, of vocabularies of that size, may be
// NULL and keep their uniform numbers. For each row LP_GRAPH_RESULTS numbers (see GraphResult): the token, its
// log-probability, the row's log-sum-exp, the most probable token, and the logits of LP_TARGETS targets, of which the first
// is given.
int  lp_graph_sample(ggml_backend_dev_t device, int n_vocab, int n, const float * logits, lp_sampler ** samplers,
                     const int32_t * targets, float * results, float * candidates);

// ---- products of weights with activations, as ggml's CPU backend computes them
// Weights as files have them, as ggml repacks them where it can, and packed for our kernels.
enum lp_weights_form { LP_WEIGHTS_OF_FILES, LP_WEIGHTS_OF_GGML, LP_WEIGHTS_PACKED };
typedef struct {
    enum ggml_type type;
    int64_t n_columns, n_rows, n_matrices;
    const void * weights;  // in the form of files
    enum lp_weights_form form;  // that the product reads
    bool is_ours;               // floats are multiplied by our loops
    bool varies;                // results may depend on the number of rows
    int64_t first_view_row, n_view_rows;  // of each matrix; 0: all
    int64_t x_stride, nx1, nx2;           // of activations: floats from row to row; rows of a matrix, or of a token; matrices or tokens
    const float * x;
    int n_used;           // matrices of each token
    const int32_t * ids;  // these (nx2, n_used), or NULL: a plain product, where matrices are repeated as often as necessary
    int n_threads, n_times;
    double * seconds;     // of each time, or NULL
} lp_product;
int lp_product_compute(const lp_product * product, float * out);
// Attention, as ggml's CPU backend computes it: queries float32 (n_streams, n_heads, n_rows, n_dims), keys and values
// (n_streams, n_cells, n_kv_heads, dimensions) as in a cache, masks float16 (n_streams, n_rows, n_cells) or NULL, sinks
// (n_heads) or NULL. The result is float32 (n_streams, n_rows, n_heads, n_value_dims).
typedef struct {
    int64_t n_streams, n_heads, n_kv_heads, n_rows, n_cells, n_dims, n_value_dims;
    enum ggml_type type;  // of keys and values
    const float * queries;
    const void * keys;
    const void * values;
    const uint16_t * masks;
    const float * sinks;
    float scale, max_bias, softcap;
    bool is_ours;
    int64_t * n_spared;  // if not NULL, cells that streams have in common are looked for, and this gets how many are not read again
    int n_threads, n_times;
    double * seconds;  // of each time, or NULL
} lp_attention;
int lp_attention_compute(const lp_attention * attention, float * out);
// Operations of linear layers, as llama.cpp's graphs have them. States are float32 (n_states, n_heads, n_rows, n_columns): those of
// n_seqs sequences, and of others whose places change, are gathered by n_ids indices, and afterwards those of sequence s are row
// first + s, or if n_kept earlier ones are kept, row k * n_states / n_kept + first + s has the one before k tokens. Inputs, float32:
//   delta net: queries and keys (n_seqs, n_tokens, n_groups, n_columns), values (n_seqs, n_tokens, n_heads, n_rows), gates and
//     betas (n_seqs, n_tokens, n_heads); the state is square;
//   scan: x (n_seqs, n_tokens, n_heads, n_rows), steps (n_seqs, n_tokens, n_heads), A (n_heads), B and C (n_seqs, n_tokens,
//     n_groups, n_columns);
//   wkv7: r, w, k, v, a, b (n_seqs, n_tokens, n_heads, n_columns); the state is square;
//   convolution: inputs of earlier tokens (n_seqs, n_rows, n_columns - 1), of these (n_seqs, n_tokens, n_rows), weights (n_rows,
//     n_columns); no states.
// The result is float32 (n_seqs, n_tokens, n_heads, n_rows).
enum lp_linear_kind { LP_DELTA_NET, LP_SCAN, LP_WKV7, LP_CONVOLUTION };
typedef struct {
    enum lp_linear_kind kind;
    int64_t n_seqs, n_tokens, n_heads, n_groups, n_rows, n_columns;
    int64_t n_states, n_kept, n_ids, first;
    float * states;
    const int32_t * ids;
    const float * inputs[6];
    bool is_ours;
    int n_threads, n_times;
    double * seconds;  // of each time, or NULL
} lp_linear;
int lp_linear_compute(const lp_linear * linear, float * out);
int lp_quantize(enum ggml_type type, int64_t n_rows, int64_t n_columns, const float * values, void * out);  // bytes
int lp_dequantize(enum ggml_type type, int64_t n, const void * quantized, float * out);

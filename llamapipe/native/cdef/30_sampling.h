// Sampling: a request's options and its sampler, as cffi reads them and src/native.h includes them.
//
// To add a sampler: give it a name and its options here and its stage in src/sampler_options.cpp; in Python, its options
// are rows of _sampling_table.py and fields of SamplingParams (params.py). CONTRIBUTING.md has the steps; a test compares
// the rows with this struct.

// Samplers that a request's order may name. Python: SAMPLER_ORDER, in lower case and without the prefix.
enum lp_sampler_name {
    LP_SAMPLER_PENALTIES,
    LP_SAMPLER_DRY,
    LP_SAMPLER_TOP_N_SIGMA,
    LP_SAMPLER_TOP_K,
    LP_SAMPLER_TYPICAL_P,
    LP_SAMPLER_TOP_P,
    LP_SAMPLER_MIN_P,
    LP_SAMPLER_XTC,
    LP_SAMPLER_TEMPERATURE,
    LP_SAMPLER_INFILL
};
#define LP_MAX_SAMPLERS 16

typedef struct lp_dry lp_dry;  // DRY's options with its sequence breakers looked up in a vocabulary, to be cloned
lp_dry * lp_dry_new(const struct llama_vocab * vocab, float multiplier, float base, int allowed_length, int last_n,
                    int n_breakers, const char ** breakers);
void lp_dry_free(lp_dry * dry);

// All options of a request. A field has the name, the meaning and the neutral value of the option of SamplingParams.
typedef struct {
    // ---- which tokens may be drawn, before any sampler
    int             n_biases;
    const int32_t * bias_tokens;
    const float *   biases;                   // minus infinity forbids a token
    int             n_allowed;
    const int32_t * allowed;                  // NULL: every token
    int             n_bad_words;
    const int32_t * bad_word_tokens;          // of all bad words, one after another
    const int32_t * bad_word_ends;            // where each of them ends
    int             min_tokens, n_end_tokens;
    const int32_t * end_tokens;               // forbidden until min_tokens were drawn
    const char *    grammar;                  // GBNF; NULL: none
    const char *    grammar_root;
    int             reasoning_budget;         // tokens between the markers of reasoning, then what closes it; -1: any number
    bool            reasoning_is_open;        // at the start of the answer
    const char *    reasoning_opens, * reasoning_ends;
    int             n_reasoning_close;
    const int32_t * reasoning_close;
    bool            needs_row, has_guide;     // Python looks at each row first; Python sets a mask before each draw

    // ---- samplers, in the order they are applied
    int             n_order;
    int             order[LP_MAX_SAMPLERS];   // of lp_sampler_name
    int             repeat_last_n;
    float           repeat_penalty, frequency_penalty, presence_penalty;
    const lp_dry *  dry;                      // NULL: as it was
    float           top_n_sigma;
    int             top_k;
    float           typical_p, top_p, min_p;
    float           xtc_probability, xtc_threshold;
    int             min_keep;                 // tokens that typical_p, top_p, min_p and xtc leave at least; 0: 1
    float           temperature, dynatemp_range, dynatemp_exponent;  // a temperature of 0 (or below 1e-6) is greedy
    bool            infill;
    int             mirostat;                 // 1 or 2 replaces all samplers but penalties, DRY and temperature
    float           mirostat_tau, mirostat_eta;
    float           adaptive_target, adaptive_decay;

    int             n_logprobs;               // of the n most probable tokens, too; -1: none at all
} lp_sampling_options;

lp_sampling_options lp_sampling_default_options(void);  // no sampler; every option neutral

typedef struct lp_sampler lp_sampler;
lp_sampler * lp_sampler_new(const struct llama_vocab * vocab, uint64_t seed, const lp_sampling_options * options);
void lp_sampler_free(lp_sampler * s);
// Takes other options. Keeps the generator's state and the accepted tokens; samplers with a state of their own start anew.
// On an error nothing is changed.
int  lp_sampler_configure(lp_sampler * s, const lp_sampling_options * options);
int  lp_sampler_set_mask(lp_sampler * s, const uint32_t * mask);  // a bit for each token, kept by the caller; NULL: none
int  lp_sampler_accept(lp_sampler * s, int n, const int32_t * tokens);          // tokens of the sequence
int  lp_sampler_accept_grammar(lp_sampler * s, int n, const int32_t * tokens);  // generated ones; refuses what it forbids
int  lp_sampler_accept_reasoning(lp_sampler * s, int n, const int32_t * tokens);  // generated ones, for its limit
int  lp_sampler_accept_drawn(lp_sampler * s, int n, const int32_t * tokens);    // all of these, and counts them
// Begins to guess the tokens that follow `text`: from what is predicted and, if `own`, from the text itself.
int  lp_sampler_watch(lp_sampler * s, int n_predicted, const int32_t * predicted, int n_text, const int32_t * text, bool own);
// Fills in at most n guessed tokens, and the share of such guesses that were right; returns how many.
int  lp_sampler_guess(const lp_sampler * s, int n, int32_t * tokens, double * share);
// How many of the tokens the grammar allows, one after the other; nothing is accepted.
int  lp_sampler_n_allowed(const lp_sampler * s, int n, const int32_t * tokens);
int  lp_sampler_reset(lp_sampler * s);  // forgets the accepted tokens; the generator continues from where it is
int  lp_sampler_draw(lp_sampler * s, const float * logits, int32_t * token);    // 0, LP_ERROR_LOGITS or LP_ERROR_MASK
// Records log-probabilities for lp_sampler_logprobs where the token was drawn from a changed row.
int  lp_sampler_note(lp_sampler * s, const float * logits, int32_t token);
// Of the draw of this number in the last call that drew, from 0: the token's log-probability, and how many of the most
// probable tokens are in `ids`. After a right guess one call draws several tokens.
int  lp_sampler_logprobs(const lp_sampler * s, int i_draw, int n_max, float * logprob, int32_t * ids, float * logprobs);

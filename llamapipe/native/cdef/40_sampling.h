// Samplers, as cffi reads them and src/native.h includes them.
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
int  lp_sampler_note(lp_sampler * s, const float * logits, int32_t token);   // for lp_sampler_logprobs, where it was drawn from another row
int  lp_sampler_logprobs(const lp_sampler * s, int n_max, float * logprob, int32_t * ids, float * logprobs);  // of the last draw: n
lp_dry * lp_dry_new(const struct llama_vocab * vocab, float multiplier, float base, int allowed_length, int last_n,
                    int n_breakers, const char ** breakers);
void lp_dry_free(lp_dry * dry);

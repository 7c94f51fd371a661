// Backends, models and vocabularies: llama.cpp's calls that allocate or throw, behind the guard.
#include "guard.hpp"

int lp_load_backends(const char * folder) {
    return lp::guard(LP_ERROR, [&] {
        ggml_backend_load_all_from_path(folder);
        return (int) ggml_backend_dev_count();
    });
}

llama_model * lp_model_load(const char * path, const llama_model_params * params) {
    lp::set_error("llama.cpp refused the file");
    return lp::guard((llama_model *) nullptr, [&] { return llama_model_load_from_file(path, *params); });
}

int lp_tokenize(const llama_vocab * vocab, const char * text, int n_bytes, int32_t * tokens, int n_max,
                bool add_special, bool parse_special) {
    return lp::guard(INT32_MIN, [&] {
        lp::set_error("more tokens than fit an int32");
        return (int) llama_tokenize(vocab, text, n_bytes, tokens, n_max, add_special, parse_special);
    });
}

int lp_detokenize(const llama_vocab * vocab, const int32_t * tokens, int n_tokens, char * text, int n_max,
                  bool remove_special, bool unparse_special) {
    return lp::guard(INT32_MIN, [&] {
        return (int) llama_detokenize(vocab, tokens, n_tokens, text, n_max, remove_special, unparse_special);
    });
}

int lp_piece(const llama_vocab * vocab, int32_t token, char * bytes, int n_max, bool special) {
    return lp::guard(INT32_MIN, [&] { return (int) llama_token_to_piece(vocab, token, bytes, n_max, 0, special); });
}

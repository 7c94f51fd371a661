// Backends, models and vocabularies: llama.cpp's calls that allocate or throw, inside the guard.
#include "faults.hpp"
#include "system.hpp"
#include "weight_buffer.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace {

// Some vocabularies split text with std::regex, which recurses once for each character of a run. We measured about 320 bytes
// of stack per character: a thread's usual 8 MiB overflow (SIGSEGV) at 26,000 characters.
constexpr int    kShortText     = 4096;
constexpr size_t kBytesEachChar = 1024;
constexpr size_t kBytesAtLeast  = 16u << 20;

struct TokenizeJob {
    const llama_vocab *vocab;
    const char        *text;
    int                n_bytes;
    int32_t           *tokens;
    int                n_max;
    bool               add_special, parse_special;
    int                result;
    std::string        error;

    void run() {
        result = lp::guard(INT32_MIN, [&] {
            lp::set_error("more tokens than fit an int32");
            return llama_tokenize(vocab, text, n_bytes, tokens, n_max, add_special, parse_special);
        });
    }
};

void tokenize_on_thread(void *data) {
    auto *job = static_cast<TokenizeJob *>(data);
    job->run();
    lp::guard(0, [&] {
        job->error = lp_last_error();
        return 0;
    });
}

}  // namespace

int lp_load_backends(const char *folder) {
    return lp::guard(LP_ERROR, [&] {
        lp::watch_assertions();
        ggml_backend_load_all_from_path(folder);
        lp::kernels::install();
        return ggml_backend_dev_count();
    });
}

bool lp_load_backend(const char *path) {
    lp::set_error("llama.cpp refused the module");
    return lp::guard(false, [&] {
        lp::watch_assertions();
        return ggml_backend_load(path) != nullptr;
    });
}

const char *lp_kernels_level(void) {
    return lp::guard(nullptr, [] { return lp::kernels::level(); });
}

bool lp_kernels_attend(void) {
    return lp::guard(false, [] { return lp::kernels::attends(); });
}

const char *lp_kernels_problem(void) {
    return lp::guard("there is no memory", [] { return lp::kernels::install(); });
}

bool lp_kernels_have(enum ggml_type type, int64_t n_columns, int64_t n_rows) {
    return lp::guard(false, [&] { return lp::kernels::have(type, n_columns, n_rows); });
}

llama_model *lp_model_load(const char *path, const llama_model_params *params, lp_packing *packing) {
    lp::set_error("llama.cpp refused the file");
    return lp::guard(nullptr, [&] {
        lp::kernels::Packing packed;
        if (packing) {
            packed.n_threads = packing->n_threads;
            packed.file      = { packing->fd, packing->offset, packing->n_in_file, packing->layout_in_file };
        }
        lp::kernels::PackingScope scope(packing ? &packed : nullptr);
        const lp::AssertionsThrow throwing;
        llama_model              *model = lp::without_faults(nullptr, [&] { return llama_model_load_from_file(path, *params); });
        if (packing) {
            packing->n_tensors = packed.n_tensors;
            packing->n_bytes   = packed.n_bytes;
            packing->data      = model ? packed.data : nullptr;
            packing->n_data    = packed.n_data;
            packing->layout    = packed.layout;
            packing->is_mapped = packed.is_mapped;
        }
        return model;
    });
}

bool lp_packing_map(lp_packing *packing, int fd, int64_t offset) {
    return lp::guard(false, [&] {
        const lp::AssertionsThrow throwing;
        packing->is_mapped = lp::kernels::map_file(packing->data, packing->n_data, fd, offset);
        return packing->is_mapped;
    });
}

int lp_tokenize(const llama_vocab *vocab, const char *text, int n_bytes, int32_t *tokens, int n_max, bool add_special,
                bool parse_special) {
    TokenizeJob job = { vocab, text, n_bytes, tokens, n_max, add_special, parse_special, INT32_MIN, "" };
    if (n_bytes <= kShortText) {
        job.run();
        return job.result;
    }
    const size_t n_stack = kBytesAtLeast + kBytesEachChar * n_bytes;
    const bool   started = lp::system::run_with_stack(n_stack, tokenize_on_thread, &job);
    if (!started) {
        lp::set_error("no thread with a stack for a text of this length could be started; split the text");
        return INT32_MIN;
    }
    lp::set_error(job.error.c_str());
    return job.result;
}

int lp_detokenize(const llama_vocab *vocab, const int32_t *tokens, int n_tokens, char *text, int n_max, bool remove_special,
                  bool unparse_special) {
    return lp::guard(INT32_MIN,
                     [&] { return llama_detokenize(vocab, tokens, n_tokens, text, n_max, remove_special, unparse_special); });
}

int lp_pieces(const llama_vocab *vocab, int32_t first, int n, char *bytes, int n_max, int32_t *ends) {
    return lp::guard(INT32_MIN, [&] {
        int64_t end = 0;
        for (int i = 0; i < n; i++) {
            const int room = static_cast<int>(std::max<int64_t>(n_max - end, 0));
            const int size = llama_token_to_piece(vocab, first + i, bytes + (room ? end : 0), room, 0, false);
            end += std::abs(int64_t{ size });  // negative: the size it needs
            ends[i] = static_cast<int32_t>(end);
        }
        if (end > INT32_MAX) {
            throw std::length_error("pieces of over 2 GiB");
        }
        return static_cast<int>(end <= n_max ? end : -end);
    });
}

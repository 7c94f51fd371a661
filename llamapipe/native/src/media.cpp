// Images and sounds, through llama.cpp's libmtmd: the one file that knows it. Its library is opened by the first call here.
//
// libmtmd's header calls itself experimental, so nothing of it is in the headers that Python reads. It has some hundreds of
// assertions: while a file is read and an image prepared, each becomes an error.
#include "faults.hpp"
#include "ggml-backend-impl.h"
#include "mtmd.h"
#include "system.hpp"
#include "weight_buffer.hpp"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace {

// libmtmd's functions.
struct Library {
    void *handle = nullptr;

    explicit Library(const char *path) : handle(lp::system::open_library(path)) {}

#define LP_FUNCTION(name) decltype(&::mtmd_##name) name = find<decltype(&::mtmd_##name)>("mtmd_" #name)
    LP_FUNCTION(log_set);
    LP_FUNCTION(context_params_default);
    LP_FUNCTION(init_from_file);
    LP_FUNCTION(free);
    LP_FUNCTION(support_vision);
    LP_FUNCTION(support_audio);
    LP_FUNCTION(get_audio_sample_rate);
    LP_FUNCTION(decode_use_non_causal);
    LP_FUNCTION(bitmap_init);
    LP_FUNCTION(bitmap_init_from_audio);
    LP_FUNCTION(bitmap_free);
    LP_FUNCTION(input_chunks_init);
    LP_FUNCTION(input_chunks_free);
    LP_FUNCTION(input_chunks_size);
    LP_FUNCTION(input_chunks_get);
    LP_FUNCTION(input_chunk_get_type);
    LP_FUNCTION(input_chunk_get_tokens_text);
    LP_FUNCTION(input_chunk_get_n_tokens);
    LP_FUNCTION(input_chunk_get_n_pos);
    LP_FUNCTION(input_chunk_get_tokens_image);
    LP_FUNCTION(image_tokens_get_decoder_pos);
    LP_FUNCTION(tokenize_from_parts);
    LP_FUNCTION(encode_chunk);
    LP_FUNCTION(get_output_embd);
#undef LP_FUNCTION

private:
    template <typename Function> Function find(const char *name) {
        auto *const found = reinterpret_cast<Function>(lp::system::find_function(handle, name));
        if (found == nullptr) {
            throw std::runtime_error(std::string("libmtmd has no function ") + name);
        }
        return found;
    }
};

const Library &library(const char *path = nullptr) {
    static std::mutex               mutex;
    static std::unique_ptr<Library> opened;
    const std::lock_guard           lock(mutex);
    if (!opened) {
        opened                 = std::make_unique<Library>(path);
        ggml_log_callback log  = nullptr;
        void             *data = nullptr;
        llama_log_get(&log, &data);
        opened->log_set(log, data);
    }
    return *opened;
}

// libmtmd's threads are those that its context was made with. Before each graph it asks the CPU backend for the function that
// sets them: while this thread encodes, that is ours.
thread_local int             t_n_threads                    = 0;
ggml_backend_set_n_threads_t set_n_threads                  = nullptr;
void *(*get_proc_address)(ggml_backend_reg_t, const char *) = nullptr;

void set_chosen(ggml_backend_t backend, int n_threads) { set_n_threads(backend, t_n_threads > 0 ? t_n_threads : n_threads); }

void *get_proc_or_ours(ggml_backend_reg_t reg, const char *name) {
    const bool is_ours = t_n_threads > 0 && strcmp(name, "ggml_backend_set_n_threads") == 0;
    return is_ours ? reinterpret_cast<void *>(set_chosen) : get_proc_address(reg, name);
}

// Where the backend is another one than we know, libmtmd keeps its one thread.
void let_threads_be_chosen() {
    static std::once_flag once;
    std::call_once(once, [] {
        const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        const ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : nullptr;
        if (!reg || reg->api_version != GGML_BACKEND_API_VERSION || !reg->iface.get_proc_address) {
            return;
        }
        get_proc_address = reg->iface.get_proc_address;
        set_n_threads    = reinterpret_cast<ggml_backend_set_n_threads_t>(get_proc_address(reg, "ggml_backend_set_n_threads"));
        if (set_n_threads) {
            __atomic_store_n(&reg->iface.get_proc_address, &get_proc_or_ours, __ATOMIC_RELEASE);  // another model may load now
        }
    });
}

struct ThreadsScope {
    explicit ThreadsScope(int n_threads) { t_n_threads = n_threads; }
    ~ThreadsScope() { t_n_threads = 0; }
};

}  // namespace

struct lp_media {
    mtmd_context     *ctx;
    size_t            n_embd;             // of a row
    bool              has_kernels;        // attention and products of floats are computed by ours
    std::mutex        mutex;              // one encodes at a time
    bool              is_broken = false;  // an assertion failed while it computed: its scheduler is left half changed
    std::atomic<bool> is_left{ false };  // by a long jump: neither used nor freed any more
};

struct lp_media_chunks {
    mtmd_input_chunks *chunks;
};

lp_media *lp_media_open(const char *path_of_library, const char *path, const llama_model *model, bool use_gpu, bool has_kernels,
                        int image_min_tokens, int image_max_tokens) {
    return lp::guard(nullptr, [&]() -> lp_media * {
        const Library            &mtmd = library(path_of_library);
        const lp::AssertionsThrow throwing;
        mtmd_context_params       params = mtmd.context_params_default();
        let_threads_be_chosen();
        params.use_gpu          = use_gpu;
        params.n_threads        = 1;  // each encoding chooses its own
        params.print_timings    = false;
        params.warmup           = false;
        params.image_min_tokens = image_min_tokens;
        params.image_max_tokens = image_max_tokens;
        mtmd_context *const ctx = lp::without_faults(nullptr, [&] { return mtmd.init_from_file(path, model, params); });
        if (ctx == nullptr) {
            return nullptr;
        }
        auto *made        = new lp_media{};
        made->ctx         = ctx;
        made->n_embd      = llama_model_n_embd_inp(model);
        made->has_kernels = has_kernels;
        return made;
    });
}

void lp_media_close(lp_media *media) {
    if (media != nullptr) {
        if (!media->is_broken && !media->is_left) {  // else its scheduler may point to memory that was freed
            library().free(media->ctx);
        }
        delete media;
    }
}

bool lp_media_sees(const lp_media *media) { return library().support_vision(media->ctx); }

int lp_media_sample_rate(const lp_media *media) { return library().get_audio_sample_rate(media->ctx); }

// The chunks of one bitmap, which is freed.
static lp_media_chunks *chunks_of(lp_media *media, mtmd_bitmap *bitmap) {
    const Library                                                       &mtmd = library();
    const std::unique_ptr<mtmd_bitmap, decltype(mtmd.bitmap_free)>       owned(bitmap, mtmd.bitmap_free);
    std::unique_ptr<mtmd_input_chunks, decltype(mtmd.input_chunks_free)> chunks(mtmd.input_chunks_init(), mtmd.input_chunks_free);
    const mtmd_input_part                                                part  = { nullptr, bitmap };
    const mtmd_input_part                                               *parts = &part;
    int                                                                  code  = -1;
    try {
        code = lp::without_faults(-1, [&] { return mtmd.tokenize_from_parts(media->ctx, chunks.get(), &parts, 1, false); });
    } catch (...) {  // left by a long jump: what is half made is never used again
        (void)chunks.release();
        media->is_left = true;
        throw;
    }
    if (code != 0) {
        lp::set_error("libmtmd refused it; the log llamapipe.native says why");
        return nullptr;
    }
    auto *made = new lp_media_chunks{ chunks.get() };
    (void)chunks.release();
    return made;
}

lp_media_chunks *lp_media_image(lp_media *media, int width, int height, const uint8_t *rgb) {
    return lp::guard(nullptr, [&] {
        const lp::AssertionsThrow throwing;
        return chunks_of(media, library().bitmap_init(width, height, rgb));
    });
}

lp_media_chunks *lp_media_sound(lp_media *media, int64_t n, const float *samples) {
    return lp::guard(nullptr, [&] {
        const lp::AssertionsThrow throwing;
        return chunks_of(media, library().bitmap_init_from_audio(n, samples));
    });
}

void lp_media_chunks_free(lp_media_chunks *chunks) {
    if (chunks != nullptr) {
        library().input_chunks_free(chunks->chunks);
        delete chunks;
    }
}

int lp_media_n_chunks(const lp_media_chunks *chunks) { return static_cast<int>(library().input_chunks_size(chunks->chunks)); }

int lp_media_chunk(const lp_media *media, const lp_media_chunks *chunks, int i, lp_media_part *part) {
    return lp::guard(LP_ERROR, [&] {
        const Library          &mtmd   = library();
        const mtmd_input_chunk *chunk  = mtmd.input_chunks_get(chunks->chunks, i);
        size_t                  n      = 0;
        part->is_text                  = mtmd.input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_TEXT;
        part->tokens                   = part->is_text ? mtmd.input_chunk_get_tokens_text(chunk, &n) : nullptr;
        part->n_tokens                 = static_cast<int>(mtmd.input_chunk_get_n_tokens(chunk));
        part->n_positions              = static_cast<int>(mtmd.input_chunk_get_n_pos(chunk));
        part->is_causal                = part->is_text || !mtmd.decode_use_non_causal(media->ctx, chunk);
        part->has_grid                 = false;
        const mtmd_image_tokens *image = mtmd.input_chunk_get_tokens_image(chunk);
        if (image != nullptr && part->n_tokens > 1) {
            const mtmd_decoder_pos second = mtmd.image_tokens_get_decoder_pos(image, 0, 1);
            part->has_grid                = second.t == 0;
            if (second.t > 0 && (second.x != second.t || second.y != second.t)) {
                throw std::runtime_error("its rows have positions of a kind that llamapipe does not know");
            }
        }
        return 0;
    });
}

int lp_media_grid(const lp_media_chunks *chunks, int i, int32_t *grid) {
    return lp::guard(LP_ERROR, [&] {
        const Library           &mtmd   = library();
        const mtmd_input_chunk  *chunk  = mtmd.input_chunks_get(chunks->chunks, i);
        const mtmd_image_tokens *tokens = mtmd.input_chunk_get_tokens_image(chunk);
        for (size_t row = 0; row < mtmd.input_chunk_get_n_tokens(chunk); row++) {
            const mtmd_decoder_pos at = mtmd.image_tokens_get_decoder_pos(tokens, 0, row);
            grid[2 * row]             = static_cast<int32_t>(at.y);
            grid[2 * row + 1]         = static_cast<int32_t>(at.x);
        }
        return 0;
    });
}

int lp_media_encode(lp_media *media, const lp_media_chunks *chunks, int i, int n_threads, float *rows) {
    return lp::guard(LP_ERROR, [&]() -> int {
        const Library        &mtmd = library();
        const std::lock_guard lock(media->mutex);
        if (media->is_broken || media->is_left) {
            lp::set_error("libmtmd failed inside an earlier image or sound; load the model again");
            return LP_ERROR;
        }
        const lp::DecodeAssertionsThrow throwing;
        const mtmd_input_chunk         *chunk = mtmd.input_chunks_get(chunks->chunks, i);
        lp::set_error("libmtmd could not encode it; the log llamapipe.native says why");
        const ThreadsScope              threads(n_threads);
        const lp::kernels::ComputeScope scope(media->has_kernels, media->has_kernels, false, nullptr, nullptr);
        media->is_broken = true;  // should it be left by a long jump
        const int code   = lp::without_faults(-1, [&] { return mtmd.encode_chunk(media->ctx, chunk); });
        media->is_broken = throwing.happened();
        if (code != 0) {
            return LP_ERROR;
        }
        memcpy(rows, mtmd.get_output_embd(media->ctx), sizeof(float) * media->n_embd * mtmd.input_chunk_get_n_tokens(chunk));
        return 0;
    });
}

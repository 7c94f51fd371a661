// What only tests and benchmarks call: the sampling graph, products and attention on given numbers, without a model.
#ifdef LP_TESTING

#include "faults.hpp"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "graph_sampler.hpp"
#include "handles.hpp"
#include "sampler.hpp"
#include "shared_cells.hpp"
#include "weight_buffer.hpp"

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>

namespace lp::ggml_objects {

template <auto release> struct Free {
    template <typename T> void operator()(T *t) const { release(t); }
};
using Context = std::unique_ptr<ggml_context, Free<ggml_free>>;
using Backend = std::unique_ptr<ggml_backend, Free<ggml_backend_free>>;
using Buffer  = std::unique_ptr<ggml_backend_buffer, Free<ggml_backend_buffer_free>>;
using Memory  = std::unique_ptr<ggml_gallocr, Free<ggml_gallocr_free>>;

// What was made. Throws std::runtime_error where it is null.
template <typename T> T made(T thing, const char *what) {
    if (!thing) {
        throw std::runtime_error(what);
    }
    return thing;
}

}  // namespace lp::ggml_objects

// ---- runs the sampling subgraph on given rows, without a model: for tests and benchmarks
using namespace lp::ggml_objects;

namespace {

static_assert(sizeof(lp::GraphResult) == LP_GRAPH_RESULTS * sizeof(float));

void compute(ggml_backend_dev_t device, int n_vocab, int n, const float *logits, const lp::GraphRow *rows,
             lp::GraphResult *results, float *candidates) {
    lp::GraphSampler sampler(n_vocab);
    if (!sampler.probe(device)) {
        throw std::runtime_error(sampler.problem());
    }
    const size_t  n_bytes = ggml_tensor_overhead() * 128 + ggml_graph_overhead();
    const Context kept(made(ggml_init({ ggml_tensor_overhead() * 4, nullptr, true }), "there is no memory"));
    const Context context(made(ggml_init({ n_bytes, nullptr, true }), "there is no memory"));
    const Backend backend(made(ggml_backend_dev_init(device, nullptr), "the device cannot be used"));
    const auto    buft = ggml_backend_get_default_buffer_type(backend.get());
    // One thread: several wait for each other at every node, which is slower on few or busy cores.
    const auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    if (set_n_threads) {
        set_n_threads(backend.get(), 1);
    }
    sampler.declare(kept.get(), n);
    const Buffer buffer(made(ggml_backend_alloc_ctx_tensors_from_buft(kept.get(), buft), "there is no memory"));
    sampler.fill();

    ggml_tensor *z     = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, n_vocab, n);
    ggml_tensor *index = ggml_new_tensor_1d(context.get(), GGML_TYPE_I64, n);
    ggml_set_input(z);
    ggml_set_input(index);
    ggml_cgraph *graph = ggml_new_graph(context.get());
    sampler.build(context.get(), graph, z, index);
    const Memory memory(made(ggml_gallocr_new(buft), "there is no memory"));
    if (!ggml_gallocr_alloc_graph(memory.get(), graph)) {
        throw std::runtime_error("there is no memory");
    }
    std::vector<int64_t> places(n);
    std::iota(places.begin(), places.end(), 0);
    ggml_backend_tensor_set(z, logits, 0, sizeof(float) * n * n_vocab);
    ggml_backend_tensor_set(index, places.data(), 0, sizeof(int64_t) * n);
    sampler.set_input(rows);
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("the device failed to compute");
    }
    ggml_backend_tensor_get(sampler.results(), results, 0, sizeof(lp::GraphResult) * n);
    ggml_backend_tensor_get(sampler.candidates(), candidates, 0, ggml_nbytes(sampler.candidates()));
}

}  // namespace

int lp_graph_sample(ggml_backend_dev_t device, int n_vocab, int n, const float *logits, lp_sampler **samplers,
                    const int32_t *targets, float *results, float *candidates) {
    return lp::guard(LP_ERROR, [&] {
        std::vector<lp::GraphRow> rows(n);
        for (size_t i = 0; i < static_cast<size_t>(n); i++) {
            if (samplers[i] && !lp::in_graph(samplers[i], &rows[i])) {
                throw std::runtime_error("the graph cannot do what this sampler does");
            }
            rows[i].targets[0] = static_cast<float>(targets[i]);
        }
        compute(device, n_vocab, n, logits, rows.data(), reinterpret_cast<lp::GraphResult *>(results), candidates);
        return 0;
    });
}

// ---- computes products and attention through ggml, without a model: for tests and benchmarks
using namespace lp::ggml_objects;

namespace {

using Type = ggml_backend_buffer_type_t;

// Whether ggml multiplies weights in such a buffer, asked as llama.cpp asks it.
bool multiplies(ggml_backend_dev_t cpu, Type type, const lp_product &p) {
    const Context context(made(ggml_init({ ggml_tensor_overhead() * 4, nullptr, true }), "there is no memory"));
    ggml_tensor  *w = ggml_new_tensor_2d(context.get(), p.type, p.n_columns, p.n_rows);
    ggml_tensor  *y = ggml_mul_mat(context.get(), w, ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, p.n_columns, p.nx1));
    const Buffer  empty(made(ggml_backend_buft_alloc_buffer(type, 0), "there is no memory"));
    w->buffer      = empty.get();
    const bool can = ggml_backend_dev_supports_op(cpu, y);
    w->buffer      = nullptr;
    return can;
}

Type buffer_type(ggml_backend_dev_t cpu, const lp_product &p) {
    if (p.form == LP_WEIGHTS_OF_FILES) {
        return ggml_backend_dev_buffer_type(cpu);
    }
    const auto listed = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    for (Type *types = listed(cpu); *types; types++) {
        const bool is_ours = strcmp(ggml_backend_buft_name(*types), "CPU_LLAMAPIPE") == 0;
        if (is_ours == (p.form == LP_WEIGHTS_PACKED) && (is_ours || multiplies(cpu, *types, p))) {
            return *types;
        }
    }
    if (p.form == LP_WEIGHTS_PACKED) {
        throw std::runtime_error("there are no kernels");
    }
    return ggml_backend_dev_buffer_type(cpu);
}

Backend backend_with(ggml_backend_dev_t cpu, int n_threads) {
    Backend    backend(made(ggml_backend_dev_init(cpu, nullptr), "the device cannot be used"));
    const auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_set_n_threads"));
    set_n_threads(backend.get(), n_threads);
    return backend;
}

// Computes a graph some times, and writes down how long each took.
void compute(const Backend &backend, ggml_cgraph *graph, bool is_ours, int n_times, double *seconds,
             lp::kernels::SharedCells *shares = nullptr, bool varies = false) {
    const lp::kernels::ComputeScope scope(is_ours, is_ours, varies, nullptr, shares);
    for (int i = 0; i < n_times; i++) {
        const auto start = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the device failed to compute");
        }
        if (seconds) {
            seconds[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        }
    }
}

void compute(const lp_product &p, float *out) {
    ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const Backend      backend = backend_with(cpu, p.n_threads);

    const size_t  n_bytes = ggml_tensor_overhead() * 16 + ggml_graph_overhead();
    const Context kept(made(ggml_init({ n_bytes, nullptr, true }), "there is no memory"));
    const Context context(made(ggml_init({ n_bytes, nullptr, true }), "there is no memory"));
    ggml_tensor  *w = ggml_new_tensor_3d(kept.get(), p.type, p.n_columns, p.n_rows, p.n_matrices);
    const Buffer  weights(made(ggml_backend_alloc_ctx_tensors_from_buft(kept.get(), buffer_type(cpu, p)), "no memory"));
    {
        const lp::AssertionsThrow throwing;
        ggml_backend_tensor_set(w, p.weights, 0, ggml_nbytes(w));
    }

    // Rows of activations that are further apart than they are long.
    ggml_tensor *all = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, p.x_stride, p.nx1, p.nx2);
    ggml_tensor *x   = ggml_view_3d(context.get(), all, p.n_columns, p.nx1, p.nx2, all->nb[1], all->nb[2], 0);
    ggml_tensor *ids = p.ids ? ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, p.n_used, p.nx2) : nullptr;
    if (p.n_view_rows) {
        w = ggml_view_3d(context.get(), w, p.n_columns, p.n_view_rows, p.n_matrices, w->nb[1], w->nb[2],
                         p.first_view_row * w->nb[1]);
    }
    ggml_tensor *y     = ids ? ggml_mul_mat_id(context.get(), w, x, ids) : ggml_mul_mat(context.get(), w, x);
    ggml_cgraph *graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, y);
    const Buffer memory(
            made(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(cpu)), "no memory"));
    if (!ggml_backend_dev_supports_op(cpu, y)) {
        throw std::runtime_error("the CPU refuses the product");
    }
    ggml_backend_tensor_set(all, p.x, 0, ggml_nbytes(all));
    if (ids) {
        ggml_backend_tensor_set(ids, p.ids, 0, ggml_nbytes(ids));
    }
    compute(backend, graph, p.is_ours, p.n_times, p.seconds, nullptr, p.varies);
    ggml_backend_tensor_get(y, out, 0, ggml_nbytes(y));
}

void compute(const lp_attention &a, float *out) {
    ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const Backend      backend = backend_with(cpu, a.n_threads);
    if (a.is_ours && lp::kernels::install()) {
        throw std::runtime_error("there are no kernels");
    }

    const Context context(
            made(ggml_init({ ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true }), "there is no memory"));
    const auto tensor = [&](ggml_type type, int64_t n0, int64_t n1, int64_t n2) {
        return ggml_new_tensor_4d(context.get(), type, n0, n1, n2, a.n_streams);
    };
    // As in llama.cpp's caches.
    const auto cache = [&](const char *name, int64_t n_dims) {
        ggml_tensor *all =
                ggml_set_name(ggml_new_tensor_3d(context.get(), a.type, n_dims * a.n_kv_heads, a.n_cells, a.n_streams), name);
        return ggml_view_4d(context.get(), all, n_dims, a.n_kv_heads, a.n_cells, a.n_streams, ggml_row_size(a.type, n_dims),
                            all->nb[1], all->nb[2], 0);
    };
    ggml_tensor *q     = tensor(GGML_TYPE_F32, a.n_dims, a.n_rows, a.n_heads);
    ggml_tensor *k     = cache("cache_k_l0", a.n_dims);
    ggml_tensor *v     = cache("cache_v_l0", a.n_value_dims);
    ggml_tensor *mask  = a.masks ? tensor(GGML_TYPE_F16, a.n_cells, a.n_rows, 1) : nullptr;
    ggml_tensor *sinks = a.sinks ? ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, a.n_heads) : nullptr;
    ggml_tensor *y     = ggml_flash_attn_ext(context.get(), q, ggml_permute(context.get(), k, 0, 2, 1, 3),
                                             ggml_permute(context.get(), v, 0, 2, 1, 3), mask, a.scale, a.max_bias, a.softcap);
    ggml_flash_attn_ext_add_sinks(y, sinks);
    ggml_cgraph *graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, y);
    const Buffer memory(
            made(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(cpu)), "no memory"));
    ggml_backend_tensor_set(q, a.queries, 0, ggml_nbytes(q));
    ggml_backend_tensor_set(k, a.keys, 0, ggml_nbytes(k));
    ggml_backend_tensor_set(v, a.values, 0, ggml_nbytes(v));
    if (mask) {
        ggml_backend_tensor_set(mask, a.masks, 0, ggml_nbytes(mask));
    }
    if (sinks) {
        ggml_backend_tensor_set(sinks, a.sinks, 0, ggml_nbytes(sinks));
    }
    lp::kernels::SharedCells shares(static_cast<int>(a.n_streams), 1);
    compute(backend, graph, a.is_ours, a.n_times, a.seconds, a.n_spared ? &shares : nullptr);
    if (a.n_spared) {
        *a.n_spared = shares.n_spared;
    }
    ggml_backend_tensor_get(y, out, 0, ggml_nbytes(y));
}

// A linear operation in a graph like llama.cpp's.
class LinearGraph {
public:
    explicit LinearGraph(const lp_linear &linear)
        : l_(linear),
          context_(made(ggml_init({ ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true }), "no memory")) {}

    void compute(float *out) {
        ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        const Backend      backend = backend_with(cpu, l_.n_threads);
        if (l_.is_ours && lp::kernels::install()) {
            throw std::runtime_error("there are no kernels");
        }
        ggml_cgraph *graph = ggml_new_graph(context());
        ggml_tensor *y     = l_.kind == LP_CONVOLUTION ? convolution() : with_states(graph);
        ggml_build_forward_expand(graph, y);
        const Buffer memory(
                made(ggml_backend_alloc_ctx_tensors_from_buft(context(), ggml_backend_dev_buffer_type(cpu)), "no memory"));
        for (const auto &[tensor, from] : inputs_) {
            ggml_backend_tensor_set(tensor, from, 0, ggml_nbytes(tensor));
        }
        ::compute(backend, graph, l_.is_ours, l_.n_times, l_.seconds);
        const int64_t n = l_.n_rows * l_.n_heads * l_.n_tokens * l_.n_seqs;
        ggml_backend_tensor_get(y, out, 0, n * sizeof(float));
        if (states_) {
            ggml_backend_tensor_get(states_, l_.states, 0, ggml_nbytes(states_));
        }
    }

private:
    ggml_context *context() const { return context_.get(); }

    ggml_tensor *input(const void *from, ggml_type type, int64_t n0, int64_t n1 = 1, int64_t n2 = 1, int64_t n3 = 1) {
        ggml_tensor *tensor = ggml_new_tensor_4d(context(), type, n0, n1, n2, n3);
        inputs_.emplace_back(tensor, from);
        return tensor;
    }

    // Input i of n1 vectors of n0 a token.
    ggml_tensor *input(int i, int64_t n0, int64_t n1) {
        return input(l_.inputs[i], GGML_TYPE_F32, n0, n1, l_.n_tokens, l_.n_seqs);
    }

    ggml_tensor *convolution() {
        ggml_tensor *old    = input(l_.inputs[0], GGML_TYPE_F32, l_.n_columns - 1, l_.n_rows, l_.n_seqs);
        ggml_tensor *tokens = input(l_.inputs[1], GGML_TYPE_F32, l_.n_rows, l_.n_tokens, l_.n_seqs);
        ggml_tensor *all    = ggml_concat(context(), old, ggml_transpose(context(), tokens), 0);
        return ggml_ssm_conv(context(), all, input(l_.inputs[2], GGML_TYPE_F32, l_.n_columns, l_.n_rows));
    }

    ggml_tensor *with_states(ggml_cgraph *graph) {
        const int64_t n_state   = l_.n_heads * l_.n_rows * l_.n_columns,
                      n_results = l_.n_rows * l_.n_heads * l_.n_tokens * l_.n_seqs;
        states_                 = input(l_.states, GGML_TYPE_F32, n_state, l_.n_states);
        ggml_tensor *rows       = ggml_reshape_2d(context(), states_, n_state, l_.n_states);
        ggml_tensor *ids        = input(l_.ids, GGML_TYPE_I32, l_.n_ids);
        const bool   is_scan    = l_.kind == LP_SCAN;
        // The scan gathers only states of others.
        const int64_t first_gathered = is_scan ? 1 : 0, n_gathered = l_.n_ids - first_gathered;
        ggml_tensor  *which = ggml_view_1d(context(), ids, n_gathered, first_gathered * ids->nb[0]);
        ggml_tensor  *all   = ggml_get_rows(context(), rows, which);
        ggml_tensor  *y     = is_scan ? scan(rows, ids) : apply(ggml_view_2d(context(), all, n_state, l_.n_seqs, all->nb[1], 0));
        ggml_build_forward_expand(graph, y);
        const int64_t n_others = l_.n_ids - l_.n_seqs;
        ggml_tensor  *others =
                ggml_view_2d(context(), all, n_state, n_others, all->nb[1], (l_.n_seqs - first_gathered) * all->nb[1]);
        ggml_build_forward_expand(graph, ggml_cpy(context(), others,
                                                  ggml_view_2d(context(), states_, n_state, n_others, states_->nb[1],
                                                               (l_.first + l_.n_seqs) * states_->nb[1])));
        const int64_t n_written = std::min(l_.n_kept, l_.n_tokens), group = l_.n_states / l_.n_kept;
        const size_t  row = states_->nb[1];
        ggml_tensor  *from =
                ggml_view_3d(context(), y, n_state, l_.n_seqs, n_written, row, row * l_.n_seqs, n_results * sizeof(float));
        ggml_tensor *to = ggml_view_3d(context(), states_, n_state, l_.n_seqs, n_written, row, row * group, row * l_.first);
        ggml_build_forward_expand(graph, ggml_cpy(context(), from, to));
        return y;
    }

    ggml_tensor *apply(ggml_tensor *states) {
        const int64_t n = l_.n_rows, n_tokens = l_.n_tokens * l_.n_seqs;
        if (l_.kind == LP_WKV7) {
            ggml_tensor *in[6];
            for (int i = 0; i < 6; i++) {
                in[i] = input(l_.inputs[i], GGML_TYPE_F32, n, l_.n_heads, n_tokens);
            }
            return ggml_rwkv_wkv7(context(), in[0], in[1], in[2], in[3], in[4], in[5], states);
        }
        ggml_tensor *q = input(0, n, l_.n_groups), *k = input(1, n, l_.n_groups), *v = input(2, n, l_.n_heads);
        ggml_tensor *gates = input(3, 1, l_.n_heads * 1), *betas = input(4, 1, l_.n_heads);
        return ggml_gated_delta_net(context(), q, k, v, gates, betas,
                                    ggml_reshape_4d(context(), states, n, n, l_.n_heads, l_.n_seqs), l_.n_kept);
    }

    ggml_tensor *scan(ggml_tensor *rows, ggml_tensor *ids) {
        ggml_tensor *states = ggml_reshape_4d(context(), rows, l_.n_columns, l_.n_rows, l_.n_heads, l_.n_states);
        ggml_tensor *x      = input(0, l_.n_rows, l_.n_heads);
        ggml_tensor *steps  = input(l_.inputs[1], GGML_TYPE_F32, l_.n_heads, l_.n_tokens, l_.n_seqs);
        ggml_tensor *a      = input(l_.inputs[2], GGML_TYPE_F32, 1, l_.n_heads);
        ggml_tensor *b = input(3, l_.n_columns, l_.n_groups), *c = input(4, l_.n_columns, l_.n_groups);
        return ggml_ssm_scan(context(), states, x, steps, a, b, c, ggml_view_1d(context(), ids, l_.n_seqs, 0), l_.n_kept);
    }

    const lp_linear                                    &l_;
    const Context                                       context_;
    std::vector<std::pair<ggml_tensor *, const void *>> inputs_;
    ggml_tensor                                        *states_ = nullptr;
};

}  // namespace

int lp_product_compute(const lp_product *product, float *out) {
    return lp::guard(LP_ERROR, [&] {
        compute(*product, out);
        return 0;
    });
}

int lp_attention_compute(const lp_attention *attention, float *out) {
    return lp::guard(LP_ERROR, [&] {
        compute(*attention, out);
        return 0;
    });
}

int lp_linear_compute(const lp_linear *linear, float *out) {
    return lp::guard(LP_ERROR, [&] {
        LinearGraph(*linear).compute(out);
        return 0;
    });
}

int lp_quantize(enum ggml_type type, int64_t n_rows, int64_t n_columns, const float *values, void *out) {
    return lp::guard(LP_ERROR, [&] {
        ggml_quantize_init(type);
        return static_cast<int>(ggml_quantize_chunk(type, values, out, 0, n_rows, n_columns, nullptr));
    });
}

int lp_dequantize(enum ggml_type type, int64_t n, const void *quantized, float *out) {
    return lp::guard(LP_ERROR, [&] {
        ggml_get_type_traits(type)->to_float(quantized, out, n);
        return 0;
    });
}

// ---- contexts, pipelines and samplers
int64_t lp_context_scratch_bytes(lp_context *context) {
    return lp::guard(LP_ERROR, [&]() -> int64_t { return lp::scratch_bytes(context->shared->llama()); });
}

int64_t lp_context_ring_bytes(const lp_context *context) {
    const auto &stager = context->shared->stager();
    return stager && stager->buffer() ? ggml_backend_buffer_get_size(stager->buffer()) : 0;
}

const char *lp_cause_fault(enum lp_cause cause) {
    const auto work = [](void *data) {
        static volatile int zero                       = 0;
        static size_t (*volatile length)(const char *) = strlen;  // so that the compiler sees neither
        const auto read = [](uintptr_t address) { return *reinterpret_cast<volatile char *>(address); };
        switch (*static_cast<lp_cause *>(data)) {
            case LP_CAUSE_NULL: read(16 + zero); break;
            case LP_CAUSE_DIVISION: zero = 100 / zero; break;  // not 1 / zero, which is made of comparisons
            case LP_CAUSE_C_LIBRARY: length(reinterpret_cast<const char *>(uintptr_t{ 16 } + zero)); break;
            case LP_CAUSE_ELSEWHERE: read((uintptr_t{ 1 } << 46) + zero); break;
        }
    };
    return lp::run_until_fault(work, &cause);
}

void lp_fail_next(lp_pipeline *pipeline, enum lp_fault fault, int code) {
    pipeline->shared->faults().fail_next(static_cast<lp::Fault>(fault), code);
}

int lp_sampler_draw_partial(lp_sampler *s, int n, const float *ids, const float *logits, int n_others, const float *other_ids,
                            const float *other_logits, double log_sum_exp, int32_t *token) {
    return lp::guard(LP_ERROR, [&] {
        s->n_noted = 0;
        return s->draw(lp::Row(ids, logits, n, other_ids, other_logits, n_others, static_cast<int32_t>(ids[0]), log_sum_exp),
                       token);
    });
}

bool lp_in_graph(lp_sampler *s) {
    return lp::guard(false, [&] {
        lp::GraphRow row;
        return lp::in_graph(s, &row);
    });
}

#endif  // LP_TESTING

// Runs the sampling subgraph on given rows, without a model: for tests and benchmarks.
#include "ggml_objects.hpp"
#include "graph_sampler.hpp"
#include "guard.hpp"
#include "native_test.h"

#include <numeric>
#include <stdexcept>

using namespace lp::ggml_objects;

namespace {

static_assert(sizeof(lp::GraphResult) == LP_GRAPH_RESULTS * sizeof(float));

void compute(ggml_backend_dev_t device, int n_vocab, int n, const float * logits, const lp::GraphRow * rows,
             lp::GraphResult * results, float * candidates) {
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
    const auto set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads");
    if (set_n_threads) {
        set_n_threads(backend.get(), 1);
    }
    sampler.declare(kept.get(), n);
    const Buffer buffer(made(ggml_backend_alloc_ctx_tensors_from_buft(kept.get(), buft), "there is no memory"));
    sampler.fill();

    ggml_tensor * z     = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, n_vocab, n);
    ggml_tensor * index = ggml_new_tensor_1d(context.get(), GGML_TYPE_I64, n);
    ggml_set_input(z);
    ggml_set_input(index);
    ggml_cgraph * graph = ggml_new_graph(context.get());
    sampler.build(context.get(), graph, z, index);
    const Memory memory(made(ggml_gallocr_new(buft), "there is no memory"));
    if (!ggml_gallocr_alloc_graph(memory.get(), graph)) {
        throw std::runtime_error("there is no memory");
    }
    std::vector<int64_t> places((size_t) n);
    std::iota(places.begin(), places.end(), 0);
    ggml_backend_tensor_set(z, logits, 0, sizeof(float) * (size_t) n * (size_t) n_vocab);
    ggml_backend_tensor_set(index, places.data(), 0, sizeof(int64_t) * (size_t) n);
    sampler.set_input(rows);
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("the device failed to compute");
    }
    ggml_backend_tensor_get(sampler.results(), results, 0, sizeof(lp::GraphResult) * (size_t) n);
    ggml_backend_tensor_get(sampler.candidates(), candidates, 0, ggml_nbytes(sampler.candidates()));
}

}  // namespace

int lp_graph_sample(ggml_backend_dev_t device, int n_vocab, int n, const float * logits, lp_sampler ** samplers,
                    const int32_t * targets, float * results, float * candidates) {
    return lp::guard(LP_ERROR, [&] {
        std::vector<lp::GraphRow> rows((size_t) n);
        for (size_t i = 0; i < (size_t) n; i++) {
            if (samplers[i] && !lp::in_graph(samplers[i], &rows[i])) {
                throw std::runtime_error("the graph cannot do what this sampler does");
            }
            rows[i].targets[0] = (float) targets[i];
        }
        compute(device, n_vocab, n, logits, rows.data(), (lp::GraphResult *) results, candidates);
        return 0;
    });
}

// The ring of slots that the logits of steps are staged in, and the copies out of it.
#include "logits_ring.hpp"

#include "clock.hpp"
#include "context.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace lp {

// ---- copies staged rows from a device to host memory, ordered after the graph that writes them by events
RowCopier::RowCopier(ggml_backend_t compute, int n_lanes) : compute_(compute), lanes_(n_lanes) {
    ggml_backend_dev_t device = ggml_backend_get_device(compute);
    for (Lane &lane : lanes_) {
        lane.backend  = ggml_backend_dev_init(device, nullptr);
        lane.launched = ggml_backend_event_new(device);
        lane.computed = ggml_backend_event_new(device);
        lane.copied   = ggml_backend_event_new(device);
        if (!lane.backend || !lane.launched || !lane.computed || !lane.copied) {
            free_lanes();
            throw std::runtime_error("the device has no events, or no memory for another queue");
        }
    }
}

RowCopier::~RowCopier() { free_lanes(); }

void RowCopier::free_lanes() {
    for (Lane &lane : lanes_) {
        if (lane.backend) {
            ggml_backend_synchronize(lane.backend);
        }
        for (ggml_backend_event_t event : { lane.launched, lane.computed, lane.copied }) {
            if (event) {
                ggml_backend_event_free(event);
            }
        }
        if (lane.backend) {
            ggml_backend_free(lane.backend);
        }
    }
    lanes_.clear();
}

void RowCopier::begin(int i) {
    Lane &lane = lanes_[i];
    if (lane.used) {
        // The event is long past, so this returns at once. Some backends keep an event's memory until it is waited for.
        ggml_backend_event_synchronize(lane.launched);
    }
    lane.used = true;
    ggml_backend_event_record(lane.launched, compute_);
    ggml_backend_event_wait(lane.backend, lane.launched);
    ggml_backend_event_record(lane.computed, lane.backend);
}

void RowCopier::copy(int i, const ggml_tensor *from, int64_t first_row, int64_t n_rows, float *to) {
    const size_t row = from->nb[1];
    ggml_backend_tensor_get_async(lanes_[i].backend, from, to, first_row * row, n_rows * row);
}

void RowCopier::end(int i) { ggml_backend_event_record(lanes_[i].copied, lanes_[i].backend); }

void RowCopier::wait_computed(int i) { ggml_backend_event_synchronize(lanes_[i].computed); }

void RowCopier::wait_copied(int i) { ggml_backend_event_synchronize(lanes_[i].copied); }

LogitsRing::LogitsRing(std::shared_ptr<LogitsStager> stager, llama_context *ctx, lp_mode mode, int n_slots, int slot_rows)
    : stager_(std::move(stager)), mode_(mode), n_slots_(n_slots), slot_rows_(slot_rows),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))), holders_(n_slots) {
    if (mode_ == LP_EVENTS || mode_ == LP_SYNC) {
        ggml_backend_dev_t     device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(stager_->buffer()));
        ggml_backend_dev_props props  = {};
        ggml_backend_dev_get_props(device, &props);
        pinned_type_ = props.caps.host_buffer ? ggml_backend_dev_host_buffer_type(device) : nullptr;
        // Uploading a graph's inputs waits for the graph before it on one discrete GPU. Devices that share the host's memory
        // may read inputs in place, and several GPUs use copies of them in turn.
        size_t n_gpus = 0;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            n_gpus += ggml_backend_dev_type(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_GPU;
        }
        waits_for_last_graph_ = props.type == GGML_BACKEND_DEVICE_TYPE_GPU && n_gpus == 1;
        if (mode_ == LP_EVENTS) {
            ggml_backend_t compute = compute_backend(ctx, device);
            if (!compute || !props.caps.events) {
                throw std::runtime_error("the device has no events");
            }
            copier_ = std::make_unique<RowCopier>(compute, n_slots_);
        }
    }
    for (auto *pool : { &rows_pool_, &results_pool_, &candidates_pool_ }) {
        *pool = std::make_unique<HostMemoryPool>(pinned_type_, n_slots_ + 1);
    }
}

// ---- slots
int LogitsRing::take_free(const Lock &, const std::shared_ptr<Step> &step) {
    for (int i = 0; i < n_slots_; i++) {
        if (!holders_[i]) {
            holders_[i] = step;
            return i;
        }
    }
    return -1;
}

std::shared_ptr<Step> LogitsRing::oldest_movable(const Lock &) const {
    std::shared_ptr<Step> oldest;
    for (const auto &holder : holders_) {
        const bool is_movable = holder && holder->state == State::done && holder->n_exposed == 0 && !holder->moving;
        if (is_movable && (!oldest || holder->number < oldest->number)) {
            oldest = holder;
        }
    }
    return oldest;
}

int LogitsRing::n_held_by_others(const Lock &, const Step &step) const {
    return static_cast<int>(std::count_if(holders_.begin(), holders_.end(), [&](const std::shared_ptr<Step> &holder) {
        return holder && holder.get() != &step && (holder->n_exposed > 0 || holder->moving);
    }));
}

// ---- before a decode
void LogitsRing::expect(Step &step, const Ubatch &ubatch, int slot) {
    step.rows.resize(ubatch.n_outputs);
    step.parameters.clear();
    for (int j = 0; j < ubatch.n_outputs; j++) {
        const int output = step.places[ubatch.first_output + j];
        // A slot has room for the outputs of one ubatch of a wide step, so those are placed in llama.cpp's order.
        step.rows[j] = first_row(slot) + (is_wide(step) ? j : output);
        if (!step.graph.empty()) {
            step.parameters.push_back(step.graph[output]);
        }
    }
    stager_->expect(step.rows.data(), step.graph.empty() ? nullptr : step.parameters.data(), ubatch.n_outputs);
}

// ---- host memory
std::shared_ptr<HostBuffer> LogitsRing::memory_for_rows(const Step &step) {
    return rows_pool_->take(static_cast<size_t>(step.n_outputs) * n_vocab_);
}

std::shared_ptr<HostBuffer> LogitsRing::memory_for_wanted_rows(Step &step) {
    if (!step.needs_all) {
        step.fetched.resize(step.n_outputs);
        for (int i = 0; i < step.n_outputs; i++) {
            step.fetched[i] = step.wants(i, Step::row);
        }
    }
    return memory_for_rows(step);
}

void LogitsRing::take_memory_for_results(Step &step) {
    if (!step.graph.empty()) {
        step.results = results_pool_->take(step.graph.size() * (sizeof(GraphResult) / sizeof(float)));
    }
    if (step.needs_candidates) {
        step.top = candidates_pool_->take(step.graph.size() * 2 * stager_->sampler()->n_candidates());
    }
}

// ---- copies
void LogitsRing::read(const Step &step, int first, int n, float *to) const {
    const size_t n_bytes = sizeof(float) * n_vocab_;
    if (mode_ == LP_HOST) {
        memcpy(to, slot_data(step.slot) + static_cast<size_t>(first) * n_vocab_, n * n_bytes);
    } else {
        ggml_backend_tensor_get(stager_->staging(), to, (first_row(step.slot) + first) * n_bytes, n * n_bytes);
    }
}

// Calls copy(staging row, first output, n) for runs of wanted rows that are contiguous in the ring and in the caller's batch.
template <typename Wants, typename Copy>
void LogitsRing::for_each_run(const Step &step, int slot, int ubatch, Wants &&wants, Copy &&copy) const {
    const Ubatch  whole = { 0, 0, 0, step.n_outputs };
    const Ubatch &u     = ubatch < 0 ? whole : step.ubatches[ubatch];
    const int64_t base  = first_row(slot);
    const auto    place = [&](int j) { return ubatch < 0 ? j : step.places[u.first_output + j]; };
    for (int j = 0, n = 1; j < u.n_outputs; j += n) {
        n = 1;
        if (!wants(place(j))) {
            continue;
        }
        while (j + n < u.n_outputs && place(j + n) == place(j) + n && wants(place(j + n))) {
            n++;
        }
        copy(base + j, place(j), n);
    }
}

// Calls copy(tensor, its first row, n, destination) for all that is wanted on the host at once.
template <typename Copy>
void LogitsRing::for_each_wanted(const Step &step, int slot, int ubatch, Copy &&copy) const {
    const auto all = [](int) { return true; };
    if (step.needs_rows) {
        for_each_run(
                step, slot, ubatch, [&](int output) { return step.wants(output, Step::row); },
                [&](int64_t from, int to, int n) {
                    copy(stager_->staging(), from, n, step.host->data + static_cast<size_t>(to) * n_vocab_);
                });
    }
    if (step.results) {
        for_each_run(step, slot, ubatch, all, [&](int64_t from, int to, int n) {
            copy(stager_->sampler()->results(), from, n,
                 reinterpret_cast<float *>(reinterpret_cast<GraphResult *>(step.results->data) + to));
        });
    }
    if (step.top) {
        const GraphSampler &sampler = *stager_->sampler();
        for_each_run(step, slot, ubatch, all, [&](int64_t from, int to, int n) {
            copy(sampler.candidates(), from, n, step.top->data + static_cast<size_t>(to) * 2 * sampler.n_candidates());
        });
    }
}

void LogitsRing::copy_wanted(const Step &step, int slot, int ubatch) {
    if (mode_ == LP_HOST && ubatch < 0) {  // the rows are in place; only the graph's results move
        for (const auto &[tensor, to] : { std::pair(stager_->sampler()->results(), step.results.get()),
                                          std::pair(stager_->sampler()->candidates(), step.top.get()) }) {
            if (to) {
                memcpy(to->data, static_cast<const char *>(tensor->data) + first_row(slot) * tensor->nb[1],
                       step.graph.size() * tensor->nb[1]);
            }
        }
        return;
    }
    for_each_wanted(step, slot, ubatch, [](ggml_tensor *tensor, int64_t from, int n, float *to) {
        ggml_backend_tensor_get(tensor, to, from * tensor->nb[1], n * tensor->nb[1]);
    });
}

int64_t LogitsRing::n_wanted_bytes(const Step &step, int slot, int ubatch) const {
    int64_t n_bytes = 0;
    for_each_wanted(step, slot, ubatch,
                    [&](const ggml_tensor *tensor, int64_t, int n, float *) { n_bytes += n * tensor->nb[1]; });
    return n_bytes;
}

void LogitsRing::start_copies(const Step &step, int slot, int ubatch) {
    copier_->begin(slot);
    if (pinned_type_) {
        for_each_wanted(step, slot, ubatch, [&](const ggml_tensor *tensor, int64_t from, int n, float *to) {
            copier_->copy(slot, tensor, from, n, to);
        });
        copier_->end(slot);
    }
}

void LogitsRing::wait_for_copies(const RowCopy &copy, int64_t *computed_ns, int64_t *copied_ns) {
    if (!pinned_type_) {  // a copy into unpinned memory blocks: so it happens here, not on the launching thread
        copier_->wait_computed(copy.slot);
        for_each_wanted(*copy.step, copy.slot, copy.ubatch, [&](const ggml_tensor *tensor, int64_t from, int n, float *to) {
            copier_->copy(copy.slot, tensor, from, n, to);
        });
        copier_->end(copy.slot);
    }
    copier_->wait_computed(copy.slot);
    *computed_ns = now_ns();
    copier_->wait_copied(copy.slot);
    *copied_ns = now_ns();
}

// ---- results of the graph
bool LogitsRing::partial_row(const Step &step, int entry, Row *row) const {
    const int  output         = step.output_of_entry[entry];
    const bool has_candidates = step.top && output >= 0 && step.wants(output, Step::candidates);
    if (!has_candidates && (!step.results || output < 0 || !step.wants(output, Step::target))) {
        return false;
    }
    const int          n      = has_candidates ? stager_->sampler()->n_candidates() : 0;
    const float       *ids    = has_candidates ? step.top->data + static_cast<size_t>(output) * 2 * n : nullptr;
    const GraphResult &result = step.result(output);
    if (!std::isfinite(result.log_sum_exp) || (n > 0 && ids[2 * n - 1] <= -std::numeric_limits<float>::max())) {
        return false;  // one of them is infinite
    }
    *row = Row(ids, ids + n, n, step.graph[output].targets, result.target_logits, GraphRow::kTargets,
               static_cast<int32_t>(result.best), result.log_sum_exp);
    return true;
}

}  // namespace lp

// What the graph sampled of a step, and rows that it left on the device.
#include "core.hpp"
#include "guard.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace lp {

// What the graph has drawn counts only if its sampler would now ask for the same: it may have drawn from this row before,
// or have been changed. Rows with a logit that is not finite are looked at whole.
int32_t Core::drawn(const Step & step, int entry, lp_sampler * sampler) const {
    const int output = step.output_of_entry[(size_t) entry];
    if (output < 0 || !step.results || !(step.wishes[(size_t) output] & Step::token)) {
        return -1;
    }
    GraphRow         now;
    const bool       asks  = in_graph(sampler, &now);
    const GraphRow & asked = step.graph[(size_t) output];
    std::copy(asked.targets, asked.targets + GraphRow::n_targets, now.targets);
    if (!asks || memcmp(&now, &asked, sizeof now) != 0) {
        return -1;
    }
    const GraphResult & result = step.result(output);
    return std::isfinite(result.log_sum_exp) && result.token >= 0 && result.token < (float) n_vocab_ ? (int32_t) result.token
                                                                                                    : -1;
}

bool Core::known(const Step & step, int entry, Row * row) const {
    const int  output = step.output_of_entry[(size_t) entry];
    const bool some   = step.found && output >= 0 && step.wants(output, Step::candidates);
    if (!some && (!step.results || output < 0 || !step.wants(output, Step::target))) {
        return false;
    }
    const int           n      = some ? collector_->sampler()->n_candidates() : 0;
    const float *       ids    = some ? step.found->data + (size_t) output * 2 * (size_t) n : nullptr;
    const GraphResult & result = step.result(output);
    if (!std::isfinite(result.log_sum_exp) || (some && ids[2 * n - 1] <= -std::numeric_limits<float>::max())) {
        return false;  // something infinite is among them
    }
    *row = Row(ids, ids + n, n, step.graph[(size_t) output].targets, result.target_logits, GraphRow::n_targets,
               (int32_t) result.best, result.log_sum_exp);
    return true;
}

void Core::note_drawn(int n) {
    const Lock lock(mutex_);
    counters_.n_graph += n;
}

// A row that was left on the device because the graph had sampled from it.
const float * Core::fetch_row(Step & step, int output) {
    const size_t row = (size_t) n_vocab_;
    Lock         lock(mutex_);
    done_.wait(lock, [&] { return !step.moving; });
    if (step.data) {
        return step.data + (size_t) output * row;
    }
    const bool here = !step.fetched.empty() && step.fetched[(size_t) output];
    if (step.slot < 0 && !here) {
        set_error("this row was sampled in the graph and not kept");
        return nullptr;
    }
    if (here) {
        return step.host->data + (size_t) output * row;
    }
    step.moving = true;
    lock.unlock();
    const bool read = guard(false, [&] {
        step.fetched.resize((size_t) step.n_outputs);
        if (!step.host) {
            step.host = host_rows(step);
        }
        read_slot(step, output, 1, step.host->data + (size_t) output * row);
        return true;
    });
    lock.lock();
    step.moving = false;
    done_.notify_all();
    if (!read) {
        return nullptr;
    }
    step.fetched[(size_t) output] = 1;
    counters_.n_copies++;
    counters_.n_bytes += (int64_t) (sizeof(float) * row);
    return step.host->data + (size_t) output * row;
}

}  // namespace lp

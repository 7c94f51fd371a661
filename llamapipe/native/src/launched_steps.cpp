#include "launched_steps.hpp"

#include "faults.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace lp {

int64_t LaunchedSteps::launch(const BatchArrays &batch, lp_sampler **samplers, const int32_t *targets, int n_top) {
    make_room();
    last_.reset();
    auto step = spare();
    step->set(batch, pipeline_->limits());
    if (samplers || targets) {
        pipeline_->choose_wanted(*step, samplers, targets, n_top);
    }
    return launch(step);
}

int64_t LaunchedSteps::launch_again(const int32_t *sampled, lp_sampler **samplers) {
    if (!last_) {
        set_error("no step was launched yet");
        return LP_ERROR;
    }
    make_room();
    const bool is_unused = last_.use_count() == 2;  // only `last` and `spares_` refer to it
    const auto last      = std::move(last_);
    auto       step      = is_unused ? last : spare();
    step->advance(*last, sampled);
    if (is_unused) {
        step->clear();
    }
    if (samplers) {
        pipeline_->choose_wanted(*step, samplers, nullptr, 0);
    }
    return launch(step);
}

std::shared_ptr<Step> LaunchedSteps::spare() {
    for (const auto &step : spares_) {
        if (step.use_count() == 1) {
            step->clear();
            return step;
        }
    }
    auto step = std::make_shared<Step>();
    if (spares_.size() < 8) {
        spares_.push_back(step);
    }
    return step;
}

// The rows of a launched step can be read until `depth` more steps are launched.
void LaunchedSteps::make_room() {
    for (; live_.size() >= static_cast<size_t>(pipeline_->depth()); live_.pop_front()) {
        pipeline_->forget(*live_.front());
    }
}

int64_t LaunchedSteps::launch(const std::shared_ptr<Step> &step) {
    last_          = step;
    const int code = pipeline_->launch(step);
    if (code != 0) {
        return code;
    }
    live_.push_back(step);
    return step->number;
}

Step *LaunchedSteps::finish(int64_t number) {
    const auto found = std::find_if(live_.begin(), live_.end(), [&](const auto &step) { return step->number == number; });
    if (found == live_.end()) {
        set_error("there is no such step, or its rows were given up");
        return nullptr;
    }
    pipeline_->finish(**found);
    return found->get();
}

// A token that the graph has drawn counts only if the sampler would now ask for the same draw: it may have drawn from this
// row before, or have been changed since. A row with a logit that is not finite is sampled from the whole row.
int32_t LaunchedSteps::drawn_token(const Step &step, int entry, lp_sampler *sampler) const {
    const int output = step.output_of_entry[entry];
    if (output < 0 || !step.results || !(step.wanted[output] & Step::token)) {
        return -1;
    }
    GraphRow        now;
    const bool      is_asked = in_graph(sampler, &now);
    const GraphRow &asked    = step.graph[output];
    std::copy(asked.targets, asked.targets + GraphRow::kTargets, now.targets);
    // Numbers without gaps between them: NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
    if (!is_asked || memcmp(&now, &asked, sizeof now) != 0) {
        return -1;
    }
    const GraphResult &result   = step.result(output);
    const float        n_vocab  = static_cast<float>(pipeline_->n_vocab());
    const bool         is_valid = std::isfinite(result.log_sum_exp) && result.token >= 0 && result.token < n_vocab;
    return is_valid ? static_cast<int32_t>(result.token) : -1;
}

}  // namespace lp

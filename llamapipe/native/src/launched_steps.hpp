// Steps by number: one thread launches them, one after another, and reads the rows of those before.
//
// It is the face of a pipeline for a caller that drives it: the last `depth` steps are kept, and their memory is used again.
// Steps of other threads are Pipeline's own (`submit`, `wait`).
#pragma once

#include "pipeline.hpp"

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace lp {

// One thread at a time, for all of it.
class LaunchedSteps {
public:
    explicit LaunchedSteps(std::shared_ptr<Pipeline> pipeline) : pipeline_(std::move(pipeline)) {}

    // The step's number, or a negative code. `samplers` and `targets` may be null; see Step::choose_wanted.
    int64_t launch(const BatchArrays &batch, lp_sampler **samplers, const int32_t *targets, int n_top);
    // The last step again, each entry one position further and with its sampled token.
    int64_t launch_again(const int32_t *sampled, lp_sampler **samplers);

    Step        *finish(int64_t number);  // waits for it; null, with an error message, if there is no such step
    const float *row(Step &step, int entry) { return pipeline_->row(step, entry); }
    bool         partial_row(const Step &step, int entry, Row *row) const { return pipeline_->partial_row(step, entry, row); }
    // The token that the graph drew, if the sampler would ask for the same draw now; else -1.
    int32_t drawn_token(const Step &step, int entry, lp_sampler *sampler) const;

    Pipeline &pipeline() const { return *pipeline_; }

private:
    std::shared_ptr<Step> spare();
    void                  make_room();
    int64_t               launch(const std::shared_ptr<Step> &step);

    const std::shared_ptr<Pipeline>    pipeline_;  // outlives the steps, whose rows are in its memory
    std::deque<std::shared_ptr<Step>>  live_;      // launched, and not yet forgotten
    std::vector<std::shared_ptr<Step>> spares_;    // steps whose memory can be used again, once nobody else refers to them
    std::shared_ptr<Step>              last_;      // what `launch_again` repeats
};

}  // namespace lp

// The handles that Python holds. Each shares the object it points to, so handles may be freed in any order.
#pragma once

#include "launched_steps.hpp"
#include "native.h"
#include "pipeline.hpp"

struct lp_context {
    std::shared_ptr<lp::Context> shared;
};

struct lp_pipeline {
    std::shared_ptr<lp::Pipeline> shared;
    lp::LaunchedSteps             steps;
    lp_wake_list                 *wakes;  // the caller's, or null
};

struct lp_step {
    std::shared_ptr<lp::Pipeline> pipeline;
    std::shared_ptr<lp::Step>     shared;
};

struct lp_saved {
    lp::SavedCells cells;
};

struct lp_waiter {
    std::shared_ptr<lp::Waiter> shared;
};

struct lp_wake_queue {
    std::shared_ptr<lp::WakeQueue> shared;
};

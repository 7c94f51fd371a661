// What Python holds of the pipeline: each handle shares what it points to, so handles may outlive one another.
#pragma once

#include "core.hpp"

struct lp_collector {
    std::shared_ptr<lp::Collector> shared;
};

struct lp_pipeline {
    std::shared_ptr<lp::Core> shared;
    lp_wakes *                wakes;  // of the caller, or null
};

struct lp_step {
    std::shared_ptr<lp::Core> core;
    std::shared_ptr<lp::Step> shared;
};

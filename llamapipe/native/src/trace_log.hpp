// The trace: when each stage of each step began and ended.
#pragma once

#include "step.hpp"

#include <atomic>
#include <deque>
#include <mutex>

namespace lp {

// Keeps the newest spans while it is on. Any thread. Off, a stage costs one comparison.
class TraceLog {
public:
    void start(size_t n_max);  // most spans to keep; 0 turns it off and forgets them
    bool is_on() const { return n_max_ > 0; }
    void add(const Step & step, lp_stage stage, int64_t begin_ns, int64_t end_ns);
    bool next(lp_span * span);  // removes the oldest; false if there is none

private:
    std::mutex          mutex_;
    std::deque<lp_span> spans_;
    std::atomic<size_t> n_max_{ 0 };
};

}  // namespace lp

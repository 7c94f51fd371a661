// Makes the next launch, row count or copy fail. For tests; see native_test.h.
#pragma once

#include "native_test.h"

#include <atomic>
#include <mutex>

namespace lp {

// Any thread. Without a pending fault it costs one comparison.
class FaultInjector {
public:
    void fail_next(lp_fault fault, int code) {
        const std::lock_guard<std::mutex> lock(mutex_);
        code_  = code;
        fault_ = fault;
    }

    // Whether this fails now, and with which code. Each fault happens once.
    bool take(lp_fault fault, int * code) {
        if (fault_ != fault) {
            return false;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        if (fault_ != fault) {
            return false;
        }
        fault_ = LP_FAULT_NONE;
        *code  = code_;
        return true;
    }

private:
    std::mutex            mutex_;
    std::atomic<lp_fault> fault_{ LP_FAULT_NONE };
    int                   code_ = 0;
};

}  // namespace lp

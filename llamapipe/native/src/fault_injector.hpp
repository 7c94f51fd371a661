// Makes the next launch, row count or copy fail: in builds for tests. See lp_fail_next.
#pragma once

#include <atomic>
#include <mutex>

namespace lp {

enum class Fault { none, launch, rows, copy };  // as lp_fault

#ifdef LP_TESTING

// Any thread. Without a pending fault it costs one comparison.
class FaultInjector {
public:
    void fail_next(Fault fault, int code) {
        const std::lock_guard<std::mutex> lock(mutex_);
        code_  = code;
        fault_ = fault;
    }

    // Whether this fails now, and with which code. Each fault happens once.
    bool take(Fault fault, int *code) {
        if (fault_ != fault) {
            return false;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        if (fault_ != fault) {
            return false;
        }
        fault_ = Fault::none;
        *code  = code_;
        return true;
    }

private:
    std::mutex         mutex_;
    std::atomic<Fault> fault_{ Fault::none };
    int                code_ = 0;
};

#else

struct FaultInjector {
    static constexpr bool take(Fault, int *) { return false; }
};

#endif

}  // namespace lp

// Which steps are to end early, and which one is being computed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lp {

// Lock-free: a CPU asks after every node of a graph. Any thread.
class AbortFlags {
public:
    void abort(int64_t number) {
        if (number >= 0) {
            aborted_[(size_t) number % n_slots] = number;
        }
    }
    void abort_all() { all_ = true; }

    void    set_running(int64_t number) { running_ = number; }  // -1: none
    int64_t running() const { return running_; }

    // Whether the step that is being computed shall end.
    bool is_aborted() const {
        const int64_t number = running_;
        return all_ || (number >= 0 && aborted_[(size_t) number % n_slots] == number);
    }

private:
    static constexpr size_t n_slots = 8;  // more steps than are ever in flight
    std::atomic<int64_t>    running_{ -1 };
    std::atomic<int64_t>    aborted_[n_slots] = { { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 } };
    std::atomic<bool>       all_{ false };
};

}  // namespace lp

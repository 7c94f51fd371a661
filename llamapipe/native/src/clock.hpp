// The clock of every time stamp here.
#pragma once

#include <chrono>
#include <cstdint>

namespace lp {

inline int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace lp

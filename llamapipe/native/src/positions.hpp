// Which positions a sequence holds, kept without asking llama.cpp: it may be computing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace lp {

class Positions {
public:
    // Where the sequence goes on.
    int64_t next() const { return runs_.empty() ? 0 : runs_.back().second; }

    void append() {
        if (runs_.empty()) {
            runs_.push_back({ 0, 0 });
        }
        runs_.back().second++;
    }

    // Forgets [p0, p1); everything from p0 on for a negative p1.
    void remove(int64_t p0, int64_t p1) {
        std::vector<Run> kept;
        const int64_t    end = p1 < 0 ? INT64_MAX : p1;
        for (const auto & [a, b] : runs_) {
            if (a < std::min(b, p0)) {
                kept.push_back({ a, std::min(b, p0) });
            }
            if (std::max(a, end) < b) {
                kept.push_back({ std::max(a, end), b });
            }
        }
        runs_ = std::move(kept);
    }

    // Takes [p0, p1) of another sequence, beside what is there or instead of it.
    void copy(const Positions & from, int64_t p0, int64_t p1, bool instead) {
        Positions part = from;
        part.remove(0, p0);
        if (p1 >= 0) {
            part.remove(p1, -1);
        }
        if (instead) {
            runs_.clear();
        }
        runs_.insert(runs_.end(), part.runs_.begin(), part.runs_.end());
        join();
    }

    // Adds `delta` to [p0, p1); what would become negative is forgotten.
    void shift(int64_t p0, int64_t p1, int64_t delta) {
        Positions moved, stay = *this;
        moved.copy(*this, p0, p1, true);
        stay.remove(p0, p1);
        for (auto & [a, b] : moved.runs_) {
            a += delta;
            b += delta;
        }
        moved.remove(INT64_MIN, 0);
        runs_ = std::move(stay.runs_);
        runs_.insert(runs_.end(), moved.runs_.begin(), moved.runs_.end());
        join();
    }

    // All from `first` to before `end`.
    void set(int64_t first, int64_t end) {
        runs_.clear();
        if (first < end) {
            runs_.push_back({ first, end });
        }
    }

private:
    using Run = std::pair<int64_t, int64_t>;  // from, to before

    void join() {
        std::sort(runs_.begin(), runs_.end());
        std::vector<Run> joined;
        for (const Run & run : runs_) {
            if (!joined.empty() && run.first <= joined.back().second) {
                joined.back().second = std::max(joined.back().second, run.second);
            } else {
                joined.push_back(run);
            }
        }
        runs_ = std::move(joined);
    }

    std::vector<Run> runs_;  // ascending, apart from one another
};

}  // namespace lp

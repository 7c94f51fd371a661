// The trace: when each stage of each step began and ended.
#include "trace_log.hpp"

#include <algorithm>
#include <cstring>

namespace lp {

namespace {

using Lock = std::lock_guard<std::mutex>;

// Writes a step's sequences as ranges, such as "0-3,7"; ends in "..." where they do not fit.
void describe_sequences(const Step & step, char (&text)[LP_SEQUENCES]) {
    std::vector<int32_t> ids = step.seq_ids;
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::string all;
    for (size_t i = 0, end; i < ids.size(); i = end) {
        for (end = i + 1; end < ids.size() && ids[end] == ids[end - 1] + 1;) {
            end++;
        }
        all += (all.empty() ? "" : ",") + std::to_string(ids[i]);
        if (end - i > 1) {
            all += "-" + std::to_string(ids[end - 1]);
        }
    }
    if (all.size() >= LP_SEQUENCES) {
        all = all.substr(0, LP_SEQUENCES - 4) + "...";
    }
    memcpy(text, all.c_str(), all.size() + 1);
}

}  // namespace

void TraceLog::start(size_t n_max) {
    const Lock lock(mutex_);
    n_max_ = n_max;
    if (n_max == 0) {
        spans_.clear();
    }
}

void TraceLog::add(const Step & step, lp_stage stage, int64_t begin_ns, int64_t end_ns) {
    if (!is_on()) {
        return;
    }
    const Lock lock(mutex_);
    if (spans_.size() >= n_max_ && !spans_.empty()) {
        spans_.pop_front();
    }
    spans_.push_back({ step.number, begin_ns, end_ns, (int) stage, step.n_tokens, step.n_outputs, {} });
    describe_sequences(step, spans_.back().sequences);
}

bool TraceLog::next(lp_span * span) {
    const Lock lock(mutex_);
    if (spans_.empty()) {
        return false;
    }
    *span = spans_.front();
    spans_.pop_front();
    return true;
}

}  // namespace lp

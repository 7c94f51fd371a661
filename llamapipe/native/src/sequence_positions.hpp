// The positions that each sequence holds: the one place that knows them.
//
// A pipeline accepts steps and memory operations long before llama.cpp executes them, and llama.cpp must not be asked
// while it computes. So positions are tracked here, as of the end of the queue. llama.cpp's own memory is consulted in
// only two cases, both after a failed step: `matches_memory` before a step is launched, and `reread`, when nothing is
// queued and the failure is known to its submitter.
#pragma once

#include "memory_op.hpp"

#include <cstdint>
#include <utility>
#include <vector>

namespace lp {

struct Step;

// Sets of positions as ascending ranges that do not touch.
class PositionRanges {
public:
    // The position that follows the last one.
    int64_t next() const { return ranges_.empty() ? 0 : ranges_.back().second; }

    void append();
    // Removes [p0, p1); everything from p0 on for a negative p1.
    void remove(int64_t p0, int64_t p1);
    // Takes [p0, p1) of another sequence: in addition to its own positions, or instead of them.
    void copy(const PositionRanges & from, int64_t p0, int64_t p1, bool replaces);
    // Adds `delta` to the positions in [p0, p1); those that become negative are removed.
    void shift(int64_t p0, int64_t p1, int64_t delta);
    // All positions from `first` to before `end`.
    void set(int64_t first, int64_t end);

private:
    using Range = std::pair<int64_t, int64_t>;  // from, to before
    void join();

    std::vector<Range> ranges_;
};

// Not thread-safe: the pipeline calls it with its lock held.
class SequencePositions {
public:
    explicit SequencePositions(llama_context * ctx);

    // The next position of a sequence once everything queued is done.
    int64_t next(int seq_id) const { return ranges_[(size_t) seq_id].next(); }

    // Adds a step's tokens. False, with an error message and nothing changed, if they would leave gaps.
    bool append(const Step & step);
    // Adds the effect of an operation. False, with an error message and nothing changed, if it cannot be done.
    bool apply(const MemoryOp & op);

    // A sequence has the positions from 0 to before `n`, in cells of its own.
    void set(int seq_id, int n);

    // Whether each of the step's sequences continues where llama.cpp's memory ends. Not while a graph is computed.
    bool matches_memory(const Step & step) const;
    // Reads all positions from llama.cpp's memory. Not while a graph is computed.
    void reread();

private:
    void separate(size_t seq_id);

    llama_context * const          ctx_;
    bool                           copy_replaces_;  // a copy replaces the positions of its destination
    std::vector<PositionRanges>    ranges_;         // by sequence
    std::vector<std::vector<char>> shares_;         // which sequences may have cells in common
};

}  // namespace lp

// The ring of slots that the logits of steps are staged in, and the copies out of it.
//
// A slot holds the output rows of one step (or of one ubatch of a wide step, one with more outputs than a slot has rows).
// In host mode readers look into the slot itself; in the other modes rows are copied to host memory. Which slot belongs to
// which step is guarded by the pipeline's lock: entries that need it take the lock as an argument.
#pragma once

#include "logits_stager.hpp"
#include "native.h"
#include "sampler.hpp"
#include "step.hpp"

#include <memory>
#include <mutex>
#include <vector>

namespace lp {

// ---- copies staged rows from a device to host memory, ordered after the graph that writes them by events
// One lane for each slot of the ring. Each lane has a backend instance of its own: so it has a queue of its own where the
// device has several, and in any case its own command memory. One thread may wait for a lane while another records into
// the next.
class RowCopier {
public:
    // Throws std::runtime_error where the device has no events.
    RowCopier(ggml_backend_t compute, int n_lanes);
    ~RowCopier();
    RowCopier(const RowCopier &)            = delete;
    RowCopier &operator=(const RowCopier &) = delete;

    // After a launch, on the launching thread: copies run once the graph has. A lane must be idle.
    void begin(int lane);
    void copy(int lane, const ggml_tensor *from, int64_t first_row, int64_t n_rows, float *to);
    void end(int lane);

    // Return when the graph, and when the copies are done. One thread at a time for each lane.
    void wait_computed(int lane);
    void wait_copied(int lane);

private:
    struct Lane {
        ggml_backend_t       backend  = nullptr;
        ggml_backend_event_t launched = nullptr;  // recorded by the backend that computes
        ggml_backend_event_t computed = nullptr;  // the same moment, on this lane
        ggml_backend_event_t copied   = nullptr;
        bool                 used     = false;
    };
    void free_lanes();

    ggml_backend_t    compute_;
    std::vector<Lane> lanes_;
};

using Lock = std::unique_lock<std::mutex>;

// One copy from the ring to the host: the rows of a step, or of one ubatch of a wide step.
struct RowCopy {
    std::shared_ptr<Step> step;
    int                   slot, ubatch;  // ubatch < 0: the whole step
};

class LogitsRing {
public:
    // `stager` is null in direct mode; then the ring only hands out host memory. Throws std::runtime_error where mode is
    // LP_EVENTS and the device has no events.
    LogitsRing(std::shared_ptr<LogitsStager> stager, llama_context *ctx, lp_mode mode, int n_slots, int slot_rows);

    int  n_slots() const { return n_slots_; }
    bool is_wide(const Step &step) const { return step.n_outputs > slot_rows_; }
    // Whether rows stay in the slot when the step is done, to be fetched one by one.
    bool stays(const Step &step) const { return !step.needs_all && step.n_outputs > 0 && !is_wide(step); }
    bool waits_for_last_graph() const { return waits_for_last_graph_; }
    bool samples() const { return stager_ && stager_->sampler(); }

    // ---- slots
    int                   take_free(const Lock &, const std::shared_ptr<Step> &step);  // -1 if all are held
    std::shared_ptr<Step> oldest_movable(const Lock &) const;                           // null if there is none
    void                  free(const Lock &, int slot) { holders_[slot].reset(); }
    int                   n_held_by_others(const Lock &, const Step &step) const;

    // ---- before and after a decode, on the launching thread
    // Tells the stager where to put the rows of a ubatch. Throws std::bad_alloc.
    void expect(Step &step, const Ubatch &ubatch, int slot);
    // Whether all rows arrived there.
    bool    settle() { return stager_->settle(); }
    int64_t inputs_ns() const { return stager_ ? stager_->inputs_ns() : 0; }

    // ---- host memory. Throws std::bad_alloc.
    std::shared_ptr<HostBuffer> memory_for_rows(const Step &step);
    // The same, and marks the rows that are copied at once; the others may follow.
    std::shared_ptr<HostBuffer> memory_for_wanted_rows(Step &step);
    void                        take_memory_for_results(Step &step);

    // ---- copies
    float  *slot_data(int slot) const { return stager_->host() + first_row(slot) * n_vocab_; }  // host mode
    void    read(const Step &step, int first, int n, float *to) const;  // rows of a done step
    void    copy_wanted(const Step &step, int slot, int ubatch);         // blocks until they are copied
    int64_t n_wanted_bytes(const Step &step, int slot, int ubatch) const;
    // With events: starts the copies on the launching thread, and waits for them on another.
    void start_copies(const Step &step, int slot, int ubatch);
    void wait_for_copies(const RowCopy &copy, int64_t *computed_ns, int64_t *copied_ns);
    void stop_copies() { copier_.reset(); }
    bool has_copier() const { return copier_ != nullptr; }

    // With graph sampling: a row's candidates and targets, if any of them came to the host.
    bool partial_row(const Step &step, int entry, Row *row) const;

private:
    size_t first_row(int slot) const { return static_cast<size_t>(slot) * slot_rows_; }
    template <typename Wants, typename Copy>
    void                          for_each_run(const Step &step, int slot, int ubatch, Wants &&wants, Copy &&copy) const;
    template <typename Copy> void for_each_wanted(const Step &step, int slot, int ubatch, Copy &&copy) const;

    const std::shared_ptr<LogitsStager> stager_;
    const lp_mode                       mode_;
    const int                           n_slots_, slot_rows_, n_vocab_;
    ggml_backend_buffer_type_t          pinned_type_          = nullptr;
    bool                                waits_for_last_graph_ = true;
    std::unique_ptr<RowCopier>          copier_;
    std::vector<std::shared_ptr<Step>>  holders_;  // by slot
    std::unique_ptr<HostMemoryPool>     rows_pool_, results_pool_, candidates_pool_;
};

}  // namespace lp

// The pipeline: queues steps, launches them, and lets readers wait for one of them.
//
// With threads of its own, any thread calls `submit` and `wait`, one thread of the pipeline launches steps, and with LP_EVENTS
// a second one waits for copies. Without them, one caller does the work of both threads, by LaunchedSteps. Where rows are, and
// which thread waits for what, depends on the mode (see lp_mode).
//
// One lock guards the queue, the progress of steps and the slots of the ring. It is never held while llama.cpp computes
// or rows are copied. Private entries that need it take it as an argument.
#pragma once

#include "context.hpp"
#include "fault_injector.hpp"
#include "logits_ring.hpp"
#include "sampler.hpp"
#include "step.hpp"
#include "wake_queue.hpp"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lp {

// ---- which steps are to end early, and which one is being computed
// Lock-free: a CPU asks after every node of a graph. Any thread.
class AbortFlags {
public:
    void abort(int64_t number) {
        if (number >= 0) {
            aborted_[static_cast<size_t>(number) % kSlots] = number;
        }
    }
    void abort_all() { all_ = true; }

    void    set_running(int64_t number) { running_ = number; }  // -1: none
    int64_t running() const { return running_; }

    // Whether the step that is being computed shall end.
    bool is_aborted() const {
        const int64_t number = running_;
        return all_ || (number >= 0 && aborted_[static_cast<size_t>(number) % kSlots] == number);
    }

private:
    static constexpr size_t kSlots = 8;  // more steps than are ever in flight
    std::atomic<int64_t>    running_{ -1 };
    std::atomic<int64_t>    aborted_[kSlots] = { { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 } };
    std::atomic<bool>       all_{ false };
};

// ---- the trace: when each stage of each step began and ended
// Keeps the newest spans while it is on. Any thread. Off, a stage costs one comparison.
class TraceLog {
public:
    void start(size_t n_max);  // most spans to keep; 0 turns it off and forgets them
    bool is_on() const { return n_max_ > 0; }
    void add(const Step &step, lp_stage stage, int64_t begin_ns, int64_t end_ns);
    bool next(lp_span *span);  // removes the oldest; false if there is none

private:
    std::mutex          mutex_;
    std::deque<lp_span> spans_;
    std::atomic<size_t> n_max_{ 0 };
};

// Work between steps that its submitter waits for.
struct Task {
    const std::function<int()> &work;
    int                         result  = LP_ERROR;
    bool                        is_done = false;
};

// What the launch thread does next: a step, a task, or an operation between steps.
struct Command {
    std::shared_ptr<Step> step;
    MemoryOp              op;
    Task                 *task = nullptr;
};

class Pipeline {
public:
    struct Options {
        lp_mode      mode;
        int          depth;  // most steps submitted and not done
        int          n_slots, slot_rows;
        UbatchLimits limits;
        bool         threaded;  // launches on a thread of its own
    };

    // Keeps the context until `close`. Throws std::runtime_error, also where mode is LP_EVENTS and the device has none.
    Pipeline(std::shared_ptr<Context> context, const Options &options);
    ~Pipeline();

    // ---- queue (pipeline.cpp)
    std::shared_ptr<Step> make(const BatchArrays &batch) const;
    int submit(const std::shared_ptr<Step> &step);  // 0, LP_ERROR_POSITIONS or LP_ERROR_CLOSED. Any thread, if threaded.
    int next_position(int seq_id);                   // once everything queued is done. Any thread, if threaded.
    int memory(const MemoryOp &op);                 // between steps: 1 done or queued, 0 refused, LP_ERROR...
    // Between steps: 1 done, 0 refused, LP_ERROR... These wait for the steps before them.
    int  save(int seq_id, int64_t max_bytes, Part part, SavedCells &to);
    int  load(int seq_id, int n, const SavedCells *cells, const SavedCells *state);
    int  copy(int from, int to, int n, const SavedCells *state);  // the first cells of a sequence to another stream
    int  set_adapters(const lp_adapter_set &set);
    int  assign_adapters(int seq_id, const lp_adapter_set &set);
    int  sequence_end(int seq_id);       // the position after its last one
    void stop();                                      // unfinished steps fail, and no more are accepted
    void close(bool drain);                           // ends the threads. One thread at a time.

    // ---- wait for submitted steps (pipeline_wait.cpp). Any thread.
    bool         is_ready(Step &step);
    bool         wait(Step &step, int64_t timeout_ns);  // false: not done in time; timeout < 0: no limit
    const float *expose(const std::shared_ptr<Step> &step, bool *in_place);  // of a done step
    void         unexpose(Step &step);
    void         release(Step &step);
    void         observe(Step &step);  // its submitter knows whether it failed

    // ---- for LaunchedSteps: the one thread that drives a pipeline, whether that is threaded or not
    // Chooses what the graph samples, where it does.
    void         choose_wanted(Step &step, lp_sampler **samplers, const int32_t *targets, int n_top) const;
    int          launch(const std::shared_ptr<Step> &step);  // 0, or a negative code
    void         finish(Step &step);                         // waits for a launched step
    void         forget(Step &step);                         // its rows are not read any more
    const float *row(Step &step, int entry);  // a whole row of a finished step; null where the entry is not an output
    bool         partial_row(const Step &step, int entry, Row *row) const { return ring_.partial_row(step, entry, row); }
    void         count_drawn(int n);

    // ---- any thread
    AbortFlags    &aborts() { return aborts_; }
    FaultInjector &faults() { return faults_; }
    TraceLog      &trace() { return trace_; }
    lp_counters    counters();
    int            n_vocab() const { return n_vocab_; }
    int            depth() const { return depth_; }
    UbatchLimits   limits() const { return limits_; }

    // Readers to wake one by one while a launch computes, or null; set before the first launch.
    std::shared_ptr<WakeQueue> wake_queue;

private:
    bool stop_computing();  // a CPU asks after each node of a graph, on the launching thread

    // queue
    void                  run_launch_thread();
    void                  run_copy_thread();
    int                   apply(const MemoryOp &op);
    int                   between_steps(const std::function<int()> &work, int changed, int n);
    int                   timed(const std::function<int()> &work);
    void                  reread_positions(const Lock &);
    std::shared_ptr<Step> next_awaited(const Lock &, bool computed_only) const;

    // launch
    void launch_step(const std::shared_ptr<Step> &step);
    int  launch_ubatches(const std::shared_ptr<Step> &step, size_t *n_done);
    int  decode(Step &step, const Ubatch &ubatch);
    int  take_slot(const std::shared_ptr<Step> &step);
    void give_slot_back(const Step &step, int slot);
    void stage_out(const std::shared_ptr<Step> &step, int slot, int ubatch);
    void read_direct(Step &step, const Ubatch &ubatch);
    void undo(const Step &step, size_t n_ubatches);

    // wait
    void         process(const RowCopy &copy);
    void         synchronize();
    void         fetch(Lock &lock, Step &step);
    void         move_out(Lock &lock, Step &step);
    const float *fetch_row(Step &step, int output);

    // progress
    void free_slot(const Lock &lock, int slot);
    void mark_computed(const Lock &lock, Step &step);
    void count_computed(const Lock &lock, const Step &step, int64_t when_ns);
    void finish_step(const Lock &lock, Step &step, State state);
    void fail(const Lock &lock, Step &step, int code, const char *why);
    void see_failure(const Lock &lock, Step &step);
    void count_copy(const Lock &, int64_t n_bytes) {
        counters_.n_copies++;
        counters_.n_bytes += n_bytes;
    }

    std::shared_ptr<Context> context_;  // until `close`
    const lp_mode            mode_;
    const int                depth_, n_vocab_;
    const UbatchLimits       limits_;
    const bool               threaded_;

    std::mutex              mutex_;
    std::condition_variable work_, done_, copies_;
    LogitsRing              ring_;
    SequencePositions       positions_;

    std::deque<Command>               queue_;
    std::deque<RowCopy>               row_copies_;
    std::deque<std::shared_ptr<Step>> launched_;   // and not final
    int                               n_pending_ = 0;
    int64_t                           n_numbers_ = 0, last_computed_ns_ = 0;
    std::atomic<bool>                 has_failed_{ false };  // a step failed, and its submitter may not know yet
    int                               n_unobserved_ = 0;     // such steps
    bool                              is_busy_      = false;  // the launch thread executes a command
    bool                              is_closing_ = false, is_closed_ = false, drain_ = true, launch_thread_is_done_ = false;

    SavedCells scratch_;  // of `copy`; the launching thread's

    lp_counters   counters_ = {};
    TraceLog      trace_;
    AbortFlags    aborts_;
    FaultInjector faults_;
    std::thread   launch_thread_, copy_thread_;
};

}  // namespace lp

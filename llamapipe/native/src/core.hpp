// The pipeline: launches steps, knows where their rows are, and lets readers wait for one of them.
//
// Driven either by threads of its own (`submit`, then `wait` from any thread) or by its caller (`launch` and `finish` on
// one thread, which then does what those threads would do). Where rows are and who waits for what depends on the mode:
//
//   host    the ring is host memory and a decode returns when it is done: readers look into the slot itself
//   events  the device copies rows out behind the graph, and an event tells when they are there
//   sync    the same without events: llama_synchronize, once, and only while a step is the newest
//   stock   llama.cpp's own output buffer; no ring
#pragma once

#include "collector.hpp"
#include "copier.hpp"
#include "positions.hpp"
#include "row.hpp"
#include "step.hpp"
#include "threads.hpp"
#include "turns.hpp"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lp {

enum class Mode { host, events, sync, stock };
enum class Op { remove, copy, keep, shift, clear };
enum class Fault { none, launch, rows, copy };  // for tests: what fails next
enum class Stage { launch, compute, copy, wait, sample, memory };

struct MemoryOp {
    Op  op;
    int seq_id, other, p0, p1, delta;
};

struct Span {  // of the trace
    int64_t step;
    Stage   stage;
    int     n_tokens, n_rows;
    int64_t begin_ns, end_ns;
    char    sequences[LP_SEQUENCES];  // such as "0-3,7"
};

class Core {
public:
    struct Options {
        Mode  mode;
        int   depth;      // most steps submitted and not done
        int   n_slots, slot_rows;
        Shape shape;
        bool  threaded;   // has threads of its own
    };

    // `collector` is null in stock mode. Throws std::runtime_error, also where the device has no events.
    Core(llama_context * ctx, std::shared_ptr<Collector> collector, const Options & options);
    ~Core();

    // ---- with threads of its own; any thread
    std::shared_ptr<Step> make(int n, const int32_t * tokens, const int32_t * positions, const int32_t * seq_ids,
                               const int8_t * outputs);
    int  submit(const std::shared_ptr<Step> & step);       // 0, LP_ERROR_POSITIONS or LP_ERROR_CLOSED
    int  next_position(int seq_id);                        // once all that is queued is done
    bool ready(Step & step);
    bool wait(Step & step, int64_t timeout_ns);            // false: not done in time; timeout < 0: for ever
    const float * expose(const std::shared_ptr<Step> & step, bool * in_place);  // of a done step
    void unexpose(Step & step);
    void release(Step & step);
    void observe(Step & step);                             // whoever submitted it knows that it failed
    void stop();                                           // what is under way fails, and nothing more comes
    void close(bool drain);                                // ends the threads; not on two threads at once

    // ---- one thread, which also does the work where the pipeline has no threads of its own
    int64_t launch(int n, const int32_t * tokens, const int32_t * positions, const int32_t * seq_ids,
                   const int8_t * outputs, lp_sampler ** samplers,
                   const int32_t * targets, int n_top);    // the step's number, or a negative code
    int64_t launch_again(const int32_t * sampled, lp_sampler ** samplers);  // the last step, advanced
    Step *  finish(int64_t number);                        // waits for a launched step; null if there is no such step
    const float * row(Step & step, int entry);             // of a finished step; null where there is no output
    int32_t drawn(const Step & step, int entry, lp_sampler * sampler) const;  // in the graph, for its next draw; else -1
    void    note_drawn(int n);
    bool    known(const Step & step, int entry, Row * row) const;  // whether something of it came to the host
    void    forget(int64_t number);                        // its rows are not needed any more
    std::shared_ptr<Turns> turns;                          // who is woken one by one while a launch computes, or null
    int     memory(const MemoryOp & op);                   // between steps: 1 done or queued, 0 refused, LP_ERROR

    // ---- any thread
    void abort(int64_t number) {
        if (number >= 0) {
            aborted_[(size_t) number % n_aborted] = number;
        }
    }
    void fail_next(Fault fault, int code);
    lp_counters counters();
    void trace(size_t n_max);                              // 0: off
    bool next_span(Span * span);
    bool tracing() const { return n_spans_ > 0; }
    void note_span(const Step & step, Stage stage, int64_t begin_ns, int64_t end_ns);
    int64_t launching() const { return running_; }
    int     n_vocab() const { return n_vocab_; }
    bool stop_computing() const {                          // a CPU asks it behind each node, on the thread that launches
        if (turns) {
            turns->hurry();
        }
        const int64_t number = running_;
        return abort_all_ || (number >= 0 && aborted_[(size_t) number % n_aborted] == number);
    }

private:
    struct Item {
        std::shared_ptr<Step> step;  // or none: the operation
        MemoryOp              op;
    };
    struct Piece {  // what one copy brings to the host: the rows of a step, or of one part of a wide one
        std::shared_ptr<Step> step;
        int                   slot, part;  // part < 0: all
    };
    using Lock = std::unique_lock<std::mutex>;

    // core.cpp: launching
    std::shared_ptr<Step> spare();
    void make_way();
    int64_t launch_live(const std::shared_ptr<Step> & step);
    void launch_step(const std::shared_ptr<Step> & step);
    int  launch_parts(const std::shared_ptr<Step> & step, size_t * n_done);
    int  decode(Step & step, const Part & part);
    void give_back(const Step & step, int slot);
    void read_stock(Step & step, const Part & part);
    void undo(const Step & step, size_t n_parts);
    void fail(Step & step, int code, const char * why);
    bool follows(const Step & step) const;
    int  apply(const MemoryOp & op);
    int  do_memory(const MemoryOp & op);
    bool injected(Fault fault, int * code);
    void span(const Step & step, Stage stage, int64_t begin_ns, int64_t end_ns);

    // core_rows.cpp: the ring, and what leaves it
    bool wide(const Step & step) const { return step.n_outputs > slot_rows_; }
    int  take_slot(const std::shared_ptr<Step> & step);
    void free_slot(int slot);
    void stage_out(const std::shared_ptr<Step> & step, int slot, int part);
    template <typename Wants, typename Copy>
    void copy_rows(const Step & step, int slot, int part, Wants && wants, Copy && copy) const;
    void move_out(Lock & lock, Step & step);
    void read_slot(const Step & step, int first, int n, float * to) const;
    std::shared_ptr<HostRows> spare_memory(std::vector<std::shared_ptr<HostRows>> & pool, size_t n_floats);
    template <typename Copy> void copy_wanted(const Step & step, int slot, int part, Copy && copy) const;
    void copy_now(const Step & step, int slot, int part);
    int64_t n_bytes(const Step & step, int slot, int part) const;
    bool samples() const { return collector_ && collector_->sampler(); }
    // Rows of it stay in the ring when it is done.
    bool stays(const Step & step) const { return !step.needs_all && step.n_outputs > 0 && !wide(step); }
    void process(const Piece & piece);
    void synchronize();
    void fetch(Lock & lock, Step & step);
    void computed(Step & step);
    void computed_at(const Step & step, int64_t when_ns);
    void finish_step(Step & step, State state);
    float * slot_data(int slot) const { return collector_->host() + (size_t) slot * slot_rows_ * n_vocab_; }
    std::shared_ptr<HostRows> host_rows(const Step & step);
    std::shared_ptr<HostRows> host_for(Step & step);

    // core_graph.cpp: drawn, note_drawn, known
    const float * fetch_row(Step & step, int output);

    // core_threads.cpp
    int  submit_memory(const MemoryOp & op);
    bool continues(const Step & step);
    void shares_nothing(size_t seq_id);
    void note(const MemoryOp & op);
    void recount();
    void seen(Step & step);
    void run_launcher();
    void run_watcher();
    std::shared_ptr<Step> wanted(bool computed_only) const;

    llama_context * const            ctx_;
    const std::shared_ptr<Collector> collector_;
    std::shared_ptr<ComputeThreads>  threads_;  // until `close`: they end with the context
    std::unique_ptr<Copier>          copier_;
    const Mode                       mode_;
    const int                        depth_, n_slots_, slot_rows_, n_vocab_, n_seq_max_;
    const Shape                      shape_;
    const bool                       threaded_;
    bool                             in_order_ = true;  // a decode waits for the graph before it: its inputs are uploaded
    ggml_backend_buffer_type_t       pinned_   = nullptr;

    std::mutex                         mutex_;
    std::condition_variable            work_, done_, copies_;
    std::deque<Item>                   queue_;
    std::deque<Piece>                  pieces_;
    std::deque<std::shared_ptr<Step>>  launched_;       // and not yet final
    std::vector<std::shared_ptr<Step>> slots_;          // whose rows are in each
    std::vector<std::shared_ptr<Step>> spares_;
    std::vector<std::shared_ptr<HostRows>> pool_, results_pool_, found_pool_;
    std::deque<std::shared_ptr<Step>>  live_;           // of `launch`, until `forget`
    std::shared_ptr<Step>              last_;
    int                                n_pending_ = 0;
    int64_t                            n_numbers_ = 0, last_computed_ns_ = 0;
    std::vector<Positions>             positions_;      // of each sequence once all that is queued is done
    std::vector<std::vector<char>>     shares_;         // which sequences may have cells in common
    bool                               replaces_ = false;  // a copied sequence takes the place of another
    std::atomic<bool>                  failed_{ false }; // a step did, and its submitter may not know yet
    int                                n_unobserved_ = 0; // such steps
    bool                               busy_ = false;     // the launcher is at something
    bool                               closing_ = false, closed_ = false, drain_ = true, launcher_done_ = false;
    lp_counters                        counters_ = {};
    std::deque<Span>                   spans_;
    std::atomic<size_t>                n_spans_{ 0 };
    Fault                              fault_      = Fault::none;
    int                                fault_code_ = 0;

    static constexpr size_t n_aborted = 8;  // more than are ever under way
    std::atomic<int64_t>    running_{ -1 };
    std::atomic<int64_t>    aborted_[n_aborted] = { { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 }, { -1 } };
    std::atomic<bool>    abort_all_{ false };
    std::thread          launcher_, watcher_;
};

}  // namespace lp

// The ring's slots and how rows leave them.
#include "core.hpp"
#include "guard.hpp"

#include <algorithm>
#include <cstring>

namespace lp {

// Pinned memory takes long to make, so a few are kept for the next steps of their size.
std::shared_ptr<HostRows> Core::host_rows(const Step & step) {
    return spare_memory(pool_, (size_t) step.n_outputs * (size_t) n_vocab_);
}

// The same for those of its rows that are wanted at once; the others may follow.
std::shared_ptr<HostRows> Core::host_for(Step & step) {
    if (!step.needs_all) {
        step.fetched.resize((size_t) step.n_outputs);
        for (int i = 0; i < step.n_outputs; i++) {
            step.fetched[(size_t) i] = step.wants(i, Step::row);
        }
    }
    return host_rows(step);
}

std::shared_ptr<HostRows> Core::spare_memory(std::vector<std::shared_ptr<HostRows>> & pool, size_t n_floats) {
    if (!pinned_) {
        return std::make_shared<HostRows>(n_floats, nullptr);
    }
    const Lock lock(mutex_);
    for (auto & kept : pool) {
        if (kept.use_count() == 1 && kept->n_floats >= n_floats) {
            std::atomic_thread_fence(std::memory_order_acquire);  // behind the last reader
            return kept;
        }
    }
    auto made = std::make_shared<HostRows>(n_floats, pinned_);
    for (auto & kept : pool) {
        if (kept.use_count() == 1) {  // too small
            kept = made;
            return made;
        }
    }
    if ((int) pool.size() <= n_slots_) {
        pool.push_back(made);
    }
    return made;
}

// A slot for rows of `step`. Where all are held, the oldest is moved out first; nobody waits for a reader.
int Core::take_slot(const std::shared_ptr<Step> & step) {
    Lock lock(mutex_);
    for (;;) {
        std::shared_ptr<Step> oldest;
        for (int i = 0; i < n_slots_; i++) {
            const auto & holder = slots_[(size_t) i];
            if (!holder) {
                slots_[(size_t) i] = step;
                return i;
            }
            const bool movable = holder->state == State::done && holder->n_exposed == 0 && !holder->moving;
            if (movable && (!oldest || holder->number < oldest->number)) {
                oldest = holder;
            }
        }
        if (oldest) {
            move_out(lock, *oldest);
        } else if (mode_ == Mode::sync && !launched_.empty()) {
            const auto first = launched_.front();
            fetch(lock, *first);
        } else if (!threaded_ && !pieces_.empty()) {
            const Piece piece = pieces_.front();
            pieces_.pop_front();
            lock.unlock();
            process(piece);
            lock.lock();
        } else {
            done_.wait(lock);
        }
    }
}

// With the lock.
void Core::free_slot(int slot) {
    slots_[(size_t) slot].reset();
    done_.notify_all();
}

// Copies the rows of a done step to host memory and frees its slot. Gives the lock back while it copies.
void Core::move_out(Lock & lock, Step & step) {
    step.moving = true;
    lock.unlock();
    std::shared_ptr<HostRows> host;
    try {
        host = host_rows(step);
    } catch (...) {
        lock.lock();
        step.moving = false;
        done_.notify_all();
        throw;
    }
    read_slot(step, 0, step.n_outputs, host->data);
    lock.lock();
    step.moving = false;
    step.host   = host;
    step.data   = host->data;
    free_slot(step.slot);
    step.slot = -1;
    counters_.n_copies++;
    counters_.n_moved++;
    counters_.n_bytes += (int64_t) sizeof(float) * step.n_outputs * n_vocab_;
}

// Rows of a step that is done, from its slot.
void Core::read_slot(const Step & step, int first, int n, float * to) const {
    const size_t row = sizeof(float) * (size_t) n_vocab_;
    if (mode_ == Mode::host) {
        memcpy(to, slot_data(step.slot) + (size_t) first * (size_t) n_vocab_, (size_t) n * row);
    } else {
        const size_t from = (size_t) step.slot * (size_t) slot_rows_ + (size_t) first;
        ggml_backend_tensor_get(collector_->staging(), to, from * row, (size_t) n * row);
    }
}

// Calls copy(staging row, first output, n) for runs of wanted rows that lie side by side in both.
template <typename Wants, typename Copy>
void Core::copy_rows(const Step & step, int slot, int part, Wants && wants, Copy && copy) const {
    const Part    whole = { 0, 0, 0, step.n_outputs };
    const Part &  p     = part < 0 ? whole : step.parts[(size_t) part];
    const int64_t base  = (int64_t) slot * slot_rows_;
    const auto    place = [&](int j) { return part < 0 ? j : step.places[(size_t) (p.first_output + j)]; };
    for (int j = 0, n = 1; j < p.n_outputs; j += n) {
        n = 1;
        if (!wants(place(j))) {
            continue;
        }
        while (j + n < p.n_outputs && place(j + n) == place(j) + n && wants(place(j + n))) {
            n++;
        }
        copy(base + j, place(j), n);
    }
}

// What of a slot is wanted on the host at once: calls copy(tensor, its row, n, where to) for runs of rows.
template <typename Copy> void Core::copy_wanted(const Step & step, int slot, int part, Copy && copy) const {
    const auto all = [](int) { return true; };
    if (step.needs_rows) {
        copy_rows(step, slot, part, [&](int output) { return step.wants(output, Step::row); }, [&](int64_t from, int to, int n) {
            copy(collector_->staging(), from, n, step.host->data + (size_t) to * (size_t) n_vocab_);
        });
    }
    if (step.results) {
        copy_rows(step, slot, part, all, [&](int64_t from, int to, int n) {
            copy(collector_->sampler()->results(), from, n, (float *) ((GraphResult *) step.results->data + to));
        });
    }
    if (step.found) {
        const GraphSampler & sampler = *collector_->sampler();
        copy_rows(step, slot, part, all, [&](int64_t from, int to, int n) {
            copy(sampler.candidates(), from, n, step.found->data + (size_t) to * 2 * (size_t) sampler.n_candidates());
        });
    }
}

// The same at once.
void Core::copy_now(const Step & step, int slot, int part) {
    if (mode_ == Mode::host && part < 0) {  // the rows are where they shall be
        const size_t first = (size_t) slot * (size_t) slot_rows_;
        for (const auto & [tensor, to] : { std::pair(collector_->sampler()->results(), step.results.get()),
                                           std::pair(collector_->sampler()->candidates(), step.found.get()) }) {
            if (to) {
                memcpy(to->data, (const char *) tensor->data + first * tensor->nb[1], step.graph.size() * tensor->nb[1]);
            }
        }
        return;
    }
    copy_wanted(step, slot, part, [](ggml_tensor * tensor, int64_t from, int n, float * to) {
        ggml_backend_tensor_get(tensor, to, (size_t) from * tensor->nb[1], (size_t) n * tensor->nb[1]);
    });
}

// Bytes that come to the host with these rows of a step.
int64_t Core::n_bytes(const Step & step, int slot, int part) const {
    int64_t n_bytes = 0;
    copy_wanted(step, slot, part, [&](const ggml_tensor * tensor, int64_t, int n, float *) {
        n_bytes += n * (int64_t) tensor->nb[1];
    });
    return n_bytes;
}

// After the launch of what fills `slot`: starts the copies of its rows, or does them where that needs no waiting.
void Core::stage_out(const std::shared_ptr<Step> & step, int slot, int part) {
    if (mode_ == Mode::events) {
        copier_->begin(slot);
        if (pinned_) {
            copy_wanted(*step, slot, part, [&](const ggml_tensor * tensor, int64_t from, int n, float * to) {
                copier_->copy(slot, tensor, from, n, to);
            });
            copier_->end(slot);
        }
        const Lock lock(mutex_);
        step->n_left++;
        pieces_.push_back({ step, slot, part });
        copies_.notify_one();
        return;
    }
    if (mode_ == Mode::sync) {
        synchronize();
    }
    const int64_t begin_ns = now_ns();
    copy_now(*step, slot, part);
    const Lock lock(mutex_);
    counters_.n_copies++;
    counters_.n_bytes += n_bytes(*step, slot, part);
    span(*step, Stage::copy, begin_ns, now_ns());
    free_slot(slot);
}

// Waits for one copy; on the watcher's thread, or on the one thread that drives everything.
void Core::process(const Piece & piece) {
    Step & step = *piece.step;
    int    code = 0;
    if (!pinned_) {  // copying into such memory blocks: here, not where steps are launched
        copier_->wait_computed(piece.slot);
        copy_wanted(step, piece.slot, piece.part, [&](const ggml_tensor * tensor, int64_t from, int n, float * to) {
            copier_->copy(piece.slot, tensor, from, n, to);
        });
        copier_->end(piece.slot);
    }
    copier_->wait_computed(piece.slot);
    const int64_t computed_ns = now_ns();
    copier_->wait_copied(piece.slot);
    const int64_t copied_ns = now_ns();
    const bool    bad       = injected(Fault::copy, &code);

    const Lock lock(mutex_);
    const int  n_rows = piece.part < 0 ? step.n_outputs : step.parts[(size_t) piece.part].n_outputs;
    if (n_rows > 0) {
        counters_.n_copies++;
        counters_.n_bytes += n_bytes(step, piece.slot, piece.part);
        span(step, Stage::copy, computed_ns, copied_ns);
    }
    computed_at(step, computed_ns);
    if (bad || step.released || !stays(step)) {
        free_slot(piece.slot);
        if (piece.part < 0) {
            step.slot = -1;
        }
    }
    if (bad) {
        set_error("the copy of its rows failed");
        fail(step, code, lp_last_error());
    } else if (--step.n_left == 0 && step.state == State::launched) {
        finish_step(step, State::done);
    }
}

// On the launching thread: waits for everything that was launched.
void Core::synchronize() {
    llama_synchronize(ctx_);
    const Lock lock(mutex_);
    counters_.n_syncs++;
    const auto launched = launched_;
    for (const auto & step : launched) {
        computed(*step);
    }
}

// Brings a launched step's rows to the host. Gives the lock back meanwhile.
void Core::fetch(Lock & lock, Step & step) {
    step.fetching = true;
    if (!step.computed) {
        lock.unlock();
        synchronize();
        lock.lock();
    }
    if (step.n_outputs == 0 || step.slot < 0 || step.host || step.released) {
        finish_step(step, State::done);
        return;
    }
    lock.unlock();
    const int64_t begin_ns = now_ns();
    int           code     = 0;
    const bool    copied   = guard(false, [&] {
        if (step.needs_rows) {
            step.host = host_for(step);
        }
        copy_now(step, step.slot, -1);
        return true;
    });
    const bool    bad  = injected(Fault::copy, &code);
    const int     slot = step.slot;
    lock.lock();
    if (!copied || bad || !stays(step)) {
        free_slot(step.slot);
        step.slot = -1;
    }
    if (!copied || bad) {
        step.host.reset();
        fail(step, bad ? code : LP_ERROR_STEP, bad ? "the copy of its rows failed" : lp_last_error());
        return;
    }
    counters_.n_copies++;
    counters_.n_bytes += n_bytes(step, slot, -1);
    span(step, Stage::copy, begin_ns, now_ns());
    if (step.host && step.needs_all) {
        step.data = step.host->data;
    }
    finish_step(step, State::done);
}

// With the lock. A graph begins once its inputs are set and the one before it has ended.
void Core::computed_at(const Step & step, int64_t when_ns) {
    const int64_t begin_ns = std::max(step.stamps.inputs ? step.stamps.inputs : step.stamps.launch, last_computed_ns_);
    span(step, Stage::compute, begin_ns, when_ns);
    counters_.compute_ns += std::max<int64_t>(when_ns - begin_ns, 0);
    last_computed_ns_ = when_ns;
}

// With the lock: the device is through with this step.
void Core::computed(Step & step) {
    if (step.computed) {
        return;
    }
    step.computed = true;
    computed_at(step, now_ns());
    if (step.pending) {
        step.pending = false;
        n_pending_--;
    }
    done_.notify_all();
}

// With the lock.
void Core::finish_step(Step & step, State state) {
    step.state = state;
    if (step.pending) {
        step.pending = false;
        n_pending_--;
    }
    for (auto it = launched_.begin(); it != launched_.end(); ++it) {
        if (it->get() == &step) {
            launched_.erase(it);
            break;
        }
    }
    if (step.slot >= 0 && (step.released || state == State::failed) && mode_ != Mode::events) {
        free_slot(step.slot);
        step.slot = -1;
    }
    done_.notify_all();
}

// ---- readers
const float * Core::expose(const std::shared_ptr<Step> & step, bool * in_place) {
    Lock lock(mutex_);
    done_.wait(lock, [&] { return !step->moving; });
    if (step->slot >= 0) {
        int n_exposed = 0;
        for (const auto & holder : slots_) {
            n_exposed += holder && holder != step && (holder->n_exposed > 0 || holder->moving);
        }
        // Enough slots must stay for what is being computed, whatever readers do.
        if (mode_ == Mode::host && n_exposed < n_slots_ - depth_) {
            step->n_exposed++;
            *in_place = true;
            return step->data;
        }
        move_out(lock, *step);
    }
    *in_place = false;
    return step->data;
}

void Core::unexpose(Step & step) {
    const Lock lock(mutex_);
    if (--step.n_exposed == 0 && step.released && step.slot >= 0) {
        free_slot(step.slot);
        step.slot = -1;
    }
}

void Core::release(Step & step) {
    const Lock lock(mutex_);
    step.released = true;
    seen(step);
    if (step.state == State::launched && mode_ == Mode::sync && !step.fetching) {
        finish_step(step, State::done);  // nobody will ask for it, and what comes next is ordered behind it
    }
    if (step.state == State::done && step.slot >= 0 && step.n_exposed == 0 && !step.moving) {
        free_slot(step.slot);
        step.slot = -1;
        step.data = nullptr;
    }
}

// ---- the thread that launches
Step * Core::finish(int64_t number) {
    for (const auto & step : live_) {
        if (step->number != number) {
            continue;
        }
        if (threaded_) {
            wait(*step, -1);
            observe(*step);
            return step.get();
        }
        Lock lock(mutex_);
        if (step->state != State::launched || mode_ == Mode::stock) {
            return step.get();
        }
        const int64_t begin_ns = now_ns();
        counters_.n_waits++;
        while (step->state == State::launched && mode_ == Mode::events) {
            const Piece piece = pieces_.front();
            pieces_.pop_front();
            lock.unlock();
            process(piece);
            lock.lock();
        }
        if (step->state == State::launched && mode_ == Mode::sync) {
            fetch(lock, *step);
        }
        counters_.wait_ns += now_ns() - begin_ns;
        span(*step, Stage::wait, begin_ns, now_ns());
        return step.get();
    }
    set_error("there is no such step, or its rows were given up");
    return nullptr;
}

const float * Core::row(Step & step, int entry) {
    const int output = step.output_of_entry[(size_t) entry];
    if (output < 0) {
        return nullptr;
    }
    if (mode_ != Mode::stock || threaded_) {
        return step.data ? step.data + (size_t) output * (size_t) n_vocab_ : fetch_row(step, output);
    }
    if (!step.computed) {
        const Lock lock(mutex_);
        step.computed = true;
        counters_.n_syncs++;  // llama.cpp's getters do
    }
    return llama_get_logits_ith(ctx_, entry);
}

void Core::forget(int64_t number) {
    for (auto it = live_.begin(); it != live_.end(); ++it) {
        if ((*it)->number == number) {
            const auto step = *it;
            live_.erase(it);
            release(*step);
            const Lock lock(mutex_);
            if (mode_ == Mode::stock) {
                launched_.clear();
            }
            return;
        }
    }
}

}  // namespace lp

"""The engine loop, which turns plans into steps and tokens into deliveries.

Open this file to change the order of operations in a step, or between two steps.

A turn of the loop, in this order:

1. Execute the commands that have arrived (``Inbox``): new requests, cancellations, changes, questions.
2. Perform the changes to KV cells, then plan a step and launch it (``StepsInFlight``).
3. Deliver the tokens of the previous step while the new step is computed.
4. Sample the oldest step in flight, and commit its tokens. Other threads make draws that take long (``LateDraws``);
   their requests skip steps until the tokens arrive.

If a launch returns only when its step is computed, delivery comes after sampling instead. A stop string that delivery
detects ends a request that is already part of the next step; the request's token of that step is discarded.

The principle: only the engine thread touches the scheduler, the executor and the samplers. A request whose
``batch_plan`` is no longer the step's plan has left the step: nothing is drawn or recorded for it, because its sampler
must not see a discarded token. A failure ends only the requests of its step. After a defect of the loop itself, every
current and later request gets an error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import takewhile
from operator import attrgetter
from queue import Empty
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from llamapipe._engine.policy.core import UNLIMITED, BatchPlan, Request, State, Unused
from llamapipe._engine.policy.kv import has_media
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.runtime.disk_cache import (
    CLOSE_S,
    MIN_GAIN,
    PATIENCE_S,
    REST_S,
    CachedSequence,
    DiskCache,
    Entry,
    Writes,
)
from llamapipe._engine.runtime.executor import Executor
from llamapipe._engine.runtime.in_flight import StepsInFlight, draw, record_logprobs, score
from llamapipe._engine.runtime.inbox import Inbox
from llamapipe._engine.runtime.late_draws import LateDraws
from llamapipe._engine.runtime.mailboxes import ResultDispatcher
from llamapipe._engine.runtime.micro_batches import MicroBatchSwitch
from llamapipe._engine.runtime.snapshot import Snapshot
from llamapipe._engine.runtime.state_layout import Saved
from llamapipe._engine.runtime.time_counter import TimeCounter
from llamapipe.errors import BackendError, ContextFullError, DecodeError, InvalidRequestError, NoToken
from llamapipe.llama.native_pipeline import StepAbortedError
from llamapipe.results import EngineStats

if TYPE_CHECKING:
    from llamapipe._engine.runtime.encoder import MediaEncoder
    from llamapipe.kv_events import Publisher
    from llamapipe.pipeline.trace import Trace
    from llamapipe.work.long_work import LongWork


def _n_tokens_of(request: Request, following: Sequence[tuple[Request, int]]) -> int:
    """Return how many undelivered tokens at the start of ``following`` are in this request's sequence."""
    tokens = takewhile(lambda pair: pair[0] is request, following)
    return sum(token >= 0 and token not in request.stop_tokens for _, token in tokens)


_MAX_SKIPPED_WINDOWS = 7
_MOST_STATES = 4  # maximum states of a snapshot; each may be as large as a thousand cells
_MOST_CONVERSATIONS = 256  # the number of most recently used conversations that are remembered
_MAX_COMMANDS = 512  # between two steps, so that requests progress while thousands of others arrive
_sampler = attrgetter("sampler")  # made in C, because every step makes a list with it
_LATER = int(NoToken.LATER)  # a plain int, because every step compares with it
_LOOK_S = 0.02  # seconds between two checks of the draws that other threads make
# Seconds after which a request with a late draw lends its slot; saving and loading its cells takes milliseconds.
_LEND_S = 0.05


class EngineLoop:
    """The steps of one context, from ``run`` until a ``stop`` command. Methods are for the engine thread.

    ``inbox``: the commands of other threads. ``dispatcher``: wakes the callers that wait for results. ``in_flight``:
    the launched steps; other threads may abort them. ``open``: the requests whose end is not delivered yet. ``trace``:
    records plan and deliver stages. ``kv_events``: tells routers which prefixes the cache holds. ``long_work``: threads
    for callers' work, which end with the loop. ``encoder``: encodes images and sounds, for models that accept them.
    ``disk``: the second level of the prefix cache.

    ``window_s``: how long an idle loop waits for more requests after the request that woke it. ``left_queue``: is
    called with the requests that no longer wait for a slot.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        window_s: float,
        left_queue: Callable[[Sequence[Request]], object],
        trace: Trace | None = None,
        kv_events: Publisher | None = None,
        long_work: LongWork | None = None,
        encoder: MediaEncoder | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        self.inbox = Inbox()
        self.dispatcher = ResultDispatcher(at_launch=not executor.overlaps)
        if not executor.overlaps:
            executor.wake_at_launch(self.dispatcher.wakes)
        self.in_flight = StepsInFlight(executor)
        self.open: dict[Request, None] = {}
        self._trace = trace
        self._kv_events = kv_events
        self._long_work = long_work
        self._encoder = encoder
        self._disk = disk
        # By file that is being read: the requests that wait for it.
        self._reading: dict[Entry, list[Request]] = {}
        self._conversations: OrderedDict[Hashable, tuple[list[int], Hashable]] = OrderedDict()
        self._overdue: set[Entry] = set()  # files whose reads take too long, so no request waits for them
        self._n_resets = 0  # of the cache; a file whose read began before a reset is not cached
        if disk is not None:
            executor.offer_evicted(self._take_evicted)
        self._scheduler = scheduler
        self._executor = executor
        self._left_queue = left_queue
        self._micro_batches = MicroBatchSwitch(executor)
        scheduler.set_depth(executor.depth if executor.overlaps else 1)
        self._window_s = window_s
        self._n_skip = self._n_skipped = 0  # windows to skip after a useless one, and windows skipped since
        self._stopping = False
        self.closed = False  # the context is freed
        self.failure: BackendError | None = None  # a defect of the loop: every request fails with it
        self._undelivered: list[tuple[Request, int]] = []  # the tokens of the step sampled last
        self._last_step = -1  # the number of that step
        # When the last step was sampled or the last wait ended, plus the time of copying states since.
        self._turn_began_s = 0.0
        self._late = LateDraws()
        executor.notify_drawn(lambda: self.inbox.put(self.take_drawn))
        self._step_times = TimeCounter()
        self._n_wants_logprobs = 0  # open requests that want log-probabilities
        self._unguessed: dict[str, int] = {}  # number of requests without guesses, by the reason
        # The number of the last step with guessed tokens, how many it had, and how many were right.
        self._last_guesses = (-1, 0, 0)
        self._n_accepted = 0  # right guesses of all steps up to that one
        self._n_requests = self._n_steps = self._n_prompt = self._n_generated = 0
        self._plan_s = self._launch_s = self._sample_s = self._deliver_s = self._idle_s = 0.0

    def __repr__(self) -> str:
        return f"<EngineLoop n_steps={self._n_steps} n_in_flight={len(self.in_flight.steps)} n_open={len(self.open)}>"

    # ---- commands
    def add(self, *requests: Request) -> None:
        """Accept new requests."""
        self._n_requests += len(requests)
        self.open.update(dict.fromkeys(requests))
        for request in requests:
            self._n_wants_logprobs += request.wants_logprobs
            if unguessed := request.spec.unguessed:
                self._unguessed[unguessed] = self._unguessed.get(unguessed, 0) + 1
            if self.failure is not None:
                self._give_up(request, self.failure)
                continue
            if self._disk is not None:
                self._look_on_disk(self._disk, request)
            self._scheduler.add(request)
            if self._encoder is not None and not request.is_encoded:
                self._encoder.put(request, self._post_encoded)
            if request.cancelled:
                self.cancel(request)

    def _post_encoded(self, request: Request, error: Exception | None) -> None:
        """Post a command once a request's images and sounds are encoded. The encoder's thread calls this."""
        self.inbox.put(self._continue_encoded, request, error)

    def _continue_encoded(self, request: Request, error: Exception | None) -> None:
        if request.state is State.FINISHED:
            return
        if error is None:
            self._scheduler.queue_prepared(request)
        else:
            self._fail([request], error)

    def _look_on_disk(self, disk: DiskCache, request: Request) -> None:
        """Make a new request wait for a file if the file has much more of its prefix than memory has."""
        cache = self._scheduler.cache
        if request.spans or not request.uses_cache or len(request.tokens) <= MIN_GAIN or self._overdue:
            return
        limit = len(request.tokens) - 1
        if request.logprob_targets is not None:
            limit = min(limit, request.logprob_targets.wanted_from)
        hit = disk.find(request.cell_keys(), request.spec.cache_key, limit)
        if hit is None or hit[0] < cache.find(request).n + MIN_GAIN:
            return
        entry = hit[1]
        if cache.n_bytes_of(entry.n) > cache.host_budget:
            return
        if entry in self._reading:
            request.awaits_prefix = True
            self._reading[entry].append(request)
            return
        patience = threading.Timer(PATIENCE_S, self.inbox.put, (self._give_up_read, entry))
        patience.daemon = True
        n_resets = self._n_resets

        def done(sequence: CachedSequence | None) -> None:
            patience.cancel()
            self.inbox.put(self._continue_read, entry, sequence, n_resets)

        try:
            patience.start()
        except RuntimeError:  # the process may not start another thread, so the request's tokens are computed
            return
        request.awaits_prefix = True
        self._reading[entry] = [request]
        disk.read(entry, done)

    def _continue_read(self, entry: Entry, sequence: CachedSequence | None, n_resets: int) -> None:
        """Cache the sequence that was read from a file, and continue the requests that wait for it."""
        self._overdue.discard(entry)
        requests = self._reading.pop(entry, [])
        if sequence is not None and self.failure is None and n_resets == self._n_resets:
            pinned_by = next((request for request in requests if request.state is not State.FINISHED), None)
            self._take_in(sequence, pinned_by)
        elif sequence is not None:
            sequence.close()
        self._queue_prepared(requests)

    def _give_up_read(self, entry: Entry) -> None:
        """Continue requests that waited too long for a file. Until its read ends, no request waits for the disk."""
        if entry in self._reading:
            self._overdue.add(entry)
            self._queue_prepared(self._reading.pop(entry))

    def _queue_prepared(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.state is not State.FINISHED:
                self._scheduler.queue_prepared(request)

    def cancel(self, request: Request) -> None:
        """End a request in any state."""
        if request.arrival < 0:
            request.cancelled = True  # ``add``, which comes later, checks it
        elif request.state is not State.FINISHED:
            self._scheduler.cancel(request)
            self._deliver_end(request)

    def resume(self, request: Request) -> None:
        """Continue a paused request, as far as its token budget allows."""
        if request.state is not State.FINISHED:
            self._scheduler.resume(request)

    def change(self, request: Request, n_keep: int | None, tokens: Sequence[int]) -> None:
        """Trim a resumable request's sequence to ``n_keep`` tokens, then append ``tokens``. Its sampler starts over."""
        if request.state is State.FINISHED:
            return
        if n_keep is not None:
            self._scheduler.trim(request, n_keep)
        if tokens:
            self._scheduler.append(request, tokens)
        request.sink.restart_text(len(request.full_sequence) <= request.n_prompt)
        if request.sampler is not None and request.spec.sampler_factory is not None:
            request.spec.sampler_factory.rebuild(request.sampler, request)

    def take_drawn(self) -> None:
        """Record the tokens that other threads have drawn."""
        for request, token in self._late.take(self._executor, self.open):
            if token >= 0 and request.wants_logprobs and request.sampler is not None:
                request.logprobs.append(request.sampler.logprobs(-1))
            self._n_generated += token >= 0
            self._scheduler.can_guess = self._scheduler.can_guess or request.spec.speculates
            self._scheduler.accept_drawn(request, token)
            if token == NoToken.SETTLED:  # its last token is delivered already
                self._deliver_end(request)
            else:
                self._undelivered.append((request, token))
        self._await_end_states()
        self._deliver()

    def _look_after_late_draws(self) -> bool:
        """Give other requests the threads and slots of draws that take long. Return whether a slot became free."""
        self._executor.add_spare_thread()
        if not self._scheduler.n_queued:
            return False
        late = self._late.late_by(_LEND_S)
        return sum(self._scheduler.lend(request, waited_s / _LEND_S) for request, waited_s in late) > 0

    def _await_end_states(self) -> None:
        self._late.await_end_states(self._scheduler.awaiting_end, self._executor)
        self._scheduler.awaiting_end.clear()

    def fork(self, parent: Request, child: Request) -> None:
        """Accept a request that continues the sequence of a resumable one. It fails if the parent has ended."""
        self._scheduler.fork(parent, child)
        self.add(child)
        if parent.state is State.FINISHED:
            self._scheduler.fail(child, parent.error or InvalidRequestError("the generation was cancelled"))
            self._deliver_end(child)

    def snapshot(self, request: Request) -> Snapshot:
        """Return a snapshot of a resumable request that does not run. Raises the error of a failed request."""
        if request.error is not None:
            raise request.error
        self._change_cells()
        kept, executor = request.saved_cells, self._executor
        n_cells, state = 0, None if kept is None else executor.read_saved(kept.key)
        if kept is not None and state is not None:
            n_cells = kept.n
        elif request.slot >= 0 and request.n_past and request.uses_cache:
            state = executor.read_cells(request.slot)
            n_cells = request.n_past if state is not None else 0
        states = self._states_of(request, n_cells)
        # A constraint cannot start in the middle of a text, so all tokens that are left count as the prompt.
        n_prompt = len(request.tokens) if request.dropped else request.n_prompt
        return Snapshot(request.tokens.copy(), n_prompt, n_cells, state or b"", request.active_from, states)

    def _states_of(self, request: Request, n: int) -> list[tuple[int, bytes]]:
        """Return the last few saved states of prefixes of a request's first ``n`` cells, for its snapshot."""
        cache = self._scheduler.cache
        keys = cache.states_of(request.cell_keys()[:n], request.spec.cache_key)
        states = [(n, self._executor.read_saved(key)) for n, key in keys[-_MOST_STATES:]]
        return [(n, state) for n, state in states if state is not None]

    def restore(self, request: Request, snapshot: Snapshot) -> None:
        """Accept a new request with the cells and states of a snapshot."""
        if request.uses_cache:
            self._take_in_snapshot(request, snapshot)
        self.add(request)

    def reset_cache(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Drop cached cells; see ``KvCache.reset``."""
        self._change_cells()  # evicted cells then wait to be written, where ``DiskCache.forget`` drops them
        self._n_resets += 1
        self._scheduler.cache.reset(is_wanted)

    def _take_in_snapshot(self, request: Request, snapshot: Snapshot) -> None:
        tokens = request.cell_keys()
        n_tokens = snapshot.n_cells or len(tokens)
        cells = self._executor.copy_to_native(snapshot.state) if snapshot.state else None
        if snapshot.n_cells and cells is None:
            return
        copies = [(n, self._executor.copy_to_native(state)) for n, state in snapshot.states if n <= n_tokens]
        states = [(n, state) for n, state in copies if state is not None]
        cache_key = request.spec.cache_key
        self._take_in(
            CachedSequence([*tokens[:n_tokens]], cache_key, cells, states, snapshot.is_stale), request
        )

    def _take_in(self, sequence: CachedSequence, pinned_by: Request | None) -> None:
        """Keep cells and states from elsewhere, if there is room. ``pinned_by``: the request that needs them now."""
        cache, tokens, cache_key = self._scheduler.cache, sequence.tokens, sequence.cache_key
        new = [
            (cache.take_in_state(tokens[:n], cache_key, state.n_bytes), state) for n, state in sequence.states
        ]
        if (cells := sequence.cells) is not None:
            new.append((cache.take_in(tokens, cache_key, cells.n_bytes, pinned_by, sequence.is_stale), cells))
        for key, kept in new:
            if key is None:
                kept.close()
            else:
                self._executor.keep_saved(key, kept)

    # ---- the prefix cache on disk
    def _take_evicted(self, evicted: Unused, cells: Saved) -> bool:
        """Write cells that were evicted from host memory to disk.

        Return False if they are not worth writing, or if too many sequences wait to be written.
        """
        disk = self._disk
        if (
            disk is None
            or not disk.has_room
            or has_media(evicted.tokens)
            or not disk.wants(evicted.tokens, evicted.cache_key)
        ):
            return False
        if evicted.key < 0:
            disk.write(
                CachedSequence(evicted.tokens, evicted.cache_key, None, [(len(evicted.tokens), cells)])
            )
        else:
            states = self._copy_states(evicted)
            disk.write(CachedSequence(evicted.tokens, evicted.cache_key, cells, states, evicted.is_stale))
        return True

    # ---- conversations
    def _remember(self, key: Hashable, tokens: list[int], cache_key: Hashable) -> None:
        known = self._conversations
        known[key] = tokens, cache_key
        known.move_to_end(key)
        if len(known) > _MOST_CONVERSATIONS:
            known.popitem(last=False)

    def conversation(self, key: Hashable) -> CachedSequence | None:
        """Return a copy of a conversation's cells and states, which the caller closes; None if there are none."""
        tokens, cache_key = self._conversations.get(key, ((), None))
        self._change_cells()
        holder = self._scheduler.cache.holder(tokens, cache_key) if tokens else None
        if holder is None or has_media(holder.tokens):
            return None
        return self._copy_cells(holder)

    def take_in_conversation(self, key: Hashable, sequence: CachedSequence) -> None:
        """Cache and remember a conversation's cells from elsewhere, if there is room."""
        self._remember(key, sequence.tokens, sequence.cache_key)
        self._take_in(sequence, None)

    def forget_conversation(self, key: Hashable) -> int:
        """Drop the unused cells of a conversation, in slots and host memory. Return the largest number of tokens."""
        cache, n = self._scheduler.cache, 0
        tokens, cache_key = self._conversations.pop(key, ((), None))
        while tokens and (holder := cache.holder(tokens, cache_key)) is not None:
            cache.drop(holder)
            n = max(n, len(holder.tokens))
        return n

    def hold_conversation(self, key: Hashable) -> None:
        """Evict a conversation's cells after all others, because it continues soon; see ``KvCache.hold``."""
        tokens, cache_key = self._conversations.get(key, ((), None))
        if tokens:
            self._scheduler.cache.hold(key, tokens, cache_key)

    def release_conversation(self, key: Hashable, is_done: bool) -> None:
        """End ``hold_conversation``; see ``KvCache.release``."""
        self._scheduler.cache.release(key, is_done)

    def _copy_cells(self, unused: Unused) -> CachedSequence | None:
        """Return a copy of cells and their states; None if copying failed."""
        cells = None
        if unused.slot >= 0:
            cells = self._executor.copy_cells(unused.slot)
        elif unused.key >= 0:
            cells = self._executor.copy_saved(unused.key)
        states = self._copy_states(unused)
        if cells is None and not states:
            return None
        return CachedSequence(unused.tokens, unused.cache_key, cells, states, unused.is_stale)

    def _copy_states(self, unused: Unused) -> list[tuple[int, Saved]]:
        states = [(n, self._executor.copy_saved(key)) for n, key in unused.states[-_MOST_STATES:]]
        return [(n, state) for n, state in states if state is not None]

    def _write_unused(self, disk: DiskCache, deadline: float | None = None) -> bool:
        """Write one sequence that no request uses, the most recently used first. Return False if there is none.

        ``deadline``: a time of ``monotonic``. Until then write all of them, even sequences that have grown little.
        """
        self._change_cells()
        for unused in self._scheduler.cache.offer_unused(again=deadline is not None):
            if deadline is not None and not disk.wait_for_room(deadline):
                return False
            if not disk.wants(unused.tokens, unused.cache_key, at_end=deadline is not None):
                continue
            copy = self._copy_cells(unused)
            if copy is None:
                continue
            disk.write(copy)
            if deadline is None:
                return True
        return False

    def _write_rest(self, disk: DiskCache) -> None:
        """Write the unused sequences before the engine ends, as far as time allows."""
        if disk.writes == "never":
            return
        deadline = monotonic() + CLOSE_S
        disk.begin_rest()
        self._scheduler.cache.save_parked_windows()
        self._write_unused(disk, deadline)
        disk.close(deadline)

    def set_cache_writes(self, when: Writes) -> None:
        """Change when sequences are written to disk."""
        if self._disk is not None:
            self._disk.writes = when

    def saved_sizes(self, request: Request) -> tuple[int, int, int]:
        """Return three sizes in bytes: a request's saved cells (0: not saved), their need, and the host budget."""
        self._change_cells()
        kept, cache = request.saved_cells, self._scheduler.cache
        n_bytes = 0 if kept is None or not cache.has(kept) else kept.n_bytes
        return n_bytes, cache.n_bytes_of(len(request.tokens)), cache.host_budget

    def release(self, request: Request) -> None:
        """Unpin the saved cells of a request that has ended, so that they may be dropped."""
        self._scheduler.cache.unpin(request)

    def stop(self, drain: bool) -> None:
        """End the loop, after the open requests have finished (``drain``) or immediately."""
        self._stopping = True
        self._deliver()  # the tokens sampled last are part of the sequences already
        for request in list(self.open):
            if not drain:
                self.cancel(request)
            elif not request.spec.resumable:
                self._run_to_end(request)

    def stats(self) -> EngineStats:
        """Return a copy of the counters. Other threads may call this after the engine thread has ended."""
        return EngineStats(
            n_requests=self._n_requests,
            n_preempted=self._scheduler.n_preempted,
            n_active=self._scheduler.n_active,
            n_used_cells=self._scheduler.n_used_cells,
            n_cache_hit_tokens=self._scheduler.cache.n_hit_tokens,
            n_saved=self._scheduler.cache.n_saved,
            n_restored=self._scheduler.cache.n_restored,
            cache_bytes=0 if self.closed else self._scheduler.cache.n_host_bytes,
            step_times=self._step_times.copy(),
            n_queued=self._scheduler.n_queued,
            n_micro_batches=self._scheduler.batch_builder.n_micro_batches,
            steps=self._n_steps,
            n_prompt_tokens=self._n_prompt - self._scheduler.n_again,
            n_completion_tokens=self._n_generated,
            idle_s=self._idle_s,
            plan_s=self._plan_s,
            launch_s=self._launch_s,
            sample_s=self._sample_s,
            deliver_s=self._deliver_s,
            n_drafted=self._scheduler.gate.n_drafted,
            n_accepted=self._scheduler.gate.n_accepted,
            n_drafted_by_model=self._scheduler.gate.n_drafted_by_model,
            n_accepted_by_model=self._scheduler.gate.n_accepted_by_model,
            n_forced=self._scheduler.gate.n_forced,
            n_steps_saved=self._scheduler.gate.n_steps_saved,
            no_guesses=self._scheduler.gate.no_guesses,
            unguessed=self._unguessed.copy(),
            n_adapter_changes=self._scheduler.turns.n_changes,
            n_disk_reads=0 if self._disk is None else self._disk.n_read,
            n_disk_writes=0 if self._disk is None else self._disk.n_written,
            n_encoded_media=0 if self._encoder is None else self._encoder.n_encoded,
            **self._executor.stats(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the scheduler's state is inconsistent, or differs from llama.cpp's memory.

        Other threads may call this after the engine thread has ended.
        """
        self._scheduler.check_integrity()
        if not self.in_flight.steps and not self.closed:
            self._change_cells()
            expected = self._scheduler.n_cells_by_slot()
            actual = {slot: self._executor.sequence_end(slot) for slot in expected}
            assert actual == expected, f"cells by slot: {actual}, expected {expected}"

    # ---- the loop
    def run(self) -> None:
        """Run until a ``stop`` command. Free the context at the end."""
        try:
            self._loop()
        except BaseException as e:  # callers wait for this thread: it must not end without an answer
            self._serve_errors(e)
        finally:
            self.closed = True
            for owner in (
                self.dispatcher,
                self.in_flight,
                self._scheduler.gate.drafter,
                self._executor,
                self._kv_events,
                self._long_work,
                self._encoder,
                self._disk,
            ):
                if owner is not None:
                    owner.close()

    def _loop(self) -> None:
        scheduler, inbox = self._scheduler, self.inbox
        dispatcher, steps = self.dispatcher, self.in_flight.steps
        started = perf_counter()
        while True:
            while inbox.urgent:  # thousands of new requests may wait before a cancel in the inbox
                self.cancel(inbox.urgent.popleft())
            for _ in range(_MAX_COMMANDS):
                if inbox.empty():
                    break
                inbox.run_next()
            if dispatcher.pending:  # a caller that cancelled need not wait for a step
                self._flush()
            if scheduler.cache.memory_ops:
                # This comes before the plan, because sequences that cannot be removed in part are computed again.
                self._change_cells()
            if scheduler.drafts and scheduler.may_draft:  # drafting takes time: deliver first
                self._deliver()
                self._flush(together=True)
            # After a change from two micro-batches to one, a step may be in flight that has to be sampled first.
            plan = scheduler.plan() if len(steps) < scheduler.max_in_flight else None
            if scheduler.dequeued:
                self._left_queue(scheduler.take_dequeued())
            if plan is not None:
                self._launch(plan, started)
            self._deliver()
            if self._kv_events is not None:
                self._kv_events.flush()

            # There are three cases for what to do next:
            # 1. A step is in flight, and no further one can be launched: sample it.
            if steps and (plan is None or len(steps) >= scheduler.max_in_flight):
                self._sample()
                started = perf_counter()
                if scheduler.has_work or steps:
                    continue
                # All requests wait for their callers: the first one to return must not start a step without the
                # others.
                self._change_cells()
            # 2. The launch failed, or there is room for another micro-batch: plan again.
            elif plan is not None:
                started = perf_counter()
                continue
            # 3. Nothing can be computed: wait for a command.
            self._deliver()
            if scheduler.dequeued:  # requests that ended without ever having a slot
                self._left_queue(scheduler.take_dequeued())
            self._flush(together=True)  # also wakes callers that an interrupted thread failed to wake
            if self._stopping:
                if not self.open:
                    self._left_queue(scheduler.take_dequeued())
                    if self._disk is not None:
                        self._write_rest(self._disk)
                    return
                self._end_waiting()
                if self._late.requests or scheduler.is_preparing:
                    inbox.run_next()
                continue
            self._wait()
            waited = self._turn_began_s = perf_counter()
            self._idle_s += waited - started
            started = waited

    def _wait(self) -> None:
        """Wait for a command, then a moment longer for more requests if that has paid off lately."""
        inbox, scheduler = self.inbox, self._scheduler
        if self._kv_events is not None:
            self._kv_events.flush()
        if inbox.empty():
            self._executor.yield_cores()
            if not inbox.single_caller and not self.open:
                self._executor.park_threads()
        while self._late.requests:  # hanging draws must not hold up other draws
            try:
                inbox.run_next(_LOOK_S)
                break
            except Empty:
                if self._look_after_late_draws():
                    return
        else:
            self._await_command()
        if inbox.single_caller or self._window_s <= 0 or not scheduler.has_work:
            return
        if self._n_skipped < self._n_skip:
            self._n_skipped += 1
            return
        deadline = perf_counter() + self._window_s
        n_arrived = 0
        while not (self._stopping or (scheduler.n_active and scheduler.all_ready)):
            left_s = deadline - perf_counter()
            if left_s <= 0:
                break
            try:
                inbox.run_next(left_s)
            except Empty:
                break
            n_arrived += 1
        self._n_skip = 0 if n_arrived else min(2 * self._n_skip + 1, _MAX_SKIPPED_WINDOWS)
        self._n_skipped = 0

    def _await_command(self) -> None:
        """Run the next command. Until one arrives, write unused sequences to disk from time to time."""
        disk = self._disk
        while disk is not None and disk.writes == "always":
            try:
                self.inbox.run_next(REST_S)
                return
            except Empty:
                if disk.has_room and not self._write_unused(disk):
                    break
        self.inbox.run_next()

    def _change_cells(self) -> bool:
        """Perform the queued changes to KV cells. Return False if a sequence lost its cells."""
        began, gate = perf_counter(), self._scheduler.gate
        changes = self._executor.change_cells(self._scheduler.cache.take_memory_ops())
        if gate.copies_states:  # the gate counts copies separately
            self._turn_began_s += perf_counter() - began
        return not any(changes) or self._scheduler.note_cell_changes(changes)

    # ---- one step
    def _launch(self, plan: BatchPlan, started: float) -> None:
        """Launch a plan and handle a failure. ``started``: when planning began, in ``perf_counter`` seconds."""
        gate, began = self._scheduler.gate, perf_counter()
        keeps_cells = not self._scheduler.cache.memory_ops or self._change_cells()
        if plan.n_guessed and gate.copies_states:
            n_copied = sum(n > 1 for _, n in plan.scheduled)
            gate.observe_copies(n_copied, perf_counter() - began)
        if not keeps_cells or (not plan.repeats and not self._make_samplers(plan)):
            self._scheduler.drop(plan)  # a request of the step lost its cells or failed: plan again
            return
        samplers: list[Any] = [] if plan.repeats else list(map(_sampler, plan.requests))
        planned = perf_counter()
        try:
            self.in_flight.launch(plan, samplers, planned)
        except (ContextFullError, DecodeError) as e:
            self._end_failed_step(plan, e)
        if self._trace is not None and self._trace.on and self.in_flight.steps:
            self._trace.add("plan", self.in_flight.steps[-1].step_id, started, planned)
        self._plan_s += planned - started
        self._launch_s += perf_counter() - planned

    def _make_samplers(self, plan: BatchPlan) -> bool:
        """Make the missing samplers. Return False if a request failed because there was no memory for its sampler."""
        for request in plan.requests:
            if request.sampler is None and request.spec.sampler_factory is not None:
                try:
                    request.sampler = request.spec.sampler_factory.make(request)
                except MemoryError as e:
                    self._fail([request], e)
                    return False
        return True

    def _sample(self) -> None:
        """Draw the tokens of the oldest step in flight and commit them. Wait for the step if necessary."""
        oldest = self.in_flight.steps[0]
        plan, executor, scheduler = oldest.plan, self._executor, self._scheduler
        damaged: list[Request] = []
        began = perf_counter()
        try:
            sampled = draw(executor, oldest)
            scheduler.can_guess = executor.n_guessing > 0
            if plan.scored:
                damaged = score(executor, oldest)
        except (ContextFullError, DecodeError) as e:  # a step that is computed asynchronously fails here
            self.in_flight.complete_oldest()
            self._end_failed_step(plan, e)
            return
        self.in_flight.complete_oldest()
        if self._n_wants_logprobs:
            record_logprobs(plan, sampled)
        drawn = perf_counter()
        if damaged:
            self._fail(damaged, DecodeError("a logit is not finite; the model or its weights are damaged"))
        if _LATER in sampled:
            self._late.add(plan, sampled)
        self._undelivered += scheduler.commit(plan, sampled)
        if scheduler.awaiting_end:
            self._await_end_states()
        if self._late.requests:
            self._look_after_late_draws()
        for request, *_ in plan.scored:
            if request.max_tokens == 0 and request.finish_reason is not None and request in self.open:
                self._deliver_end(request)
        self._last_step = oldest.step_id
        self._step_times.add(drawn - oldest.began_s)
        scheduler.observe(plan, drawn - oldest.began_s, drawn - self._turn_began_s)
        self._turn_began_s = drawn
        self._n_steps += 1
        n_sampled = len(sampled)
        if plan.n_guessed:
            n_sampled -= sampled.count(NoToken.NOT_DRAWN)
            n_accepted = scheduler.gate.n_accepted
            self._last_guesses = oldest.step_id, plan.n_guessed, n_accepted - self._n_accepted
            self._n_accepted = n_accepted
        self._n_generated += n_sampled
        self._n_prompt += len(plan.tokens) - plan.n_decode - plan.n_guessed - len(plan.padding)
        self._sample_s += drawn - began
        if not executor.overlaps:
            self._deliver()
        elif self._micro_batches.observe_step(n_sampled):
            scheduler.split_decoding(self._micro_batches.n)

    def _deliver(self) -> None:
        """Give the last sampled tokens to their sinks, and register the callers to wake."""
        if not self._undelivered and not self.dispatcher.pending:
            return
        began = perf_counter()
        undelivered, self._undelivered = self._undelivered, []
        n_left = len(undelivered)
        for request, token in undelivered:
            n_left -= 1
            if request not in self.open:
                continue  # it was cancelled meanwhile
            # After a right guess, a request gets several tokens from a step.
            has_more = n_left > 0 and undelivered[-n_left][0] is request
            if (
                token >= 0
                and request.error is None
                and token not in request.stop_tokens
                and request.sink.token(request, token)
            ):
                self._scheduler.stop(request, _n_tokens_of(request, undelivered[-n_left:]) if has_more else 0)
                has_more = False
            if request.finish_reason is not None and not has_more:
                self._deliver_end(request)
        if self.dispatcher.pending:
            self._flush()
        ended = perf_counter()
        if undelivered and self._trace is not None and self._trace.on:
            step, *guesses = self._last_guesses
            self._trace.add(
                "deliver", self._last_step, began, ended, *guesses if step == self._last_step else ()
            )
        self._deliver_s += ended - began

    def _flush(self, together: bool = False) -> None:
        """Wake callers; see ``ResultDispatcher.flush``. Cancel the requests of closed event loops."""
        for request in self.dispatcher.flush(together):
            self.cancel(request)

    # ---- ends and failures
    def _deliver_end(self, request: Request) -> None:
        """Deliver the end of a request. Free its sampler unless the request may continue after a change."""
        if request.state is State.FINISHED:
            spec = request.spec
            if spec.conversation is not None and request.uses_cache and not request.dropped:
                self._remember(request.spec.conversation, request.cell_keys()[:], request.spec.cache_key)
            if request in self.open:
                del self.open[request]
                self._n_wants_logprobs -= request.wants_logprobs
            if request.sampler is not None:
                if self._late.requests:
                    self._late.forget(request.sampler)
                self.in_flight.retire(request.sampler)
                request.sampler = None
        request.sink.finish(request)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        for request in requests:
            if request in self.open:
                self._scheduler.fail(request, error)
                self._deliver_end(request)

    def _end_failed_step(self, plan: BatchPlan, error: Exception) -> None:
        """End the requests of a step that failed, or make room if it found no cells. Other requests continue."""
        self._deliver()
        if isinstance(error, StepAbortedError):
            for request in self._scheduler.drop(plan):
                if request.cancelled:
                    self.cancel(request)
        elif not isinstance(error, ContextFullError) or not self._scheduler.free_cells_after(plan):
            for request in self._scheduler.abort(plan, error):
                self._deliver_end(request)

    def _end_waiting(self) -> None:
        """Continue or end the requests that wait for a caller while the engine closes."""
        for request in list(self.open):
            if request.spec.resumable:
                self.cancel(request)
            else:
                self._run_to_end(request)

    def _run_to_end(self, request: Request) -> None:
        request.token_budget = UNLIMITED  # a stream's reader gets the rest from its mailbox
        self._scheduler.resume(request)

    def _serve_errors(self, error: BaseException) -> None:
        """Fail all current and later requests after a defect of the loop itself, until ``stop``."""
        text = f"the engine thread failed ({error!r}); close this engine and make another"
        self.failure = BackendError(text)
        self.failure.__cause__ = error
        for request in list(self.open):
            self._give_up(request, self.failure)
        while True:
            self._flush(together=True)
            if self._stopping:
                return
            self.inbox.run_next()

    def _give_up(self, request: Request, error: BaseException) -> None:
        """End a request after a defect. Its caller must get an answer, whatever else is broken."""
        with suppress(Exception):
            self._scheduler.fail(request, error)
        if request.state is not State.FINISHED:
            request.move(State.FINISHED)
        self._left_queue([request])
        request.error = error
        request.finish_reason = "cancelled"
        with suppress(Exception):
            self._deliver_end(request)

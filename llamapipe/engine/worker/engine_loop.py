"""The engine loop: plans, launches, samples, commits and delivers steps. It is the scheduler's only owner.

Between two steps the loop executes every command that has arrived. Where a launch returns before its step is computed,
step N+1 is launched before the tokens of step N are delivered. A stop string found then ends a request that is already
part of step N+1; its token of that step is discarded. With micro-batches, two steps with different requests are in
flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from llamapipe.engine.delivery.result_dispatcher import ResultDispatcher
from llamapipe.engine.results import EngineStats
from llamapipe.engine.scheduler.batch_plan import BatchPlan
from llamapipe.engine.scheduler.request import UNLIMITED, Request, State
from llamapipe.engine.scheduler.scheduler import Scheduler
from llamapipe.engine.worker.cell_keeper import CellKeeper
from llamapipe.engine.worker.executor import Executor
from llamapipe.engine.worker.in_flight import NoTrace, StepsInFlight, StepTrace, draw, record_logprobs, score
from llamapipe.engine.worker.inbox import Inbox
from llamapipe.engine.worker.late_draws import LateDraws
from llamapipe.engine.worker.micro_batches import MicroBatchSwitch
from llamapipe.engine.worker.time_counter import TimeCounter
from llamapipe.errors import BackendError, ContextFullError, DecodeError, InvalidRequestError, NoToken
from llamapipe.llama.native_pipeline import StepAbortedError

if TYPE_CHECKING:
    from llamapipe.kv_events.publisher import Publisher

_MAX_SKIPPED_WINDOWS = 7
_MAX_COMMANDS = 512  # between two steps, so that requests progress while thousands of others arrive
_LATER = int(NoToken.LATER)  # looked at in every step
_LOOK_S = 0.02  # between two looks at draws that other threads make
# After which a late draw's slot is lent; saving and loading its cells takes a few milliseconds.
_LEND_S = 0.05


class Closable(Protocol):
    """What ends with the loop."""

    def close(self) -> None:
        """Ends it."""


class EngineLoop:
    """The steps of one context, from ``run`` until a ``stop`` command. Methods are for the engine thread.

    ``inbox``: the commands of other threads. ``dispatcher``: wakes the callers that wait for results. ``in_flight``:
    the launched steps; other threads may abort them. ``open``: the requests whose end is not delivered yet.
    ``trace``: records plan and deliver stages. ``kv_events``: tells routers what the prefix cache holds. ``long_work``:
    threads for callers' work, which end with the loop.

    ``window_s``: how long an idle loop waits for more requests after the one that woke it. ``left_queue``: called with
    the requests that do not wait for a slot any longer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        window_s: float,
        left_queue: Callable[[Sequence[Request]], object],
    ) -> None:
        self.inbox = Inbox()
        self.dispatcher = ResultDispatcher(at_launch=not executor.overlaps)
        if not executor.overlaps:
            executor.wake_at_launch(self.dispatcher.wakes)
        self.in_flight = StepsInFlight(executor)
        self.open: dict[Request, None] = {}
        self.trace: StepTrace = NoTrace()
        self.kv_events: Publisher | None = None
        self.long_work: Closable | None = None
        self._scheduler = scheduler
        self._executor = executor
        self._left_queue = left_queue
        self._micro_batches = MicroBatchSwitch(executor)
        scheduler.batch_builder.depth = executor.depth if executor.overlaps else 1
        self._window_s = window_s
        self._n_skip = self._n_skipped = 0  # windows to skip after one in vain, and skipped since
        self._stopping = False
        self.closed = False  # the context is freed
        self._error: BaseException | None = None  # a defect of the loop: every request fails with it
        self._undelivered: list[tuple[Request, int]] = []  # the tokens of the step sampled last
        self._last_step = -1  # the number of that step
        self._cells = CellKeeper(scheduler)
        self._late = LateDraws()
        executor.notify_drawn(lambda: self.inbox.put(self.take_drawn))
        self._step_times = TimeCounter()
        self._n_wants_logprobs = 0  # open requests that want log-probabilities
        self._n_requests = self._n_steps = self._n_prompt = self._n_generated = 0
        self._plan_s = self._launch_s = self._sample_s = self._deliver_s = self._idle_s = 0.0

    def __repr__(self) -> str:
        return f"<EngineLoop n_steps={self._n_steps} n_in_flight={len(self.in_flight.steps)} n_open={len(self.open)}>"

    # ---- commands
    def add(self, *requests: Request) -> None:
        """Accepts new requests."""
        self._n_requests += len(requests)
        self.open.update(dict.fromkeys(requests))
        self._n_wants_logprobs += sum(request.wants_logprobs for request in requests)
        for request in requests:
            if self._error is not None:
                self._give_up(request, self._error)
                continue
            self._scheduler.add(request)
            if request.cancelled:
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Ends a request in any state."""
        if request.arrival < 0:
            request.cancelled = True  # `add`, which comes later, looks at it
        elif request.state is not State.FINISHED:
            self._scheduler.cancel(request)
            self._finished(request)

    def resume(self, request: Request) -> None:
        """Continues a paused request, as far as its token budget allows."""
        if request.state is not State.FINISHED:
            self._scheduler.resume(request)

    def change(self, request: Request, n_keep: int | None, tokens: Sequence[int]) -> None:
        """Trims a resumable request's sequence to ``n_keep`` tokens, or appends some. Its sampler starts over."""
        if request.state is State.FINISHED:
            return
        if n_keep is not None:
            self._scheduler.trim(request, n_keep)
        if tokens:
            self._scheduler.append(request, tokens)
        request.sink.restart_text()
        if request.sampler is not None and request.sampler_factory is not None:
            request.sampler_factory.rebuild(request.sampler, request)

    def take_drawn(self) -> None:
        """Records the tokens that other threads have drawn."""
        for request, token in self._late.take(self._executor, self.open):
            if token >= 0 and request.wants_logprobs and request.sampler is not None:
                request.last_logprob = request.sampler.logprobs()
            self._n_generated += token >= 0
            self._scheduler.drawn(request, token)
            if token == NoToken.SETTLED:  # its last token is delivered already
                self._finished(request)
            else:
                self._undelivered.append((request, token))
        self._settle()
        self._deliver()

    def _relieve(self) -> bool:
        """Looks after draws that take long: others get threads and slots. Returns whether a slot came free."""
        self._executor.relieve()
        if not self._scheduler.n_queued:
            return False
        late = self._late.late_by(_LEND_S)
        return sum(self._scheduler.lend(request, waited_s / _LEND_S) for request, waited_s in late) > 0

    def _settle(self) -> None:
        if self._scheduler.unsettled:
            self._late.settle(self._scheduler.unsettled, self._executor)
            self._scheduler.unsettled.clear()

    def fork(self, parent: Request, child: Request) -> None:
        """Accepts a request that continues the sequence of a resumable one. The child fails if the parent has ended."""
        self._scheduler.fork(parent, child)
        self.add(child)
        if parent.state is State.FINISHED:
            self._scheduler.fail(child, parent.error or InvalidRequestError("the generation was cancelled"))
            self._finished(child)

    def snapshot(self, request: Request) -> tuple[list[int], int, int, bytes]:
        """The tokens of a resumable request that does not run, how many are prompt or have cells, and the cells."""
        if request.error is not None:
            raise request.error
        n_cells, state = self._cells.snapshot(self._executor, request)
        # Constraints cannot be followed from the middle of a text: they begin with what follows.
        n_prompt = len(request.tokens) if request.dropped else request.n_prompt
        return request.tokens.copy(), n_prompt, n_cells, state

    def restore(self, request: Request, n_cells: int, state: bytes) -> None:
        """Accepts a new request whose first cells are given."""
        if state and self._error is None:
            self._cells.restore(self._executor, request, n_cells, state)
        self.add(request)

    def kept_bytes(self, request: Request) -> tuple[int, int, int]:
        """The bytes of a request's cells that stay saved (0: they could not be saved), needed bytes, and the budget."""
        self._cells.apply(self._executor)
        kept, cache = request.saved_cells, self._scheduler.cache
        n_bytes = 0 if kept is None or not cache.has(kept) else kept.n_bytes
        return n_bytes, cache.n_bytes_of(len(request.tokens)), cache.host_budget

    def release(self, request: Request) -> None:
        """The saved cells of a request that has ended need not be kept any more."""
        self._scheduler.cache.unpin(request)

    def stop(self, drain: bool) -> None:
        """Ends the loop: after the open requests are finished, or at once."""
        self._stopping = True
        self._deliver()  # the tokens sampled last are part of the sequences already
        for request in list(self.open):
            if not drain:
                self.cancel(request)
            elif not request.resumable:
                self._run_to_end(request)

    def stats(self) -> EngineStats:
        """A copy of the counters. Also for other threads, after the engine thread's end."""
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
            n_prompt_tokens=self._n_prompt,
            n_completion_tokens=self._n_generated,
            idle_s=self._idle_s,
            plan_s=self._plan_s,
            launch_s=self._launch_s,
            sample_s=self._sample_s,
            deliver_s=self._deliver_s,
            **self._executor.stats(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the scheduler's state is inconsistent, or other than llama.cpp's memory.

        Threads as for ``stats``.
        """
        self._scheduler.check_integrity()
        if not self.in_flight.steps and not self.closed:
            self._cells.check_integrity(self._executor)

    def replace_executor(self, executor: Executor) -> Executor:
        """Runs the next steps on another executor and returns this one: a seam for tests that hold or fail steps."""
        replaced, self._executor = self._executor, executor
        self.in_flight.executor = executor
        return replaced

    # ---- the loop
    def run(self) -> None:
        """Runs until a ``stop`` command. Frees the context at the end."""
        try:
            self._loop()
        except BaseException as e:  # callers wait for this thread: it must not end without an answer
            self._serve_errors(e)
        finally:
            self.closed = True
            for owner in (
                self.dispatcher,
                self._cells,
                self.in_flight,
                self._executor,
                self.kv_events,
                self.long_work,
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
            if scheduler.has_memory_ops:
                # Before the plan: what cannot be removed in part is computed again.
                self._cells.apply(self._executor)
            # After a change from two micro-batches to one, a step may be in flight that has to be sampled first.
            plan = scheduler.plan() if len(steps) < scheduler.max_in_flight else None
            if scheduler.dequeued:
                self._left_queue(scheduler.take_dequeued())
            if plan is not None:
                self._launch(plan, started)
            self._deliver()
            if self.kv_events is not None:
                self.kv_events.flush()

            # There are three cases for what to do next:
            # 1. A step is in flight, and no further one can be launched: sample it.
            if steps and (plan is None or len(steps) >= scheduler.max_in_flight):
                self._sample()
                started = perf_counter()
                if scheduler.has_work or steps:
                    continue
                # All requests wait for their callers: the first one to return must not start a step without the
                # others.
                self._cells.apply(self._executor)
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
                    return
                self._end_waiting()
                if self._late:
                    inbox.run_next()
                continue
            self._wait()
            waited = perf_counter()
            self._idle_s += waited - started
            started = waited

    def _wait(self) -> None:
        """Blocks for a command, then a moment longer for more requests, if that has paid lately."""
        inbox, scheduler = self.inbox, self._scheduler
        if self.kv_events is not None:
            self.kv_events.flush()
        if inbox.empty():
            self._executor.idle()
            if not inbox.single_caller and not self.open:
                self._executor.rest()
        while self._late:  # draws that hang must not keep others from being made
            try:
                inbox.run_next(_LOOK_S)
                break
            except Empty:
                if self._relieve():
                    return
        else:
            inbox.run_next()
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

    # ---- one step
    def _launch(self, plan: BatchPlan, started: float) -> None:
        """Launches a plan that was begun at this time of ``perf_counter``. Handles its failure."""
        keeps_cells = not self._scheduler.has_memory_ops or self._cells.apply(self._executor)
        if not keeps_cells or (not plan.repeats and not self._make_samplers(plan)):
            self._scheduler.drop(plan)  # a request of it lost its cells or failed: plan again
            return
        samplers: list[Any] = [] if plan.repeats else [request.sampler for request in plan.requests]
        planned = perf_counter()
        try:
            self.in_flight.launch(plan, samplers, planned)
        except (ContextFullError, DecodeError) as e:
            self._failed(plan, e)
        if self.trace.on and self.in_flight.steps:
            self.trace.add("plan", self.in_flight.steps[-1].step, started, planned)
        self._plan_s += planned - started
        self._launch_s += perf_counter() - planned

    def _make_samplers(self, plan: BatchPlan) -> bool:
        """Makes the missing samplers. False if memory was missing for one: its request has failed."""
        for request in plan.requests:
            if request.sampler is None and request.sampler_factory is not None:
                try:
                    request.sampler = request.sampler_factory.make(request)
                except MemoryError as e:
                    self._fail([request], e)
                    return False
        return True

    def _sample(self) -> None:
        """Draws the tokens of the oldest step in flight and commits them. Waits for the step if need be."""
        oldest = self.in_flight.steps[0]
        plan, executor, scheduler = oldest.plan, self._executor, self._scheduler
        damaged: list[Request] = []
        began = perf_counter()
        try:
            sampled = draw(executor, oldest)
            if plan.scored:
                damaged = score(executor, oldest)
        except (ContextFullError, DecodeError) as e:  # a step that is computed asynchronously fails here
            self.in_flight.complete_oldest()
            self._failed(plan, e)
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
        self._settle()
        if self._late:
            self._relieve()
        for request, *_ in plan.scored:
            if request.max_tokens == 0 and request.finish_reason is not None and request in self.open:
                self._finished(request)
        self._last_step = oldest.step
        self._step_times.add(drawn - oldest.began_s)
        scheduler.observe(plan, drawn - oldest.began_s)
        self._n_steps += 1
        self._n_generated += len(sampled)
        self._n_prompt += len(plan.tokens) - plan.n_decode - len(plan.padding)
        self._sample_s += drawn - began
        if not executor.overlaps:
            self._deliver()
        elif self._micro_batches.step(len(sampled)):
            scheduler.batch_builder.n_micro_batches = self._micro_batches.n

    def _deliver(self) -> None:
        """Gives the tokens sampled last to their sinks, and has the callers woken."""
        if not self._undelivered and not self.dispatcher.pending:
            return
        began = perf_counter()
        undelivered, self._undelivered = self._undelivered, []
        for request, token in undelivered:
            if request not in self.open:
                continue  # it was cancelled meanwhile
            if (
                token >= 0
                and request.error is None
                and token not in request.stop_tokens
                and request.sink.token(request, token)
            ):
                self._scheduler.stop(request)
            if request.finish_reason is not None:
                self._finished(request)
        if self.dispatcher.pending:
            self._flush()
        ended = perf_counter()
        if undelivered and self.trace.on:
            self.trace.add("deliver", self._last_step, began, ended)
        self._deliver_s += ended - began

    def _flush(self, together: bool = False) -> None:
        """Wakes callers; see ``ResultDispatcher.flush``. Requests of closed event loops are cancelled."""
        for request in self.dispatcher.flush(together):
            self.cancel(request)

    # ---- ends and failures
    def _finished(self, request: Request) -> None:
        """Delivers the end of a request. Frees its sampler unless the request may continue after a change."""
        if request.state is State.FINISHED:
            if request in self.open:
                del self.open[request]
                self._n_wants_logprobs -= request.wants_logprobs
            if request.sampler is not None:
                self._late.forget(request.sampler)
                self.in_flight.retire(request.sampler)
                request.sampler = None
        request.sink.finish(request)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        for request in requests:
            if request in self.open:
                self._scheduler.fail(request, error)
                self._finished(request)

    def _failed(self, plan: BatchPlan, error: Exception) -> None:
        """Ends the requests of a step that failed, or makes room if it found no cells. The others continue."""
        self._deliver()
        if isinstance(error, StepAbortedError):
            for request in self._scheduler.drop(plan):
                if request.cancelled:
                    self.cancel(request)
        elif not isinstance(error, ContextFullError) or not self._scheduler.relieve(plan):
            for request in self._scheduler.abort(plan, error):
                self._finished(request)

    def _end_waiting(self) -> None:
        """Continues or ends the requests that wait for a caller while the engine closes."""
        for request in list(self.open):
            if request.resumable:
                self.cancel(request)
            else:
                self._run_to_end(request)

    def _run_to_end(self, request: Request) -> None:
        request.token_budget = UNLIMITED  # a stream's reader finds the rest in its mailbox
        self._scheduler.resume(request)

    def _serve_errors(self, error: BaseException) -> None:
        """After a defect of the loop itself: fails all requests, and those still to arrive, until ``stop``."""
        text = f"the engine thread failed ({error!r}); close this engine and make another"
        self._error = BackendError(text)
        self._error.__cause__ = error
        for request in list(self.open):
            self._give_up(request, self._error)
        while True:
            self._flush(together=True)
            if self._stopping:
                return
            self.inbox.run_next()

    def _give_up(self, request: Request, error: BaseException) -> None:
        """Ends a request after a defect. Its caller must get an answer, whatever is broken by now."""
        with suppress(Exception):
            self._scheduler.fail(request, error)
        if request.state is not State.FINISHED:
            request.move(State.FINISHED)
        self._left_queue([request])
        request.error = error
        request.finish_reason = "cancelled"
        with suppress(Exception):
            self._finished(request)

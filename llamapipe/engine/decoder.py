"""The decoder thread: takes commands, runs the scheduler's steps on the context, delivers what comes out.

It is the only thread that touches scheduler and context. Other threads talk to it through ``call``; it talks to them
through mailboxes. Between two steps it takes every command that has come.

A step is planned, launched, sampled, committed and delivered. Where a launch returns before its step is computed, the
next one is launched before the last one's tokens are delivered; a stop string found then ends a request that is part of
the next step already, whose token nobody gets. With cohorts, two steps of different requests are under way.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from llamapipe.engine.cohorts import CohortSwitch
from llamapipe.engine.flight import Flight, draw, score, take_notes, targets_of
from llamapipe.engine.mailbox import Outbox
from llamapipe.engine.request import UNLIMITED, Request, State
from llamapipe.engine.results import EngineStats
from llamapipe.engine.scheduler import Scheduler
from llamapipe.engine.step_plan import Copy, StepPlan
from llamapipe.errors import (
    BackendError,
    ContextFullError,
    DecodeError,
    EngineClosedError,
    InvalidRequestError,
)
from llamapipe.pipeline.at_exit import close_at_exit, forget
from llamapipe.pipeline.core import StepAbortedError
from llamapipe.pipeline.executor import Executor
from llamapipe.pipeline.trace import Trace

Command = tuple[Callable[..., object], tuple[Any, ...]]
_MAX_SKIPPED_WINDOWS = 7
_JOIN_S = 1.0  # a Ctrl-C that comes just before Python begins to wait does not end the wait
_THREAD_NAME = "llamapipe-decoder"


def alone() -> bool:
    """Whether no other thread could make a request while this one waits for its own."""
    mine = threading.current_thread()
    return all(thread is mine or thread.name == _THREAD_NAME for thread in threading.enumerate())


class NoTrace:
    """Stands for a trace that nobody has asked for."""

    on = False

    def add(self, stage: str, step: int, begin_s: float, end_s: float) -> None:
        """Does nothing."""


class Decoder:
    """Runs steps on a thread of its own until it is told to stop; the thread closes the executor at its end.

    ``window_s``: how long an idle decoder waits for siblings of the request that woke it. ``left_queue`` is told which
    requests wait no longer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        window_s: float,
        left_queue: Callable[[Sequence[Request]], object],
    ) -> None:
        self.outbox = Outbox(None if executor.overlaps else self._ring_at_launch)
        self.alone = False  # set by callers: no other thread or task could call while this one waits
        self._scheduler = scheduler
        self._executor = executor
        self._window_s = window_s
        self._left_queue = left_queue
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._open: dict[Request, None] = {}  # those whose end was not told yet
        self._stopping = False
        self._error: BaseException | None = None
        self._flying: deque[Flight] = deque()  # launched and not sampled
        self._retired: deque[tuple[int, Any]] = (
            deque()
        )  # samplers of steps under way, and when those are sampled
        self._n_sampled = 0
        self._n_notes = 0  # open requests that want to know how probable their tokens are
        self._undelivered: list[tuple[Request, int]] = []  # of the step sampled last
        self._computing: StepPlan | None = None  # what a launch is computing; for those who cancel
        self._cohorts = CohortSwitch(executor)
        scheduler.depth = executor.depth if executor.overlaps else 1
        self.trace: Trace | NoTrace = NoTrace()  # where plan and deliver are noted
        self._n_skip = self._n_skipped = 0  # windows to skip after waiting in vain, and skipped since
        self._last_step = -1  # whose tokens those are
        self._n_steps = self._n_requests = self._n_prompt = self._n_generated = 0
        self._plan_s = self._launch_s = self._sample_s = self._deliver_s = self._idle_s = 0.0
        self._pid = os.getpid()
        self._lock = threading.Lock()  # orders what callers submit before the command that ends the loop
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._thread.start()
        close_at_exit(self)

    # ---- any thread
    @property
    def closing(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that has the thread."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raises EngineClosedError in a process that was forked from this one's."""
        if self.forked:
            raise EngineClosedError(
                "the engine was made before fork(); make one in the child process, or use the spawn start method"
            )

    def check_open(self) -> None:
        """Raises EngineClosedError when closed, or in a process that was forked from this one's.

        RuntimeError on the decoder thread itself, which would wait for itself.
        """
        self.check_process()
        self._check_thread()
        if self._closing:
            raise EngineClosedError("the engine is closed; make another")

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "this runs on the engine's own thread (in a logits processor?), which cannot wait for the engine"
            )

    def submit(self, *requests: Request) -> None:
        """Queues new requests, so that one step takes them all if it can. Raises EngineClosedError."""
        with self._lock:
            self.check_open()
            self._inbox.put((self.add, requests))

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has ``function`` run on the decoder thread between two steps, in the order of calls."""
        self._inbox.put((function, arguments))

    def cancel_soon(self, request: Request) -> None:
        """Has a request ended; a step that is being computed for nobody else is aborted."""
        self.call(self.cancel, request)
        request.cancelled = True  # last: whoever is interrupted before it can cancel again
        self._abort_for_nobody()

    def _abort_for_nobody(self) -> None:
        """Aborts the step that is being computed if all who are in it were cancelled."""
        plan = self._computing
        inside = plan is not None and not self._executor.late_errors  # the launch is what computes
        if plan is not None and inside and all(request.cancelled for request, _ in plan.fed):
            step = self._executor.launching()
            if self._computing is plan:  # so it is this plan's step, or one of the past
                self._executor.abort(step)
        for flight in list(self._flying):
            if all(request.cancelled for request, _ in flight.plan.fed):
                self._executor.abort(flight.step)

    def ask(self, question: Callable[[], Any]) -> Any:
        """The result of ``question`` on the decoder thread, or on this one after its end; raises what it raised."""
        self._check_thread()
        self.check_process()  # before the lock: another thread may have held it when this process was forked
        replies: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def answer() -> None:
            try:
                replies.put((question(), None))
            except Exception as e:
                replies.put((None, e))

        with self._lock:
            if not self._closing:
                self.check_open()
                self._inbox.put((answer, ()))
        if self._closing:
            self._thread.join()
            if replies.empty():
                answer()
        result, error = replies.get()
        if error is not None:
            raise error
        return result

    def close(self, drain: bool) -> None:
        """Ends the thread and waits for it; the context is freed then. Does nothing in a forked child."""
        if self.forked:
            return
        self._check_thread()
        with self._lock:
            # Again without draining: whoever gave up waiting for the drain (Ctrl-C, then exit) wants it cancelled.
            if not self._closing or not drain:
                self._closing = True
                self._inbox.put((self.stop, (drain,)))
        if not drain:
            for plan in (self._computing, *(flight.plan for flight in list(self._flying))):
                for request, _ in plan.fed if plan is not None else ():
                    request.cancelled = True  # they will be: no step need be computed for them
            self._abort_for_nobody()
        while self._thread.is_alive():
            self._thread.join(_JOIN_S)
        forget(self)

    # ---- commands, run on the decoder thread
    def add(self, *requests: Request) -> None:
        """Takes new requests."""
        self._n_requests += len(requests)
        self._open.update(dict.fromkeys(requests))
        self._n_notes += sum(request.notes for request in requests)
        for request in requests:
            if self._error is not None:
                self._give_up(request, self._error)
                continue
            self._scheduler.add(request)
            if request.cancelled:
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is."""
        if request.state is not State.FINISHED and request.arrival >= 0:
            self._scheduler.cancel(request)
            self._finished(request)

    def resume(self, request: Request) -> None:
        """Lets a paused request go on, as far as its limit says."""
        if request.state is not State.FINISHED:
            self._scheduler.resume(request)

    def change(self, request: Request, n_keep: int | None, tokens: list[int]) -> None:
        """Cuts a kept request's sequence to ``n_keep`` tokens, or adds some; penalties then look at what it is now."""
        if request.state is State.FINISHED:
            return
        if n_keep is not None:
            self._scheduler.trim(request, n_keep)
        if tokens:
            self._scheduler.append(request, tokens)
        request.sink.restart_text()
        if request.sampler is not None:
            try:
                request.recipe.again(request.sampler, request)
            except (ValueError, DecodeError) as e:  # the sequence is not what its constraints allow
                self._scheduler.fail(request, InvalidRequestError(str(e)))
                self._finished(request)

    def stop(self, drain: bool) -> None:
        """Ends the loop, after the work that was asked for or at once."""
        self._stopping = True
        if self._undelivered:  # of the step sampled last: its tokens are in the sequences
            self._deliver()
        for request in list(self._open):
            if not drain:
                self.cancel(request)
            elif not request.keep:
                self._run_to_end(request)

    def stats(self) -> EngineStats:
        """A copy of the counters; for the decoder thread, or any thread after its end."""
        return EngineStats(
            steps=self._n_steps,
            n_tokens_prompt=self._n_prompt,
            n_tokens_generated=self._n_generated,
            n_requests=self._n_requests,
            n_preempted=self._scheduler.n_preempted,
            n_active=self._scheduler.n_active,
            n_queued=self._scheduler.n_queued,
            plan_s=self._plan_s,
            launch_s=self._launch_s,
            sample_s=self._sample_s,
            deliver_s=self._deliver_s,
            idle_s=self._idle_s,
            n_cohorts=self._scheduler.cohorts,
            **self._executor.stats(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when the scheduler's state is inconsistent; threads as for ``stats``."""
        self._scheduler.check_integrity()

    # ---- the loop
    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as e:  # callers wait for this thread: it must not end without telling them
            self._serve_errors(e)
        finally:
            self.outbox.close()
            self._executor.close()
            for _, sampler in self._retired:
                sampler.close()

    def _loop(self) -> None:
        scheduler, inbox = self._scheduler, self._inbox
        started = perf_counter()
        while True:
            while not inbox.empty():
                function, arguments = inbox.get()
                function(*arguments)
            if self.outbox.pending:  # whoever was cancelled need not wait for a step
                self._flush()
            if scheduler.memory_ops:
                self._apply_memory_ops()  # before the plan: what cannot be removed in part is computed again
            # After a change from two cohorts to one, a step may be under way that has to come back first.
            plan = scheduler.plan() if len(self._flying) < scheduler.n_flights else None
            if scheduler.dequeued:
                self._tell_dequeued()
            if plan is not None:
                self._launch(plan, started)
            if self._undelivered:
                self._deliver()
            if self._flying and (plan is None or len(self._flying) >= scheduler.n_flights):
                self._sample()
                started = perf_counter()
                if scheduler.has_work or self._flying:
                    continue
                # All wait for their callers: the first one back must not run off without the others.
                self._apply_memory_ops()
            elif plan is not None:  # it failed, or there is room for another cohort
                started = perf_counter()
                continue
            if self._undelivered:
                self._deliver()
            if scheduler.dequeued:  # those that ended without ever having a slot
                self._tell_dequeued()
            self._flush(together=True)  # also where a thread was interrupted before it woke the next one
            if self._stopping:
                if not self._open:
                    self._tell_dequeued()
                    return
                self._end_waiting()
                continue
            self._wait()
            waited = perf_counter()
            self._idle_s += waited - started
            started = waited

    def _end_waiting(self) -> None:
        """Lets those go on, or ends those, that wait for a caller while the engine closes."""
        for request in list(self._open):
            if request.keep:
                self.cancel(request)
            else:
                self._run_to_end(request)

    def _run_to_end(self, request: Request) -> None:
        request.limit = UNLIMITED  # a stream's reader finds the rest in its mailbox
        self._scheduler.resume(request)

    def _wait(self) -> None:
        """Blocks for a command, then a moment longer for those of its siblings, if that has paid lately."""
        function, arguments = self._inbox.get()
        function(*arguments)
        if self.alone or self._window_s <= 0 or not self._scheduler.has_work:
            return
        if self._n_skipped < self._n_skip:
            self._n_skipped += 1
            return
        deadline = perf_counter() + self._window_s
        n_came = 0
        while not (self._stopping or (self._scheduler.n_active and self._scheduler.all_ready)):
            left_s = deadline - perf_counter()
            if left_s <= 0:
                break
            try:
                function, arguments = self._inbox.get(timeout=left_s)
            except Empty:
                break
            function(*arguments)
            n_came += 1
        self._n_skip = 0 if n_came else min(2 * self._n_skip + 1, _MAX_SKIPPED_WINDOWS)
        self._n_skipped = 0

    def _launch(self, plan: StepPlan, started: float) -> None:
        executor = self._executor
        if self._scheduler.memory_ops:
            self._apply_memory_ops()
        samplers: list[Any] = []
        if not plan.again:
            if any(request.sampler is None for request in plan.requests):
                self.outbox.ring()  # grammars and long prompts take their time
            for request in plan.requests:
                if request.sampler is None:
                    request.sampler = request.recipe.make(request)
                samplers.append(request.sampler)
        self._computing = plan
        planned = perf_counter()
        try:
            if plan.again:
                step = executor.launch_again()
            else:
                targets, n_top = targets_of(plan) if plan.scored else (None, 0)
                step = executor.launch(
                    plan.tokens,
                    plan.positions,
                    plan.seq_ids,
                    plan.outputs,
                    plan.rows,
                    samplers,
                    targets,
                    n_top,
                )
            self._flying.append(Flight(plan, step, samplers))
            # A request may have been cancelled when the step was neither being launched nor under way.
            if plan.fed[0][0].cancelled and all(request.cancelled for request, _ in plan.fed):
                executor.abort(step)
        except (ContextFullError, DecodeError) as e:
            self._failed(plan, e)
        finally:
            self._computing = None
        if self.trace.on and self._flying:
            self.trace.add("plan", self._flying[-1].step, started, planned)
        self._plan_s += planned - started
        self._launch_s += perf_counter() - planned

    def _sample(self) -> None:
        """Takes the tokens of the oldest step under way; waits for it if need be."""
        flight = self._flying[0]
        plan, executor, scheduler = flight.plan, self._executor, self._scheduler
        damaged: list[Request] = []
        launched = perf_counter()
        try:
            sampled = draw(executor, flight)
            if plan.scored:
                damaged = score(executor, flight)
        except (ContextFullError, DecodeError) as e:  # of an asynchronous step: here is where it is known
            self._landed()
            self._failed(plan, e)
            return
        self._landed()
        if self._n_notes:
            take_notes(plan, sampled)
        drawn = perf_counter()
        if damaged:
            self._fail_damaged(damaged)
        self._undelivered += scheduler.commit(plan, sampled)
        for request, _, _ in plan.scored:
            if request.max_tokens == 0 and request.finish_reason is not None and request in self._open:
                self._finished(request)
        self._last_step = flight.step
        self._n_steps += 1
        self._n_generated += len(sampled)
        self._n_prompt += len(plan.tokens) - plan.n_decode - len(plan.fillers)
        self._sample_s += drawn - launched
        if not executor.overlaps:
            self._deliver()
        elif self._cohorts.step(len(sampled)):
            scheduler.cohorts = self._cohorts.n

    def _fail_damaged(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request in self._open:
                self._scheduler.fail(
                    request, DecodeError("a logit is not finite; the model or its weights are damaged")
                )
                self._finished(request)

    def _landed(self) -> None:
        """The oldest step is no longer under way, and nobody samples with what ended during it."""
        self._flying.popleft()
        self._n_sampled += 1
        while self._retired and self._retired[0][0] <= self._n_sampled:
            self._retired.popleft()[1].close()

    def _deliver(self) -> None:
        began = perf_counter()
        scheduler = self._scheduler
        undelivered, self._undelivered = self._undelivered, []
        for request, token in undelivered:
            if request not in self._open:
                continue  # cancelled since
            if (
                request.error is None
                and token not in request.stop_tokens
                and request.sink.token(request, token)
            ):
                scheduler.finish(request, "stop")
                request.finish_reason = "stop"  # also where this token was the last one anyway
            if request.finish_reason is not None:
                self._finished(request)
        if self.outbox.pending:
            self._flush()
        ended = perf_counter()
        if self.trace.on:
            self.trace.add("deliver", self._last_step, began, ended)
        self._deliver_s += ended - began

    def _failed(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a step that failed, or makes room where it found none; the others go on."""
        if self._undelivered:
            self._deliver()
        if isinstance(error, StepAbortedError):
            for request in self._scheduler.drop(plan):
                if request.cancelled:
                    self.cancel(request)
        elif isinstance(error, ContextFullError):
            if self._scheduler.relieve(plan) is None:
                self._abort(plan, error)
        else:
            self._abort(plan, error)

    def _tell_dequeued(self) -> None:
        self._left_queue(self._scheduler.take_dequeued())

    def _apply_memory_ops(self) -> None:
        for op in self._scheduler.take_memory_ops():
            done = self._executor.copy(*op) if isinstance(op, Copy) else self._executor.remove(*op)
            if not done:
                self._scheduler.recompute(op.slot)

    def _ring_at_launch(self, fds: Sequence[int]) -> None:
        self._executor.ring_at_launch(fds)

    def _flush(self, together: bool = False) -> None:
        for request in self.outbox.flush(together):
            self.cancel(request)

    def _finished(self, request: Request) -> None:
        """Tells the caller; frees the sampler unless the request may go on after a change."""
        if request.state is State.FINISHED:
            if request in self._open:
                del self._open[request]
                self._n_notes -= request.notes
            if request.sampler is not None:
                if self._flying:  # perhaps with this request in it
                    self._retired.append((self._n_sampled + len(self._flying), request.sampler))
                else:
                    request.sampler.close()
                request.sampler = None
        request.sink.finish(request)

    def _abort(self, plan: StepPlan, error: BaseException) -> None:
        for request in self._scheduler.abort(plan, error):
            self._finished(request)

    def _serve_errors(self, error: BaseException) -> None:
        """After a defect of our own: fails all there is and all that comes, until the engine is closed."""
        self._error = BackendError(
            f"the decoder thread failed ({error!r}); close this engine and make another"
        )
        self._error.__cause__ = error
        for request in list(self._open):
            self._give_up(request, self._error)
        while True:
            self._flush(together=True)
            if self._stopping:
                return
            function, arguments = self._inbox.get()
            function(*arguments)

    def _give_up(self, request: Request, error: BaseException) -> None:
        """Ends a request after a defect: its caller has to know, whatever is broken by now."""
        with suppress(Exception):
            self._scheduler.fail(request, error)
        if request.state is not State.FINISHED:
            request.move(State.FINISHED)
        self._left_queue([request])
        request.error = error
        request.finish_reason = "cancelled"
        with suppress(Exception):
            self._finished(request)

"""The engine thread: takes commands, has steps planned and run, and ends in order.

It is the only thread that touches scheduler and context. Other threads talk to it through ``call``; it talks to them
through mailboxes. Between two steps it takes every command that has come.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any
from weakref import WeakSet

from llamapipe.engine.results import EngineStats
from llamapipe.engine.scheduler.request import UNLIMITED, Request, State
from llamapipe.engine.scheduler.scheduler import Scheduler
from llamapipe.engine.worker.executor import Executor
from llamapipe.engine.worker.step_runner import StepRunner
from llamapipe.errors import BackendError, DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.host.at_exit import close_at_exit, forget

Command = tuple[Callable[..., object], tuple[Any, ...]]
_MAX_SKIPPED_WINDOWS = 7
_JOIN_S = 1.0  # a Ctrl-C that comes just before Python begins to wait does not end the wait
_THREAD_NAME = "llamapipe-engine"


def single_caller() -> bool:
    """Whether no other thread could make a request while this one waits for its own."""
    mine = threading.current_thread()
    return all(thread is mine or thread.name == _THREAD_NAME for thread in threading.enumerate())


_engine_loops: WeakSet[EngineLoop] = WeakSet()


def _mark_forked() -> None:
    for engine_loop in list(_engine_loops):
        engine_loop.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


class EngineLoop:
    """Runs steps on a thread of its own, from ``start`` to ``close``; the thread closes the executor at its end.

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
        self.single_caller = False  # set by callers: no other thread or task could call while this one waits
        self.forked = False  # whether this process has the thread no more; readers look once a token
        self._pid = os.getpid()
        _engine_loops.add(self)
        self.steps = StepRunner(scheduler, executor)
        self.dispatcher = self.steps.dispatcher
        self._scheduler = scheduler
        self._window_s = window_s
        self._left_queue = left_queue
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._stopping = False
        self._error: BaseException | None = None
        self._n_skip = self._n_skipped = 0  # windows to skip after waiting in vain, and skipped since
        self._n_requests = 0
        self._idle_s = 0.0
        self._lock = threading.Lock()  # orders what callers submit before the command that ends the loop
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)

    # ---- any thread
    def start(self) -> None:
        """Starts the thread. Whoever is interrupted here (Ctrl-C) closes decoder and executor: it may run or not."""
        close_at_exit(self)
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    def in_child(self) -> bool:
        """Whether the thread is in another process: ``forked``, or forked in C, which tells nobody."""
        return self.forked or self._pid != os.getpid()

    def check_process(self) -> None:
        """Raises EngineClosedError in a process that was forked from this one's."""
        if self.in_child():
            raise EngineClosedError(
                "the engine was made before fork(); make one in the child process, or use the spawn start method"
            )

    def check_open(self) -> None:
        """Raises EngineClosedError when closed, or in a process that was forked from this one's.

        RuntimeError on the engine thread itself, which would wait for itself.
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
        """Has ``function`` run on the engine thread between two steps, in the order of calls."""
        self._inbox.put((function, arguments))

    def cancel_soon(self, request: Request) -> None:
        """Has a request ended; a step that is being computed for nobody else is aborted."""
        self.call(self.steps.cancel, request)
        request.cancelled = True  # last: whoever is interrupted before it can cancel again
        self.steps.abort_for_nobody()

    def ask(self, question: Callable[[], Any]) -> Any:
        """The result of ``question`` on the engine thread, or on this one after its end; raises what it raised."""
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
        if self.in_child():
            return
        self._check_thread()
        with self._lock:
            # Again without draining: whoever gave up waiting for the drain (Ctrl-C, then exit) wants it cancelled.
            if not self._closing or not drain:
                self._closing = True
                self._inbox.put((self.stop, (drain,)))
        if not drain:
            self.steps.abort_all()
        while self._thread.is_alive():
            self._thread.join(_JOIN_S)
        forget(self)

    # ---- commands, run on the engine thread
    def add(self, *requests: Request) -> None:
        """Takes new requests."""
        self._n_requests += len(requests)
        self.steps.add(requests)
        for request in requests:
            if self._error is not None:
                self._give_up(request, self._error)
                continue
            self._scheduler.add(request)
            if request.cancelled:
                self.steps.cancel(request)

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
            self.dispatcher.wake()  # a grammar reads the sequence again
            try:
                request.sampler_factory.rebuild(request.sampler, request)
            except (ValueError, DecodeError) as e:  # the sequence is not what its constraints allow
                self._scheduler.fail(request, InvalidRequestError(str(e)))
                self.steps.finished(request)

    def stop(self, drain: bool) -> None:
        """Ends the loop, after the work that was asked for or at once."""
        self._stopping = True
        self.steps.deliver()  # what was sampled last: its tokens are in the sequences
        for request in list(self.steps.open):
            if not drain:
                self.steps.cancel(request)
            elif not request.resumable:
                self._run_to_end(request)

    def stats(self) -> EngineStats:
        """A copy of the counters; for the engine thread, or any thread after its end."""
        return EngineStats(
            n_requests=self._n_requests,
            n_preempted=self._scheduler.n_preempted,
            n_active=self._scheduler.n_active,
            n_queued=self._scheduler.n_queued,
            idle_s=self._idle_s,
            n_micro_batches=self._scheduler.n_micro_batches,
            **self.steps.stats(),
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
            self.steps.close()

    def _loop(self) -> None:
        scheduler, steps, inbox = self._scheduler, self.steps, self._inbox
        in_flight, dispatcher = steps.in_flight, self.dispatcher
        started = perf_counter()
        while True:
            while not inbox.empty():
                function, arguments = inbox.get()
                function(*arguments)
            if dispatcher.pending:  # whoever was cancelled need not wait for a step
                steps.flush()
            if scheduler.memory_ops:
                steps.apply_memory_ops()  # before the plan: what cannot be removed in part is computed again
            # After a change from two micro-batches to one, a step may be under way that has to come back first.
            plan = scheduler.plan() if len(in_flight) < scheduler.max_in_flight else None
            if scheduler.dequeued:
                self._tell_dequeued()
            if plan is not None:
                steps.launch(plan, started)
            steps.deliver()
            if in_flight and (plan is None or len(in_flight) >= scheduler.max_in_flight):
                steps.sample()
                started = perf_counter()
                if scheduler.has_work or in_flight:
                    continue
                # All wait for their callers: the first one back must not run off without the others.
                steps.apply_memory_ops()
            elif plan is not None:  # it failed, or there is room for another micro-batch
                started = perf_counter()
                continue
            steps.deliver()
            if scheduler.dequeued:  # those that ended without ever having a slot
                self._tell_dequeued()
            steps.flush(together=True)  # also where a thread was interrupted before it woke the next one
            if self._stopping:
                if not self.steps.open:
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
        for request in list(self.steps.open):
            if request.resumable:
                self.steps.cancel(request)
            else:
                self._run_to_end(request)

    def _run_to_end(self, request: Request) -> None:
        request.token_budget = UNLIMITED  # a stream's reader finds the rest in its mailbox
        self._scheduler.resume(request)

    def _wait(self) -> None:
        """Blocks for a command, then a moment longer for those of its siblings, if that has paid lately."""
        if not self.single_caller and not self.steps.open and self._inbox.empty():
            self.steps.rest()
        function, arguments = self._inbox.get()
        function(*arguments)
        if self.single_caller or self._window_s <= 0 or not self._scheduler.has_work:
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

    def _tell_dequeued(self) -> None:
        self._left_queue(self._scheduler.take_dequeued())

    def _serve_errors(self, error: BaseException) -> None:
        """After a defect of our own: fails all there is and all that comes, until the engine is closed."""
        self._error = BackendError(
            f"the engine thread failed ({error!r}); close this engine and make another"
        )
        self._error.__cause__ = error
        for request in list(self.steps.open):
            self._give_up(request, self._error)
        while True:
            self.steps.flush(together=True)
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
            self.steps.finished(request)

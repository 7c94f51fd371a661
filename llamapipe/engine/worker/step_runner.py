"""Takes steps through launch, sampling, commit and delivery, and tells callers of their requests' ends.

Where a launch returns before its step is computed, the next one is launched before the last one's tokens are
delivered; a stop string found then ends a request that is part of the next step already, whose token nobody gets. With
micro-batches, two steps of different requests are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

from llamapipe.engine.delivery.mailbox import ResultDispatcher
from llamapipe.engine.scheduler.batch_plan import BatchPlan, Copy
from llamapipe.engine.scheduler.request import Request, State
from llamapipe.engine.scheduler.scheduler import Scheduler
from llamapipe.engine.worker.executor import Executor
from llamapipe.engine.worker.in_flight import InFlightStep, draw, record_logprobs, score, targets_of
from llamapipe.engine.worker.micro_batches import MicroBatchSwitch
from llamapipe.errors import ContextFullError, DecodeError
from llamapipe.llama.native_pipeline import StepAbortedError
from llamapipe.pipeline.trace import Trace


class NoTrace:
    """Stands for a trace that nobody has asked for."""

    on = False

    def add(self, stage: str, step: int, begin_s: float, end_s: float) -> None:
        """Does nothing."""


class StepRunner:
    """The steps of one context. Methods are for the engine thread, unless they say otherwise.

    ``open``: the requests whose end was not told yet. ``in_flight``: the steps under way, launched and not sampled.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.open: dict[Request, None] = {}
        self.dispatcher = ResultDispatcher(at_launch=not executor.overlaps)
        if not executor.overlaps:
            executor.wake_at_launch(self.dispatcher.wakes)
        self.n_steps = 0
        self.trace: Trace | NoTrace = NoTrace()  # where plan and deliver are noted
        self._scheduler = scheduler
        self._executor = executor
        self.in_flight: deque[InFlightStep] = deque()
        self._retired: deque[tuple[int, Any]] = deque()  # samplers of steps under way, when those are sampled
        self._n_sampled = 0
        self._n_wants_logprobs = 0  # open requests that want to know how probable their tokens are
        self._undelivered: list[tuple[Request, int]] = []  # of the step sampled last
        self._computing: BatchPlan | None = None  # what a launch is computing; for those who cancel
        self._micro_batches = MicroBatchSwitch(executor)
        self._last_step = -1  # whose tokens are undelivered
        self._n_prompt = self._n_generated = 0
        self._plan_s = self._launch_s = self._sample_s = self._deliver_s = 0.0
        scheduler.depth = executor.depth if executor.overlaps else 1

    def __repr__(self) -> str:
        return f"<StepRunner n_steps={self.n_steps} in_flight={len(self.in_flight)} open={len(self.open)}>"

    def stats(self) -> dict[str, Any]:
        """Counters for EngineStats; any thread after the engine thread's end."""
        return {
            "steps": self.n_steps,
            "n_tokens_prompt": self._n_prompt,
            "n_tokens_generated": self._n_generated,
            "plan_s": self._plan_s,
            "launch_s": self._launch_s,
            "sample_s": self._sample_s,
            "deliver_s": self._deliver_s,
            **self._executor.stats(),
        }

    def close(self) -> None:
        """Wakes all who wait; frees the context and the samplers that are left."""
        self.dispatcher.close()
        self._executor.close()
        for _, sampler in self._retired:
            sampler.close()

    # ---- any thread
    def abort_all(self) -> None:
        """Cancels whoever is in a step under way, so that it need not be computed."""
        for plan in (self._computing, *(launched.plan for launched in list(self.in_flight))):
            for request, _ in plan.scheduled if plan is not None else ():
                request.cancelled = True
        self.abort_for_nobody()

    def abort_for_nobody(self) -> None:
        """Aborts the step that is being computed if all who are in it were cancelled."""
        plan = self._computing
        inside = plan is not None and not self._executor.late_errors  # the launch is what computes
        if plan is not None and inside and all(request.cancelled for request, _ in plan.scheduled):
            step = self._executor.launching()
            if self._computing is plan:  # so it is this plan's step, or one of the past
                self._executor.abort(step)
        for launched in list(self.in_flight):
            if all(request.cancelled for request, _ in launched.plan.scheduled):
                self._executor.abort(launched.step)

    # ---- requests
    def add(self, requests: Iterable[Request]) -> None:
        """Notes new requests, whose end will be told."""
        self.open.update(dict.fromkeys(requests))
        self._n_wants_logprobs += sum(request.wants_logprobs for request in requests)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is."""
        if request.state is not State.FINISHED and request.arrival >= 0:
            self._scheduler.cancel(request)
            self.finished(request)

    def finished(self, request: Request) -> None:
        """Tells the caller; frees the sampler unless the request may go on after a change."""
        if request.state is State.FINISHED:
            if request in self.open:
                del self.open[request]
                self._n_wants_logprobs -= request.wants_logprobs
            if request.sampler is not None:
                if self.in_flight:  # perhaps with this request in it
                    self._retired.append((self._n_sampled + len(self.in_flight), request.sampler))
                else:
                    request.sampler.close()
                request.sampler = None
        request.sink.finish(request)

    # ---- steps
    def launch(self, plan: BatchPlan, started: float) -> None:
        """Has a plan computed that was begun at this time of ``perf_counter``; deals with its failure."""
        executor = self._executor
        if self._scheduler.memory_ops:
            self.apply_memory_ops()
        samplers: list[Any] = []
        if not plan.repeats:
            if any(request.sampler is None for request in plan.requests):
                self.dispatcher.wake()  # grammars and long prompts take their time
            for request in plan.requests:
                if request.sampler is None:
                    request.sampler = request.sampler_factory.make(request)
                samplers.append(request.sampler)
        self._computing = plan
        planned = perf_counter()
        try:
            if plan.repeats:
                step = executor.launch_repeat()
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
            self.in_flight.append(InFlightStep(plan, step, samplers))
            # A request may have been cancelled when the step was neither being launched nor under way.
            if plan.scheduled[0][0].cancelled and all(request.cancelled for request, _ in plan.scheduled):
                executor.abort(step)
        except (ContextFullError, DecodeError) as e:
            self._failed(plan, e)
        finally:
            self._computing = None
        if self.trace.on and self.in_flight:
            self.trace.add("plan", self.in_flight[-1].step, started, planned)
        self._plan_s += planned - started
        self._launch_s += perf_counter() - planned

    def sample(self) -> None:
        """Takes the tokens of the oldest step under way; waits for it if need be."""
        launched = self.in_flight[0]
        plan, executor, scheduler = launched.plan, self._executor, self._scheduler
        damaged: list[Request] = []
        began = perf_counter()
        try:
            sampled = draw(executor, launched)
            if plan.scored:
                damaged = score(executor, launched)
        except (ContextFullError, DecodeError) as e:  # of an asynchronous step: here is where it is known
            self._complete_oldest()
            self._failed(plan, e)
            return
        self._complete_oldest()
        if self._n_wants_logprobs:
            record_logprobs(plan, sampled)
        drawn = perf_counter()
        if damaged:
            self._fail_damaged(damaged)
        self._undelivered += scheduler.commit(plan, sampled)
        for request, _, _ in plan.scored:
            if request.max_tokens == 0 and request.finish_reason is not None and request in self.open:
                self.finished(request)
        self._last_step = launched.step
        self.n_steps += 1
        self._n_generated += len(sampled)
        self._n_prompt += len(plan.tokens) - plan.n_decode - len(plan.padding)
        self._sample_s += drawn - began
        if not executor.overlaps:
            self.deliver()
        elif self._micro_batches.step(len(sampled)):
            scheduler.n_micro_batches = self._micro_batches.n

    def _fail_damaged(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request in self.open:
                self._scheduler.fail(
                    request, DecodeError("a logit is not finite; the model or its weights are damaged")
                )
                self.finished(request)

    def _complete_oldest(self) -> None:
        """The oldest step is no longer under way, and nobody samples with what ended during it."""
        self.in_flight.popleft()
        self._n_sampled += 1
        while self._retired and self._retired[0][0] <= self._n_sampled:
            self._retired.popleft()[1].close()

    def deliver(self) -> None:
        """Hands the tokens that were sampled last to their sinks, and wakes whom they are for."""
        if not self._undelivered and not self.dispatcher.pending:
            return
        began = perf_counter()
        scheduler = self._scheduler
        undelivered, self._undelivered = self._undelivered, []
        for request, token in undelivered:
            if request not in self.open:
                continue  # cancelled since
            if (
                request.error is None
                and token not in request.stop_tokens
                and request.sink.token(request, token)
            ):
                scheduler.finish(request, "stop")
                request.finish_reason = "stop"  # also where this token was the last one anyway
            if request.finish_reason is not None:
                self.finished(request)
        if self.dispatcher.pending:
            self.flush()
        ended = perf_counter()
        if undelivered and self.trace.on:
            self.trace.add("deliver", self._last_step, began, ended)
        self._deliver_s += ended - began

    def _failed(self, plan: BatchPlan, error: Exception) -> None:
        """Ends the requests of a step that failed, or makes room where it found none; the others go on."""
        self.deliver()
        if isinstance(error, StepAbortedError):
            for request in self._scheduler.drop(plan):
                if request.cancelled:
                    self.cancel(request)
        elif isinstance(error, ContextFullError):
            if self._scheduler.relieve(plan) is None:
                self._abort(plan, error)
        else:
            self._abort(plan, error)

    def _abort(self, plan: BatchPlan, error: BaseException) -> None:
        for request in self._scheduler.abort(plan, error):
            self.finished(request)

    def apply_memory_ops(self) -> None:
        """Does to the cells what the scheduler has noted."""
        for op in self._scheduler.take_memory_ops():
            done = self._executor.copy(*op) if isinstance(op, Copy) else self._executor.remove(*op)
            if not done:
                self._scheduler.recompute(op.slot)

    def rest(self) -> None:
        """Nothing is left to do until somebody asks for it."""
        self._executor.rest()

    def flush(self, together: bool = False) -> None:
        """Wakes callers; see ``ResultDispatcher.flush``."""
        for request in self.dispatcher.flush(together):
            self.cancel(request)

"""The steps that were launched but not sampled yet.

Open this file to change how a step is launched, sampled, scored or aborted.

The principle: steps complete in the order of their launches, and a sampler is closed only after the steps that may draw
with it. A request that has left its step gets no token or score from it; its ``batch_plan`` says whether it is still
part of the step.

The loop decides when to launch and when to sample. ``executor.py`` makes the native calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from llamapipe._engine.policy.core import BatchPlan, Request, Sampler
from llamapipe._engine.policy.scoring import LogprobTargets
from llamapipe._engine.runtime.executor import Executor


class InFlightStep(NamedTuple):
    """A launched step: its plan, its number, the samplers of its rows, and when its launch began."""

    plan: BatchPlan
    step_id: int
    samplers: list[Any]
    began_s: float  # of ``perf_counter``


class StepsInFlight:
    """The launched steps of one context, oldest first. Methods are for the engine thread unless marked "any thread".

    ``steps``: the queue; the loop only reads its length, first and last step. ``executor``: launches the steps.
    """

    def __init__(self, executor: Executor) -> None:
        self.steps: deque[InFlightStep] = deque()
        self.executor = executor
        self._n_completed = 0
        # Samplers to close, each with the number of completed steps from which it can be closed.
        self._retired: deque[tuple[int, Sampler]] = deque()
        # The plan that is being launched now. Threads that cancel read it.
        self._launching: BatchPlan | None = None

    def __repr__(self) -> str:
        return f"<StepsInFlight n={len(self.steps)} n_completed={self._n_completed}>"

    def launch(self, plan: BatchPlan, samplers: list[Any], began_s: float = 0.0) -> int:
        """Launch a plan and return the step's number. Raises ContextFullError or DecodeError as the executor does."""
        executor = self.executor
        self._launching = plan
        try:
            if plan.repeats:
                step_id = executor.launch_repeat()
            else:
                targets, n_top = targets_of(plan) if plan.scored else (None, 0)
                step_id = executor.launch(
                    plan.tokens,
                    plan.positions,
                    plan.seq_ids,
                    plan.outputs,
                    plan.rows,
                    samplers,
                    targets,
                    n_top,
                    plan.rows_of_media,
                    plan.is_causal,
                )
            self.steps.append(InFlightStep(plan, step_id, samplers, began_s))
            # A request may have been cancelled when the step was neither being launched nor in flight.
            if plan.scheduled[0][0].cancelled and all(request.cancelled for request, _ in plan.scheduled):
                executor.abort(step_id)
        finally:
            self._launching = None
        return step_id

    def complete_oldest(self) -> None:
        """Remove the oldest step, which was sampled or failed, and close the samplers that waited for it."""
        self.steps.popleft()
        self._n_completed += 1
        while self._retired and self._retired[0][0] <= self._n_completed:
            self._retired.popleft()[1].close()

    def retire(self, sampler: Sampler) -> None:
        """Close a sampler when the steps in flight, which may draw with it, are complete."""
        if self.steps:
            self._retired.append((self._n_completed + len(self.steps), sampler))
        else:
            sampler.close()

    def close(self) -> None:
        """Close the remaining samplers. No step may be sampled afterwards."""
        for _, sampler in self._retired:
            sampler.close()

    # ---- any thread
    def abort_all(self) -> None:
        """Cancel the requests of all steps in flight, so that the steps need not be computed."""
        for plan in (self._launching, *(launched.plan for launched in self.steps.copy())):
            for request, _ in plan.scheduled if plan is not None else ():
                request.cancelled = True
        self.abort_cancelled()

    def abort_cancelled(self) -> None:
        """Abort each step whose requests are all cancelled."""
        plan = self._launching
        computes = plan is not None and not self.executor.late_errors  # the launch itself computes
        if plan is not None and computes and all(request.cancelled for request, _ in plan.scheduled):
            step_id = self.executor.launching()
            if self._launching is plan:  # then the number is this plan's, or an earlier step's
                self.executor.abort(step_id)
        for launched in self.steps.copy():
            if all(request.cancelled for request, _ in launched.plan.scheduled):
                self.executor.abort(launched.step_id)


def draw(executor: Executor, launched: InFlightStep) -> list[int]:
    """Return a token for each of the plan's requests; 0 for requests that left the step. Waits for the step."""
    plan, requests = launched.plan, launched.plan.requests
    for request in requests:
        if request.batch_plan is not plan:
            break
    else:
        if plan.repeats:
            return executor.sample_repeat(launched.step_id)
        if not requests and not executor.late_errors:
            return []
        if plan.n_guessed:
            return executor.sample(launched.step_id, plan.rows, launched.samplers, plan.guessed)
        return executor.sample(launched.step_id, plan.rows, launched.samplers)
    here = [i for i, request in enumerate(requests) if request.batch_plan is plan]
    samplers = [requests[i].sampler for i in here]
    guessed = [plan.guessed[i] for i in here] if plan.n_guessed else ()
    drawn = executor.sample(launched.step_id, [plan.rows[i] for i in here], samplers, guessed)
    sampled = [0] * len(requests)
    for i, token in zip(here, drawn, strict=True):
        sampled[i] = token
    return sampled


def record_logprobs(plan: BatchPlan, sampled: Sequence[int]) -> None:
    """Store the log-probabilities of the tokens, for the requests that asked for them."""
    before = None
    for request, token in zip(plan.requests, sampled, strict=True):
        if request.wants_logprobs and request.batch_plan is plan:
            if request is not before:  # this is the request's first row
                before = request
                request.logprobs.clear()  # an entry may be left from a token that ended the text
            if token >= 0:
                assert request.sampler is not None
                request.logprobs.append(request.sampler.logprobs(len(request.logprobs)))


def targets_of(plan: BatchPlan) -> tuple[dict[int, list[int]], int]:
    """Return the tokens to score, by batch entry, and the largest ``n_top`` of any of them."""
    by_entry: dict[int, list[int]] = {}
    n_top = 0
    for _, targets, first, entries in plan.scored:
        n_top = max(n_top, targets.n_top)
        for i, entry in enumerate(entries):
            by_entry[entry] = targets.targets(first + i)
    return by_entry, n_top


def score(executor: Executor, launched: InFlightStep) -> list[Request]:
    """Give requests the scores of their tokens. Return the requests that have a NaN score."""
    plan = launched.plan
    rows: list[int] = []
    wanted: list[int] = []
    slices: list[tuple[Request, LogprobTargets, int, int]] = []
    n_top = 0
    for request, targets, first, entries in plan.scored:
        if request.batch_plan is not plan:
            continue
        n_top = max(n_top, targets.n_top)
        for i, entry in enumerate(entries):
            tokens = targets.targets(first + i)
            rows += [entry] * len(tokens)
            wanted += tokens
            slices.append((request, targets, first + i, len(tokens)))
    scores = iter(executor.score(launched.step_id, rows, wanted, n_top))
    damaged: list[Request] = []
    for request, targets, position, n in slices:
        request_scores = list(islice(scores, n))
        if any(score.logprob != score.logprob for score in request_scores):
            damaged.append(request)
        elif targets.n_top < n_top:  # another request of the step wanted more
            request_scores = [score._replace(top=score.top[: targets.n_top]) for score in request_scores]
        targets.take(position, request_scores)
    return damaged

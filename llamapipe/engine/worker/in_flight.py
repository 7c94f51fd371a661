"""A step that is under way, and what is read of it: tokens, scores, and how probable tokens were. Decoder thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from llamapipe.engine.scheduler.batch_plan import BatchPlan
from llamapipe.engine.scheduler.request import Request
from llamapipe.engine.worker.executor import Executor


class InFlightStep(NamedTuple):
    """A launched step: what was planned, its number, and the samplers of its rows."""

    plan: BatchPlan
    step: int
    samplers: list[Any]


def draw(executor: Executor, launched: InFlightStep) -> list[int]:
    """A token for each of the plan's requests; 0 for those that lost their place while the step was under way.

    Nothing is drawn for these: their samplers must not know of tokens that are thrown away.
    """
    plan, requests = launched.plan, launched.plan.requests
    for request in requests:
        if request.batch_plan is not plan:
            break
    else:
        if plan.repeats:
            return executor.sample_repeat(launched.step)
        if not requests and not executor.late_errors:
            return []
        return executor.sample(launched.step, plan.rows, launched.samplers)
    here = [i for i, request in enumerate(requests) if request.batch_plan is plan]
    samplers = [requests[i].sampler for i in here]
    drawn = executor.sample(launched.step, [plan.rows[i] for i in here], samplers)
    sampled = [0] * len(requests)
    for i, token in zip(here, drawn, strict=True):
        sampled[i] = token
    return sampled


def record_logprobs(plan: BatchPlan, sampled: Sequence[int]) -> None:
    """Notes for those who asked how probable their tokens were."""
    for request, token in zip(plan.requests, sampled, strict=True):
        if request.wants_logprobs and token >= 0 and request.batch_plan is plan:
            request.last_logprob = request.sampler.logprobs()


def targets_of(plan: BatchPlan) -> tuple[dict[int, list[int]], int]:
    """Which tokens each entry's row is asked about, and how many of the most probable ones besides."""
    found: dict[int, list[int]] = {}
    n_top = 0
    for request, first, rows in plan.scored:
        n_top = max(n_top, request.logprob_targets.n_top)
        for i, entry in enumerate(rows):
            found[entry] = request.logprob_targets.targets(first + i)
    return found, n_top


def score(executor: Executor, launched: InFlightStep) -> list[Request]:
    """Hands requests what the rows of their own tokens say; those for whom that is not a number."""
    plan = launched.plan
    entries: list[int] = []
    targets: list[int] = []
    asked: list[tuple[Request, int, int]] = []
    n_top = 0
    for request, first, rows in plan.scored:
        if request.batch_plan is not plan:
            continue
        n_top = max(n_top, request.logprob_targets.n_top)
        for i, entry in enumerate(rows):
            wanted = request.logprob_targets.targets(first + i)
            entries += [entry] * len(wanted)
            targets += wanted
            asked.append((request, first + i, len(wanted)))
    scores = iter(executor.score(launched.step, entries, targets, n_top))
    damaged: list[Request] = []
    for request, position, n in asked:
        mine = list(islice(scores, n))
        if any(score.logprob != score.logprob for score in mine):
            damaged.append(request)
        elif request.logprob_targets.n_top < n_top:  # another one asked for more
            mine = [score._replace(top=score.top[: request.logprob_targets.n_top]) for score in mine]
        request.logprob_targets.take(position, mine)
    return damaged

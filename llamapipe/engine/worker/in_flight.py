"""A step that is under way, and what is read of it: tokens, scores, and how probable tokens were. Decoder thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from llamapipe.engine.scheduler.batch_plan import StepPlan
from llamapipe.engine.scheduler.request import Request
from llamapipe.engine.worker.executor import Executor


class Flight(NamedTuple):
    """A launched step: what was planned, its number, and the samplers of its rows."""

    plan: StepPlan
    step: int
    samplers: list[Any]


def draw(executor: Executor, flight: Flight) -> list[int]:
    """A token for each of the plan's requests; 0 for those that lost their place while the step was under way.

    Nothing is drawn for these: their samplers must not know of tokens that are thrown away.
    """
    plan, requests = flight.plan, flight.plan.requests
    for request in requests:
        if request.flight is not plan:
            break
    else:
        if plan.again:
            return executor.sample_again(flight.step)
        if not requests and not executor.late_errors:
            return []
        return executor.sample(flight.step, plan.rows, flight.samplers)
    here = [i for i, request in enumerate(requests) if request.flight is plan]
    samplers = [requests[i].sampler for i in here]
    drawn = executor.sample(flight.step, [plan.rows[i] for i in here], samplers)
    sampled = [0] * len(requests)
    for i, token in zip(here, drawn, strict=True):
        sampled[i] = token
    return sampled


def take_notes(plan: StepPlan, sampled: Sequence[int]) -> None:
    """Notes for those who asked how probable their tokens were."""
    for request, token in zip(plan.requests, sampled, strict=True):
        if request.notes and token >= 0 and request.flight is plan:
            request.drawn = request.sampler.logprobs()


def targets_of(plan: StepPlan) -> tuple[dict[int, list[int]], int]:
    """Which tokens each entry's row is asked about, and how many of the most probable ones besides."""
    found: dict[int, list[int]] = {}
    n_top = 0
    for request, first, rows in plan.scored:
        n_top = max(n_top, request.scoring.n_top)
        for i, entry in enumerate(rows):
            found[entry] = request.scoring.targets(first + i)
    return found, n_top


def score(executor: Executor, flight: Flight) -> list[Request]:
    """Hands requests what the rows of their own tokens say; those for whom that is not a number."""
    plan = flight.plan
    entries: list[int] = []
    targets: list[int] = []
    asked: list[tuple[Request, int, int]] = []
    n_top = 0
    for request, first, rows in plan.scored:
        if request.flight is not plan:
            continue
        n_top = max(n_top, request.scoring.n_top)
        for i, entry in enumerate(rows):
            wanted = request.scoring.targets(first + i)
            entries += [entry] * len(wanted)
            targets += wanted
            asked.append((request, first + i, len(wanted)))
    scores = iter(executor.score(flight.step, entries, targets, n_top))
    damaged: list[Request] = []
    for request, position, n in asked:
        mine = list(islice(scores, n))
        if any(score.logprob != score.logprob for score in mine):
            damaged.append(request)
        elif request.scoring.n_top < n_top:  # another one asked for more
            mine = [score._replace(top=score.top[: request.scoring.n_top]) for score in mine]
        request.scoring.take(position, mine)
    return damaged

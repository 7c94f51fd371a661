"""The requests whose next token is drawn by another thread, after their step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from time import perf_counter
from typing import Any

from llamapipe.engine.scheduler.batch_plan import BatchPlan
from llamapipe.engine.scheduler.request import Request
from llamapipe.engine.worker.executor import Executor
from llamapipe.errors import NoToken


class LateDraws:
    """Finds the request of a token that arrives. Methods are for the engine thread.

    A request leaves with its token. If it ended before, its token is ignored: the numbers of its sampler's draws tell.
    """

    def __init__(self) -> None:
        # By sampler, with the number of the draw, and when it began. The oldest first.
        self._requests: dict[Any, tuple[Request, int, float]] = {}

    def __repr__(self) -> str:
        return f"<LateDraws n={len(self._requests)}>"

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, plan: BatchPlan, sampled: Sequence[int]) -> None:
        """Adds the requests of a step whose tokens will be drawn later."""
        for request, token in zip(plan.requests, sampled, strict=True):
            if token == NoToken.LATER and request.batch_plan is plan and request.sampler is not None:
                self._requests[request.sampler] = request, request.sampler.n_draws, perf_counter()

    def settle(self, requests: Sequence[Request], executor: Executor) -> None:
        """Asks the samplers of requests that have generated their last token whether the text is complete."""
        for request in requests:
            sampler = request.sampler
            executor.settle(sampler)
            if sampler is not None:
                self._requests[sampler] = request, sampler.n_draws, perf_counter()

    def late_by(self, seconds: float) -> list[tuple[Request, float]]:
        """The requests that have waited for so long for their tokens, with the seconds; the longest first."""
        now_s = perf_counter()
        waits = ((request, now_s - began_s) for request, _, began_s in self._requests.values())
        return [(request, waited_s) for request, waited_s in waits if waited_s >= seconds]

    def take(self, executor: Executor, open_requests: Container[Request]) -> list[tuple[Request, int]]:
        """The requests whose tokens have arrived, with these."""
        arrived = []
        for sampler, number, token in executor.take_drawn():
            request, wanted, _ = self._requests.get(sampler, (None, 0, 0.0))
            if request is None or number != wanted:
                continue
            del self._requests[sampler]
            if request in open_requests and request.is_drawing:
                arrived.append((request, token))
        return arrived

    def forget(self, sampler: Any) -> None:
        """The sampler's request has ended."""
        self._requests.pop(sampler, None)

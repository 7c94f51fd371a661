"""The requests whose tokens are drawn after their step was sampled.

Open this file to change which request gets a late token, or how the wait that makes a request lend its slot is counted.

The principle: a late token comes with the number of its draw, so a token for a request that has ended is ignored.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import itemgetter
from time import perf_counter
from typing import Any

from llamapipe._engine.policy.core import BatchPlan, Request
from llamapipe._engine.runtime.executor import Executor
from llamapipe.errors import NoToken

_PART_BEFORE = 0.5  # weight of waits for earlier tokens: many short waits also hold up a slot
_seconds = itemgetter(1)


class LateDraws:
    """Finds the request of an arriving token. Methods are for the engine thread.

    A request is removed when its token arrives. If the request ended before, the number of the draw differs, and the
    token is ignored.
    """

    def __init__(self) -> None:
        # By sampler: the request, the number of the draw, and when the draw began; the oldest draw first.
        self.requests: dict[Any, tuple[Request, int, float]] = {}

    def __repr__(self) -> str:
        return f"<LateDraws n={len(self.requests)}>"

    def add(self, plan: BatchPlan, sampled: Sequence[int]) -> None:
        """Add the requests of a step whose tokens will be drawn later."""
        for request, token in zip(plan.requests, sampled, strict=True):
            if token == NoToken.LATER and request.batch_plan is plan and request.sampler is not None:
                self.requests[request.sampler] = request, request.sampler.n_draws, perf_counter()

    def await_end_states(self, requests: Sequence[Request], executor: Executor) -> None:
        """Ask the samplers of requests with their last token to report when they know whether the text is complete."""
        for request in requests:
            sampler = request.sampler
            executor.await_end_state(sampler)
            if sampler is not None:
                self.requests[sampler] = request, sampler.n_draws, perf_counter()

    def late_by(self, seconds: float) -> list[tuple[Request, float]]:
        """Return the requests that have waited at least ``seconds`` for their tokens, with their waits, longest first.

        Half of the time that a request waited for earlier tokens in its slot also counts.
        """
        now_s = perf_counter()
        waits = (
            (request, now_s - began_s + _PART_BEFORE * request.late_s)
            for request, _, began_s in self.requests.values()
        )
        return sorted((late for late in waits if late[1] >= seconds), key=_seconds, reverse=True)

    def take(self, executor: Executor, open_requests: Container[Request]) -> list[tuple[Request, int]]:
        """Return the requests whose tokens have arrived, with the tokens."""
        arrived = []
        for sampler, number, token in executor.take_drawn():
            request, wanted, began_s = self.requests.get(sampler, (None, 0, 0.0))
            if request is None or number != wanted:
                continue
            del self.requests[sampler]
            if request.slot >= 0:
                request.late_s += perf_counter() - began_s
            if request in open_requests and request.is_drawing:
                arrived.append((request, token))
        return arrived

    def forget(self, sampler: Any) -> None:
        """Forget a sampler whose request has ended."""
        self.requests.pop(sampler, None)

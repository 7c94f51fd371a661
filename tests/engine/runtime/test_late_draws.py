"""Requests whose tokens come late, on a clock that the test sets: when they lend their slots."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory import cache_of

from llamapipe._engine.policy.core import Request, RequestSpec, State
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.runtime import late_draws
from llamapipe._engine.runtime.late_draws import LateDraws
from llamapipe._engine.runtime.loop import _LEND_S
from llamapipe.errors import NoToken

TOKEN_S, STEP_S = 0.12, 0.005


class SlowSampler:
    """Its tokens come ``TOKEN_S`` after their rows."""

    finished = False
    is_busy = False

    def __init__(self) -> None:
        self.n_draws = 0
        self.ready_s = 0.0


class SlowExecutor:
    """Has the tokens that have come."""

    def __init__(self) -> None:
        self.arrived: list[tuple[SlowSampler, int, int]] = []

    def take_drawn(self) -> list[tuple[SlowSampler, int, int]]:
        taken, self.arrived = self.arrived, []
        return taken


def test_patience_grows_within_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes long for each token does not wait for another one's answer before each of them."""
    now_s = 0.0
    monkeypatch.setattr(late_draws, "perf_counter", lambda: now_s)
    scheduler, late = Scheduler(cache_of(1), 512, 512, 8, 8, None), LateDraws()
    executor: Any = SlowExecutor()
    slow, others = Request([1, 2], RequestSpec(20)), [Request([3, 4], RequestSpec(100)) for _ in range(20)]
    sampler: Any = SlowSampler()
    slow.sampler = sampler
    for request in (slow, *others):
        scheduler.add(request)
    while slow.state is not State.FINISHED:
        plan = scheduler.plan()
        if plan is not None:
            if slow in plan.requests:
                sampler.n_draws, sampler.ready_s = sampler.n_draws + 1, now_s + TOKEN_S
            sampled = [NoToken.LATER if request is slow else 7 for request in plan.requests]
            late.add(plan, sampled)
            scheduler.commit(plan, sampled)
        now_s += STEP_S
        if late.requests and now_s >= sampler.ready_s:
            executor.arrived.append((sampler, sampler.n_draws, 7))
        for request, token in late.take(executor, [slow]):
            scheduler.accept_drawn(request, token)
        if scheduler.n_queued:
            for request, waited_s in late.late_by(_LEND_S):
                scheduler.lend(request, waited_s / _LEND_S)
        scheduler.check_integrity()
    assert len(slow.tokens) == 22
    assert 1 <= scheduler.n_preempted < 6

"""Images among the tokens of a request, as the policy sees them: rows instead of tokens, whole where that is asked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from llamapipe._engine.policy.core import UNLIMITED, Request, RequestSpec, Span, State
from llamapipe._engine.policy.kv import KvCache
from llamapipe._engine.policy.overflow import Overflow
from llamapipe._engine.policy.scheduler import Scheduler


class Picture(NamedTuple):
    """Rows of one image; ``seed`` stands for its content."""

    n: int
    seed: int = 0
    is_causal: bool = True
    is_encoded: bool = True
    grid: object = None

    @property
    def rows(self) -> object:
        return np.full((self.n, 2), self.seed) if self.is_encoded else None

    @property
    def n_positions(self) -> int:
        return self.n

    @property
    def ids(self) -> list[int]:
        return [-1 - 1000 * self.seed - i for i in range(self.n)]


def request(*parts: list[int] | Picture, max_tokens: int = 4) -> Request:
    tokens: list[int] = []
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, Picture):
            spans.append(Span(len(tokens), len(tokens) + part.n, part))
            tokens += part.ids
        else:
            tokens += part
    return Request(tokens, RequestSpec(max_tokens, token_budget=UNLIMITED, spans=tuple(spans)))


def new_scheduler(
    n_slots: int = 4, n_ctx: int = 64, n_ubatch: int = 16, overflow: Overflow | None = None
) -> Scheduler:
    return Scheduler(
        KvCache(n_slots), n_ctx, n_ctx * n_slots, 32, n_ubatch, padding_token=0, overflow=overflow
    )


def step(scheduler: Scheduler) -> tuple[list[int], list[tuple[int, int]], bool]:
    """The tokens of the next step, the first entry and the number of each run of rows, and whether it is causal."""
    plan = scheduler.plan()
    assert plan is not None
    contents = plan.tokens.copy(), [run[:2] for run in plan.rows_of_media], plan.is_causal
    scheduler.commit(plan, [7] * len(plan.requests))
    scheduler.check_integrity()
    return contents


def test_rows_share_a_step_with_tokens() -> None:
    scheduler = new_scheduler()
    scheduler.add(request([1, 2], Picture(3), [3, 4]))
    assert step(scheduler) == ([1, 2, 0, 0, 0, 3, 4], [(2, 3)], True)
    assert step(scheduler) == ([7], [], True)


def test_a_step_may_end_within_rows_that_see_those_before_them() -> None:
    scheduler = new_scheduler(n_ubatch=4)
    scheduler.add(request([1]))
    step(scheduler)  # so that steps have at most n_ubatch tokens
    scheduler.add(request([1, 2], Picture(5, 3), [3]))
    sizes = []
    for _ in range(4):
        _, runs, is_causal = step(scheduler)
        assert is_causal
        sizes += [n for _, n in runs]
    assert sum(sizes) == 5 and len(sizes) > 1


def test_rows_that_see_each_other_are_a_step_alone() -> None:
    scheduler = new_scheduler()
    image = Picture(4, is_causal=False)
    scheduler.add(request([9, 9]))
    step(scheduler)
    scheduler.add(request([1, 2], image, [3], image, [4, 5]))
    assert step(scheduler) == ([7, 1, 2], [], True)
    assert step(scheduler) == ([0] * 4, [(0, 4)], False)
    assert step(scheduler)[0] == [7, 3]  # those that decode get a token between two images
    assert step(scheduler) == ([0] * 4, [(0, 4)], False)
    tokens, runs, is_causal = step(scheduler)
    assert tokens[-2:] == [4, 5] and not runs and is_causal


def test_requests_wait_until_their_images_are_encoded() -> None:
    scheduler = new_scheduler()
    waiting = request([1], Picture(2, is_encoded=False), [2])
    scheduler.add(waiting)
    assert scheduler.plan() is None and scheduler.is_preparing and scheduler.n_queued == 1
    scheduler.add(request([5, 6]))
    assert step(scheduler)[0] == [5, 6]
    scheduler.queue_prepared(waiting)
    scheduler.queue_prepared(waiting)  # a second time does nothing
    assert not scheduler.is_preparing
    assert waiting.state is State.WAITING
    cancelled = request([1], Picture(2, is_encoded=False), [2])
    scheduler.add(cancelled)
    scheduler.cancel(cancelled)
    assert not scheduler.is_preparing and cancelled.state is State.FINISHED
    scheduler.check_integrity()


@pytest.mark.parametrize(("is_causal", "grid"), [(True, None), (False, None), (True, "2 x 3")])
def test_prefixes_with_equal_images_are_found_and_never_cut_where_rows_belong_together(
    is_causal: bool, grid: object
) -> None:
    scheduler = new_scheduler()
    image, other = Picture(6, 1, is_causal, grid=grid), Picture(6, 2, is_causal, grid=grid)
    first = request([1, 2], image, [3, 4], max_tokens=1)
    scheduler.add(first)
    while first.state is not State.FINISHED:
        step(scheduler)
    same, changed = request([1, 2], image, [8]), request([1, 2], other, [3, 4])
    scheduler.add(same)
    scheduler.add(changed)
    scheduler.plan()
    assert same.n_cached == 8 and changed.n_cached == 2
    part = request([1, 2], image, [8])
    assert (
        part.prefix_end(5) == (5 if is_causal and grid is None else 2)
        and part.prefix_end(8) == 8
        and part.prefix_end(2) == 2
    )


@pytest.mark.parametrize("mode", ["recompute", "shift"])
def test_a_full_context_drops_images_whole(mode: str) -> None:
    scheduler = new_scheduler(n_ctx=16, overflow=Overflow(mode, 1))
    overflowing = request([1], Picture(6, 1), [2, 3], Picture(3, 2), [4], max_tokens=30)
    scheduler.add(overflowing)
    while len(overflowing.dropped) == 0:
        step(scheduler)
    # Half of the tokens after the first end within the second image.
    assert overflowing.spans == () or overflowing.spans[0].source == Picture(3, 2)
    for span in overflowing.spans:
        assert overflowing.tokens[span.begin : span.end] == Picture(3, 2).ids
    assert all(span.end <= len(overflowing.tokens) for span in overflowing.spans)
    assert sum(token < 0 for token in overflowing.tokens) == sum(
        span.end - span.begin for span in overflowing.spans
    )
    for _ in range(8):
        step(scheduler)

"""Scores and prompt groups in the scheduler: each row is asked for once, and is the right one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.fakes import FakeContext, continuation, next_token, score_of
from support.memory import cache_of

from llamapipe._engine.policy.core import BatchPlan, Request, RequestSpec, State
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe._engine.policy.scoring import ContinuationTargets, PromptTargets, TokenScore
from llamapipe.errors import ContextFullError

N_CTX = 48


def scores_of(request: Request) -> Any:
    """The scores so far, in the shape of the request's kind of targets."""
    assert isinstance(request.logprob_targets, (ContinuationTargets, PromptTargets))
    return request.logprob_targets.scores


class ScoreHarness:
    """Runs a scheduler's steps on a fake context, as the engine thread does."""

    def __init__(
        self,
        n_slots: int,
        n_cells: int | None = None,
        n_score_rows: int = 5,
        recurrent: bool = False,
        host_bytes: int = 0,
    ) -> None:
        n_cells = N_CTX * n_slots if n_cells is None else n_cells
        self.context = FakeContext(n_slots, N_CTX, n_cells, n_batch=24, recurrent=recurrent)
        self.context.n_score_rows = n_score_rows
        self.cache = cache_of(n_slots, enabled=True, has_states=recurrent, host_bytes=host_bytes, min_save=4)
        self.scheduler = Scheduler(self.cache, N_CTX, n_cells, 24, 12, None, n_score_rows=n_score_rows)
        self.n_fed = 0

    def change_cells(self) -> bool:
        return self.scheduler.note_cell_changes(self.context.change_cells(self.cache.take_memory_ops()))

    def step(self) -> BatchPlan | None:
        self.change_cells()
        plan = self.scheduler.plan()
        if plan is None:
            return None
        if not self.change_cells():
            self.scheduler.drop(plan)
            return plan
        try:
            step = (
                self.context.launch_repeat()
                if plan.repeats
                else self.context.launch(plan.tokens, plan.positions, plan.seq_ids, plan.outputs)
            )
        except ContextFullError:
            assert self.scheduler.free_cells_after(plan)
            return plan
        nobody = [None] * len(plan.rows)
        sampled = (
            self.context.sample_repeat(step) if plan.repeats else self.context.sample(step, plan.rows, nobody)
        )
        for _, targets, first, entries in plan.scored:
            assert len(entries) <= self.context.n_score_rows
            for i, entry in enumerate(entries):
                tokens = targets.targets(first + i)
                scores = self.context.score(step, [entry] * len(tokens), tokens, targets.n_top)
                targets.take(first + i, scores)
        self.n_fed += len(plan.tokens)
        self.scheduler.commit(plan, sampled)
        self.scheduler.check_integrity()
        return plan

    def run(self) -> None:
        for _ in range(5_000):
            if self.step() is None:
                assert len(self.scheduler.live()) == 0, f"nothing goes on: {self.scheduler!r}"
                return
        raise AssertionError(f"no end: {self.scheduler!r}")


def prompt_of(n: int, which: int) -> list[int]:
    return [(31 * which + 7 * i) % 101 for i in range(n)]


def expected(context: Sequence[int], tokens: Sequence[int], n_top: int = 0) -> list[TokenScore]:
    """What the fake model says of tokens behind a context."""
    whole = [*context, *tokens]
    n = len(context)
    return [score_of(next_token(whole[: n + i]), token, n_top) for i, token in enumerate(tokens)]


def score_request(context: Sequence[int], continuations: Sequence[Sequence[int]]) -> Request:
    targets = ContinuationTargets(context, continuations)
    return Request(targets.first(), RequestSpec(0, logprob_targets=targets))


class TestContinuations:
    @pytest.mark.parametrize("n_score_rows", [1, 2, 32])
    def test_each_is_behind_the_context_alone(self, n_score_rows: int) -> None:
        harness = ScoreHarness(2, n_score_rows=n_score_rows)
        context, continuations = prompt_of(9, 1), [[5], [6, 7, 8], [9, 10], [11], prompt_of(30, 2)]
        request = score_request(context, continuations)
        harness.scheduler.add(request)
        harness.run()
        assert (request.state, request.finish_reason) == (State.FINISHED, "stop")
        assert scores_of(request) == [expected(context, c) for c in continuations]
        assert harness.n_fed == 9 + 2 + 1 + 29  # no token twice, and no last one

    def test_single_tokens_cost_the_context(self) -> None:
        harness = ScoreHarness(1)
        request = score_request(prompt_of(9, 1), [[5], [6], [7]])
        harness.scheduler.add(request)
        harness.run()
        assert harness.n_fed == 9
        assert [len(c) for c in scores_of(request)] == [1, 1, 1]

    def test_a_memory_that_forgets_only_everything(self) -> None:
        harness = ScoreHarness(2, recurrent=True)
        request = score_request(prompt_of(9, 1), [[5, 6], [7, 8, 9]])
        harness.scheduler.add(request)
        harness.run()
        assert scores_of(request) == [expected(prompt_of(9, 1), c) for c in ([5, 6], [7, 8, 9])]


class TestPrompts:
    @pytest.mark.parametrize("n", [1, 2, 13, 47])
    def test_every_token_but_the_first(self, n: int) -> None:
        harness = ScoreHarness(1)
        prompt = prompt_of(n, 3)
        request = Request(prompt.copy(), RequestSpec(1, logprob_targets=PromptTargets(prompt, 2)))
        harness.scheduler.add(request)
        harness.run()
        assert scores_of(request) == expected(prompt[:1], prompt[1:], 2)
        assert request.tokens[n:] == continuation(prompt, 1)[0]


class TestSharedPrompts:
    @pytest.mark.parametrize("n_slots", [1, 2, 5])
    def test_the_prompt_is_fed_once(self, n_slots: int) -> None:
        harness = ScoreHarness(n_slots)
        requests = [Request(prompt_of(20, 1), RequestSpec(5)) for _ in range(5)]
        for request in requests:
            harness.scheduler.add(request)
        assert harness.scheduler.n_queued == 5
        harness.run()
        for request in requests:
            assert request.tokens == prompt_of(20, 1) + continuation(prompt_of(20, 1), 5)[0]
        assert [request.n_cached for request in requests] == [0] + [19] * 4
        assert harness.n_fed == 20 + 4 * 1 + 5 * 4

    def test_the_next_leads_when_the_first_is_cancelled(self) -> None:
        harness = ScoreHarness(3)
        first, second, third = requests = [Request(prompt_of(30, 1), RequestSpec(5)) for _ in range(3)]
        for request in requests:
            harness.scheduler.add(request)
        harness.step()
        assert first.n_past == 24 and second.slot == third.slot == -1
        harness.scheduler.cancel(first)
        harness.scheduler.cancel(second)
        harness.run()
        assert third.tokens[30:] == continuation(prompt_of(30, 1), 5)[0]
        assert third.n_cached == 24  # what the first had computed

    def test_one_that_waits_is_cancelled(self) -> None:
        harness = ScoreHarness(3)
        first, second = requests = [Request(prompt_of(30, 1), RequestSpec(5)) for _ in range(2)]
        for request in requests:
            harness.scheduler.add(request)
        harness.step()
        harness.scheduler.cancel(second)
        assert (second.state, harness.scheduler.n_queued) == (State.FINISHED, 0)
        harness.run()
        assert first.finish_reason == "length"

    def test_one_that_comes_when_the_prompt_is_there(self) -> None:
        harness = ScoreHarness(2)
        first, second = (Request(prompt_of(10, 1), RequestSpec(20)) for _ in range(2))
        harness.scheduler.add(first)
        harness.step()
        harness.step()
        harness.scheduler.add(second)
        harness.run()
        assert harness.n_fed == 10 + 19 + 1 + 19

    def test_a_memory_that_cannot_be_copied_in_part(self) -> None:
        harness = ScoreHarness(2, recurrent=True)
        requests = [Request(prompt_of(20, 1), RequestSpec(5)) for _ in range(2)]
        for request in requests:
            harness.scheduler.add(request)
        harness.run()
        assert requests[1].tokens == requests[0].tokens
        longer = Request([*requests[0].tokens, 7], RequestSpec(5))
        harness.scheduler.add(longer)
        harness.run()
        assert longer.n_cached == 24  # all that was computed
        assert longer.tokens[26:] == continuation(longer.tokens[:26], 5)[0]


class TestAnything:
    @pytest.mark.parametrize("seed", range(60))
    def test_everything_at_once(self, seed: int) -> None:
        """Generations and scores with shared prefixes under few slots and cells, with cancellations and preemptions."""
        chance = random.Random(seed)
        n_slots = chance.randint(1, 4)
        n_cells = chance.choice([None, max(N_CTX, 20 * n_slots)])
        harness = ScoreHarness(
            n_slots,
            n_cells,
            n_score_rows=chance.choice([1, 3, 32]),
            recurrent=chance.random() < 0.2,
            host_bytes=chance.choice([0, 2000, 10_000]),
        )
        harness.context.refuses_saves = chance.random() < 0.2
        requests: list[Request] = []
        contexts: dict[Request, tuple[list[int], list[list[int]]]] = {}
        for _ in range(60):
            kind = chance.random()
            prompt = prompt_of(chance.randint(1, 20), chance.randint(0, 5))
            if chance.random() < 0.5:
                prompt = prompt_of(chance.randint(12, 20), chance.randint(6, 7)) + prompt[:10]
            new: list[Request] = []
            if kind < 0.2:
                rest = [prompt_of(chance.randint(1, 16), 7 + i) for i in range(chance.randint(1, 4))]
                new = [score_request(prompt, rest)]
                contexts[new[0]] = (prompt, rest)
            elif kind < 0.4:
                specs = [RequestSpec(chance.randint(1, 20)) for _ in range(chance.randint(1, 4))]
                if chance.random() < 0.5:
                    specs[0] = specs[0]._replace(logprob_targets=PromptTargets(prompt, 1))
                new = [Request(prompt.copy(), spec) for spec in specs]
            elif requests and kind < 0.5:  # a conversation goes on
                told = chance.choice(requests).tokens
                new = [Request([*told[:30], *prompt][: N_CTX - 12], RequestSpec(chance.randint(1, 10)))]
            for request in new:
                harness.scheduler.add(request)
            requests += new
            if requests and chance.random() < 0.1:
                harness.scheduler.cancel(chance.choice(requests))
            harness.step()
        harness.run()
        for request in requests:
            if request.finish_reason == "cancelled":
                continue
            if request in contexts:
                context, rest = contexts[request]
                assert scores_of(request) == [expected(context, c) for c in rest]
                continue
            prompt = request.tokens[: request.n_prompt]
            assert (
                request.tokens[request.n_prompt :] == continuation(prompt, request.max_tokens, (), N_CTX)[0]
            )
            if request.logprob_targets is not None:
                assert scores_of(request) == expected(prompt[:1], prompt[1:], 1)

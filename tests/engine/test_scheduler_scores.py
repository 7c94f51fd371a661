"""Scores and prompt groups in the scheduler: each row is asked for once, and is the right one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.fakes import FakeContext, continuation, next_token, score_of

from llamapipe.engine.scheduler.batch_plan import BatchPlan, Copy
from llamapipe.engine.scheduler.logprob_targets import ContinuationTargets, PromptTargets, TokenScore
from llamapipe.engine.scheduler.prompt_group import PromptGroup
from llamapipe.engine.scheduler.request import Request, State
from llamapipe.engine.scheduler.scheduler import Scheduler
from llamapipe.errors import ContextFullError

N_CTX = 48


def scores_of(request: Request) -> Any:
    """The scores so far, in the shape of the request's kind of targets."""
    assert isinstance(request.logprob_targets, (ContinuationTargets, PromptTargets))
    return request.logprob_targets.scores


class Desk:
    """Runs a scheduler's steps on a fake context, as the decoder does."""

    def __init__(
        self, n_slots: int, n_cells: int | None = None, n_score_rows: int = 5, recurrent: bool = False
    ) -> None:
        n_cells = N_CTX * n_slots if n_cells is None else n_cells
        self.context = FakeContext(n_slots, N_CTX, n_cells, n_batch=24, recurrent=recurrent)
        self.context.n_score_rows = n_score_rows
        min_prefix_copy = None if self.context.recurrent else 1
        self.scheduler = Scheduler(
            n_slots, N_CTX, n_cells, 24, 12, None, n_score_rows=n_score_rows, min_prefix_copy=min_prefix_copy
        )
        self.n_fed = 0

    def step(self) -> BatchPlan | None:
        self._memory()
        plan = self.scheduler.plan()
        self._memory()
        if plan is None:
            return None
        try:
            step = (
                self.context.launch_repeat()
                if plan.repeats
                else self.context.launch(plan.tokens, plan.positions, plan.seq_ids, plan.outputs)
            )
        except ContextFullError:
            assert self.scheduler.relieve(plan) is not None
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
                assert self.scheduler.n_live == 0, f"nothing goes on: {self.scheduler!r}"
                return
        raise AssertionError(f"no end: {self.scheduler!r}")

    def _memory(self) -> None:
        for op in self.scheduler.take_memory_ops():
            if not (self.context.copy(*op) if isinstance(op, Copy) else self.context.remove(*op)):
                self.scheduler.recompute(op.slot)


def prompt_of(n: int, which: int) -> list[int]:
    return [(31 * which + 7 * i) % 101 for i in range(n)]


def expected(context: Sequence[int], tokens: Sequence[int], n_top: int = 0) -> list[TokenScore]:
    """What the fake model says of tokens behind a context."""
    whole = [*context, *tokens]
    n = len(context)
    return [score_of(next_token(whole[: n + i]), token, n_top) for i, token in enumerate(tokens)]


def score_request(context: Sequence[int], continuations: Sequence[Sequence[int]]) -> Request:
    targets = ContinuationTargets(context, continuations)
    request = Request(targets.first(), max_tokens=0)
    request.logprob_targets = targets
    return request


class TestContinuations:
    @pytest.mark.parametrize("n_score_rows", [1, 2, 32])
    def test_each_is_behind_the_context_alone(self, n_score_rows: int) -> None:
        desk = Desk(2, n_score_rows=n_score_rows)
        context, continuations = prompt_of(9, 1), [[5], [6, 7, 8], [9, 10], [11], prompt_of(30, 2)]
        request = score_request(context, continuations)
        desk.scheduler.add(request)
        desk.run()
        assert (request.state, request.finish_reason) == (State.FINISHED, "stop")
        assert scores_of(request) == [expected(context, c) for c in continuations]
        assert desk.n_fed == 9 + 2 + 1 + 29  # no token twice, and no last one

    def test_single_tokens_cost_the_context(self) -> None:
        desk = Desk(1)
        request = score_request(prompt_of(9, 1), [[5], [6], [7]])
        desk.scheduler.add(request)
        desk.run()
        assert desk.n_fed == 9
        assert [len(c) for c in scores_of(request)] == [1, 1, 1]

    def test_a_memory_that_forgets_only_everything(self) -> None:
        desk = Desk(2, recurrent=True)
        request = score_request(prompt_of(9, 1), [[5, 6], [7, 8, 9]])
        desk.scheduler.add(request)
        desk.run()
        assert scores_of(request) == [expected(prompt_of(9, 1), c) for c in ([5, 6], [7, 8, 9])]


class TestPrompts:
    @pytest.mark.parametrize("n", [1, 2, 13, 47])
    def test_every_token_but_the_first(self, n: int) -> None:
        desk = Desk(1)
        prompt = prompt_of(n, 3)
        request = Request(prompt.copy(), 1)
        request.logprob_targets = PromptTargets(prompt, 2)
        desk.scheduler.add(request)
        desk.run()
        assert scores_of(request) == expected(prompt[:1], prompt[1:], 2)
        assert request.tokens[n:] == continuation(prompt, 1)[0]


class TestPromptGroups:
    def prompt_group(self, n: int, prompt: Sequence[int], max_tokens: int = 5) -> list[Request]:
        members = [Request(list(prompt), max_tokens) for _ in range(n)]
        PromptGroup(members)
        return members

    @pytest.mark.parametrize("n_slots", [1, 2, 5])
    def test_the_prompt_is_fed_once(self, n_slots: int) -> None:
        desk = Desk(n_slots)
        members = self.prompt_group(5, prompt_of(20, 1))
        for member in members:
            desk.scheduler.add(member)
        assert desk.scheduler.n_queued == 5
        desk.run()
        for member in members:
            assert member.tokens == prompt_of(20, 1) + continuation(prompt_of(20, 1), 5)[0]
        assert desk.n_fed == 20 + 5 * 4

    @pytest.mark.parametrize("max_tokens", [1, 2, 3])
    @pytest.mark.parametrize("n_prompt", [1, 2, 20])
    def test_however_soon_they_end(self, n_prompt: int, max_tokens: int) -> None:
        """Who ends leaves its cells to the next."""
        desk = Desk(2)
        members = self.prompt_group(7, prompt_of(n_prompt, 1), max_tokens)
        for member in members:
            desk.scheduler.add(member)
        desk.run()
        for member in members:
            assert member.tokens[n_prompt:] == continuation(prompt_of(n_prompt, 1), max_tokens)[0]
        assert desk.n_fed == n_prompt + 7 * (max_tokens - 1)

    def test_the_next_leads_when_the_first_is_cancelled(self) -> None:
        desk = Desk(3)
        first, second, third = members = self.prompt_group(3, prompt_of(30, 1))
        for member in members:
            desk.scheduler.add(member)
        desk.step()
        assert first.n_past == 24 and second.slot == third.slot == -1
        desk.scheduler.cancel(first)
        desk.scheduler.cancel(second)
        desk.run()
        assert third.tokens[30:] == continuation(prompt_of(30, 1), 5)[0]

    def test_one_that_waits_is_cancelled(self) -> None:
        desk = Desk(3)
        first, second = members = self.prompt_group(2, prompt_of(30, 1))
        for member in members:
            desk.scheduler.add(member)
        desk.step()
        desk.scheduler.cancel(second)
        assert (second.state, desk.scheduler.n_queued) == (State.FINISHED, 0)
        desk.run()
        assert first.finish_reason == "length"

    def test_one_that_comes_when_the_prompt_is_there(self) -> None:
        desk = Desk(2)
        first, second = self.prompt_group(2, prompt_of(10, 1), max_tokens=20)
        desk.scheduler.add(first)
        desk.step()
        desk.step()
        desk.scheduler.add(second)
        desk.run()
        assert desk.n_fed == 10 + 19 + 1 + 19

    def test_a_memory_that_cannot_be_copied_in_part(self) -> None:
        desk = Desk(2, recurrent=True)
        members = self.prompt_group(2, prompt_of(10, 1))
        for member in members:
            desk.scheduler.add(member)
        desk.run()
        assert members[1].tokens == members[0].tokens


class TestAnything:
    @pytest.mark.parametrize("seed", range(60))
    def test_everything_at_once(self, seed: int) -> None:
        """Generations, scores and prompt groups under few slots and cells, with cancellations."""
        chance = random.Random(seed)
        n_slots = chance.randint(1, 4)
        n_cells = chance.choice([None, max(N_CTX, 20 * n_slots)])
        desk = Desk(n_slots, n_cells, n_score_rows=chance.choice([1, 3, 32]), recurrent=chance.random() < 0.2)
        requests: list[Request] = []
        contexts: dict[Request, tuple[list[int], list[list[int]]]] = {}
        for _ in range(60):
            kind = chance.random()
            prompt = prompt_of(chance.randint(1, 20), chance.randint(0, 5))
            new: list[Request] = []
            if kind < 0.2:
                rest = [prompt_of(chance.randint(1, 20), 7 + i) for i in range(chance.randint(1, 4))]
                new = [score_request(prompt, rest)]
                contexts[new[0]] = (prompt, rest)
            elif kind < 0.4:
                new = [Request(prompt.copy(), chance.randint(1, 20)) for _ in range(chance.randint(1, 4))]
                if chance.random() < 0.5:
                    new[0].logprob_targets = PromptTargets(prompt, 1)
                if len(new) > 1:
                    PromptGroup(new)
            for request in new:
                desk.scheduler.add(request)
            requests += new
            if requests and chance.random() < 0.1:
                desk.scheduler.cancel(chance.choice(requests))
            desk.step()
        desk.run()
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

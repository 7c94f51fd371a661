"""How many prompt tokens a step may have beside requests that decode."""

from __future__ import annotations

import pytest

from llamapipe._engine.policy.core import UNLIMITED, Request, RequestSpec, State
from llamapipe._engine.policy.planner import BatchBuilder, PrefillBudget
from llamapipe._engine.policy.queues import Running
from llamapipe._engine.policy.scoring import PromptTargets


def running_of(n_decoding: int, *prompts: int) -> Running:
    """Decoding requests, and prompts of these lengths."""
    running = Running()
    for i in range(n_decoding + len(prompts)):
        n = 8 if i < n_decoding else prompts[i - n_decoding]
        request = Request([1] * n, RequestSpec(5))
        request.slot = request.arrival = i
        request.turn = (0, 0, i)
        request.n_past = 7 if i < n_decoding else 0
        request.move(State.RUNNING)
        running.add(request)
    return running


class TestPrefillBudget:
    @pytest.mark.parametrize("max_itl_ms", [20, 60, 250])
    def test_the_longest_step_stays_within_the_limit(self, max_itl_ms: float) -> None:
        """On a machine whose prompt tokens get dearer with their position, as attention does."""
        budget = PrefillBudget(max_itl_ms / 1e3)
        budget.observe(0, 0, 0.004)
        position, steps = 0, []
        while position < 8000:
            n = budget.n_tokens(position)
            seconds = 0.004 + n * (62e-6 + 0.214e-6 * (position + n / 2))
            steps.append((n, seconds))
            budget.observe(n, position + n / 2, seconds)
            position += n
        assert all(seconds <= 1.01 * max_itl_ms / 1e3 or n == 64 for n, seconds in steps)
        assert all(n % 64 == 0 for n, _ in steps)
        if max_itl_ms == 250:
            assert max(n for n, _ in steps) > 512

    def test_without_a_limit_it_learns_nothing(self) -> None:
        budget = PrefillBudget(None)
        budget.observe(100, 50, 10.0)
        assert budget.n_tokens(0) == UNLIMITED

    @pytest.mark.parametrize("row_ms", [0.01, 0.4, 3, 100])
    def test_scores_keep_the_limit(self, row_ms: float) -> None:
        """A row of logits may cost more than a token, and the time of a step with few of them tells how much."""
        budget = PrefillBudget(0.025)
        budget.observe(0, 0, 0.005)
        seconds, n = 0.0, 0
        for _ in range(20):
            n = budget.n_rows()
            seconds = 0.005 + n * (row_ms + 0.05) / 1e3
            budget.observe(n, 100, seconds, n)
        assert seconds <= 0.025 or n == 4
        assert seconds > 0.012 or n > 1000
        assert budget.n_tokens(0) == 64  # nothing is known of tokens without scores

    def test_scores_among_other_prompt_tokens_count(self) -> None:
        """20 of 64 prompt tokens are scored, each for 3 ms: one of them is in fact more than the limit allows."""
        budget = PrefillBudget(0.025)
        budget.observe(0, 0, 0.005)
        seconds = 1.0
        for _ in range(40):
            n = min(budget.n_rows(), 20)
            seconds = 0.005 + 64 * 50e-6 + n * 0.003
            budget.observe(64, 32, seconds, n)
        assert seconds <= 0.026

    def test_an_outlier_is_forgotten(self) -> None:
        budget = PrefillBudget(0.025)
        budget.observe(0, 0, 0.005)
        budget.observe(8, 32, 2.0, 8)
        assert budget.n_rows() == 4
        for _ in range(60):
            n = budget.n_rows()
            budget.observe(64, 32, 0.005 + 64 * 20e-6 + n * 0.0005, n)
        assert budget.n_rows() > 8

    def test_tokens_are_learned_beside_a_few_scores(self) -> None:
        """Contexts with continuations of one token: a score in each step."""
        budget = PrefillBudget(0.1)
        budget.observe(0, 0, 0.005)
        for _ in range(20):
            budget.observe(64, 32, 0.005 + 64 * 50e-6 + 0.001, 1)
        assert budget.n_tokens(0) > 64

    def test_a_slow_machine_still_computes_prompts(self) -> None:
        budget = PrefillBudget(0.01)
        budget.observe(0, 0, 5.0)
        budget.observe(64, 32, 50.0)
        assert budget.n_tokens(0) == 64


class TestSteps:
    def chunks(self, builder: BatchBuilder, running: Running) -> list[tuple[int, int]]:
        """The arrival of each prompt in the next step, with its tokens."""
        plan = builder.plan(running, {})
        return [(request.arrival, n) for request, n in plan.scheduled[plan.n_decode :]]

    def test_the_budget_limits_prompts_beside_decoding(self) -> None:
        builder = BatchBuilder(2048, 512, None, 32, max_itl_s=0.05)
        assert self.chunks(builder, running_of(4, 4000)) == [(4, 64)]
        assert self.chunks(builder, running_of(0, 4000)) == [(0, 2048)]  # nothing waits

    def test_the_budget_limits_prompts_while_streams_with_other_adapters_wait(self) -> None:
        builder = BatchBuilder(2048, 512, None, 32, max_itl_s=0.05)
        running = running_of(0, 4000)
        other = Request([1] * 8, RequestSpec(5, adapters="a"))
        other.move(State.RUNNING)
        running.add(other)
        assert self.chunks(builder, running) == [(0, 2048)]  # it has no token yet
        other.n_generated = 1
        running.prefilling[0].batch_plan = None
        assert self.chunks(builder, running) == [(0, 64)]
        running.prefilling[0].batch_plan = None
        assert self.chunks(BatchBuilder(2048, 512, None, 32), running) == [(0, 2048)]  # no limit

    def test_prompts_of_turns_are_learned_from(self) -> None:
        budget = PrefillBudget(0.3)
        budget.observe(0, 0, 0.005)
        for _ in range(20):
            budget.observe(512, 256, 512 * 400e-6, decodes=False)
        assert (budget.n_tokens(0, 3), budget.n_tokens(0)) == (192, 640)

    def test_scores_beside_decoding_begin_with_few(self) -> None:
        builder = BatchBuilder(2048, 512, None, 32, max_itl_s=0.05)
        running = running_of(4, 40)
        (scored,) = running.prefilling
        scored.max_tokens = 0
        scored.logprob_targets = PromptTargets(scored.tokens, 0)
        assert len(builder.plan(running, {}).scored[0].entries) == 8
        running.prefilling.clear()

    def test_short_prompts_pass_a_long_one(self) -> None:
        builder = BatchBuilder(2048, 512, None, 32)
        assert self.chunks(builder, running_of(4, 4000, 30, 3000, 200)) == [(4, 278), (5, 30), (7, 200)]

    @pytest.mark.parametrize(("padding_token", "slots"), [(5, [0, 1, 2]), (None, [2, 0, 1])])
    def test_prompts_are_in_the_order_of_their_slots(
        self, padding_token: int | None, slots: list[int]
    ) -> None:
        """With per-sequence KV llama.cpp computes prompts of slots in a row together. Unified KV needs no order."""
        running = running_of(0, 20, 30, 20)
        for request, slot in zip(running.prefilling, (2, 0, 1), strict=True):
            request.slot = slot
        plan = BatchBuilder(2048, 512, padding_token, 32).plan(running, {})
        assert list(dict.fromkeys(plan.seq_ids)) == slots
        assert [request.slot for request, _ in plan.scheduled] == slots
        assert (
            [plan.seq_ids[row] for row in plan.rows] == [request.slot for request in plan.requests] == slots
        )
        assert [plan.tokens[row] for row in plan.rows] == [request.tokens[-1] for request in plan.requests]

    def test_a_long_prompt_keeps_half(self) -> None:
        builder = BatchBuilder(2048, 512, None, 32)
        assert self.chunks(builder, running_of(12, 4000, 100, 100, 100)) == [(12, 300), (13, 100), (14, 100)]

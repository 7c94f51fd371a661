"""The scheduler alone: who is fed what and when, on a fake context that would notice any wrong position or token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fakes import N_VOCAB, FakeContext, cell, continuation
from support.memory import cache_of

from llamapipe._engine.policy import scheduler as scheduler_module
from llamapipe._engine.policy.core import UNLIMITED, BatchPlan, Remove, Request, RequestSpec, State
from llamapipe._engine.policy.overflow import Overflow
from llamapipe._engine.policy.queues import Carries
from llamapipe._engine.policy.scheduler import Scheduler
from llamapipe.errors import ContextFullError, DecodeError, NoToken

PADDING = 0


def prompt_of(n: int, which: int = 0) -> list[int]:
    """`n` tokens; other numbers give other prompts."""
    return [(31 * which + 7 * i + 1) % N_VOCAB for i in range(n)]


class SchedulerHarness:
    """A scheduler on a fake context, and the order in which the engine thread does things."""

    def __init__(
        self,
        n_slots: int = 4,
        n_ctx: int = 64,
        n_cells: int | None = None,
        n_batch: int = 32,
        n_ubatch: int = 16,
        padding_token: int | None = None,
        recurrent: bool = False,
        prefill_cutoff: int | None = None,
        carries: Carries | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        n_cells = n_ctx * n_slots if n_cells is None else n_cells
        self.n_ubatch = n_ubatch
        self.scheduler = Scheduler(
            cache_of(n_slots),
            n_ctx,
            n_cells,
            n_batch,
            n_ubatch,
            padding_token,
            prefill_cutoff=prefill_cutoff,
            carries=carries,
            overflow=overflow,
        )
        self.context = FakeContext(n_slots, n_ctx, n_cells, n_batch, recurrent=recurrent)
        self.n_added = 0
        self.n_full = 0  # launches that found no cells
        self.n_held = 0  # requests in a slot at the last launch
        self.prefill_cutoff = None if padding_token is None else prefill_cutoff
        # Of those that decode: tokens of prompts in steps since they were fed, and in the last of these.
        self.n_ahead: dict[Request, tuple[int, int | None]] = {}

    def add(self, n_prompt: int = 4, max_tokens: int | None = 5, **options: Any) -> Request:
        """A new request with a prompt of its own."""
        request = Request(prompt_of(n_prompt, self.n_added), RequestSpec(max_tokens, **options))
        self.n_added += 1
        self.scheduler.add(request)
        return request

    def allow(self, request: Request, n: int = 1) -> None:
        """Lets a request generate `n` more tokens."""
        request.token_budget = request.n_total + n
        self.scheduler.resume(request)

    def step(self) -> BatchPlan | None:
        """One turn of the engine loop; the plan, if there was something to do."""
        self.remove()
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        self.remove()
        self.n_held = self.scheduler.n_active
        if plan is None:
            return None
        self.check_nobody_is_held_up(plan)
        try:
            if plan.repeats:
                step = self.context.launch_repeat()
            else:
                step = self.context.launch(plan.tokens, plan.positions, plan.seq_ids, plan.outputs)
        except ContextFullError as error:
            self.n_full += 1
            if not self.scheduler.free_cells_after(plan):
                self.scheduler.abort(plan, error)
        except DecodeError as error:
            self.scheduler.abort(plan, error)
        else:
            nobody = [None] * len(plan.rows)
            sampled = (
                self.context.sample_repeat(step)
                if plan.repeats
                else self.context.sample(step, plan.rows, nobody)
            )
            self.scheduler.commit(plan, sampled)
        self.scheduler.check_integrity()
        return plan

    def check_nobody_is_held_up(self, plan: BatchPlan) -> None:
        """A decoding request is fed at the latest with the prompt tokens that make a ubatch since the last time.

        Nor does it wait where steps do not end early, or twice in a row for a step with less than enough.
        """
        n_prompt = sum(n for _, n in plan.scheduled[plan.n_decode :])
        ahead, self.n_ahead = self.n_ahead, {}
        now = {r for r, _ in plan.scheduled[: plan.n_decode]}
        for request in now | set(self.scheduler._running.decoding):
            n_before, n_last = ahead.get(request, (0, None))
            assert n_before + n_prompt <= self.n_ubatch, (request, plan)
            self.n_ahead[request] = n_before + n_prompt, n_prompt
            if request in ahead and request not in now and self.scheduler.batch_builder.n_micro_batches == 1:
                assert self.prefill_cutoff is not None, (request, plan)
                assert n_last is None or max(n_last, n_prompt) >= self.prefill_cutoff, (request, plan)
        for request in now:
            self.n_ahead[request] = 0, None

    def remove(self) -> None:
        """Removes the cells that were given up; then they are what the requests say."""
        while ops := self.scheduler.cache.take_memory_ops():
            self.scheduler.note_cell_changes(self.context.change_cells(ops))
        expected: list[list[int]] = [[] for _ in range(self.context.n_seq_max)]
        for request in self.scheduler.live():
            if request.slot >= 0:
                adapters: Any = request.spec.adapters
                cells = [cell(token, adapters) for token in request.tokens[: request.n_past]]
                expected[request.slot] = cells
        assert self.context.sequences == expected

    def steps(self, n: int) -> list[BatchPlan]:
        """`n` steps, each with something to do."""
        plans = [self.step() for _ in range(n)]
        assert None not in plans
        return plans  # type: ignore[return-value]

    def run(self) -> int:
        """Steps until nothing can be done; how many it took."""
        for n in range(10_000):
            if self.step() is None:
                return n
        raise AssertionError(f"no end: {self.scheduler!r}")


def generated(request: Request) -> list[int]:
    return request.tokens[request.n_prompt :]


def alone(request: Request, n_ctx: int = 64) -> tuple[list[int], str]:
    """What `request` generates when nobody else is there."""
    return continuation(request.tokens[: request.n_prompt], request.max_tokens, request.stop_tokens, n_ctx)


def assert_done(*requests: Request, n_ctx: int = 64) -> None:
    for request in requests:
        assert request.state is State.FINISHED
        assert request.error is None
        assert (generated(request), request.finish_reason) == alone(request, n_ctx)


def scheduled(plan: BatchPlan | None) -> list[tuple[Request, int]]:
    assert plan is not None
    return plan.scheduled


class TestSharedSteps:
    """Adapters are numbers here: those below 10 carry each other and the model alone, 9 only itself."""

    def harness(self) -> SchedulerHarness:
        def carries(carrier: Any, adapters: Any) -> bool:
            return carrier is not None and carrier < 9 and (adapters is None or adapters < 9)

        return SchedulerHarness(n_slots=4, n_batch=64, carries=carries)

    def test_a_step_has_all_that_one_set_carries(self) -> None:
        harness = self.harness()
        requests = [harness.add(adapters=adapter, cache_key=adapter) for adapter in (None, 1, 2, 1)]
        plan = harness.step()
        assert {request for request, _ in scheduled(plan)} == set(requests)
        harness.run()
        assert harness.context.n_changes == 1
        for request in requests:
            adapters: Any = request.adapters
            prompt = request.tokens[: request.n_prompt]
            assert generated(request) == continuation(prompt, 5, (), 64, N_VOCAB, adapters)[0]

    def test_a_set_that_none_carries_takes_a_turn(self) -> None:
        harness = self.harness()
        for adapter in (9, None, 1, 2):
            harness.add(adapters=adapter, cache_key=adapter)
        together = {
            frozenset(request.adapters for request, _ in plan.scheduled) for plan in harness.steps(10)
        }
        assert together == {frozenset({9}), frozenset({None, 1, 2})}

    def test_a_carrier_that_nobody_uses_is_dropped(self) -> None:
        harness = self.harness()
        harness.add(max_tokens=2, adapters=1, cache_key=1)
        harness.add(max_tokens=40)
        change_s = harness.scheduler.turns.change_s
        n_idle = 0
        for _ in range(30):
            plan = harness.step()
            assert plan is not None
            harness.scheduler.observe(plan, 4 * change_s)
            n_idle += harness.context.assigned is not None and len(plan.scheduled) == 1
        assert harness.context.n_changes == 2
        assert harness.context.adapters is None
        assert 3 <= n_idle <= 6  # as long as 20 changes, which are measured meanwhile


class TestAdmission:
    def test_in_order_of_arrival_each_in_the_lowest_free_slot(self) -> None:
        harness = SchedulerHarness(n_slots=2)
        a, b, c, d = (harness.add(max_tokens=n) for n in (3, 1, 2, 2))
        assert (harness.scheduler.n_queued, harness.scheduler.n_active) == (4, 0)
        harness.step()
        assert (a.slot, c.slot, b.state) == (0, -1, State.FINISHED)
        harness.step()
        assert (a.slot, c.slot, d.slot) == (0, 1, -1)  # b left slot 1
        harness.step()
        harness.step()
        assert d.slot == 0
        harness.run()
        assert_done(a, b, c, d)

    def test_the_queue_is_counted_until_a_slot_is_found(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        requests = [harness.add() for _ in range(3)]
        harness.step()
        scheduler = harness.scheduler
        assert (scheduler.n_queued, len(scheduler.live()), scheduler.take_dequeued()) == (2, 3, requests[:1])
        scheduler.cancel(requests[2])
        assert (scheduler.n_queued, len(scheduler.live()), scheduler.take_dequeued()) == (1, 2, requests[2:])
        harness.run()
        assert (scheduler.n_queued, len(scheduler.live())) == (0, 0)
        assert set(scheduler.take_dequeued()) == set(requests[:2])

    def test_nobody_overtakes_under_a_steady_stream_of_arrivals(self) -> None:
        harness = SchedulerHarness(n_slots=2, n_ctx=24, n_cells=30)
        requests, order = [], []
        for _ in range(60):
            requests.append(harness.add(n_prompt=5, max_tokens=6))
            harness.step()
            order += [r for r in requests if r.state is State.FINISHED and r not in order]
        assert len(order) >= 15
        assert order == requests[: len(order)]
        assert_done(*order, n_ctx=24)

    def test_cells_for_one_request_are_required(self) -> None:
        with pytest.raises(ValueError, match="n_cells is 63 and n_ctx 64"):
            Scheduler(cache_of(4), 64, 63, 32, 16)

    def test_reprs_show_the_state(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        a = harness.add(n_prompt=3, max_tokens=1)
        harness.add()
        assert "queued=2" in repr(harness.scheduler)
        assert repr(harness.step()) == "<BatchPlan n_tokens=3 n_outputs=1 scheduled 0: 3>"
        assert repr(a) == "<Request 0 finished length slot=-1 n_prompt=3 n_tokens=4 n_past=3>"


class TestTurns:
    def admitted(self, harness: SchedulerHarness, n: int) -> list[Request]:
        """The next ``n`` requests that are computed, in the order of their first tokens."""
        order: list[Request] = []
        while len(order) < n:
            plan = harness.step()
            assert plan is not None
            order += [request for request, _ in plan.scheduled if request not in order]
        return order

    def test_a_single_request_passes_a_list(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        caller = object()
        listed = [harness.add(max_tokens=1, caller=caller) for _ in range(20)]
        assert self.admitted(harness, 2) == listed[:2]
        single = harness.add(max_tokens=1)
        other = harness.add(max_tokens=1)
        assert self.admitted(harness, 4) == [single, other, listed[2], listed[3]]

    def test_two_lists_take_turns_by_tokens(self) -> None:
        harness = SchedulerHarness(n_slots=1, n_ctx=64)
        short = [harness.add(n_prompt=9, max_tokens=1, caller="short") for _ in range(8)]
        long = [harness.add(n_prompt=19, max_tokens=1, caller="long") for _ in range(4)]
        order = self.admitted(harness, 6)
        assert (
            sum(request in short for request in order) == 4 and sum(request in long for request in order) == 2
        )

    def test_a_share_with_many_callers_delays_another_by_one_request(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        many = [harness.add(max_tokens=1, share="many") for _ in range(20)]
        assert self.admitted(harness, 3) == many[:3]
        few = [harness.add(max_tokens=1, share="few") for _ in range(3)]
        order = self.admitted(harness, 6)
        assert set(order) == {*few, *many[3:6]} and few[0] in order[:2]
        late = harness.add(max_tokens=1, share="late")
        assert late in self.admitted(harness, 2)

    def test_within_a_share_callers_take_turns(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        caller = object()
        listed = [harness.add(max_tokens=1, share="one", caller=caller) for _ in range(20)]
        assert self.admitted(harness, 2) == listed[:2]
        single = harness.add(max_tokens=1, share="one")
        assert self.admitted(harness, 1) == [single]

    def test_a_priority_counts_more_than_a_share(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        many = [harness.add(max_tokens=1, share="many", priority=1) for _ in range(3)]
        other = harness.add(max_tokens=1, share="other")
        assert self.admitted(harness, 4) == [*many, other]

    def test_single_requests_keep_their_order(self) -> None:
        harness = SchedulerHarness(n_slots=2)
        requests = [harness.add(n_prompt=3 + i % 5, max_tokens=1 + i % 3) for i in range(12)]
        assert self.admitted(harness, 12) == requests

    def test_a_higher_priority_comes_first(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        harness.add(max_tokens=1)
        harness.step()
        low, high, highest = (harness.add(max_tokens=1, priority=p) for p in (0, 1, 2))
        assert self.admitted(harness, 3) == [highest, high, low]

    def test_a_higher_priority_takes_a_slot(self) -> None:
        """From the newest request of the lowest priority, whose text stays as it was."""
        harness = SchedulerHarness(n_slots=2)
        a, b = (harness.add(max_tokens=20) for _ in range(2))
        for _ in range(4):
            harness.step()
        urgent = harness.add(max_tokens=3, priority=1)
        harness.step()
        assert (a.slot >= 0, b.slot, urgent.slot >= 0) == (True, -1, True)
        equal = harness.add(max_tokens=3)
        harness.run()
        assert harness.scheduler.n_preempted == 1
        for request in (a, b, urgent, equal):
            prompt = request.tokens[: request.n_prompt]
            assert request.tokens[request.n_prompt :] == continuation(prompt, request.max_tokens)[0]

    def test_the_queue_forgets_callers(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        caller = object()
        requests = [harness.add(max_tokens=1, caller=caller) for _ in range(3)]
        harness.scheduler.cancel(requests[1])
        harness.run()
        assert [request.caller for request in requests] == [None] * 3
        assert not harness.scheduler._waiting._ends


class TestSteps:
    def test_the_first_token_comes_from_the_prompts_own_last_row(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(n_prompt=6, max_tokens=4)
        plan = harness.step()
        assert plan is not None
        assert (plan.tokens, plan.positions, plan.seq_ids) == (prompt_of(6), [0, 1, 2, 3, 4, 5], [0] * 6)
        assert (plan.outputs, plan.rows, plan.requests) == ([0, 0, 0, 0, 0, 1], [5], [a])
        assert len(generated(a)) == 1
        assert harness.run() == 3  # as many steps as tokens
        assert_done(a)

    def test_decoding_requests_come_first_by_slot(self) -> None:
        harness = SchedulerHarness()
        a, b = harness.add(), harness.add()
        harness.step()
        c = harness.add(n_prompt=3)
        plan = harness.step()
        assert plan is not None
        assert plan.scheduled == [(a, 1), (b, 1), (c, 3)]
        assert (plan.n_decode, plan.seq_ids, plan.rows) == (2, [0, 1, 2, 2, 2], [0, 1, 4])
        assert plan.requests == [a, b, c]

    def test_a_slot_taken_late_is_decoded_in_its_place(self) -> None:
        harness = SchedulerHarness(n_slots=3)
        a, b, c = harness.add(max_tokens=2), harness.add(max_tokens=9), harness.add(max_tokens=9)
        harness.steps(2)
        d = harness.add(max_tokens=9)
        harness.step()
        assert (a.state, d.slot) == (State.FINISHED, 0)
        assert scheduled(harness.step()) == [(d, 1), (b, 1), (c, 1)]

    def test_a_long_prompt_is_cut_to_the_batch(self) -> None:
        harness = SchedulerHarness(n_batch=20, n_ubatch=8)
        a = harness.add(n_prompt=50, max_tokens=3)
        plans = harness.steps(3)
        assert [p.scheduled for p in plans] == [[(a, 20)], [(a, 20)], [(a, 10)]]
        assert [p.rows for p in plans] == [[], [], [9]]
        assert [sum(p.outputs) for p in plans] == [0, 0, 1]
        harness.run()
        assert_done(a)

    def test_prompts_share_a_step_in_order_of_arrival(self) -> None:
        harness = SchedulerHarness(n_batch=32, n_ubatch=16)
        a, b, c = (harness.add(n_prompt=n) for n in (6, 6, 6))
        assert scheduled(harness.step()) == [
            (a, 6),
            (b, 6),
        ]  # not the first four of c: in parts it would take two passes
        assert scheduled(harness.step()) == [(a, 1), (b, 1), (c, 6)]
        harness.run()
        assert_done(a, b, c)

    def test_a_prompt_longer_than_a_ubatch_fills_what_others_leave(self) -> None:
        harness = SchedulerHarness(n_batch=32, n_ubatch=8)
        a, b, c = (harness.add(n_prompt=n) for n in (4, 12, 12))
        assert scheduled(harness.step()) == [(a, 4), (b, 4)]
        assert scheduled(harness.step()) == [(a, 1), (b, 7)]
        # While two decode, a step takes n_ubatch tokens: theirs, b's last one, and what there is room for of c.
        assert scheduled(harness.step()) == [(a, 1), (b, 1), (c, 6)]
        harness.run()
        assert_done(a, b, c)

    def test_one_prompt_alone_takes_whole_batches(self) -> None:
        harness = SchedulerHarness(n_batch=20, n_ubatch=8)
        a = harness.add(n_prompt=30)
        assert [p.scheduled for p in harness.steps(2)] == [[(a, 20)], [(a, 10)]]
        harness.run()
        assert_done(a)

    def test_a_long_prompt_does_not_hold_up_streams(self) -> None:
        harness = SchedulerHarness(n_batch=32, n_ubatch=8)
        a = harness.add(max_tokens=12)
        harness.step()
        b = harness.add(n_prompt=50, max_tokens=2)
        plans = harness.steps(8)
        assert [p.scheduled for p in plans] == [*([[(a, 1), (b, 7)]] * 7), [(a, 1), (b, 1)]]
        harness.run()
        assert_done(a, b)

    def test_a_step_with_enough_ends_so_that_a_first_token_need_not_wait(self) -> None:
        harness = SchedulerHarness(n_slots=6, n_batch=32, n_ubatch=32, prefill_cutoff=8)
        a, b, c, d, e = (harness.add(n_prompt=n, token_budget=99) for n in (4, 4, 6, 20, 4))
        assert [p.scheduled for p in harness.steps(3)] == [
            [(a, 4), (b, 4)],
            [(a, 1), (b, 1), (c, 6), (d, 20)],
            [(a, 1), (b, 1), (c, 1), (d, 1), (e, 4)],
        ]
        harness.run()
        assert_done(a, b, c, d, e)

    @pytest.mark.parametrize(
        ("n_prompt", "n_prompts", "n_decode"),
        [
            # Every 16 tokens, then 15, then 14. Behind the last prompt nothing has to fit.
            (4, [1] * 12, [0, 0, 0, 0, 4, 0, 0, 0, 8, 0, 0, 0]),
            (3, [2, 2, 2, 1, 2, 2, 1], [0, 0, 0, 6, 0, 0, 0]),
            (7, [1] * 8, [0, 0, 2, 0, 4, 0, 6, 0]),
            (9, [1] * 8, [*range(7), 0]),
            (4, [1] * 10, [0, 0, 0, 0, 4, 0, 0, 0, 8, 0]),
            (4, [1] * 9, [0, 0, 0, 0, 4, 0, 0, 0, 0]),
        ],
    )
    def test_decoding_waits_for_short_steps_until_they_make_a_ubatch(
        self, n_prompt: int, n_prompts: list[int], n_decode: list[int]
    ) -> None:
        harness = SchedulerHarness(
            n_slots=12, n_batch=32, n_ubatch=16, prefill_cutoff=4, padding_token=PADDING
        )
        requests = [
            harness.add(n_prompt=n_prompt, max_tokens=20, token_budget=99) for _ in range(sum(n_prompts))
        ]
        plans = harness.steps(len(n_prompts))
        assert [p.n_decode for p in plans] == n_decode
        assert [[n for _, n in p.scheduled[p.n_decode :]] for p in plans] == [
            [n_prompt] * n for n in n_prompts
        ]
        harness.run()
        assert_done(*requests)

    def test_decoding_does_not_wait_where_it_shares_the_prompts_pass(self) -> None:
        harness = SchedulerHarness(n_slots=4, n_batch=32, n_ubatch=16, prefill_cutoff=4)
        requests = [harness.add(n_prompt=4, max_tokens=9, token_budget=99) for _ in range(4)]
        assert [p.n_decode for p in harness.steps(4)] == [0, 1, 2, 3]
        harness.run()
        assert_done(*requests)

    def test_decoding_waits_for_one_prompt_but_not_for_one_after_another(self) -> None:
        harness = SchedulerHarness(
            n_slots=5, n_batch=32, n_ubatch=16, prefill_cutoff=8, padding_token=PADDING
        )
        a = harness.add(max_tokens=20)
        harness.step()
        b = harness.add(n_prompt=7, token_budget=99)
        assert scheduled(harness.step()) == [(b, 7)]
        c = harness.add(n_prompt=7, token_budget=99)
        assert scheduled(harness.step()) == [(a, 1), (b, 1), (c, 7)]
        d = harness.add(n_prompt=7, token_budget=99)
        assert scheduled(harness.step()) == [(d, 7)]
        e = harness.add(n_prompt=8, token_budget=99)
        assert scheduled(harness.step()) == [(e, 8)]  # enough
        harness.run()
        assert_done(a, b, c, d, e)

    @pytest.mark.parametrize(("n_prompt", "n_fed"), [(16, [16]), (17, [15, 2]), (32, [15, 15, 2])])
    def test_decoding_does_not_wait_for_a_prompt_of_more_than_a_ubatch(
        self, n_prompt: int, n_fed: list[int]
    ) -> None:
        harness = SchedulerHarness(n_batch=32, n_ubatch=16, prefill_cutoff=8, padding_token=PADDING)
        a = harness.add(max_tokens=20)
        harness.step()
        b = harness.add(n_prompt=n_prompt, token_budget=99)
        plans = harness.steps(len(n_fed))
        assert [n for p in plans for r, n in p.scheduled if r is b] == n_fed
        assert [p.n_decode for p in plans] == [1] * (len(n_fed) - 1) + [0]
        harness.run()
        assert_done(a, b)

    def test_decoding_waits_for_few_passes_however_short_the_prompts_are(self) -> None:
        harness = SchedulerHarness(
            n_slots=12, n_batch=32, n_ubatch=16, prefill_cutoff=4, padding_token=PADDING
        )
        a = harness.add(max_tokens=40)
        harness.step()
        n_decode = []
        for n_prompt in (6, *[2] * 9):  # one comes with each step
            harness.add(n_prompt=n_prompt, max_tokens=20, token_budget=99)
            plan = harness.step()
            assert plan is not None
            n_decode.append(plan.n_decode)
        assert n_decode == [0, 0, 3, 0, 5, 0, 7, 0, 9, 0]
        harness.run()
        assert_done(a)

    def test_a_prompt_that_comes_while_decoding_has_waited_is_not_cut(self) -> None:
        harness = SchedulerHarness(n_batch=32, n_ubatch=16, prefill_cutoff=4, padding_token=PADDING)
        a = harness.add(max_tokens=20)
        harness.step()
        b = harness.add(n_prompt=9, token_budget=99)
        assert scheduled(harness.step()) == [(b, 9)]
        c = harness.add(n_prompt=9, token_budget=99)
        assert [scheduled(plan) for plan in harness.steps(2)] == [[(a, 1), (b, 1)], [(c, 9)]]
        harness.run()
        assert_done(a, b, c)

    def test_decoding_waits_for_nobody_where_steps_do_not_end_early(self) -> None:
        harness = SchedulerHarness(n_batch=32, n_ubatch=16, padding_token=PADDING)
        a = harness.add(max_tokens=20)
        harness.step()
        b = harness.add(n_prompt=7, token_budget=99)
        assert scheduled(harness.step()) == [(a, 1), (b, 7)]
        harness.run()
        assert_done(a, b)

    def test_nobody_waits_for_the_first_token_of_a_whole_completion(self) -> None:
        harness = SchedulerHarness(
            n_slots=6, n_batch=32, n_ubatch=16, prefill_cutoff=4, padding_token=PADDING
        )
        whole = [harness.add(n_prompt=4) for _ in range(3)]
        stream, behind = harness.add(n_prompt=4, token_budget=99), harness.add(n_prompt=4)
        assert scheduled(harness.step()) == [*((r, 4) for r in whole), (stream, 4)]
        late = harness.add(n_prompt=4, token_budget=99)
        assert scheduled(harness.step()) == [*((r, 1) for r in (*whole, stream)), (behind, 4), (late, 4)]
        harness.run()
        assert_done(*whole, stream, behind, late)

    def test_a_prompt_behind_short_steps_is_cut_only_if_it_would_be_anyway(self) -> None:
        for n_prompt, expected in ((40, [0, 2, 2]), (12, [0, 0]), (13, [1, 0])):
            harness = SchedulerHarness(
                n_slots=4, n_batch=32, n_ubatch=16, prefill_cutoff=4, padding_token=PADDING
            )
            a = harness.add(max_tokens=20)
            harness.step()
            b, c = harness.add(n_prompt=4, token_budget=99), harness.add(n_prompt=n_prompt, token_budget=99)
            plans = harness.steps(len(expected))
            assert [p.n_decode for p in plans] == expected
            assert [n for p in plans for r, n in p.scheduled if r is c and n > 1] == (
                [12, 14] if n_prompt == 40 else [n_prompt]
            )
            harness.run()
            assert_done(a, b, c)

    def test_with_cohorts_each_is_fed_beside_the_prompts(self) -> None:
        harness = SchedulerHarness(
            n_slots=12, n_batch=32, n_ubatch=16, prefill_cutoff=4, padding_token=PADDING
        )
        decoding = [harness.add(max_tokens=50) for _ in range(4)]
        harness.steps(2)
        scheduler = harness.scheduler
        scheduler.split_decoding(2)
        prompts = [harness.add(n_prompt=4, token_budget=99) for _ in range(8)]
        before = [r.n_total for r in decoding]
        in_flight = [scheduler.plan(), scheduler.plan()]
        for _ in range(6):
            plan = in_flight.pop(0)
            assert plan is not None and plan.n_decode >= 2
            scheduler.commit(plan, [7] * len(plan.requests))
            in_flight.append(scheduler.plan())
        assert [r.n_total - n for r, n in zip(decoding, before, strict=True)] == [3] * 4
        assert prompts[0].n_total > 0

    def test_prompts_go_on_even_when_decoding_fills_the_ubatch(self) -> None:
        harness = SchedulerHarness(n_slots=4, n_batch=4, n_ubatch=3)
        streams = [harness.add(n_prompt=1, max_tokens=20) for _ in range(3)]
        harness.step()
        late = harness.add(n_prompt=4, max_tokens=1)
        assert scheduled(harness.step()) == [*((s, 1) for s in streams), (late, 1)]
        harness.run()
        assert_done(*streams, late)

    def test_a_prompt_of_which_one_token_is_left_counts_as_decoding(self) -> None:
        harness = SchedulerHarness(n_batch=4, n_ubatch=4)
        a = harness.add(n_prompt=5, max_tokens=2)
        assert scheduled(harness.step()) == [(a, 4)]
        plan = harness.step()
        assert plan is not None
        assert (plan.scheduled, plan.n_decode, plan.rows) == ([(a, 1)], 1, [0])
        harness.run()
        assert_done(a)

    def test_an_older_request_with_new_tokens_goes_before_newer_prompts(self) -> None:
        harness = SchedulerHarness(n_batch=16)
        a = harness.add(max_tokens=1, resumable=True)
        harness.step()
        b = harness.add(n_prompt=40)
        harness.step()
        harness.scheduler.append(a, [3] * 10)
        harness.allow(a)
        assert scheduled(harness.step()) == [(a, 11), (b, 5)]

    def test_nothing_to_do_is_no_step(self) -> None:
        harness = SchedulerHarness()
        assert harness.step() is None
        a = harness.add(token_budget=0)
        assert harness.step() is None
        assert harness.scheduler.live() == [a]


class TestAgain:
    """Where nobody comes or goes, the same plan is given again."""

    def test_from_the_second_decoding_step_on(self) -> None:
        harness = SchedulerHarness()
        a, b = harness.add(max_tokens=6), harness.add(max_tokens=6)
        assert [harness.steps(1)[0].repeats for _ in range(6)] == [False, False, True, True, True, True]
        assert_done(a, b)

    def test_not_with_a_prompt_beside(self) -> None:
        harness = SchedulerHarness(n_ubatch=4)
        a = harness.add(max_tokens=20)
        harness.steps(3)
        b = harness.add(n_prompt=9)
        again = []
        while b.n_generated < 3:
            again.append(harness.steps(1)[0].repeats)
        assert again == [False, False, False, False, True]
        harness.run()
        assert_done(a, b)

    @pytest.mark.parametrize("event", ["an end", "a cancel", "a pause", "a new one"])
    def test_a_plan_is_not_repeated_after_a_change(self, event: str) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=20)
        b = harness.add(
            max_tokens=3 if event == "an end" else 20, token_budget=3 if event == "a pause" else UNLIMITED
        )
        assert [harness.steps(1)[0].repeats for _ in range(3)] == [False, False, True]
        if event == "a cancel":
            harness.scheduler.cancel(b)
        if event == "a new one":
            harness.add(n_prompt=1)
        assert not harness.steps(1)[0].repeats
        assert harness.steps(1)[0].repeats
        harness.allow(b, 99)
        harness.run()
        assert_done(a)

    def test_not_of_half_of_them_after_two_micro_batches_became_one(self) -> None:
        """The second half's step returns when there is one micro-batch again: it must not leave out the first half."""
        harness = SchedulerHarness()
        requests = [harness.add(max_tokens=12) for _ in range(4)]
        harness.steps(2)
        scheduler = harness.scheduler
        scheduler.split_decoding(2)
        first, second = scheduler.plan(), scheduler.plan()
        assert first is not None and second is not None
        scheduler.commit(first, [7] * len(first.requests))
        scheduler.split_decoding(1)
        scheduler.commit(second, [7] * len(second.requests))
        plan = scheduler.plan()
        assert plan is not None and set(plan.requests) == set(requests)

    def test_not_after_a_step_that_found_no_cells(self) -> None:
        """Even if only a paused request had to give way."""
        harness = SchedulerHarness()
        a, paused = harness.add(max_tokens=20), harness.add(token_budget=2)
        harness.steps(5)
        plan = harness.scheduler.plan()
        assert plan is not None and plan.repeats
        assert harness.scheduler.free_cells_after(plan) and paused.slot < 0
        assert not harness.steps(1)[0].repeats
        harness.run()
        assert_done(a)


class TestEnd:
    @pytest.mark.parametrize("max_tokens", [1, 2, 7])
    def test_max_tokens_ends_a_request(self, max_tokens: int) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=max_tokens)
        assert harness.run() == max_tokens
        assert (len(generated(a)), a.finish_reason) == (max_tokens, "length")
        assert_done(a)

    @pytest.mark.parametrize("n_prompt", [1, 10, 15])
    def test_the_end_of_the_context(self, n_prompt: int) -> None:
        harness = SchedulerHarness(n_ctx=16)
        a = harness.add(n_prompt=n_prompt, max_tokens=None)
        harness.run()
        assert (len(a.tokens), a.finish_reason) == (16, "length")
        assert_done(a, n_ctx=16)

    def test_stop_tokens_end_it_and_are_not_part_of_it(self) -> None:
        harness = SchedulerHarness()
        whole, _ = continuation(prompt_of(4), 5)
        a = harness.add(stop_tokens=frozenset([whole[3], N_VOCAB + 5]))
        assert harness.run() == 4
        assert (generated(a), a.finish_reason) == (whole[:3], "stop")
        assert_done(a)

    def test_a_stop_token_at_once(self) -> None:
        harness = SchedulerHarness()
        whole, _ = continuation(prompt_of(4), 1)
        a = harness.add(stop_tokens=frozenset(whole))
        harness.run()
        assert (generated(a), a.finish_reason, a.slot) == ([], "stop", -1)

    def test_a_row_without_a_finite_logit_fails_its_own_request(self) -> None:
        harness = SchedulerHarness()
        a, b = harness.add(), harness.add()
        harness.context.broken = [generated_next(a)]
        harness.run()
        assert isinstance(a.error, DecodeError)
        assert (a.state, a.finish_reason, len(generated(a))) == (State.FINISHED, "cancelled", 1)
        assert_done(b)

    def test_a_finished_request_stays_as_it_is(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=1)
        harness.run()
        harness.scheduler.cancel(a)
        harness.scheduler.fail(a, DecodeError("late"))
        harness.scheduler.resume(a)
        assert (a.finish_reason, a.error) == ("length", None)

    def test_states_change_only_as_allowed(self) -> None:
        request = Request([1])
        with pytest.raises(AssertionError, match="cannot become paused"):
            request.move(State.PAUSED)
        request.move(State.FINISHED)
        with pytest.raises(AssertionError, match="cannot become running"):
            request.move(State.RUNNING)


def generated_next(request: Request) -> int:
    """The first token a request is going to generate."""
    return continuation(request.tokens, 1)[0][0]


class TestCancel:
    def cancelled(self, harness: SchedulerHarness, request: Request, other: Request) -> None:
        """`request` is cancelled; it is out at once, its cells are free, and `other` goes on as if alone."""
        harness.scheduler.cancel(request)
        assert (request.state, request.finish_reason) == (State.FINISHED, "cancelled")
        assert (request.slot, request.error) == (-1, None)
        assert request not in harness.scheduler.live()
        harness.scheduler.check_integrity()
        harness.run()
        assert_done(other)
        assert harness.context.n_used == 0

    def test_in_the_queue(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        other, request = harness.add(), harness.add()
        harness.step()
        self.cancelled(harness, request, other)

    def test_before_anything_happened(self) -> None:
        harness = SchedulerHarness()
        request, other = harness.add(), harness.add()
        self.cancelled(harness, request, other)

    def test_in_its_prompt(self) -> None:
        harness = SchedulerHarness(n_batch=8)
        other, request = harness.add(), harness.add(n_prompt=30)
        harness.step()
        assert 0 < request.n_past < 30
        self.cancelled(harness, request, other)

    def test_while_it_decodes(self) -> None:
        harness = SchedulerHarness()
        request, other = harness.add(), harness.add()
        harness.steps(2)
        self.cancelled(harness, request, other)

    def test_a_paused_request_is_cancelled(self) -> None:
        harness = SchedulerHarness()
        request, other = harness.add(token_budget=2), harness.add()
        harness.steps(3)
        assert request.state is State.PAUSED
        self.cancelled(harness, request, other)

    def test_preempted_and_parked(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        request, other = harness.add(token_budget=2), harness.add()
        harness.steps(3)
        assert (request.state, other.state) == (State.WAITING, State.RUNNING)
        self.cancelled(harness, request, other)

    def test_preempted_and_ready(self) -> None:
        harness = SchedulerHarness()
        other, request = harness.add(), harness.add()
        harness.steps(2)
        harness.scheduler.preempt(request)
        assert harness.scheduler.n_queued == 1
        self.cancelled(harness, request, other)

    def test_before_its_first_leave(self) -> None:
        harness = SchedulerHarness()
        request, other = harness.add(token_budget=0, resumable=True), harness.add()
        self.cancelled(harness, request, other)


class TestPause:
    def test_a_request_pauses_at_its_limit_and_goes_on_where_it_was(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=6, token_budget=2)
        assert harness.run() == 2
        assert (a.state, a.slot, len(generated(a))) == (State.PAUSED, 0, 2)
        assert (harness.scheduler.n_active, harness.scheduler.all_ready) == (1, False)
        harness.scheduler.resume(a)  # without more leave, nothing happens
        assert harness.step() is None
        harness.allow(a, 3)
        assert harness.run() == 3
        harness.allow(a, 100)
        assert harness.run() == 1
        assert_done(a)

    def test_others_go_on_meanwhile(self) -> None:
        harness = SchedulerHarness()
        a, b = harness.add(token_budget=1), harness.add()
        harness.run()
        assert a.state is State.PAUSED
        assert_done(b)

    def test_without_leave_nothing_is_computed(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(token_budget=0)
        assert (harness.step(), a.state) == (None, State.WAITING)
        assert (len(harness.scheduler.live()), harness.scheduler.n_queued, harness.scheduler.all_ready) == (
            1,
            0,
            False,
        )
        harness.allow(a, 9)
        harness.run()
        assert_done(a)

    def test_the_end_comes_before_the_pause(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=2, token_budget=2)
        harness.run()
        assert_done(a)


class TestPreemption:
    def test_a_paused_request_gives_its_slot_to_one_that_waits(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        a, b = harness.add(token_budget=2), harness.add()
        harness.steps(2)
        assert a.state is State.PAUSED
        harness.step()
        assert (a.state, a.slot, a.n_past, b.slot) == (State.WAITING, -1, 0, 0)
        assert (harness.scheduler.n_preempted, harness.scheduler.n_queued) == (1, 0)
        harness.run()
        assert_done(b)
        assert len(generated(a)) == 2  # what it had generated is kept
        harness.allow(a, 9)
        harness.run()
        assert_done(a)

    def test_the_one_paused_longest_goes_first(self) -> None:
        harness = SchedulerHarness(n_slots=2)
        a, b = harness.add(token_budget=2), harness.add(token_budget=1)
        harness.run()
        c = harness.add()
        harness.step()
        assert (b.state, a.state, c.slot) == (State.WAITING, State.PAUSED, 1)

    def test_nobody_waits_for_slots_that_running_requests_have(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        a, b = harness.add(), harness.add()
        harness.steps(3)
        assert (a.slot, b.slot, harness.scheduler.n_preempted) == (0, -1, 0)

    def test_a_slot_is_lent_only_to_those_who_could_use_it(self) -> None:
        scheduler = Scheduler(cache_of(3, enabled=True), 512, 3 * 512, 8, 8, None)
        prompt = prompt_of(300)
        late, leader, follower, other, last = (
            Request(tokens, RequestSpec(5)) for tokens in ([1, 2], prompt, [*prompt, 1], [3, 4], [5, 6])
        )
        scheduler.add(late)
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [NoToken.LATER])
        scheduler.add(leader)
        scheduler.add(follower)
        scheduler.plan()
        assert follower.leader is leader
        assert len(scheduler.cache.free) == 1
        scheduler.add(other)  # for which that slot is free
        assert not scheduler.lend(late, 1)
        scheduler.add(last)
        assert scheduler.lend(late, 1)
        assert late.slot == -1

    def test_late_requests_leave_half_of_the_slots_to_others_of_their_share(self) -> None:
        """Those that never lent their slots come first there, however many are late; late ones keep the other half."""
        scheduler = Scheduler(cache_of(4), 64, 4 * 64, 8, 8, None)
        late = [Request([1, 2], RequestSpec(50)) for _ in range(8)]

        def step() -> int:
            """Tokens of late requests come later, and their slots are lent. How many of the slots those had."""
            plan = scheduler.plan()
            n_held = sum(request.slot >= 0 for request in late)
            if plan is not None:
                scheduler.commit(plan, [NoToken.LATER if r in late else 7 for r in plan.requests])
            for request in late:
                if request.is_drawing and scheduler.n_queued:
                    scheduler.lend(request, 1)
            scheduler.check_integrity()
            return n_held

        def draw() -> None:
            for request in late:
                if request.is_drawing:
                    scheduler.accept_drawn(request, 7)

        for request in late:
            scheduler.add(request)
        while not all(request.n_lent for request in late):
            step()
            draw()
        assert step() == 4
        draw()
        quick = [Request([3, 4], RequestSpec(5)) for _ in range(4)]
        for request in quick:
            scheduler.add(request)
        step()
        assert [step() for _ in range(4)] == [2] * 4
        for _ in range(20):
            step()
            draw()
        assert [request.finish_reason for request in quick] == ["length"] * 4

    def test_a_follower_of_a_preempted_request_keeps_its_turn(self) -> None:
        scheduler = Scheduler(cache_of(2, enabled=True), 512, 2 * 512, 8, 8, None)
        prompt = prompt_of(300)
        leader, follower, other, last = (
            Request(tokens, RequestSpec(5, priority=priority))
            for tokens, priority in ((prompt, 0), ([*prompt, 1], 1), ([1, 2], 1), ([3, 4], 1))
        )
        for arriving in ((leader,), (follower, other)):
            for request in arriving:
                scheduler.add(request)
            plan = scheduler.plan()
            assert plan is not None
            scheduler.commit(plan, [7] * len(plan.rows))
        assert (follower.leader, leader.slot >= 0, other.slot >= 0) == (leader, True, True)
        scheduler.add(last)
        scheduler.plan()
        assert (leader.slot, follower.slot >= 0, last.slot) == (-1, True, -1)

    def test_a_preempted_request_comes_before_new_ones(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        a, b = harness.add(token_budget=1), harness.add(max_tokens=2)
        harness.steps(2)
        c = harness.add()
        harness.allow(a, 9)
        assert harness.scheduler.n_queued == 2
        harness.steps(2)
        assert (b.state, a.slot, c.slot) == (State.FINISHED, 0, -1)
        harness.run()
        assert_done(a, b, c)

    def test_preempted_requests_go_on_in_order_of_arrival(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        a, b, c = (harness.add(token_budget=1) for _ in range(3))
        harness.run()
        harness.add(max_tokens=1)  # takes the slot that c pauses in
        harness.run()
        for request in (c, b, a):
            harness.allow(request, 9)
        finished = []
        while harness.step() is not None:
            finished += [r for r in (a, b, c) if r.state is State.FINISHED and r not in finished]
        assert finished == [a, b, c]
        assert_done(a, b, c)

    def test_a_slow_reader_does_not_keep_others_waiting(self) -> None:
        """Its reader takes a token now and then, never enough to be worth going on for."""
        harness = SchedulerHarness(n_slots=1)
        a = harness.add(n_prompt=20, max_tokens=30, token_budget=4)
        harness.run()
        a.token_budget += 1
        b = harness.add(max_tokens=3)
        harness.step()
        assert (a.state, b.slot) == (State.WAITING, 0)
        harness.run()
        assert_done(b)
        assert len(generated(a)) == 4

    def test_when_cells_run_out_the_newest_gives_way(self) -> None:
        harness = SchedulerHarness(n_slots=3, n_ctx=32, n_cells=40, n_ubatch=32)
        a, b, c = (harness.add(n_prompt=8, max_tokens=20) for _ in range(3))
        harness.steps(6)
        assert [r.state for r in (a, b, c)] == [State.RUNNING] * 3
        assert sum(len(r.tokens) for r in (a, b, c)) == 42  # all but three in cells, 39 of them
        harness.step()
        assert [r.state for r in (a, b, c)] == [State.RUNNING, State.RUNNING, State.WAITING]
        harness.run()
        assert harness.scheduler.n_preempted >= 2
        assert harness.n_full == 0  # it is known before it happens
        assert_done(a, b, c, n_ctx=32)

    def test_paused_requests_give_their_cells_up_before_running_ones(self) -> None:
        harness = SchedulerHarness(n_slots=3, n_ctx=32, n_cells=40, n_ubatch=32)
        a = harness.add(n_prompt=12, token_budget=1)
        b, c = (harness.add(n_prompt=10, max_tokens=12) for _ in range(2))
        harness.steps(6)
        assert [r.state for r in (a, b, c)] == [State.WAITING, State.RUNNING, State.RUNNING]
        harness.run()
        assert_done(b, c, n_ctx=32)

    def test_a_prompt_waits_until_its_cells_are_free(self) -> None:
        harness = SchedulerHarness(n_slots=3, n_ctx=32, n_cells=40)
        a = harness.add(n_prompt=20, max_tokens=5)
        b = harness.add(n_prompt=25, max_tokens=5)
        harness.steps(5)
        assert (a.state, b.slot) == (State.FINISHED, -1)
        harness.run()
        assert_done(a, b, n_ctx=32)
        assert harness.scheduler.n_preempted == 0

    def test_a_prompt_takes_the_cells_of_paused_requests(self) -> None:
        harness = SchedulerHarness(n_slots=3, n_ctx=32, n_cells=40)
        a = harness.add(n_prompt=20, token_budget=1)
        harness.run()
        b = harness.add(n_prompt=25)
        harness.step()
        assert (a.state, b.slot) == (State.WAITING, 0)
        harness.run()
        assert_done(b, n_ctx=32)

    def test_one_alone_always_has_enough(self) -> None:
        harness = SchedulerHarness(n_slots=3, n_ctx=32, n_cells=32)
        requests = [harness.add(n_prompt=n, max_tokens=None) for n in (31, 1, 16)]
        harness.run()
        assert_done(*requests, n_ctx=32)

    def test_relief_takes_the_newest_and_leaves_the_last(self) -> None:
        harness = SchedulerHarness()
        a, b = harness.add(), harness.add()
        plan = harness.step()
        assert plan is not None
        assert harness.scheduler.free_cells_after(plan) and b.slot < 0
        assert not harness.scheduler.free_cells_after(plan)
        harness.run()
        assert_done(a, b)

    def test_a_prompt_may_take_the_last_cell(self) -> None:
        harness = SchedulerHarness(n_slots=2, n_ctx=32, n_cells=40, n_batch=64, n_ubatch=64)
        a, b = harness.add(n_prompt=20), harness.add(n_prompt=20)
        assert scheduled(harness.step()) == [(a, 20), (b, 20)]
        assert scheduled(harness.step()) == [(a, 1)]  # there is none left for the newer one
        harness.run()
        assert_done(a, b, n_ctx=32)

    def test_after_relief_by_a_paused_one_others_may_come(self) -> None:
        harness = SchedulerHarness(n_slots=3)
        a, b = harness.add(token_budget=1), harness.add(max_tokens=20)
        harness.step()
        harness.context.failures[harness.context.n_launches] = ContextFullError("injected")
        harness.step()
        assert (a.state, b.state) == (State.WAITING, State.RUNNING)
        c = harness.add()
        assert scheduled(harness.step()) == [(b, 1), (c, 4)]
        harness.run()
        assert_done(b, c)

    def test_after_relief_by_a_running_one_somebody_must_leave_first(self) -> None:
        harness = SchedulerHarness(n_slots=3)
        a, b = harness.add(), harness.add()
        harness.context.failures[1] = ContextFullError("injected")
        harness.steps(2)
        c = harness.add()
        for _ in range(4):
            assert scheduled(harness.step()) == [(a, 1)]
        assert scheduled(harness.step()) == [(b, 5), (c, 4)]
        harness.run()
        assert_done(a, b, c)

    def test_fewer_cells_than_promised_still_serve_everyone(self) -> None:
        """Some memories (sliding windows) run out earlier than their size says; nothing may turn in circles then."""
        harness = SchedulerHarness(n_slots=4, n_ctx=32)
        harness.context.n_cells = 40
        requests = [harness.add(n_prompt=12, max_tokens=10) for _ in range(6)]
        n_steps = harness.run()
        assert_done(*requests, n_ctx=32)
        assert n_steps < 120

    def test_one_request_that_finds_no_cells_fails(self) -> None:
        harness = SchedulerHarness(n_slots=2, n_ctx=32)
        harness.context.n_cells = 10
        a, b = harness.add(n_prompt=12), harness.add(n_prompt=4)
        harness.run()
        assert isinstance(a.error, ContextFullError)
        assert_done(b, n_ctx=32)


class TestKept:
    def test_it_keeps_its_slot_at_the_end_and_goes_on_after_more_tokens(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=2, resumable=True)
        harness.run()
        assert (a.state, a.finish_reason, a.slot) == (State.PAUSED, "length", 0)
        first = list(a.tokens)
        assert first == prompt_of(4) + continuation(prompt_of(4), 2)[0]
        harness.scheduler.append(a, [7, 8, 9])
        assert (a.finish_reason, a.n_generated) == (None, 0)
        harness.allow(a, 9)
        plan = harness.step()
        assert plan is not None
        assert (plan.tokens, plan.positions) == ([first[-1], 7, 8, 9], [5, 6, 7, 8])  # nothing twice
        harness.run()
        assert a.tokens == [*first, 7, 8, 9, *continuation([*first, 7, 8, 9], 2)[0]]
        assert a.finish_reason == "length"

    def test_trim_continues_from_the_last_kept_token(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(n_prompt=6, max_tokens=3, resumable=True)
        harness.run()
        harness.scheduler.trim(a, 4)
        assert harness.step() is None  # not before it is allowed to
        harness.allow(a, 9)
        plan = harness.step()
        assert plan is not None
        assert (plan.tokens, plan.positions) == (prompt_of(6)[3:4], [3])
        harness.run()
        assert a.tokens == prompt_of(6)[:4] + continuation(prompt_of(6)[:4], 3)[0]

    def test_trim_after_a_stop_token(self) -> None:
        harness = SchedulerHarness()
        whole, _ = continuation(prompt_of(4), 5)
        a = harness.add(resumable=True, stop_tokens=frozenset([whole[2]]))
        harness.run()
        assert (a.finish_reason, a.n_past, len(a.tokens)) == ("stop", 6, 6)
        harness.scheduler.trim(a, 6)  # nothing less: the last token is computed again
        a.stop_tokens = frozenset()
        harness.allow(a, 1)
        assert harness.run() == 1
        assert a.tokens == prompt_of(4) + whole[:3]

    def test_a_stopped_one_does_not_go_on_unchanged(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=1, resumable=True)
        harness.run()
        harness.allow(a, 5)
        assert harness.step() is None

    @pytest.mark.parametrize("recurrent", [False, True])
    def test_trim_then_append(self, recurrent: bool) -> None:
        harness = SchedulerHarness(recurrent=recurrent)
        a = harness.add(n_prompt=6, max_tokens=3, resumable=True)
        harness.run()
        harness.scheduler.trim(a, 3)
        harness.scheduler.append(a, [50, 51])
        harness.allow(a, 9)
        harness.run()
        base = [*prompt_of(6)[:3], 50, 51]
        assert a.tokens == base + continuation(base, 3)[0]

    def test_changes_while_it_has_no_slot(self) -> None:
        harness = SchedulerHarness(n_slots=1)
        a, b = harness.add(n_prompt=6, max_tokens=3, resumable=True), harness.add()
        harness.run()
        assert_done(b)
        assert (a.state, a.finish_reason) == (State.WAITING, "length")
        harness.scheduler.trim(a, 5)
        harness.scheduler.append(a, [50])
        harness.allow(a, 9)
        harness.run()
        base = [*prompt_of(6)[:5], 50]
        assert a.tokens == base + continuation(base, 3)[0]

    def test_changes_before_the_first_step(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(n_prompt=6, max_tokens=3, resumable=True, token_budget=0)
        harness.scheduler.append(a, [50])
        harness.scheduler.trim(a, 2)
        harness.allow(a, 9)
        harness.run()
        assert a.tokens == prompt_of(6)[:2] + continuation(prompt_of(6)[:2], 3)[0]

    def test_losing_its_slot_after_a_change_computes_nothing_ahead(self) -> None:
        """It had leave for a token when it stopped; that leave is gone with its end."""
        harness = SchedulerHarness(n_slots=1)
        whole, _ = continuation(prompt_of(4), 5)
        a = harness.add(resumable=True, stop_tokens=frozenset([whole[1]]), token_budget=0)
        for _ in range(2):
            harness.allow(a)
            harness.run()
        assert a.finish_reason == "stop"
        harness.scheduler.trim(a, 3)
        b = harness.add()
        harness.run()
        assert_done(b)
        assert (len(a.tokens), a.state) == (3, State.WAITING)

    def test_cancelled_it_gives_everything_up(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(max_tokens=1, resumable=True)
        harness.run()
        harness.scheduler.cancel(a)
        assert (a.state, a.finish_reason, len(harness.scheduler.live())) == (State.FINISHED, "cancelled", 0)
        harness.step()
        assert harness.context.n_used == 0


class TestFillers:
    def harness(self, n_slots: int = 4, **options: Any) -> SchedulerHarness:
        return SchedulerHarness(n_slots, padding_token=PADDING, **options)

    def test_a_gap_is_filled_and_the_filler_forgotten(self) -> None:
        harness = self.harness()
        a, b, c = harness.add(), harness.add(max_tokens=1), harness.add()
        harness.step()
        plan = harness.step()
        assert plan is not None
        assert b.state is State.FINISHED
        assert (plan.tokens[1], plan.seq_ids, plan.positions) == (PADDING, [0, 1, 2], [4, 0, 4])
        assert (plan.outputs, plan.rows, plan.requests) == ([1, 0, 1], [0, 2], [a, c])
        assert (plan.scheduled, plan.n_decode, plan.padding) == ([(a, 1), (c, 1)], 2, [Remove(1, 0)])
        harness.run()
        assert_done(a, c)

    def test_there_is_none_without_a_gap(self) -> None:
        harness = self.harness()
        requests = [harness.add(max_tokens=n) for n in (5, 5, 1)]
        plans = []
        while (plan := harness.step()) is not None:
            plans.append(plan)
        assert [p.padding for p in plans] == [[]] * 5
        assert_done(*requests)

    def test_a_paused_sequence_in_the_gap_gets_it_behind_its_own(self) -> None:
        harness = self.harness()
        a, b, c = harness.add(), harness.add(max_tokens=4, token_budget=2), harness.add()
        harness.steps(2)
        plan = harness.step()
        assert plan is not None
        assert b.state is State.PAUSED
        assert plan.padding == [Remove(1, b.n_past)] == [Remove(1, 5)]
        harness.allow(b, 9)
        harness.run()
        assert_done(a, b, c)

    def test_a_paused_sequence_at_the_end_of_its_context_still_has_a_cell_for_it(self) -> None:
        harness = self.harness(n_ctx=8)
        a = harness.add(n_prompt=2, max_tokens=6)
        b = harness.add(n_prompt=7, max_tokens=9, resumable=True)
        c = harness.add(n_prompt=2, max_tokens=6)
        harness.step()
        assert (b.finish_reason, len(b.tokens)) == ("length", 8)
        plan = harness.step()
        assert plan is not None
        assert plan.padding == [Remove(1, 7)]
        harness.run()
        assert_done(a, c, n_ctx=8)

    def test_a_prefilling_sequence_in_the_gap_has_tokens_of_its_own(self) -> None:
        harness = self.harness(n_slots=5, n_batch=16, n_ubatch=6)
        requests = [harness.add(n_prompt=1, max_tokens=n) for n in (9, 1, 1, 9)]
        harness.step()
        b = harness.add(n_prompt=20, max_tokens=2)
        plan = harness.step()
        assert plan is not None
        assert b.slot == 1
        assert plan.scheduled == [(requests[0], 1), (requests[3], 1), (b, 3)]
        assert (plan.seq_ids, plan.padding) == ([0, 2, 3, 1, 1, 1], [Remove(2, 0)])
        assert (plan.rows, plan.outputs) == ([0, 2], [1, 0, 1, 0, 0, 0])
        harness.run()
        assert_done(*requests, b)

    def test_the_row_of_a_finishing_prompt_follows_those_of_filled_decoding(self) -> None:
        harness = self.harness(n_batch=12, n_ubatch=8)
        a, b, c = harness.add(n_prompt=2), harness.add(n_prompt=2, max_tokens=2), harness.add(n_prompt=2)
        harness.step()
        d = harness.add(n_prompt=9)
        assert scheduled(harness.step()) == [(a, 1), (b, 1), (c, 1), (d, 5)]
        plan = harness.step()
        assert plan is not None
        assert plan.scheduled == [(a, 1), (c, 1), (d, 4)]
        assert (plan.padding, plan.rows, plan.requests) == ([Remove(1, 0)], [0, 2, 6], [a, c, d])
        harness.run()
        assert_done(a, b, c, d)

    def test_never_more_fillers_than_requests(self) -> None:
        harness = self.harness(n_slots=8, n_ubatch=32)
        keep = (0, 7)
        requests = [harness.add(max_tokens=9 if i in keep else 1) for i in range(8)]
        harness.step()
        plan = harness.step()
        assert plan is not None
        assert (plan.seq_ids, plan.padding) == ([0, 7], [])  # six gaps for two requests: not worth it
        harness.run()
        assert_done(*requests)

    def test_as_many_fillers_as_requests(self) -> None:
        harness = self.harness()
        a, _, _, d = (harness.add(max_tokens=n) for n in (5, 1, 1, 5))
        harness.step()
        plan = harness.step()
        assert plan is not None
        assert plan.seq_ids == [0, 1, 2, 3]
        assert plan.padding == [Remove(1, 0), Remove(2, 0)]
        harness.run()
        assert_done(a, d)

    def test_a_request_takes_over_a_filled_slot(self) -> None:
        harness = self.harness()
        a, b, c = harness.add(max_tokens=9), harness.add(max_tokens=1), harness.add(max_tokens=9)
        harness.steps(2)
        d = harness.add()
        harness.step()
        assert d.slot == 1
        harness.run()
        assert_done(a, b, c, d)

    def test_a_failed_step_leaves_no_filler_behind(self) -> None:
        harness = self.harness(n_slots=5)
        for max_tokens in (5, 1, 5, 5):
            harness.add(max_tokens=max_tokens)
        harness.step()
        harness.context.failures[harness.context.n_launches] = DecodeError("injected")
        plan = harness.step()
        assert plan is not None
        assert plan.seq_ids == [0, 1, 2, 3]
        assert harness.context.sequences[1] == [PADDING]  # of the half that was computed
        d = harness.add()
        harness.run()
        assert_done(d)
        assert harness.context.n_used == 0


class TestNeighbours:
    @pytest.mark.parametrize("n_slots", [8, 16])
    @pytest.mark.parametrize("enabled", [True, False])
    def test_requests_come_next_to_each_other_whatever_is_parked(self, n_slots: int, enabled: bool) -> None:
        """After 100 requests that came and went in random order: no request ever adds a gap."""
        cache = cache_of(n_slots, enabled, host_bytes=4000)
        chance = random.Random(n_slots)
        running: list[Request] = []

        def come() -> None:
            before = n_runs([r.slot for r in running])
            tokens = prompt_of(40, chance.randrange(12))[: chance.randrange(1, 40)]
            own = prompt_of(chance.randrange(1, 40), chance.randrange(99))
            request = Request([*tokens, *own], RequestSpec(5))
            prefix = cache.find(request)
            n = min(prefix.n, 0 if prefix.cells is None else prefix.cells.n)
            cache.place(request, prefix._replace(leader=None, n=n))
            cache.check_integrity()
            request.n_past = len(request.tokens)
            running.append(request)
            assert n_runs([r.slot for r in running]) <= max(before, 1)

        def go() -> None:
            cache.leave(running.pop(chance.randrange(len(running))))
            cache.check_integrity()

        for _ in range(100):
            while running and (len(running) == n_slots or chance.random() < 0.6):
                go()
            come()
        for n in (1, 2, 4, 8, n_slots):
            while running:
                go()
            for _ in range(n):
                come()
            slots = [r.slot for r in running]
            assert max(slots) - min(slots) == n - 1


def n_runs(slots: list[int]) -> int:
    """How many runs of consecutive numbers there are."""
    return sum(slot - 1 not in slots for slot in slots)


class TestClosingGaps:
    """Gaps that stay between decoding requests are closed, on a CPU with per-sequence KV."""

    def harness(self, n_slots: int = 8, **options: Any) -> SchedulerHarness:
        options = {"padding_token": PADDING, "prefill_cutoff": 16, "n_ubatch": 32, **options}
        return SchedulerHarness(n_slots, **options)

    def left(
        self, harness: SchedulerHarness, keep: set[int], n_slots: int = 8, **options: Any
    ) -> list[Request]:
        """The requests in these slots, when those of all others have ended after their first token."""
        requests = [harness.add(max_tokens=40 if i in keep else 1, **options) for i in range(n_slots)]
        harness.step()
        return [requests[i] for i in sorted(keep)]

    def test_two_far_apart_become_neighbours(self) -> None:
        harness = self.harness()
        a, b = self.left(harness, {0, 7})
        # Two steps cost six gaps each.
        assert [plan.seq_ids for plan in harness.steps(4)] == [[0, 7], [0, 7], [0, 1], [0, 1]]
        harness.run()
        assert_done(a, b)

    def test_the_fewest_cells_are_moved(self) -> None:
        harness = self.harness()
        self.left(harness, {0, 3, 4, 6})
        plans = harness.steps(4)
        assert [plan.seq_ids for plan in plans] == [[0, 1, 2, 3, 4, 5, 6]] * 3 + [[3, 4, 5, 6]]

    def test_it_is_not_done_for_more_cells_than_the_gaps_have_cost(self) -> None:
        harness = self.harness(n_slots=3, n_ctx=4096, n_batch=8192, n_ubatch=8192)
        a = harness.add(n_prompt=2000, max_tokens=40)
        harness.add(max_tokens=1)
        c = harness.add(n_prompt=2500, max_tokens=40)
        harness.step()
        plans = harness.steps(12)
        # A gap a step; 2,000 cells are worth ten, and a few more for the tokens generated meanwhile.
        assert [len(plan.padding) for plan in plans] == [1] * 11 + [0]
        assert (a.slot, c.slot) == (1, 2)
        harness.run()
        assert_done(a, c, n_ctx=4096)

    def test_a_gap_that_new_requests_fill_is_not_closed(self) -> None:
        harness = self.harness(n_slots=3)
        requests = [harness.add(max_tokens=n) for n in (60, 1, 60)]
        for _ in range(12):
            harness.steps(2)
            requests.append(harness.add(max_tokens=1))
        assert (requests[0].slot, requests[2].slot) == (0, 2)
        harness.run()
        assert_done(*requests)

    def test_paused_requests_stay_where_they_are(self) -> None:
        harness = self.harness()
        requests = [
            harness.add(max_tokens=30, token_budget=UNLIMITED if i in (0, 7) else 1) for i in range(8)
        ]
        harness.steps(6)
        assert [r.slot for r in requests] == list(range(8))  # there is no slot to move to
        for request in requests[5:7]:
            harness.scheduler.cancel(request)
        harness.steps(3)
        assert [r.slot for r in requests[:5]] == [6, 1, 2, 3, 4] and requests[7].slot == 7
        for request in requests[1:5]:
            harness.allow(request, 99)
        harness.run()
        assert_done(*requests[:5], requests[7])

    @pytest.mark.parametrize("options", [{"padding_token": None}, {"prefill_cutoff": None}])
    def test_not_where_gaps_cost_less(self, options: dict[str, Any]) -> None:
        harness = self.harness(**options)
        a, b = self.left(harness, {0, 7})
        harness.steps(20)
        assert (a.slot, b.slot) == (0, 7)
        harness.run()
        assert_done(a, b)

    def test_a_shifted_sequence_is_not_moved_before_its_keys_are_rotated(self) -> None:
        harness = self.harness(n_ctx=7, overflow=Overflow("shift", 2))
        a, b = self.left(harness, {0, 7})
        harness.steps(2)
        assert a.dropped and b.dropped
        assert [plan.seq_ids for plan in harness.steps(2)] == [[0, 7], [0, 1]]


class TestRecompute:
    def test_a_memory_that_forgets_all_is_filled_again(self) -> None:
        harness = SchedulerHarness(recurrent=True)
        a, b = harness.add(n_prompt=6, max_tokens=3, resumable=True), harness.add(max_tokens=9)
        harness.run()
        harness.scheduler.trim(a, 4)
        harness.step()
        assert a.n_past == 0
        harness.allow(a, 9)
        harness.run()
        assert a.tokens == prompt_of(6)[:4] + continuation(prompt_of(6)[:4], 3)[0]
        assert_done(b)

    def test_also_when_it_was_allowed_to_go_on_before(self) -> None:
        harness = SchedulerHarness(recurrent=True)
        a, b = harness.add(n_prompt=6, max_tokens=3, resumable=True), harness.add(max_tokens=9)
        harness.steps(3)
        harness.scheduler.trim(a, 4)
        harness.allow(a, 9)
        harness.run()
        assert a.tokens == prompt_of(6)[:4] + continuation(prompt_of(6)[:4], 3)[0]
        assert_done(b)

    def test_a_single_token_is_fed_again_as_before(self) -> None:
        harness = SchedulerHarness(recurrent=True)
        a = harness.add(n_prompt=2, max_tokens=3, resumable=True)
        harness.run()
        harness.scheduler.trim(a, 1)
        harness.allow(a, 9)
        harness.run()
        assert a.tokens == prompt_of(2)[:1] + continuation(prompt_of(2)[:1], 3)[0]


class TestAbort:
    def test_only_the_requests_of_the_step_fail(self) -> None:
        harness = SchedulerHarness(n_slots=3, n_batch=8, n_ubatch=8)
        a, b, c, d = harness.add(), harness.add(token_budget=1), harness.add(n_prompt=20), harness.add()
        harness.step()
        error = DecodeError("injected")
        harness.context.failures[harness.context.n_launches] = error
        assert {r for r, _ in scheduled(harness.step())} == {a, c}
        assert (a.error, a.state, a.finish_reason, c.error) == (error, State.FINISHED, "cancelled", error)
        assert (b.error, d.error) == (None, None)
        harness.allow(b, 9)
        harness.run()
        assert_done(b, d)
        assert harness.context.n_used == 0

    def test_a_kept_request_is_given_up(self) -> None:
        harness = SchedulerHarness()
        a = harness.add(resumable=True)
        harness.context.failures[0] = DecodeError("injected")
        harness.step()
        assert (a.state, len(harness.scheduler.live())) == (State.FINISHED, 0)


class TestIntegrity:
    def test_what_is_wrong_is_found(self) -> None:
        harness = SchedulerHarness()
        a, b = harness.add(), harness.add()
        harness.step()
        a.slot = b.slot
        with pytest.raises(AssertionError, match="two requests in one slot"):
            harness.scheduler.check_integrity()
        a.slot = 3
        with pytest.raises(AssertionError, match="a used slot counts as free"):
            harness.scheduler.check_integrity()
        a.slot = 0
        a.n_past = 1
        with pytest.raises(AssertionError):
            harness.scheduler.check_integrity()


BUFFER = 4  # tokens a stream may be ahead of its reader


class Caller:
    """The caller of a request, which behaves as the engine's streams and generations do."""

    def __init__(self, harness: SchedulerHarness, request: Request) -> None:
        self.harness = harness
        self.request = request
        self.base = list(request.tokens)  # what the next tokens follow from
        self.n_read = 0
        self.granted = request.token_budget
        self.waiting, self.n_before = False, 0
        self.failed = self.cancelled = False

    @property
    def idle(self) -> bool:
        """Whether this is a generation whose caller is not waiting for a token."""
        r = self.request
        if r.n_total > self.n_before or r.finish_reason is not None:
            self.waiting = False
        return r.spec.resumable and r.state is not State.FINISHED and not self.waiting

    def next(self) -> None:
        if self.request.finish_reason is None:
            self.waiting, self.n_before = True, self.request.n_total
            self.granted = self.request.n_total + 1
            self.harness.allow(self.request)

    def changed(self, base: list[int]) -> None:
        """The generation goes on from `base`, but not by itself."""
        self.base = base
        self.granted = self.request.n_total

    def read(self) -> None:
        """Takes one token of a stream."""
        r = self.request
        if r.spec.resumable or r.token_budget == UNLIMITED or self.n_read >= r.n_total:
            return
        self.n_read += 1
        r.token_budget += 1
        self.granted += 1
        if r.state in (State.PAUSED, State.WAITING) and r.token_budget - r.n_total >= BUFFER // 2:
            self.harness.scheduler.resume(r)

    def check(self, n_ctx: int) -> None:
        """The tokens and the end are those the request would have had alone."""
        r = self.request
        assert r.n_total <= self.granted, f"computed without leave: {r!r}"
        expected, reason = continuation(self.base, r.max_tokens, r.stop_tokens, n_ctx)
        assert r.tokens[: len(self.base)] == self.base
        got = r.tokens[len(self.base) :]
        assert got == expected[: len(got)]
        if r.finish_reason in ("stop", "length"):
            assert (got, r.finish_reason) == (expected, reason)
        elif r.state is State.FINISHED:
            assert r.finish_reason == "cancelled"
            assert self.cancelled or self.failed
        assert (r.error is not None) == self.failed


class Machine(RuleBasedStateMachine):
    """Random events in random order; every request gets what it would have got alone."""

    @initialize(
        n_slots=st.integers(1, 6),
        n_ctx=st.integers(6, 24),
        scarcity=st.none() | st.integers(0, 24),
        n_batch=st.integers(4, 20),
        n_ubatch=st.integers(1, 20),
        kind=st.sampled_from(["unified", "streams", "recurrent"]),
        prefill_cutoff=st.none() | st.integers(1, 10),
        least_gaps=st.integers(1, 8),
    )
    def start(
        self,
        n_slots: int,
        n_ctx: int,
        scarcity: int | None,
        n_batch: int,
        n_ubatch: int,
        kind: str,
        prefill_cutoff: int | None,
        least_gaps: int,
    ) -> None:
        self.least_gaps = patch.object(scheduler_module, "_LEAST_GAPS", least_gaps)
        self.least_gaps.start()
        self.n_ctx = n_ctx
        n_batch = max(n_batch, n_slots)  # every context is so
        n_cells = (
            min(n_ctx + scarcity, n_ctx * n_slots) if scarcity is not None and kind == "unified" else None
        )
        self.harness = SchedulerHarness(
            n_slots,
            n_ctx,
            n_cells,
            n_batch,
            min(n_ubatch, n_batch),
            PADDING if kind == "streams" else None,
            recurrent=kind == "recurrent",
            prefill_cutoff=prefill_cutoff,
        )
        self.callers: list[Caller] = []
        self.n_injected = 0

    def choose(self, data: st.DataObject, callers: Sequence[Caller]) -> Caller:
        return callers[data.draw(st.integers(0, len(callers) - 1))]

    @property
    def live(self) -> list[Caller]:
        return [c for c in self.callers if c.request.state is not State.FINISHED]

    @property
    def idle(self) -> list[Caller]:
        return [c for c in self.callers if c.idle]

    # ---- what callers do
    @rule(
        tokens=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=23),
        max_tokens=st.none() | st.integers(1, 12),
        stop=st.frozensets(st.integers(0, N_VOCAB - 1), max_size=20),
        kind=st.sampled_from(["completion", "stream", "generation"]),
    )
    def add(self, tokens: list[int], max_tokens: int | None, stop: frozenset[int], kind: str) -> None:
        if len(self.live) >= 10:
            return
        limit = {"completion": UNLIMITED, "stream": BUFFER, "generation": 0}[kind]
        tokens = tokens[: self.n_ctx - 1]
        spec = RequestSpec(
            max_tokens,
            stop,
            limit,
            resumable=kind == "generation",
            share=len(tokens) % 3,
            cache_key=(None, "salt")[len(self.callers) % 2],
        )
        request = Request(tokens, spec)
        self.harness.scheduler.add(request)
        self.callers.append(Caller(self.harness, request))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.choose(data, self.live).read()

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def next(self, data: st.DataObject) -> None:
        self.choose(data, self.idle).next()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        caller = self.choose(data, self.live)
        caller.cancelled = True
        self.harness.scheduler.cancel(caller.request)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        caller = self.choose(data, self.idle)
        n_keep = data.draw(st.integers(1, min(len(caller.request.tokens), self.n_ctx - 1)))
        caller.changed(caller.request.tokens[:n_keep])
        self.harness.scheduler.trim(caller.request, n_keep)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=6))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        caller = self.choose(data, self.idle)
        if len(caller.request.tokens) + len(tokens) < self.n_ctx:
            caller.changed(caller.request.tokens + tokens)
            self.harness.scheduler.append(caller.request, tokens)

    # ---- what the engine thread does
    @rule(n=st.integers(1, 6))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.harness.step()

    @rule()
    def fail(self) -> None:
        self.step_with(DecodeError("injected"))

    @rule()
    def full(self) -> None:
        self.step_with(ContextFullError("injected"))

    def step_with(self, error: Exception) -> None:
        context = self.harness.context
        context.failures[context.n_launches] = error
        plan = self.harness.step()
        self.n_injected += isinstance(error, ContextFullError) and plan is not None
        context.failures.clear()
        for caller in self.callers:
            if plan is not None and caller.request in [r for r, _ in plan.scheduled]:
                # Running out of cells fails nobody who is not alone.
                caller.failed |= isinstance(error, DecodeError) or self.harness.n_held == 1

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "callers"):
            return
        self.harness.scheduler.check_integrity()
        assert set(self.harness.scheduler.live()) == {c.request for c in self.live}
        assert self.harness.n_full == self.n_injected  # no step is planned for which cells are missing
        for caller in self.callers:
            caller.check(self.n_ctx)

    def teardown(self) -> None:
        """Whatever happened before, everyone who is still there gets to the end of it."""
        if not hasattr(self, "callers"):
            return
        self.least_gaps.stop()
        for _ in range(400):
            if not self.live:
                break
            for caller in self.live:
                if caller.request.spec.resumable and caller.request.finish_reason is not None:
                    caller.cancelled = True
                    self.harness.scheduler.cancel(caller.request)
                elif caller.idle:
                    caller.next()
                for _ in range(BUFFER):
                    caller.read()
            for _ in range(8):
                self.harness.step()
            self.check()
        assert not self.live, self.harness.scheduler
        self.harness.remove()
        assert self.harness.context.n_used == 0


TestMachine = pytest.mark.timeout(900)(Machine.TestCase)  # a failure is made smaller for up to five minutes
TestMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

"""The compute threads of a process, shared by the engines that are computing."""

from __future__ import annotations

import os
import random

import pytest

from llamapipe.host.cpu_load import CoreBudget, process_budget


def test_an_engine_alone_has_all_cores_and_two_share_them() -> None:
    budget = CoreBudget(4)
    a, b = budget.member(), budget.member()
    assert a.n_allowed == 4
    a.enter()
    assert a.n_allowed == 4
    b.enter()
    assert (a.n_allowed, b.n_allowed) == (2, 2)
    a.leave()
    assert b.n_allowed == 4


def test_what_does_not_divide_goes_to_those_that_began_first() -> None:
    budget = CoreBudget(4)
    members = [budget.member() for _ in range(3)]
    for member in reversed(members):
        member.enter()
    assert [member.n_allowed for member in members] == [1, 1, 2]


def test_a_fixed_number_is_taken_from_what_others_share() -> None:
    budget = CoreBudget(8)
    fixed, a, b = budget.member(n_fixed=5), budget.member(), budget.member()
    a.enter()
    assert a.n_allowed == 8  # the fixed one does not compute yet
    fixed.enter()
    b.enter()
    assert (a.n_allowed, b.n_allowed) == (2, 1)
    more = budget.member(n_fixed=100)
    more.enter()
    assert (a.n_allowed, b.n_allowed) == (1, 1)


def test_entering_and_leaving_twice_is_once() -> None:
    budget = CoreBudget(2)
    a = budget.member()
    a.enter()
    a.enter()
    a.leave()
    a.leave()
    assert "n_computing=0" in repr(budget)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_at_least_one_and_no_more_than_there_is(seed: int) -> None:
    rng = random.Random(seed)
    budget = CoreBudget(rng.randrange(1, 20))
    members = [budget.member() for _ in range(rng.randrange(1, 8))]
    for _ in range(50):
        member = rng.choice(members)
        rng.choice([member.enter, member.leave])()
        computing = [m for m in members if m.is_computing]
        shares = [m.n_allowed for m in computing]
        assert all(share >= 1 for share in shares)
        if computing:
            assert sum(shares) == max(budget.n_cores, len(computing))
            assert max(shares) - min(shares) <= 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_child_process_begins_with_a_budget_of_its_own() -> None:
    member = process_budget().member()
    member.enter()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if "n_computing=0" in repr(process_budget()) else 1)
    member.leave()
    assert os.waitpid(pid, 0)[1] == 0

"""How many threads compute, decided from simulated traces of cores and steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llamapipe._engine.runtime.compute_threads import RunDelayPolicy, StepTimePolicy

WINDOW_S = 0.005  # between two readings of the run delay
CORES_S = 0.15  # between two readings of the idle cores


class Machine:
    """Cores with other work on them: what the threads of a policy would wait for a core, and what would be idle."""

    def __init__(self, n_cores: int) -> None:
        self.n_cores = n_cores
        self.n_busy = 0  # processes that always compute
        self.noise = 0.01  # run delay of each thread without any
        self.policy = RunDelayPolicy(n_cores)
        self.now_s = 0.0
        self.changes: list[tuple[float, int]] = []
        self._cores_s = 0.0

    def run(self, seconds: float) -> None:
        """Computes with as many threads as the policy says."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += WINDOW_S
            n = self.policy.n
            n_over = max(n + self.n_busy - self.n_cores, 0)
            shared = min(n, self.n_busy, n_over)  # threads whose core has other work, too, get half of it
            self.policy.observe(self.now_s, WINDOW_S, (0.5 * shared + self.noise * n) * WINDOW_S)
            if self.now_s - self._cores_s >= CORES_S:
                idle = max(self.n_cores - n - self.n_busy, 0)
                self.policy.free(self.now_s, idle + n - 0.5 * shared - 0.05)
                self._cores_s = self.now_s
            if self.policy.n != n:
                self.changes.append((self.now_s, self.policy.n))
                self._cores_s = self.now_s


def test_a_quiet_machine_uses_all_cores_all_the_time() -> None:
    for n_cores in (1, 2, 4, 16, 64):
        machine = Machine(n_cores)
        machine.noise = 0.03
        machine.run(10)
        assert not machine.changes


def test_a_busy_process_takes_a_core_at_once_and_gives_it_back_when_it_ends() -> None:
    machine = Machine(2)
    machine.run(1)
    machine.n_busy = 1
    machine.run(1)
    assert [n for _, n in machine.changes] == [1]
    assert machine.changes[0][0] - 1 <= 0.06
    machine.n_busy = 0
    machine.run(1)
    assert [n for _, n in machine.changes] == [1, 2]
    assert machine.changes[1][0] - 2 <= 2 * CORES_S


@pytest.mark.parametrize(("n_cores", "n_busy"), [(4, 1), (8, 3), (16, 5), (2, 2), (4, 9)])
def test_as_many_threads_as_others_leave(n_cores: int, n_busy: int) -> None:
    machine = Machine(n_cores)
    machine.n_busy = n_busy
    machine.run(2)
    expected = max(n_cores - n_busy, 1)
    step = -(-n_cores // 8)
    assert machine.policy.n in range(max(expected - step, 1), expected + 1)


def test_work_that_comes_and_goes_every_second_costs_little_of_each() -> None:
    machine = Machine(2)
    for i in range(20):
        machine.n_busy = i % 2
        machine.run(1)
    wrong_s = 0.0
    for (begin_s, n), (end_s, _) in pairwise(machine.changes):
        wrong_s += (end_s - begin_s) % 1 if n == 1 else max(end_s - begin_s - 1, 0)
    assert len(machine.changes) == 19
    assert wrong_s < 0.35 * 20


def test_tries_that_fail_become_rare() -> None:
    """Cores look idle, and the threads wait all the same: a control group, or work in bursts."""
    policy = RunDelayPolicy(2)
    now_s, increases = 0.0, []
    while now_s < 60:
        now_s += WINDOW_S
        policy.observe(now_s, WINDOW_S, WINDOW_S)
        if policy.n == 1:
            policy.free(now_s, 2.0)
            if policy.n == 2:
                increases.append(now_s)
    gaps = [b - a for a, b in pairwise(increases)]
    assert gaps == sorted(gaps) or max(gaps[5:]) - min(gaps[5:]) < 0.1
    assert gaps[-1] > 6
    assert len(increases) < 20
    policy.free(now_s + 10, 2.0)
    policy.observe(now_s + 12, WINDOW_S, 0.0)
    policy.observe(now_s + 13, 0.1, 0.1)  # after a second that was good, tries are not rare any more
    assert policy.n == 1
    policy.free(now_s + 13.3, 2.0)
    assert policy.n == 2


def test_short_waits_change_nothing() -> None:
    policy = RunDelayPolicy(2)
    for i in range(1000):
        policy.observe(i * WINDOW_S, WINDOW_S, 0.0055 if i % 20 == 0 else 0.0)
    assert policy.n == 2


def test_a_limit_takes_effect_at_once_and_ends_when_cores_are_idle() -> None:
    policy = RunDelayPolicy(8)
    policy.set_limit(3)
    assert policy.n == 3
    policy.free(1.0, 8.0)
    assert policy.n == 3
    policy.set_limit(8)
    assert policy.n == 3
    policy.free(2.0, 7.9)
    assert policy.n == 8
    policy.set_limit(0)
    assert policy.n == 1


def test_while_an_engine_slept_others_may_have_taken_its_cores() -> None:
    policy = RunDelayPolicy(4)
    policy.free(1.0, 1.2)  # while it computes, the run delay decides
    assert policy.n == 4
    policy.free(2.0, 1.2, was_idle=True)
    assert policy.n == 1
    policy.free(3.0, 2.9, was_idle=True)
    assert policy.n == 3
    policy.free(4.0, 2.6, was_idle=True)  # not quite the third core: no reason to give it up
    assert policy.n == 3


def test_many_cores_use_few_different_numbers() -> None:
    """Each number has a pool of threads of its own."""
    policy = RunDelayPolicy(64)
    seen = set()
    for n in range(1, 65):
        policy.set_limit(n)
        policy.free(float(n), 64.0)
        seen.add(policy.n)
    assert len(seen) <= 9
    assert {1, 64} <= seen


class Steps:
    """Runs the other policy: a step of ``n`` threads takes what a function says."""

    def __init__(self, n_max: int) -> None:
        self.policy = StepTimePolicy(n_max)
        self.now_s = 0.0
        self.spent_s: dict[int, float] = {}

    def run(self, seconds: float, step_s: dict[int, float], n_tokens: int = 1) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            n = self.policy.n
            self.now_s += step_s[n]
            self.spent_s[n] = self.spent_s.get(n, 0.0) + step_s[n]
            self.policy.observe(self.now_s, n_tokens, step_s[n])


def test_by_step_times_a_quiet_machine_keeps_its_threads() -> None:
    steps = Steps(2)
    steps.run(30, {1: 0.0014, 2: 0.001})
    assert steps.spent_s[1] < 0.01 * steps.spent_s[2]


def test_by_step_times_a_slow_machine_gets_fewer_threads_and_more_later() -> None:
    steps = Steps(2)
    steps.run(2, {1: 0.0014, 2: 0.001})
    steps.spent_s.clear()
    steps.run(10, {1: 0.0014, 2: 0.004})
    assert steps.policy.n == 1
    assert steps.spent_s[2] < 0.1 * steps.spent_s[1]
    steps.run(20, {1: 0.0014, 2: 0.001})
    assert steps.policy.n == 2


def test_by_step_times_an_engine_that_began_beside_others_finds_out() -> None:
    steps = Steps(2)
    steps.run(5, {1: 0.0014, 2: 0.004})
    assert steps.policy.n == 1


def test_by_step_times_a_try_without_like_steps_is_given_up() -> None:
    policy = StepTimePolicy(2)
    for i in range(8):
        policy.observe(i * 0.001, 1, 0.001)
    assert policy.n == 1  # a try
    for i in range(64):
        policy.observe(0.1 + i * 0.001, 100 + i, 0.001)
    assert policy.n == 2


def test_by_step_times_a_limit_ends_a_try() -> None:
    policy = StepTimePolicy(4)
    for i in range(8):
        policy.observe(i * 0.001, 1, 0.001)
    assert policy.n == 3
    policy.set_limit(2)
    assert policy.n == 2
    for i in range(8):
        policy.observe(1 + i * 0.001, 1, 0.001)
    assert policy.n == 1
    assert "n=1 of 4 limit=2" in repr(policy)

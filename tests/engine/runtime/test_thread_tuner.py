"""Compute threads that change between steps: what is watched and when, and that texts stay what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from support.inside import embedding_context_of

import llamapipe as lp
from llamapipe._engine.runtime import compute_threads as module
from llamapipe._engine.runtime.compute_threads import ThreadTuner
from llamapipe.errors import BackendError
from llamapipe.host.cpu_load import BudgetMember, CoreBudget, CoreTimes

GREEDY = lp.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
TICK_S = 0.01


class Clock:
    """Goes on by a tick whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s


@dataclass
class FakeLoad:
    """A machine whose load the test sets: run delay of all threads together, and idle cores, in seconds a second.

    ``alternates``: every other second belongs to other work.
    """

    clock: Clock
    delay: float = 0.0
    idle: float = 0.0
    n_throttles: int = 0
    alternates: bool = False
    watched: list[list[int]] = field(default_factory=list)
    closed: bool = False
    earlier: CoreTimes | None = None
    _then_s: float = 100.0
    _delay_s: float = 0.0
    _idle_s: float = 0.0

    def _pass(self) -> None:
        seconds, self._then_s = self.clock.now_s - self._then_s, self.clock.now_s
        if self.alternates:
            self.delay, self.idle = (1.0, 0.0) if int(self.clock.now_s) % 2 else (0.0, 2.0)
        self._delay_s += seconds * self.delay
        self._idle_s += seconds * self.idle

    def watch(self, thread_ids: Iterable[int]) -> None:
        self.watched.append(list(thread_ids))

    def run_and_delay_s(self) -> tuple[float, float]:
        self._pass()
        return self.clock.now_s - 100.0, self._delay_s  # the thread that decodes runs all the time

    def idle_s(self) -> float:
        self._pass()
        return self._idle_s

    def n_throttled(self) -> int:
        return self.n_throttles

    def process_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True


class FakeThreads:
    """A context's threads: the ids 1 to ``n_threads``."""

    def __init__(self, n_threads: int, error: BackendError | None = None) -> None:
        self.n_threads = n_threads
        self._error = error

    def set_threads(self, n_threads: int) -> None:
        if self._error is not None:
            raise self._error
        self.n_threads = n_threads

    def compute_thread_ids(self) -> list[int]:
        return list(range(1, self.n_threads + 1))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(module, "perf_counter", fake_clock)
    return fake_clock


def tuner_of(
    threads: FakeThreads, member: BudgetMember, load: FakeLoad | None, is_fixed: bool = False
) -> ThreadTuner:
    return ThreadTuner(cast(Any, threads), member, cast(Any, load), is_fixed)


def steps(tuner: ThreadTuner, n: int, seconds: float = 0.0) -> None:
    """Launches ``n`` steps that took ``seconds`` each, as an executor does."""
    for _ in range(n):
        if not tuner.member.is_computing:
            tuner.begin()
        clock_s = vars(module)["perf_counter"]
        assert isinstance(clock_s, Clock)
        clock_s.now_s += seconds
        tuner.note_launch(1)


def test_threads_that_wait_for_cores_become_fewer_and_idle_cores_bring_them_back(clock: Clock) -> None:
    load, threads = FakeLoad(clock), FakeThreads(2)
    tuner = tuner_of(threads, CoreBudget(2).member(), load)
    steps(tuner, 20)
    assert (threads.n_threads, tuner.n_changes) == (2, 0)
    load.delay = 0.8
    steps(tuner, 5)
    assert (threads.n_threads, tuner.n_changes) == (1, 1)
    steps(tuner, 50)
    assert threads.n_threads == 1
    load.delay, load.idle = 0.0, 1.0
    steps(tuner, 50)
    assert (threads.n_threads, tuner.n_changes) == (2, 2)
    assert load.watched == [[1, 2], [1], [1, 2]]
    tuner.close()
    assert load.closed


def test_a_throttled_group_is_no_reason_for_fewer_threads(clock: Clock) -> None:
    load, threads = FakeLoad(clock, delay=0.8), FakeThreads(2)
    tuner = tuner_of(threads, CoreBudget(2).member(), load)
    for _ in range(50):
        load.n_throttles += 1
        steps(tuner, 1)
    assert threads.n_threads == 2
    steps(tuner, 10)
    assert threads.n_threads == 1


def test_an_engine_that_wakes_up_on_a_busy_machine_begins_with_fewer_threads(clock: Clock) -> None:
    load, threads = FakeLoad(clock, idle=2.0), FakeThreads(2)
    tuner = tuner_of(threads, CoreBudget(2).member(), load)
    steps(tuner, 3)
    tuner.yield_cores()
    load.idle = 0.9
    clock.now_s += 2
    tuner.begin()
    assert threads.n_threads == 1
    tuner.yield_cores()
    load.idle = 2.0
    clock.now_s += 2
    tuner.begin()
    assert threads.n_threads == 2


@pytest.mark.parametrize(
    ("idle_s", "ours_s", "expected"), [(0.1, 0.2, 1), (0.6, 0.5, 1), (0.8, 1.0, 2), (2.0, 0.0, 2)]
)
def test_the_first_step_counts_what_ran_before_it(
    clock: Clock, idle_s: float, ours_s: float, expected: int
) -> None:
    load, threads = FakeLoad(clock), FakeThreads(2)
    load.earlier = CoreTimes(clock.now_s - 1.0, load.idle_s() - idle_s, load.process_s() - ours_s)
    tuner_of(threads, CoreBudget(2).member(), load).begin()
    assert threads.n_threads == expected


def test_a_later_first_step_counts_only_what_ran_since_the_engine_was_created(clock: Clock) -> None:
    load, threads = FakeLoad(clock, idle=2.0), FakeThreads(2)
    load.earlier = CoreTimes(clock.now_s - 30.0, load.idle_s(), 0.0)
    tuner = tuner_of(threads, CoreBudget(2).member(), load)
    clock.now_s += 1.0
    tuner.begin()
    assert threads.n_threads == 2


def test_two_engines_share_the_cores_while_both_compute(clock: Clock) -> None:
    budget = CoreBudget(4)
    loads = FakeLoad(clock), FakeLoad(clock)
    threads = FakeThreads(4), FakeThreads(4)
    a, b = (tuner_of(of, budget.member(), load) for of, load in zip(threads, loads, strict=True))
    steps(a, 2)
    assert [of.n_threads for of in threads] == [4, 4]
    steps(b, 1)
    steps(a, 1)
    assert [of.n_threads for of in threads] == [2, 2]
    b.yield_cores()
    steps(a, 1)
    assert threads[0].n_threads == 2
    loads[0].idle = 3.0
    steps(a, 40)
    assert threads[0].n_threads == 4


def test_a_chosen_number_stays_and_counts(clock: Clock) -> None:
    budget = CoreBudget(4)
    chosen, free = FakeThreads(3), FakeThreads(4)
    fixed = tuner_of(chosen, budget.member(3), None, is_fixed=True)
    other = tuner_of(free, budget.member(), FakeLoad(clock))
    steps(fixed, 1)
    steps(other, 1)
    steps(fixed, 100)
    assert (chosen.n_threads, free.n_threads) == (3, 1)
    assert fixed.n_changes == 0


def test_without_run_delays_steps_are_compared(clock: Clock) -> None:
    threads = FakeThreads(2)
    tuner = tuner_of(threads, CoreBudget(2).member(), None)
    for _ in range(2000):
        steps(tuner, 1, seconds=0.1 if threads.n_threads == 2 else 0.01)
    assert threads.n_threads == 1


def test_where_no_thread_can_be_started_the_number_stays(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    threads = FakeThreads(2, BackendError("no threads are left"))
    tuner = tuner_of(threads, CoreBudget(2).member(), FakeLoad(clock, delay=1.0))
    steps(tuner, 50)
    assert (threads.n_threads, tuner.n_changes) == (2, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "the number of compute threads stays: no threads are left"
    ]


# ---- engines
@pytest.fixture
def loads(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeLoad]]:
    """The loads of engines made in this test, which think that there are two cores."""
    fakes: list[FakeLoad] = []

    def load() -> FakeLoad:
        fakes.append(FakeLoad(clock))
        return fakes[-1]

    budget = CoreBudget(2)
    monkeypatch.setattr(module, "cpu_load", load)
    monkeypatch.setattr(module, "process_budget", lambda: budget)
    for name in ("context", "embedding_context"):
        monkeypatch.setattr(f"llamapipe.llama.{name}.usable_cores", lambda: 2)
    yield fakes
    assert all(load.closed for load in fakes)


def prompts(n: int) -> list[list[int]]:
    return [[(17 * i + 5 * j) % 250 + 4 for j in range(20 + i)] for i in range(n)]


@pytest.mark.native
@pytest.mark.parametrize("depth", [1, 2])
def test_texts_stay_right_while_threads_change(tiny: lp.Model, loads: list[FakeLoad], depth: int) -> None:
    params = lp.SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    with lp.Engine(tiny, n_ctx=256, n_seq_max=4, n_threads=1) as engine:
        expected = engine.generate(prompts(12), params)
        assert engine.stats().n_thread_changes == 0
    with lp.Engine(tiny, n_ctx=256, n_seq_max=4, tuning=lp.EngineTuning(pipeline_depth=depth)) as engine:
        loads[0].alternates = True
        got = engine.generate(prompts(12), params)
        stats = engine.stats()
    assert [completion.token_ids for completion in got] == [completion.token_ids for completion in expected]
    assert stats.steps >= 450  # of 10 ms each, says the clock
    assert stats.n_thread_changes >= 4


@pytest.mark.native
def test_an_engine_reports_its_threads(tiny: lp.Model, loads: list[FakeLoad]) -> None:
    with lp.Engine(tiny, n_ctx=256, tuning=lp.EngineTuning(trace=True)) as engine:
        assert (engine.stats().n_threads, engine.stats().n_thread_changes) == (2, 0)
        engine.generate(prompts(1)[0], GREEDY)
        loads[0].delay = 1.2
        engine.generate(prompts(1)[0], GREEDY)
        stats = engine.stats()
        assert stats.n_threads == 1
        assert stats.n_thread_changes > 0
        assert "2 threads" in {span.stage for span in engine.trace.spans()}
    with lp.Engine(tiny, n_ctx=256, n_threads=1) as engine:
        engine.generate(prompts(1)[0], GREEDY)
        assert (engine.stats().n_threads, engine.stats().n_thread_changes) == (1, 0)
    assert len(loads) == 1


@pytest.mark.native
def test_an_embedder_follows_the_load_as_an_engine_does(tiny: lp.Model, loads: list[FakeLoad]) -> None:
    texts = ["the cat", "a dog", "the cat and a dog"]
    with lp.Embedder(tiny, n_threads=1) as embedder:
        expected = embedder.embed(texts)
    with lp.Embedder(tiny) as embedder:
        assert np.allclose(embedder.embed(texts), expected, atol=1e-4)
        assert embedding_context_of(embedder).n_threads == 2
        loads[0].delay = 1.2
        rows = [embedder.embed(text) for text in texts * 20]
        assert embedding_context_of(embedder).n_threads == 1
        assert np.allclose(rows[:3], expected, atol=1e-4)
    assert len(loads) == 1

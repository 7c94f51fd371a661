"""Threads that sleep in native code: a launch wakes them one by one while it computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.control import wait_until
from support.native_wakes import begin_launch, sleeps, wake_all

import llamapipe as lp
from llamapipe._engine.runtime import wakers as module
from llamapipe._engine.runtime.executor import StepExecutor
from llamapipe._engine.runtime.wakers import LaunchWakeList, WakeQueue
from llamapipe.llama.context import Context
from llamapipe.llama.native_pipeline import engine_pipeline

N_TOKENS = 512  # a tenth of a second
FOREVER_S = 1000.0


class Sleeper:
    """A thread that, once woken, looks whether a launch computes; then it keeps its turn."""

    def __init__(self, wake_queue: WakeQueue, executor: StepExecutor, go_on: threading.Event) -> None:
        self.waiter = wake_queue.waiter()
        self.woken: bool | None = None
        self.while_computing = False
        self._wake_queue, self._executor, self._go_on = wake_queue, executor, go_on
        self.launched = threading.Event()
        self.thread = threading.Thread(target=self._sleep, daemon=True)
        self.thread.start()
        wait_until(lambda: sleeps(self.waiter))

    def _sleep(self) -> None:
        self.woken = self._wake_queue.wait(self.waiter, FOREVER_S)
        while not self.while_computing and not self.launched.is_set():
            self.while_computing = self._executor.launching() >= 0
        self._go_on.wait()


@pytest.fixture
def executor(demo: lp.Model) -> Iterator[StepExecutor]:
    context = Context(demo, n_ctx=N_TOKENS, n_batch=N_TOKENS, n_ubatch=N_TOKENS, n_threads=1)
    with closing(StepExecutor(engine_pipeline(context, "auto", 1))) as executor:
        if executor.overlaps:
            pytest.skip("its launches do not compute")
        yield executor


def launch(executor: StepExecutor, sleepers: list[Sleeper], wake_queue: WakeQueue) -> None:
    """One step, long enough to be seen, with these turns."""
    wakes = LaunchWakeList(wake_queue)
    executor.wake_at_launch(wakes)
    wakes.add([sleeper.waiter for sleeper in sleepers])
    executor.launch([5] * N_TOKENS, list(range(N_TOKENS)), [0] * N_TOKENS, [0] * (N_TOKENS - 1) + [1])
    for sleeper in sleepers:
        sleeper.launched.set()


def end(sleepers: list[Sleeper], go_on: threading.Event) -> None:
    go_on.set()
    for sleeper in sleepers:
        sleeper.thread.join(20)
        assert not sleeper.thread.is_alive()
        assert sleeper.woken is True


def test_a_thread_that_keeps_its_turn_does_not_hold_up_others(executor: StepExecutor) -> None:
    wake_queue, go_on = WakeQueue(), threading.Event()
    sleepers = [Sleeper(wake_queue, executor, go_on) for _ in range(4)]
    launch(executor, sleepers, wake_queue)
    end(sleepers, go_on)
    assert [sleeper.while_computing for sleeper in sleepers] == [True] * 4


def test_a_launch_wakes_the_first_and_leaves_nobody(
    executor: StepExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", FOREVER_S)
    wake_queue, go_on = WakeQueue(), threading.Event()
    sleepers = [Sleeper(wake_queue, executor, go_on) for _ in range(3)]
    launch(executor, sleepers, wake_queue)
    end(sleepers, go_on)
    assert [sleeper.while_computing for sleeper in sleepers] == [True, False, False]


def test_a_wake_that_finds_nobody_is_kept_for_one_wait() -> None:
    wake_queue = WakeQueue()
    waiter = wake_queue.waiter()
    wake_queue.add([waiter, waiter])
    wake_all(wake_queue)
    assert wake_queue.wait(waiter, FOREVER_S)
    assert not wake_queue.wait(waiter, 0.001)


def test_a_list_grows() -> None:
    wake_queue = WakeQueue()
    wakes, waiters = LaunchWakeList(wake_queue), [wake_queue.waiter() for _ in range(100)]
    for i in range(0, 100, 20):
        wakes.add(waiters[i : i + 20])
    for file in range(2000, 2011):  # nobody has these
        wakes.add_file(file)
    wakes.remove_file(2003)
    wakes.remove_file(2010)
    wakes.remove_file(1)
    assert wakes.files == [2000, 2001, 2002, *range(2004, 2010)]
    begin_launch(wakes)
    assert wakes.files == []
    assert all(wake_queue.wait(waiter, FOREVER_S) for waiter in waiters)  # nobody slept: all were passed over
    wakes.add(waiters[:1])
    wakes.now()
    assert [wake_queue.wait(waiter, 0.001) for waiter in waiters[:2]] == [True, False]


@pytest.mark.parametrize("timeout", [0.0, 1e-9, -1.0, float("-inf")])
def test_no_time_to_wait(timeout: float) -> None:
    wake_queue = WakeQueue()
    assert not wake_queue.wait(wake_queue.waiter(), timeout)

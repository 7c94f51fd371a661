"""Threads that are fair to shares: whose job is next, who waits, and how many threads there are."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import pytest
from support.control import PATIENCE_S, wait_until

from llamapipe.work import threads as module
from llamapipe.work.threads import WORK_THREAD_NAME, FairThreads, Place, on_slowed_thread


def test_a_job_that_hangs_gets_a_thread_beside_it() -> None:
    threads = FairThreads(8)
    gates, ran = [threading.Event() for _ in range(4)], threading.Event()
    for gate in gates:
        threads.run(lambda gate=gate: gate.wait(PATIENCE_S))  # type: ignore[misc]
    threads.run(ran.set)

    def relieved() -> bool:
        threads.add_spare_thread()
        return ran.is_set()

    wait_until(relieved)
    for gate in gates:
        gate.set()
    threads.close()


def test_jobs_end_before_close_does_and_run_at_once_afterwards() -> None:
    threads, ran = FairThreads(2), list[int]()
    for i in range(100):
        threads.run(lambda i=i: ran.append(i))  # type: ignore[misc]
    threads.close()
    assert sorted(ran) == list(range(100))
    threads.run(lambda: ran.append(-1))
    assert ran[-1] == -1


def test_jobs_that_may_take_long_leave_a_thread_to_short_ones() -> None:
    """Of one share one long job runs at a time, cheap ones first."""
    threads, gate, begun = FairThreads(8, most_slow=1), threading.Event(), threading.Event()
    order: list[int] = []

    def hold() -> None:
        begun.set()
        gate.wait(PATIENCE_S)

    threads.run(hold, "share", place=Place(9.0))
    assert begun.wait(PATIENCE_S)
    for i, expected_s in enumerate((5.0, 1.0, 3.0)):
        threads.run(lambda i=i: order.append(i), "share", place=Place(expected_s))  # type: ignore[misc]
    quick = threading.Event()
    threads.run(quick.set, "share", place=Place(0.001))

    def has_run() -> bool:
        threads.add_spare_thread()
        return quick.is_set()

    wait_until(has_run)
    assert order == []
    gate.set()
    threads.close()
    assert order == [1, 2, 0]


def test_of_a_share_the_sampler_that_took_least_comes_first() -> None:
    """A quick one is not behind the jobs of all slow ones."""
    threads, gate, done = FairThreads(1), threading.Event(), threading.Event()
    order: list[str] = []
    slow = [Place() for _ in range(3)]
    threads.run(lambda: gate.wait(PATIENCE_S), "share")
    for n, place in enumerate(slow):
        place.at_s = 1.0 + n
        threads.run(lambda n=n: order.append(f"slow {n}"), "share", place=place)  # type: ignore[misc]
    quick = Place()
    for _ in range(2):
        threads.run(lambda: order.append("quick"), "share", place=quick)
    gate.set()
    threads.run(done.set, "other")
    assert done.wait(PATIENCE_S)
    threads.close()
    assert order == ["quick", "quick", "slow 0", "slow 1", "slow 2"]


def test_a_share_leaves_a_thread_to_samplers_that_are_quick() -> None:
    threads, gate, quick = FairThreads(8), threading.Event(), threading.Event()
    n_running = 0

    def wait() -> None:
        nonlocal n_running
        n_running += 1
        assert gate.wait(PATIENCE_S)

    for _ in range(10):
        place = Place()
        place.is_slow = True
        threads.run(wait, "share", place=place)

    def begun() -> bool:
        threads.add_spare_thread()
        return n_running == 3

    wait_until(begun)
    threads.run(quick.set, "share", place=Place())

    def served() -> bool:
        threads.add_spare_thread()
        return quick.is_set()

    wait_until(served)
    assert n_running == 3
    gate.set()
    threads.close()
    assert n_running == 10


def test_shares_take_turns_and_none_has_all_threads() -> None:
    threads, gate, other = FairThreads(12), threading.Event(), threading.Event()
    n_running = 0

    def wait() -> None:
        nonlocal n_running
        n_running += 1
        assert gate.wait(PATIENCE_S)
        n_running -= 1

    for _ in range(30):
        threads.run(wait, "many")
    threads.run(other.set, "other")

    def relieved() -> bool:
        threads.add_spare_thread()
        return other.is_set()

    wait_until(relieved)
    assert n_running <= 4
    gate.set()
    threads.close()
    assert n_running == 0 and "n_jobs=0" in repr(threads)


def test_two_shares_leave_threads_to_others() -> None:
    threads, gate = FairThreads(8), threading.Event()
    n_running = Counter[str]()

    def wait(share: str) -> None:
        n_running[share] += 1
        assert gate.wait(PATIENCE_S)
        n_running[share] -= 1

    def run(share: str, n: int, n_in_all: int) -> None:
        for _ in range(n):
            threads.run(lambda: wait(share), share)

        def relieved() -> bool:
            threads.add_spare_thread()
            return n_running.total() == n_in_all

        wait_until(relieved)

    run("a", 20, 4)
    run("b", 20, 6)
    run("c", 20, 7)
    run("d", 20, 8)
    assert n_running == {"a": 4, "b": 2, "c": 1, "d": 1}
    gate.set()
    threads.close()
    assert not n_running.total() and "n_jobs=0" in repr(threads)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
def test_a_long_job_gets_a_lower_priority() -> None:
    threads, gate = FairThreads(2), threading.Event()
    slowed: list[bool] = []

    def job() -> None:
        assert gate.wait(PATIENCE_S)
        slowed.append(on_slowed_thread())

    threads.run(job)

    def is_slowed() -> bool:
        threads.add_spare_thread()
        return any(thread.is_slowed for thread in threads._threads)

    wait_until(is_slowed)
    gate.set()
    wait_until(lambda: not threads._threads)
    threads.run(job)
    threads.run(job, is_python=True)
    threads.close()
    assert slowed == [True, False, False]


def test_no_more_threads_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while all of them take long."""
    monkeypatch.setattr(module, "_LONG_S", 0.0)
    others = threading.enumerate()  # of other tests
    threads, gate = FairThreads(3), threading.Event()
    n_running = 0

    def wait() -> None:
        nonlocal n_running
        n_running += 1
        assert gate.wait(PATIENCE_S)

    for _ in range(20):
        threads.run(wait)

    def relieved() -> bool:
        threads.add_spare_thread()
        return n_running == 3

    wait_until(relieved)
    for _ in range(10):
        threads.add_spare_thread()
    workers = [thread for thread in threading.enumerate() if thread not in others]
    gate.set()
    threads.close()
    assert [thread.name for thread in workers] == [WORK_THREAD_NAME] * 3

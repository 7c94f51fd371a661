"""Which threads are woken when a step has delivered: one after another, and all of them if that takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import pytest
from support.control import wait_until
from support.native_wakes import begin_launch, sleeps, wake_all_if_stalled
from support.run_script import Script

from llamapipe._engine.runtime import mailboxes as module
from llamapipe._engine.runtime import wakers
from llamapipe._engine.runtime.mailboxes import ResultDispatcher, ThreadMailbox

N = 8


class Reader:
    """A thread that waits for items and, with each, stops until it is told to go on."""

    def __init__(
        self, dispatcher: ResultDispatcher, n_items: int = 1, then: Callable[[], object] = lambda: None
    ) -> None:
        self.mailbox = ThreadMailbox(dispatcher)
        self.came: list[object] = []
        self._n_items = n_items
        self._then = then
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for _ in range(self._n_items):
            self.came.append(self.mailbox.get())
            self._then()

    def asleep(self) -> bool:
        waiter = self.mailbox.waiter
        return waiter is not None and sleeps(waiter)

    def has_come(self) -> bool:
        return bool(self.came)

    def join(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for what came without being woken: that would hide a lost wake-up."""
    monkeypatch.setattr(module, "_RECHECK_S", 1000.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are woken one by one for as long as it takes."""
    monkeypatch.setattr(wakers, "_PATIENCE_S", 1000.0)


def asleep(dispatcher: ResultDispatcher, n_items: int, n: int = N, **options: Any) -> list[Reader]:
    """Readers that sleep."""
    readers = [Reader(dispatcher, n_items, **options) for _ in range(n)]
    for reader in readers:
        wait_until(reader.asleep)
    return readers


@pytest.mark.usefixtures("patient")
def test_each_wakes_the_next_before_its_own_work() -> None:
    """What a reader does with its item holds up nobody."""
    dispatcher, go_on = ResultDispatcher(), threading.Event()
    readers = [Reader(dispatcher, then=go_on.wait) for _ in range(N)]
    for i, reader in enumerate(readers):
        wait_until(reader.asleep)
        reader.mailbox.put(i)
    assert [reader.came for reader in readers] == [[]] * N  # nobody before the step's end
    dispatcher.flush()
    wait_until(lambda: all(reader.came for reader in readers))
    assert [reader.came for reader in readers] == [[i] for i in range(N)]
    go_on.set()
    for reader in readers:
        reader.join()


@pytest.mark.usefixtures("patient")
def test_a_launch_wakes_the_first_and_each_the_next_when_it_waits_again() -> None:
    """So that who is woken finds the interpreter's lock free."""
    dispatcher, go_on = ResultDispatcher(at_launch=True), threading.Semaphore(0)
    readers = asleep(dispatcher, 2, then=go_on.acquire)
    for i, reader in enumerate(readers):
        reader.mailbox.put(i)
    dispatcher.flush()
    assert [reader.came for reader in readers] == [[]] * N  # nobody before the launch
    begin_launch(dispatcher.wakes)  # what a launch does
    for i, reader in enumerate(readers):
        wait_until(reader.has_come)
        assert [reader.asleep() for reader in readers[i + 1 :]] == [True] * (N - i - 1)
        go_on.release()
        wait_until(reader.asleep)
    assert [reader.came for reader in readers] == [[i] for i in range(N)]
    for reader in readers:
        reader.mailbox.put("last")
        go_on.release()
    dispatcher.flush(together=True)
    for reader in readers:
        reader.join()


def test_whoever_keeps_its_turn_for_long_is_not_waited_for() -> None:
    """A launch asks again and again while it computes."""
    dispatcher, go_on = ResultDispatcher(at_launch=True), threading.Event()
    readers = asleep(dispatcher, 1, then=go_on.wait)
    for reader in readers:
        reader.mailbox.put(1)
    dispatcher.flush()
    begin_launch(dispatcher.wakes)

    def all_came() -> bool:
        wake_all_if_stalled(dispatcher._wake_queue)
        return all(reader.came for reader in readers)

    wait_until(all_came)
    go_on.set()
    for reader in readers:
        reader.join()


@pytest.mark.usefixtures("patient")
def test_turns_that_have_not_come_stay_before_those_of_the_next_step() -> None:
    dispatcher, go_on = ResultDispatcher(at_launch=True), threading.Event()
    slow, *waiting = asleep(dispatcher, 1, 3, then=go_on.wait)
    for reader in (slow, waiting[0]):
        reader.mailbox.put(1)
    dispatcher.flush()
    begin_launch(dispatcher.wakes)
    wait_until(slow.has_come)
    wake_all_if_stalled(dispatcher._wake_queue)  # not that long
    waiting[1].mailbox.put(1)
    dispatcher.flush()
    assert [reader.asleep() for reader in waiting] == [True, True]
    for reader in waiting:
        begin_launch(dispatcher.wakes)
        wait_until(reader.has_come)
    go_on.set()
    for reader in (slow, *waiting):
        reader.join()


@pytest.mark.usefixtures("patient")
def test_a_long_wait_for_the_launch_wakes_at_once() -> None:
    """Before a grammar is compiled, say."""
    dispatcher, go_on = ResultDispatcher(at_launch=True), threading.Event()
    readers = asleep(dispatcher, 1, then=go_on.wait)
    for reader in readers:
        reader.mailbox.put(1)
    dispatcher.flush()
    dispatcher.wake()
    wait_until(lambda: all(reader.came for reader in readers))
    go_on.set()
    for reader in readers:
        reader.join()


@pytest.mark.usefixtures("patient")
def test_who_does_not_wait_is_passed_over() -> None:
    dispatcher = ResultDispatcher()
    busy, waiting = ThreadMailbox(dispatcher), Reader(dispatcher)
    with pytest.raises(Empty):
        busy.get(perf_counter() + 0.001)  # it could be woken from now on
    wait_until(waiting.asleep)
    for item in "ab":
        busy.put(item)
    waiting.mailbox.put("c")
    dispatcher.flush()
    waiting.join()
    assert waiting.came == ["c"]
    assert [busy.get(), busy.get()] == ["a", "b"]


@pytest.mark.parametrize("together", [False, True])
def test_all_at_once_where_one_by_one_takes_long(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """However slowly the first one comes round to waking the next."""
    monkeypatch.setattr(wakers, "_PATIENCE_S", 1000.0 if together else -1000.0)
    dispatcher, go_on = ResultDispatcher(at_launch=together), threading.Event()
    readers = asleep(dispatcher, 1, then=go_on.wait)
    for reader in readers:
        reader.mailbox.put(1)
    # None of them may wake another here.
    pass_on = dispatcher._wake_queue.next
    monkeypatch.setattr(dispatcher._wake_queue, "next", lambda: pass_on() if in_main() else None)
    dispatcher.flush(together)
    wait_until(lambda: all(reader.came for reader in readers))
    go_on.set()
    for reader in readers:
        reader.join()


def in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_get_ends_at_its_timeout() -> None:
    dispatcher = ResultDispatcher()
    mailbox = ThreadMailbox(dispatcher)
    for timeout in (0, 0.01):
        with pytest.raises(Empty):
            mailbox.get(perf_counter() + timeout)
    assert mailbox.waiter is not None
    assert not sleeps(mailbox.waiter)
    mailbox.put("late")
    assert mailbox.get(perf_counter()) == "late"  # what is there needs no time
    with pytest.raises(Empty):
        mailbox.get(perf_counter())


@pytest.mark.usefixtures("patient")
def test_whoever_waits_passes_the_turn_on_first() -> None:
    """Also one that will give up."""
    dispatcher = ResultDispatcher(at_launch=True)
    slow, waiting = asleep(dispatcher, 1, 2)
    for reader in (slow, waiting):
        reader.mailbox.put(1)
    dispatcher.flush()
    begin_launch(dispatcher.wakes)
    slow.join()
    assert waiting.asleep()
    with pytest.raises(Empty):
        ThreadMailbox(dispatcher).get(perf_counter() + 0.01)
    waiting.join()


def test_whoever_was_to_be_woken_by_an_interrupted_thread_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Ctrl-C may come between two of its steps."""
    monkeypatch.setattr(module, "_RECHECK_S", 0.01)
    dispatcher = ResultDispatcher()
    reader = Reader(dispatcher)
    wait_until(reader.asleep)
    reader.mailbox._items.append("a")  # and nobody wakes it
    reader.join()
    assert reader.came == ["a"]


def test_items_come_whole_and_in_order() -> None:
    """Many steps for many readers, who come and go as they like."""
    dispatcher, n_steps = ResultDispatcher(), 3000
    readers = [Reader(dispatcher, n_steps) for _ in range(N)]
    for step in range(n_steps):
        for reader in readers:
            reader.mailbox.put(step)
        dispatcher.flush(together=step == n_steps - 1)
    for reader in readers:
        reader.join()
        assert reader.came == list(range(n_steps))


def test_two_threads_at_one_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for one at a time, but a mistake must not hurt the thread that delivers. A reader may miss a wake."""
    monkeypatch.setattr(module, "_RECHECK_S", 0.01)
    dispatcher = ResultDispatcher()
    mailbox, came = ThreadMailbox(dispatcher), SimpleQueue[int]()

    def read() -> None:
        for _ in range(500):
            came.put(mailbox.get())

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(1000):
        mailbox.put(i)
        dispatcher.flush(together=True)
    for thread in threads:
        thread.join()
    assert sorted(came.get(timeout=1) for _ in range(1000)) == list(range(1000))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to send to one process")
def test_ctrl_c_ends_the_wait() -> None:
    program = """
import os, signal, threading
from llamapipe._engine.runtime import mailboxes as module
from llamapipe._engine.runtime.mailboxes import ThreadMailbox
from llamapipe._engine.runtime.mailboxes import ResultDispatcher
from llamapipe.native.load import native
module._RECHECK_S = 1000.0
dispatcher = ResultDispatcher()
mailbox, ended = ThreadMailbox(dispatcher), threading.Event()
def interrupt(*_):
    if not ended.is_set():
        ended.set()
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
def press():
    while mailbox.waiter is None or not native().lib.lp_waiter_asleep(mailbox.waiter):
        pass
    while not ended.wait(0.01):  # one that comes just before the wait does not end it
        os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=press)
thread.start()
try:
    mailbox.get()
except KeyboardInterrupt:
    say(native().lib.lp_waiter_asleep(mailbox.waiter))
thread.join()
mailbox.put("there")
say(mailbox.get())
"""
    with Script(program) as script:
        script.expect("False")
        script.expect("there")
        assert script.end() == ("", "")

"""The engine thread's queue of commands."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty

import pytest
from support.control import Worker

from llamapipe._engine.runtime.inbox import Inbox


def test_commands_run_in_order() -> None:
    inbox, ran = Inbox(), list[int]()
    for i in range(3):
        inbox.put(ran.append, i)
    assert inbox.qsize() == 3
    for _ in range(3):
        inbox.run_next()
    assert ran == [0, 1, 2] and inbox.empty()


def test_no_command_in_time() -> None:
    with pytest.raises(Empty):
        Inbox().run_next(0.001)


def test_the_shortest_timeouts_end() -> None:
    """SimpleQueue.get() with a timeout of a microsecond sometimes waits for ever, after a put()."""
    inbox = Inbox()

    def work() -> int:
        for i in range(30_000):
            inbox.put(int)
            inbox.run_next()
            with suppress(Empty):
                inbox.run_next(1e-9 + 4e-8 * (i % 50))
        return 1

    assert Worker(work).result() == 1

"""A clock for the deadlines of an engine's callers: they pass when a test says so, not when the machine is slow."""

from __future__ import annotations

import asyncio
from time import perf_counter

import pytest

from llamapipe import streams
from llamapipe._engine.calls import call_options, queue_limit
from llamapipe._engine.runtime import mailboxes
from llamapipe._sync import streams as sync_streams


class Clock:
    """Runs as ``perf_counter`` does, and is put forward by ``pass_time``. Those who wait in a mailbox notice at once.

    Asyncio's timers follow it on the loops that were given to ``set_timers_of``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        self._loops: list[asyncio.AbstractEventLoop] = []
        for module in (call_options, queue_limit, mailboxes, streams, sync_streams):
            monkeypatch.setattr(module, "perf_counter", lambda: perf_counter() + self._ahead_s)
        monkeypatch.setattr(mailboxes, "_RECHECK_S", 0.005)

    def set_timers_of(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has the timers of a loop follow; on its thread."""
        time = loop.time
        loop.time = lambda: time() + self._ahead_s  # type: ignore[method-assign]
        self._loops.append(loop)

    def pass_time(self, seconds: float) -> None:
        """Puts the clock forward."""
        self._ahead_s += seconds
        for loop in self._loops:
            loop.call_soon_threadsafe(int)  # it looks at its timers then

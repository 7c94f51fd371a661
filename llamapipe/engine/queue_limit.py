"""Counts the requests that wait for a slot and lets callers wait for room."""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe.errors import QueueFullError

if TYPE_CHECKING:
    import asyncio


class QueueLimit:
    """A counter with a limit. ``enter`` is called by callers, ``leave`` by the decoder thread."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._n = 0
        self._room = threading.Condition()
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @property
    def n(self) -> int:
        """Requests that were accepted and have no slot yet."""
        return self._n

    def try_enter(self, n: int = 1) -> bool:
        """Takes room for ``n`` requests if there is."""
        with self._room:
            if self._limit is not None and self._n + n > self._limit:
                return False
            self._n += n
            return True

    def enter_at_once(self, n: int = 1) -> None:
        """Takes room for ``n`` requests. Raises QueueFullError when there is none."""
        if not self.try_enter(n):
            raise QueueFullError(
                f"{self._n} requests wait and {n} more were asked for; max_queue is {self._limit}: "
                "call again later, or with block=True"
            )

    def enter(self, deadline: float | None) -> None:
        """Waits for room for one request. Raises TimeoutError after ``deadline`` (``perf_counter`` seconds)."""
        with self._room:
            while self._limit is not None and self._n >= self._limit:
                left_s = None if deadline is None else deadline - perf_counter()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError("no room came free in the queue within the timeout")
                self._room.wait(left_s)
            self._n += 1

    async def aenter(self) -> None:
        """Waits for room for one request without blocking the event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        while not self.try_enter():
            waiter = loop.create_future()
            with self._room:
                self._waiters.append((loop, waiter))
            if self.try_enter():  # room may have come before the waiter was noted
                waiter.cancel()
                return
            await waiter

    def leave(self, n: int) -> None:
        """Gives room back and wakes who waits for it."""
        with self._room:
            self._n -= n
            self._room.notify_all()  # not only ``n``: who is woken may be giving up, and would take another's turn
            waiters = list(self._waiters)
            self._waiters.clear()
        for loop, waiter in waiters:
            try:
                loop.call_soon_threadsafe(_wake, waiter)
            except RuntimeError:  # that loop is closed
                continue


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

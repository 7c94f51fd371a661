"""Counts the requests that wait for a slot and lets callers wait for room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe.engine.worker.time_counter import TimeCounter
from llamapipe.errors import QueueFullError

if TYPE_CHECKING:
    import asyncio

    from llamapipe.engine.results import TimeHistogram


class ExpiredError(TimeoutError):
    """The deadline of a call passed."""


class QueueLimit:
    """A set with a limit. ``enter`` is called by callers, ``leave`` by the engine thread.

    It holds the requests themselves, with the time they entered, and not their number, so leaving twice, or without
    having entered, is not an error: a caller that Ctrl-C interrupts between two instructions cannot know which of them
    ran.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._inside: dict[Hashable, float] = {}  # and when they entered
        self._times = TimeCounter()
        self._room = threading.Condition()
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @property
    def n(self) -> int:
        """Requests that were accepted and have no slot yet."""
        return len(self._inside)

    def times(self) -> TimeHistogram:
        """How long requests have waited for a slot, or until they ended without one."""
        return self._times.copy()

    def try_enter(self, *requests: Hashable) -> bool:
        """Enters all requests if there is room for all; returns whether there was."""
        with self._room:
            if self._limit is not None and len(self._inside) + len(requests) > self._limit:
                return False
            self._inside.update(dict.fromkeys(requests, perf_counter()))
            return True

    def enter_at_once(self, *requests: Hashable) -> None:
        """Enters all requests. Raises QueueFullError if there is no room for all."""
        if not self.try_enter(*requests):
            if self._limit is not None and len(requests) > self._limit:
                raise QueueFullError(
                    f"{len(requests)} requests are submitted at once and max_queue is {self._limit}: that never fits; "
                    "submit fewer, pass block=True, or make the engine with a larger max_queue"
                )
            raise QueueFullError(
                f"{self.n} requests are queued and {len(requests)} more were submitted; max_queue is {self._limit}: "
                "retry later, or pass block=True"
            )

    def enter(self, request: Hashable, deadline: float | None) -> None:
        """Waits for room for one request. Raises ExpiredError after ``deadline`` (``perf_counter`` seconds)."""
        with self._room:
            while self._limit is not None and len(self._inside) >= self._limit:
                left_s = None if deadline is None else deadline - perf_counter()
                if left_s is not None and left_s <= 0:
                    raise ExpiredError("no room came free in the queue within the timeout")
                self._room.wait(left_s)
            self._inside[request] = perf_counter()

    async def aenter(self, request: Hashable) -> None:
        """Waits for room for one request without blocking the event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        while not self.try_enter(request):
            waiter = loop.create_future()
            with self._room:
                self._waiters.append((loop, waiter))
            if self.try_enter(request):  # room may have become free before the waiter was added
                waiter.cancel()
                return
            await waiter

    def leave(self, requests: Sequence[Hashable]) -> None:
        """Frees the room of those requests that hold any and wakes the callers that wait for it."""
        with self._room:
            now = perf_counter()
            for request in requests:
                entered = self._inside.pop(request, None)
                if entered is not None:
                    self._times.add(now - entered)
            # All waiters, not one per free place: a woken waiter may be giving up, and its place would stay unused.
            self._room.notify_all()
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

"""Knows the requests that wait for a slot and lets callers wait for room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe.errors import QueueFullError

if TYPE_CHECKING:
    import asyncio


class QueueLimit:
    """A set with a limit. ``enter`` is called by callers, ``leave`` by the engine thread.

    Who is in it is known by name, so that leaving twice, or without having come in, is no mistake: whoever is
    interrupted between two instructions need not know which of them was done.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._inside: set[Hashable] = set()
        self._room = threading.Condition()
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @property
    def n(self) -> int:
        """Requests that were accepted and have no slot yet."""
        return len(self._inside)

    def try_enter(self, *requests: Hashable) -> bool:
        """Takes all of them in if there is room."""
        with self._room:
            if self._limit is not None and len(self._inside) + len(requests) > self._limit:
                return False
            self._inside.update(requests)
            return True

    def enter_at_once(self, *requests: Hashable) -> None:
        """Takes all of them in. Raises QueueFullError when there is no room."""
        if not self.try_enter(*requests):
            if self._limit is not None and len(requests) > self._limit:
                raise QueueFullError(
                    f"{len(requests)} requests are asked for at once and max_queue is {self._limit}: that never fits; "
                    "ask with block=True, for fewer, or make the engine with a larger max_queue"
                )
            raise QueueFullError(
                f"{self.n} requests wait and {len(requests)} more were asked for; max_queue is {self._limit}: "
                "call again later, or with block=True"
            )

    def enter(self, request: Hashable, deadline: float | None) -> None:
        """Waits for room for one request. Raises TimeoutError after ``deadline`` (``perf_counter`` seconds)."""
        with self._room:
            while self._limit is not None and len(self._inside) >= self._limit:
                left_s = None if deadline is None else deadline - perf_counter()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError("no room came free in the queue within the timeout")
                self._room.wait(left_s)
            self._inside.add(request)

    async def aenter(self, request: Hashable) -> None:
        """Waits for room for one request without blocking the event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        while not self.try_enter(request):
            waiter = loop.create_future()
            with self._room:
                self._waiters.append((loop, waiter))
            if self.try_enter(request):  # room may have come before the waiter was noted
                waiter.cancel()
                return
            await waiter

    def leave(self, requests: Sequence[Hashable]) -> None:
        """Gives the room of those that have any back and wakes who waits for it."""
        with self._room:
            self._inside.difference_update(requests)
            # Not only as many as there is room for: who is woken may be giving up, and would take another's turn.
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

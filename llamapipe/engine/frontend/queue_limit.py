"""Counts the requests that wait for a slot and lets callers wait for room.

The rule of this file: the engine thread takes no lock that a caller may hold, because an exception of a signal handler
may interrupt a caller between any two instructions. Callers enter under a lock of their own. The engine thread only
removes requests, and wakes the callers that wait, each with something of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe._engine.loop import TimeCounter
from llamapipe.errors import QueueFullError
from llamapipe.locks import Lock

if TYPE_CHECKING:
    import asyncio

    from llamapipe._engine.request import Request
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
        # Of callers only. A Condition would run Python code while it is held. Reentrant, as all locks of callers: a
        # destructor or signal handler that uses the engine may run while its thread holds the lock.
        self._entering = Lock()
        self._waiters: deque[Callable[[], object]] = deque()  # each wakes a caller that waits for room

    @property
    def is_limited(self) -> bool:
        """Whether the queue has a limit."""
        return self._limit is not None

    @property
    def n(self) -> int:
        """Requests that were accepted and have no slot yet."""
        return len(self._inside)

    def times(self) -> TimeHistogram:
        """How long requests have waited for a slot, or until they ended without one."""
        return self._times.copy()

    def try_enter(self, *requests: Hashable) -> bool:
        """Enters all requests if there is room for all; returns whether there was."""
        entered = dict.fromkeys(requests, perf_counter())
        with self._entering:
            if self._limit is not None and len(self._inside) + len(entered) > self._limit:
                return False
            self._inside.update(entered)
            return True

    def enter_at_once(self, *requests: Hashable) -> None:
        """Enters all requests. Raises QueueFullError if there is no room for all."""
        if not self.try_enter(*requests):
            if self._limit is not None and len(requests) > self._limit:
                raise QueueFullError(
                    f"{len(requests)} requests are submitted at once and max_queue is {self._limit}: that never fits; "
                    "submit fewer at once, or raise max_queue"
                )
            raise QueueFullError(
                f"max_queue is {self._limit} and the queue has {self.n}: there is no room for {len(requests)} more; "
                "retry later, or raise max_queue"
            )

    def enter(self, request: Hashable, deadline: float | None) -> None:
        """Waits for room for one request. Raises ExpiredError after ``deadline`` (``perf_counter`` seconds)."""
        while not self.try_enter(request):
            woken = threading.Lock()
            woken.acquire()
            self._waiters.append(woken.release)
            try:
                if self.try_enter(request):  # room may have come free before the waiter was added
                    return
                left_s = None if deadline is None else deadline - perf_counter()
                if left_s is not None and left_s <= 0:
                    raise ExpiredError("no room came free in the queue within the timeout")
                woken.acquire(timeout=-1 if left_s is None else min(left_s, threading.TIMEOUT_MAX))
            finally:
                with suppress(ValueError):  # woken: it is off the list
                    self._waiters.remove(woken.release)

    async def aenter(self, request: Hashable) -> None:
        """Waits for room for one request without blocking the event loop."""
        import asyncio

        loop = asyncio.get_running_loop()
        while not self.try_enter(request):
            waiter = loop.create_future()
            self._waiters.append(partial(loop.call_soon_threadsafe, _wake, waiter))
            if self.try_enter(request):
                waiter.cancel()
                return
            await waiter

    def leave(self, requests: Sequence[Hashable]) -> None:
        """Frees the room of those requests that hold any and wakes the callers that wait for it. Engine thread."""
        now = perf_counter()
        for request in requests:
            entered = self._inside.pop(request, None)
            if entered is not None:
                self._times.add(now - entered)
        self._wake_all()

    def left(self, requests: Sequence[Request]) -> None:
        """Records when requests got their first slot, or ended without one, then calls ``leave``. Engine thread."""
        now = perf_counter()
        for request in requests:
            if request.left_queue_at is None:  # a preempted request leaves the queue again
                request.left_queue_at = now
        self.leave(requests)

    def withdraw(self, requests: Collection[Hashable]) -> None:
        """``leave`` for callers whose requests may never reach the engine thread."""
        for request in requests:
            self._inside.pop(request, None)
        self._wake_all()

    def _wake_all(self) -> None:
        # All waiters, not one per free place: a woken waiter may be giving up, and its place would stay unused.
        for _ in range(len(self._waiters)):
            try:
                wake = self._waiters.popleft()
            except IndexError:  # another thread took it
                return
            try:
                wake()
            except RuntimeError:  # that loop is closed
                continue


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

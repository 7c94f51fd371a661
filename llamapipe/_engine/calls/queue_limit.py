"""The bounded queue of an engine: callers wait for room, or get an error that it is full.

Open this file to change how ``max_queue`` counts requests, or how callers wait for room.

The principle: the engine thread takes no lock that a caller may hold, because a signal handler may raise in a caller
between any two instructions. Callers enter under a lock that only callers take. The engine thread only removes requests
and wakes waiting callers. The queue holds the requests, not their number, so removing a request twice does no harm.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe._engine.calls.call_options import ExpiredError
from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.time_counter import TimeCounter
from llamapipe.errors import QueueFullError
from llamapipe.locks import Lock
from llamapipe.work.long_work import running_loop, settle

if TYPE_CHECKING:
    from llamapipe.results import TimeHistogram


class QueueLimit:
    """A set of at most ``limit`` requests; None: any number. Callers call ``enter``, the engine thread ``remove``.

    The set holds the requests themselves, with the times when they entered. So removing a request twice, or one that
    never entered, is not an error: a caller that Ctrl-C interrupts cannot know which of its instructions ran.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._inside: dict[Request, float] = {}  # with the times when they entered
        self._times = TimeCounter()
        # Only callers hold it. A Condition would run Python code while held. It is reentrant, like all locks of
        # callers: a destructor or signal handler that uses the engine may run while its thread holds the lock.
        self._entering = Lock()
        self._waiters: deque[Callable[[], object]] = deque()  # each wakes a caller that waits for room

    @property
    def n(self) -> int:
        """The number of accepted requests that have no slot yet."""
        return len(self._inside)

    def times(self) -> TimeHistogram:
        """Return a histogram of the seconds that requests waited for a slot, or until they ended without one."""
        return self._times.copy()

    def try_enter(self, *requests: Request) -> bool:
        """Enter all requests if there is room for all; return whether there was."""
        entered = dict.fromkeys(requests, perf_counter())
        with self._entering:
            if self.limit is not None and len(self._inside) + len(entered) > self.limit:
                return False
            self._inside.update(entered)
            return True

    def enter_at_once(self, *requests: Request) -> None:
        """Enter all requests. Raises QueueFullError if there is no room for all."""
        if not self.try_enter(*requests):
            if self.limit is not None and len(requests) > self.limit:
                raise QueueFullError(
                    f"{len(requests)} requests are submitted at once and max_queue is {self.limit}: that never fits; "
                    "submit fewer at once, or raise max_queue"
                )
            raise self._full(len(requests))

    def check_room(self) -> None:
        """Raise QueueFullError if there is no room for a request."""
        if self.limit is not None and self.n >= self.limit:
            raise self._full(1)

    def _full(self, n: int) -> QueueFullError:
        return QueueFullError(
            f"max_queue is {self.limit} and the queue has {self.n}: there is no room for {n} more; retry later, or "
            "raise max_queue"
        )

    def enter(self, request: Request, deadline: float | None) -> None:
        """Wait for room for one request. Raises ExpiredError after ``deadline`` (``perf_counter`` seconds)."""
        while not self.try_enter(request):
            woken = threading.Lock()
            woken.acquire()
            self._waiters.append(woken.release)
            try:
                if self.try_enter(request):  # room may have become free before the waiter was added
                    return
                left_s = None if deadline is None else deadline - perf_counter()
                if left_s is not None and left_s <= 0:
                    raise ExpiredError("no room came free in the queue within the timeout")
                woken.acquire(timeout=-1 if left_s is None else min(left_s, threading.TIMEOUT_MAX))
            finally:
                with suppress(ValueError):  # a woken caller is no longer in the list
                    self._waiters.remove(woken.release)

    async def aenter(self, request: Request, deadline: float | None) -> None:
        """Wait as ``enter`` does, for asyncio."""
        loop = running_loop()
        while not self.try_enter(request):
            waiter = loop.create_future()
            self._waiters.append(partial(loop.call_soon_threadsafe, settle, waiter, None, None))
            if self.try_enter(request):
                waiter.cancel()
                return
            if deadline is None:
                await waiter
            elif (left_s := deadline - perf_counter()) > 0:
                timer = loop.call_later(left_s, settle, waiter, None, None)
                try:
                    await waiter
                finally:
                    timer.cancel()
            else:
                waiter.cancel()
                raise ExpiredError("no room came free in the queue within the timeout")

    def remove(self, requests: Sequence[Request]) -> None:
        """Record that requests have a slot, or ended without one, and wake waiting callers. Engine thread."""
        now = perf_counter()
        for request in requests:
            if request.left_queue_at is None:  # a preempted request leaves the queue again
                request.left_queue_at = now
            entered = self._inside.pop(request, None)
            if entered is not None:
                self._times.add(now - entered)
        if self._waiters:
            self._wake_all()

    def discard(self, requests: Collection[Request]) -> None:
        """Remove requests that may never reach the engine thread. For callers."""
        for request in requests:
            self._inside.pop(request, None)
        self._wake_all()

    def _wake_all(self) -> None:
        # Wake all waiters, not one per free place: a woken waiter may be giving up, and its place would stay unused.
        for _ in range(len(self._waiters)):
            try:
                wake = self._waiters.popleft()
            except IndexError:  # another thread took the last waiter
                return
            try:
                wake()
            except RuntimeError:  # the waiter's event loop is closed
                continue

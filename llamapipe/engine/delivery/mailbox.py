"""Mailboxes: how one caller receives the results of its requests, in a thread or in an asyncio task."""

from __future__ import annotations

from collections import deque
from queue import Empty
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from llamapipe._engine.request import Request
from llamapipe.engine.delivery.result_dispatcher import ResultDispatcher
from llamapipe.engine.delivery.wake_queue import Waiter

if TYPE_CHECKING:
    import asyncio  # a third of the cost of importing llamapipe, and not every program needs it

# Wait in slices of one second: Ctrl-C may have interrupted the thread that should wake us, or have arrived just before
# we blocked, in which case it does not interrupt the wait.
_RECHECK_S = 1.0


class Mailbox(Protocol):
    """Accepts results on the engine thread."""

    def put(self, item: object) -> None:
        """Adds an item. Never blocks."""


class ThreadMailbox:
    """A mailbox that one thread at a time reads from.

    ``waiter``: made when a reader first has to wait, because most requests of a list never do.
    """

    def __init__(self, dispatcher: ResultDispatcher) -> None:
        self._dispatcher = dispatcher
        self._items: deque[object] = deque()
        self.waiter: Waiter | None = None

    def put(self, item: object) -> None:
        """Adds an item; its reader is woken at the end of the step. Engine thread."""
        self._items.append(item)
        self._dispatcher.add_thread(self)

    def get(self, timeout: float | None = None) -> Any:
        """Waits for the next item; signals interrupt it. Raises queue.Empty after ``timeout`` seconds."""
        items, dispatcher = self._items, self._dispatcher
        deadline = None if timeout is None else perf_counter() + timeout
        while True:
            if items:  # checked first: the exception would cost more than the token
                try:
                    return items.popleft()
                except IndexError:  # another reader, by mistake, was quicker
                    pass
            left_s = _RECHECK_S
            if deadline is not None:
                left_s = min(deadline - perf_counter(), left_s)
                if left_s <= 0:
                    raise Empty
            if self.waiter is None:
                self.waiter = (
                    dispatcher.waiter()
                )  # an item that arrived before this woke no thread: look again
            else:
                dispatcher.wait(self.waiter, left_s)


class AsyncMailbox:
    """A mailbox that one asyncio task reads from. Made on its loop's thread.

    ``requests``: the requests that are answered here; they are cancelled if the loop turns out to be closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatcher: ResultDispatcher) -> None:
        self.loop = loop
        self.requests: list[Request] = []
        self._dispatcher = dispatcher
        self._items: deque[object] = deque()
        self._waiter: asyncio.Future[None] | None = None
        dispatcher.attach(loop)

    def put(self, item: object) -> None:
        """Adds an item; its loop gets it at the end of the step. Engine thread."""
        self._dispatcher.add(self, item)

    def receive(self, item: object) -> None:
        """Accepts an item. The loop's thread."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # done: cancelled, or woken already
            try:
                waiter.set_result(None)
            except Exception:  # a signal handler has cancelled it between the two lines
                if not waiter.done():
                    raise

    async def get(self) -> Any:
        """Waits for the next item."""
        items = self._items
        while not items:
            self._waiter = self.loop.create_future()
            await self._waiter
        return items.popleft()

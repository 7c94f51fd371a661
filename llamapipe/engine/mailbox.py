"""How results reach a caller: a thread blocks on a queue, an asyncio task is woken once a step through its loop."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from llamapipe.engine.request import Request

if TYPE_CHECKING:
    import asyncio  # a third of what importing llamapipe would cost, and not everybody uses it


class Mailbox(Protocol):
    """Takes results on the decoder thread."""

    def put(self, item: Any) -> None:
        """Hands over an item; never blocks."""


class ThreadMailbox:
    """A mailbox one thread reads from; SimpleQueue does all that is needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self.put = self._queue.put
        self.get = self._queue.get  # interruptible by signals


class Outbox:
    """Collects what a step delivers to event loops, so that each loop is woken once. Decoder thread only."""

    def __init__(self) -> None:
        self.pending: dict[asyncio.AbstractEventLoop, list[tuple[AsyncMailbox, Any]]] = {}

    def add(self, mailbox: AsyncMailbox, item: Any) -> None:
        """Notes an item until ``flush``."""
        self.pending.setdefault(mailbox.loop, []).append((mailbox, item))

    def flush(self) -> list[Request]:
        """Wakes every loop that has items; returns the requests of closed loops, which nobody can read any more."""
        if not self.pending:
            return []
        pending, self.pending = self.pending, {}
        orphans: list[Request] = []
        for loop, items in pending.items():
            try:
                loop.call_soon_threadsafe(_receive, items)
            except RuntimeError:  # the loop is closed
                for mailbox, _ in items:
                    orphans += mailbox.requests
        return orphans


class AsyncMailbox:
    """A mailbox that one asyncio task reads from."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        self.loop = loop
        self.requests: list[Request] = []  # what is answered here
        self._outbox = outbox
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        """Hands an item over with the end of the step. Decoder thread."""
        self._outbox.add(self, item)

    def receive(self, item: Any) -> None:
        """Takes an item on the loop's thread."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """The next item, when there is one."""
        while not self._items:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


def _receive(items: list[tuple[AsyncMailbox, Any]]) -> None:
    for mailbox, item in items:
        mailbox.receive(item)

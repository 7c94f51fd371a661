"""How results reach a caller: a thread is woken by the one before it, asyncio tasks once a step through their loop."""

from __future__ import annotations

from _thread import LockType, allocate_lock
from collections import deque
from contextlib import suppress
from queue import Empty
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from llamapipe.engine.bell import Bell
from llamapipe.engine.request import Request

if TYPE_CHECKING:
    import asyncio  # a third of what importing llamapipe would cost, and not everybody uses it
    from collections.abc import Callable, Sequence

_ONE_BY_ONE_S = 0.001  # thirty-two threads take about a third of it
# A Ctrl-C may interrupt whoever was to wake this one, or come just before Python begins to wait.
_LOOK_AGAIN_S = 1.0


class Mailbox(Protocol):
    """Takes results on the decoder thread."""

    def put(self, item: Any) -> None:
        """Hands over an item; never blocks."""


class Outbox:
    """Whom a step has something for: each event loop is woken once, and waiting threads one after another.

    A thread that is woken needs the interpreter's lock, which the decoder thread still has. Thirty at once queue up for
    it, and each change of hands costs two switches, so each wakes the next one as soon as it has its own item. Where
    that takes long (something else keeps the interpreter busy), all that are left are woken together.

    A loop's bell is rung by the next launch, when the interpreter's lock is free; ``ring_at_launch`` is told which.
    None: a launch does not compute, so there is no reason to wait for it.
    """

    def __init__(self, ring_at_launch: Callable[[Sequence[int]], object] | None = None) -> None:
        self._ring_at_launch = ring_at_launch
        self._bells: dict[asyncio.AbstractEventLoop, Bell] = {}
        self._closed = False
        self._loops: dict[asyncio.AbstractEventLoop, list[tuple[AsyncMailbox, Any]]] = {}
        self._threads: deque[ThreadMailbox] = deque()
        self._together_after = 0.0  # a time of perf_counter
        self.pending = False  # whether something came since ``flush``; decoder thread

    def add(self, mailbox: AsyncMailbox, item: Any) -> None:
        """Notes an item until ``flush``. Decoder thread."""
        self.pending = True
        self._loops.setdefault(mailbox.loop, []).append((mailbox, item))

    def add_thread(self, mailbox: ThreadMailbox) -> None:
        """Notes, until ``flush``, that a mailbox has an item. Decoder thread."""
        self.pending = True
        self._threads.append(mailbox)

    def flush(self, together: bool = False) -> list[Request]:
        """Wakes those who wait, ``together`` where nothing is left to compute meanwhile. Decoder thread.

        Returns the requests of closed loops, which nobody can read any more.
        """
        self.pending = False
        if self._threads:
            self._together_after = 0.0 if together else perf_counter() + _ONE_BY_ONE_S
            self.wake_next()
        orphans = self._hand_over() if self._loops else []
        if not self._bells:
            return orphans
        self._sweep()
        bells = [bell for bell in list(self._bells.values()) if bell.waiting]
        if self._ring_at_launch is not None and not together:
            if bells:
                self._ring_at_launch([bell.fd for bell in bells])
            return orphans
        for bell in bells:
            bell.ring()
        return orphans

    def ring(self) -> None:
        """Wakes the loops that were to be woken by the next launch: it is not that near. Decoder thread."""
        for bell in list(self._bells.values()):
            if bell.waiting:
                bell.ring()

    def _hand_over(self) -> list[Request]:
        """Gives loops what is theirs; returns the requests of closed ones."""
        loops, self._loops = self._loops, {}
        orphans: list[Request] = []
        for loop, items in loops.items():
            bell = self._bells.get(loop)
            try:
                if bell is None:
                    loop.call_soon_threadsafe(_receive, items)
                    continue
                if not loop.is_closed():
                    bell.put(items)
                    continue
            except RuntimeError:  # the loop is closed
                pass
            for mailbox, _ in items:
                orphans += mailbox.requests
        return orphans

    def _sweep(self) -> None:
        """Forgets the bells of closed loops; one that was dropped without ``close`` lives as long as the engine."""
        closed = [loop for loop in list(self._bells) if loop.is_closed()]
        if closed and self._ring_at_launch is not None:
            self._ring_at_launch([])  # their pipes' numbers will be other files'
        for loop in closed:
            self._bells.pop(loop).close()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives a loop a bell, if it can have one. The loop's thread."""
        if loop not in self._bells and not self._closed:
            with suppress(NotImplementedError, OSError, RuntimeError):  # it is woken the usual way, then
                self._bells[loop] = Bell(loop, _receive)
            if self._closed and (bell := self._bells.pop(loop, None)) is not None:  # meanwhile
                bell.dismiss()

    def close(self) -> None:
        """No step will come any more. The decoder thread, at its end."""
        self.flush(together=True)
        self._closed = True
        while self._bells:
            self._bells.popitem()[1].dismiss()

    def wake_next(self) -> None:
        """Wakes the next thread that waits for what came for it. Any thread."""
        threads = self._threads
        together = bool(threads) and perf_counter() > self._together_after
        while threads:
            try:
                woken = threads.popleft().wake()
            except IndexError:  # another thread was quicker
                return
            if woken and not together:
                return


class ThreadMailbox:
    """A mailbox that one thread at a time reads from."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._items: deque[Any] = deque()
        self._sleepers: list[
            LockType
        ] = []  # each is held by who waits for its release; an empty deque takes 600 bytes

    def put(self, item: Any) -> None:
        """Hands an item over; its reader is woken with the end of the step. Decoder thread."""
        self._items.append(item)
        self._outbox.add_thread(self)

    def wake(self) -> bool:
        """Wakes the reader; False when it does not wait. Any thread."""
        try:
            self._sleepers.pop(0).release()
        except IndexError:
            return False
        return True

    def get(self, timeout: float | None = None) -> Any:
        """The next item, when there is one; interruptible by signals. Raises Empty after ``timeout`` seconds."""
        deadline = None if timeout is None else perf_counter() + timeout
        while True:
            with suppress(IndexError):
                return self._items.popleft()
            left_s = _LOOK_AGAIN_S if deadline is None else deadline - perf_counter()
            if left_s <= 0:
                raise Empty
            self._sleep(min(left_s, _LOOK_AGAIN_S))

    def _sleep(self, timeout: float) -> None:
        """Waits until woken, or for so many seconds, or not at all if an item has come meanwhile."""
        lock = allocate_lock()
        lock.acquire()
        try:
            self._sleepers.append(lock)
            if not self._items:  # what comes from here on finds the sleeper
                lock.acquire(timeout=timeout)
        finally:
            with suppress(ValueError):  # woken: it is gone
                self._sleepers.remove(lock)
            self._outbox.wake_next()


class AsyncMailbox:
    """A mailbox that one asyncio task reads from. Made on its loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        self.loop = loop
        self.requests: list[Request] = []  # what is answered here
        self._outbox = outbox
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        outbox.attach(loop)

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

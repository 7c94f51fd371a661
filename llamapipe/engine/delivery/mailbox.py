"""How results reach a caller: threads are woken one after another, asyncio tasks once a step through their loop."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from queue import Empty
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from llamapipe.engine.delivery.loop_waker import LoopWaker
from llamapipe.engine.delivery.wake_queue import LaunchWakeList, Waiter, WakeQueue
from llamapipe.engine.scheduler.request import Request

if TYPE_CHECKING:
    import asyncio  # a third of what importing llamapipe would cost, and not everybody uses it

# A Ctrl-C may interrupt whoever was to wake this one, or come just before the wait, which it does not end then.
_RECHECK_S = 1.0


class Mailbox(Protocol):
    """Takes results on the engine thread."""

    def put(self, item: Any) -> None:
        """Hands over an item; never blocks."""


class ResultDispatcher:
    """Whom a step has something for: each event loop is woken once, and waiting threads one after another.

    All of them need the interpreter's lock, which the engine thread still has when it delivers, so the next launch
    wakes them, where that lock is free: it rings the loops' bells and wakes the first thread. Each thread that waits
    again wakes the next one; where one takes long to come back, those that are left are woken together.

    ``at_launch``: ``wakes`` is given to an executor whose launches compute. Otherwise there is no reason to wait for a
    launch; threads then wake the next one before they turn to their own work.
    """

    def __init__(self, at_launch: bool = False) -> None:
        self._at_launch = at_launch
        self._wakers: dict[asyncio.AbstractEventLoop, LoopWaker] = {}
        self._attached = False  # a loop has come since closed ones were looked for
        self._closed = False
        self._loops: dict[asyncio.AbstractEventLoop, deque[tuple[AsyncMailbox, Any]]] = {}
        self._threads: list[ThreadMailbox] = []
        self._wake_queue = WakeQueue()
        self.wakes = LaunchWakeList(self._wake_queue)
        self.pending = False  # whether something came since ``flush``; engine thread

    def add(self, mailbox: AsyncMailbox, item: Any) -> None:
        """Notes an item until ``flush``. Decoder thread."""
        self.pending = True
        self._loops.setdefault(mailbox.loop, deque()).append((mailbox, item))

    def add_thread(self, mailbox: ThreadMailbox) -> None:
        """Notes, until ``flush``, that a mailbox has an item. Decoder thread."""
        self.pending = True
        self._threads.append(mailbox)

    def flush(self, together: bool = False) -> list[Request]:
        """Wakes those who wait, ``together`` where nothing is left to compute meanwhile. Decoder thread.

        Returns the requests of closed loops, which nobody can read any more.
        """
        self.pending = False
        waiters: list[Waiter] = []
        if self._threads:
            waiters = [mailbox.waiter for mailbox in self._threads if mailbox.waiter is not None]
            self._threads.clear()
        by_list = self._at_launch or together
        if waiters and by_list:
            self.wakes.add(waiters)  # whatever becomes of the loops
        orphans = self._hand_over() if self._loops else []
        if self._attached or orphans or together:
            self._sweep()
        if waiters and not by_list:
            self._wake_queue.add(waiters)
            self._wake_queue.next()
        if together:
            self.wake()
        return orphans

    def wake(self) -> None:
        """Wakes all who were to be woken by the next launch: it is not that near. Decoder thread."""
        files = self.wakes.files
        for waker in list(self._wakers.values()):
            if waker.waiting and waker.fd not in files:  # after an interruption, here or there
                waker.ring()
        self.wakes.now()

    def _hand_over(self) -> list[Request]:
        """Gives loops what is theirs; returns the requests of closed ones."""
        loops, self._loops = self._loops, {}
        orphans: list[Request] = []
        for loop, items in loops.items():
            waker = self._wakers.get(loop)
            try:
                if waker is None:
                    loop.call_soon_threadsafe(_receive, items)
                    continue
                if not loop.is_closed():
                    if waker.put(items):
                        if self._at_launch:
                            self.wakes.add_file(waker.fd)
                        else:
                            waker.ring()
                    continue
            except RuntimeError:  # the loop is closed
                pass
            for mailbox, _ in items:
                orphans += mailbox.requests
        return orphans

    def _sweep(self) -> None:
        """Forgets the bells of closed loops; one that was dropped without ``close`` lives as long as the engine.

        When another loop comes, when a closed one is met, and when there is nothing to do: not once a step.
        """
        self._attached = False
        for loop in [loop for loop in list(self._wakers) if loop.is_closed()]:
            waker = self._wakers.pop(loop)
            self.wakes.remove_file(waker.fd)  # its number will be another file's
            waker.close()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives a loop a waker, if it can have one. The loop's thread."""
        if loop not in self._wakers and not self._closed:
            with suppress(NotImplementedError, OSError, RuntimeError):  # it is woken the usual way, then
                self._wakers[loop] = LoopWaker(loop, _receive)
                self._attached = True
            if self._closed and (waker := self._wakers.pop(loop, None)) is not None:  # meanwhile
                waker.dismiss()

    def close(self) -> None:
        """No step will come any more. The engine thread, at its end."""
        self.flush(together=True)
        self._closed = True
        while self._wakers:
            self._wakers.popitem()[1].dismiss()

    def wait(self, waiter: Waiter, timeout: float) -> None:
        """Passes the turn on and sleeps until woken, so many seconds, or until a signal comes. The waiter's thread."""
        if self._wake_queue.wait(waiter, timeout) and not self._at_launch:
            self._wake_queue.next()

    def waiter(self) -> Waiter:
        """What a thread can wait at."""
        return self._wake_queue.waiter()


class ThreadMailbox:
    """A mailbox that one thread at a time reads from."""

    def __init__(self, dispatcher: ResultDispatcher) -> None:
        self._dispatcher = dispatcher
        self._items: deque[Any] = deque()
        self.waiter: Waiter | None = None  # once somebody waits: many requests only wait for their turn

    def put(self, item: Any) -> None:
        """Hands an item over; its reader is woken with the end of the step. Decoder thread."""
        self._items.append(item)
        self._dispatcher.add_thread(self)

    def get(self, timeout: float | None = None) -> Any:
        """The next item, when there is one; interruptible by signals. Raises Empty after ``timeout`` seconds."""
        items, dispatcher = self._items, self._dispatcher
        deadline = None if timeout is None else perf_counter() + timeout
        while True:
            if items:  # asked first: the exception would cost more than the token
                try:
                    return items.popleft()
                except IndexError:  # another reader, there by mistake, was quicker
                    pass
            left_s = _RECHECK_S
            if deadline is not None:
                left_s = min(deadline - perf_counter(), left_s)
                if left_s <= 0:
                    raise Empty
            if self.waiter is None:
                self.waiter = dispatcher.waiter()  # what came before this had nobody to wake: look again
            else:
                dispatcher.wait(self.waiter, left_s)


class AsyncMailbox:
    """A mailbox that one asyncio task reads from. Made on its loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatcher: ResultDispatcher) -> None:
        self.loop = loop
        self.requests: list[Request] = []  # what is answered here
        self._dispatcher = dispatcher
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        dispatcher.attach(loop)

    def put(self, item: Any) -> None:
        """Hands an item over with the end of the step. Decoder thread."""
        self._dispatcher.add(self, item)

    def receive(self, item: Any) -> None:
        """Takes an item on the loop's thread."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # done: nobody waits any more, or is woken already
            waiter.set_result(None)

    async def get(self) -> Any:
        """The next item, when there is one."""
        items = self._items
        while not items:
            self._waiter = self.loop.create_future()
            await self._waiter
        return items.popleft()


def _receive(items: deque[tuple[AsyncMailbox, Any]]) -> None:
    """Hands out all of them; after Ctrl-C, those that are left."""
    while items:
        mailbox, item = items.popleft()
        mailbox.receive(item)

"""Delivers results to the callers that wait for them.

Open this file when a result comes late, twice or not at all.

The principle: no caller is woken while the engine thread holds the interpreter's lock. A sink (``sinks.py``) puts a
result into a mailbox. The mailbox tells the dispatcher, which notes the waiting callers. The next launch runs native
code without the lock and wakes the callers: it writes one byte into the pipe of each event loop and wakes the first
waiting thread. Each thread wakes the next one when it waits again (``wakers.py``).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from queue import Empty
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.wakers import LaunchWakeList, LoopWaker, Waiter, WakeQueue
from llamapipe.work.long_work import settle

if TYPE_CHECKING:
    import asyncio


# Wait in slices of one second: Ctrl-C may have interrupted the thread that should wake this one, or may have arrived
# just before this thread blocked, in which case it does not interrupt the wait.
_RECHECK_S = 1.0


class Mailbox(Protocol):
    """Accepts results on the engine thread."""

    def put(self, item: object) -> None:
        """Add an item. Never blocks."""


class ThreadMailbox:
    """A mailbox that one thread at a time reads from.

    ``waiter``: is made when a reader first has to wait, because most mailboxes of a list are read without waiting.
    """

    def __init__(self, dispatcher: ResultDispatcher) -> None:
        self._dispatcher = dispatcher
        self._items: deque[object] = deque()
        self.waiter: Waiter | None = None

    def put(self, item: object) -> None:
        """Add an item; its reader is woken at the end of the step. Engine thread."""
        self._items.append(item)
        self._dispatcher.add_thread(self)

    def get(self, deadline: float | None = None) -> Any:
        """Return the next item; signals interrupt waiting. Raises queue.Empty after ``deadline`` (``perf_counter``)."""
        items, dispatcher = self._items, self._dispatcher
        while True:
            if items:  # checked first, because an exception takes longer than delivering a token
                try:
                    return items.popleft()
                except IndexError:  # a second reader, which should not exist, was faster
                    pass
            left_s = _RECHECK_S
            if deadline is not None:
                left_s = min(deadline - perf_counter(), left_s)
                if left_s <= 0:
                    raise Empty
            if self.waiter is None:
                # An item that arrived before this line woke no thread: look again.
                self.waiter = dispatcher.waiter()
            else:
                dispatcher.wait(self.waiter, left_s)


class AsyncMailbox:
    """A mailbox that one asyncio task reads from. Create it on its loop's thread.

    ``requests``: the requests whose results arrive here; they are cancelled if the event loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatcher: ResultDispatcher) -> None:
        self.loop = loop
        self.requests: list[Request] = []
        self._dispatcher = dispatcher
        self._items: deque[object] = deque()
        self._waiter: asyncio.Future[None] | None = None
        dispatcher.attach(loop)

    def put(self, item: object) -> None:
        """Add an item; the event loop gets it at the end of the step. Engine thread."""
        self._dispatcher.add(self, item)

    def receive(self, item: object) -> None:
        """Accept an item. For the loop's thread."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # done: cancelled, or woken already
            try:
                waiter.set_result(None)
            except Exception:  # a signal handler has cancelled it between the two lines
                if not waiter.done():
                    raise

    async def get(self, deadline: float | None = None) -> Any:
        """Wait for the next item. Raises queue.Empty after ``deadline`` (``perf_counter``)."""
        items = self._items
        while not items:
            self._waiter = waiter = self.loop.create_future()
            if deadline is None:
                await waiter
            elif (left_s := deadline - perf_counter()) > 0:
                timer = self.loop.call_later(left_s, settle, waiter, None, None)
                try:
                    await waiter
                finally:
                    timer.cancel()
            else:
                raise Empty
        return items.popleft()


class ResultDispatcher:
    """The callers of one engine that wait for results. Methods are for the engine thread, unless they say otherwise.

    A launch writes a byte to each noted event loop's pipe and wakes the first waiting thread. A thread that waits again
    wakes the next one; if a thread takes long to return, the remaining threads are woken together.

    ``at_launch``: ``wakes`` was given to an executor whose launches compute. Otherwise no launch wakes callers:
    ``flush`` wakes the first thread, and each woken thread wakes the next one before it does its own work.

    ``pending``: items were added since the last ``flush``.
    """

    def __init__(self, at_launch: bool = False) -> None:
        self.pending = False
        self._at_launch = at_launch
        self._wakers: dict[asyncio.AbstractEventLoop, LoopWaker[deque[tuple[AsyncMailbox, object]]]] = {}
        self._attached = False  # an event loop was attached since closed loops were removed
        self._closed = False
        self._loops: dict[asyncio.AbstractEventLoop, deque[tuple[AsyncMailbox, object]]] = {}
        self._threads: list[ThreadMailbox] = []
        self._wake_queue = WakeQueue()
        self.waiter = self._wake_queue.waiter  # makes a new object for a thread to wait on; any thread
        self.wakes = LaunchWakeList(self._wake_queue)

    def add(self, mailbox: AsyncMailbox, item: object) -> None:
        """Note an item for the next ``flush``."""
        self.pending = True
        self._loops.setdefault(mailbox.loop, deque()).append((mailbox, item))

    def add_thread(self, mailbox: ThreadMailbox) -> None:
        """Note for the next ``flush`` that a mailbox has an item."""
        self.pending = True
        self._threads.append(mailbox)

    def flush(self, together: bool = False) -> list[Request]:
        """Wake the noted callers. ``together``: wake all of them now, because no launch follows soon.

        Returns the requests of closed event loops, whose results nothing can read any more.
        """
        self.pending = False
        waiters: list[Waiter] = []
        if self._threads:
            waiters = [mailbox.waiter for mailbox in self._threads if mailbox.waiter is not None]
            self._threads.clear()
        by_list = self._at_launch or together
        if waiters and by_list:
            self.wakes.add(waiters)  # comes first, because an error of an event loop must not lose them
        orphans = self._hand_over() if self._loops else []
        if self._wakers and (self._attached or orphans or together):
            self._remove_closed()
        if waiters and not by_list:
            self._wake_queue.add(waiters)
            self._wake_queue.next()
        if together:
            self.wake()
        return orphans

    def wake(self) -> None:
        """Wake all callers that the next launch was to wake, because no launch will follow soon."""
        if self._wakers:
            files = self.wakes.files
            for waker in list(self._wakers.values()):
                if waker.waiting and waker.fd not in files:  # its byte was lost in an interruption
                    waker.ring()
        self.wakes.now()

    def _hand_over(self) -> list[Request]:
        """Give event loops their items. Return the requests of closed loops."""
        loops, self._loops = self._loops, {}
        orphans: list[Request] = []
        for loop, items in loops.items():
            waker = self._wakers.get(loop)
            try:
                if waker is None:
                    loop.call_soon_threadsafe(receive, items)
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

    def _remove_closed(self) -> None:
        """Close the wakers of closed event loops. A loop dropped without ``close`` lives as long as the engine.

        This runs when a loop was attached, when a closed loop was found, and when the engine is idle, but not in every
        step.
        """
        self._attached = False
        for loop in [loop for loop in list(self._wakers) if loop.is_closed()]:
            waker = self._wakers.pop(loop)
            self.wakes.remove_file(waker.fd)  # its number may soon be another file's
            waker.close()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give an event loop a waker, if it can watch files. For the loop's thread."""
        if loop not in self._wakers and not self._closed:
            # A loop without a waker is woken by call_soon_threadsafe.
            with suppress(NotImplementedError, OSError, RuntimeError):
                self._wakers[loop] = LoopWaker(loop, receive)
                self._attached = True
            if self._closed and (waker := self._wakers.pop(loop, None)) is not None:  # closed meanwhile
                waker.dismiss()

    def close(self) -> None:
        """Wake all callers and detach the event loops. No step may follow."""
        self.flush(together=True)
        self._closed = True
        while self._wakers:
            self._wakers.popitem()[1].dismiss()

    def wait(self, waiter: Waiter, timeout: float) -> None:
        """Wake the next thread, then sleep until woken, until a signal, or for ``timeout`` seconds.

        For the waiting thread.
        """
        if self._wake_queue.wait(waiter, timeout) and not self._at_launch:
            self._wake_queue.next()


def receive(items: deque[tuple[AsyncMailbox, object]]) -> None:
    """Give items to their mailboxes, on the loop's thread. After Ctrl-C, another call continues with the rest."""
    while items:
        mailbox, item = items.popleft()
        mailbox.receive(item)

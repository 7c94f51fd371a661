"""Wakes the callers that a step has results for: event loops once a step, threads one after another.

Every woken thread needs the GIL, which the engine thread still holds while it delivers. So callers are noted here and
woken by the next launch, which runs native code without the GIL.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from llamapipe._engine.request import Request
from llamapipe.engine.delivery.loop_waker import LoopWaker
from llamapipe.engine.delivery.wake_queue import LaunchWakeList, Waiter, WakeQueue

if TYPE_CHECKING:
    import asyncio  # a third of the cost of importing llamapipe, and not every program needs it

    from llamapipe.engine.delivery.mailbox import AsyncMailbox, ThreadMailbox


class ResultDispatcher:
    """The callers of one engine that wait for results. Methods are for the engine thread, unless they say otherwise.

    A launch writes a byte to each noted event loop's pipe and wakes the first waiting thread. A thread that waits again
    wakes the next one; if one takes long to return, those that are left are woken together.

    ``at_launch``: ``wakes`` was given to an executor whose launches compute. Otherwise there is nothing to wait for:
    ``flush`` wakes the first thread, and each woken thread wakes the next one before its own work.

    ``pending``: something was added since the last ``flush``.
    """

    def __init__(self, at_launch: bool = False) -> None:
        self.pending = False
        self._at_launch = at_launch
        self._wakers: dict[asyncio.AbstractEventLoop, LoopWaker[deque[tuple[AsyncMailbox, object]]]] = {}
        self._attached = False  # a loop was attached since closed ones were removed
        self._closed = False
        self._loops: dict[asyncio.AbstractEventLoop, deque[tuple[AsyncMailbox, object]]] = {}
        self._threads: list[ThreadMailbox] = []
        self._wake_queue = WakeQueue()
        self.wakes = LaunchWakeList(self._wake_queue)

    def add(self, mailbox: AsyncMailbox, item: object) -> None:
        """Notes an item until ``flush``."""
        self.pending = True
        self._loops.setdefault(mailbox.loop, deque()).append((mailbox, item))

    def add_thread(self, mailbox: ThreadMailbox) -> None:
        """Notes, until ``flush``, that a mailbox has an item."""
        self.pending = True
        self._threads.append(mailbox)

    def flush(self, together: bool = False) -> list[Request]:
        """Has the noted callers woken; ``together`` wakes them all now, because there is no launch to wait for.

        Returns the requests of closed event loops: nothing can read their results any more.
        """
        self.pending = False
        waiters: list[Waiter] = []
        if self._threads:
            waiters = [mailbox.waiter for mailbox in self._threads if mailbox.waiter is not None]
            self._threads.clear()
        by_list = self._at_launch or together
        if waiters and by_list:
            self.wakes.add(waiters)  # first: an error with an event loop must not lose them
        orphans = self._hand_over() if self._loops else []
        if self._attached or orphans or together:
            self._remove_closed()
        if waiters and not by_list:
            self._wake_queue.add(waiters)
            self._wake_queue.next()
        if together:
            self.wake()
        return orphans

    def wake(self) -> None:
        """Wakes all callers that the next launch was to wake, because it will not happen soon."""
        files = self.wakes.files
        for waker in list(self._wakers.values()):
            if waker.waiting and waker.fd not in files:  # an interruption lost its byte
                waker.ring()
        self.wakes.now()

    def _hand_over(self) -> list[Request]:
        """Gives event loops their items. Returns the requests of closed loops."""
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
        """Closes the wakers of closed event loops. One that is dropped without ``close`` lives as long as the engine.

        Called when a loop was attached, when a closed one was met, and when there is nothing to do: not once a step.
        """
        self._attached = False
        for loop in [loop for loop in list(self._wakers) if loop.is_closed()]:
            waker = self._wakers.pop(loop)
            self.wakes.remove_file(waker.fd)  # its number may soon be another file's
            waker.close()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives an event loop a waker, if it can watch files. The loop's thread."""
        if loop not in self._wakers and not self._closed:
            with suppress(
                NotImplementedError, OSError, RuntimeError
            ):  # then it is woken by call_soon_threadsafe
                self._wakers[loop] = LoopWaker(loop, receive)
                self._attached = True
            if self._closed and (waker := self._wakers.pop(loop, None)) is not None:  # closed meanwhile
                waker.dismiss()

    def close(self) -> None:
        """Wakes all callers. No step follows."""
        self.flush(together=True)
        self._closed = True
        while self._wakers:
            self._wakers.popitem()[1].dismiss()

    def wait(self, waiter: Waiter, timeout: float) -> None:
        """Wakes the next thread, then sleeps until woken, for ``timeout`` seconds, or until a signal. That thread."""
        if self._wake_queue.wait(waiter, timeout) and not self._at_launch:
            self._wake_queue.next()

    def waiter(self) -> Waiter:
        """A new object for a thread to wait on. Any thread."""
        return self._wake_queue.waiter()


def receive(items: deque[tuple[AsyncMailbox, object]]) -> None:
    """Gives items to their mailboxes, on the loop's thread. After Ctrl-C, another call continues with the rest."""
    while items:
        mailbox, item = items.popleft()
        mailbox.receive(item)

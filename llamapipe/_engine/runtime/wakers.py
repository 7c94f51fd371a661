"""Wakes callers without the interpreter's lock: threads in native code, event loops through a pipe.

Open this file to change how a thread sleeps, or how an event loop learns that items wait for it.

The principle: waking callers from Python releases the interpreter's lock for each caller, and the thread that takes the
lock delays the next step. So native code reads the list of callers to wake during a launch (``LaunchWakeList``), and
threads then wake one another in turn (``WakeQueue``). A wake without a waiting thread is kept for the next wait, so no
wake is lost.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llamapipe.native.load import native

if TYPE_CHECKING:
    import asyncio


Waiter = Any  # one thread at a time waits on it; a wake without a waiting thread is kept for the next wait
_PATIENCE_S = 200e-6  # a slower reader stalls the queue; waking and reading a token take 10 to 30 us


class WakeQueue:
    """Wakes waiting threads one after another: each wakes the next one when it waits again. Any thread.

    ``handle``: the queue for native code. The constructor and ``waiter`` raise MemoryError.
    """

    def __init__(self) -> None:
        self._native = module = native()
        self.handle = self._own(
            module.lib.lp_wake_queue_new(int(_PATIENCE_S * 1e9)), module.lib.lp_wake_queue_free
        )

    def waiter(self) -> Waiter:
        """Make an object for a thread to wait on."""
        lib = self._native.lib
        return self._own(lib.lp_waiter_new(), lib.lp_waiter_free)

    def _own(self, handle: Any, free: Any) -> Any:
        if handle == self._native.ffi.NULL:
            raise MemoryError("no memory is left for a thread to wait")
        return self._native.ffi.gc(handle, free)

    def wait(self, waiter: Waiter, timeout: float) -> bool:
        """Wake the next thread and sleep. Return False after ``timeout`` seconds or a signal."""
        woken: bool = self._native.lib.lp_waiter_wait(waiter, self.handle, timeout)
        return woken

    def add(self, waiters: Sequence[Waiter]) -> None:
        """Append waiters to the queue without waking them."""
        if self._native.lib.lp_wake_queue_add(self.handle, waiters, len(waiters)) < 0:
            raise MemoryError("no memory is left for waking threads")

    def next(self) -> None:
        """Wake the next sleeping thread, or all if the last woken thread takes long to wait again."""
        self._native.lib.lp_wake_queue_yield_turn(self.handle)


class LaunchWakeList:
    """Threads and event loops to wake at the next launch. For the thread that launches.

    The list is in memory that native code reads, because a cffi call for each entry would release the GIL each time.
    """

    def __init__(self, wake_queue: WakeQueue) -> None:
        self._native = module = native()
        self._wake_queue = wake_queue
        self._fds = module.ffi.new("int[]", 4)
        self._waiters = module.ffi.new("lp_waiter *[]", 32)
        self._kept: list[Waiter] = []  # keeps the waiters alive: the array has only their addresses
        self.handle = module.ffi.new("lp_wake_list *")
        self.handle.queue = wake_queue.handle
        self.handle.fds, self.handle.waiters = self._fds, self._waiters

    @property
    def files(self) -> list[int]:
        """The descriptors of the pipes that will get a byte."""
        return [self._fds[i] for i in range(self.handle.n_fds)]

    def add_file(self, fd: int) -> None:
        """Add the descriptor of a non-blocking pipe."""
        handle = self.handle
        n = handle.n_fds
        if n == len(self._fds):
            more = self._native.ffi.new("int[]", 2 * n)
            more[0:n] = self._fds
            self._fds = handle.fds = more
        self._fds[n] = fd
        handle.n_fds = n + 1

    def remove_file(self, fd: int) -> None:
        kept = [other for other in self.files if other != fd]
        self._fds[0 : len(kept)] = kept
        self.handle.n_fds = len(kept)

    def add(self, waiters: Sequence[Waiter]) -> None:
        """Add waiters, after those added before."""
        if self.handle.n_waiters == 0:  # a launch has taken the last ones
            self._kept.clear()
        self._kept += waiters
        n = len(self._kept)
        if n > len(self._waiters):
            self._waiters = self.handle.waiters = self._native.ffi.new("lp_waiter *[]", 2 * n)
        self._waiters[0:n] = self._kept
        self.handle.n_waiters = n

    def now(self) -> None:
        """Wake all entries now, and the threads left in the queue."""
        self._native.lib.lp_wake_list_wake_all(self.handle)


T = TypeVar("T")
_MOST_RINGS = 64  # bytes of one read; a larger read uses another allocator, and there are rarely two bytes


class LoopWaker(Generic[T]):
    """The items that wait for one event loop, and the pipe that the loop watches.

    ``call_soon_threadsafe`` releases the GIL to write its byte. The loop's thread would wake immediately and hold the
    GIL while it has work, which would delay the next step.

    Create it on the loop's thread. Raises NotImplementedError if the loop cannot watch files, OSError if there are no
    more file descriptors, RuntimeError if the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], object]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._rung = False  # the pipe must get a byte, or has one that was not read yet
        if sys.platform == "win32":  # event loops on Windows watch no pipes
            raise NotImplementedError
        self._read_end, self.fd = os.pipe()
        self._open = True
        try:
            os.set_blocking(self._read_end, False)
            os.set_blocking(self.fd, False)
            loop.add_reader(self._read_end, self._answer)
        except BaseException:
            with suppress(Exception):  # Ctrl-C may have arrived after the loop began to watch
                loop.remove_reader(self._read_end)
            self.close()
            raise

    @property
    def waiting(self) -> bool:
        """Whether items wait that the loop has not taken. Any thread."""
        return bool(self._items)

    def put(self, item: T) -> bool:
        """Add an item. Return whether the loop's pipe must get a byte.

        The caller writes the byte with ``ring`` or through ``fd``. For the engine thread.
        """
        self._items.append(item)
        if self._rung:  # checked after the append: the answer that resets it takes this item, too
            return False
        self._rung = True
        return True

    def ring(self) -> None:
        """Wake the loop. For the engine thread, and for the loop's own thread if Ctrl-C interrupted it."""
        with suppress(BlockingIOError):  # the pipe is full, so the loop will wake anyway
            os.write(self.fd, b"\0")

    def _answer(self) -> None:
        """Take all items. For the loop's thread."""
        items, take = self._items, self._take
        try:
            try:
                os.read(self._read_end, _MOST_RINGS)
            except BlockingIOError:
                pass
            finally:  # after the read, which takes all bytes; before the items, because an item may arrive now
                self._rung = False
            while items:
                take(items[0])
                items.popleft()
        except BaseException:  # Ctrl-C: if the loop continues, it gets the interrupted item and the rest
            self.ring()
            raise

    def dismiss(self) -> None:
        """Tell the loop to take the remaining items and stop watching the pipe: no item follows. Any thread."""
        try:
            self._loop.call_soon_threadsafe(self._leave)
        except RuntimeError:  # the loop is closed
            self.close()

    def _leave(self) -> None:
        self._answer()
        self._loop.remove_reader(self._read_end)
        self.close()

    def close(self) -> None:
        """Close the pipe, which no loop may be watching. A second call does nothing."""
        if self._open:
            self._open = False
            os.close(self._read_end)
            os.close(self.fd)

    def __del__(self) -> None:
        # The loop ended before ``_leave`` ran. While a loop watches the pipe, the loop keeps this object alive.
        if getattr(self, "_open", False):
            self.close()

"""Threads that wait for results without the GIL, and wake one another: the Python side of ``wake_queue.hpp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamapipe.native.load import native

Waiter = Any  # one thread at a time waits on it; a wake without a waiting thread is kept for the next wait


_PATIENCE_S = 200e-6  # a reader's work for a token and its wake-up take 10 to 30 us


class WakeQueue:
    """Waiting threads that are woken one after another: each wakes the next one when it waits again. Any thread.

    ``handle``: for native code. Raises MemoryError, here and in ``waiter``.
    """

    def __init__(self) -> None:
        self._native = module = native()
        self.handle = self._own(
            module.lib.lp_wake_queue_new(int(_PATIENCE_S * 1e9)), module.lib.lp_wake_queue_free
        )

    def waiter(self) -> Waiter:
        """A new object for a thread to wait on."""
        lib = self._native.lib
        return self._own(lib.lp_waiter_new(), lib.lp_waiter_free)

    def _own(self, handle: Any, free: Any) -> Any:
        if handle == self._native.ffi.NULL:
            raise MemoryError("no memory is left for a thread to wait")
        return self._native.ffi.gc(handle, free)

    def wait(self, waiter: Waiter, timeout: float) -> bool:
        """Wakes the next thread and sleeps. False after ``timeout`` seconds or a signal."""
        woken: bool = self._native.lib.lp_waiter_wait(waiter, self.handle, timeout)
        return woken

    def asleep(self, waiter: Waiter) -> bool:
        """Whether a thread sleeps on it."""
        sleeps: bool = self._native.lib.lp_waiter_asleep(waiter)
        return sleeps

    def add(self, waiters: Sequence[Waiter]) -> None:
        """Appends waiters to the queue, without waking them."""
        if self._native.lib.lp_wake_queue_add(self.handle, waiters, len(waiters)) < 0:
            raise MemoryError("no memory is left for waking threads")

    def next(self) -> None:
        """Wakes the next sleeping thread; all of them if the last one took long to wait again."""
        self._native.lib.lp_wake_queue_yield_turn(self.handle)

    def wake_all_if_stalled(self) -> None:
        """Wakes all threads that are left if the last one took long. CPU launches call this while they compute."""
        self._native.lib.lp_wake_queue_wake_all_if_stalled(self.handle)

    def all(self) -> None:
        """Wakes all threads that are left."""
        self._native.lib.lp_wake_queue_wake_all(self.handle)


class LaunchWakeList:
    """Threads and event loops to wake at the next launch.

    Kept in shared memory that native code reads, because a cffi call for each entry would release the GIL each time.

    For the thread that launches.
    """

    def __init__(self, wake_queue: WakeQueue) -> None:
        self._native = module = native()
        self._wake_queue = wake_queue
        self._fds = module.ffi.new("int[]", 4)
        self._waiters = module.ffi.new("lp_waiter *[]", 32)
        self._kept: list[Waiter] = []  # the array only has their addresses
        self.handle = module.ffi.new("lp_wake_list *")
        self.handle.queue = wake_queue.handle
        self.handle.fds, self.handle.waiters = self._fds, self._waiters

    @property
    def files(self) -> list[int]:
        """The pipes that will get a byte."""
        return [self._fds[i] for i in range(self.handle.n_fds)]

    def add_file(self, fd: int) -> None:
        """Adds a non-blocking pipe."""
        handle = self.handle
        n = handle.n_fds
        if n == len(self._fds):
            more = self._native.ffi.new("int[]", 2 * n)
            more[0:n] = self._fds
            self._fds = handle.fds = more
        self._fds[n] = fd
        handle.n_fds = n + 1

    def remove_file(self, fd: int) -> None:
        """Removes a pipe."""
        kept = [other for other in self.files if other != fd]
        self._fds[0 : len(kept)] = kept
        self.handle.n_fds = len(kept)

    def add(self, waiters: Sequence[Waiter]) -> None:
        """Adds waiters, after those added before."""
        if self.handle.n_waiters == 0:  # a launch has taken the last ones
            self._kept.clear()
        self._kept += waiters
        n = len(self._kept)
        if n > len(self._waiters):
            self._waiters = self.handle.waiters = self._native.ffi.new("lp_waiter *[]", 2 * n)
        self._waiters[0:n] = self._kept
        self.handle.n_waiters = n

    def begin(self) -> None:
        """Does what a launch does first: writes the bytes and wakes the first thread."""
        self._native.lib.lp_wake_list_begin(self.handle)

    def now(self) -> None:
        """Wakes all of them now, and the threads left in the queue."""
        self._native.lib.lp_wake_list_wake_all(self.handle)

"""Wakes an asyncio loop with a byte in a pipe, which can be written where nothing holds the interpreter's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
_MOST_RINGS = 64  # read at once; more would take memory from another allocator, and seldom are there two


class LoopWaker(Generic[T]):
    """The items that wait for one loop, and the pipe that the loop watches.

    ``call_soon_threadsafe`` releases the GIL to write its byte. The loop's thread wakes at once and holds the GIL while
    it has work, and meanwhile the next step is not computed.

    Made on the loop's thread. Raises NotImplementedError where the loop cannot watch files, OSError when there are no
    more, RuntimeError when the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], object]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._rung = False  # a ring is due, or was not answered yet
        self._read_end, self.fd = os.pipe()
        self._open = True
        try:
            os.set_blocking(self._read_end, False)
            os.set_blocking(self.fd, False)
            loop.add_reader(self._read_end, self._answer)
        except BaseException:
            with suppress(Exception):  # Ctrl-C may have come when it was being watched already
                loop.remove_reader(self._read_end)
            self.close()
            raise

    @property
    def waiting(self) -> bool:
        """Whether items wait that the loop has not taken. Any thread."""
        return bool(self._items)

    def put(self, item: T) -> bool:
        """Adds an item. True if the loop's pipe must get a byte, from ``ring`` or through ``fd``. Engine thread."""
        self._items.append(item)
        if self._rung:  # checked after the append: the answer that resets it takes this item, too
            return False
        self._rung = True
        return True

    def ring(self) -> None:
        """Wakes the loop. Engine thread; also the loop's own thread, if Ctrl-C interrupted it."""
        with suppress(BlockingIOError):  # full: it has been woken often enough
            os.write(self.fd, b"\0")

    def _answer(self) -> None:
        """Takes all items. The loop's thread."""
        items, take = self._items, self._take
        try:
            try:
                os.read(self._read_end, _MOST_RINGS)
            except BlockingIOError:
                pass
            finally:  # after the read, which would take the next byte, too; before the items: one may arrive now
                self._rung = False
            while items:
                take(items[0])
                items.popleft()
        except BaseException:  # Ctrl-C: if the loop continues, it gets the rest, and the interrupted item
            self.ring()
            raise

    def dismiss(self) -> None:
        """Has the loop take the rest and stop watching the pipe: no item follows. Any thread."""
        try:
            self._loop.call_soon_threadsafe(self._leave)
        except RuntimeError:  # the loop is closed
            self.close()

    def _leave(self) -> None:
        self._answer()
        self._loop.remove_reader(self._read_end)
        self.close()

    def close(self) -> None:
        """Closes the pipe, which no loop may watch any more. A second call does nothing."""
        if self._open:
            self._open = False
            os.close(self._read_end)
            os.close(self.fd)

    def __del__(self) -> None:
        # A loop that ended before it could leave: a watched pipe is not dropped.
        if getattr(self, "_open", False):
            self.close()

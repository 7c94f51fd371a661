"""The queue of commands for the engine thread.

Open this file to change how other threads reach the engine thread.

The principle: any thread adds function calls, and the engine thread runs them between two steps, in order. To add a
call is one operation of a ``SimpleQueue``, which has no lock that Ctrl-C could leave locked. So a caller may be
interrupted at any point, and the engine thread never waits for a caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from llamapipe._engine.policy.core import Request


class Inbox:
    """A queue of function calls. Any thread adds them, the engine thread runs them; both are safe under Ctrl-C.

    ``single_caller``: callers set it before they submit. It is True if no other thread or task could submit before the
    step, so the engine need not wait for more requests. ``urgent``: requests to cancel before the calls in the queue,
    which also has the calls that cancel them.
    """

    __slots__ = ("_commands", "empty", "single_caller", "urgent")

    def __init__(self) -> None:
        self.single_caller = False
        self.urgent: deque[Request] = deque()
        self._commands: SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = SimpleQueue()
        # This is the queue's own method, because every step calls it several times.
        self.empty = self._commands.empty

    def __repr__(self) -> str:
        return f"<Inbox n={self._commands.qsize()}>"

    def put(self, function: Callable[..., object], *arguments: object) -> None:
        """Add a call. Never blocks."""
        self._commands.put((function, arguments))

    def run_next(self, timeout: float | None = None) -> None:
        """Wait for the next call and run it. Raises queue.Empty after ``timeout`` seconds."""
        # A get() with a timeout of about a microsecond may wait forever (seen in CPython 3.11 and 3.12). An earlier
        # put() has left the queue's lock open, so get() looks twice, and the second time the remaining time is
        # negative, which means no limit. A get() that does not wait closes the lock.
        try:
            function, arguments = self._commands.get_nowait()
        except Empty:
            function, arguments = self._commands.get(timeout=timeout)
        function(*arguments)

    def qsize(self) -> int:
        return self._commands.qsize()

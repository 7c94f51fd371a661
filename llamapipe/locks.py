"""Provides a lock that Ctrl-C cannot leave held, and guards against concurrent calls."""

from __future__ import annotations

import _thread
import queue


def check_threads() -> None:
    """Raise RuntimeError if gevent or eventlet has replaced threads: llamapipe's could not run while a caller waits.

    Callers wait in native code, which lets other threads run, but not other greenlets.
    """
    for primitive in (_thread.start_new_thread, queue.SimpleQueue):
        library = str(getattr(primitive, "__module__", "")).partition(".")[0]
        if library in _REMEDIES:
            raise RuntimeError(
                f"{library} has replaced threads or queues by greenlets, for which the engine's thread cannot work: "
                f"use {_REMEDIES[library]}, before llamapipe is imported"
            )


_REMEDIES = {
    "gevent": "gevent.monkey.patch_all(thread=False, queue=False)",
    "eventlet": "eventlet.monkey_patch(thread=False)",
}


class Lock(_thread.RLock):  # type: ignore[misc]  # final for type checkers only
    """A reentrant lock for ``with`` that an interrupted thread never keeps.

    From CPython 3.14 on, an exception of a signal handler may be raised between the call of ``__enter__`` and the body
    of ``with``. A lock of ``threading`` is then never released, and other threads wait forever. Here the exception is
    raised inside ``__enter__``, which releases the lock. The interpreter handles no signals between the ``return`` of a
    Python function and the next statement, nor before ``__exit__``, which is C.
    """

    __slots__ = ()

    def __enter__(self) -> bool:  # type: ignore[override]  # without arguments
        try:
            return self.acquire()  # in one line, because tracers may raise between lines
        except BaseException:
            try:  # noqa: SIM105  # calls of suppress() may be interrupted
                self.release()
            except RuntimeError:  # the wait was interrupted: the lock is not held
                pass
            raise


class OneCall(Lock):  # type: ignore[misc]  # as above
    """Guards the methods of an object for one thread, with ``with``: a concurrent call raises instead of waiting.

    ``what`` names the object in the message of the RuntimeError. The second call may come from another thread, or from
    a signal handler of the same thread.
    """

    __slots__ = ("_what",)

    def __new__(cls, what: str) -> OneCall:  # noqa: ARG004
        """Create the lock without ``what``: an RLock takes no arguments."""
        return super().__new__(cls)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> bool:  # type: ignore[override]  # without arguments
        try:
            free = not self._is_owned() and self.acquire(False)  # type: ignore[attr-defined]
        except BaseException:
            try:  # noqa: SIM105  # as above
                self.release()
            except RuntimeError:
                pass
            raise
        if not free:
            raise RuntimeError(_IN_USE.format(self._what, "thread"))
        return True


class OneTask:
    """Guards the coroutines of an object for one task, as ``OneCall`` does for threads. For one event loop."""

    __slots__ = ("_running", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._running = False

    def __enter__(self) -> None:
        if self._running:
            raise RuntimeError(_IN_USE.format(self._what, "task"))
        self._running = True

    def __exit__(self, *_: object) -> None:
        self._running = False


_IN_USE = (
    "another call of this {0} is running; a {0} is for one {1} at a time: give each its own, or make one call after "
    "the other"
)

"""The lock that all modules use. Ctrl-C does not leave it locked."""

from __future__ import annotations

import _thread


class Lock(_thread.RLock):  # type: ignore[misc]  # final for type checkers only
    """A reentrant lock for ``with``, which an interrupted thread does not keep.

    From CPython 3.14 on, an exception of a signal handler may be raised between the call of ``__enter__`` and the body
    of ``with``. A lock of ``threading`` is then never released, and other threads wait for ever. Here the exception is
    raised inside ``__enter__``, which releases the lock. The interpreter handles no signals between the ``return`` of a
    Python function and the next statement, nor before ``__exit__``, which is C.
    """

    __slots__ = ()

    def __enter__(self) -> bool:  # type: ignore[override]  # without arguments
        try:
            return self.acquire()  # in one line, as tracers may raise between lines
        except BaseException:
            try:  # noqa: SIM105  # calls of suppress() may be interrupted
                self.release()
            except RuntimeError:  # interrupted while it waited
                pass
            raise

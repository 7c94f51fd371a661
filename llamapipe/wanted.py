"""Stops work whose result nobody needs: the deadline has passed, the client has left, or the engine closes.

Call ``check_wanted`` during long work, wherever it can stop: between two images, or two pieces of a file. The limits
are in a context variable: functions in between need not pass them on, and threads that run in a copy of the context
inherit them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from time import perf_counter
from typing import NamedTuple


class Limit(NamedTuple):
    """``check`` raises once the work is no longer wanted.

    ``deadline``: when it will raise, in ``perf_counter`` seconds.
    """

    check: Callable[[], object]
    deadline: float | None = None


_limits: ContextVar[tuple[Limit, ...]] = ContextVar("limits", default=())


def check_wanted() -> None:
    """Check all limits of this context. Raises TimeoutError, CancelledError or EngineClosedError."""
    for limit in _limits.get():
        limit.check()


def deadline() -> float | None:
    """Return the earliest deadline of this context, in ``perf_counter`` seconds; None if there is none."""
    return min((limit.deadline for limit in _limits.get() if limit.deadline is not None), default=None)


class limited:  # noqa: N801 - used like a function
    """A context manager that adds a limit to the work inside."""

    __slots__ = ("_limit", "_token")

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._token: Token[tuple[Limit, ...]] | None = None

    def __enter__(self) -> None:
        self._token = _limits.set((*_limits.get(), self._limit))

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _limits.reset(self._token)


def time_limit(seconds: float | None) -> limited:
    """Make a limit for ``with``: long work inside it ends with TimeoutError after this time; None: no limit."""
    if seconds is None:
        return limited(Limit(lambda: None))
    end = perf_counter() + seconds

    def check() -> None:
        if perf_counter() >= end:
            raise TimeoutError(f"not finished within {seconds:g} seconds")

    return limited(Limit(check, end))

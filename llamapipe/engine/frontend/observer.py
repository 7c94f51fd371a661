"""What may watch requests: told on the callers' threads of a request's submission and of its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llamapipe.engine.scheduler.request import Request


class ObservedRequest(Protocol):
    """One prompt that was submitted."""

    def end(self, error: BaseException | None = None, timed_out: bool = False) -> None:
        """The caller has the result, or the error, or has given up. Called once, by the thread that has it."""

    def drop(self) -> None:
        """The caller has lost its stream. Called by a destructor: takes no lock."""


class RequestObserver(Protocol):
    """Sees every prompt of the calls of an engine. Any thread."""

    def begin(self, requests: Sequence[Request], operation: str) -> ObservedRequest:
        """The requests of one prompt, before they are submitted; it may replace their sinks."""

    def close(self) -> None:
        """The engine was closed."""

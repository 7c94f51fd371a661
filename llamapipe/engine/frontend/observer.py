"""Interfaces for observers of requests. Callers' threads notify them of each submission and each end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llamapipe._engine.request import Request


class ObservedRequest(Protocol):
    """One prompt that was submitted."""

    def end(self, error: BaseException | None = None, timed_out: bool = False) -> None:
        """The caller has the result or the error, or has given up. Called once, by the caller's thread."""

    def drop(self) -> None:
        """The caller dropped its stream. Called by a destructor, so it must not take a lock."""


class RequestObserver(Protocol):
    """Observes every prompt that is submitted to an engine. Any thread."""

    def begin(self, requests: Sequence[Request], operation: str) -> ObservedRequest:
        """Called with the requests of one prompt before they are submitted. It may replace their sinks."""

    def close(self) -> None:
        """The engine was closed."""

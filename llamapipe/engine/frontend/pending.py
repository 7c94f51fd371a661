"""The requests of one call until their results have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from llamapipe._engine.request import Request
from llamapipe.engine.delivery.sink import Failure
from llamapipe.engine.frontend.call_options import CallOptions
from llamapipe.engine.frontend.observer import ObservedRequest, RequestObserver
from llamapipe.engine.frontend.request_builder import Groups, named
from llamapipe.engine.results import Completion
from llamapipe.errors import EngineClosedError, QueueFullError
from llamapipe.locks import Lock

T = TypeVar("T")


class Pending(Generic[T]):
    """The requests of one call that have no result yet. One thread or task."""

    def __init__(self, options: CallOptions) -> None:
        self.options = options
        self.observer: RequestObserver | None = None
        self._observed: dict[int, ObservedRequest] = {}
        self.groups: dict[int, Sequence[Request]] = {}
        self.unsubmitted: deque[Request] = deque()
        self.ready: deque[tuple[int, T | Exception]] = deque()  # results that need no request
        self.timed_out = False
        # Of a long list. The thread that closes the engine submits the rest of it.
        self.lock = Lock()
        self.is_long = False
        self.is_making = False
        self.is_broken = False  # closing was interrupted meanwhile: results will be missing
        self.has_ended = False

    def add(self, groups: Groups) -> None:
        """Requests that are to be submitted."""
        self.groups.update(groups)
        for index, requests in groups.items():
            self.unsubmitted += requests
            if self.observer is not None:
                self._observed[index] = self.observer.begin(requests, self.options.operation)

    @property
    def requests(self) -> list[Request]:
        """All requests without a result."""
        return [request for requests in list(self.groups.values()) for request in requests]

    def read(self, item: tuple[int, Any]) -> tuple[int, T | Exception, Sequence[Request]]:
        """The index and result in a mailbox item, and the requests to cancel because one of their group failed.

        Raises the error of a failed request if the call's options say so.
        """
        index, result = item
        requests = self.groups[index]
        if self._observed:
            error = result.error if isinstance(result, Failure) else None
            self._observed.pop(index).end(error, timed_out=self.timed_out)
        if isinstance(result, Failure):
            result = named(result.error, index) if self.options.names_prompts else result.error
            if self.options.on_error == "raise" or not isinstance(result, Exception):
                raise result
        else:
            requests = ()
            if self.timed_out and isinstance(result, Completion):
                result = _timed_out(result)
        return index, result, requests

    def give_up(self, error: BaseException | None) -> None:
        """Reports the end of all groups that have no result to the observer; ``error``: the reason, if there is one."""
        if not isinstance(error, (TimeoutError, QueueFullError, EngineClosedError)):
            error = None  # Ctrl-C, or the error of another request
        while self._observed:
            self._observed.popitem()[1].end(error)


def _timed_out(completion: Completion) -> Completion:
    if all(choice.finish_reason != "cancelled" for choice in completion.choices):
        return completion
    return replace(
        completion,
        choices=tuple(
            replace(choice, finish_reason="timeout") if choice.finish_reason == "cancelled" else choice
            for choice in completion.choices
        ),
    )

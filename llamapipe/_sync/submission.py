"""Submitting for threads. Made by ``tools/unasync.py`` from ``_engine/calls/submission.py``: edit that file."""

from __future__ import annotations

from collections import deque
from collections.abc import (
    Iterator,
)
from queue import Empty
from typing import Any

from llamapipe._engine.calls.call_options import CallOptions, ExpiredError
from llamapipe._engine.calls.prompts import RequestFactory
from llamapipe._engine.calls.submission import (
    _N_AHEAD,
    Pending,
    Submission,
)
from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.mailboxes import ThreadMailbox
from llamapipe.work.progress import Progress


class BlockingSubmission(Submission):
    """``Submission`` with its calls for threads."""

    def submit(self, *requests: Request, block: bool = True, deadline: float | None = None) -> None:
        """Wait for room in the queue and submit. Any error, Ctrl-C and cancelling the task cancel all requests.

        Raises QueueFullError, TimeoutError, EngineClosedError.
        """
        try:
            self._engine_thread.note_waiting_thread()
            for request in self._entering(deque(requests), block):
                self._queue.enter(request, deadline)
        except BaseException:
            self.cancel(requests)
            raise

    def collect(
        self, batches: Iterator[RequestFactory], options: CallOptions, bar: Progress | None = None
    ) -> dict[int, Any]:
        """Return the results of the requests of all batches, by index. Long lists are submitted in portions.

        Any error, Ctrl-C and cancelling the task cancel all requests. Raises the error of a request, TimeoutError,
        QueueFullError, EngineClosedError.
        """
        pending = Pending[Any](options, self.observer, bar)
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        results: dict[int, Any] = {}
        try:
            batches = self._portions(batches, mailbox, pending)
            exhausted = False
            while True:
                try:
                    while not exhausted and len(pending.groups) < _N_AHEAD:
                        self._engine_thread.note_waiting_thread()
                        if not self._make_next(batches, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                self._queue.enter(request, options.deadline)
                    if not pending.groups:
                        return results
                    # Requests that are cancelled at the deadline arrive within a step.
                    item = mailbox.get(None if pending.timed_out else options.deadline)
                except Empty:
                    self._stop(pending, options.expired_error())
                except ExpiredError as expired:
                    self._stop(pending, expired)
                else:
                    index, results[index] = self._read(item, pending)
        finally:
            self._end(pending)

"""Reads records in a thread: answers do not wait for a pipe that brings the next record later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

from llamapipe.jobs.records import Record


class SlowRecords:
    """Reads one record ahead in a daemon thread, which may still wait for the pipe when the program ends."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._asked: SimpleQueue[Future[Record | None]] = SimpleQueue()
        threading.Thread(target=self._run, name="llamapipe-records", daemon=True).start()

    def ask(self) -> Future[Record | None]:
        """The next record; None at the end."""
        future: Future[Record | None] = Future()
        self._asked.put(future)
        return future

    def _run(self) -> None:
        while True:
            future = self._asked.get()
            try:
                future.set_result(next(self._records, None))
            except BaseException as error:
                future.set_exception(error)

"""Runs a job with a bounded number of records in flight. Results come as they are done, or in order.

Two threads help the caller's: one runs an event loop, which answers records; the other, for a pipe, reads records, so
that answers do not wait for a slow one.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

from llamapipe.jobs.answers import Answerer, RecordResult
from llamapipe.jobs.records import Record
from llamapipe.jobs.results import ResultFile

T = TypeVar("T")


class EventLoopThread:
    """A thread that runs an event loop until the ``with`` block ends, and then cancels the loop's tasks.

    asyncio is imported only when a thread is created, because that takes a third of the time of importing llamapipe.
    """

    def __init__(self) -> None:
        import asyncio

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="llamapipe-batch", daemon=True)

    def __enter__(self) -> EventLoopThread:
        self._thread.start()
        return self

    def start(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine in the loop as a task. Return a future of its result. Any thread."""
        import asyncio

        future: Future[T] = Future()

        async def run() -> None:
            try:
                future.set_result(await coroutine)
            except asyncio.CancelledError:
                future.cancel()
            except BaseException as e:  # SystemExit would end the loop, and its caller wait forever
                future.set_exception(e)

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_others())
        finally:
            self._loop.close()


async def _cancel_others() -> None:
    import asyncio

    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class SlowRecords:
    """Reads one record ahead in a daemon thread, which may still be waiting for a pipe when the program ends."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._asked: SimpleQueue[Future[Record | None]] = SimpleQueue()
        threading.Thread(target=self._run, name="llamapipe-records", daemon=True).start()

    def ask(self) -> Future[Record | None]:
        """Ask for the next record. Return a future of it, with None after the last record."""
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


_NUMBER = re.compile(r"\d+")
_MOST_REASONS = 20
_OTHERS = "other reasons"


class _Reasons(Counter[str]):
    """A Counter that ``dataclasses.asdict`` can copy. A plain Counter counts the pairs that ``asdict`` passes to it."""

    def __init__(self, counts: Iterable[tuple[str, int]] | Mapping[str, int] = ()) -> None:
        super().__init__(dict(counts))


@dataclass
class BatchSummary:
    """A job's counts since its start.

    - ``n_done``: records answered, ``n_failed`` of them with an error.
    - ``n_skipped``: records that already had results, ``n_skipped_failed`` of them with an error.
    - ``n_cut``: answered records whose text was cut by ``max_tokens`` or the context; JSON in it is incomplete.
    - ``n_tokens``: generated tokens.
    - ``reasons``: why records failed, with counts; messages that differ only in numbers count as one. After 20 of them,
      the rest count as ``"other reasons"``.
    """

    n_done: int = 0
    n_failed: int = 0
    n_skipped: int = 0
    n_skipped_failed: int = 0
    n_tokens: int = 0
    n_cut: int = 0
    reasons: Counter[str] = field(default_factory=_Reasons)

    def __post_init__(self) -> None:
        self._kinds: dict[str, str] = {}

    def _add(self, answer: RecordResult) -> None:
        self.n_done += 1
        self.n_failed += answer.failed
        self.n_tokens += answer.n_tokens
        self.n_cut += _was_cut(answer.result)
        if answer.failed:
            reason = answer.reason
            kind = _NUMBER.sub("0", reason)
            if kind in self._kinds or len(self._kinds) < _MOST_REASONS:
                self.reasons[self._kinds.setdefault(kind, reason)] += 1
            else:
                self.reasons[_OTHERS] += 1


def answers(
    records: Iterable[Record], answerer: Answerer, *, n_ahead: int, ordered: bool = True, slow: bool = False
) -> Iterator[tuple[Record, RecordResult]]:
    """Yield each record with its answer. At most ``n_ahead`` records are in flight, or answered and not yet taken.

    ``records`` are read in the caller's thread and answered in another thread's event loop. ``slow``: the next record
    may take long to arrive, so a separate thread reads it while answers are taken. ``ordered``: answers come in the
    order of the records; otherwise as they are done. Closing the iterator cancels requests in flight. Raises what
    reading a record raises, EngineClosedError, and BackendError if the engine has failed.
    """
    left = iter(records)
    reader = SlowRecords(left) if slow else None
    in_flight: dict[Future[RecordResult], Record] = {}  # in the order of the records
    queue: SimpleQueue[Future[RecordResult]] = SimpleQueue()
    pending_record: Future[Record | None] | None = None
    more = True
    with EventLoopThread() as event_loop:
        while True:
            while more and len(in_flight) < n_ahead:
                if reader is not None:
                    pending_record = pending_record or reader.ask()
                    futures: list[Future[Any]] = [pending_record, *islice(in_flight, 1 if ordered else None)]
                    wait(futures, return_when=FIRST_COMPLETED)
                    if not pending_record.done():
                        break
                    record, pending_record = pending_record.result(), None
                else:
                    record = next(left, None)
                if record is None:
                    more = False
                else:
                    future = event_loop.start(answerer.answer(record))
                    in_flight[future] = record
                    if not ordered:
                        future.add_done_callback(queue.put)
            if not in_flight:
                return
            future = next(iter(in_flight)) if ordered else queue.get()
            answer = future.result()
            yield in_flight.pop(future), answer


def run_job(
    records: Iterable[Record],
    answerer: Answerer,
    results: ResultFile,
    *,
    n_ahead: int,
    ordered: bool = True,
    slow: bool = False,
    on_progress: Callable[[BatchSummary], object] | None = None,
) -> BatchSummary:
    """Answer all records that ``results`` lacks, and write their results. Options are as for ``answers``.

    ``on_progress``: called in the caller's thread after each result. Raises what reading records and writing results
    raise, EngineClosedError, and BackendError if the engine has failed; results already written stay.
    """
    summary = BatchSummary()
    for record, answer in answers(
        _remaining(records, results, summary), answerer, n_ahead=n_ahead, ordered=ordered, slow=slow
    ):
        results.write(record.index, record.digest, answer.result)
        summary._add(answer)
        if on_progress is not None:
            on_progress(summary)
    return summary


def _was_cut(result: Mapping[str, Any]) -> bool:
    """Return whether a result, in our format or OpenAI's, was cut at its maximum length."""
    response = result.get("response")
    body = response.get("body") if isinstance(response, Mapping) else None
    choices = body.get("choices") if isinstance(body, Mapping) else None
    results = choices if isinstance(choices, list) else [result]
    return any(isinstance(choice, Mapping) and choice.get("finish_reason") == "length" for choice in results)


def _remaining(records: Iterable[Record], results: ResultFile, summary: BatchSummary) -> Iterator[Record]:
    for record in records:
        if results.has(record.index, record.digest):
            summary.n_skipped += 1
            summary.n_skipped_failed += results.has_failed(record.index)
        else:
            yield record

"""Runs a job: a bounded number of records is in flight, and results come as they are done, or in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from llamapipe.jobs.answers import Answer, Answerer
from llamapipe.jobs.records import Record
from llamapipe.jobs.results import ResultFile


@dataclass
class BatchSummary:
    """What a job has done since it was started; ``n_skipped`` records were in the results already."""

    n_done: int = 0
    n_failed: int = 0
    n_skipped: int = 0
    n_tokens: int = 0


def answers(
    records: Iterable[Record], answerer: Answerer, *, n_ahead: int, ordered: bool = True
) -> Iterator[tuple[Record, Answer]]:
    """Each record with its answer, while at most ``n_ahead`` are in flight or done and not yet taken.

    ``records`` are read in the caller's thread, answered in an event loop of another thread. ``ordered``: answers come
    in the order of the records. Closing the iterator cancels what is in flight. Raises what reading a record raises,
    and EngineClosedError.
    """
    left = iter(records)
    in_flight: dict[Future[Answer], Record] = {}  # in the order of the records
    done: SimpleQueue[Future[Answer]] = SimpleQueue()
    more = True
    with _EventLoopThread() as loop:
        while True:
            while more and len(in_flight) < n_ahead:
                record = next(left, None)
                if record is None:
                    more = False
                else:
                    future = asyncio.run_coroutine_threadsafe(answerer.answer(record), loop)
                    in_flight[future] = record
                    if not ordered:
                        future.add_done_callback(done.put)
            if not in_flight:
                return
            future = next(iter(in_flight)) if ordered else done.get()
            answer = future.result()
            yield in_flight.pop(future), answer


def run_job(
    records: Iterable[Record],
    answerer: Answerer,
    results: ResultFile,
    *,
    n_ahead: int,
    ordered: bool = True,
    on_progress: Callable[[BatchSummary], object] | None = None,
) -> BatchSummary:
    """Answers all records that ``results`` lacks, and writes their results.

    Raises what reading records and writing results raise, and EngineClosedError; the results that were written stay.
    """
    summary = BatchSummary()
    for record, answer in answers(
        _left(records, results, summary), answerer, n_ahead=n_ahead, ordered=ordered
    ):
        results.write(record.index, record.id, answer.result)
        summary.n_done += 1
        summary.n_failed += answer.failed
        summary.n_tokens += answer.n_tokens
        if on_progress is not None:
            on_progress(summary)
    return summary


def _left(records: Iterable[Record], results: ResultFile, summary: BatchSummary) -> Iterator[Record]:
    for record in records:
        if results.has(record.index, record.id):
            summary.n_skipped += 1
        else:
            yield record


class _EventLoopThread:
    """A thread that runs an event loop until the block ends; then what runs in it is cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="llamapipe-batch", daemon=True)

    def __enter__(self) -> asyncio.AbstractEventLoop:
        self._thread.start()
        return self._loop

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
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Runs a job: keeps a bounded number of records in flight and writes results as they come, or in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from llamapipe.jobs.answers import Answerer
from llamapipe.jobs.records import Record
from llamapipe.jobs.results import ResultFile


@dataclass
class Progress:
    """What a job has done since it was started; ``n_skipped`` records were in the results already."""

    n_done: int = 0
    n_failed: int = 0
    n_skipped: int = 0
    n_tokens: int = 0


async def run_job(
    records: Iterable[Record],
    answerer: Answerer,
    results: ResultFile,
    *,
    n_ahead: int,
    ordered: bool = True,
    on_progress: Callable[[Progress], object] | None = None,
) -> Progress:
    """Answers all records that ``results`` lacks, at most ``n_ahead`` at a time.

    ``ordered``: results are written in the order of the records; a slow one then keeps those after it in memory, up to
    ``n_ahead``. Raises what reading records and writing results raise; the records that were written stay.
    """
    progress = Progress()
    left = _left(records, results, progress)
    tasks: dict[asyncio.Task[tuple[dict[str, Any], int, bool]], Record] = {}  # in the order of the records

    def write(task: asyncio.Task[tuple[dict[str, Any], int, bool]]) -> None:
        record = tasks.pop(task)
        result, n_tokens, failed = task.result()
        results.write(record.index, record.id, result)
        progress.n_done += 1
        progress.n_failed += failed
        progress.n_tokens += n_tokens
        if on_progress is not None:
            on_progress(progress)

    try:
        more = True
        while more or tasks:
            while more and len(tasks) < n_ahead:
                record = next(left, None)
                if record is None:
                    more = False
                else:
                    tasks[asyncio.create_task(answerer.answer(record))] = record
            if not tasks:
                break
            waited = [next(iter(tasks))] if ordered else list(tasks)
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            # In order: all that are done up to the first that is not.
            for task in list(tasks):
                if task.done():
                    write(task)
                elif ordered:
                    break
            del done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return progress


def _left(records: Iterable[Record], results: ResultFile, progress: Progress) -> Iterator[Record]:
    for record in records:
        if results.has(record.index, record.id):
            progress.n_skipped += 1
        else:
            yield record

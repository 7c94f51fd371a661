"""Defines ``llamapipe.run_batch``, which runs a job over any iterable or over a file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from typing import TypedDict, cast, overload

from llamapipe._messages import explains_options
from llamapipe.arguments import check_flag, from_column, path_of
from llamapipe.engine import Engine
from llamapipe.jobs.answers import Answerer
from llamapipe.jobs.records import Record, check_columns, count_records, read_records, records_of
from llamapipe.jobs.results import lines_of, open_output
from llamapipe.jobs.run import BatchSummary, answers, run_job
from llamapipe.params import SamplingParams
from llamapipe.work.progress import progress_bar

# Records in flight for each slot: enough that no slot waits for a record while results are taken.
AHEAD = 4


class BatchResult(TypedDict, total=False):
    """The result of one record.

    The mapping has ``error`` if the record failed, else ``text`` (``texts`` if ``n`` is above 1).
    """

    index: int
    id: object
    custom_id: object
    text: str
    texts: list[str]
    reasoning: str
    tool_calls: list[dict[str, object]]
    logprobs: list[dict[str, object]]
    finish_reason: str
    seed: int
    n_prompt_tokens: int
    n_completion_tokens: int
    error: dict[str, str]


BatchRecord = str | list[int] | Mapping[str, object]


@overload
def run_batch(
    records: Iterable[BatchRecord] | os.PathLike[str],
    engine: Engine,
    params: SamplingParams | None = None,
    *,
    output: None = None,
    template: str | None = None,
    system: str | None = None,
    chat: bool = False,
    keep: Collection[str] = (),
    ordered: bool = True,
    retry_failed: bool = False,
    progress: bool = False,
    media_path: str | os.PathLike[str] | None = None,
) -> Iterator[BatchResult]: ...
@overload
def run_batch(
    records: Iterable[BatchRecord] | os.PathLike[str],
    engine: Engine,
    params: SamplingParams | None = None,
    *,
    output: str | os.PathLike[str],
    template: str | None = None,
    system: str | None = None,
    chat: bool = False,
    keep: Collection[str] = (),
    ordered: bool = True,
    retry_failed: bool = False,
    progress: bool = False,
    media_path: str | os.PathLike[str] | None = None,
) -> BatchSummary: ...
@explains_options()
def run_batch(
    records: Iterable[BatchRecord] | os.PathLike[str],
    engine: Engine,
    params: SamplingParams | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    template: str | None = None,
    system: str | None = None,
    chat: bool = False,
    keep: Collection[str] = (),
    ordered: bool = True,
    retry_failed: bool = False,
    progress: bool = False,
    media_path: str | os.PathLike[str] | None = None,
) -> Iterator[BatchResult] | BatchSummary:
    """Answer every record, many at a time. Use it for jobs that are too large for a list of prompts.

    ``records``: texts, lists of token ids, mappings such as ``{"prompt": ..., "max_tokens": 8}`` or ``{"messages":
    ...}``; or the ``Path`` of a .jsonl, .csv or .parquet file. Records are read as needed, in the calling thread.
    ``template``: makes the prompt from a mapping's values, such as ``"Translate: {text}"``. ``system``: a system
    message that begins each conversation. ``chat``: prompts are user messages. ``keep``: names of columns to copy to
    the result. A record that fails gives a result with ``error``. ``media_path``: the folder with the images and sounds
    that messages may name by path; None: the folder of ``records`` if that is a file, else no folder.

    Without ``output``, the function returns an iterator of results, in the order of the records, or in the order in
    which they are done if not ``ordered``. At most four records for each of the engine's slots are in flight or wait to
    be taken. Closing the iterator cancels these records.

    With ``output``, the function runs the job to its end, writes .jsonl, .csv or .parquet, and returns the counts. The
    same call continues a job that was stopped; every record is written once. ``retry_failed``: answer records again
    whose results in a .jsonl file have an error.

    Blocks the calling thread; several jobs may share an engine. Raises ValueError and TypeError for wrong arguments,
    OSError, ImportError if the format needs an extra, EngineClosedError, BackendError if the engine has failed.
    """
    if isinstance(records, (str, bytes, Mapping)):
        raise TypeError(
            f"records is one {type(records).__name__}; give a list of records, or the Path of a file"
        )
    records = from_column("records", records)
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an Engine, not {type(engine).__name__}")
    folder = None if media_path is None else path_of(media_path)
    if folder is None and isinstance(records, os.PathLike):
        folder = path_of(records).parent
    params = SamplingParams() if params is None else params
    answerer = Answerer(engine, params, template, system, chat, keep, media_path=folder)
    output = None if output is None else path_of(output)
    for name, flag in (("ordered", ordered), ("retry_failed", retry_failed), ("progress", progress)):
        check_flag(name, flag)
    if retry_failed and output is None:
        raise ValueError("retry_failed needs output: without it no results are kept")
    if retry_failed and lines_of(output) != output:  # type: ignore[arg-type]  # checked above
        raise ValueError("retry_failed needs an output that ends with .jsonl")
    if isinstance(records, os.PathLike):
        path = path_of(records)
        if output is not None and output.exists() and path.exists() and path.samefile(output):
            raise ValueError(f"records and output are the same file, {path}")
        check_columns(path, [*answerer.columns])
        source, total = read_records(path), count_records(path) if progress else None
    else:
        source, total = records_of(records), len(records) if isinstance(records, Sized) else None
    bar = progress_bar(total) if progress else None
    n_ahead = AHEAD * engine.n_seq_max
    if output is None:

        def results() -> Iterator[BatchResult]:
            try:
                for _, answer in answers(source, answerer, n_ahead=n_ahead, ordered=ordered):
                    if bar is not None:
                        bar.update()
                    yield cast(BatchResult, answer.result)
            finally:
                if bar is not None:
                    bar.close()

        return results()

    def counted() -> Iterator[Record]:
        for record in source:
            yield record
            if bar is not None:
                bar.update()

    try:
        with open_output(output) as file:
            file.begin(answerer.settings(), retry_failed=retry_failed)
            return run_job(counted(), answerer, file, n_ahead=n_ahead, ordered=ordered)
    finally:
        if bar is not None:
            bar.close()

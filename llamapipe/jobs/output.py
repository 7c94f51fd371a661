"""Where results go: JSON lines, or a table that is made from them at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamapipe.jobs import tables
from llamapipe.jobs.records import STDIN, format_of
from llamapipe.jobs.results import ResultFile


def lines_of(path: Path) -> Path:
    """The file of JSON lines that holds the results of ``path`` while the job runs. Raises ValueError."""
    if path == STDIN or path.suffix.lower() == ".gz":
        raise ValueError(f"the output is {path}; its name must end with .jsonl, .csv or .parquet")
    return path if format_of(path) == "jsonl" else path.with_name(path.name + ".jsonl")


def is_complete(path: Path) -> bool:
    """Whether ``path`` is a table that a job has finished."""
    return path.exists() and lines_of(path) != path


@contextmanager
def open_output(path: Path, *, overwrite: bool = False) -> Iterator[ResultFile]:
    """Opens the results for ``path``, for ``begin``; when the block ends without an exception, they are all there.

    ``overwrite``: results that are there do not count. A .csv or .parquet file appears at the end; until then
    ``path.jsonl`` holds the results. Raises ValueError for another ending and a file of something else, FileExistsError
    for a table that is there, BlockingIOError, OSError, ImportError.
    """
    lines = lines_of(path)
    if is_complete(path) and not overwrite:
        raise FileExistsError(f"{path} is complete already; remove it to begin anew")
    tables.require(path)
    results = ResultFile(lines, overwrite=overwrite)
    try:
        yield results
        if lines != path:
            tables.write_table(lines, path)
            lines.unlink()
    finally:
        results.close()

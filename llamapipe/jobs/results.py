"""Writes the results file: whole lines, each index once, so that a killed job can continue where it stopped.

Each line has a ``digest``: 8 hexadecimal digits for the job's settings and 8 for the record, so that a restart notices
if either has changed. For a table, the job converts the lines at its end.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from array import array
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from llamapipe.chat.halves import whole
from llamapipe.host import files
from llamapipe.jobs import _tables
from llamapipe.jobs.records import STDIN, format_of

_ID = "batch_req_"  # the prefix of the index in ids, in OpenAI's format
_STARTS = (b'{"index": ', f'{{"id": "{_ID}'.encode())  # beginnings of lines in a results file
_FAILED = 2
_TRIES, _TRY_S = 5, 0.01  # attempts to lock a file, and the pause between them


class ResultFile:
    """Appends results to ``path``, after ``begin``. One thread.

    An existing file is read and not changed; ``has`` says which records it holds. ``overwrite``: do not read the file.

    Raises ValueError if the file holds other lines or results of several jobs, BlockingIOError if another process is
    writing it, OSError.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self.n_done = 0
        self._settings: int | None = None
        self._n_whole = 0  # bytes up to the last line end
        # By index: 0 if there is no result; else the record's digest, a bit that is set for a failure, and a bit that
        # is 1.
        self._marks = array("Q")
        self._file: BinaryIO = _open_locked(path)
        try:
            if not overwrite:
                self._read()
        except BaseException:
            self._file.close()
            raise

    def begin(self, settings: int, *, retry_failed: bool = False) -> None:
        """Prepare the file for more results by removing an unfinished line.

        ``settings``: a 32-bit number that changes with the model, the template or options. ``retry_failed``: remove
        results with an error, so that their records are answered again. Raises ValueError if the file's results have
        other settings, OSError.
        """
        if self._settings not in (None, settings):
            raise ValueError(
                f"{self.path} has results from another model, template or options; start again with --overwrite, or "
                "give another output file"
            )
        self._settings = settings
        self._file.truncate(self._n_whole)
        if retry_failed:
            self._remove([index for index, mark in enumerate(self._marks) if mark & _FAILED])

    def __repr__(self) -> str:
        return f"<ResultFile {self.path.name!r} n_done={self.n_done}>"

    def has(self, index: int, digest: int) -> bool:
        """Return whether the file has the record's result. Raises ValueError if its digest differs."""
        mark = self._marks[index] if index < len(self._marks) else 0
        if mark and mark >> 2 != digest:
            raise ValueError(
                f"record {index + 1} has changed since its result was written to {self.path}; start again with "
                "--overwrite, or give another output file"
            )
        return mark != 0

    def has_failed(self, index: int) -> bool:
        """Return whether the result in the file has an error."""
        return index < len(self._marks) and bool(self._marks[index] & _FAILED)

    def write(self, index: int, digest: int, result: Mapping[str, Any]) -> None:
        """Append the result of a record. Raises OSError, for example when the disk is full."""
        row = {**result, "digest": struct.pack(">II", self._settings or 0, digest).hex()}
        # A lone surrogate, which JSON can escape, would make the whole file unreadable as UTF-8.
        line = whole(json.dumps(row, ensure_ascii=False)).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        view = memoryview(line)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._file.truncate(start)
            raise
        self._note(index, digest << 2 | 1)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _note(self, index: int, mark: int) -> None:
        if index >= len(self._marks):
            self._marks.extend([0] * (index + 1 - len(self._marks)))
        self.n_done += self._marks[index] == 0
        self._marks[index] = mark

    def _read(self) -> None:
        self._file.seek(0)
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n"):
                if not any(line.startswith(start) or start.startswith(line) for start in _STARTS):
                    raise self._no_result(number)
                return
            index, settings, mark = self._place(line, number)
            if self._settings not in (None, settings):
                raise self._no_result(number)
            self._settings = settings
            self._n_whole += len(line)
            self._note(index, mark)

    def _remove(self, indices: Collection[int]) -> None:
        """Rewrite the file without the results of ``indices``. A job killed meanwhile leaves the old file."""
        removed, path = set(indices), self.path.resolve()
        if not removed:
            return
        part = path.with_name(path.name + ".part")
        part.unlink(missing_ok=True)
        kept = _open_locked(part)
        try:
            shutil.copymode(path, part)
            self._file.seek(0)
            with open(kept.fileno(), "wb", closefd=False) as writer:
                for number, line in enumerate(self._lines(), 1):
                    if self._place(line, number)[0] not in removed:
                        writer.write(line)
            part.replace(path)
        except BaseException:
            kept.close()
            part.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = kept
        for index in removed:
            self._marks[index] = 0
        self.n_done -= len(removed)

    def _lines(self) -> Iterator[bytes]:
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            yield from lines

    def _place(self, line: bytes, number: int) -> tuple[int, int, int]:
        """Return a line's index and settings, and a mark: the record's digest and whether it failed."""
        try:
            value = json.loads(line)
            index = value["index"] if "index" in value else value["id"].removeprefix(_ID)
            settings, record = struct.unpack(">II", bytes.fromhex(value["digest"]))
            if int(index) < 0:
                raise self._no_result(number)
            mark = record << 2 | (_FAILED if _has_failed(value) else 0) | 1
            return int(index), settings, mark
        except (ValueError, TypeError, KeyError, AttributeError, struct.error):
            raise self._no_result(number) from None

    def _no_result(self, number: int) -> ValueError:
        return ValueError(
            f"{self.path}, line {number}, is not a result of this batch job; give another output file"
        )


def request_id(index: int) -> str:
    """Return the ``id`` of a result in OpenAI's format."""
    return f"{_ID}{index}"


def _has_failed(result: Mapping[str, Any]) -> bool:
    response = result.get("response")
    refused = isinstance(response, dict) and response["status_code"] >= 400
    return refused or result.get("error") is not None


def _open_locked(path: Path) -> BinaryIO:
    with ExitStack() as stack:
        file: BinaryIO = stack.enter_context(path.open("a+b", buffering=0))
        for left in reversed(range(_TRIES)):
            with suppress(BlockingIOError):
                files.lock(file.fileno(), wait=False)
                stack.pop_all()
                return file
            if left:
                time.sleep(_TRY_S)  # the lock may be held only briefly, by ``is_written``
        raise BlockingIOError(f"{path} is being written by another process")


def lines_of(path: Path) -> Path:
    """Return the file of JSON lines that holds the results of ``path`` while the job runs. Raises ValueError."""
    if path == STDIN or path.suffix.lower() == ".gz":
        raise ValueError(f"the output is {path}; its name must end with .jsonl, .csv or .parquet")
    return path if format_of(path) == "jsonl" else path.with_name(path.name + ".jsonl")


def is_written(lines: Path) -> bool:
    """Return whether a process is writing results to ``lines``, the file of ``lines_of``. Raises OSError."""
    try:
        with lines.open("rb") as file:
            # Held only briefly; another call of this function could then take this process for a writer.
            files.lock(file.fileno(), wait=False)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def count_failed(lines: Path) -> int:
    """Count the results with an error in ``lines``. Raises OSError, and ValueError if it is not a results file."""
    with lines.open("rb") as file:
        try:
            return sum(_has_failed(json.loads(line)) for line in file if line.endswith(b"\n"))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{lines} does not hold the results of a batch job") from None


def is_complete(path: Path) -> bool:
    """Return whether ``path`` is a table that a job has finished."""
    return path.exists() and lines_of(path) != path


@contextmanager
def open_output(path: Path, *, overwrite: bool = False) -> Iterator[ResultFile]:
    """Open the results for ``path``, before ``begin``; if the block ends without an exception, they are complete.

    ``overwrite``: ignore existing results. A .csv or .parquet file appears at the end; until then ``path.jsonl`` holds
    the results. Raises ValueError for another suffix or a file that holds something else, FileExistsError for an
    existing table, BlockingIOError, OSError, ImportError.
    """
    lines = lines_of(path)
    if is_complete(path) and not overwrite:
        raise FileExistsError(f"{path} is complete already; remove it to start again")
    _tables.require(path)
    results = ResultFile(lines, overwrite=overwrite)
    try:
        yield results
        if lines != path:
            _tables.write_table(lines, path)
            lines.unlink()
    finally:
        results.close()

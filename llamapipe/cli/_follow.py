"""``llamapipe batch --follow``: shows the progress of a running server's batch, or of a job in another local process.

The command polls the server or the job's files, which does not disturb the work.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from llamapipe.cli._terminal import Terminal
from llamapipe.cli.parser import UsageError
from llamapipe.cli.ps import ask
from llamapipe.jobs.records import STDIN, count_records
from llamapipe.jobs.results import count_failed, is_complete, is_written, lines_of

_EVERY_S = 0.5
_EVERY_S_IN_LOGS = 60.0
_CHUNK_BYTES = 2**20
_ENDED = ("completed", "failed", "expired", "cancelled")
_BATCH = "batch_"  # the prefix of the ids of a server's batches


def follow(args: argparse.Namespace) -> int:
    """Show the progress until the end. Return the exit status: 1 if a request failed or has no result."""
    if args.input is None:
        raise UsageError("--follow needs the id of a batch of a server, or IN and -o OUT of a job")
    if args.output is not None:
        return _follow_job(args.input, args.output)
    if not str(args.input).startswith(_BATCH):
        raise UsageError(
            f"{args.input} is not the id of a batch; give -o OUT to follow the job that writes it"
        )
    return _follow_batch(args)


def _follow_batch(args: argparse.Namespace) -> int:
    line = _Line()
    while True:
        batch = ask(args, f"/v1/batches/{args.input}")
        status, counts = batch["status"], batch["request_counts"]
        n = counts["completed"] + counts["failed"]
        failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
        text = f"{status}: {n:,} of {counts['total']:,} requests{failed}"
        if status in _ENDED:
            break
        line.show(text, news=status)
        time.sleep(_EVERY_S)
    line.end(text)
    for problem in (batch.get("errors") or {"data": ()})["data"]:
        where = "" if problem.get("line") is None else f"line {problem['line']}: "
        line.terminal.line(f"{where}{problem['message']}")
    for what in ("output", "error"):
        if batch[f"{what}_file_id"] is not None:
            line.terminal.line(f"{what}s: {args.url}/v1/files/{batch[f'{what}_file_id']}/content")
    return 0 if status == "completed" and not counts["failed"] else 1


def _follow_job(source: Path, output: Path) -> int:
    """Follow a job of this machine in the same way. A job with a finished table is complete, even if results failed."""
    lines = lines_of(output)
    n_records = None if source == STDIN else count_records(source)
    of = "" if n_records is None else f" of {n_records:,}"
    line, counted = _Line(), _Counted(lines)
    while True:
        runs = is_written(lines)
        n = counted.count()
        if is_complete(output):
            line.end(f"complete: {output}")
            return 0
        if not runs:
            break
        line.show(f"{n:,}{of} records")
        time.sleep(_EVERY_S)
    has_all = n_records is not None and n >= n_records and lines == output
    n_failed = count_failed(lines) if n else 0
    failed = f", {n_failed:,} failed" if n_failed else ""
    line.end(f"{n:,}{of} records{failed}; no process writes {lines}")
    return 0 if has_all and not n_failed else 1


class _Counted:
    """Counts the results in a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._n = self._n_bytes = 0

    def count(self) -> int:
        """Return the current number of results; 0 if there is no file."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._n_bytes:  # the file was replaced or emptied
                    self._n = self._n_bytes = 0
                file.seek(self._n_bytes)
                while chunk := file.read(_CHUNK_BYTES):
                    self._n += chunk.count(b"\n")
                    self._n_bytes += len(chunk)
        except FileNotFoundError:
            self._n = self._n_bytes = 0
        return self._n


class _Line:
    """A line that is redrawn on a terminal, and written once a minute elsewhere."""

    def __init__(self) -> None:
        self.terminal = Terminal(sys.stderr)
        self._next_s = time.perf_counter()
        self._news: str | None = None

    def show(self, text: str, news: str | None = None) -> None:
        """Show the state. If ``news`` has changed, it is written immediately."""
        if self.terminal.redraws:
            self.terminal.redraw(text)
        elif time.perf_counter() >= self._next_s or news != self._news:
            self._next_s = time.perf_counter() + _EVERY_S_IN_LOGS
            self.terminal.line(text)
        self._news = news

    def end(self, text: str) -> None:
        """Show the last state."""
        self.terminal.redraw()
        self.terminal.line(text)

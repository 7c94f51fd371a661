"""Reads the records of a job: JSON lines or CSV, one record at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FORMATS: Final = ("jsonl", "csv")
# Longer lines are refused one by one: a file without line ends would otherwise be read into memory whole.
MAX_LINE_BYTES: Final = 64 * 2**20


@dataclass(frozen=True)
class Record:
    """One record: its place in the file, from 0, and its fields, or why it cannot be read."""

    index: int
    fields: dict[str, Any]
    problem: str | None = None

    @property
    def id(self) -> object:
        """What the record calls itself: ``custom_id`` or ``id``; None if it has no name."""
        return self.fields.get("custom_id", self.fields.get("id"))


def format_of(path: Path) -> str:
    """The format that a file's name says. Raises ValueError for other names."""
    ending = path.suffix.lower().removeprefix(".")
    ending = {"ndjson": "jsonl", "json": "jsonl"}.get(ending, ending)
    if ending not in FORMATS:
        raise ValueError(f"{path} has an unknown format; the name must end with .jsonl or .csv")
    return ending


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in its order. Blank lines do not count.

    Raises OSError, and ValueError for a CSV file that has no header or is not UTF-8.
    """
    return _csv_records(path) if format_of(path) == "csv" else _json_records(path)


def count_records(path: Path) -> int:
    """About how many records a file has; exact for JSON lines."""
    with path.open("rb") as file:
        n = sum(1 for line in file if line.strip())
    return max(n - 1, 0) if format_of(path) == "csv" else n


def _json_records(path: Path) -> Iterator[Record]:
    index = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if not line.strip():
                continue
            if len(line) > MAX_LINE_BYTES:
                yield Record(index, {}, f"the line is longer than {MAX_LINE_BYTES} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
            else:
                yield _parsed(index, line)
            index += 1


def _parsed(index: int, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Record(index, {}, f"the line is not JSON: {error}")
    if isinstance(value, str):
        return Record(index, {"prompt": value})
    if not isinstance(value, dict):
        return Record(index, {}, f"the line must be an object or a text, not {type(value).__name__}")
    return Record(index, value)


def _csv_records(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        try:
            names = next(rows, None)
            if not names:
                raise ValueError(f"{path} has no header: its first line must name the columns")
            for index, row in enumerate(row for row in rows if row):
                if len(row) != len(names):
                    problem = f"the row has {len(row)} values, the header names {len(names)} columns"
                    yield Record(index, {}, problem)
                else:
                    yield Record(index, dict(zip(names, row, strict=True)))
        except csv.Error as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error

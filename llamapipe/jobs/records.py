"""Reads the records of a job: JSON lines, CSV, Parquet or any iterable, one record at a time."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import operator
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from math import isinf
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy as np

from llamapipe._messages import listed, quoted
from llamapipe.jobs import _tables

FORMATS: Final = ("jsonl", "csv", "parquet")
STDIN: Final = Path("-")
# A longer line gives an error for its record: otherwise a file without line ends would be read into memory whole.
MAX_LINE_BYTES: Final = 64 * 2**20
_CHUNK_BYTES: Final = 2**20
_N_LOOKED_AT: Final = 100


@dataclass(frozen=True)
class Record:
    """One record: its index in the file, from 0, and its fields, or the reason why it cannot be read."""

    index: int
    fields: dict[str, Any]
    problem: str | None = None

    @property
    def id(self) -> object:
        """The record's name: its ``custom_id`` or ``id``; None if it has neither."""
        names = self.names
        return names.get("custom_id", names.get("id"))

    @property
    def digest(self) -> int:
        """32 bits that very likely differ for different records."""
        try:
            text = json.dumps([self.fields, self.problem], default=_content, sort_keys=True)
        except (TypeError, ValueError):  # such as a tuple as a key
            text = repr(self.fields)
        except RecursionError:
            text = f"a record of {len(self.fields)} fields"
        return zlib.crc32(text.encode("utf-8", "surrogatepass"))

    @property
    def names(self) -> dict[str, object]:
        """The record's ``id`` and ``custom_id`` in the form for a line of results (a date becomes text)."""
        return {name: as_json(self.fields[name]) for name in ("id", "custom_id") if name in self.fields}


def check_columns(path: Path, names: Collection[str]) -> None:
    """Raise ValueError if none of a file's first records has a column, or if the header of a CSV file is wrong.

    JSON lines may have different fields, so one record that has the column is enough. Pipes, which can be read only
    once, are skipped.
    """
    if is_pipe(path) or not (names or format_of(path) == "csv"):
        return
    seen: dict[str, None] = {}
    for record in islice(read_records(path), _N_LOOKED_AT):
        seen |= dict.fromkeys(record.fields)
    missing = [name for name in names if name not in seen]
    if seen and missing:
        raise ValueError(f"{path} has no column {quoted(missing[0])}; it has {listed(seen)}")


def column(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field. Raises ValueError if the field is missing."""
    if name not in fields:
        raise ValueError(f"the record has no column {quoted(name)}; it has {listed(fields)}")
    return fields[name]


def as_json(value: object) -> object:
    """Return a value in the form for a line of results (a date becomes text)."""
    if type(value) in (str, int, bool):
        return value
    if is_null(value) or (isinstance(value, float) and isinf(value)):
        return None
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError):  # such as a tuple as a key
        return str(value)
    except RecursionError:
        return type(value).__name__


def is_null(value: object) -> bool:
    """Return whether a value means that there is none: None, NaN, or pandas' NA and NaT."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pandas' NA, or an array
        return type(value).__name__ == "NAType"


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "mM":
            return list(value)  # dates as text, not as numbers
        if value.dtype.kind == "f":
            values = value.astype(object)
            values[~np.isfinite(value)] = None  # JSON has no NaN
            return values.tolist()
        return value.tolist()
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.floating):
        return float(value)
    try:
        return operator.index(value)  # type: ignore[arg-type]  # numpy's integers
    except TypeError:
        return str(value)


def _content(value: object) -> object:
    """Return a form that equal values have in every process, for a digest.

    ``repr`` would not do: it may include an address, as for a Pillow image, or leave out most of an array.
    """
    if isinstance(value, np.ndarray):
        # The bytes of other types include addresses or padding.
        is_plain = value.dtype.kind in "biufcmMSU" and value.dtype.char not in "gG"
        return [str(value.dtype), value.shape, _hash(value.tobytes()) if is_plain else value.tolist()]
    if isinstance(value, memoryview):
        return _hash(value.tobytes())
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (tobytes := getattr(value, "tobytes", None)) is not None and hasattr(value, "mode"):
        with suppress(OSError):  # a damaged file: the record fails when it is answered
            name += f" {value.mode} {getattr(value, 'size', None)} {_hash(tobytes())}"
            if value.mode in ("P", "PA") and (palette := getattr(value, "getpalette", None)) is not None:
                name += f" {palette()}"
        return name
    return name if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__ else _plain(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def format_of(path: Path) -> str:
    """Return the format that a file's name indicates. Raises ValueError for other names."""
    if path == STDIN:
        return "jsonl"
    name = path.with_suffix("") if _is_compressed(path) else path
    ending = name.suffix.lower().removeprefix(".")
    ending = {"ndjson": "jsonl", "json": "jsonl"}.get(ending, ending)
    if ending not in FORMATS or (ending == "parquet" and name is not path):
        raise ValueError(
            f"{path} has an unknown format; the name must end with .jsonl, .csv, .jsonl.gz, .csv.gz or .parquet"
        )
    return ending


def is_pipe(path: Path) -> bool:
    """Return whether a file is standard input or a named pipe: read only once, and the next record may take long."""
    return path == STDIN or path.is_fifo()


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open the bytes of a file, or of standard input. Raises OSError."""
    if path == STDIN:
        # A separate file object, never closed: a thread may still read from it when the program ends.
        yield open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115
        return
    with path.open("rb") as file:
        if not _is_compressed(path):
            yield file
            return
        import gzip

        try:
            with gzip.open(file) as text:
                yield cast(BinaryIO, text)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged or not a gzip file: {error}") from error


def read_records(path: Path) -> Iterator[Record]:
    """Read the records of a file in order. Blank lines do not count. ``path`` may be ``STDIN``: JSON lines.

    Raises OSError, ImportError if the format needs an extra, and ValueError for a CSV file without a header, with two
    columns of the same name, or not in UTF-8, for a damaged gzip file, and for a .parquet file that is not Parquet.
    """
    match format_of(path):
        case "csv":
            return _csv_records(path)
        case "parquet":
            return (Record(index, row) for index, row in enumerate(_tables.read_parquet(path)))
        case _:
            return _json_records(path)


def records_of(items: Iterable[object]) -> Iterator[Record]:
    """Yield records from a caller's items: texts, lists of token ids, or mappings with the fields of a JSON line."""
    for index, item in enumerate(items):
        if isinstance(item, (str, list)):
            yield Record(index, {"prompt": item})
        elif isinstance(item, Mapping):
            yield Record(index, dict(item))
        else:
            problem = f"a record must be a text, a list of token ids or a mapping, not {type(item).__name__}"
            yield Record(index, {}, problem)


def count_records(path: Path) -> int | None:
    """Count a file's records (for JSON lines, lines that are not blank). None for pipes and a bad CSV file."""
    kind = format_of(path)
    if is_pipe(path):
        return None
    if kind == "parquet":
        return _tables.count_parquet(path)
    if kind == "csv":
        try:
            return sum(1 for _ in _csv_records(path))
        except ValueError:  # reading the records reports the error
            return None
    n, is_counted = 0, False
    with _open(path) as file:
        while piece := file.readline(_CHUNK_BYTES):  # a part of a line
            if not is_counted and piece.strip():
                n, is_counted = n + 1, True
            if piece.endswith(b"\n"):
                is_counted = False
    return n


def _json_records(path: Path) -> Iterator[Record]:
    index = number = 0  # index of the record, number of the line: blank lines are not records
    with _open(path) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if not line.strip():
                continue
            if len(line) > MAX_LINE_BYTES:
                yield Record(index, {}, f"line {number} is longer than {MAX_LINE_BYTES} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
            else:
                yield _parse(index, number, line)
            index += 1


def _parse(index: int, number: int, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return Record(index, {}, f"line {number} is not JSON: {error.msg}, at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:  # such as text that is not UTF-8
        return Record(index, {}, f"line {number} is not JSON: {error}")
    if isinstance(value, str):
        return Record(index, {"prompt": value})
    if isinstance(value, list):
        return Record(index, {}, f"line {number} is a list; write each record on a separate line")
    if not isinstance(value, dict):
        return Record(index, {}, f"line {number} must be an object or a text, not {type(value).__name__}")
    return Record(index, value)


def _csv_records(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        # With Python's limit of 128 KiB, which holds for the whole process, the job would fail at the first long text.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
        try:
            names = next(rows, None)
            if not names:
                raise ValueError(f"{path} has no header: its first line must name the columns")
            twice = next((name for name, n in Counter(names).items() if name and n > 1), None)
            if twice is not None:
                raise ValueError(f"the header of {path} names two columns {quoted(twice)}; rename one")
            for index, row in enumerate(row for row in rows if row):
                if len(row) != len(names):
                    problem = (
                        f"line {rows.line_num} has {len(row)} values, the header names {len(names)} columns"
                    )
                    yield Record(index, {}, problem)
                else:
                    yield Record(index, dict(zip(names, row, strict=True)))
        except csv.Error as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error

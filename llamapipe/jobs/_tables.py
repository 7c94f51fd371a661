"""Reads records from Parquet and writes results to Parquet and CSV. Parquet needs the extra ``parquet``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final

_ROWS_AT_ONCE: Final = 1024
_NUMBERS: Final = ("index", "seed", "n_prompt_tokens", "n_completion_tokens", "status_code")
# The columns of a results table, in order. Columns that the job keeps follow `custom_id`. Values that are not texts or
# numbers are written as JSON.
_COLUMNS: Final = (
    "index", "id", "custom_id", "text", "texts", "reasoning", "tool_calls", "logprobs", "finish_reason", "seed",
    "n_prompt_tokens", "n_completion_tokens", "status_code", "response", "error",
)  # fmt: skip
_N_NAMES: Final = 3  # the first columns, which name the record
_PLAIN: Final = (str, int, float)  # includes bools
_EXACT: Final = 2**53  # a float holds all integers up to this one
_ALWAYS: Final = ("text", "error")  # all others are columns only if a result has them
RESULT_FIELDS: Final = frozenset(_COLUMNS) | {"digest"}


class _Wide:
    """Marks a column with integers that a float may not represent exactly."""


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, reading a few thousand at a time. Raises OSError, ImportError, ValueError."""
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def count_parquet(path: Path) -> int:
    """Count the rows of a file. Raises as ``read_parquet`` does."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def write_table(lines: Path, path: Path) -> None:
    """Write the results in the JSON lines file ``lines`` to a .csv or .parquet file, atomically.

    Raises OSError; ImportError if Parquet needs an extra.
    """
    part = path.with_name(path.name + ".part")
    try:
        columns = _columns(_rows(lines))
        if path.suffix.lower() == ".csv":
            _write_csv(_rows(lines), columns, part)
        else:
            _write_parquet(_rows(lines), columns, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def require(path: Path) -> None:
    """Raise ImportError if the format of ``path`` needs an extra that is not installed."""
    if path.suffix.lower() == ".parquet":
        _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")


def _rows(lines: Path) -> Iterator[dict[str, Any]]:
    """Yield the results, with one value per column."""
    with lines.open("rb") as source:
        for line in source:
            row = json.loads(line)
            row.pop("digest", None)
            if isinstance(response := row.get("response"), dict):
                row |= {"status_code": response.get("status_code"), "response": response.get("body")}
            yield row


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, set[type]]:
    """Return a table's columns in order, and the types of their values."""
    columns: dict[str, set[type]] = {name: set() for name in _ALWAYS}
    for row in rows:
        for name, value in row.items():
            types = columns.setdefault(name, set())
            if value is not None:
                types.add(_type_of(value))
    kept = [name for name in columns if name not in _COLUMNS]
    first, last = _COLUMNS[:_N_NAMES], _COLUMNS[_N_NAMES:]
    return {name: columns[name] for name in (*first, *kept, *last) if name in columns}


def _type_of(value: object) -> type:
    """Return the type that a column needs for a value: text for integers of more than 64 bits."""
    if type(value) is int and abs(value) > _EXACT:
        return _Wide if -(2**63) <= value < 2**63 else str
    return type(value)


def _write_csv(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, set[type]], path: Path) -> None:
    # Lines written by other programs may have lone surrogates, which would make the job fail in its last step.
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            values = (row.get(name) for name in columns)
            writer.writerow(value if isinstance(value, _PLAIN) else _text(value) for value in values)


def _write_parquet(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, set[type]], path: Path) -> None:
    arrow, parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")

    def kind(name: str, types: set[type]) -> Any:
        if name in _NUMBERS:
            return arrow.uint64()  # callers' seeds may use all 64 bits
        if types == {bool}:
            return arrow.bool_()
        if name in _COLUMNS or not types or not types <= {int, float, _Wide} or types >= {float, _Wide}:
            return arrow.string()
        return arrow.float64() if float in types else arrow.int64()

    schema = arrow.schema([(name, kind(name, types)) for name, types in columns.items()])
    texts = {field.name for field in schema if field.type == arrow.string()}
    plain = (
        {name: _text(row.get(name)) if name in texts else row.get(name) for name in columns} for row in rows
    )
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := list(islice(plain, _ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _open(path: Path) -> Any:
    arrow, parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def _pyarrow(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise ImportError("Parquet files need pyarrow: pip install 'llamapipe[parquet]'") from None

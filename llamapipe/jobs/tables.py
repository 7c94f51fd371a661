"""Parquet in, Parquet and CSV out. Parquet needs the extra ``parquet``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final

_ROWS_AT_ONCE: Final = 1024
_NUMBERS: Final = ("index", "seed", "n_prompt_tokens", "n_completion_tokens", "status_code")
# The columns of a table of results. Values that are not texts or numbers are written as JSON.
COLUMNS: Final = (
    "index",
    "id",
    "custom_id",
    "text",
    "texts",
    "reasoning",
    "tool_calls",
    "logprobs",
    "finish_reason",
    "seed",
    "n_prompt_tokens",
    "n_completion_tokens",
    "status_code",
    "response",
    "error",
)


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; some thousand are in memory at a time. Raises OSError, ImportError, ValueError."""
    with _opened(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from batch.to_pylist()


def count_parquet(path: Path) -> int:
    """The rows of a file. Raises as ``read_parquet``."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def write_table(lines: Path, path: Path) -> None:
    """Writes the results in ``lines``, as JSON lines, to a .csv or .parquet file, which is there whole or not at all.

    Raises OSError; ImportError if Parquet needs an extra.
    """
    part = path.with_name(path.name + ".part")
    try:
        with lines.open("rb") as source:
            rows = (_row(json.loads(line)) for line in source)
            if path.suffix.lower() == ".csv":
                _write_csv(rows, part)
            else:
                _write_parquet(rows, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def require(path: Path) -> None:
    """Raises ImportError if the format of ``path`` needs an extra that is not installed."""
    if path.suffix.lower() == ".parquet":
        _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")


def _write_csv(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path) -> None:
    arrow, parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")
    # Seeds take all 64 bits.
    schema = arrow.schema(
        [(name, arrow.uint64() if name in _NUMBERS else arrow.string()) for name in COLUMNS]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(some, schema=schema))


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as a row: one value a column."""
    row = dict(result)
    if isinstance(response := row.get("response"), dict):
        row |= {"status_code": response.get("status_code"), "response": response.get("body")}
    return {name: _value(name, row.get(name)) for name in COLUMNS}


def _value(name: str, value: object) -> object:
    if value is None or isinstance(value, str) or name in _NUMBERS:
        return value
    return json.dumps(value, ensure_ascii=False)


def _opened(path: Path) -> Any:
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

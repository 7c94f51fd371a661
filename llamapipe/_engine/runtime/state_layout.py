"""The layout of llama.cpp's sequence states, which is checked before a state from elsewhere is loaded.

Open this file when llama.cpp changes this layout (``state_version``), or gets a kind of memory with other parts.

The principle: a state from a file is read here first, part by part. llama.cpp compares the types and sizes of rows, but
trusts positions and asserts counts: a wrong count would end the process. So llama.cpp only gets states that a context
of this model could have written.

A state is a start, then parts. A part with *cells* has, for each stream of the context, the number of its cells, their
table and their values; a window's part has only the last cells. The *recurrent* part has one row for each tensor. The
states of an empty sequence show which parts exist and how long recurrent rows are. Stored states have one stream, so
that a context with any number of sequences can load them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Bytes = bytes | bytearray | memoryview
_START = struct.Struct("<Ii")  # magic, sequence
_U32 = struct.Struct("<I")
_RECURRENT = struct.Struct("<IiI")  # number of cells, position, number of listed sequences
_VALUES = struct.Struct("<IIII")  # whether values are transposed, layers, rotations of keys and of values
_ROWS = struct.Struct("<iQ")  # type, bytes of a row
_COLUMNS = struct.Struct("<iII")  # type, bytes of an element, elements
_CELL = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("sequence", "<i4")])
_GRID_CELL = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("grid", "<i4", 3), ("sequence", "<i4")])
_MOST_TYPES = 64  # an upper limit of ggml's type numbers


class Saved(Protocol):
    """A copy of a sequence or of its state, in memory that its owner frees."""

    n_bytes: int

    def view(self) -> memoryview:
        """Return the copy in llama.cpp's format, as a view that is valid until ``close``."""

    def close(self) -> None:
        """Free the memory."""


class StateError(ValueError):
    """A state does not fit this memory. The message continues a sentence: "its cells ..."."""


class _Reader:
    """Reads a state from front to back. Raises StateError beyond its end."""

    def __init__(self, data: Bytes) -> None:
        self.data = memoryview(data)
        self.at = 0

    def skip(self, n: int) -> int:
        """Skip ``n`` bytes and return the offset of the first one."""
        begin = self.at
        if n > len(self.data) - begin:
            raise StateError(f"its state has {len(self.data)} bytes and should have at least {begin + n}")
        self.at += n
        return begin

    def read(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack_from(self.data, self.skip(form.size))

    def number(self) -> int:
        return self.read(_U32)[0]


@dataclass(frozen=True)
class StateLayout:
    """The layout of one context's states.

    ``n_streams``: the number of streams of KV cells. ``n_caches``, ``n_windows``: the numbers of parts with cells in a
    whole state, and in a partial state, which has only the parts that cannot go back. ``rows``: the headers of the
    recurrent rows; empty if there is no recurrent part. ``has_values``: cells have values besides keys. ``has_grid``:
    cells have positions of several kinds (M-RoPE).
    """

    n_streams: int
    n_caches: int
    n_windows: int
    rows: tuple[bytes, ...]
    has_values: bool
    has_grid: bool

    @classmethod
    def of_empty(
        cls, whole: bytes, partial: bytes, n_streams: int, has_values: bool, has_grid: bool
    ) -> StateLayout | None:
        """Return a context's layout, read from both states of an empty sequence; None if there are unknown parts."""
        try:
            n_caches, rows = _parts_of_empty(whole, n_streams)
            n_windows, rows_of_partial = _parts_of_empty(partial, n_streams)
        except StateError:
            return None
        if n_caches > 2 or rows_of_partial != rows or not n_caches + len(rows):
            return None
        return cls(n_streams, n_caches, n_windows, rows, has_values, has_grid)

    def to_stored(self, state: Bytes, n: int, only_state: bool = False) -> list[Bytes]:
        """Return the parts of a context's state of ``n`` tokens in stored form.

        ``only_state``: the state is a partial one. Raises StateError for another layout.
        """
        return self._rewrite(state, n, only_state, self.n_streams, 1)[0]

    def loadable(self, stored: Bytes, n: int, only_state: bool = False) -> tuple[bytes, bool]:
        """Return a stored state of ``n`` tokens in this context's layout, and whether its cells end there.

        If they do not, only the cells can be used, with another state. Raises StateError for another layout.
        """
        parts, is_last = self._rewrite(stored, n, only_state, 1, self.n_streams)
        return b"".join(parts), is_last

    def _rewrite(
        self, state: Bytes, n: int, only_state: bool, n_streams: int, n_wanted: int
    ) -> tuple[list[Bytes], bool]:
        reader = _Reader(state)
        parts: list[Bytes] = [state[: reader.skip(_START.size) + _START.size]]
        end = n if only_state else -1
        for _ in range(self.n_windows if only_state else self.n_caches):
            cells, end = self._cells(reader, n_streams, end, n)
            parts += [_U32.pack(n_wanted), cells, bytes(4 * (n_wanted - 1))]
        if self.rows:
            begin = reader.at
            position = self._recurrent_start(reader)
            if position != (n if end < 0 else end) - 1:
                raise StateError(f"its recurrent state is of position {position}, its cells end at {end}")
            parts.append(reader.data[begin : reader.at])
        if reader.at != len(state):
            raise StateError(f"its state has {len(state)} bytes and should have {reader.at}")
        return parts, end < 0 or end == n

    def _cells(self, reader: _Reader, n_streams: int, end: int, n: int) -> tuple[memoryview, int]:
        """Return the cells of the only stream that has any, and the position after the last cell, at least ``n``.

        ``end``: that position in the first part, which has all cells from 0 onward; -1 if this is the first part.
        """
        cells: memoryview | None = None
        if (n_found := reader.number()) != n_streams:
            raise StateError(f"its cells have {n_found} streams and should have {n_streams}")
        for _ in range(n_streams):
            begin = reader.at
            count = reader.number()
            if not count:
                continue
            if cells is not None:
                raise StateError("its cells are of several sequences")
            form = _GRID_CELL if self.has_grid else _CELL
            table = np.frombuffer(reader.data, form, count, reader.skip(count * form.itemsize))
            positions = np.sort(table["position"])
            first, after = int(positions[0]), int(positions[-1]) + 1
            fits = first >= 0 and after >= n and (after == end or (end < 0 and first == 0))
            if not fits or after - first != count or (positions != np.arange(first, after)).any():
                raise StateError(f"its cells are not those of {n if end < 0 else end} tokens")
            if (table["n_sequences"] != 1).any():
                raise StateError("its cells are of several sequences")
            self._skip_values(reader, count)
            cells, end = reader.data[begin : reader.at], after
        if cells is None:
            raise StateError(f"it has no cells for its {n} tokens")
        return cells, end

    def _skip_values(self, reader: _Reader, count: int) -> None:
        is_transposed, n_layer, _, _ = reader.read(_VALUES)
        for _ in range(n_layer):
            _, size = reader.read(_ROWS)
            reader.skip(count * size)
        for _ in range(n_layer if self.has_values else 0):
            if is_transposed:
                _, size, n_rows = reader.read(_COLUMNS)
                reader.skip(count * size * n_rows)
            else:
                _, size = reader.read(_ROWS)
                reader.skip(count * size)

    def _recurrent_start(self, reader: _Reader) -> int:
        """Return the position of the recurrent state."""
        count, position, n_listed = reader.read(_RECURRENT)
        if count != 1 or n_listed:
            raise StateError(f"it has {count} recurrent states and should have 1")
        for head in self.rows:
            begin = reader.skip(len(head))
            if reader.data[begin : reader.at] != head:
                raise StateError("its recurrent state is from another architecture")
            if head is not self.rows[0]:
                reader.skip(_ROWS.unpack(head)[1])
        return position


def _parts_of_empty(state: bytes, n_streams: int) -> tuple[int, tuple[bytes, ...]]:
    """Return the number of parts with cells in the state of an empty sequence, and the headers of its recurrent rows.

    The first header describes the whole part. Raises StateError for unknown parts.
    """
    reader = _Reader(state)
    reader.skip(_START.size)
    n_caches = 0
    while reader.at < len(state) and (first := reader.number()):
        begin = reader.skip(4 * n_streams)
        if first != n_streams or any(reader.data[begin : reader.at]):
            raise StateError("it has parts of another kind")
        n_caches += 1
    if reader.at == len(state):
        return n_caches, () if n_caches else (b"",)
    begin = reader.skip(8)
    heads = [bytes(reader.data[begin : reader.at])]
    while reader.at < len(state):
        kind, size = reader.read(_ROWS)
        if not 0 <= kind < _MOST_TYPES:
            raise StateError("it has parts of another kind")
        heads.append(_ROWS.pack(kind, size))
    return n_caches, tuple(heads)

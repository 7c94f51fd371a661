"""Snapshots: a sequence and its KV cells as bytes, to be continued later or in another process.

Open this file to change the format of these bytes, or which engine may load them.

The principle: a snapshot is loaded only where its cells mean the same. It has a header, the tokens as int32,
llama.cpp's state of the sequence, and a checksum. The header says what the cells depend on (``SnapshotFormat``). The
state begins with the number of streams that the context had. Where the memory is plain (one cell for each position, no
sliding window, no recurrent state), the state is stored as that of a single stream, so that any context with the same
types of keys and values can load it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from llamapipe._engine.policy.core import UNLIMITED
from llamapipe.errors import InvalidRequestError

_MAGIC = b"llpsnap4"
_HEADER = struct.Struct("<8s16sI8s8sIIIIIQ16s")
_NEVER = 2**32 - 1
_CHECK_BYTES = 16
_START = struct.Struct("<IiI")  # of a state: magic, sequence, number of streams
_U32 = struct.Struct("<I")
_CELL = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("sequence", "<i4")])


class SnapshotFormat(NamedTuple):
    """The properties that a snapshot and an engine must share. ``n_streams`` may differ where the memory is plain.

    ``state_version`` is llama.cpp's number for the form of a sequence's state, which it does not check itself.
    """

    fingerprint: bytes
    state_version: int
    type_k: str
    type_v: str
    n_streams: int
    adapters: bytes = bytes(16)  # the digest of the set that the cells were computed with; zeros: none


class Snapshot(NamedTuple):
    """A sequence: ``tokens``, of which ``n_prompt`` were given, and the ``state`` of the first ``n_cells``.

    ``active_from``: see Request.
    """

    tokens: list[int]
    n_prompt: int
    n_cells: int
    state: bytes
    active_from: int = UNLIMITED


def pack(snapshot: Snapshot, layout: SnapshotFormat) -> bytes:
    """The bytes of a snapshot."""
    return b"".join(parts_of(snapshot, layout))


def parts_of(snapshot: Snapshot, layout: SnapshotFormat) -> list[bytes]:
    """The bytes of a snapshot in parts, of which one is the state."""
    single = _as_single(snapshot.state, layout.n_streams, snapshot.n_cells)
    state, n_streams = (snapshot.state, layout.n_streams) if single is None else (single, 0)
    head = _HEADER.pack(
        _MAGIC,
        layout.fingerprint,
        layout.state_version,
        layout.type_k.encode(),
        layout.type_v.encode(),
        len(snapshot.tokens),
        snapshot.n_prompt,
        snapshot.n_cells,
        snapshot.active_from if snapshot.active_from < len(snapshot.tokens) else _NEVER,
        n_streams,
        len(state),
        layout.adapters,
    )
    parts = [head, np.array(snapshot.tokens, "<i4").tobytes(), state]
    return [*parts, _digest(*parts)]


def unpack(data: bytes, layout: SnapshotFormat, n_vocab: int) -> Snapshot:
    """The snapshot in ``data``, with a state that a context of this layout can load; ``b""`` if it cannot.

    Raises InvalidRequestError for bytes that are no snapshot, or are damaged, or belong to another model or other types
    of keys and values.
    """
    if len(data) < _HEADER.size + _CHECK_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise InvalidRequestError(
            f"these {len(data)} bytes are no snapshot of this version of llamapipe; give what Generation.snapshot() "
            "returned"
        )
    body = memoryview(data)[:-_CHECK_BYTES]
    if _digest(body) != data[-_CHECK_BYTES:]:
        raise InvalidRequestError("the snapshot is damaged: its checksum does not match; use another copy")
    head = _HEADER.unpack_from(body)
    (
        _,
        fingerprint,
        version,
        *types,
        n_tokens,
        n_prompt,
        n_cells,
        active_from,
        n_streams,
        n_state,
        adapters,
    ) = head
    if fingerprint != layout.fingerprint:
        raise InvalidRequestError(
            f"the snapshot is of another model (fingerprint {fingerprint.hex()[:12]}, this model's is "
            f"{layout.fingerprint.hex()[:12]}); restore it with the file that it was made with"
        )
    if adapters != layout.adapters:
        before = "other adapters or scales" if any(adapters) else "the model alone"
        raise InvalidRequestError(
            f"the snapshot was made with {before}; restore it with the SamplingParams.adapter that it was "
            "made with"
        )
    if version != layout.state_version:
        raise InvalidRequestError(
            f"the snapshot was made with another llama.cpp, whose states have version {version}, not "
            f"{layout.state_version}; make it again with this build"
        )
    end = _HEADER.size + 4 * n_tokens
    is_active = active_from != _NEVER
    if (
        len(body) != end + n_state
        or not 0 < n_prompt <= n_tokens
        or n_cells > n_tokens
        or (is_active and active_from >= n_tokens)
    ):
        raise InvalidRequestError(
            "the snapshot is damaged: its lengths contradict each other; use another copy"
        )
    tokens = np.frombuffer(body[_HEADER.size : end], "<i4")
    if ((tokens < 0) | (tokens >= n_vocab)).any():
        raise InvalidRequestError(
            "the snapshot is damaged: it has tokens outside the vocabulary; use another copy"
        )
    own = tuple(bytes(name).rstrip(b"\0") for name in types)
    if own != (layout.type_k.encode(), layout.type_v.encode()):
        names = [name.decode("ascii", "replace") for name in own]
        raise InvalidRequestError(
            f"the snapshot has type_k={names[0]!r} and type_v={names[1]!r}, this engine type_k={layout.type_k!r} and "
            f"type_v={layout.type_v!r}; make the engine with the snapshot's types"
        )
    state = bytes(body[end:])
    if n_streams == 0 and state:
        state = _as_streams(state, layout.n_streams, n_cells)
    elif n_streams != layout.n_streams:
        state = b""
    n_cells = n_cells if state else 0
    return Snapshot(tokens.tolist(), n_prompt, n_cells, state, active_from if is_active else UNLIMITED)


def _as_single(state: bytes, n_streams: int, n_cells: int) -> bytes | None:
    """A state as that of a context with one stream. None if the memory is not plain."""
    if len(state) < _START.size or _START.unpack_from(state)[2] != n_streams:
        return None
    begin, end = _START.size, len(state)
    n_empty = 0  # streams before that of the sequence
    while begin + 4 <= end and state[begin : begin + 4] == bytes(4):
        begin += 4
        n_empty += 1
    end -= 4 * (n_streams - 1 - n_empty)
    if any(state[end:]) or not _is_plain(memoryview(state)[begin:end], n_cells):
        return None
    return _START.pack(*_START.unpack_from(state)[:2], 1) + state[begin:end]


def _as_streams(state: bytes, n_streams: int, n_cells: int) -> bytes:
    """The state of a context with one stream as that of one with ``n_streams``. Raises InvalidRequestError."""
    cells = memoryview(state)[_START.size :]
    if len(state) < _START.size or not _is_plain(cells, n_cells):
        raise InvalidRequestError("the snapshot is damaged: its cells are inconsistent; use another copy")
    start = _START.pack(*_START.unpack_from(state)[:2], n_streams)
    return b"".join((start, cells, bytes(4 * (n_streams - 1))))


def _is_plain(cells: memoryview, n_cells: int) -> bool:
    """Whether these are a number of cells, then the cells of one sequence at the positions from 0 on."""
    if n_cells == 0 or len(cells) < 4 + n_cells * _CELL.itemsize or _U32.unpack_from(cells)[0] != n_cells:
        return False
    table = np.frombuffer(cells, _CELL, n_cells, 4)
    return bool((table["position"] == np.arange(n_cells)).all() and (table["n_sequences"] == 1).all())


def _digest(*parts: bytes | memoryview) -> bytes:
    from hashlib import blake2b

    made = blake2b(digest_size=_CHECK_BYTES)
    for part in parts:
        made.update(part)
    return made.digest()

"""Snapshots: a sequence, its KV cells and its saved states as bytes, to continue later or in another process.

Open this file to change the format of these bytes, or which engine may load them.

The principle: a snapshot is loaded only where its cells mean the same. It has a header, a table of the states, the
tokens as int32, llama.cpp's state of the whole sequence, the states of its prefixes, and a checksum. The header names
the properties that the cells depend on (``SnapshotFormat``). The checksum does not protect against forgery, so
``state_layout.py`` reads each state before llama.cpp does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llamapipe._engine.policy.core import UNLIMITED
from llamapipe._engine.runtime.state_layout import Bytes, StateError, StateLayout
from llamapipe.errors import InvalidRequestError

_KIND, _VERSION = b"llpsnap", b"5"
_MAGIC = _KIND + _VERSION
_HEADER = struct.Struct("<8s16sI8s8sIIIIIQ16s")
_STATE = struct.Struct("<IQ")  # tokens, bytes
_NEVER = 2**32 - 1
_CHECK_BYTES = 16


class SnapshotFormat(NamedTuple):
    """The properties that a snapshot and an engine must share.

    ``state_version`` is llama.cpp's version number for sequence states, which llama.cpp does not check itself.
    ``states``: the layout of this context's states; None: unknown, so snapshots have only tokens.
    """

    fingerprint: bytes
    state_version: int
    type_k: str
    type_v: str
    states: StateLayout | None
    adapters: bytes = bytes(16)  # digest of the adapters that computed the cells; zeros: none


class Snapshot(NamedTuple):
    """A sequence: ``tokens``, whose first ``n_prompt`` are the prompt, and the ``state`` of the first ``n_cells``.

    ``active_from``: see Request. ``states``: for a memory that cannot go back, pairs of a number of tokens and the
    state after them, in ascending order. ``is_stale``: the cells in ``state`` are right, but its other parts belong to
    a later place.
    """

    tokens: list[int]
    n_prompt: int
    n_cells: int
    state: Bytes
    active_from: int = UNLIMITED
    states: Sequence[tuple[int, Bytes]] = ()
    is_stale: bool = False


def pack(snapshot: Snapshot, layout: SnapshotFormat) -> bytes:
    """Return the bytes of a snapshot."""
    return b"".join(parts_of(snapshot, layout))


def parts_of(snapshot: Snapshot, layout: SnapshotFormat) -> list[Bytes]:
    """Return the bytes of a snapshot in parts. Some parts are views of its states, so that these are not copied."""
    n_cells = snapshot.n_cells
    state: list[Bytes] = []
    states: list[tuple[int, list[Bytes]]] = []
    if layout.states is not None:
        try:
            state = layout.states.to_stored(snapshot.state, n_cells) if n_cells else []
            states = [(n, layout.states.to_stored(data, n, True)) for n, data in snapshot.states]
        except StateError:  # unlike the empty states: only the tokens are stored
            state, states = [], []
    head = _HEADER.pack(
        _MAGIC,
        layout.fingerprint,
        layout.state_version,
        layout.type_k.encode(),
        layout.type_v.encode(),
        len(snapshot.tokens),
        snapshot.n_prompt,
        n_cells if state else 0,
        snapshot.active_from if snapshot.active_from < len(snapshot.tokens) else _NEVER,
        len(states),
        sum(map(len, state)),
        layout.adapters,
    )
    table = b"".join(_STATE.pack(n, sum(map(len, buffers))) for n, buffers in states)
    tokens = np.array(snapshot.tokens, "<i4").tobytes()
    parts: list[Bytes] = [head, table, tokens, *state, *(part for _, buffers in states for part in buffers)]
    return [*parts, _digest(*parts)]


def unpack(data: Bytes, layout: SnapshotFormat, n_vocab: int) -> Snapshot:
    """Return the snapshot in ``data``, with states that a context of this layout can load.

    The snapshot has no states if ``layout.states`` is None. Raises InvalidRequestError for bytes that are not a
    snapshot, are damaged, or belong to another model, other adapters, another llama.cpp, or other types of keys and
    values.
    """
    kind, version = bytes(data[: len(_KIND)]), bytes(data[len(_KIND) : len(_MAGIC)])
    if kind == _KIND and version != _VERSION and len(data) >= _HEADER.size:
        raise InvalidRequestError(
            f"the snapshot has version {version.decode('ascii', 'replace')} of its format, this llamapipe reads "
            f"{_VERSION.decode()}; make it again"
        )
    if len(data) < _HEADER.size + _CHECK_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise InvalidRequestError(
            f"these {len(data)} bytes are not a snapshot of this version of llamapipe; give what Generation.snapshot() "
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
        n_states,
        n_state,
        adapters,
    ) = head
    if fingerprint != layout.fingerprint:
        raise InvalidRequestError(
            f"the snapshot is from another model (fingerprint {fingerprint.hex()[:12]}, this model's is "
            f"{layout.fingerprint.hex()[:12]}); restore it with the file and the rope options that it was made with"
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
    begin = _HEADER.size + _STATE.size * n_states
    end = begin + 4 * n_tokens
    is_active = active_from != _NEVER
    table = list(_STATE.iter_unpack(body[_HEADER.size : begin])) if end <= len(body) else []
    places = [n for n, _ in table]
    if (
        len(body) != end + n_state + sum(n for _, n in table)
        or not 0 < n_prompt <= n_tokens
        or n_cells > n_tokens
        or bool(n_cells) != bool(n_state)
        or (is_active and active_from >= n_tokens)
        or len(table) != n_states
        or not all(0 < a < b for a, b in pairwise((*places, n_tokens + 1)))
    ):
        raise InvalidRequestError(
            "the snapshot is damaged: its lengths contradict each other; use another copy"
        )
    tokens = np.frombuffer(body[begin:end], "<i4")
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
    active = active_from if is_active else UNLIMITED
    if layout.states is None:
        return Snapshot(tokens.tolist(), n_prompt, 0, b"", active)
    state, is_last, states = b"", True, []
    try:
        if n_cells:
            state, is_last = layout.states.loadable(body[end : end + n_state], n_cells)
        end += n_state
        for n, n_bytes in table:
            states.append((n, layout.states.loadable(body[end : end + n_bytes], n, True)[0]))
            end += n_bytes
    except StateError as error:
        raise InvalidRequestError(f"the snapshot is damaged: {error}; use another copy") from None
    return Snapshot(tokens.tolist(), n_prompt, n_cells, state, active, states, not is_last)


def _digest(*parts: Bytes) -> bytes:
    from hashlib import blake2b

    digest = blake2b(digest_size=_CHECK_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()

"""Forged snapshots, with a right checksum: llama.cpp would end the process for some sizes, counts and positions."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b

HEAD, PLACE, CHECK = 88, 12, 16  # bytes of its head, an entry of its table of states, its checksum


def signed(body: bytes) -> bytes:
    """The bytes of a snapshot with their checksum."""
    return body + blake2b(body, digest_size=CHECK).digest()


def parts(snapshot: bytes) -> tuple[int, int]:
    """Where the table of states and the first state begin."""
    n_tokens, _, _, _, n_states = struct.unpack_from("<5I", snapshot, 44)
    return HEAD, HEAD + PLACE * n_states + 4 * n_tokens


def forged(body: bytes, at: int, value: int) -> bytes:
    """The bytes of a snapshot without a checksum, with another number at a place."""
    return body[:at] + struct.pack("<I", value) + body[at + 4 :]


def forgeries(snapshot: bytes) -> Iterator[bytes]:
    """Snapshots of a model with cells that say something else in one place, all of them to be refused."""
    body, (_, state) = snapshot[:-CHECK], parts(snapshot)
    for at in (44, 48, 52, 60, 64, state + 8, state + 12, state + 16):
        for value in (0, 2**31, 2**32 - 1):
            if (changed := forged(body, at, value)) != body:
                yield signed(changed)

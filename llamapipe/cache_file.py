"""Cached sequences in a file, so that an engine begins with what an earlier one of the same model had computed.

Open this file to change the format. A sequence is stored as the lengths of its head and of its snapshot, a checksum of
the head, the head as JSON, and the snapshot. The head has the key of the sequence and its marks, by their places. A
mark is a number in the place of a token, where an activated LoRA begins. If a file is cut, the sequences before the cut
are read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

Bytes = bytes | bytearray | memoryview
_START = struct.Struct("<IQI")
Write = Callable[[Hashable, Mapping[int, int], Sequence[Bytes]], None]


def is_writable(key: Hashable) -> bool:
    """Whether a key means the same in another process: it is made of texts, bytes, numbers and None."""
    if isinstance(key, tuple):
        return all(map(is_writable, key))
    return key is None or isinstance(key, (str, bytes, int, float))


@contextmanager
def written(path: Path) -> Iterator[Write]:
    """Gives a function that appends a sequence: its key, its marks, and the parts of its snapshot.

    The file appears only when it is complete. Only its user may read it. Raises OSError.
    """
    unfinished = path.with_suffix(".part")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:

            def write(key: Hashable, marks: Mapping[int, int], parts: Sequence[Bytes]) -> None:
                head = json.dumps([key, list(marks.items())], default=bytes_as_json).encode()
                file.write(_START.pack(len(head), sum(map(len, parts)), crc32(head)))
                file.write(head)
                file.writelines(parts)

            yield write
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def remove(path: Path, is_wanted: Callable[[Hashable], bool]) -> None:
    """Removes the sequences of the keys that are wanted from a file, if it is there. Raises OSError, ValueError."""
    with suppress(FileNotFoundError), written(path) as write:
        for key, marks, snapshot in read(path):
            if not is_wanted(key):
                write(key, marks, [snapshot])


def read(path: Path) -> Iterator[tuple[Hashable, dict[int, int], bytes]]:
    """The keys, marks and snapshots of a file. Raises OSError, ValueError."""
    with path.open("rb") as file:
        n_left = os.fstat(file.fileno()).st_size
        while len(start := file.read(_START.size)) == _START.size:
            n_head, n_bytes, checksum = _START.unpack(start)
            n_left -= _START.size + n_head + n_bytes
            if n_left < 0:  # cut, or damaged: a length may say any number
                return
            head, snapshot = file.read(n_head), file.read(n_bytes)
            if crc32(head) != checksum:
                raise ValueError(f"{path} is damaged")
            key, marks = json.loads(head, object_hook=lambda found: bytes.fromhex(found["hex"]))
            yield as_tuple(key), dict(marks), snapshot


def bytes_as_json(value: object) -> dict[str, str]:
    """The bytes of a key, in an object."""
    assert isinstance(value, bytes)
    return {"hex": value.hex()}


def as_tuple(value: Any) -> Any:
    """Returns a value with its lists made tuples."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value

"""Cached sequences in a file, so that an engine begins with what an earlier one of the same model had computed.

Open it for the form of the file: for each sequence the lengths of its key and of its snapshot, the key as JSON, and the
snapshot. Of a file that is cut, the sequences before the cut are read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_LENGTHS = struct.Struct("<IQ")
Write = Callable[[Hashable, Sequence[bytes]], None]


def is_writable(key: Hashable) -> bool:
    """Whether a key means the same in another process: it is None, or made of texts."""
    return key is None or (
        isinstance(key, tuple) and all(part is None or isinstance(part, str) for part in key)
    )


@contextmanager
def written(path: Path) -> Iterator[Write]:
    """A function that appends a sequence: its key, and the parts of its snapshot.

    The file is there when all of it is. Only its user may read it. Raises OSError.
    """
    unfinished = path.with_suffix(".part")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:

            def write(key: Hashable, parts: Sequence[bytes]) -> None:
                name = json.dumps(key).encode()
                file.write(_LENGTHS.pack(len(name), sum(map(len, parts))))
                file.write(name)
                file.writelines(parts)

            yield write
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def remove(path: Path, is_wanted: Callable[[Hashable], bool]) -> None:
    """Removes the sequences of the keys that are wanted from a file, if it is there. Raises OSError, ValueError."""
    with suppress(FileNotFoundError), written(path) as write:
        for key, snapshot in read(path):
            if not is_wanted(key):
                write(key, [snapshot])


def read(path: Path) -> Iterator[tuple[Hashable, bytes]]:
    """The keys and snapshots of a file. Raises OSError, ValueError."""
    with path.open("rb") as file:
        while len(lengths := file.read(_LENGTHS.size)) == _LENGTHS.size:
            n_name, n_bytes = _LENGTHS.unpack(lengths)
            name, snapshot = file.read(n_name), file.read(n_bytes)
            if len(snapshot) < n_bytes:
                return
            key = json.loads(name)
            yield tuple(key) if isinstance(key, list) else key, snapshot

"""Reads and writes files of cached sequences: their names, their heads, and hashes of tokens.

Open this file to change the format. A file holds one sequence: a magic number, the lengths of the head and of the
snapshot, a checksum of the head, the head as JSON, and the snapshot. The head says who may use the sequence and for
which prompts, so no snapshot is read needlessly. It has the key, hashes of the blocks, the positions of saved states,
and the marks. A mark is a negative number in place of a token: an activated LoRA begins there.

The cache folder has a subfolder for each form of cells. ``_engine.runtime.disk_cache`` decides which files are written,
read and deleted; ``forget`` is for programs that have no engine.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import BytesIO, FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from llamapipe.host import files

BLOCK = 64  # tokens per block
SUFFIX, PARTIAL = ".kv", ".part"
_START = struct.Struct("<8sIIQ")  # magic, size of the head, its checksum, size of the snapshot
_MAGIC = b"llpkv\0\0\1"
_DEEPEST = 8  # maximum nesting of tuples in a key; the keys that engines make have less


class Head(NamedTuple):
    """A file's description of its sequence. ``blocks``: hashes of its blocks; ``tail``: the hash of the other tokens.

    ``has_cells``: the cells can be used up to their end. ``places``: positions where states were saved, each with the
    hash of the tokens after its last whole block. ``marks``: negative numbers in place of tokens.
    """

    cache_key: Hashable
    n: int
    has_cells: bool
    places: dict[int, int]
    blocks: list[int]
    tail: int
    marks: dict[int, int]


def is_writable(key: Hashable) -> bool:
    """Return whether a key means the same in another process: it has only strings, bytes, numbers and None."""
    if isinstance(key, tuple):
        return all(map(is_writable, key))
    return key is None or isinstance(key, (str, bytes, int, float))


def name_of(tokens: Sequence[int], cache_key: Hashable) -> str:
    """Return the file name of a sequence."""
    digest = blake2b(repr(cache_key).encode(), digest_size=16)
    digest.update(array("q", tokens))
    return digest.hexdigest() + SUFFIX


def pack_head(head: Head, n_snapshot: int) -> tuple[bytes, bytes]:
    """Return the start and the head of a file, as two byte strings; the snapshot follows them."""
    blocks = array("Q", head.blocks).tobytes().hex()
    places, marks = [*head.places.items()], [*head.marks.items()]
    fields = [head.cache_key, head.n, head.has_cells, places, head.tail, blocks, marks]
    text = json.dumps(fields, default=_bytes_as_json).encode()
    return _START.pack(_MAGIC, len(text), crc32(text), n_snapshot), text


def read_head(file: FileIO | BytesIO) -> tuple[Head, int]:
    """Return the head of a file, and the number of bytes that follow it. Raises OSError, ValueError."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise ValueError("it is cut")
    magic, n_head, checksum, n_snapshot = _START.unpack(start)
    if magic != _MAGIC:
        raise ValueError("it has another format")
    if _START.size + n_head + n_snapshot != size:
        raise ValueError("it is cut, or its lengths are damaged")
    text = file.read(n_head)
    if crc32(text) != checksum:
        raise ValueError("its head is damaged")
    try:
        return _check_head(
            json.loads(text, object_hook=lambda fields: bytes.fromhex(fields["hex"]))
        ), n_snapshot
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("its head is damaged") from error


def _check_head(fields: Any) -> Head:
    """Return the checked fields as a head. Raises KeyError, TypeError, ValueError for wrong fields."""
    key, n, has_cells, places, tail, blocks, marks = fields
    hashes = array("Q")
    hashes.frombytes(bytes.fromhex(blocks))
    numbers = [n, tail, *(number for pair in (*places, *marks) for number in pair)]
    if not (
        all(type(number) is int for number in numbers)
        and type(has_cells) is bool
        and len(hashes) == n // BLOCK
        and all(0 < a < b for a, b in pairwise((*dict(places), n + 1)))
        and all(0 <= i < n and -(2**63) <= mark < 0 for i, mark in marks)
    ):
        raise ValueError("its head is damaged")
    return Head(_as_tuple(key), n, has_cells, dict(places), hashes.tolist(), tail, dict(marks))


@contextmanager
def open_private(path: Path) -> Iterator[FileIO]:
    """Open a file for reading, if it belongs to this user and is not a symbolic link.

    Raises OSError; ValueError for a file that others could write.
    """
    fd = files.open_file(path, os.O_RDONLY)
    with FileIO(fd) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not files.is_ours(status):
            raise ValueError("it is not a file of this user")
        if files.may_be_written_by_others(status):
            raise ValueError("other users may write to it")
        yield file


def create_locked(path: Path) -> int:
    """Open a new file that ``remove_if_dead`` keeps until it is closed. Return its descriptor. Raises OSError."""
    while True:
        fd = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        files.lock(fd)  # another process holds the lock only briefly
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # before the lock, another process took the file for a dead writer's


def remove_if_dead(path: str | Path) -> None:
    """Remove an unfinished file whose writer has ended."""
    with suppress(OSError):
        fd = files.open_file(path, os.O_RDONLY)
        try:
            files.lock(fd, wait=False)
            Path(path).unlink()
        finally:
            os.close(fd)


def subfolders(root: Path) -> list[str]:
    """Return the folders in a folder. Raises OSError."""
    with os.scandir(root) as folders:
        return [folder.path for folder in folders if folder.is_dir(follow_symlinks=False)]


def forget(root: Path, is_wanted: Callable[[Hashable], bool]) -> None:
    """Delete the files of the selected keys in all subfolders of a folder. Raises OSError.

    No other program may write there during the call.
    """
    with suppress(FileNotFoundError):
        for folder in subfolders(root):
            for path in list(Path(folder).iterdir()):
                if path.suffix == PARTIAL:
                    remove_if_dead(path)
                elif path.suffix == SUFFIX and not path.is_symlink() and _is_of(path, is_wanted):
                    path.unlink(missing_ok=True)


def _is_of(path: Path, is_wanted: Callable[[Hashable], bool]) -> bool:
    """Return whether a file belongs to a selected key. A file that no engine would read belongs to none."""
    with suppress(FileNotFoundError, ValueError), open_private(path) as file:
        return is_wanted(read_head(file)[0].cache_key)
    return False


# ---- keys in JSON
def _bytes_as_json(value: object) -> dict[str, str]:
    assert isinstance(value, bytes)
    return {"hex": value.hex()}


def _as_tuple(value: Any, depth: int = _DEEPEST) -> Any:
    """Return a value with its lists converted to tuples.

    Raises ValueError for deeply nested lists: functions of keys are recursive, and must never exhaust an engine
    thread's stack.
    """
    if not isinstance(value, list):
        return value
    if not depth:
        raise ValueError("its head is damaged")
    return tuple(_as_tuple(part, depth - 1) for part in value)


# ---- hashes
def hashes_of(keys: Sequence[int], n: int) -> list[int]:
    """Return a hash of each whole block of the first ``n`` keys."""
    data = memoryview(array("q", keys[:n])).cast("B")
    size = 8 * BLOCK
    return [_number(data[at : at + size]) for at in range(0, len(data) - size + 1, size)]


def tail_of(keys: Sequence[int], n: int) -> int:
    """Return a hash of the keys after the last whole block of the first ``n`` keys."""
    return _hash(keys[n - n % BLOCK : n])


def _hash(keys: Sequence[int]) -> int:
    return _number(memoryview(array("q", keys)).cast("B"))


def _number(data: memoryview) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), sys.byteorder)

"""Cached sequences on disk: what was computed survives a restart, and what host memory has no room for is kept.

Open this file to change the format of these files, which of them are written, read or deleted, or when.

The principle: a file is one sequence, and it never changes. It is written under another name and renamed when it is
whole, so a process that is killed leaves nothing that another one could read. Its name is a digest of its tokens and
their key; its head has the key and a hash of each block of tokens, and the heads of all files are in a prefix tree.
So a lookup takes time in the length of the prompt, and a collision costs a read: what was read goes into the prefix
cache with its own tokens, which decides what a request may use.

A folder has the files of everything that computes the same cells: model, adapters of the model, types, kernels. Other
processes may use it at the same time. None of them changes a file, so they need no locks: a file that is gone was
deleted by another one. The file that was used least recently goes first, whichever folder of the cache it is in.

Files are read and written by one thread, so a slow disk delays only the request that waits for a file, and that one
only for ``PATIENCE_S``. Reads come first.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import struct
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import FileIO
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from zlib import crc32

from llamapipe._engine.policy.prefix_tree import PrefixTree
from llamapipe._engine.runtime.snapshot import Snapshot, SnapshotFormat, parts_of, unpack
from llamapipe._engine.runtime.state_layout import Saved
from llamapipe.cache_file import as_tuple, bytes_as_json, is_writable
from llamapipe.llama.native_pipeline import SavedCells
from llamapipe.locks import Lock

DISK_THREAD_NAME = "llamapipe-disk-cache"
PATIENCE_S = 20.0  # that a request waits for a file; after it, its tokens are computed
MIN_GAIN = 64  # tokens that a request must gain to wait for a file, and a sequence to be written
REST_S = 0.5  # of an engine without work, before each sequence that is copied to be written
GROWTH = 16  # a sequence that has grown by less than this part of it is not written again before the end
CLOSE_S = 10.0  # for what is written when an engine is closed
_BLOCK = 64  # tokens
_MOST_WAITING = 2  # sequences to be written; each takes host memory until then
_MOST_OFFERED = 2**16
_RETRY_S = 60.0  # without writes after one that failed
_RESCAN_S = 1.0  # between two looks at what other processes have written
_START = struct.Struct("<8sIIQ")  # magic, bytes of the head, their checksum, bytes of the snapshot
_MAGIC = b"llpkv\0\0\1"
_SUFFIX, _PARTIAL = ".kv", ".part"
_log = logging.getLogger("llamapipe")


class CachedSequence(NamedTuple):
    """What is written or was read. ``cells``: of all ``tokens``; None: there are states alone.

    ``states``: of beginnings, by their numbers of tokens. ``is_stale``: see Snapshot. Who has it closes it.
    """

    tokens: list[int]
    cache_key: Hashable
    cells: Saved | None
    states: Sequence[tuple[int, Saved]]
    is_stale: bool = False

    def copies(self) -> list[Saved]:
        """The cells and the states."""
        return [*([] if self.cells is None else [self.cells]), *(state for _, state in self.states)]

    def close(self) -> None:
        """Frees the memory."""
        for copy in self.copies():
            copy.close()


class _Head(NamedTuple):
    """What a file says of its sequence. ``blocks``: hashes of its blocks; ``tail``: of the tokens after them.

    ``has_cells``: the cells can be used to their end. ``marks``: negative numbers in the place of tokens.
    """

    cache_key: Hashable
    n: int
    has_cells: bool
    places: list[int]
    blocks: list[int]
    tail: int
    marks: dict[int, int]


class Entry:
    """A file: ``n`` tokens, of which the cells are there (``has_cells``), and states at ``places``."""

    __slots__ = ("cache_key", "has_cells", "n", "n_bytes", "name", "places", "tail")

    def __init__(self, name: str, n_bytes: int, head: _Head) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self.cache_key = head.cache_key
        self.n = head.n
        self.has_cells = head.has_cells
        self.places = head.places
        self.tail = head.tail

    def __repr__(self) -> str:
        return f"<Entry {self.name[:8]} n={self.n}>"


class DiskCache:
    """The files of one engine's cells. ``folder``: of the cache; this engine's files are in a folder of it.

    ``max_bytes``: of all files of the cache. ``layout``: what the cells depend on. ``form``: what else they depend on,
    in any words. ``n_ctx``: longer sequences do not fit. ``can_cut``: a sequence can be used up to any of its tokens,
    not only at its end and at the places of its states. Raises ValueError for a folder that cannot be used, or that
    others could write to.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        layout: SnapshotFormat,
        form: str,
        n_vocab: int,
        n_ctx: int,
        can_cut: bool,
    ) -> None:
        digest = blake2b(
            repr((layout.fingerprint, layout.state_version, layout.type_k, layout.type_v, form)).encode(),
            digest_size=16,
        )
        self.root = folder
        self.folder = folder / digest.hexdigest()
        self.n_read = self.n_written = 0
        self._max_bytes = max_bytes
        self._layout = layout
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx
        self._can_cut = can_cut
        self._lock = Lock()
        self._tree: PrefixTree[Entry] = PrefixTree()
        self._entries: dict[str, Entry] = {}
        self._reads: deque[tuple[Entry, Callable[[CachedSequence | None], object]]] = deque()
        self._writes: deque[CachedSequence] = deque()
        self._written: CachedSequence | None = None  # the one that is written now
        self._offered: set[str] = set()  # files that were or will be written, or are too large
        self._n_forgotten = 0  # calls of ``forget``: a write that began before one of them is not kept
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._retry_at = self._rescan_at = 0.0
        self._has_warned = False
        try:
            self._make_folders()
            self._scan()
        except OSError as error:
            raise ValueError(f"cache_dir: {error}; give a folder of your own") from error

    def __repr__(self) -> str:
        return f"<DiskCache {str(self.folder)!r} n={len(self._entries)}>"

    # ---- lookups: the engine thread
    def find(self, keys: Sequence[int], cache_key: Hashable, limit: int) -> tuple[int, Entry] | None:
        """How many of the first ``limit`` cells a file has for these keys, and the file. None: too few."""
        if limit < MIN_GAIN:
            return None
        hashes = _hashes(keys, limit - limit % _BLOCK)
        best: tuple[int, Entry] | None = None
        with self._lock:
            for n_blocks, entry in self._tree.find(hashes, len(hashes), cache_key):
                n = self._usable(entry, n_blocks, keys, limit)
                if n >= MIN_GAIN and (best is None or n > best[0]):
                    best = n, entry
        if best is None or best[0] < limit - MIN_GAIN:
            self._look_again()
        return best

    def _usable(self, entry: Entry, n_blocks: int, keys: Sequence[int], limit: int) -> int:
        if entry.n > self._n_ctx:
            return 0
        n = n_blocks * _BLOCK
        if n == entry.n - entry.n % _BLOCK and entry.n <= limit and _hash(keys[n : entry.n]) == entry.tail:
            n = entry.n
        if self._can_cut:
            return n if entry.has_cells else 0
        if n == entry.n and entry.has_cells:
            return n
        return max((place for place in entry.places if place <= n), default=0)

    def read(self, entry: Entry, done: Callable[[CachedSequence | None], object]) -> None:
        """Reads a file in the thread, then calls ``done`` with its sequence; None if it cannot be read."""
        self._put(self._reads, (entry, done))

    # ---- writing: the engine thread
    @property
    def has_room(self) -> bool:
        """Whether another sequence may wait to be written now."""
        return len(self._writes) < _MOST_WAITING and monotonic() >= self._retry_at

    def wants(self, keys: Sequence[int], cache_key: Hashable, at_end: bool = False) -> bool:
        """Whether writing a sequence would keep enough tokens that no file has.

        ``at_end``: it will not grow any more.
        """
        n = len(keys)
        if not is_writable(cache_key):
            return False
        found = self.find(keys, cache_key, n)
        n_new = n - (0 if found is None else found[0])
        least = 1 if n_new == n else MIN_GAIN if at_end else max(MIN_GAIN, n // GROWTH)
        return n_new >= least and _name(keys, cache_key) not in self._offered

    def write(self, sequence: CachedSequence) -> None:
        """Writes a sequence in the thread, which frees its memory."""
        if len(self._offered) > _MOST_OFFERED:
            self._offered.clear()
        self._offered.add(_name(sequence.tokens, sequence.cache_key))
        self._put(self._writes, sequence)

    def wait_for_room(self, deadline: float) -> bool:
        """Waits until another sequence may wait, at most to a time of ``monotonic``. Returns whether it may."""
        with self._changed:
            while len(self._writes) >= _MOST_WAITING:
                if not self._changed.wait(max(deadline - monotonic(), 0)):
                    return False
        return monotonic() >= self._retry_at

    # ---- any thread
    @property
    def n_bytes(self) -> int:
        """The bytes of this engine's files."""
        with self._lock:
            return sum(entry.n_bytes for entry in self._entries.values())

    def forget(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Deletes the files of the wanted keys, and drops what waits to be written. Raises OSError."""
        with self._changed:
            self._n_forgotten += 1
            self._offered.clear()
            dropped = [one for one in self._writes if is_wanted(one.cache_key)]
            for one in dropped:
                self._writes.remove(one)
                one.close()
            self._changed.notify_all()
        self._scan()
        with self._lock:
            wanted = [entry for entry in self._entries.values() if is_wanted(entry.cache_key)]
            for entry in wanted:
                self._drop(entry)
        for entry in wanted:
            (self.folder / entry.name).unlink(missing_ok=True)

    def close(self, deadline: float | None = None) -> None:
        """Writes what waits, at most to a time of ``monotonic``, and ends the thread."""
        with self._changed:
            while deadline is not None and (self._writes or self._written is not None):
                if not self._changed.wait(max(deadline - monotonic(), 0)):
                    break
            self._is_closed = True
            for _, done in self._reads:
                done(None)
            self._reads.clear()
            while self._writes:
                self._writes.pop().close()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(1.0)  # a write that hangs ends with the process

    # ---- the thread
    def _put(self, queue: deque[Any], job: object) -> None:
        with self._changed:
            queue.append(job)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=DISK_THREAD_NAME, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            sequence = None
            with self._changed:
                while not (self._reads or self._writes or self._is_closed or self._rescan_at < 0):
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._reads.popleft() if self._reads else None
                if job is None and self._writes:
                    sequence = self._written = self._writes.popleft()
                n_forgotten = self._n_forgotten
            if job is not None:
                job[1](self._read(job[0]))
            elif sequence is not None:
                try:
                    self._write(sequence, n_forgotten)
                finally:
                    sequence.close()
                    with self._changed:
                        self._written = None
                        self._changed.notify_all()
            else:
                self._rescan_at = monotonic() + _RESCAN_S
                with suppress(OSError):
                    self._scan()

    def _look_again(self) -> None:
        """Lets the thread look at what other processes have written, unless it has done so just now."""
        if 0 <= self._rescan_at <= monotonic():
            with self._changed:
                self._rescan_at = -1.0
                self._changed.notify_all()

    def _read(self, entry: Entry) -> CachedSequence | None:
        path = self.folder / entry.name
        try:
            with _opened(path) as file:
                head, n_bytes = _read_head(file)
                data = bytearray(n_bytes)
                if file.readinto(data) != n_bytes:
                    raise ValueError("it is cut")
                os.utime(file.fileno())
            found = unpack(data, self._layout, self._n_vocab)
            del data
            tokens = [head.marks.get(i, token) for i, token in enumerate(found.tokens)]
            cells = SavedCells.of_bytes(found.state) if found.n_cells else None
            states = [(n, SavedCells.of_bytes(state)) for n, state in found.states]
        except FileNotFoundError:  # another process has deleted it
            pass
        except MemoryError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s is deleted, because it cannot be used: %s", path, error)
            with suppress(OSError):
                path.unlink()
        else:
            self.n_read += 1
            return CachedSequence(tokens, head.cache_key, cells, states, found.is_stale)
        with self._lock:
            self._drop(entry)
        return None

    def _write(self, sequence: CachedSequence, n_forgotten: int) -> None:
        head = _head_of(sequence)
        try:
            entry = self._write_file(sequence, head, n_forgotten)
        except (OSError, ValueError) as error:
            self._retry_at = monotonic() + _RETRY_S
            self._offered.clear()
            if not self._has_warned:
                self._has_warned = True
                _log.warning("cached prefixes are not written to %s: %s", self.root, error)
            return
        if entry is None:
            return
        self._has_warned = False
        self.n_written += 1
        with self._lock:
            self._add(entry, head.blocks)
            replaced = self._replaced_by(entry, head.blocks, sequence.tokens)
            for old in replaced:
                self._drop(old)
        for old in replaced:
            with suppress(OSError):
                (self.folder / old.name).unlink(missing_ok=True)

    def _write_file(self, sequence: CachedSequence, head: _Head, n_forgotten: int) -> Entry | None:
        cells = sequence.cells
        snapshot = Snapshot(
            [max(token, 0) for token in sequence.tokens],
            head.n,
            0 if cells is None else head.n,
            b"" if cells is None else cells.view(),
            states=[(n, state.view()) for n, state in sequence.states],
        )
        parts = parts_of(snapshot, self._layout)
        if sum(map(len, parts)) < sum(state.n_bytes for state in sequence.copies()) // 2:
            return None  # cells of another form than the context's empty ones: only tokens are left
        start = _packed_head(head, sum(map(len, parts)))
        n_bytes = sum(map(len, (*start, *parts)))
        if n_bytes > self._max_bytes:
            return None
        path = self.folder / _name(sequence.tokens, sequence.cache_key)
        self._make_folders()
        self._make_room(n_bytes)
        partial = self.folder / f".{path.name}.{os.getpid()}.{threading.get_ident()}{_PARTIAL}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(partial, flags, 0o600), "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells others that its writer lives
                if hasattr(os, "posix_fallocate"):  # a full disk shows before anything is written
                    os.posix_fallocate(file.fileno(), 0, n_bytes)
                file.writelines((*start, *parts))
                file.flush()
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        if n_forgotten != self._n_forgotten:  # perhaps these tokens; the caller of ``forget`` saw no file
            path.unlink(missing_ok=True)
            return None
        return Entry(path.name, n_bytes, head)

    def _replaced_by(self, new: Entry, blocks: list[int], tokens: Sequence[int]) -> list[Entry]:
        """The files of which a new one has all that could be used."""
        return [
            old
            for n_blocks, old in self._tree.prefixes(blocks, len(blocks), new.cache_key)
            if old is not new
            and old.n < new.n
            and _hash(tokens[n_blocks * _BLOCK : old.n]) == old.tail
            and (new.has_cells if self._can_cut else {*old.places, old.n} <= {*new.places})
        ]

    def _make_folders(self) -> None:
        """Makes the folders, if they are missing. Raises OSError; ValueError if others could write to them."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.root, self.folder):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            status = folder.lstat()
            problem = None
            if not stat.S_ISDIR(status.st_mode):
                problem = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is no folder"
            elif status.st_uid != os.geteuid():
                problem = f"belongs to user {status.st_uid}"
            elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                problem = "can be written to by other users"
            if problem is not None:
                raise ValueError(f"cache_dir: {folder} {problem}; give a folder of your own, with mode 700")

    def _make_room(self, n_bytes: int) -> None:
        """Deletes the files that were used least recently, of all folders, so that ``n_bytes`` more fit."""
        found = []
        for folder in _subfolders(self.root):
            with suppress(OSError), os.scandir(folder) as files:
                for file in files:
                    if file.name.endswith(_SUFFIX) and file.is_file(follow_symlinks=False):
                        with suppress(OSError):
                            status = file.stat(follow_symlinks=False)
                            found.append((status.st_mtime_ns, status.st_size, Path(file.path)))
        n_over = sum(size for _, size, _ in found) + n_bytes - self._max_bytes
        for _, size, path in sorted(found):
            if n_over <= 0:
                break
            n_over -= size
            path.unlink(missing_ok=True)
            with self._lock:
                entry = self._entries.get(path.name)
                if entry is not None and path.parent == self.folder:
                    self._drop(entry)

    # ---- the index
    def _scan(self) -> None:
        """Learns what the folder has: new files of other processes, and which are gone."""
        names = set()
        with os.scandir(self.folder) as found:
            for one in found:
                if one.name.endswith(_SUFFIX):
                    names.add(one.name)
                elif one.name.endswith(_PARTIAL):
                    _remove_if_dead(one.path)
        with self._lock:
            for name in self._entries.keys() - names:
                self._drop(self._entries[name])
            new = names - self._entries.keys()
        for name in new:
            with suppress(OSError, ValueError), _opened(self.folder / name) as file:
                head, _ = _read_head(file)
                entry = Entry(name, os.fstat(file.fileno()).st_size, head)
                with self._lock:
                    self._add(entry, head.blocks)

    def _add(self, entry: Entry, blocks: Sequence[int]) -> None:
        if (old := self._entries.get(entry.name)) is not None:
            self._drop(old)
        self._entries[entry.name] = entry
        self._tree.insert(entry, blocks, entry.cache_key)

    def _drop(self, entry: Entry) -> None:
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
            self._tree.remove(entry)
            self._offered.discard(entry.name)


# ---- files
def _head_of(sequence: CachedSequence) -> _Head:
    tokens = sequence.tokens
    blocks = _hashes(tokens, len(tokens))
    return _Head(
        sequence.cache_key,
        len(tokens),
        sequence.cells is not None and not sequence.is_stale,
        [n for n, _ in sequence.states],
        blocks,
        _hash(tokens[len(blocks) * _BLOCK :]),
        {i: token for i, token in enumerate(tokens) if token < 0},
    )


def _name(tokens: Sequence[int], cache_key: Hashable) -> str:
    """The name of a sequence's file."""
    digest = blake2b(repr(cache_key).encode(), digest_size=16)
    digest.update(array("q", tokens))
    return digest.hexdigest() + _SUFFIX


def _packed_head(head: _Head, n_snapshot: int) -> tuple[bytes, bytes]:
    """What a file begins with."""
    blocks = array("Q", head.blocks).tobytes().hex()
    found = [head.cache_key, head.n, head.has_cells, head.places, head.tail, blocks, [*head.marks.items()]]
    text = json.dumps(found, default=bytes_as_json).encode()
    return _START.pack(_MAGIC, len(text), crc32(text), n_snapshot), text


def _read_head(file: FileIO) -> tuple[_Head, int]:
    """The head of a file, and the bytes after it, which follow. Raises OSError, ValueError."""
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise ValueError("it is cut")
    magic, n_head, checksum, n_snapshot = _START.unpack(start)
    if magic != _MAGIC:
        raise ValueError("it has another format")
    if _START.size + n_head + n_snapshot != os.fstat(file.fileno()).st_size:
        raise ValueError("it is cut, or its lengths are damaged")
    text = file.read(n_head)
    if crc32(text) != checksum:
        raise ValueError("its head is damaged")
    try:
        return _checked(json.loads(text, object_hook=lambda found: bytes.fromhex(found["hex"]))), n_snapshot
    except (KeyError, TypeError) as error:
        raise ValueError("its head is damaged") from error


def _checked(fields: Any) -> _Head:
    """The fields of a head. Raises KeyError, TypeError, ValueError for others."""
    key, n, has_cells, places, tail, blocks, marks = fields
    hashes = array("Q")
    hashes.frombytes(bytes.fromhex(blocks))
    numbers = [n, tail, *places, *(number for mark in marks for number in mark)]
    if not (
        all(type(number) is int for number in numbers)
        and type(has_cells) is bool
        and len(hashes) == n // _BLOCK
        and all(0 < a < b for a, b in pairwise((*places, n + 1)))
    ):
        raise ValueError("its head is damaged")
    return _Head(as_tuple(key), n, has_cells, places, hashes.tolist(), tail, dict(marks))


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    """A file to be read, of this user and with one name. Raises OSError; ValueError for one that others could write."""
    # O_NONBLOCK: a pipe would be waited for.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with FileIO(fd) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is not a file of this user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("other users may write to it")
        yield file


def _remove_if_dead(path: str) -> None:
    """Removes an unfinished file whose writer has ended."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).unlink()
        finally:
            os.close(fd)


def _subfolders(root: Path) -> list[str]:
    with os.scandir(root) as folders:
        return [folder.path for folder in folders if folder.is_dir(follow_symlinks=False)]


# ---- hashes
def _hashes(keys: Sequence[int], n: int) -> list[int]:
    """A hash of each whole block of the first ``n`` keys."""
    data = memoryview(array("q", keys[:n])).cast("B")
    size = 8 * _BLOCK
    return [_number(data[at : at + size]) for at in range(0, len(data) - size + 1, size)]


def _hash(keys: Sequence[int]) -> int:
    return _number(memoryview(array("q", keys)).cast("B"))


def _number(data: memoryview) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), sys.byteorder)

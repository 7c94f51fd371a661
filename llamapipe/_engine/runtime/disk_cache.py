"""Cached sequences on disk, which survive a restart and include sequences that do not fit in host memory.

Open this file to change which files are written, read or deleted, or when; ``llamapipe.cache_file`` has their format.

The principle: a file holds one sequence and never changes. It is written under another name and renamed when it is
complete, so a killed process leaves no incomplete file that others could read. The name is a digest of the tokens and
their key. The head has the key and a hash of each block of tokens, and the heads of all files are in a prefix tree. So
the time of a lookup depends on the length of the prompt, and a hash collision costs only a read: a sequence enters the
prefix cache with its own tokens, and that cache decides which cells a request may use.

Engines that compute the same cells (model, its adapters, types, kernels) share a folder. Other processes may use it at
the same time. They never change a file, so they need no locks: a missing file was deleted by another process. The least
recently used file is deleted first, whichever subfolder it is in. When the disk is nearly full, the
cache deletes its own files, which can be computed again, to make room for files that cannot.

Files are read and written by one thread, so a slow disk delays only a request that waits for a file, for ``PATIENCE_S``
at most. Reads come first.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO, FileIO
from pathlib import Path
from time import monotonic, time_ns
from typing import Any, Literal, NamedTuple

from llamapipe._engine.policy.prefix_tree import PrefixTree
from llamapipe._engine.runtime.snapshot import Snapshot, SnapshotFormat, parts_of, unpack
from llamapipe._engine.runtime.state_layout import Bytes, Saved
from llamapipe.cache_file import (
    BLOCK,
    PARTIAL,
    SUFFIX,
    Head,
    create_locked,
    hashes_of,
    is_writable,
    name_of,
    open_private,
    pack_head,
    read_head,
    remove_if_dead,
    subfolders,
    tail_of,
)
from llamapipe.host import files
from llamapipe.llama.native_pipeline import SavedCells
from llamapipe.locks import Lock

DISK_THREAD_NAME = "llamapipe-disk-cache"
PATIENCE_S = 20.0  # how long a request waits for a file before its tokens are computed
MIN_GAIN = 64  # minimum tokens: that a file must save a request that waits for it, and that a written sequence must add
REST_S = 0.5  # seconds that an engine must be idle before it copies each sequence to be written
GROWTH = 16  # before the end, a sequence is written again only after growing by one part in this many
CLOSE_S = 10.0  # maximum seconds of writing when an engine is closed
_MOST_WAITING = 2  # sequences that wait to be written; each takes host memory
_MOST_OFFERED = 2**16
_FREE_SHARE, _FREE_BYTES = 64, 2**28  # 1/64 of the disk stays free, but at most 256 MiB
_RETRY_S = 60.0  # seconds without writes after a write that failed
# Disk problems that may pass, so a service starts nevertheless.
_OF_THE_DISK = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
_RESCAN_S = 1.0  # minimum seconds between two scans for files of other processes
Writes = Literal["always", "at_close", "never"]
_log = logging.getLogger("llamapipe")


class CachedSequence(NamedTuple):
    """A sequence to write, or one that was read. ``cells``: the cells of all ``tokens``; None if there are only states.

    ``states``: pairs of a number of tokens and the saved state after them. ``is_stale``: see Snapshot. The owner closes
    the sequence.
    """

    tokens: list[int]
    cache_key: Hashable
    cells: Saved | None
    states: Sequence[tuple[int, Saved]]
    is_stale: bool = False

    def copies(self) -> list[Saved]:
        return [*([] if self.cells is None else [self.cells]), *(state for _, state in self.states)]

    def close(self) -> None:
        for copy in self.copies():
            copy.close()


class Entry:
    """A file with ``n`` tokens, their cells (if ``has_cells``), and states at ``places``."""

    __slots__ = ("cache_key", "has_cells", "n", "name", "places", "tail")

    def __init__(self, name: str, head: Head) -> None:
        self.name = name
        self.cache_key = head.cache_key
        self.n = head.n
        self.has_cells = head.has_cells
        self.places = head.places
        self.tail = head.tail

    def __repr__(self) -> str:
        return f"<Entry {self.name[:8]} n={self.n}>"


class DiskCache:
    """The files of one engine's cells. ``folder``: the folder of the cache; this engine's files are in a subfolder.

    ``max_bytes``: the maximum bytes of all files in the cache. ``layout``: the properties that cells depend on.
    ``form``: a text that names all other properties that cells depend on. ``n_ctx``: longer sequences do not fit.
    ``can_cut``: a sequence can be used up to any of its tokens, not only up to its end and the places of its states.
    Raises ValueError for a folder that cannot be used, or that others could write to.

    ``writes``: when sequences are written; only the engine thread changes it. ``"at_close"``: only when the engine
    ends.
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
        self.writes: Writes = "always"
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
        self._written: CachedSequence | None = None  # the sequence that is being written
        self._rest: set[str] | None = None  # files that were written since ``begin_rest``
        self._offered: set[str] = set()  # files that were or will be written, or are too large
        self._n_forgotten = 0  # calls of ``forget``: a write that began before one of them is not kept
        self._queues = Lock()  # for the queues and the attributes that describe their progress
        self._changed = threading.Condition(self._queues)
        self._is_closed = False
        self._retry_at = self._rescan_at = 0.0
        self._has_warned = False
        try:
            self._make_folders()
            self._scan()
        except OSError as error:
            if error.errno not in _OF_THE_DISK:
                raise ValueError(f"cache_dir: {error}; give a folder of your own") from error
            self._warn(error)
        self._thread = threading.Thread(target=self._run, name=DISK_THREAD_NAME, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<DiskCache {str(self.folder)!r} n={len(self._entries)}>"

    # ---- lookups: the engine thread
    def find(self, keys: Sequence[int], cache_key: Hashable, limit: int) -> tuple[int, Entry] | None:
        """Return how many of the first ``limit`` cells the best file has, and the file; None if it has too few."""
        if limit < MIN_GAIN:
            return None
        hashes = hashes_of(keys, limit - limit % BLOCK)
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
        n = n_blocks * BLOCK

        def has(place: int, tail: int) -> bool:
            return place <= n or (
                place - place % BLOCK == n and place <= limit and tail_of(keys, place) == tail
            )

        is_whole = has(entry.n, entry.tail)
        if self._can_cut:
            return (entry.n if is_whole else n) if entry.has_cells else 0
        if is_whole and entry.has_cells:
            return entry.n
        return max((place for place, tail in entry.places.items() if has(place, tail)), default=0)

    def read(self, entry: Entry, done: Callable[[CachedSequence | None], object]) -> None:
        """Read a file in the thread, then call ``done`` with its sequence, or with None if it cannot be read."""
        self._put(self._reads, (entry, done))

    # ---- writing: the engine thread
    @property
    def has_room(self) -> bool:
        """Whether another sequence may wait to be written now."""
        return self.writes == "always" and len(self._writes) < _MOST_WAITING and monotonic() >= self._retry_at

    def wants(self, keys: Sequence[int], cache_key: Hashable, at_end: bool = False) -> bool:
        """Return whether a sequence is worth writing: it has enough tokens that no file has.

        ``at_end``: the sequence will not grow any more.
        """
        n = len(keys)
        if not is_writable(cache_key):
            return False
        hit = self.find(keys, cache_key, n)
        n_new = n - (0 if hit is None else hit[0])
        least = 1 if n_new == n else MIN_GAIN if at_end else max(MIN_GAIN, n // GROWTH)
        return n_new >= least and name_of(keys, cache_key) not in self._offered

    def write(self, sequence: CachedSequence) -> None:
        """Write a sequence in the thread, which then frees its memory."""
        if len(self._offered) > _MOST_OFFERED:
            self._offered.clear()
        self._offered.add(name_of(sequence.tokens, sequence.cache_key))
        self._put(self._writes, sequence)

    def begin_rest(self) -> None:
        """Keep all files written from now on: each was used less recently than the file written before it."""
        self._rest = set()

    def wait_for_room(self, deadline: float) -> bool:
        """Wait until all sequences are written, or until a time of ``monotonic``. Return whether to write more.

        After the wait, ``wants`` knows all files, so the choice of sequences does not depend on the disk's speed.
        """
        with self._changed:
            return self._await_writes(deadline) and monotonic() >= self._retry_at

    def _await_writes(self, deadline: float) -> bool:
        return self._changed.wait_for(
            lambda: not self._writes and self._written is None, max(deadline - monotonic(), 0)
        )

    # ---- any thread
    def forget(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Delete the files of the selected keys, and drop sequences that wait to be written. Raises OSError."""
        with self._queues:  # not ``_changed``, which Ctrl-C could leave locked
            self._n_forgotten += 1
            self._offered.clear()
            dropped = [sequence for sequence in self._writes if is_wanted(sequence.cache_key)]
            for sequence in dropped:
                self._writes.remove(sequence)
                sequence.close()
            self._changed.notify_all()
        with suppress(FileNotFoundError):  # another process has deleted the folder
            self._scan()
        with self._lock:
            wanted = [entry for entry in self._entries.values() if is_wanted(entry.cache_key)]
            for entry in wanted:
                self._drop(entry)
        failed = None
        for entry in wanted:
            try:
                (self.folder / entry.name).unlink(missing_ok=True)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def close(self, deadline: float | None = None) -> None:
        """Write the waiting sequences, at most until a time of ``monotonic``, and end the thread."""
        with self._changed:
            if deadline is not None:
                self._await_writes(deadline)
            self._is_closed = True
            for _, on_read in self._reads:
                on_read(None)
            self._reads.clear()
            while self._writes:
                self._writes.pop().close()
            self._changed.notify_all()
        self._thread.join(1.0)  # a write that hangs ends with the process

    # ---- the thread
    def _put(self, queue: deque[Any], job: object) -> None:
        with self._changed:
            queue.append(job)
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
                entry, on_read = job
                on_read(self._read(entry))
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
                with suppress(OSError, MemoryError):
                    self._scan()

    def _look_again(self) -> None:
        """Make the thread look for files that other processes have written, unless it has just done so."""
        if 0 <= self._rescan_at <= monotonic():
            with self._changed:
                self._rescan_at = -1.0
                self._changed.notify_all()

    def _read(self, entry: Entry) -> CachedSequence | None:
        path = self.folder / entry.name
        try:
            sequence = read_sequence(path, self._layout, self._n_vocab)
        except FileNotFoundError:  # another process has deleted it
            pass
        except ValueError as error:
            _log.warning("%s is deleted, because it cannot be used: %s", path, error)
            with suppress(OSError):
                path.unlink()
        except MemoryError:
            return None
        except Exception as error:  # the thread must not end: all requests would wait in vain
            _log.warning("%s could not be read: %r", path, error)
        else:
            self.n_read += 1
            return sequence
        with self._lock:
            self._drop(entry)
        return None

    def _write(self, sequence: CachedSequence, n_forgotten: int) -> None:
        try:
            head = _head_of(sequence)
            entry = self._write_file(sequence, head, n_forgotten)
        except Exception as error:  # also MemoryError: if the thread ended, reads would wait in vain
            self._retry_at = monotonic() + _RETRY_S
            self._offered.clear()
            self._warn(error)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                with suppress(OSError):  # other programs may have filled the disk
                    self._make_room(0)
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

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("cached prefixes are not written to %s: %s", self.root, error)

    def _write_file(self, sequence: CachedSequence, head: Head, n_forgotten: int) -> Entry | None:
        parts = _file_of(sequence, head, self._layout)
        n_bytes = sum(map(len, parts))
        if not 0 < n_bytes <= self._max_bytes:
            return None
        path = self.folder / name_of(sequence.tokens, sequence.cache_key)
        self._make_folders()
        if not self._make_room(n_bytes):
            return None
        partial = self.folder / f".{path.name}.{os.getpid()}.{threading.get_ident()}{PARTIAL}"
        try:
            with open(create_locked(partial), "wb") as file:
                if hasattr(os, "posix_fallocate"):  # a full disk shows before anything is written
                    os.posix_fallocate(file.fileno(), 0, n_bytes)
                file.writelines(parts)
                file.flush()
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        if n_forgotten != self._n_forgotten:  # ``forget`` may have meant this sequence, but saw no file yet
            path.unlink(missing_ok=True)
            return None
        if self._rest is not None:
            self._rest.add(path.name)
        return Entry(path.name, head)

    def _replaced_by(self, new: Entry, blocks: list[int], tokens: Sequence[int]) -> list[Entry]:
        return [
            old
            for _, old in self._tree.prefixes(blocks, len(blocks), new.cache_key)
            if old is not new
            and old.n < new.n
            and tail_of(tokens, old.n) == old.tail
            and (new.has_cells if self._can_cut else {*old.places, old.n} <= {*new.places})
        ]

    def _make_folders(self) -> None:
        """Create missing folders. Raises OSError; ValueError if others could write to a folder."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.root, self.folder):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            status = folder.lstat()
            problem = None
            if not stat.S_ISDIR(status.st_mode):
                problem = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
            elif not files.is_ours(status):
                problem = f"belongs to user {status.st_uid}"
            elif files.may_be_written_by_others(status):
                problem = "can be written to by other users"
            if problem is not None:
                raise ValueError(f"cache_dir: {folder} {problem}; give a folder of your own, with mode 700")

    def _make_room(self, n_bytes: int) -> bool:
        """Delete the least recently used files of all folders so that ``n_bytes`` more fit.

        Returns False if files written since ``begin_rest`` would have to be deleted. Raises OSError if the disk has no
        room.
        """
        deletable, n_kept, now = [], 0, time_ns()
        for folder in subfolders(self.root):
            with suppress(OSError), os.scandir(folder) as files:
                for file in files:
                    if file.name.endswith(SUFFIX) and file.is_file(follow_symlinks=False):
                        with suppress(OSError):
                            status = file.stat(follow_symlinks=False)
                            # The clock was set back. With its time, the file would never be the oldest.
                            if status.st_mtime_ns > now:
                                os.utime(file.path, ns=(now, now))
                            if self._rest is not None and file.name in self._rest:
                                n_kept += status.st_size
                            else:
                                deletable.append(
                                    (min(status.st_mtime_ns, now), status.st_size, Path(file.path))
                                )
        if n_kept + n_bytes > self._max_bytes:
            return False
        from shutil import disk_usage  # imported here: shutil imports every kind of compression

        disk = disk_usage(self.root)
        n_missing = n_bytes + min(disk.total // _FREE_SHARE, _FREE_BYTES) - disk.free
        n_over = max(sum(size for _, size, _ in deletable) + n_kept + n_bytes - self._max_bytes, n_missing)
        for _, size, path in sorted(deletable):
            if n_over <= 0:
                break
            n_over -= size
            path.unlink(missing_ok=True)
            with self._lock:
                entry = self._entries.get(path.name)
                if entry is not None and path.parent == self.folder:
                    self._drop(entry)
        if n_over > 0:
            raise OSError(errno.ENOSPC, "the disk is nearly full: free some space")
        return True

    # ---- the index
    def _scan(self) -> None:
        """Update the index: add new files of other processes, and drop deleted ones. Raises OSError."""
        names = set()
        with os.scandir(self.folder) as listing:
            for dir_entry in listing:
                if dir_entry.name.endswith(SUFFIX):
                    names.add(dir_entry.name)
                elif dir_entry.name.endswith(PARTIAL):
                    remove_if_dead(dir_entry.path)
        with self._lock:
            for name in self._entries.keys() - names:
                self._drop(self._entries[name])
            new = names - self._entries.keys()
        for name in new:
            with suppress(OSError, ValueError), open_private(self.folder / name) as file:
                head, _ = read_head(file)
                entry = Entry(name, head)
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


def write_sequence(path: Path, sequence: CachedSequence, layout: SnapshotFormat) -> int:
    """Write a file that appears only when complete and that only this user may read. Return its size in bytes.

    Raises OSError; ValueError if the form of the cells cannot be stored.
    """
    parts = _file_of(sequence, _head_of(sequence), layout)
    if not parts:
        raise ValueError("the form of this model's cells in a file is not known")
    # Imported here: it imports compression, which only engines with a cache folder need.
    from tempfile import mkstemp

    descriptor, name = mkstemp(PARTIAL, ".", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(parts)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    return sum(map(len, parts))


def read_sequence(path: Path, layout: SnapshotFormat, n_vocab: int) -> CachedSequence:
    """Return the sequence in a file. Raises OSError, MemoryError; ValueError if the file is damaged or does not fit."""
    with open_private(path) as file:
        sequence = _read(file, layout, n_vocab)
        with suppress(OSError):  # a read-only disk, from which nothing will be deleted
            os.utime(file.fileno())
    return sequence


def sequence_of(content: bytes, layout: SnapshotFormat, n_vocab: int) -> CachedSequence:
    """Return the sequence in a file's bytes. Raises MemoryError, ValueError."""
    return _read(BytesIO(content), layout, n_vocab)


def _read(file: FileIO | BytesIO, layout: SnapshotFormat, n_vocab: int) -> CachedSequence:
    head, n_bytes = read_head(file)
    data = bytearray(n_bytes)
    if file.readinto(data) != n_bytes:
        raise ValueError("it is cut")
    snapshot = unpack(data, layout, n_vocab)
    tokens = [head.marks.get(i, token) for i, token in enumerate(snapshot.tokens)]
    cells = SavedCells.of_bytes(snapshot.state) if snapshot.n_cells else None
    states = [(n, SavedCells.of_bytes(state)) for n, state in snapshot.states]
    return CachedSequence(tokens, head.cache_key, cells, states, snapshot.is_stale)


def _file_of(sequence: CachedSequence, head: Head, layout: SnapshotFormat) -> list[Bytes]:
    """Return the parts of a file.

    Returns no parts if the cells have another form than in an empty context, because only tokens would be stored.
    """
    cells = sequence.cells
    snapshot = Snapshot(
        [max(token, 0) for token in sequence.tokens],
        head.n,
        0 if cells is None else head.n,
        b"" if cells is None else cells.view(),
        states=[(n, state.view()) for n, state in sequence.states],
    )
    parts = parts_of(snapshot, layout)
    n_snapshot = sum(map(len, parts))
    if n_snapshot < sum(copy.n_bytes for copy in sequence.copies()) // 2:
        return []
    return [*pack_head(head, n_snapshot), *parts]


def _head_of(sequence: CachedSequence) -> Head:
    tokens = sequence.tokens
    return Head(
        sequence.cache_key,
        len(tokens),
        sequence.cells is not None and not sequence.is_stale,
        {n: tail_of(tokens, n) for n, _ in sequence.states},
        hashes_of(tokens, len(tokens)),
        tail_of(tokens, len(tokens)),
        {i: token for i, token in enumerate(tokens) if token < 0},
    )

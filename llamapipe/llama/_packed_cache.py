"""Caches packed weights on disk: later loads map them instead of packing, and processes share their pages.

A model has one file in the cache: a header, then the weights as they are in memory. The header identifies the model
files that the weights were packed from (fingerprint, size, modification time). It also has a number that native code
computed from the tensors and their layout. A file for other kernels or tensors has a different number and is not
mapped.

The first load locks a partial file, packs into memory, writes the weights, and renames the file once all of it is on
disk. Other loads of the same model wait for it. A file that exists is never changed, only replaced: a process that has
mapped a file keeps that file. A checksum of the header and of samples of the weights reveals a file that was copied
only in part. Otherwise it is trusted like a model file, so it must belong to this user or root, and nobody else may
write to it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llamapipe.gguf.reader import fingerprint
from llamapipe.host import files
from llamapipe.host.at_exit import end_thread_at_exit

if TYPE_CHECKING:
    from llamapipe.gguf.check import GgufInfo

_OFFSET = 2 * 2**20  # bytes before the weights, so that whole huge pages can be mapped
_MAGIC = b"llamapipe packed weights 2\n"
# Magic bytes, the model's key, the layout of the weights, their size in bytes. A checksum follows the header.
_HEADER = struct.Struct("<32s32sQQ")
_CHECKSUM_BYTES = 16
_N_SAMPLES = 64
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 8 * 2**20
_STEM_BYTES = 150
_POLL_S = 0.05
_WAIT_S = 120.0
_ROOT = 0
_log = logging.getLogger("llamapipe")


class PackedFile:
    """A model's file in the cache, opened by one load to map it, to write it, or neither. Use ``with``.

    ``may_wait``: wait for another load of the same model that is writing the file. Any thread.
    """

    def __init__(self, folder: Path, info: GgufInfo, may_wait: bool = True) -> None:
        self._folder = folder
        self._info = info
        self._may_wait = may_wait
        self._partial: Path | None = None  # locked, to be written
        self._expected: tuple[int, int] | None = None  # layout and bytes, once weights are packed
        self._is_told = False
        self.fd = -1
        self.n_bytes = 0
        self.layout = 0
        self.offset = _OFFSET

    def __enter__(self) -> PackedFile:
        try:
            self._key, name = self._identify()
            self.path = self._folder / name
            if not self._open():
                self._lock()
        except OSError as error:
            self._close()
            problem = f"{error.filename} is a symbolic link" if error.errno == errno.ELOOP else error
            self._tell(f"cannot be used: {problem}")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def is_found(self) -> bool:
        """Whether there are weights to map: ``n_bytes`` of ``layout``, in ``fd`` from ``offset`` onward."""
        return self.n_bytes > 0

    def write(self, native: Any, packing: Any) -> None:
        """Write the weights that a load has packed, and map the file in their place. Logs a warning if that fails."""
        try:
            if self.is_found:  # the tensors or their layout differ from what was expected
                self._close()
                self._expected = packing.layout, packing.n_data
                if not self._open():  # another load may have replaced it
                    self._lock()
            if self._partial is not None:
                self._write(native.ffi.buffer(packing.data, packing.n_data), packing.layout)
            elif not self.is_found:
                return
            if not native.lib.lp_packing_map(packing, self.fd, _OFFSET):
                self._tell("cannot be mapped; the weights stay in this process's memory")
        except OSError as error:
            self._tell(f"cannot be written, so the weights stay in this process's memory: {error}")

    def _identify(self) -> tuple[bytes, str]:
        """Return the key of the model's files, and the name of the file in the cache."""
        key = blake2b(digest_size=32)
        content = blake2b(digest_size=8)
        for stamp in self._info.stamps:
            digest = fingerprint(stamp.path)
            content.update(digest)
            key.update(digest + f"{stamp.n_bytes} {stamp.modified_ns} ".encode())
        stem = os.fsencode(self._info.path.stem)[:_STEM_BYTES].decode(errors="ignore")
        return key.digest(), f"{stem}.{content.hexdigest()}.packed"

    # ---- an existing file
    def _open(self) -> bool:
        """Open the file if it fits the model."""
        try:
            fd = files.open_file(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        self.fd = fd
        status = os.fstat(fd)
        if problem := _distrust(status, _ROOT):
            self._tell(f"is not used: {problem}")
            self._close()
            return False
        head = files.read_at(fd, _HEADER.size + _CHECKSUM_BYTES, 0)
        if problem := self._misfit(head, status.st_size):
            self._tell(f"is not used, and written again: {problem}")
            self._close()
            return False
        *_, self.layout, self.n_bytes = _HEADER.unpack_from(head)
        return True

    def _misfit(self, head: bytes, n_in_file: int) -> str | None:
        """Return why the open file does not fit; None if it does."""
        if len(head) < _HEADER.size + _CHECKSUM_BYTES:
            return "it is damaged"
        magic, key, layout, n_bytes = _HEADER.unpack_from(head)
        if magic.rstrip(b"\0") != _MAGIC:
            return "it has another format"
        if n_in_file != _OFFSET + n_bytes or not n_bytes:
            return f"it has {n_in_file} bytes instead of {_OFFSET + n_bytes}"
        sample = lambda at: files.read_at(self.fd, _SAMPLE_BYTES, _OFFSET + at)  # noqa: E731
        if head[_HEADER.size :] != _checksum(head[: _HEADER.size], sample, n_bytes):
            return "it is damaged"
        if key != self._key:
            return "the model's file was replaced"
        if self._expected not in (None, (layout, n_bytes)):
            return "it was made by another version of llamapipe or for other devices"
        return None

    # ---- a new file
    def _lock(self) -> None:
        """Open and lock the partial file, unless another load is writing it."""
        partial = self.path.with_name(self.path.name + ".partial")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Users who may read the model may also read its packed weights.
        is_public = all(stamp.path.stat().st_mode & stat.S_IROTH for stamp in self._info.stamps)
        end = time.monotonic() + (_WAIT_S if self._may_wait else 0)
        while (fd := _open_locked(partial, 0o644 if is_public else 0o600)) is None:
            if time.monotonic() > end:
                if self._may_wait:
                    self._tell(f"is being written by another load, which takes over {_WAIT_S:g} s")
                return
            time.sleep(_POLL_S)
            end_thread_at_exit()
        status = os.fstat(fd)
        problem = _distrust(status)
        if status.st_nlink > 1:  # emptying it would empty another file
            problem = "it has several names"
        if problem is not None:
            os.close(fd)
            self._tell(f"cannot be written: {partial.name}: {problem}")
            return
        try:
            is_written = self._open()  # another load may have written the file first
            if is_written:
                partial.unlink(missing_ok=True)
        except BaseException:
            os.close(fd)
            raise
        if is_written:
            os.close(fd)
        else:
            self.fd, self._partial = fd, partial

    def _write(self, weights: Any, layout: int) -> None:
        assert self._partial is not None
        fd, n_bytes = self.fd, len(weights)
        os.ftruncate(fd, 0)  # a load that was killed may have left something
        if hasattr(os, "posix_fallocate"):  # a full disk is noticed before anything is written
            try:
                os.posix_fallocate(fd, _OFFSET, n_bytes)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system does not support it
                    raise
        n_written = 0
        with memoryview(weights) as view:
            while n_written < n_bytes:
                n_written += files.write_at(
                    fd, view[n_written : n_written + _CHUNK_BYTES], _OFFSET + n_written
                )
            header = _HEADER.pack(_MAGIC, self._key, layout, n_bytes)
            checksum = _checksum(header, lambda at: view[at : at + _SAMPLE_BYTES], n_bytes)
        files.write_at(fd, header + checksum, 0)
        os.fsync(fd)  # otherwise, after a crash, the file could be there without its weights
        if not files.has_name(fd, self._partial):  # the name may now belong to another load's file
            raise FileNotFoundError(errno.ENOENT, "it was deleted meanwhile", str(self._partial))
        self._partial.replace(self.path)
        self._partial = None
        files.unlock(fd)  # explicitly: a process forked in the meantime holds the lock, too

    def _close(self) -> None:
        if self._partial is not None:
            with suppress(OSError):
                if files.has_name(self.fd, self._partial):
                    self._partial.unlink()
            self._partial = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.n_bytes = self.layout = 0

    def _tell(self, what: str) -> None:
        """Log at most one warning per load."""
        if not self._is_told:
            self._is_told = True
            name = self.path if hasattr(self, "path") else self._folder
            _log.warning("packed_cache: %s %s", name, what)


def _distrust(status: os.stat_result, *others: int) -> str | None:
    """Return why users other than this one and ``others`` could have written a file; None if they could not."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if not files.is_ours(status, *others):
        return f"it belongs to user {status.st_uid}"
    if files.may_be_written_by_others(status):
        return "other users may write to it"
    return None


def _checksum(header: bytes, sample: Callable[[int], bytes | memoryview], n_bytes: int) -> bytes:
    """Return a checksum of the header and of samples of the weights; the last sample ends with the weights."""
    digest = blake2b(header, digest_size=_CHECKSUM_BYTES)
    for i in range(_N_SAMPLES + 1):
        digest.update(sample(max(n_bytes - _SAMPLE_BYTES, 0) * i // _N_SAMPLES))
    return digest.digest()


def _open_locked(path: Path, mode: int) -> int | None:
    """Create or open a file and lock it; None if another load holds the lock, or the file was renamed or deleted."""
    fd = files.open_file(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        files.lock(fd, wait=False)
        if files.has_name(fd, path):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None

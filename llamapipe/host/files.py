"""Files that processes share: opening, ownership, locks, and reads and writes at an offset.

Open this file where POSIX and Windows treat files differently. On Windows, Python does not report a file's owner or who
else may write to it, so callers can check only its kind: use folders that belong to the user.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

if sys.platform == "win32":
    import ctypes
    import msvcrt

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateFileW.restype = ctypes.c_void_p
    _NOBODY = ctypes.c_void_p(-1).value  # INVALID_HANDLE_VALUE
    _SHARE_ALL, _NORMAL = 7, 0x80
    _WAIT, _AT_ONCE = 2, 3  # flags of LockFileEx: wait for an exclusive lock, or fail if it is taken
    _LOCK_VIOLATION = 33

    class _Place(ctypes.Structure):
        """OVERLAPPED: the place of a lock. A lock blocks access to its bytes, so it covers a byte that no file has."""

        _fields_ = (
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", ctypes.c_uint32),
            ("offset_high", ctypes.c_uint32),
            ("event", ctypes.c_void_p),
        )

    _PLACE = (None, None, 0, 2**30, None)

    def open_file(path: str | Path, flags: int, mode: int = 0o600) -> int:
        """Open a file unless it is a symbolic link; child processes do not inherit the descriptor. Raises OSError.

        ``flags``: flags of ``os.open`` for access and creation. ``mode``: the permissions of a new file.
        """
        if Path(path).is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        access = {os.O_RDONLY: 0x80000000, os.O_WRONLY: 0x40000000}.get(flags & 3, 0xC0000000)
        # The values mean CREATE_NEW, OPEN_ALWAYS and OPEN_EXISTING.
        how = 1 if flags & os.O_EXCL else 4 if flags & os.O_CREAT else 3
        # Unlike os.open, this lets others rename and delete the file while it is open.
        handle = _kernel.CreateFileW(str(path), access, _SHARE_ALL, None, how, _NORMAL, None)
        if handle == _NOBODY:
            error = ctypes.WinError(ctypes.get_last_error())
            error.filename = str(path)
            raise error
        return msvcrt.open_osfhandle(handle, flags | os.O_NOINHERIT)

    def lock(fd: int, wait: bool = True) -> None:
        """Take an open file's only lock. Raises BlockingIOError if another process has it and ``wait`` is false.

        The lock is released by ``unlock``, by closing the descriptor, and at the end of the process.
        """
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(fd))
        if not _kernel.LockFileEx(
            handle, _WAIT if wait else _AT_ONCE, 0, 1, 0, ctypes.byref(_Place(*_PLACE))
        ):
            if ctypes.get_last_error() == _LOCK_VIOLATION:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
            raise ctypes.WinError(ctypes.get_last_error())

    def unlock(fd: int) -> None:
        """Release the lock of an open file."""
        _kernel.UnlockFileEx(
            ctypes.c_void_p(msvcrt.get_osfhandle(fd)), 0, 1, 0, ctypes.byref(_Place(*_PLACE))
        )

    def read_at(fd: int, n: int, offset: int) -> bytes:
        """Read at most ``n`` bytes of an open file from ``offset`` onward. One thread at a time."""
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, n)

    def write_at(fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write to an open file from ``offset`` onward, and return the number of bytes written.

        One thread at a time.
        """
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)

    def has_name(fd: int, path: Path) -> bool:
        """Return whether an open file still has this name; it may have been deleted and replaced."""
        try:
            return os.fstat(fd).st_ino == path.lstat().st_ino  # Windows does not always report the device
        except FileNotFoundError:
            return False

else:
    import fcntl

    read_at = os.pread
    write_at = os.pwrite

    def open_file(path: str | Path, flags: int, mode: int = 0o600) -> int:
        """Open a file unless it is a symbolic link; child processes do not inherit the descriptor. Raises OSError.

        ``flags``: flags of ``os.open`` for access and creation. ``mode``: the permissions of a new file.
        """
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)

    def lock(fd: int, wait: bool = True) -> None:
        """Take an open file's only lock. Raises BlockingIOError if another process has it and ``wait`` is false.

        The lock is released by ``unlock``, by closing the descriptor, and at the end of the process.
        """
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(fd: int) -> None:
        """Release the lock of an open file, even if a forked process has the same open file."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def has_name(fd: int, path: Path) -> bool:
        """Return whether an open file still has this name; it may have been deleted and replaced."""
        try:
            return os.path.samestat(os.fstat(fd), path.lstat())
        except FileNotFoundError:
            return False


def is_ours(status: os.stat_result, *others: int) -> bool:
    """Return whether a file or folder belongs to this user, or to one of ``others``."""
    return sys.platform == "win32" or status.st_uid in (os.geteuid(), *others)


def may_be_written_by_others(status: os.stat_result) -> bool:
    """Return whether other users may write to a file or folder."""
    return sys.platform != "win32" and bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def may_be_used_by_others(status: os.stat_result) -> bool:
    """Return whether other users may read a file or folder, write to it or run it."""
    return sys.platform != "win32" and bool(status.st_mode & 0o077)

"""A SQLite file that all processes of a server share: in each process, one thread writes and others read.

Open it to change how a file is opened, checked, written and read. ``_store.py`` and ``_files.py`` define the contents.

One thread of this process makes all writes, in transactions; after a kill, each is in the file completely or not at
all. Reads use separate connections and never wait for writers (WAL). Neither belongs on an event loop's thread: call
``read`` in a thread, and await ``write``. Deleted data is overwritten in the file (``secure_delete``), and the file
shrinks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from llamapipe.host import files
from llamapipe.host.at_exit import close_at_exit, forget
from llamapipe.work.long_work import settle

T = TypeVar("T")
_log = logging.getLogger("llamapipe.server")
_BUSY_S = 5.0  # that another process may write
_OPEN_S = 30.0  # the same at the start, when many processes may make the file
_WAIT_S = 10.0  # that a request waits for its transaction
_TIDY_S = 600.0  # between two looks for what is too old
_JUMP_S = 3600.0  # of the clock, against the time that has passed
_TELL_S = 60.0  # between two warnings
_QUICK_BYTES = 2**28  # a file up to this size is checked as a whole at the start


class StoreError(OSError):
    """The file cannot be used. The message says why, for logs and clients."""


class MissingError(LookupError):
    """Nothing has this id, or it belongs to another owner. ``kind``: what was looked for."""

    def __init__(self, kind: str, wanted: str) -> None:
        super().__init__(f"no {kind} has the id {wanted}")
        self.kind = kind
        self.id = wanted


class FullError(Exception):
    """A client's share of the space is used up. The message says which space, and how large the share is.

    ``fits_later``: it would fit once others have ended. ``is_too_large``: it would not fit even into an empty share.
    """

    def __init__(self, message: str, fits_later: bool = False, is_too_large: bool = False) -> None:
        super().__init__(message)
        self.fits_later = fits_later
        self.is_too_large = is_too_large


class Database:
    """One file, open until ``close``. Any thread may use it.

    ``writer``: the connection of the thread that writes; use it only inside ``write``. ``schema``, ``application``,
    ``version``: identify the kind of file. Raises OSError if the file cannot be used or other users may read it,
    StoreError if it is damaged or of another kind.
    """

    schema: ClassVar[str]
    application: ClassVar[int]
    version: ClassVar[int]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clock_s = time.time() - _clock_s()
        self._told_at = -_TELL_S
        self._readers: list[sqlite3.Connection] = []  # that nobody uses
        self._is_closed = False
        self._checkpoint_is_due = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # of ``_readers`` and ``_is_closed``
        _check_file(path)
        self._file = _identity(path)
        try:
            self.writer = _connect(path, _OPEN_S)
            try:
                for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "secure_delete = ON",
                               "synchronous = NORMAL", "journal_size_limit = 16777216"):  # fmt: skip
                    _execute_soon(self.writer, f"PRAGMA {pragma}")
                self._prepare()
                with _exclusive(self.writer):
                    self._tidy(at_start=True)
                self._shrink()
            except BaseException:
                self.writer.close()
                raise
        except sqlite3.Error as e:
            raise StoreError(f"--store: {path}: {_problem(e)}") from e
        self.writer.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
        self._thread = threading.Thread(target=self._run, name="llamapipe-store", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"

    def close(self, drain: bool = False) -> None:
        """End the thread after the waiting transactions, and close the file. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            readers, self._readers = self._readers, []
        forget(self)
        self._jobs.put(None)
        self._thread.join(_WAIT_S)
        for reader in readers:
            reader.close()

    # ---- writes
    async def write(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function(*arguments)``, as a transaction of the thread that writes.

        Raises StoreError if the disk is full, too slow or failed, MissingError. If the call is cancelled or times out,
        nothing is stored, unless the transaction has already ended.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._is_closed:
            raise StoreError("the server is shutting down")
        timer = loop.call_later(_WAIT_S, _expire, future)
        self._jobs.put(_Job(lambda: function(*arguments), loop, future))
        try:
            return await future
        finally:
            timer.cancel()
            future.cancel()

    def tell(self, error: StoreError) -> None:
        """Log a failure, at most once a minute."""
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            _log.warning("%s: %s", self.path, error)

    def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function(*arguments, connection)``, with a connection for this call.

        Raises StoreError, MissingError.
        """
        connection = None
        try:
            with self._lock:
                if self._is_closed:
                    raise StoreError("the server is shutting down")
                connection = self._readers.pop() if self._readers else None
            if connection is None:
                connection = _connect(self.path, _BUSY_S)
            connection.execute("BEGIN")  # all statements see the same state
            try:
                return function(*arguments, connection)
            finally:
                connection.execute("COMMIT")
        except (sqlite3.Error, msgspec.DecodeError) as e:
            raise StoreError(_problem(e)) from e
        finally:
            if connection is not None:
                with self._lock:
                    keeps = not self._is_closed
                    if keeps:
                        self._readers.append(connection)
                if not keeps:
                    connection.close()

    # ---- of a kind of files
    def _tidy(self, at_start: bool = False) -> None:
        """Delete what is too old or exceeds the limit. Called at the end of each transaction, and at intervals.

        Raises StoreError if what was written does not fit.
        """
        raise NotImplementedError

    def _clock_has_jumped(self) -> bool:
        """Return whether the clock was set ahead since the file was opened, so that ages are unknown."""
        return time.time() - _clock_s() - self._clock_s > _JUMP_S

    def _look_again(self) -> None:
        """Check the file again: other processes may have written to it."""

    # ---- inside
    def _prepare(self) -> None:
        """Create the tables of a new file, and check an old one for damage. Raises StoreError."""
        writer = self.writer
        with _exclusive(writer):
            n_tables = writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            marks = (writer.execute("PRAGMA application_id").fetchone()[0],
                     writer.execute("PRAGMA user_version").fetchone()[0])  # fmt: skip
            if not n_tables and marks == (0, 0):
                for statement in _statements(self.schema):
                    writer.execute(statement)
                writer.execute(f"PRAGMA application_id = {self.application}")
                writer.execute(f"PRAGMA user_version = {self.version}")
            elif marks[0] != self.application:
                raise StoreError(f"--store: {self.path} is a database of another program; give another file")
            elif marks[1] != self.version:
                raise StoreError(
                    f"--store: {self.path} has version {marks[1]}, this llamapipe reads {self.version}; give another "
                    "file"
                )
        if self.path.stat().st_size <= _QUICK_BYTES:
            verdict = writer.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise StoreError(
                    f"--store: {self.path} is damaged ({verdict}): restore a copy, or give another file"
                )

    def _run(self) -> None:
        """Run the transactions: the work of the thread that writes."""
        writer = self.writer
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=_TIDY_S)
                except Empty:
                    self._look_again()
                    job = _Job(lambda: None, None, None)
                if job is None:
                    return
                if job.is_unwanted():
                    continue
                result, error = None, None  # type: Any, Exception | None
                try:
                    if _identity(self.path) != self._file:  # the rows would be lost
                        raise StoreError("the file was deleted or replaced while the server runs: restart it")
                    with _exclusive(writer):
                        result = job.function()
                        self._tidy()
                        if job.is_unwanted():
                            raise StoreError("nobody waits for it")
                except (sqlite3.Error, msgspec.DecodeError) as e:
                    error = StoreError(_problem(e))
                except Exception as e:
                    error = e
                job.settle(result, error)
                with suppress(sqlite3.Error):  # the next time, then
                    self._shrink()
        finally:
            writer.close()

    def _used_bytes(self) -> int:
        pages, free, size = (
            self.writer.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _shrink(self) -> None:
        """Return free pages to the system, and overwrite the log of what was deleted on request."""
        if not self._checkpoint_is_due:
            return
        self.writer.executescript("PRAGMA incremental_vacuum")  # execute() would free a single page
        is_busy = self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        self._checkpoint_is_due = bool(is_busy)  # somebody reads: after the next transaction


class _Job(NamedTuple):
    """A waiting transaction; without ``future``, nobody awaits its result."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop | None
    future: asyncio.Future[Any] | None

    def is_unwanted(self) -> bool:
        """Return whether the caller is gone, or was told that it takes too long."""
        return self.future is not None and self.future.done()

    def settle(self, result: Any, error: Exception | None) -> None:
        if self.loop is not None and self.future is not None:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(settle, self.future, result, error)


def _clock_s() -> float:
    """Read a clock that nobody can set, and that also counts while the machine sleeps."""
    if not hasattr(time, "clock_gettime"):
        return time.monotonic()
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(StoreError(f"the disk did not take it within {_WAIT_S:g} seconds"))


# ---- the file
def _check_file(path: Path) -> None:
    """Create a file that only its user may read, or check that an existing one is. Raises OSError."""
    # It is never opened here: closing it would give up the locks that SQLite holds for this process.
    try:
        os.close(files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise FileNotFoundError(f"--store: {path} cannot be made: there is no folder {path.parent}") from None
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        try:
            status = name.lstat()
        except FileNotFoundError:
            continue
        if (problem := _distrust(status)) is not None:
            raise PermissionError(f"--store: {name} cannot hold stored answers: {problem}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the identity of the file with this name, None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _distrust(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if not files.is_ours(status):
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if files.may_be_used_by_others(status):
        return f"other users may use it (mode {stat.S_IMODE(status.st_mode):o}): chmod 600"
    return None


def _connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _execute_soon(connection: sqlite3.Connection, statement: str) -> None:
    """Execute a statement at startup, when several processes may change the journal mode at the same time."""
    until = time.monotonic() + _OPEN_S
    while True:
        try:
            connection.execute(statement).fetchall()
            return
        except sqlite3.OperationalError as e:
            if "locked" not in str(e) or time.monotonic() > until:
                raise
        time.sleep(0.01)


@contextmanager
def _exclusive(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold a transaction, which an exception rolls back."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite has done so already after some errors
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines():
        statement += f"{line}\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


_ADVICE = {
    "readonly": "make the file and its folder writable",
    "unable to open": "its folder must be there, and writable",
    "full": "free some space",
    "locked": "another program holds it",
    "not a database": "give another file",
    "malformed": "restore a copy, or give another file",
}


def _problem(error: sqlite3.Error | msgspec.DecodeError) -> str:
    """Return SQLite's message, with advice where there is any."""
    text = str(error)
    if isinstance(error, msgspec.DecodeError):  # rows hold JSON that was encoded here
        return f"a row is damaged: {text} (restore a copy, or delete what it belongs to)"
    advice = next((advice for words, advice in _ADVICE.items() if words in text), None)
    return text if advice is None else f"{text} ({advice})"

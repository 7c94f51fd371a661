"""Answers and conversations of the Responses API in a SQLite file, which all processes of a server share.

Open it to change what is stored, for how long, or how it is found. No route is here: ``_kept.py`` has what a request
for an answer does with the store, ``_conversations.py`` the routes about what is stored.

The principle: a *thread* is what belongs together, a conversation or an answer with all that continue it. Threads have
an owner, who alone finds what they hold. When there are too many bytes, or a thread was not used for too long, it goes
as a whole, so that no chain of answers loses its beginning. The owner with the most bytes gives first.

Writes are transactions of one thread of this process; a kill leaves all of one or nothing. Reads use further
connections, and never wait for writers (WAL). Neither belongs on an event loop's thread: call ``read`` in a thread,
``write`` is awaited. What is deleted is overwritten in the file (``secure_delete``), and the file shrinks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import msgspec

from llamapipe.chat.halves import whole_values
from llamapipe.host.at_exit import close_at_exit, forget
from llamapipe.work.long_work import settle

T = TypeVar("T")
_log = logging.getLogger("llamapipe.server")
_APPLICATION, _VERSION = 0x6C6C7061, 2
_BUSY_S = 5.0  # that another process may write
_OPEN_S = 30.0  # the same at the start, when many processes may make the file
_WAIT_S = 10.0  # that a request waits for its transaction
_TIDY_S = 600.0  # between two looks for what is too old
_TELL_S = 60.0  # between two warnings
_AGE_S = 60.0  # between two looks while there are writes
_UNSEEN = 1 / 64  # of the limit, that may be written between two looks at the size
_DAY_S = 86_400
_QUICK_BYTES = 2**28  # a file up to this size is checked as a whole at the start
_ROW_BYTES = 256  # about what a row takes besides its contents
_EVENT_BYTES = 64  # the same of an event
_LEFT = 0.95  # of the limit, after rows went to make room: the next ones need not
_ROOM_S = 1.0  # in which that much room is made; after it, no more than is needed
# ``after``: of an answer in a conversation, the last item that the conversation had when it was asked for.
# ``is_listed``: the item is one of the conversation's. ``runs``: answers that are to be computed, see ``_runs.py``, and
# ``events``: what streams of these tell. Both go with their answer.
_SCHEMA = f"""
CREATE TABLE threads (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, used_at INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL DEFAULT {_ROW_BYTES}, conversation TEXT, created_at INTEGER, metadata BLOB);
CREATE TABLE answers (id TEXT NOT NULL UNIQUE, thread INTEGER NOT NULL, previous TEXT, after INTEGER,
    body BLOB NOT NULL);
CREATE TABLE items (number INTEGER PRIMARY KEY AUTOINCREMENT, thread INTEGER NOT NULL, id TEXT NOT NULL, answer TEXT,
    is_output INTEGER NOT NULL, is_listed INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE runs (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, thread INTEGER NOT NULL,
    owner TEXT NOT NULL, worker TEXT, n_attempts INTEGER NOT NULL DEFAULT 0, not_before INTEGER NOT NULL DEFAULT 0,
    is_stream INTEGER NOT NULL, is_done INTEGER NOT NULL DEFAULT 0, n_first INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL);
CREATE TABLE events (answer TEXT NOT NULL, number INTEGER NOT NULL, thread INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (answer, number)) WITHOUT ROWID;
CREATE UNIQUE INDEX conversations ON threads (conversation) WHERE conversation IS NOT NULL;
CREATE INDEX threads_by_age ON threads (used_at);
CREATE INDEX answers_by_thread ON answers (thread);
CREATE INDEX items_by_thread ON items (thread, is_listed, number);
CREATE INDEX items_by_answer ON items (answer) WHERE answer IS NOT NULL;
CREATE INDEX items_by_id ON items (id);
CREATE INDEX runs_by_owner ON runs (owner);
CREATE INDEX runs_by_thread ON runs (thread);
CREATE TRIGGER item_added AFTER INSERT ON items BEGIN
    UPDATE threads SET n_bytes = n_bytes + {_ROW_BYTES} + length(NEW.body) WHERE number = NEW.thread; END;
CREATE TRIGGER item_deleted AFTER DELETE ON items BEGIN
    UPDATE threads SET n_bytes = n_bytes - {_ROW_BYTES} - length(OLD.body) WHERE number = OLD.thread; END;
CREATE TRIGGER answer_added AFTER INSERT ON answers BEGIN
    UPDATE threads SET n_bytes = n_bytes + {_ROW_BYTES} + length(NEW.body) WHERE number = NEW.thread; END;
CREATE TRIGGER answer_changed AFTER UPDATE OF body ON answers BEGIN
    UPDATE threads SET n_bytes = n_bytes + length(NEW.body) - length(OLD.body) WHERE number = OLD.thread; END;
CREATE TRIGGER answer_deleted AFTER DELETE ON answers BEGIN
    UPDATE threads SET n_bytes = n_bytes - {_ROW_BYTES} - length(OLD.body) WHERE number = OLD.thread;
    DELETE FROM runs WHERE id = OLD.id; DELETE FROM events WHERE answer = OLD.id; END;
CREATE TRIGGER run_added AFTER INSERT ON runs BEGIN
    UPDATE threads SET n_bytes = n_bytes + {_ROW_BYTES} + length(NEW.body) WHERE number = NEW.thread; END;
CREATE TRIGGER run_deleted AFTER DELETE ON runs BEGIN
    UPDATE threads SET n_bytes = n_bytes - {_ROW_BYTES} - length(OLD.body) WHERE number = OLD.thread; END;
CREATE TRIGGER event_added AFTER INSERT ON events BEGIN
    UPDATE threads SET n_bytes = n_bytes + {_EVENT_BYTES} + length(NEW.body) WHERE number = NEW.thread; END;
CREATE TRIGGER event_deleted AFTER DELETE ON events BEGIN
    UPDATE threads SET n_bytes = n_bytes - {_EVENT_BYTES} - length(OLD.body) WHERE number = OLD.thread; END;
"""
# UNION, not UNION ALL: no file makes a read endless.
_CHAIN = """
WITH RECURSIVE chain (id, previous, after, thread) AS (
    SELECT id, previous, after, thread FROM answers WHERE id = :id
    UNION
    SELECT a.id, a.previous, a.after, a.thread FROM chain JOIN answers a ON a.id = chain.previous)
"""
# The numbers of all items of a chain, and of the conversation before its first answer.
_OF_CHAIN = f"""{_CHAIN}
SELECT number FROM items WHERE answer IN (SELECT id FROM chain) AND NOT (answer = :id AND is_output AND :without_output)
UNION ALL
SELECT i.number FROM chain JOIN items i ON i.thread = chain.thread AND i.is_listed AND i.number <= chain.after
    WHERE chain.previous IS NULL
"""
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_MOST_OF_ID = 128  # characters of an id that a client gave
Item = dict[str, Any]


class StoreError(OSError):
    """The file cannot be used. The message says why, for logs and clients."""


class MissingError(LookupError):
    """There is nothing with this id, or it is another owner's. ``kind``: what was looked for."""

    def __init__(self, kind: str, wanted: str) -> None:
        super().__init__(f"no {kind} has the id {wanted}")
        self.kind = kind
        self.id = wanted


class TooMuchError(Exception):
    """What is to be continued has more items or bytes than the caller takes."""

    def __init__(self, n_items: int, n_bytes: int) -> None:
        super().__init__(f"{n_items} items, {n_bytes} bytes")
        self.n_items = n_items
        self.n_bytes = n_bytes


class UnfinishedError(Exception):
    """The answer that is to be continued has not ended."""

    def __init__(self, answer_id: str) -> None:
        super().__init__(f"the answer {answer_id} has not ended yet")
        self.id = answer_id


class NewAnswer(NamedTuple):
    """An answer to store. ``body``: without its output. ``after``: of the ``Earlier`` that it continues.

    ``is_listed``: its items become those of the conversation. ``worker``: who computed it in the background; the answer
    is there already.
    """

    id: str
    body: Mapping[str, Any]
    input: Sequence[Item]
    output: Sequence[Item]
    previous: str | None = None
    conversation: str | None = None
    after: int | None = None
    is_listed: bool = False
    worker: str | None = None


class Earlier(NamedTuple):
    """What comes before an input. ``after``: the last item of a conversation."""

    items: list[Item]
    n_bytes: int
    after: int | None


class Page(NamedTuple):
    """Which items of a list are wanted. ``after``: the id of the one before them.

    ``most_bytes``: of all but the first; a client may store more than memory holds, and ask for all at once.
    """

    is_ascending: bool = False
    after: str | None = None
    limit: int = 20
    most_bytes: int = 2**24


class Store:
    """One file of stored answers, open until ``close``. Any thread.

    Raises OSError if the file cannot be used or others may read it, StoreError if it is damaged or no store.
    """

    def __init__(self, path: Path, most_bytes: int, most_days: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._most_s = most_days * _DAY_S
        self._told_at = -_TELL_S
        self._aged_at = -_AGE_S
        self._n_unseen = most_bytes  # bytes that were written since the size was looked at
        self._readers: list[sqlite3.Connection] = []  # that nobody uses
        self._is_closed = False
        self._checkpoint_is_due = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # of ``_readers`` and ``_is_closed``
        _check_file(path)
        self._file = _identity(path)
        try:
            self._writer = _connected(path, _OPEN_S)
            try:
                for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "secure_delete = ON",
                               "synchronous = NORMAL", "journal_size_limit = 16777216"):  # fmt: skip
                    _execute_soon(self._writer, f"PRAGMA {pragma}")
                self._prepare()
                with self._transaction():
                    self._tidy(at_start=True)
                self._shrink()
            except BaseException:
                self._writer.close()
                raise
        except sqlite3.Error as e:
            raise StoreError(f"--store: {path}: {_problem(e)}") from e
        self._writer.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
        self._thread = threading.Thread(target=self._run, name="llamapipe-store", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def __repr__(self) -> str:
        return f"<Store {self.path}>"

    def close(self, drain: bool = False) -> None:
        """Ends the thread after the transactions that wait, and closes the file. A second call does nothing."""
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
        """``function(*arguments)``, one of the methods below, as a transaction of the thread that writes.

        Raises StoreError if the disk is full, too slow or failed, MissingError. Cancelled or late, nothing is stored,
        unless the transaction has ended already.
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
        """Logs a failure, not more than once a minute."""
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            _log.warning("%s: %s", self.path, error)

    def add_answer(self, owner: str, answer: NewAnswer) -> None:
        """Stores an answer with its items, in place of one with this id that the client was never told of.

        Raises StoreError if it does not fit, MissingError; of an answer in the background also if the worker is no
        longer the one that computes it.
        """
        if answer.worker is not None:
            self._finish(owner, answer, answer.worker)
            return
        thread = self._thread_of(self._writer, owner, answer.previous, answer.conversation)
        if thread is None:
            thread = self._new_thread(owner)
        else:
            self._touch(thread)
        body = _encoded(answer.body)
        row = (answer.id, thread, answer.previous, answer.after, body)
        insert = "INSERT INTO answers (id, thread, previous, after, body) VALUES (?, ?, ?, ?, ?)"
        try:
            self._writer.execute(insert, row)
        except sqlite3.IntegrityError:
            self._forget_answer(
                self._answer(self._writer, owner, answer.id)[0], answer.id, keeps_listed=False
            )
            self._writer.execute(insert, row)
        self._n_unseen += _ROW_BYTES + len(body)
        self._add_items(owner, thread, answer.input, answer.id, is_listed=answer.is_listed)
        self._add_items(owner, thread, answer.output, answer.id, is_output=True, is_listed=answer.is_listed)

    def _finish(self, owner: str, answer: NewAnswer, worker: str) -> None:
        row = self._writer.execute(
            "SELECT thread FROM runs WHERE id = ? AND owner = ? AND worker = ? AND NOT is_done",
            (answer.id, owner, worker),
        ).fetchone()
        if row is None:
            raise MissingError("answer", answer.id)
        thread: int = row[0]
        given = self._writer.execute(
            "SELECT body FROM items WHERE answer = ? AND NOT is_output ORDER BY number", (answer.id,)
        ).fetchall()
        self._writer.execute("DELETE FROM items WHERE answer = ?", (answer.id,))
        # In a conversation they come after what was added meanwhile.
        items = [msgspec.json.decode(body) for (body,) in given]
        self._add_items(owner, thread, items, answer.id, is_listed=answer.is_listed)
        self._add_items(owner, thread, answer.output, answer.id, is_output=True, is_listed=answer.is_listed)
        self.change_answer(answer.id, {**answer.body, "created_at": None}, answer.after)
        self._writer.execute("UPDATE runs SET is_done = 1 WHERE id = ?", (answer.id,))

    def change_answer(
        self, answer_id: str, changes: Mapping[str, Any], after: int | None = None
    ) -> dict[str, Any]:
        """Changes fields of an answer's body, those that are not None; for ``_runs.py``, inside of ``write``."""
        thread, old = self._writer.execute(
            "SELECT thread, body FROM answers WHERE id = ?", (answer_id,)
        ).fetchone()
        self._touch(thread)
        given = {name: value for name, value in changes.items() if value is not None}
        changed: dict[str, Any] = {**msgspec.json.decode(old), **given}
        body = _encoded(changed)
        self.will_write(len(body))
        self._writer.execute(
            "UPDATE answers SET body = ?, after = coalesce(?, after) WHERE id = ?", (body, after, answer_id)
        )
        return changed

    @property
    def writer(self) -> sqlite3.Connection:
        """The connection of the thread that writes; for ``_runs.py``, inside of ``write``."""
        return self._writer

    def will_write(self, n_bytes: int) -> None:
        """Counts bytes until the next look at the file's size; for ``_runs.py``, inside of ``write``."""
        self._n_unseen += _ROW_BYTES + n_bytes

    def thread_of(self, owner: str, answer_id: str, connection: sqlite3.Connection) -> int:
        """The thread of an answer; for ``_runs.py``. Raises MissingError."""
        return self._answer(connection, owner, answer_id)[0]

    def delete_answer(self, owner: str, answer_id: str) -> None:
        """Deletes an answer for good; its items stay in the conversation, if it was one's. Raises MissingError."""
        thread = self._answer(self._writer, owner, answer_id)[0]
        self._forget_answer(thread, answer_id, keeps_listed=True)
        self._checkpoint_is_due = True

    def add_conversation(
        self, owner: str, metadata: Mapping[str, Any], items: Sequence[Item]
    ) -> dict[str, Any]:
        """A new conversation. Raises StoreError."""
        conversation_id = f"conv_{uuid.uuid4().hex}"
        thread = self._new_thread(owner, conversation_id, metadata)
        self._add_items(owner, thread, items, is_listed=True)
        self._touch(thread)
        return self.conversation(owner, conversation_id, self._writer)

    def change_conversation(
        self, owner: str, conversation_id: str, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The conversation with other metadata. Raises MissingError."""
        thread = self._conversation(self._writer, owner, conversation_id)[0]
        self._writer.execute("UPDATE threads SET metadata = ? WHERE number = ?", (_encoded(metadata), thread))
        self._touch(thread)
        return self.conversation(owner, conversation_id, self._writer)

    def delete_conversation(self, owner: str, conversation_id: str) -> None:
        """Deletes a conversation with its items, and the answers given in it, for good. Raises MissingError."""
        self._delete_thread(self._conversation(self._writer, owner, conversation_id)[0])
        self._checkpoint_is_due = True

    def add_items(self, owner: str, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Appends items to a conversation. Raises MissingError, StoreError."""
        thread = self._conversation(self._writer, owner, conversation_id)[0]
        made = self._add_items(owner, thread, items, is_listed=True)
        self._touch(thread)
        return made

    def delete_item(self, owner: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Deletes an item of a conversation for good. Raises MissingError."""
        thread = self._conversation(self._writer, owner, conversation_id)[0]
        number = self._number(self._writer, thread, item_id)
        self._writer.execute("DELETE FROM items WHERE number = ?", (number,))
        self._checkpoint_is_due = True
        return self.conversation(owner, conversation_id, self._writer)

    # ---- reads, in any thread but that of an event loop
    def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments, connection)``, one of the methods below, with a connection for this call.

        Raises StoreError, MissingError.
        """
        connection = None
        try:
            with self._lock:
                if self._is_closed:
                    raise StoreError("the server is shutting down")
                connection = self._readers.pop() if self._readers else None
            if connection is None:
                connection = _connected(self.path, _BUSY_S)
            connection.execute("BEGIN")  # all statements see the same state
            try:
                return function(*arguments, connection)
            finally:
                connection.execute("COMMIT")
        except sqlite3.Error as e:
            raise StoreError(_problem(e)) from e
        finally:
            if connection is not None:
                with self._lock:
                    keeps = not self._is_closed
                    if keeps:
                        self._readers.append(connection)
                if not keeps:
                    connection.close()

    def answer(self, owner: str, answer_id: str, connection: sqlite3.Connection) -> dict[str, Any]:
        """A stored answer. Raises MissingError."""
        body: dict[str, Any] = msgspec.json.decode(self._answer(connection, owner, answer_id)[1])
        rows = connection.execute(
            "SELECT body FROM items WHERE answer = ? AND is_output ORDER BY number", (answer_id,)
        )
        body["output"] = [msgspec.json.decode(row[0]) for row in rows]
        run = connection.execute(
            "SELECT worker FROM runs WHERE id = ? AND NOT is_done", (answer_id,)
        ).fetchone()
        if run is not None and run[0] is not None:
            body["status"] = "in_progress"
        return body

    def input_items(
        self, owner: str, answer_id: str, page: Page, connection: sqlite3.Connection
    ) -> tuple[list[Item], bool]:
        """The items that an answer was made from, with those before its input; whether there are more.

        Raises MissingError.
        """
        self._answer(connection, owner, answer_id)
        return self._page(connection, _OF_CHAIN, {"id": answer_id, "without_output": 1}, page)

    def earlier(
        self,
        owner: str,
        previous: str | None,
        conversation: str | None,
        most_items: int,
        most_bytes: int,
        without: str,
        connection: sqlite3.Connection,
    ) -> Earlier:
        """What an answer continues: another answer, or a conversation. ``without``: its own id, see ``add_answer``.

        Raises MissingError, UnfinishedError, TooMuchError.
        """
        after = None
        if previous is not None:
            self._answer(connection, owner, previous)
            if connection.execute("SELECT 1 FROM runs WHERE id = ? AND NOT is_done", (previous,)).fetchone():
                raise UnfinishedError(previous)
            values: dict[str, Any] = {"id": previous, "without_output": 0}
            gone = f"{_CHAIN} SELECT previous FROM chain WHERE previous NOT IN (SELECT id FROM chain)"
            if (row := connection.execute(gone, values).fetchone()) is not None:
                raise MissingError("answer", row[0])
            numbers = _OF_CHAIN
        else:
            assert conversation is not None
            thread = self._conversation(connection, owner, conversation)[0]
            values = {"thread": thread, "without": without}
            numbers = (
                "SELECT number FROM items WHERE thread = :thread AND is_listed AND answer IS NOT :without"
            )
            row = connection.execute(f"SELECT coalesce(max(number), 0) FROM ({numbers})", values).fetchone()
            after = row[0]
        counted = f"SELECT count(*), coalesce(sum(length(body)), 0) FROM items WHERE number IN ({numbers})"
        n_items, n_bytes = connection.execute(counted, values).fetchone()
        if n_items > most_items or n_bytes > most_bytes:
            raise TooMuchError(n_items, n_bytes)
        rows = connection.execute(
            f"SELECT body FROM items WHERE number IN ({numbers}) ORDER BY number", values
        )
        return Earlier([msgspec.json.decode(row[0]) for row in rows], n_bytes, after)

    def conversation(
        self, owner: str, conversation_id: str, connection: sqlite3.Connection
    ) -> dict[str, Any]:
        """A conversation, as the API has it. Raises MissingError."""
        _, created_at, metadata = self._conversation(connection, owner, conversation_id)
        return {
            "id": conversation_id,
            "object": "conversation",
            "created_at": created_at,
            "metadata": msgspec.json.decode(metadata),
        }

    def items(
        self, owner: str, conversation_id: str, page: Page, connection: sqlite3.Connection
    ) -> tuple[list[Item], bool]:
        """Items of a conversation; whether there are more. Raises MissingError."""
        thread = self._conversation(connection, owner, conversation_id)[0]
        numbers = "SELECT number FROM items WHERE thread = :thread AND is_listed"
        return self._page(connection, numbers, {"thread": thread}, page)

    def item(self, owner: str, conversation_id: str, item_id: str, connection: sqlite3.Connection) -> Item:
        """An item of a conversation. Raises MissingError."""
        thread = self._conversation(connection, owner, conversation_id)[0]
        number = self._number(connection, thread, item_id)
        found: Item = msgspec.json.decode(
            connection.execute("SELECT body FROM items WHERE number = ?", (number,)).fetchone()[0]
        )
        return found

    def referred(self, owner: str, ids: Sequence[str], connection: sqlite3.Connection) -> list[Item]:
        """The items with these ids, wherever they are. Raises MissingError."""
        found: list[Item] = []
        for item_id in ids:
            row = connection.execute(
                "SELECT body FROM items JOIN threads ON threads.number = thread WHERE id = ? AND owner = ? "
                "AND used_at >= ? ORDER BY items.number DESC LIMIT 1",
                (item_id, owner, self._oldest()),
            ).fetchone()
            if row is None:
                raise MissingError("item", item_id)
            found.append(msgspec.json.decode(row[0]))
        return found

    # ---- inside
    def _prepare(self) -> None:
        """Makes the tables of a new file, and looks whether an old one is sound. Raises StoreError."""
        writer = self._writer
        with _exclusive(writer):
            n_tables = writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            marks = (writer.execute("PRAGMA application_id").fetchone()[0],
                     writer.execute("PRAGMA user_version").fetchone()[0])  # fmt: skip
            if not n_tables and marks == (0, 0):
                for statement in _statements(_SCHEMA):
                    writer.execute(statement)
                writer.execute(f"PRAGMA application_id = {_APPLICATION}")
                writer.execute(f"PRAGMA user_version = {_VERSION}")
            elif marks[0] != _APPLICATION:
                raise StoreError(f"--store: {self.path} is a database of another program; give another file")
            elif marks[1] != _VERSION:
                raise StoreError(
                    f"--store: {self.path} has version {marks[1]}, this llamapipe reads {_VERSION}; give another file"
                )
        if self.path.stat().st_size <= _QUICK_BYTES:
            found = writer.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise StoreError(
                    f"--store: {self.path} is damaged ({found}): restore a copy, or give another file"
                )

    def _run(self) -> None:
        """The thread that writes."""
        writer = self._writer
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=_TIDY_S)
                except Empty:
                    self._n_unseen = self._most_bytes  # other processes may have written
                    job = _Job(lambda: None, None, None)
                if job is None:
                    return
                if job.is_unwanted():
                    continue
                result, error = None, None  # type: Any, Exception | None
                try:
                    if _identity(self.path) != self._file:  # what is written would be lost
                        raise StoreError("the file was deleted or replaced while the server runs: restart it")
                    with self._transaction():
                        result = job.function()
                        self._tidy()
                        if job.is_unwanted():
                            raise StoreError("nobody waits for it")
                except sqlite3.Error as e:
                    error = StoreError(_problem(e))
                except Exception as e:
                    error = e
                job.settle(result, error)
                with suppress(sqlite3.Error):  # the next time, then
                    self._shrink()
        finally:
            writer.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _exclusive(self._writer):
            yield

    def _oldest(self) -> int:
        """The time before which a thread must have been used to be too old."""
        return int(time.time()) - self._most_s

    def _tidy(self, at_start: bool = False) -> None:
        """Deletes threads that are too old, and the least recently used ones while there are too many bytes.

        Raises StoreError if the one that was written last would have to go. ``at_start``: it goes, because the limit
        may be lower than before.
        """
        now = time.monotonic()
        if now - self._aged_at >= _AGE_S:  # reads look at the age themselves
            self._aged_at = now
            old = self._writer.execute(
                "SELECT number FROM threads WHERE used_at < ?", (self._oldest(),)
            ).fetchall()
            for (number,) in old:
                self._delete_thread(number)
                self._checkpoint_is_due = True
        if self._n_unseen < self._most_bytes * _UNSEEN:
            return
        self._n_unseen = 0
        if self._used_bytes() <= self._most_bytes:
            return
        last = self._writer.execute("SELECT max(number) FROM items").fetchone()[0]
        newest = self._writer.execute("SELECT thread FROM items WHERE number = ?", (last,)).fetchone()
        # Once, because it reads all rows: there may be a million, of which many go.
        sizes = dict(self._writer.execute("SELECT owner, sum(n_bytes) FROM threads GROUP BY owner"))
        until = time.monotonic() + _ROOM_S
        while sizes and (n_used := self._used_bytes()) > self._most_bytes * _LEFT:
            fits = n_used <= self._most_bytes
            owner = max(sizes, key=sizes.__getitem__)
            row = self._writer.execute(
                "SELECT number, n_bytes FROM threads WHERE owner = ? AND number NOT IN (SELECT thread FROM runs) "
                "ORDER BY used_at, number LIMIT 1",
                (owner,),
            ).fetchone()
            if row is None:
                del sizes[owner]
                continue
            is_newest = newest is not None and row[0] == newest[0]
            if fits and (is_newest or time.monotonic() > until):
                return
            if is_newest and not at_start:
                raise StoreError(
                    f"it needs more than {self._most_bytes} bytes with what it continues (--store-bytes)"
                )
            self._delete_thread(row[0])
            sizes[owner] -= row[1]
        if not at_start and self._used_bytes() > self._most_bytes:  # answers that have not ended never go
            raise StoreError(
                f"it needs more than {self._most_bytes} bytes with the answers that have not ended (--store-bytes)"
            )

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._writer.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _shrink(self) -> None:
        """Gives free pages back, and overwrites the log of what was deleted on request."""
        if not self._checkpoint_is_due:
            return
        self._writer.executescript("PRAGMA incremental_vacuum")  # execute() would free a single page
        is_busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        self._checkpoint_is_due = bool(is_busy)  # somebody reads: after the next transaction

    def _delete_thread(self, number: int) -> None:
        self._writer.execute("DELETE FROM items WHERE thread = ?", (number,))
        self._writer.execute("DELETE FROM answers WHERE thread = ?", (number,))
        self._writer.execute("DELETE FROM threads WHERE number = ?", (number,))

    def _forget_answer(self, thread: int, answer_id: str, keeps_listed: bool) -> None:
        """Deletes an answer, and its thread if nothing else is there. ``keeps_listed``: not a conversation's items."""
        kept = "AND NOT is_listed" if keeps_listed else ""
        self._writer.execute(f"DELETE FROM items WHERE answer = ? {kept}", (answer_id,))
        self._writer.execute("UPDATE items SET answer = NULL WHERE answer = ?", (answer_id,))
        self._writer.execute("DELETE FROM answers WHERE id = ?", (answer_id,))
        self._writer.execute(
            "DELETE FROM threads WHERE number = ? AND conversation IS NULL "
            "AND NOT EXISTS (SELECT 1 FROM answers WHERE thread = threads.number)",
            (thread,),
        )

    def _new_thread(
        self, owner: str, conversation: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> int:
        now = int(time.time())
        made = self._writer.execute(
            "INSERT INTO threads (owner, used_at, conversation, created_at, metadata) VALUES (?, ?, ?, ?, ?)",
            (owner, now, conversation, now, _encoded(metadata or {})),
        )
        assert made.lastrowid is not None
        return made.lastrowid

    def _touch(self, thread: int) -> None:
        self._writer.execute("UPDATE threads SET used_at = ? WHERE number = ?", (int(time.time()), thread))

    def _thread_of(
        self, connection: sqlite3.Connection, owner: str, previous: str | None, conversation: str | None
    ) -> int | None:
        if previous is not None:
            return self._answer(connection, owner, previous)[0]
        return None if conversation is None else self._conversation(connection, owner, conversation)[0]

    def _answer(self, connection: sqlite3.Connection, owner: str, answer_id: str) -> tuple[int, bytes]:
        """The thread and the body of an answer. Raises MissingError."""
        row: tuple[int, bytes] | None = connection.execute(
            "SELECT thread, body FROM answers JOIN threads ON number = thread WHERE id = ? AND owner = ? "
            "AND used_at >= ?",
            (answer_id, owner, self._oldest()),
        ).fetchone()
        if row is None:
            raise MissingError("answer", answer_id)
        return row

    def _conversation(
        self, connection: sqlite3.Connection, owner: str, conversation_id: str
    ) -> tuple[int, int, bytes]:
        """The thread of a conversation, when it was made, and its metadata. Raises MissingError."""
        row: tuple[int, int, bytes] | None = connection.execute(
            "SELECT number, created_at, metadata FROM threads WHERE conversation = ? AND owner = ? AND used_at >= ?",
            (conversation_id, owner, self._oldest()),
        ).fetchone()
        if row is None:
            raise MissingError("conversation", conversation_id)
        return row

    def _number(self, connection: sqlite3.Connection, thread: int, item_id: str) -> int:
        row = connection.execute(
            "SELECT number FROM items WHERE id = ? AND thread = ? AND is_listed", (item_id, thread)
        ).fetchone()
        if row is None:
            raise MissingError("item", item_id)
        return int(row[0])

    def _add_items(
        self,
        owner: str,
        thread: int,
        items: Sequence[Item],
        answer: str | None = None,
        is_output: bool = False,
        is_listed: bool = False,
    ) -> list[Item]:
        """Adds items, with new ids where they have none, or that of another one."""
        made = []
        rows = []
        given: set[str] = set()
        for old in items:
            item = as_item(old)
            # Those of an output are new.
            if item["id"] == old.get("id") and not is_output:
                if item["id"] in given or self._has_item(owner, item["id"]):
                    item["id"] = _new_id(item)
                given.add(item["id"])
            body = _encoded(item)
            self._n_unseen += _ROW_BYTES + len(body)
            rows.append((thread, item["id"], answer, is_output, is_listed, body))
            made.append(item)
        self._writer.executemany(
            "INSERT INTO items (thread, id, answer, is_output, is_listed, body) VALUES (?, ?, ?, ?, ?, ?)",
            rows,
        )
        return made

    def _has_item(self, owner: str, item_id: str) -> bool:
        found = self._writer.execute(
            "SELECT 1 FROM items JOIN threads ON threads.number = thread WHERE id = ? AND owner = ? LIMIT 1",
            (item_id, owner),
        )
        return found.fetchone() is not None

    def _page(
        self, connection: sqlite3.Connection, numbers: str, values: dict[str, Any], page: Page
    ) -> tuple[list[Item], bool]:
        """Items out of those whose numbers a query finds; whether there are more."""
        where, order = "", "ASC" if page.is_ascending else "DESC"
        if page.after is not None:
            row = connection.execute(
                f"SELECT max(number) FROM items WHERE id = :after AND number IN ({numbers})",
                {**values, "after": page.after},
            ).fetchone()
            if row[0] is None:
                raise MissingError("item", page.after)
            values = {**values, "start": row[0]}
            where = f"AND number {'>' if page.is_ascending else '<'} :start"
        rows = connection.execute(
            f"SELECT body FROM items WHERE number IN ({numbers}) {where} ORDER BY number {order} LIMIT :limit",
            {**values, "limit": page.limit + 1},
        )
        found: list[Item] = []
        n_bytes = 0
        for (body,) in rows:
            n_bytes += len(body)
            if len(found) == page.limit or (found and n_bytes > page.most_bytes):
                return found, True
            found.append(msgspec.json.decode(body))
        return found, False


class _Job(NamedTuple):
    """A transaction that waits; without ``future`` nobody waits for it."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop | None
    future: asyncio.Future[Any] | None

    def is_unwanted(self) -> bool:
        """Whether the one who asked for it is gone, or was told that it takes too long."""
        return self.future is not None and self.future.done()

    def settle(self, result: Any, error: Exception | None) -> None:
        """Tells how it ended."""
        if self.loop is not None and self.future is not None:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(settle, self.future, result, error)


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(StoreError(f"the disk did not take it within {_WAIT_S:g} seconds"))


def as_item(item: Mapping[str, Any]) -> Item:
    """An item of an input in the form in which the API lists items: with a type, an id, a status and parts."""
    made = dict(item)
    kind = made.setdefault("type", "message")
    item_id = made.get("id")
    if not isinstance(item_id, str) or not 0 < len(item_id) <= _MOST_OF_ID:
        made["id"] = _new_id(made)
    if made.get("status") is None:
        made["status"] = "completed"
    if kind == "message" and isinstance(made.get("content"), str):
        is_answer = made.get("role") == "assistant"
        part = {"type": "output_text" if is_answer else "input_text", "text": made["content"]}
        made["content"] = [{**part, "annotations": [], "logprobs": []} if is_answer else part]
    return made


def _new_id(item: Mapping[str, Any]) -> str:
    return f"{_ID_PREFIXES.get(str(item.get('type')), 'item')}_{uuid.uuid4().hex}"


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # what a model writes in JSON may have halves of characters
        return msgspec.json.encode(whole_values(msgspec.to_builtins(value)))


# ---- the file
def _check_file(path: Path) -> None:
    """Makes a file that only its user may read, or looks whether it is one. Raises OSError."""
    # It is never opened here: closing it would give up the locks that SQLite holds for this process.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        try:
            status = name.lstat()
        except FileNotFoundError:
            continue
        if (problem := _distrust(status)) is not None:
            raise PermissionError(f"--store: {name} cannot hold stored answers: {problem}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file has this name; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _distrust(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"other users may use it (mode {stat.S_IMODE(status.st_mode):o}): chmod 600"
    return None


def _connected(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection to the file."""
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
    """Executes a statement at the start, when several processes may change the journal's mode at the same time."""
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
    """A transaction: all of it, or nothing after an exception."""
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


def _problem(error: sqlite3.Error) -> str:
    """What SQLite says, with what to do about it."""
    text = str(error)
    advice = next((advice for words, advice in _ADVICE.items() if words in text), None)
    return text if advice is None else f"{text} ({advice})"

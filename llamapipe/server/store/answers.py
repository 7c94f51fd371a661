"""Answers and conversations of the Responses API in a SQLite file, which all processes of a server share.

Open it to change what is stored, for how long, or how it is found. It has no routes: ``_kept.py`` stores the answers of
requests, and ``_conversations.py`` has the routes for stored data.

A *thread* is a conversation, or an answer with all answers that continue it. Each thread has an owner, and only its
owner can read it. Whole threads are deleted, so that no chain of answers loses its beginning: those that have not been
used for too long, and when the file is too large, threads of the owner with the most bytes.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from llamapipe.server.json_bytes import encode_json
from llamapipe.server.store.database import Database, MissingError, StoreError

_AGE_S = 60.0  # between two checks of the age, while there are writes
_UNSEEN = 1 / 64  # of the limit; may be written between two checks of the size
_DAY_S = 86_400
_ROW_BYTES = 256  # the estimated size of a row in addition to its contents
_EVENT_BYTES = 64  # the same for an event
_LEFT = 0.95  # of the limit; rows are deleted down to this size, to leave room for more
_ROOM_S = 1.0  # the time for that; after it, only as much is deleted as is needed
# ``after``: for an answer in a conversation, the conversation's last item at the time of the request. ``is_listed``:
# the item is in the conversation's list. ``runs``: answers to be computed (see ``_runs.py``). ``events``: the events of
# their streams. Runs and events are deleted with their answers.
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
# UNION, not UNION ALL, so that a damaged file cannot cause an endless read.
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
_MOST_OF_ID = 128  # characters of an id that a client chose
Item = dict[str, Any]


class TooMuchError(Exception):
    """The conversation to continue has more items or bytes than the caller accepts."""

    def __init__(self, n_items: int, n_bytes: int) -> None:
        super().__init__(f"{n_items} items, {n_bytes} bytes")
        self.n_items = n_items
        self.n_bytes = n_bytes


class UnfinishedError(Exception):
    """The answer to continue has not ended."""

    def __init__(self, answer_id: str) -> None:
        super().__init__(f"the answer {answer_id} has not ended yet")
        self.id = answer_id


class NewAnswer(NamedTuple):
    """An answer to store. ``body``: its fields except the output. ``after``: as in the ``Earlier`` that it continues.

    ``is_listed``: its items join the conversation. ``worker``: for an answer that was stored before it was computed in
    the background, the worker that computed it.
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
    """The items that come before an input. ``after``: the number of a conversation's last item."""

    items: list[Item]
    n_bytes: int
    after: int | None


class Page(NamedTuple):
    """Selects items of a list. ``after``: the id of the preceding item.

    ``most_bytes``: the maximum size of all items except the first. A client may store more than memory can hold, and
    ask for all of it at once.
    """

    is_ascending: bool = False
    after: str | None = None
    limit: int = 20
    most_bytes: int = 2**24


class Store(Database):
    """A file of stored answers; see ``Database``. Pass methods with a connection to ``read``, others to ``write``."""

    schema = _SCHEMA
    application = 0x6C6C7061
    version = 2

    def __init__(self, path: Path, most_bytes: int, most_days: int) -> None:
        self._most_bytes = most_bytes
        self._most_s = most_days * _DAY_S
        self._aged_at = -_AGE_S
        self._n_unseen = most_bytes  # bytes written since the last check of the size
        super().__init__(path)

    # ---- writes
    def add_answer(self, owner: str, answer: NewAnswer) -> int:
        """Store an answer with its items. Replaces an answer with the same id, which the client has never seen.

        Returns the number of its thread. Raises StoreError if the answer does not fit, MissingError if the answer or
        conversation that it continues is gone, or if its worker no longer has its run.
        """
        if answer.worker is not None:
            return self._finish(owner, answer, answer.worker)
        if answer.previous is not None:
            thread = self._answer(self.writer, owner, answer.previous)[0]
        elif answer.conversation is not None:
            thread = self._conversation(self.writer, owner, answer.conversation)[0]
        else:
            thread = self._new_thread(owner)
        self._touch(thread)
        body = encode_json(answer.body)
        row = (answer.id, thread, answer.previous, answer.after, body)
        insert = "INSERT INTO answers (id, thread, previous, after, body) VALUES (?, ?, ?, ?, ?)"
        try:
            self.writer.execute(insert, row)
        except sqlite3.IntegrityError:
            self._forget_answer(self._answer(self.writer, owner, answer.id)[0], answer.id, keeps_listed=False)
            self.writer.execute(insert, row)
        self._n_unseen += _ROW_BYTES + len(body)
        self._add_items(owner, thread, answer.input, answer.id, is_listed=answer.is_listed)
        self._add_items(owner, thread, answer.output, answer.id, is_output=True, is_listed=answer.is_listed)
        return thread

    def _finish(self, owner: str, answer: NewAnswer, worker: str) -> int:
        row = self.writer.execute(
            "SELECT thread FROM runs WHERE id = ? AND owner = ? AND worker = ? AND NOT is_done",
            (answer.id, owner, worker),
        ).fetchone()
        if row is None:
            raise MissingError("answer", answer.id)
        thread: int = row[0]
        rows = self.writer.execute(
            "SELECT body FROM items WHERE answer = ? AND NOT is_output ORDER BY number", (answer.id,)
        ).fetchall()
        self.writer.execute("DELETE FROM items WHERE answer = ?", (answer.id,))
        # They are added again, so that they follow items that were added to the conversation meanwhile.
        items = [msgspec.json.decode(body) for (body,) in rows]
        self._add_items(owner, thread, items, answer.id, is_listed=answer.is_listed)
        self._add_items(owner, thread, answer.output, answer.id, is_output=True, is_listed=answer.is_listed)
        self.change_answer(answer.id, {**answer.body, "created_at": None}, answer.after)
        self.writer.execute("UPDATE runs SET is_done = 1 WHERE id = ?", (answer.id,))
        return thread

    def change_answer(
        self, answer_id: str, changes: Mapping[str, Any], after: int | None = None
    ) -> dict[str, Any]:
        """Set the fields in ``changes`` that are not None, and return the body; for ``_runs.py``, inside ``write``."""
        thread, old = self.writer.execute(
            "SELECT thread, body FROM answers WHERE id = ?", (answer_id,)
        ).fetchone()
        self._touch(thread)
        fields = {name: value for name, value in changes.items() if value is not None}
        changed: dict[str, Any] = {**msgspec.json.decode(old), **fields}
        body = encode_json(changed)
        self.will_write(len(body))
        self.writer.execute(
            "UPDATE answers SET body = ?, after = coalesce(?, after) WHERE id = ?", (body, after, answer_id)
        )
        return changed

    def will_write(self, n_bytes: int) -> None:
        """Count written bytes until the file's size is checked next; for ``_runs.py``, inside ``write``."""
        self._n_unseen += _ROW_BYTES + n_bytes

    def delete_answer(self, owner: str, answer_id: str) -> None:
        """Delete an answer permanently. Its items stay in its conversation, if any. Raises MissingError."""
        thread = self._answer(self.writer, owner, answer_id)[0]
        self._forget_answer(thread, answer_id, keeps_listed=True)
        self._checkpoint_is_due = True

    def add_conversation(
        self, owner: str, metadata: Mapping[str, Any], items: Sequence[Item]
    ) -> dict[str, Any]:
        """Store a new conversation. Raises StoreError."""
        conversation_id = f"conv_{uuid.uuid4().hex}"
        thread = self._new_thread(owner, conversation_id, metadata)
        self._add_items(owner, thread, items, is_listed=True)
        self._touch(thread)
        return self.conversation(owner, conversation_id, self.writer)

    def change_conversation(
        self, owner: str, conversation_id: str, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Replace the metadata of a conversation. Raises MissingError."""
        thread = self._conversation(self.writer, owner, conversation_id)[0]
        self.writer.execute(
            "UPDATE threads SET metadata = ? WHERE number = ?", (encode_json(metadata), thread)
        )
        self._touch(thread)
        return self.conversation(owner, conversation_id, self.writer)

    def delete_conversation(self, owner: str, conversation_id: str) -> None:
        """Delete a conversation permanently, with its items and answers. Raises MissingError."""
        self._delete_thread(self._conversation(self.writer, owner, conversation_id)[0])
        self._checkpoint_is_due = True

    def add_items(self, owner: str, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Append items to a conversation. Raises MissingError, StoreError."""
        thread = self._conversation(self.writer, owner, conversation_id)[0]
        added = self._add_items(owner, thread, items, is_listed=True)
        self._touch(thread)
        return added

    def delete_item(self, owner: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Delete an item of a conversation permanently; return the conversation. Raises MissingError."""
        thread = self._conversation(self.writer, owner, conversation_id)[0]
        number = self._number(self.writer, thread, item_id)
        self.writer.execute("DELETE FROM items WHERE number = ?", (number,))
        self._checkpoint_is_due = True
        return self.conversation(owner, conversation_id, self.writer)

    def answer(self, owner: str, answer_id: str, connection: sqlite3.Connection) -> dict[str, Any]:
        """Return a stored answer. Raises MissingError."""
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
        """Return a page of an answer's input items and the items before them, and whether there are more.

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
        """Return the items of the answer or conversation that a new answer continues.

        ``without``: the id of the new answer (see ``add_answer``). Raises MissingError, UnfinishedError, TooMuchError.
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
        """Return a conversation, in the form of the API. Raises MissingError."""
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
        """Return a page of the items of a conversation, and whether there are more. Raises MissingError."""
        thread = self._conversation(connection, owner, conversation_id)[0]
        numbers = "SELECT number FROM items WHERE thread = :thread AND is_listed"
        return self._page(connection, numbers, {"thread": thread}, page)

    def item(self, owner: str, conversation_id: str, item_id: str, connection: sqlite3.Connection) -> Item:
        """Return an item of a conversation. Raises MissingError."""
        thread = self._conversation(connection, owner, conversation_id)[0]
        number = self._number(connection, thread, item_id)
        item: Item = msgspec.json.decode(
            connection.execute("SELECT body FROM items WHERE number = ?", (number,)).fetchone()[0]
        )
        return item

    def read_referenced(self, owner: str, ids: Sequence[str], connection: sqlite3.Connection) -> list[Item]:
        """Return the items with these ids, from any thread of the owner. Raises MissingError."""
        items: list[Item] = []
        for item_id in ids:
            row = connection.execute(
                "SELECT body FROM items JOIN threads ON threads.number = thread WHERE id = ? AND owner = ? "
                "AND used_at >= ? ORDER BY items.number DESC LIMIT 1",
                (item_id, owner, self._oldest()),
            ).fetchone()
            if row is None:
                raise MissingError("item", item_id)
            items.append(msgspec.json.decode(row[0]))
        return items

    # ---- inside
    def _look_again(self) -> None:
        self._n_unseen = self._most_bytes

    def _oldest(self) -> int:
        """Return the Unix time of last use before which a thread is too old."""
        return int(time.time()) - self._most_s

    def _tidy(self, at_start: bool = False) -> None:
        """Delete old threads and, while the file is too large, the oldest threads of the owner with the most bytes.

        Raises StoreError if unfinished answers or the thread that was written last would have to be deleted. With
        ``at_start``, the last thread is deleted, because the limit may be lower than before.
        """
        now = time.monotonic()
        if now - self._aged_at >= _AGE_S and not self._clock_has_jumped():  # reads check the age themselves
            self._aged_at = now
            # A thread from a time when the clock was ahead would stay until then, and be deleted last.
            self.writer.execute(
                "UPDATE threads SET used_at = :now WHERE used_at > :now", {"now": int(time.time())}
            )
            old = self.writer.execute(
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
        last = self.writer.execute("SELECT max(number) FROM items").fetchone()[0]
        newest = self.writer.execute("SELECT thread FROM items WHERE number = ?", (last,)).fetchone()
        # This query runs only once, because it reads all rows, maybe a million.
        sizes = dict(self.writer.execute("SELECT owner, sum(n_bytes) FROM threads GROUP BY owner"))
        until = time.monotonic() + _ROOM_S
        while sizes and (n_used := self._used_bytes()) > self._most_bytes * _LEFT:
            fits = n_used <= self._most_bytes
            owner = max(sizes, key=sizes.__getitem__)
            row = self.writer.execute(
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
        if not at_start and self._used_bytes() > self._most_bytes:  # unfinished answers are never deleted
            raise StoreError(
                f"it needs more than {self._most_bytes} bytes with the answers that have not ended (--store-bytes)"
            )

    def _delete_thread(self, number: int) -> None:
        self.writer.execute("DELETE FROM items WHERE thread = ?", (number,))
        self.writer.execute("DELETE FROM answers WHERE thread = ?", (number,))
        self.writer.execute("DELETE FROM threads WHERE number = ?", (number,))

    def _forget_answer(self, thread: int, answer_id: str, keeps_listed: bool) -> None:
        """Delete an answer, and its thread if it is then empty. ``keeps_listed``: keep the items of a conversation."""
        kept = "AND NOT is_listed" if keeps_listed else ""
        self.writer.execute(f"DELETE FROM items WHERE answer = ? {kept}", (answer_id,))
        self.writer.execute("UPDATE items SET answer = NULL WHERE answer = ?", (answer_id,))
        self.writer.execute("DELETE FROM answers WHERE id = ?", (answer_id,))
        self.writer.execute(
            "DELETE FROM threads WHERE number = ? AND conversation IS NULL "
            "AND NOT EXISTS (SELECT 1 FROM answers WHERE thread = threads.number)",
            (thread,),
        )

    def _new_thread(
        self, owner: str, conversation: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> int:
        now = int(time.time())
        cursor = self.writer.execute(
            "INSERT INTO threads (owner, used_at, conversation, created_at, metadata) VALUES (?, ?, ?, ?, ?)",
            (owner, now, conversation, now, encode_json(metadata or {})),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _touch(self, thread: int) -> None:
        self.writer.execute("UPDATE threads SET used_at = ? WHERE number = ?", (int(time.time()), thread))

    def _answer(self, connection: sqlite3.Connection, owner: str, answer_id: str) -> tuple[int, bytes]:
        """Return the thread and the body of an answer. Raises MissingError."""
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
        """Return a conversation's thread, time of creation and metadata. Raises MissingError."""
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
        """Add items, with new ids for items without an id or with an id that is taken."""
        added = []
        rows = []
        ids: set[str] = set()
        for old in items:
            item = as_item(old)
            # Ids of an output are new.
            if item["id"] == old.get("id") and not is_output:
                if item["id"] in ids or self._has_item(owner, item["id"]):
                    item["id"] = _new_id(item)
                ids.add(item["id"])
            body = encode_json(item)
            self._n_unseen += _ROW_BYTES + len(body)
            rows.append((thread, item["id"], answer, is_output, is_listed, body))
            added.append(item)
        self.writer.executemany(
            "INSERT INTO items (thread, id, answer, is_output, is_listed, body) VALUES (?, ?, ?, ?, ?, ?)",
            rows,
        )
        return added

    def _has_item(self, owner: str, item_id: str) -> bool:
        rows = self.writer.execute(
            "SELECT 1 FROM items JOIN threads ON threads.number = thread WHERE id = ? AND owner = ? LIMIT 1",
            (item_id, owner),
        )
        return rows.fetchone() is not None

    def _page(
        self, connection: sqlite3.Connection, numbers: str, values: dict[str, Any], page: Page
    ) -> tuple[list[Item], bool]:
        """Return a page of the items that the query ``numbers`` selects, and whether there are more."""
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
        items: list[Item] = []
        n_bytes = 0
        for (body,) in rows:
            n_bytes += len(body)
            if len(items) == page.limit or (items and n_bytes > page.most_bytes):
                return items, True
            items.append(msgspec.json.decode(body))
        return items, False


def as_item(item: Mapping[str, Any]) -> Item:
    """Return an input item in the form of the API's lists: with a type, an id, a status and parts."""
    whole = dict(item)
    kind = whole.setdefault("type", "message")
    item_id = whole.get("id")
    if not isinstance(item_id, str) or not 0 < len(item_id) <= _MOST_OF_ID:
        whole["id"] = _new_id(whole)
    if whole.get("status") is None:
        whole["status"] = "completed"
    if kind == "message" and isinstance(whole.get("content"), str):
        is_answer = whole.get("role") == "assistant"
        part = {"type": "output_text" if is_answer else "input_text", "text": whole["content"]}
        whole["content"] = [{**part, "annotations": [], "logprobs": []} if is_answer else part]
    return whole


def _new_id(item: Mapping[str, Any]) -> str:
    return f"{_ID_PREFIXES.get(str(item.get('type')), 'item')}_{uuid.uuid4().hex}"

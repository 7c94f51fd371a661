"""Clients' files and batches, in a SQLite file next to the file of stored answers.

Open it to change what is stored of a batch, or how much a client may store. ``routes/files.py`` has the routes, and
``_batches.py`` computes batches.

A file is a set of rows, its *parts*. The results of a batch go into two growing files, one for errors. Each result is a
part with the number of the request's line. A result, the counts of its batch and the size of its file are written in
one transaction, so a killed server loses no finished result. A batch belongs to the process whose name is in its row,
like an answer in the background (``_runs.py``); writes by another process are refused.

Each API key has an equal share of the space. Nothing is deleted to make room: an upload that does not fit is refused,
and a batch whose results do not fit fails, but keeps the results that fit. Files are deleted when they expire. Batches
are deleted some time after their end, or when their key has many newer ones.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from llamapipe.server.json_bytes import encode_json
from llamapipe.server.store.database import Database, FullError, MissingError
from llamapipe.server.store.runs import IS_DUE

MOST_ATTEMPTS = 5  # attempts in a row without a result, after which a batch fails
MOST_WAITING = 100  # batches of one owner that have not ended
MOST_KEPT = 10_000  # batches of one owner that have ended; their rows do not count as space
_PART_BYTES = 2**18
_READ_BYTES = 2**22  # bytes of parts that are read at once
_ROW_BYTES = 256  # bytes that count for a file in addition to its contents
_AGE_S = 60.0  # between two looks for what has expired
_DAY_S = 86_400
ACTIVE = ("validating", "in_progress", "cancelling")
_ACTIVE = ", ".join(f"'{status}'" for status in ACTIVE)
_SET_LATER = ("model", "errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at",
              "failed_at", "expired_at", "cancelling_at", "cancelled_at")  # fmt: skip
_SCHEMA = """
CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, name TEXT NOT NULL, n_bytes INTEGER NOT NULL DEFAULT 0, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, is_ready INTEGER NOT NULL);
CREATE TABLE parts (file INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (file, number));
CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    input INTEGER NOT NULL, output INTEGER, errors INTEGER, endpoint TEXT NOT NULL, status TEXT NOT NULL,
    expires_at INTEGER NOT NULL, ended_at INTEGER, worker TEXT, not_before INTEGER NOT NULL DEFAULT 0,
    n_attempts INTEGER NOT NULL DEFAULT 0, n_total INTEGER NOT NULL DEFAULT 0, n_completed INTEGER NOT NULL DEFAULT 0,
    n_failed INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL);
CREATE INDEX files_by_owner ON files (owner, number);
CREATE INDEX files_by_end ON files (expires_at);
CREATE INDEX batches_by_owner ON batches (owner, number);
CREATE INDEX batches_by_status ON batches (status);
CREATE TRIGGER file_deleted AFTER DELETE ON files BEGIN DELETE FROM parts WHERE file = OLD.number; END;
"""


class InUseError(Exception):
    """The file is still the input of a batch that has not ended."""


class LostError(Exception):
    """The batch no longer belongs to this worker."""


class Claim(NamedTuple):
    """A batch to compute.

    ``input``: the number of its file. ``n_attempts``: the attempts since its last result, including this one.
    """

    number: int
    id: str
    owner: str
    endpoint: str
    status: str
    input: int
    expires_at: int
    n_attempts: int


class Place(NamedTuple):
    """The worker that has a batch. ``is_due``: its next attempt need not wait any longer."""

    number: int
    id: str
    worker: str | None
    status: str
    is_due: bool


class Result(NamedTuple):
    """The result of a batch's request: a line of the batch's output or errors."""

    number: int
    is_error: bool
    line: bytes


class Files(Database):
    """Files and batches; see ``Database``. Pass methods with a connection to ``read``, the others to ``write``.

    ``most_bytes``: the maximum size of all files together; each of ``n_owners`` has an equal share. ``days``: the
    lifetime of files that set none, and of batches after their end.
    """

    schema = _SCHEMA
    application = 0x6C6C7066
    version = 1

    def __init__(self, path: Path, most_bytes: int, n_owners: int, days: int) -> None:
        self.share_bytes = most_bytes // max(n_owners, 1)
        self._lifetime_s = days * _DAY_S
        self._aged_at = -_AGE_S
        super().__init__(path)

    # ---- files
    def add_file(
        self, owner: str, name: str, purpose: str, body: bytes, lifetime_s: int | None
    ) -> dict[str, Any]:
        """Store a new file. Raises FullError."""
        if len(body) + _ROW_BYTES > self.share_bytes:
            raise FullError(
                f"the file has {len(body)} bytes, and all of yours together may have {self.share_bytes} "
                "(--files-bytes, divided by the keys)",
                is_too_large=True,
            )
        self._check_room(owner, len(body) + _ROW_BYTES)
        number = self._new_file(owner, name, purpose, lifetime_s, is_ready=True)
        parts = [body[i : i + _PART_BYTES] for i in range(0, len(body), _PART_BYTES)]
        self.writer.executemany(
            "INSERT INTO parts (file, number, body) VALUES (?, ?, ?)",
            [(number, i, part) for i, part in enumerate(parts)],
        )
        self.writer.execute("UPDATE files SET n_bytes = ? WHERE number = ?", (len(body), number))
        return _file(self._row(self.writer, owner, number=number))

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file permanently. Raises MissingError, InUseError."""
        number = self._row(self.writer, owner, file_id)["number"]
        used = f"SELECT 1 FROM batches WHERE input = ? AND status IN ({_ACTIVE})"
        if self.writer.execute(used, (number,)).fetchone() is not None:
            raise InUseError(file_id)
        self.writer.execute("DELETE FROM files WHERE number = ?", (number,))
        self._checkpoint_is_due = True

    def file(self, owner: str, file_id: str, connection: sqlite3.Connection) -> dict[str, Any]:
        """Return a file, in the form of the API. Raises MissingError."""
        return _file(self._row(connection, owner, file_id))

    def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, is_ascending: bool,
        connection: sqlite3.Connection,
    ) -> tuple[list[dict[str, Any]], bool]:  # fmt: skip
        """Return at most ``limit`` files of an owner, and whether there are more. Raises MissingError."""
        start = None if after is None else self._row(connection, owner, after)["number"]
        where = "is_ready AND expires_at > :now AND (:purpose IS NULL OR purpose = :purpose)"
        values = {"now": int(time.time()), "purpose": purpose}
        rows = _page(connection, "files", where, values, owner, start, limit, is_ascending)
        return [_file(row) for row in rows[:limit]], len(rows) > limit

    def content(
        self, owner: str, file_id: str, after: int, connection: sqlite3.Connection
    ) -> list[tuple[int, bytes]]:
        """Return the next parts of a file after number ``after``, none at its end. Raises MissingError."""
        return self.parts(self._row(connection, owner, file_id)["number"], after, connection)

    def parts(self, number: int, after: int, connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
        """Return parts like ``content``, for a file given by its number."""
        parts: list[tuple[int, bytes]] = []
        n_bytes = 0
        for part, body in connection.execute(
            "SELECT number, body FROM parts WHERE file = ? AND number > ? ORDER BY number", (number, after)
        ):
            parts.append((part, body))
            n_bytes += len(body)
            if n_bytes >= _READ_BYTES:
                break
        return parts

    def lines(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the non-blank lines of a file, with their numbers from 0. Call it in a thread. Raises StoreError."""
        rest, n, after = b"", 0, -1
        while parts := self.read(self.parts, number, after):
            text = rest + b"".join(body for _, body in parts)
            if after < 0:
                text = text.removeprefix(BOM_UTF8)  # editors on Windows write it
            after = parts[-1][0]
            *lines, rest = text.split(b"\n")
            for line in lines:
                if line.strip():
                    yield n, line
                n += 1
        if rest.strip():
            yield n, rest

    # ---- batches
    def add_batch(
        self, owner: str, input_id: str, endpoint: str, window: str, window_s: int, metadata: Mapping[str, str],
        results_s: int | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Store a new batch. ``results_s``: the lifetime of its results. Raises MissingError, FullError."""
        row = self._row(self.writer, owner, input_id)
        waiting = f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({_ACTIVE})"
        if (n := self.writer.execute(waiting, (owner,)).fetchone()[0]) >= MOST_WAITING:
            raise FullError(f"{n} batches have not ended, the limit", fits_later=True)
        ended = f"owner = :owner AND status NOT IN ({_ACTIVE})"
        self.writer.execute(
            f"DELETE FROM batches WHERE {ended} AND number <= "
            f"(SELECT number FROM batches WHERE {ended} ORDER BY number DESC LIMIT 1 OFFSET :most)",
            {"owner": owner, "most": MOST_KEPT},
        )
        now = int(time.time())
        body = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": input_id,
            "completion_window": window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + window_s,
            "metadata": dict(metadata),
            **dict.fromkeys(_SET_LATER),
        }
        output, errors = (
            self._new_file(owner, f"{body['id']}_{kind}.jsonl", "batch_output", results_s, is_ready=False)
            for kind in ("output", "errors")
        )
        self.writer.execute(
            "INSERT INTO batches (id, owner, input, output, errors, endpoint, status, expires_at, body) "
            "VALUES (?, ?, ?, ?, ?, ?, 'validating', ?, ?)",
            (body["id"], owner, row["number"], output, errors, endpoint, now + window_s, encode_json(body)),
        )
        return self.batch(owner, str(body["id"]), self.writer)

    def cancel_batch(self, owner: str, batch_id: str) -> dict[str, Any]:
        """Begin to cancel a batch, unless it has ended; return the batch. Raises MissingError."""
        row = self._batch(self.writer, owner, batch_id)
        if row["status"] in ("validating", "in_progress"):
            self._set(row, "cancelling")
        return self.batch(owner, batch_id, self.writer)

    def batch(self, owner: str, batch_id: str, connection: sqlite3.Connection) -> dict[str, Any]:
        """Return a batch, in the form of the API. Raises MissingError."""
        return _batch_object(self._batch(connection, owner, batch_id))

    def batches(
        self, owner: str, after: str | None, limit: int, connection: sqlite3.Connection
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the newest ``limit`` batches of an owner, and whether there are more. Raises MissingError."""
        start = None if after is None else self._batch(connection, owner, after)["number"]
        rows = _page(connection, "batches", "1", {}, owner, start, limit, False)
        return [_batch_object(row) for row in rows[:limit]], len(rows) > limit

    # ---- for the processes that compute
    def look(self, connection: sqlite3.Connection) -> list[Place]:
        """Return the place of each batch that has not ended."""
        rows = connection.execute(
            f"SELECT number, id, worker, status, {IS_DUE} FROM batches WHERE status IN ({_ACTIVE})",
            {"now": int(time.time())},
        )
        return [Place(number, name, worker, status, bool(due)) for number, name, worker, status, due in rows]

    def claim(self, worker: str, dead: Sequence[str], n: int) -> list[Claim]:
        """Claim at most ``n`` batches, fairly among owners. ``dead``: workers that have ended."""
        writer = self.writer
        writer.executemany("UPDATE batches SET worker = NULL WHERE worker = ?", [(name,) for name in dead])
        claims: list[Claim] = []
        while len(claims) < n:
            row = writer.execute(
                "SELECT number, id, owner, endpoint, status, input, expires_at, n_attempts + 1 FROM batches b "
                f"WHERE status IN ({_ACTIVE}) AND worker IS NULL AND {IS_DUE} ORDER BY "
                f"(SELECT count(*) FROM batches o WHERE o.owner = b.owner AND o.worker IS NOT NULL), number LIMIT 1",
                {"now": int(time.time())},
            ).fetchone()
            if row is None:
                break
            claim = Claim(*row)
            writer.execute(
                "UPDATE batches SET worker = ?, n_attempts = n_attempts + 1 WHERE number = ?",
                (worker, claim.number),
            )
            claims.append(claim)
        return claims

    def begin(self, worker: str, number: int, n_total: int) -> None:
        """Record that the ``n_total`` requests of a batch are valid. Raises LostError."""
        row = self._mine(worker, number, "validating")
        self.writer.execute("UPDATE batches SET n_total = ? WHERE number = ?", (n_total, number))
        self._set(row, "in_progress")

    def done_lines(self, number: int, connection: sqlite3.Connection) -> set[int]:
        """Return the numbers of a batch's lines that have results."""
        rows = connection.execute(
            "SELECT p.number FROM batches b JOIN parts p ON p.file IN (b.output, b.errors) WHERE b.number = ?",
            (number,),
        )
        return {line for (line,) in rows}

    def add_results(self, worker: str, number: int, results: Sequence[Result]) -> None:
        """Store results of a batch's requests. Raises LostError, FullError."""
        row = self._mine(worker, number, "in_progress")
        there = "SELECT 1 FROM parts WHERE file IN (?, ?) AND number = ?"
        files = row["output"], row["errors"]
        # A result is already stored if its request was cancelled during the transaction.
        results = [
            entry for entry in results if not self.writer.execute(there, (*files, entry.number)).fetchone()
        ]
        self._check_room(row["owner"], sum(len(result.line) for result in results))
        for result in results:
            file = row["errors"] if result.is_error else row["output"]
            self.writer.execute(
                "INSERT INTO parts (file, number, body) VALUES (?, ?, ?)", (file, result.number, result.line)
            )
            self.writer.execute(
                "UPDATE files SET n_bytes = n_bytes + ? WHERE number = ?", (len(result.line), file)
            )
        n_failed = sum(result.is_error for result in results)
        self.writer.execute(
            "UPDATE batches SET n_completed = n_completed + ?, n_failed = n_failed + ?, n_attempts = 0 "
            "WHERE number = ?",
            (len(results) - n_failed, n_failed, number),
        )

    def end(self, worker: str, number: int, status: str, errors: Sequence[Mapping[str, Any]] = ()) -> None:
        """End a batch with a status, and make its results files of its owner. Raises LostError."""
        row = self._mine(worker, number)
        now = int(time.time())
        changes: dict[str, Any] = {"finalizing_at": now}
        if errors:
            changes["errors"] = {"object": "list", "data": list(errors)}
        for field, file in (("output_file_id", row["output"]), ("error_file_id", row["errors"])):
            self.writer.execute("DELETE FROM files WHERE number = ? AND NOT n_bytes", (file,))
            self.writer.execute(
                "UPDATE files SET is_ready = 1, created_at = ?, expires_at = expires_at + ? - created_at "
                "WHERE number = ?",
                (now, now, file),
            )
            row_of_file = self.writer.execute("SELECT id FROM files WHERE number = ?", (file,)).fetchone()
            changes[field] = None if row_of_file is None else row_of_file[0]
        self.writer.execute("UPDATE batches SET ended_at = ?, worker = NULL WHERE number = ?", (now, number))
        self._set(row, status, changes)

    def release(self, worker: str, number: int | None, after_s: int = 0) -> None:
        """Give back a batch, or all of this worker; the attempt does not count. ``after_s``: until the next attempt."""
        self.writer.execute(
            "UPDATE batches SET worker = NULL, not_before = ?, n_attempts = max(n_attempts - 1, 0) "
            "WHERE worker = ? AND number = coalesce(?, number)",
            (int(time.time()) + after_s, worker, number),
        )

    # ---- inside
    def _tidy(self, at_start: bool = False) -> None:
        now = time.monotonic()
        if now - self._aged_at < _AGE_S or self._clock_has_jumped():
            return
        self._aged_at = now
        at: dict[str, int] = {"now": int(time.time())}
        # Files and batches from a time when the clock was ahead would otherwise be kept until that time.
        self.writer.execute(
            "UPDATE files SET expires_at = expires_at - created_at + :now, created_at = :now WHERE created_at > :now",
            at,
        )
        self.writer.execute("UPDATE batches SET ended_at = :now WHERE ended_at > :now", at)
        used = f"SELECT input FROM batches WHERE status IN ({_ACTIVE})"
        gone = self.writer.execute(
            f"DELETE FROM files WHERE is_ready AND expires_at < :now AND number NOT IN ({used})", at
        ).rowcount
        self.writer.execute("DELETE FROM batches WHERE ended_at < ?", (at["now"] - self._lifetime_s,))
        self._checkpoint_is_due |= gone > 0

    def _check_room(self, owner: str, n_bytes: int) -> None:
        used = self.writer.execute(
            f"SELECT coalesce(sum(n_bytes + {_ROW_BYTES}), 0) FROM files WHERE owner = ?", (owner,)
        ).fetchone()[0]
        if used + n_bytes > self.share_bytes:
            raise FullError(
                f"there are {used} bytes in your files, and {n_bytes} more would be over {self.share_bytes} "
                "(--files-bytes, divided by the keys): delete some"
            )

    def _new_file(self, owner: str, name: str, purpose: str, lifetime_s: int | None, is_ready: bool) -> int:
        now = int(time.time())
        cursor = self.writer.execute(
            "INSERT INTO files (id, owner, purpose, name, created_at, expires_at, is_ready) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                f"file-{uuid.uuid4().hex}",
                owner,
                purpose,
                name,
                now,
                now + (lifetime_s or self._lifetime_s),
                is_ready,
            ),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _row(
        self,
        connection: sqlite3.Connection,
        owner: str,
        file_id: str | None = None,
        number: int | None = None,
    ) -> sqlite3.Row:
        rows = _rows(
            connection,
            "SELECT * FROM files WHERE (id = ? OR number = ?) AND owner = ? AND is_ready AND expires_at > ?",
            (file_id, number, owner, int(time.time())),
        )
        if not rows:
            raise MissingError("file", str(file_id))
        return rows[0]

    def _batch(self, connection: sqlite3.Connection, owner: str, batch_id: str) -> sqlite3.Row:
        rows = _rows(connection, "SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner))
        if not rows:
            raise MissingError("batch", batch_id)
        return rows[0]

    def _mine(self, worker: str, number: int, status: str | None = None) -> sqlite3.Row:
        rows = _rows(
            self.writer,
            f"SELECT * FROM batches WHERE number = ? AND worker = ? AND status IN ({_ACTIVE}) "
            "AND status = coalesce(?, status)",
            (number, worker, status),
        )
        if not rows:
            raise LostError
        return rows[0]

    def _set(self, row: sqlite3.Row, status: str, changes: Mapping[str, Any] | None = None) -> None:
        body = {
            **json.loads(row["body"]),
            **(changes or {}),
            "status": status,
            f"{status}_at": int(time.time()),
        }
        self.writer.execute(
            "UPDATE batches SET status = ?, body = ? WHERE number = ?",
            (status, encode_json(body), row["number"]),
        )


def _rows(connection: sqlite3.Connection, statement: str, values: Any) -> list[sqlite3.Row]:
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(statement, values).fetchall()


def _page(
    connection: sqlite3.Connection, table: str, where: str, values: Mapping[str, Any], owner: str, start: int | None,
    limit: int, is_ascending: bool,
) -> list[sqlite3.Row]:  # fmt: skip
    """Return the rows of an owner that follow number ``start``: at most one more than ``limit``."""
    if start is not None:
        where += f" AND number {'>' if is_ascending else '<'} :start"
    return _rows(
        connection,
        f"SELECT * FROM {table} WHERE owner = :owner AND {where} ORDER BY number "
        f"{'ASC' if is_ascending else 'DESC'} LIMIT :limit",
        {**values, "owner": owner, "start": start, "limit": limit + 1},
    )


def _file(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["n_bytes"],
        "created_at": row["created_at"],
        "expires_at": row["expires_at"],
        "filename": row["name"],
        "purpose": row["purpose"],
        "status": "processed",
        "status_details": None,
    }


def _batch_object(row: sqlite3.Row) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(row["body"])
    counts = {"total": row["n_total"], "completed": row["n_completed"], "failed": row["n_failed"]}
    return {**body, "request_counts": counts}

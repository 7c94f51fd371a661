"""The part of the store about background answers: their requests, the processes that compute them, and stream events.

Open it to change which answers wait, which process takes an answer, or how often it is tried. ``_background.py``
computes them.

A *run* is a row for an answer, which is stored from the beginning. A process that takes a run writes its name in the
row; when that process ends, any other may take the run. So only one process computes each run, and none is lost. A
process can change a run only while its name is in the row. It changes nothing if it was mistaken for dead or the run
was cancelled. The answer and the end of its run are written in one transaction.

The events of a stream are stored, with numbers that are never reused: a new attempt continues the numbering.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from llamapipe.server.store.answers import NewAnswer, Store
from llamapipe.server.store.database import FullError

MOST_ATTEMPTS = 5
MOST_LATER_S = 30  # the longest wait for the next attempt
_OF_OWNER, _OF_ALL = 16, 4  # of the store: 1/16 for the bodies of an owner's runs, 1/4 for all bodies
IS_DUE = f"(not_before NOT BETWEEN :now + 1 AND :now + {MOST_LATER_S})"
_LAST_EVENT = "SELECT max(number) FROM events WHERE answer = ?"
_MOST_EVENTS = 1000  # events that are read at once


class Run(NamedTuple):
    """An answer to compute.

    ``n_next``: the number of its next event. ``n_attempts``: the attempts so far, including this one.
    """

    id: str
    owner: str
    is_stream: bool
    n_attempts: int
    n_next: int
    body: bytes


class Place(NamedTuple):
    """The worker that has a run. ``is_due``: its next attempt need not wait any longer.

    A run whose wait exceeds the longest possible wait is also due, because the clock was set back.
    """

    id: str
    worker: str | None
    is_due: bool


class Told(NamedTuple):
    """The part of a stream after an event. ``final``: the answer, if it has ended and no further events follow."""

    events: list[tuple[int, bytes]]
    final: dict[str, Any] | None
    n_final: int


class Runs:
    """The runs of a store. Pass methods with a connection to ``Store.read``, the others to ``Store.write``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writer = store.writer

    def __repr__(self) -> str:
        return f"<Runs of {self._store}>"

    # ---- for clients
    def add(
        self, owner: str, answer: NewAnswer, body: bytes, events: Sequence[bytes], most: int, most_bytes: int
    ) -> None:
        """Store an answer to be computed later from a request's ``body``.

        ``events``: the first events of its stream, if any. ``most``: the maximum number of runs of one owner.
        ``most_bytes``: the store's limit. Raises FullError, StoreError, MissingError.
        """
        most_of_owner, most_of_all = most_bytes // _OF_OWNER, most_bytes // _OF_ALL
        if len(body) > most_of_owner:
            raise FullError(
                f"a request in the background may have {most_of_owner} bytes (a sixteenth of --store-bytes), and this "
                f"one has {len(body)}: ask for it without background",
                is_too_large=True,
            )
        counted = "SELECT count(*), coalesce(sum(length(body)), 0) FROM runs WHERE NOT is_done"
        n, n_bytes = self._writer.execute(f"{counted} AND owner = ?", (owner,)).fetchone()
        if n >= most:
            raise FullError(
                f"{n} answers are computed in the background or wait, the limit (--max-background)",
                fits_later=True,
            )
        n_all = self._writer.execute(counted).fetchone()[1]
        if n_bytes + len(body) > most_of_owner or n_all + len(body) > most_of_all:
            raise FullError(
                f"the {n} answers that wait take too much of the store (--store-bytes)", fits_later=True
            )
        thread = self._store.add_answer(owner, answer)
        self._store.will_write(len(body))
        self._writer.execute(
            "INSERT INTO runs (id, thread, owner, is_stream, body) VALUES (?, ?, ?, ?, ?)",
            (answer.id, thread, owner, bool(events), body),
        )
        self._insert(answer.id, thread, 0, events)

    def cancel(self, owner: str, answer_id: str) -> tuple[dict[str, Any], bool]:
        """Cancel a run. Returns the answer, and whether it is a background answer. Raises MissingError."""
        body = self._store.answer(owner, answer_id, self._writer)
        ended = self._writer.execute("DELETE FROM runs WHERE id = ? AND NOT is_done", (answer_id,)).rowcount
        if ended:
            body["status"] = "cancelled"
            self._store.change_answer(answer_id, {"status": "cancelled"})
        return body, bool(body.get("background"))

    def read_events(
        self, owner: str, answer_id: str, after: int, connection: sqlite3.Connection
    ) -> Told | None:
        """Return the part of a stream after event ``after``; None if the answer has no stream. Raises MissingError."""
        answer = self._store.answer(owner, answer_id, connection)
        (last,) = connection.execute(_LAST_EVENT, (answer_id,)).fetchone()
        if last is None:
            return None
        events = connection.execute(
            "SELECT number, body FROM events WHERE answer = ? AND number > ? ORDER BY number LIMIT ?",
            (answer_id, after, _MOST_EVENTS),
        ).fetchall()
        runs = connection.execute("SELECT 1 FROM runs WHERE id = ?", (answer_id,)).fetchone() is not None
        is_last = not runs and (events[-1][0] if events else after) >= last
        return Told(events, answer if is_last else None, last + 1)

    def list_newest(self, owner: str, limit: int, connection: sqlite3.Connection) -> list[dict[str, Any]]:
        """Return the newest ``limit`` runs of an owner that have not ended, the newest first.

        ``n_events`` in a run: the number of events that its stream has sent.
        """
        rows = connection.execute(
            "SELECT r.id, r.worker, r.n_attempts, a.body, "
            "(SELECT count(*) FROM events e WHERE e.answer = r.id) FROM runs r JOIN answers a USING (id) "
            "WHERE r.owner = ? AND NOT r.is_done ORDER BY r.number DESC LIMIT ?",
            (owner, limit),
        )
        runs = []
        for answer_id, worker, n_attempts, body, n_events in rows:
            told = msgspec.json.decode(body)
            runs.append(
                {
                    "id": answer_id,
                    "status": "queued" if worker is None else "in_progress",
                    "model": told.get("model"),
                    "created_at": told.get("created_at"),
                    "n_attempts": n_attempts,
                    "n_events": n_events,
                }
            )
        return runs

    # ---- for the processes that compute
    def look(self, connection: sqlite3.Connection) -> list[Place]:
        """Return the place of each run."""
        rows = connection.execute(f"SELECT id, worker, {IS_DUE} FROM runs", {"now": int(time.time())})
        return [Place(answer_id, worker, bool(is_due)) for answer_id, worker, is_due in rows]

    def claim(self, worker: str, dead: Sequence[str], n: int) -> list[Run]:
        """Claim at most ``n`` runs, fairly among owners. ``dead``: workers that have ended."""
        writer = self._writer
        writer.executemany("UPDATE runs SET worker = NULL WHERE worker = ?", [(name,) for name in dead])
        writer.execute("DELETE FROM runs WHERE is_done AND worker IS NULL")
        runs: list[Run] = []
        while len(runs) < n:
            row = writer.execute(
                "SELECT id, owner, is_stream, n_attempts, n_first, body FROM runs r "
                f"WHERE worker IS NULL AND {IS_DUE} ORDER BY "
                "(SELECT count(*) FROM runs b WHERE b.owner = r.owner AND b.worker IS NOT NULL), number LIMIT 1",
                {"now": int(time.time())},
            ).fetchone()
            if row is None:
                break
            answer_id, owner, is_stream, n_attempts, n_first, body = row
            if n_attempts >= MOST_ATTEMPTS:
                message = f"the server ended {n_attempts} times while it computed this answer"
                self._end(answer_id, {"code": "server_error", "message": message})
                continue
            (last,) = writer.execute(_LAST_EVENT, (answer_id,)).fetchone()
            n_next = max(n_first, 0 if last is None else last + 1)
            writer.execute(
                "UPDATE runs SET worker = ?, n_attempts = n_attempts + 1, n_first = ? WHERE id = ?",
                (worker, n_next, answer_id),
            )
            runs.append(Run(answer_id, owner, bool(is_stream), n_attempts + 1, n_next, body))
        return runs

    def add_events(self, worker: str, answer_id: str, first: int, events: Sequence[bytes]) -> bool:
        """Store events of a stream, numbered from ``first``. Returns False if the run is not this worker's."""
        row = self._writer.execute(
            "SELECT thread, n_first FROM runs WHERE id = ? AND worker = ?", (answer_id, worker)
        ).fetchone()
        if row is not None:
            # A new attempt drops the events of an earlier one, except the first two, which announce the answer.
            if first == row[1]:
                self._writer.execute("DELETE FROM events WHERE answer = ? AND number > 1", (answer_id,))
            self._insert(answer_id, row[0], first, events)
        return row is not None

    def release(self, worker: str, answer_id: str | None, after_s: int, counts: bool) -> None:
        """Give back a run, or all of this worker. ``after_s``: until the next attempt. ``counts``: this one counts."""
        self._writer.execute(
            "UPDATE runs SET worker = NULL, not_before = ?, n_attempts = n_attempts - ? "
            "WHERE worker = ? AND id = coalesce(?, id)",
            (int(time.time()) + after_s, int(not counts), worker, answer_id),
        )

    def end(self, worker: str, answer_id: str, error: Mapping[str, Any]) -> None:
        """End a run of this worker: as complete if its answer is stored, otherwise as failed with ``error``."""
        row = self._writer.execute(
            "SELECT is_done FROM runs WHERE id = ? AND worker = ?", (answer_id, worker)
        ).fetchone()
        if row is not None and row[0]:
            self._writer.execute("DELETE FROM runs WHERE id = ?", (answer_id,))
        elif row is not None:
            self._end(answer_id, error)

    def _end(self, answer_id: str, error: Mapping[str, Any]) -> None:
        self._store.change_answer(
            answer_id, {"status": "failed", "error": dict(error), "completed_at": int(time.time())}
        )
        self._writer.execute("DELETE FROM runs WHERE id = ?", (answer_id,))

    def _insert(self, answer_id: str, thread: int, first: int, events: Sequence[bytes]) -> None:
        self._store.will_write(sum(map(len, events)))
        self._writer.executemany(
            "INSERT INTO events (answer, number, thread, body) VALUES (?, ?, ?, ?)",
            [(answer_id, number, thread, event) for number, event in enumerate(events, first)],
        )

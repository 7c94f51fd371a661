"""Computes answers in the background, for ``background: true`` in ``/v1/responses``.

Open it to change when answers are computed, how many at once, and what their streams send.

Every process that clients reach computes answers, by requests that it makes to itself. The front process of several
models forwards these requests to the models' processes. ``_runs.py`` ensures that only one process computes each
answer. A process that shuts down gives its runs back. When a process dies, the system releases the lock on its file,
so the others see immediately that it is gone.

A run that fails because the server is busy, or because the process of a model ended, is tried again later. Any other
error ends the run and is stored in the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from llamapipe.server._batches import Batches
from llamapipe.server._inside import BUSY, Inside, post
from llamapipe.server.endpoint import SUBMITTED, EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError, shutting_down
from llamapipe.server.gate import Gate
from llamapipe.server.json_bytes import typed_event
from llamapipe.server.requests.kept import read, store_of, write
from llamapipe.server.store.answers import Store
from llamapipe.server.store.database import StoreError
from llamapipe.server.store.presence import Presence
from llamapipe.server.store.runs import MOST_ATTEMPTS, MOST_LATER_S, Place, Run, Runs

_POLL_S = 1.0  # between two looks for free and cancelled runs
_FOLLOW_S = 0.1  # between two looks for new events of a stream
_AT_ONCE = 8  # the runs that a process without an engine computes at once
_LATER_S = 2  # before the next attempt, if the server was busy
_FRAME = b"\n\n"
_ENDS = ("response.completed", "response.incomplete", "response.failed")  # read from the stored answer
_log = logging.getLogger("llamapipe.server")


class Background:
    """Computes the answers that wait in the store, from ``start`` to ``stop``; see ``LaterWork``.

    ``application``: the application of this process.
    """

    def __init__(self, gate: Gate, store: Store, application: ASGIApp) -> None:
        self.runs = Runs(store)
        self._gate = gate
        self._store = store
        self._application = application
        self._presence = Presence(store.path)
        self._batches = None if gate.files is None else Batches(gate, gate.files, application, self._presence)
        self._main: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._is_stopping = False

    def __repr__(self) -> str:
        return f"<Background n_running={len(self._tasks)}>"

    @property
    def worker(self) -> str:
        """The name of this process, as written in the rows of its runs."""
        return self._presence.name

    def start(self) -> None:
        if self._main is None and not self._is_stopping and not self._gate.is_behind_front:
            self._main = asyncio.ensure_future(self._compute())

    async def stop(self) -> None:
        self._is_stopping = True
        self.tell()
        if self._main is None:
            return
        for task in (self._main, *self._tasks.values()):
            task.cancel()
        await asyncio.wait([self._main, *self._tasks.values()])
        if self._batches is not None:
            await self._batches.stop()
        if self._presence.name:
            with suppress(StoreError):  # otherwise, others see that this process has ended
                await self._store.write(self.runs.release, self._presence.name, None, 0, False)
            self._presence.sign_out()

    def wake(self) -> None:
        self._wanted.set()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self) -> bool:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _FOLLOW_S)
        return not (self._is_stopping or self._gate.draining)

    # ---- who computes what
    async def _compute(self) -> None:
        while True:
            self._wanted.clear()
            try:
                if not self._presence.name:
                    await asyncio.to_thread(self._presence.sign_in)
                await self._look()
                if self._batches is not None:
                    await self._batches.look()
            except StoreError as e:
                self._store.tell(e)
            except OSError as e:
                self._store.tell(StoreError(f"nothing is computed in the background: {e}"))
            except Exception as e:  # a defect; the waiting runs are kept
                _log.error("nothing is computed in the background", exc_info=e)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), _POLL_S)

    async def _look(self) -> None:
        """Claim runs that are free, and cancel those that clients have cancelled."""
        places, dead = await asyncio.to_thread(self._places)
        own_ids = {place.id for place in places if place.worker == self.worker}
        for answer_id, task in self._tasks.items():
            if answer_id not in own_ids:
                task.cancel()
        for answer_id in own_ids - self._tasks.keys():  # those could not be given back before
            await self._store.write(self.runs.release, self.worker, answer_id, 0, True)
        n_free = self._n_at_once() - len(self._tasks)
        waits = any(place.is_due and (place.worker is None or place.worker in dead) for place in places)
        if n_free <= 0 or not waits:
            return
        for run in await self._store.write(self.runs.claim, self.worker, dead, n_free):
            task = self._tasks[run.id] = asyncio.ensure_future(self._answer(run))
            task.add_done_callback(partial(self._note_end, run.id))

    def _note_end(self, answer_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(answer_id, None)
        self.tell()
        self.wake()

    def _places(self) -> tuple[list[Place], list[str]]:
        """Return the places of all runs, and the workers that have ended. Call it in a thread."""
        places = self._store.read(self.runs.look)
        return places, self._presence.find_ended(place.worker for place in places)

    def _n_at_once(self) -> int:
        n_slots = self._gate.n_slots
        return _AT_ONCE if n_slots is None else max(n_slots // 2, 1)

    # ---- one answer
    async def _answer(self, run: Run) -> None:
        try:
            error, counts = await self._outcome(run)
        except StoreError as e:
            self._store.tell(e)
            error, counts = {"code": "store_failed", "message": str(e)}, True
        except Exception as e:
            _log.error("%s failed", run.id, exc_info=e)
            error, counts = (
                {"code": "server_error", "message": f"the server failed: {type(e).__name__}"},
                True,
            )
        try:
            if error is None or counts is None or (counts and run.n_attempts >= MOST_ATTEMPTS):
                await self._store.write(self.runs.end, self.worker, run.id, error or _NOT_STORED)
            else:
                after_s = min(_LATER_S**run.n_attempts, MOST_LATER_S) if counts else _LATER_S
                await self._store.write(self.runs.release, self.worker, run.id, after_s, counts)
        except StoreError as e:  # `_look` gives the run back later
            self._store.tell(e)

    async def _outcome(self, run: Run) -> tuple[dict[str, Any] | None, bool | None]:
        """Compute a run; return its error, if it has one, and whether the attempt counts.

        The second value is None if there should be no further attempt.
        """
        try:
            key = self._gate.key_of(run.owner)
        except LookupError as e:
            return {"code": "invalid_api_key", "message": str(e)}, None
        told = _Events(self, run) if run.is_stream else _Whole()
        inside = Inside(key, run.id.removeprefix("resp_"), self.worker)
        try:
            answer = await post(self._application, "/v1/responses", run.body, told.take, inside)
        finally:
            await told.finish()
        error = told.error(answer.status)
        if error is None and answer.status == 200 and answer.is_whole:
            return None, None
        code = None if error is None else error.get("code")
        if self._gate.draining or code in BUSY or answer.status == 429:
            return error or _LOST, False
        if error is None or code == "model_ended" or answer.status in (500, 503, 507):
            return error or _LOST, True
        return error, None


_LOST = {"code": "server_error", "message": "the process that computed this answer ended"}
_NOT_STORED = {"code": "server_error", "message": "the answer was not stored"}


class _Whole:
    """Takes the parts of an answer that is not a stream, and reads only its error."""

    def __init__(self) -> None:
        self._body = b""

    async def take(self, part: bytes) -> None:
        self._body += part

    async def finish(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def error(self, status: int) -> dict[str, Any] | None:
        """Return the error in an answer with HTTP status ``status``; None if it has none."""
        if status == 200:
            return None
        try:
            error = msgspec.json.decode(self._body)["error"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return None
        return {"code": error.get("code") or "server_error", "message": error.get("message")}


class _Events(_Whole):
    """Stores the events of a stream as they arrive. Events that arrive during a transaction go into the next one."""

    def __init__(self, background: Background, run: Run) -> None:
        super().__init__()
        self._background = background
        self._run = run
        self._n_next = self._n_stored = run.n_next
        self._waiting: list[bytes] = []
        self._storing: asyncio.Task[None] | None = None
        self._error: dict[str, Any] | None = None
        self._has_begun = False

    async def take(self, part: bytes) -> None:
        if self._storing is not None and self._storing.done():
            self._storing.result()  # raises
        self._body += part
        *frames, self._body = self._body.split(_FRAME)
        for frame in frames:
            data = frame.partition(b"data: ")[2]
            if data:  # otherwise the frame is a comment
                self._add(msgspec.json.decode(data))
        if self._waiting and self._storing is None:
            self._storing = asyncio.ensure_future(self._store())

    def _add(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind is None or "error" in event:
            error = event.get("error") or {}
            self._error = {"code": error.get("code") or "server_error", "message": error.get("message")}
        elif kind in _ENDS or (kind == "response.created" and self._run.n_attempts == 1):
            return
        else:
            self._waiting.append(typed_event({**event, "sequence_number": self._n_next}))
            self._n_next += 1

    async def _store(self) -> None:
        background, run = self._background, self._run
        while self._waiting:
            events, self._waiting = self._waiting, []
            await background._store.write(
                background.runs.add_events, background.worker, run.id, self._n_stored, events
            )
            self._n_stored += len(events)
            background.tell()
        self._storing = None

    async def finish(self) -> None:
        """Wait until all events are stored. Raises StoreError."""
        if self._storing is not None:
            await self._storing

    def error(self, status: int) -> dict[str, Any] | None:
        return self._error if status == 200 else super().error(status)


# ---- what clients ask for
def check(exchange: Exchange, stores: bool | None) -> None:
    """Raise ApiError 400 for a background request that this server cannot store."""
    if exchange.gate.store is None:
        raise ApiError(
            400,
            "background needs a server that stores answers (llamapipe serve --store FILE); leave it out, and wait for "
            "the answer",
            "background",
        )
    if stores is False:
        raise ApiError(400, "background needs store: the answer is fetched later", "store")


async def later(exchange: Exchange, answer_id: str, response: Mapping[str, Any], is_stream: bool) -> Response:
    """Return the answer to a request whose run is stored: the response so far, or its stream."""
    wake(exchange)
    if is_stream:
        return EventStream(exchange, follow(exchange, answer_id, -1))
    return JsonResponse(response)


def wake(exchange: Exchange) -> None:
    """Wake the task that computes or cancels stored runs."""
    background = exchange.gate.background
    if background is not None:
        background.start()
        background.wake()


async def cancel(exchange: Exchange) -> Response:
    """``POST /v1/responses/{id}/cancel``: cancels an answer in the background. Does not change one that has ended."""
    answer_id, store = exchange.path_params["id"], store_of(exchange)
    body, is_background = await write(exchange, store, Runs(store).cancel, answer_id)
    if not is_background:
        raise ApiError(400, "only an answer with background: true can be cancelled", "id")
    background = exchange.gate.background
    if background is not None:
        background.tell()
        background.wake()
    return JsonResponse(body)


async def follow(exchange: Exchange, answer_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer's stream that follow event ``after``, until the stream or the server ends."""
    store, background = store_of(exchange), exchange.gate.background
    runs = Runs(store)
    goes_on = True
    while True:
        told = await read(exchange, store, runs.read_events, answer_id, after)
        if told is None:
            raise ApiError(400, "the answer has no stream: it was asked for without stream: true", "stream")
        if after > told.n_final:
            raise ApiError(
                400, f"starting_after is {after}; its events go to {told.n_final}", "starting_after"
            )
        yield SUBMITTED  # there may be no events to send
        for number, event in told.events:
            yield event
            after = number
        if told.final is not None:
            if told.n_final > after and told.final["status"] != "cancelled":
                kind = f"response.{told.final['status']}"
                yield typed_event({"type": kind, "response": told.final, "sequence_number": told.n_final})
            return
        if not goes_on:
            raise shutting_down()
        if not told.events:
            if background is None:
                await asyncio.sleep(_FOLLOW_S)
                goes_on = not exchange.gate.draining
            else:
                goes_on = await background.news()

"""Computes clients' batches: files of requests, each answered as if a client had sent it.

Open it to change the order of requests, how many are computed at once, or what happens to a request that fails.

The server makes each request of a batch to itself, with a lower priority than clients' requests, which go first and
preempt it. A request's result and the counts of its batch are written in one transaction (``_files.py``). So after a
kill, the server recomputes only requests that have no result.

A request that a busy server refuses is tried again. A request that fails five times because its process ended, its
model could not be loaded, or the server failed, gets that error as its result.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
from starlette.types import ASGIApp

from llamapipe._messages import quoted
from llamapipe.server._inside import BUSY, Inside, post
from llamapipe.server.gate import Gate
from llamapipe.server.store.database import FullError, StoreError
from llamapipe.server.store.files import MOST_ATTEMPTS, Claim, Files, LostError, Place, Result
from llamapipe.server.store.presence import Presence
from llamapipe.server.store.runs import MOST_LATER_S

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_REQUESTS = 50_000  # the API's limit
_MOST_ERRORS = 100  # errors that are reported for a file
_MOST_ID = 512  # characters of a custom_id
_BATCHES = 4  # batches that a process computes at once
_AT_ONCE = 8  # requests of a process that has no engine
_PRIORITY = -1
_AGAIN_S = 1.0  # before a request is tried again
_WRITTEN_AT_ONCE = 100  # results that are stored together when a batch expires
_log = logging.getLogger("llamapipe.server")


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Streams(msgspec.Struct):
    """The fields that no request of a batch may set."""

    stream: Any = None
    background: Any = None


_LINES = msgspec.json.Decoder(_Line)
_STREAMS = msgspec.json.Decoder(_Streams)


class Batches:
    """Computes the batches in ``files``. Call ``look`` regularly, on the event loop's thread."""

    def __init__(self, gate: Gate, files: Files, application: ASGIApp, presence: Presence) -> None:
        self._gate = gate
        self._files = files
        self._application = application
        self._presence = presence
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places: asyncio.Semaphore | None = None  # for the requests that run at once

    def __repr__(self) -> str:
        return f"<Batches n_running={len(self._tasks)}>"

    async def look(self) -> None:
        """Claim batches that are free, and stop those that clients have cancelled. Raises StoreError."""
        places, dead = await asyncio.to_thread(self._look)
        going_on = {
            place.id
            for place in places
            if place.worker == self._presence.name and place.status != "cancelling"
        }
        ending = [task for batch_id, task in self._tasks.items() if batch_id not in going_on]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
            await asyncio.sleep(0)  # lets the tasks leave `_tasks`
            places, dead = await asyncio.to_thread(self._look)
        for place in places:  # batches that could not be given back when they failed
            if place.worker == self._presence.name and place.id not in self._tasks:
                await self._files.write(self._files.release, self._presence.name, place.number)
        waits = any(place.is_due and (place.worker is None or place.worker in dead) for place in places)
        n_free = _BATCHES - len(self._tasks)
        if waits and n_free > 0:
            claims = await self._files.write(self._files.claim, self._presence.name, dead, n_free)
            for claim in claims:
                task = self._tasks[claim.id] = asyncio.ensure_future(self._run(claim))
                task.add_done_callback(partial(self._forget, claim.id))

    def _forget(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(batch_id, None)

    def _look(self) -> tuple[list[Place], list[str]]:
        places = self._files.read(self._files.look)
        return places, self._presence.find_ended(place.worker for place in places)

    async def stop(self) -> None:
        """Stop, and leave unfinished batches to the next server or to this server's other processes."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        if self._presence.name:
            with suppress(StoreError):  # otherwise, others see that this process has ended
                await self._files.write(self._files.release, self._presence.name, None)

    # ---- one batch
    async def _run(self, claim: Claim) -> None:
        files, worker = self._files, self._presence.name
        try:
            status, errors = await self._outcome(claim)
            await files.write(files.end, worker, claim.number, status, errors)
        except LostError:  # another process has the batch, or a client cancelled it
            with suppress(StoreError):
                await files.write(files.release, worker, claim.number)
        except asyncio.CancelledError:  # by the client, or because the server ends
            with suppress(StoreError):
                await asyncio.shield(files.write(files.release, worker, claim.number))
            raise
        except StoreError as e:
            files.tell(e)
            with suppress(StoreError):
                await files.write(files.release, worker, claim.number, MOST_LATER_S)
        except Exception as e:
            _log.error("%s failed", claim.id, exc_info=e)
            problem = _problem("server_error", f"the server failed: {type(e).__name__}")
            with suppress(StoreError, LostError):
                await files.write(files.end, worker, claim.number, "failed", [problem])

    async def _outcome(self, claim: Claim) -> tuple[str, Sequence[dict[str, Any]]]:
        """Compute a batch; return its final status and its errors. Raises LostError, StoreError."""
        if claim.status == "cancelling":
            return "cancelled", ()
        if claim.n_attempts > MOST_ATTEMPTS:
            message = f"the server ended {MOST_ATTEMPTS} times while it computed this batch, without a result"
            return "failed", [_problem("server_error", message)]
        try:
            key = self._gate.key_of(claim.owner)
        except LookupError as e:
            return "failed", [_problem("invalid_api_key", str(e))]
        if claim.status == "validating":
            n_total, errors = await asyncio.to_thread(self._check, claim)
            if errors:
                return "failed", errors
            await self._files.write(self._files.begin, self._presence.name, claim.number, n_total)
        try:
            try:
                await asyncio.wait_for(self._compute(claim, key), max(claim.expires_at - time.time(), 0))
            except asyncio.TimeoutError:
                await self._expire(claim)
                return "expired", ()
        except FullError as e:
            return "failed", [_problem("files_full", str(e))]
        return "completed", ()

    def _check(self, claim: Claim) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of requests in a batch's file, and what is wrong with them. Call it in a thread."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        n = 0
        for number, line in self._files.lines(claim.input):
            n += 1
            problem = _problem_of(line, claim.endpoint, seen)
            if problem is not None:
                errors.append({**problem, "line": number + 1})
            if n > MOST_REQUESTS:
                return n, [_problem("too_many_requests", f"the file has more than {MOST_REQUESTS} requests")]
            if len(errors) == _MOST_ERRORS:
                break
        if not n:
            errors.append(_problem("empty_file", "the file has no requests"))
        return n, errors

    async def _remaining(self, claim: Claim) -> AsyncIterator[tuple[int, _Line]]:
        """Yield the requests of a batch that have no result."""
        done = await asyncio.to_thread(self._files.read, self._files.done_lines, claim.number)
        lines = self._files.lines(claim.input)
        while (numbered := await asyncio.to_thread(next, lines, None)) is not None:
            if numbered[0] not in done:
                yield numbered[0], _LINES.decode(numbered[1])

    async def _compute(self, claim: Claim, key: bytes | None) -> None:
        if self._places is None:
            n_slots = self._gate.n_slots
            self._places = asyncio.Semaphore(_AT_ONCE if n_slots is None else n_slots)
        places = self._places
        running: set[asyncio.Task[None]] = set()
        try:
            async for number, line in self._remaining(claim):
                await places.acquire()
                task = asyncio.ensure_future(self._answer(claim, key, number, line))
                task.add_done_callback(lambda _: places.release())
                running.add(task)
                for ended in [task for task in running if task.done()]:
                    running.discard(ended)
                    ended.result()  # raises
            if running:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _answer(self, claim: Claim, key: bytes | None, number: int, line: _Line) -> None:
        name = f"{claim.id}_{number}"
        # Each attempt has the same id, so that its stored answer replaces that of the previous attempt.
        answer = sha256(name.encode()).hexdigest()[:32] if claim.endpoint == "/v1/responses" else None
        inside = Inside(key, answer, priority=_PRIORITY)
        n_attempts = 0
        while True:
            posted = await post(self._application, claim.endpoint, bytes(line.body), inside=inside)
            if self._gate.draining:
                raise asyncio.CancelledError
            is_busy = posted.status == 429 or (posted.status == 503 and _code(posted.body) in BUSY)
            is_lost = not posted.is_whole or posted.status in (0, 500, 503)
            n_attempts += is_lost and not is_busy
            if not (is_busy or is_lost) or n_attempts >= MOST_ATTEMPTS:
                break
            await asyncio.sleep(_AGAIN_S)
        if posted.is_whole and posted.status:
            response = {"status_code": posted.status, "request_id": name, "body": msgspec.Raw(posted.body)}
            result = _result(number, name, line.custom_id, posted.status >= 400, response, None)
        else:
            error = {"code": "server_error", "message": "the process that computed it ended"}
            result = _result(number, name, line.custom_id, True, None, error)
        await self._files.write(self._files.add_results, self._presence.name, claim.number, [result])

    async def _expire(self, claim: Claim) -> None:
        """Store an error for each request without a result."""
        error = {"code": "batch_expired", "message": "the completion window was over before it was computed"}
        results: list[Result] = []
        files, worker = self._files, self._presence.name
        async for number, line in self._remaining(claim):
            results.append(_result(number, f"{claim.id}_{number}", line.custom_id, True, None, error))
            if len(results) == _WRITTEN_AT_ONCE:
                await files.write(files.add_results, worker, claim.number, results)
                results = []
        if results:
            await files.write(files.add_results, worker, claim.number, results)


def _problem(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": None}


def _problem_of(line: bytes, endpoint: str, seen: set[str]) -> dict[str, Any] | None:
    """Return what is wrong with a line of a batch's file. ``seen``: the ids of the lines before it."""
    try:
        request = _LINES.decode(line)
        body = _STREAMS.decode(request.body)
    except msgspec.ValidationError as e:
        return _problem("invalid_request", str(e))
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        return _problem("invalid_json_line", f"the line is not valid JSON: {e}")
    except RecursionError:
        return _problem("invalid_json_line", "the line is nested too deeply")
    name = request.custom_id
    if not 0 < len(name) <= _MOST_ID:
        return _problem(
            "invalid_request", f"custom_id must have from 1 to {_MOST_ID} characters", "custom_id"
        )
    if name in seen:
        return _problem("duplicate_custom_id", f"the custom_id {quoted(name)} is there twice", "custom_id")
    seen.add(name)
    if request.method != "POST":
        return _problem("invalid_method", f"method is {quoted(request.method)}; it must be POST", "method")
    if request.url != endpoint:
        return _problem("mismatched_url", f"url is {quoted(request.url)}; the batch is for {endpoint}", "url")
    for field in ("stream", "background"):
        if getattr(body, field):
            return _problem("invalid_request", f"{field} is on; a batch has whole answers", f"body.{field}")
    return None


def _result(
    number: int,
    name: str,
    custom_id: str,
    is_error: bool,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
) -> Result:
    line = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    return Result(number, is_error, msgspec.json.encode(line) + b"\n")


def _code(body: bytes) -> str | None:
    if len(body) > 2**16:
        return None
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return None
    return code if isinstance(code, str) else None

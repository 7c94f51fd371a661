"""One HTTP request from its first byte to the end of its answer, and the routes that answer it.

Open it to change what all routes share. A route is an ``Endpoint``: it reads the body within the server's limits, runs
the route's handler in a task, and sends the ``Response`` that the handler returns. If the client disconnects, the task
is cancelled, and the handler's requests to the engine end within a step.

A handler gets the decoded body and an ``Exchange``, which is Starlette's request with the data for the log and the
metrics. If a handler raises an exception, the exception handlers that ``application`` registers answer it. Once a
stream has begun, its last event reports the error instead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from llamapipe.chat.halves import whole_json_bytes
from llamapipe.results import ChatCompletion, Completion
from llamapipe.server._body import accepted_encodings, check_transfer, decode, encodings_of
from llamapipe.server._client_request import ClientRequest
from llamapipe.server._fields import fit_to_type, mismatch_error, unused_fields
from llamapipe.server.errors import BUSY, QUOTA, ApiError, Dialect, api_error, log_unexpected, shutting_down
from llamapipe.server.gate import LOADED_NS, Gate
from llamapipe.server.json_bytes import encode_json, event, line
from llamapipe.server.state import ServerState

T = TypeVar("T")
Answers = TypeVar("Answers", bound=Completion | ChatCompletion | Sequence[Completion])
Body = TypeVar("Body", bound=msgspec.Struct)
_log = logging.getLogger("llamapipe.server")
_LARGE_BODY = 2**20  # bytes; the C library keeps the memory that such requests free
_SIGN_S = 0.25  # how often a stream checks for other news
PING = b": ping\n\n"  # a comment, which clients skip
SUBMITTED = b""  # no event: the requests are checked and queued, so the headers can be sent


class Exchange(ClientRequest):
    """One HTTP request and its answer, used by one task. ``gate``: the gate that all requests pass.

    ``raw``: the body, until it is decoded. ``has_body``: whether all of the body has arrived, or there is no body.
    ``answer_headers``: the headers of any answer to the request.
    """

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.gate = gate
        self.answer_headers = [(b"x-request-id", self.id.encode())]
        self.raw = b""
        self.has_body = not (
            self.method in ("POST", "PUT", "PATCH")
            or "transfer-encoding" in self.headers
            or self.headers.get("content-length", "0") != "0"
        )
        self.times.load_s = self.loaded_ns / 1e9
        self._unused: tuple[str, ...] = ()
        self._held = gate.bodies.hold(self.client.host if self.client else "", lambda: None)
        self._n_read = 0  # bytes of the body
        self._last_token_at: dict[int, float] = {}
        scope["llamapipe.exchange"] = self

    def __repr__(self) -> str:
        return f"<Exchange {self.method} {self.path} {self.id}>"

    @property
    def server(self) -> ServerState:
        """The state that all requests share, for routes that need an engine or an embedder."""
        return cast("ServerState", self.gate)

    # ---- the request
    async def body(self) -> bytes:
        """Read and return the whole body. A second call returns no bytes.

        Raises ApiError 413 if the body is over the limit, 408 if it does not arrive in time, 503 if all bodies together
        are too large. Raises ClientDisconnect.
        """
        if self.has_body:
            return b""
        timeout_s = self.gate.settings.body_timeout_s
        reading = asyncio.ensure_future(self._read_body())
        self._held.refuse = reading.cancel
        try:
            done, _ = await asyncio.wait([reading], timeout=timeout_s)
        finally:
            if not reading.done():
                reading.cancel()
            self._held.refuse = lambda: None  # the old callback holds the task
        if not done:
            raise ApiError(
                408,
                f"the body did not arrive within {timeout_s:g} seconds, the limit of this server (--body-timeout)",
                code="timeout",
            )
        if reading.cancelled() or self.is_refused:
            raise self.gate.bodies.error()
        return reading.result()

    async def _read_body(self) -> bytes:
        limit = self.gate.settings.max_body_bytes
        length = self.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(int(length), limit)
        self._encodings()  # raises, before the body is read
        parts: list[bytes] = []
        try:
            async with aclosing(self.stream()) as stream:
                async for part in stream:
                    self._n_read += len(part)
                    if self._n_read > limit:
                        raise self._too_large(self._n_read, limit)
                    parts.append(part)
                    self._held.grow(self._n_read)
            self.has_body = True
            return b"".join(parts)
        finally:
            parts.clear()  # an exception may hold this frame until the next garbage collection

    async def decode_content(self) -> None:
        """Decode the body as its Content-Encoding says. Clients take turns. Raises ApiError 400, 413."""
        encodings = self._encodings() if self.raw else []
        if not encodings:
            return
        raw, self.raw = self.raw, b""
        limit = self.gate.settings.max_body_bytes
        self.raw = await self.gate.convert(decode, raw, encodings, limit, size=limit)
        self._n_read = max(self._n_read, len(self.raw))
        self._held.grow(self._n_read)

    def _encodings(self) -> list[str]:
        fields = self.scope["headers"]
        check_transfer(value for name, value in fields if name == b"transfer-encoding")
        return encodings_of(value for name, value in fields if name == b"content-encoding")

    def _too_large(self, n: int, limit: int) -> ApiError:
        return ApiError(
            413, f"the body has at least {n} bytes; the limit of this server is {limit} (--max-body-bytes)"
        )

    def hold_more(self, n_bytes: int) -> None:
        """Count bytes that were fetched for the request as part of its body."""
        self._held.add(n_bytes)

    def release_body(self) -> None:
        """Stop counting the bytes of the body."""
        self._held.release()

    def forget_body(self) -> None:
        """Release the memory of the body, however much of it has arrived, because the request has ended."""
        self.raw = b""
        self.release_body()
        self.gate.note_freed(self._n_read)

    def refuse_with(self, refuse: Callable[[], object]) -> None:
        """Set the function that ends the request if all bodies together are too large.

        Call it when the body has been read.
        """
        self._held.refuse = refuse

    @property
    def is_refused(self) -> bool:
        """Whether the request was ended because all bodies together are too large."""
        return self._held.refused

    async def decode(self, decoder: msgspec.json.Decoder[Body]) -> Body:
        """Return the body as a value of the decoder's type; a large body is decoded in a thread.

        Records its fields without effect. Raises ApiError 400, which names the field.
        """
        raw, self.raw = self.raw, b""
        if len(raw) <= _LARGE_BODY:
            body, names = self._decode(decoder, raw)
        else:
            body, names = await self.gate.convert(self._decode, decoder, raw, size=len(raw))
        self.note_unused((*names, *unused_fields(body)))
        return body

    def _decode(self, decoder: msgspec.json.Decoder[Body], raw: bytes) -> tuple[Body, tuple[str, ...]]:
        """Return the decoded body, and the names of fields without effect that its type does not have."""
        self._check_size(raw)
        names: tuple[str, ...] = ()
        try:
            try:
                body = decoder.decode(raw)
            except msgspec.ValidationError as e:  # there may be nulls that the type does not have
                try:
                    plain = msgspec.json.decode(raw)
                except msgspec.ValidationError:  # a number is too large; only the first error names its field
                    raise e from None
                fields, names = fit_to_type(plain, decoder.type)
                body = msgspec.convert(fields, decoder.type)
        except msgspec.ValidationError as e:
            raise mismatch_error(str(e), decoder.type) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            whole = whole_json_bytes(raw)
            if whole != raw:
                return self._decode(decoder, whole)
            raise ApiError(400, _no_json(raw, e)) from None
        return body, names

    async def peek(self, decoder: msgspec.json.Decoder[Body]) -> Body:
        """Read some fields of the body without consuming it. Raises ApiError 400."""
        if len(self.raw) <= _LARGE_BODY:
            return self._peek(decoder, self.raw)
        return await self.gate.convert(self._peek, decoder, self.raw, size=len(self.raw))

    def _peek(self, decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
        self._check_size(raw)
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError:
            raise ApiError(400, "the body must be a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            whole = whole_json_bytes(raw)
            if whole != raw:
                return self._peek(decoder, whole)
            raise ApiError(400, _no_json(raw, e)) from None

    def _check_size(self, raw: bytes) -> None:
        """Raise ApiError 400 for a body that takes too long to decode."""
        most = self.gate.settings.max_messages
        # A decoded conversation takes about ten times the bytes of its JSON.
        if len(raw) > _LARGE_BODY and (n := raw.count(b'"role"')) > most:
            raise ApiError(
                400,
                f"the body has {n} messages, by their roles; the limit of this server is {most} (--max-messages): send "
                "the last ones",
            )
        if (problem := problem_of(raw)) is not None:
            raise ApiError(400, f"the body {problem}, the limit of this server")

    async def await_disconnect(self) -> None:
        """Wait until the client closes the connection. Call it after the body has been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    @property
    def loaded_ns(self) -> int:
        """The nanoseconds that the request waited for its model in the front process of several models; else 0."""
        nanoseconds = self.headers.get(LOADED_NS, "0") if self.gate.is_behind_front else "0"
        return int(nanoseconds)

    # ---- what is counted
    def note_unused(self, names: tuple[str, ...]) -> None:
        """Record options that have no effect on this server. Raises ApiError 400 if the settings are ``strict``."""
        if self.gate.is_behind_front:  # it has an effect in the front process
            names = tuple(name for name in names if name != "keep_alive")
        if self.gate.settings.slot_save_path is not None:  # it chooses a conversation
            names = tuple(name for name in names if name != "id_slot")
        if names and self.gate.settings.strict:
            raise ApiError(
                400,
                f"{names[0]} has no effect here, and this server runs with --strict; leave the field out",
                names[0],
            )
        self._unused += names

    def count(self, n_prompt: int, n_completion: int) -> None:
        """Record the token counts of the answer."""
        self.n_prompt_tokens, self.n_completion_tokens = n_prompt, n_completion

    async def await_engine(self, result: Awaitable[Answers]) -> Answers:
        """Await the engine's complete answer, and record its times."""
        done = await self.await_streams(result)
        self.times.take(done)
        return done

    async def await_streams(self, result: Awaitable[T]) -> T:
        """Await a result. If it is cancelled or times out, the request's tokens are not counted."""
        try:
            return await result
        except (asyncio.CancelledError, TimeoutError):
            self.n_prompt_tokens = self.n_completion_tokens = None
            raise

    def token_arrived(self, stream: int) -> None:
        """Record the arrival of a token of one of the answer's streams."""
        if self.times.first_at is None:
            self.release_body()
        self.times.token_arrived()
        now = perf_counter()
        before = self._last_token_at.get(stream)
        if before is not None:
            self.intervals_s.append(now - before)
        self._last_token_at[stream] = now

    def next_prompt(self) -> None:
        """Begin another prompt, so that the time between two prompts does not count as a token interval."""
        self.times.next_prompt()
        self._last_token_at.clear()

    # ---- the answer
    def prepare(self, response: Response) -> Response:
        """Add the headers of any answer to a response, and record its status; return the response."""
        response.raw_headers += self.answer_headers
        if self._unused:
            response.raw_headers.append((b"x-llamapipe-unused", ", ".join(self._unused).encode()))
        if self.times.was_computed:
            response.raw_headers.append((b"server-timing", self.times.header()))
        if not isinstance(response, (EventStream, LateResponse)):  # their status is sent with the first byte
            self.status = response.status_code
        return response

    def error_response(self, error: ApiError, more: Mapping[str, str] | None = None) -> Response:
        """Return the response for an error. ``more``: further headers."""
        headers = dict(more or {})
        if not self.has_body:  # the rest of the body may still arrive, and is not a request
            headers["connection"] = "close"
        if error.code == QUOTA:
            headers["x-should-retry"] = "false"  # OpenAI's clients would try again
        elif error.status in BUSY:
            headers["retry-after"] = str(self.gate.settings.retry_after_s)
        if error.status == 415:
            headers["accept-encoding"] = accepted_encodings()
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonResponse(error.body(self.dialect), error.status, headers)

    async def send(self, response: Response) -> None:
        """Send a response."""
        await self.prepare(response)(self.scope, self._receive, self._send)


class LateResponse(Response):
    """A response that sets the exchange's status when it sends its first byte, because it is not known before."""


class JsonResponse(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body; bytes are already JSON."""
        return content if isinstance(content, bytes) else encode_json(content)


# ---- streams
def error_event(error: BaseException, dialect: Dialect) -> bytes:
    """Return the event, or Ollama's line, for an error that occurs after the stream has begun."""
    answer = api_error(error)
    if answer is None:
        _log.error("a stream failed", exc_info=error)
        answer = ApiError(500, f"the server failed: {type(error).__name__}")
    log_unexpected(error, "a stream was")
    if dialect == "ollama":
        return line(answer.body(dialect))
    return event(answer.body(dialect), "error" if dialect == "anthropic" else None)


class EventStream(StreamingResponse):
    """Sends encoded server-sent events as they arrive, and waits for a client that reads slowly.

    The status is sent with the first event, even an empty one, so an earlier error can still set the status. While
    there is nothing to send, ``ping``, or the bytes it returns, is sent every ``ping_s`` seconds. The first ping also
    sends the status; errors after it are events. ``sign``: returns other news to send during this time, or no bytes.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        events: AsyncGenerator[bytes, None],
        ping: bytes | Callable[[], bytes] = PING,
        sign: Callable[[], bytes] | None = None,
    ) -> None:
        # A proxy must not buffer events.
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._exchange = exchange
        self._events = events
        self._ping = ping
        self._sign = sign

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. ``Endpoint`` cancels it when the client disconnects."""
        await self.stream_response(send)

    async def stream_response(self, send: Send) -> None:
        """Send the stream."""
        exchange = self._exchange
        loop = asyncio.get_running_loop()

        async def part(data: bytes) -> None:
            if exchange.status == 0:
                exchange.status = self.status_code
                head = {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
                await send(head)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        # The events are closed first, so that their requests end now, even if sending is cancelled.
        ping_s = exchange.gate.settings.ping_s
        async with _Heartbeat(part, self._ping, ping_s, self._sign) as beat, aclosing(self._events) as events:
            try:
                async for event in events:
                    while beat.sign_on_its_way is not None:
                        await beat.sign_on_its_way
                    beat.is_sending = True
                    await part(event)
                    beat.is_sending = False
                    beat.sent_at = loop.time()
            except Exception as e:
                if exchange.status == 0:
                    raise
                while beat.sign_on_its_way is not None:  # the error must be the last event
                    await beat.sign_on_its_way
                beat.is_sending = True
                await part(error_event(e, exchange.dialect))
        await send({"type": "http.response.body", "body": b""})


class Download(StreamingResponse):
    """The bytes of a file, to be saved. ``Endpoint`` cancels it when the client disconnects."""

    def __init__(self, parts: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> None:
        safe = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
        super().__init__(parts, headers={**safe, **(headers or {})}, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the bytes."""
        await self.stream_response(send)


class LineStream(EventStream):
    """An ``EventStream`` of JSON lines. They have no comments, so ``ping`` must be a line that changes nothing."""

    media_type = "application/x-ndjson"


class _Heartbeat:
    """Sends signs of life on a stream that has nothing else to send.

    ``is_sending``, ``sent_at``: set by the stream. ``sign_on_its_way``: the stream awaits this task before it sends.
    """

    def __init__(
        self,
        send: Callable[[bytes], Coroutine[Any, Any, None]],
        ping: bytes | Callable[[], bytes],
        ping_s: float,
        sign: Callable[[], bytes] | None,
    ) -> None:
        self._send = send
        self._ping = ping
        self._ping_s = ping_s or math.inf
        self._sign = sign
        self._every_s = self._ping_s if sign is None else min(self._ping_s, _SIGN_S)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.is_sending = False
        self.sent_at = self._loop.time()
        self.sign_on_its_way: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<_Heartbeat every {self._every_s:g} s>"

    def _wait(self) -> None:
        if self._every_s < math.inf:
            self._timer = self._loop.call_later(self._every_s, self._tick)

    def _tick(self) -> None:
        """Send a sign of life if the stream is silent. One timer per interval costs less than one per event."""
        silent_s = 0.0 if self.is_sending else self._loop.time() - self.sent_at
        data = b"" if self.is_sending or self._sign is None else self._sign()
        if not data and silent_s >= self._ping_s:
            data = self._ping if isinstance(self._ping, bytes) else self._ping()
        if data:
            self.sign_on_its_way = asyncio.ensure_future(self._beat(data))
        elif self._sign is None and self._every_s - silent_s > 0:
            self._timer = self._loop.call_later(self._every_s - silent_s, self._tick)
        else:
            self._wait()

    async def _beat(self, data: bytes) -> None:
        try:
            await self._send(data)
            self.sent_at = self._loop.time()
        finally:
            self.sign_on_its_way = None
        self._wait()

    async def __aenter__(self) -> _Heartbeat:
        self._wait()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._every_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
        sign = self.sign_on_its_way
        if sign is not None:  # it is waiting for a client that does not read
            if kind is not None:
                sign.cancel()
            await asyncio.wait([sign])


# ---- routes
Handler = Callable[[Exchange], Awaitable[Response]]
# The models that a route is for: those that generate, that fill in gaps, that embed, or all.
ModelKind = Literal["text", "filling", "embedding", "any"]


@dataclass(eq=False, repr=False)
class Endpoint:
    """The ASGI application of one route.

    ``path``: the route's path. ``handler``: answers a request whose body has been read. ``has_key``: whether the API
    key is checked and limits apply. ``aliases``: further paths. ``model``: the kind of model that answers.

    The OpenAPI document leaves out a route without ``summary``. It also uses ``more_statuses``: statuses that only some
    routes have; ``body``: the type of the request's body; ``form``: the fields of a form, the first of which is a
    required file; ``media`` and ``stream_media``: the media types of a complete and of a streamed answer.
    """

    method: str
    path: str
    handler: Handler
    summary: str = ""
    more_statuses: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    stream_media: str = EventStream.media_type
    model: ModelKind = "text"
    body: type[msgspec.Struct] | None = None
    media: str = "application/json"
    has_key: bool = True
    form: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Endpoint {self.method} {self.path}>"

    @property
    def streams(self) -> bool:
        """Whether a client may ask for a stream. Routes that only count tokens have such a body, but never stream."""
        has_field = self.body is not None and "stream" in self.body.__struct_fields__
        return has_field and "504" in self.more_statuses

    def with_handler(self, handler: Handler) -> Endpoint:
        """Return the same route with another handler."""
        return replace(self, handler=handler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ApiError for every error before the answer has begun."""
        exchange: Exchange = scope["llamapipe.exchange"]
        exchange.route = self.path
        gate = exchange.gate
        try:
            if self.has_key:
                gate.check(exchange)
            exchange.raw = await exchange.body()
            with gate.admit(exchange, self.has_key):  # slow bodies do not count
                await self._run(exchange)
        except ClientDisconnect as e:
            exchange.status = exchange.status or 499
            _clear(e)
        except asyncio.CancelledError:
            # The server drains, and no longer waits for this request.
            if gate.draining and exchange.inside is None and not exchange.status:
                raise shutting_down() from None
            exchange.status = exchange.status or 499
            raise
        except Exception as e:
            answer = _log_error(e, f"id={exchange.id} {self.path}", exchange.id)
            _clear(e)
            if not exchange.status:  # otherwise, the connection is closed
                raise answer from None
        finally:
            exchange.forget_body()

    async def _run(self, exchange: Exchange) -> None:
        """Run the handler and send its response; cancel both if the client disconnects."""

        async def answer() -> None:
            await exchange.decode_content()
            await exchange.send(await self.handler(exchange))

        tasks = [asyncio.ensure_future(answer()), asyncio.ensure_future(exchange.await_disconnect())]
        work, gone = tasks
        exchange.refuse_with(work.cancel)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            if work.cancelled() and exchange.is_refused:
                raise exchange.gate.bodies.error()
            await work
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if not gone.cancelled():
                gone.exception()


# Routes without a body.
get = partial(Endpoint, "GET")
delete = partial(Endpoint, "DELETE")


def post(
    path: str,
    handler: Callable[[Exchange, Body], Awaitable[Response]],
    body: type[Body],
    summary: str,
    more_statuses: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    stream_media: str = EventStream.media_type,
    method: str = "POST",
    model: ModelKind = "text",
) -> Endpoint:
    """Return a route whose handler gets the decoded body; see ``Endpoint``."""
    decoder = msgspec.json.Decoder(body)

    async def decoded(exchange: Exchange) -> Response:
        return await handler(exchange, await exchange.decode(decoder))

    return Endpoint(method, path, decoded, summary, more_statuses, aliases, stream_media, model, body)


def _log_error(error: Exception, what: str, request_id: str) -> ApiError:
    """Return the error for an exception. Logs the exception if it may be a defect of the server."""
    log_unexpected(error, what)
    answer = api_error(error)
    if answer is None:
        _log.error("%s failed", what, exc_info=error)
        answer = ApiError(500, f"the server failed: {type(error).__name__}; its log has id {request_id}")
    return answer


def _clear(error: BaseException) -> None:
    """Clear the local variables of the frames that an exception passed through.

    A frame that refers to its exception would keep its variables, such as the request, until the next garbage
    collection.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__, cause = None, cause.__context__


# ---- bodies
# The maximum nesting of objects and lists. Python allows 1000 nested calls, and some functions need two per level.
MAX_DEPTH = 256
MAX_VALUES = 2**18  # objects, lists and members; numbers in a list count a sixteenth
_PART = 2**20  # bytes that are checked together
_STEPS = np.zeros(256, np.int8)  # of each byte
_STEPS[list(b"{[")] = 1
_STEPS[list(b"}]")] = -1


_WEIGHTS = np.zeros(256, np.int32)  # of each byte: how long its value takes to decode, roughly
_WEIGHTS[list(b"{[:")] = 16
_WEIGHTS[ord(",")] = 1


def problem_of(body: bytes) -> str | None:
    """Return the problem of a body with more than ``MAX_DEPTH`` levels or ``MAX_VALUES`` values; else None.

    To decode more would hold up other requests. The result may be wrong for text that is not JSON.
    """
    counts_values = len(body) > MAX_VALUES and (
        body.count(b":") + body.count(b"[") + body.count(b"{") > MAX_VALUES
        or body.count(b",") > 16 * MAX_VALUES
    )
    if not counts_values and body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return None
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the other quotes begin and end strings
    depth, weight, in_string = 0, 0, False
    for start in range(0, len(text), _PART):
        part = np.frombuffer(text, np.uint8, min(_PART, len(text) - start), start)
        outside = np.logical_not(np.logical_xor.accumulate(part == ord('"')) ^ in_string)
        depths = np.cumsum(_STEPS[part] * outside, dtype=np.int32)
        if depth + int(depths.max()) > MAX_DEPTH:
            return f"is nested too deeply: more than {MAX_DEPTH} levels"
        if counts_values:
            weight += int(np.dot(_WEIGHTS[part], outside))
            if weight > 16 * MAX_VALUES:
                return f"has more than {MAX_VALUES} objects, lists and members, or {16 * MAX_VALUES} numbers"
        depth += int(depths[-1])
        in_string = not outside[-1]
    return None


def _no_json(raw: bytes, error: Exception) -> str:
    """Return the message for a body that cannot be decoded."""
    if not raw.strip():
        return "the body is empty; send a JSON object, such as {}"
    return f"the body is not valid JSON: {error}"

"""One HTTP request: reads the body within a limit, sends the answer, and detects that the client disconnected.

``Endpoint`` is the ASGI application of one route. It runs the route's handler in a task. If the client disconnects, the
task is cancelled, and the handler's requests in the engine end within a step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

import msgspec
import numpy as np

from llamapipe.server.errors import BUSY, ApiError, Dialect, api_error, log_unexpected
from llamapipe.server.fields import unused, without_nulls
from llamapipe.server.wire.mismatch import mismatch

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from llamapipe.server.application import ServerState
    from llamapipe.server.guard import Held

# Objects and lists inside each other. Python's limit is 1000 calls, and some functions need two for a level.
MAX_DEPTH = 256
_PART = 2**20  # bytes that are looked at together
_STEPS = np.zeros(256, np.int8)  # of each byte
_STEPS[list(b"{[")] = 1
_STEPS[list(b"}]")] = -1


def is_too_deep(body: bytes) -> bool:
    """Whether JSON has more than ``MAX_DEPTH`` levels. For what is no JSON the answer may be wrong."""
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return False
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    depth, in_string = 0, False
    for start in range(0, len(text), _PART):
        part = np.frombuffer(text, np.uint8, min(_PART, len(text) - start), start)
        inside = np.logical_xor.accumulate(part == ord('"')) ^ in_string
        depths = np.cumsum(_STEPS[part] * ~inside, dtype=np.int32)
        if depth + int(depths.max()) > MAX_DEPTH:
            return True
        depth += int(depths[-1])
        in_string = bool(inside[-1])
    return False


T = TypeVar("T")
_log = logging.getLogger("llamapipe.server")
PING = b": ping\n\n"  # a comment, which clients skip
SUBMITTED = b""  # no event: the requests are checked and in the queue, so the answer's headers can be sent
_encode = msgspec.json.Encoder().encode


def event(value: object, name: str | None = None) -> bytes:
    """A value as an event, with a name for APIs that name their events."""
    data = b"data: " + _encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def error_event(error: BaseException, dialect: Dialect) -> bytes:
    """The event for an error that occurs after the stream has begun."""
    answer = api_error(error)
    if answer is None:
        _log.error("a stream failed", exc_info=error)
        answer = ApiError(500, f"the server failed: {type(error).__name__}")
    log_unexpected(error, "a stream was")
    return event(answer.body(dialect), "error" if dialect == "anthropic" else None)


Request = TypeVar("Request", bound=msgspec.Struct)
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer events
)
_LARGE_BODY = 2**20  # bytes; the C library keeps what such requests free
_SIGN_S = 0.25  # how often a stream looks whether it can tell something new
Headers = Iterable[tuple[bytes, bytes]]


class HungUpError(Exception):
    """The client closed the connection."""


class Call:
    """One HTTP request, used by one task. ``state``: the server's state, shared by all requests.

    ``raw``: the body, until it is decoded. ``has_body``: whether all of it has arrived, or there is none.
    ``id``: from the header ``x-request-id``, or random.
    ``unused``: options that were accepted but have no effect.
    ``n_prompt_tokens``, ``n_completion_tokens``: for the log and the metrics; None: not known.
    ``first_token_at``: when the first token arrived, by ``perf_counter``. ``intervals_s``: seconds between the tokens
    of a stream.
    """

    def __init__(
        self, state: ServerState, scope: Scope, receive: Receive, send: Send, dialect: Dialect = "openai"
    ) -> None:
        self.state = state
        self.dialect: Dialect = dialect
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = self._id()
        self.started_at = perf_counter()
        self.status = 0
        self.raw = b""
        self.has_body = not (
            scope["method"] in ("POST", "PUT", "PATCH")
            or b"transfer-encoding" in self.headers
            or self.headers.get(b"content-length", b"0") != b"0"
        )
        self._held: Held | None = None
        self.unused: tuple[str, ...] = ()
        self.n_prompt_tokens: int | None = 0
        self.n_completion_tokens: int | None = 0
        self.first_token_at: float | None = None
        self.intervals_s: list[float] = []
        self._last_token_at: dict[int, float] = {}
        self._receive = receive
        self._send = send

    def __repr__(self) -> str:
        return f"<Call {self.scope['method']} {self.scope['path']} {self.id}>"

    def _id(self) -> str:
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex

    @property
    def path_params(self) -> dict[str, str]:
        """The path parameters of the route."""
        params: dict[str, str] = self.scope.get("path_params", {})
        return params

    def query(self, name: str) -> str | None:
        """The first value of a parameter of the query string."""
        values = parse_qs(self.scope["query_string"].decode("latin-1")).get(name)
        return values[0] if values else None

    # ---- counts
    def note_unused(self, names: tuple[str, ...]) -> None:
        """Records options that have no effect on this server. Raises ApiError 400 if the settings are ``strict``."""
        if names and self.state.settings.strict:
            raise ApiError(
                400,
                f"{names[0]} has no effect here, and this server runs with --strict; leave the field out",
                names[0],
            )
        self.unused += names

    def count(self, n_prompt: int, n_completion: int, first_token_s: float | None = None) -> None:
        """Records the token counts of the answer and, if known, the seconds to its first token."""
        self.n_prompt_tokens, self.n_completion_tokens = n_prompt, n_completion
        if first_token_s is not None and self.first_token_at is None:
            self.first_token_at = self.started_at + first_token_s

    async def whole(self, answer: Awaitable[T]) -> T:
        """The engine's answer. If the client disconnects or the request times out first, its tokens are not counted."""
        try:
            return await answer
        except (asyncio.CancelledError, TimeoutError):
            self.n_prompt_tokens = self.n_completion_tokens = None
            raise

    def token_arrived(self, stream: int) -> None:
        """Records the arrival of a token of one of the answer's streams."""
        now = perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
            self.release_body()
        before = self._last_token_at.get(stream)
        if before is not None:
            self.intervals_s.append(now - before)
        self._last_token_at[stream] = now

    # ---- the request
    async def body(self) -> bytes:
        """The whole body.

        Raises ApiError 413 over the limit, 408 if it does not arrive in time, 503 if all bodies together are too large,
        HungUpError if the client disconnects.
        """
        if self.has_body:
            return b""
        timeout_s = self.state.settings.body_timeout_s
        reading = asyncio.ensure_future(self._read_body())
        client = self.scope.get("client")
        self._held = self.state.bodies.hold(client[0] if client else "", reading.cancel)
        try:
            done, _ = await asyncio.wait([reading], timeout=timeout_s)
        finally:
            if not reading.done():
                reading.cancel()
        if not done:
            raise ApiError(
                408,
                f"the body did not arrive within {timeout_s:g} seconds, the limit of this server",
                code="timeout",
            )
        if reading.cancelled() or self.is_refused:
            raise self.state.bodies.error()
        return reading.result()

    async def _read_body(self) -> bytes:
        limit = self.state.settings.max_body_bytes
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(int(length), limit)
        parts: list[bytes] = []
        n = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise HungUpError
            part = message.get("body", b"")
            n += len(part)
            if n > limit:
                raise self._too_large(n, limit)
            parts.append(part)
            if self._held is not None:
                self._held.grow(n)
            if not message.get("more_body", False):
                self.has_body = True
                if n > _LARGE_BODY:
                    self.state.trim_later()
                return b"".join(parts)

    def release_body(self) -> None:
        """Its bytes, and what was decoded from them, count no longer."""
        if self._held is not None:
            self._held.release()

    def refuse_with(self, refuse: Callable[[], object]) -> None:
        """``refuse`` ends the request if all bodies together are too large. Call it when the body has been read."""
        if self._held is not None:
            self._held.refuse = refuse

    @property
    def is_refused(self) -> bool:
        """Whether it ended because all bodies together are too large."""
        return self._held is not None and self._held.refused

    def _too_large(self, n: int, limit: int) -> ApiError:
        return ApiError(413, f"the body has at least {n} bytes; the limit of this server is {limit}")

    def decode(self, decoder: msgspec.json.Decoder[Request]) -> Request:
        """The body as a value of the decoder's type. Notes its fields without effect.

        Raises ApiError 400, which names the field.
        """
        raw, self.raw = self.raw, b""
        most = self.state.settings.max_messages
        # A decoded conversation takes ten times its bytes.
        if len(raw) > _LARGE_BODY and (n := raw.count(b'"role"')) > most:
            raise ApiError(
                400,
                f"the body has {n} messages, by their roles; the limit of this server is {most} (--max-messages): send "
                "the last ones",
            )
        if is_too_deep(raw):
            raise ApiError(
                400, f"the body is nested too deeply: more than {MAX_DEPTH} levels, the limit of this server"
            )
        try:
            try:
                request = decoder.decode(raw)
            except msgspec.ValidationError:  # a null may stand where the type has none, and in unknown fields
                given = without_nulls(msgspec.json.decode(raw), decoder.type)
                request = msgspec.convert(given, decoder.type)
        except msgspec.ValidationError as e:
            raise mismatch(str(e), decoder.type) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise ApiError(400, f"the body is not valid JSON: {e}") from None
        self.note_unused(unused(request))
        return request

    async def hung_up(self) -> None:
        """Returns when the client closes the connection. Call it after the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the answer
    async def answer(
        self, body: bytes, status: int = 200, headers: Headers = (_JSON,), with_body: bool = True
    ) -> None:
        """Sends a complete answer."""
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body if with_body else b""})

    async def answer_json(self, value: object, status: int = 200) -> None:
        """Sends a value as JSON."""
        await self.answer(msgspec.json.encode(value), status)

    async def answer_events(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Headers = (),
        ping: bytes = PING,
        sign: Callable[[], bytes] | None = None,
    ) -> None:
        """Sends encoded server-sent events as they arrive; waits while the client reads slowly.

        The status is sent with the first event, empty or not: an error before it can still set the status. While there
        is nothing to send, ``ping`` is sent every ``ping_s`` seconds, and the status with the first one; an error is
        then an event. ``sign``: returns what else can be told meanwhile, if there is something new.
        """
        loop = asyncio.get_running_loop()
        head = [*_EVENTS, *headers]

        async def part(data: bytes) -> None:
            if self.status == 0:
                await self._start(200, head)
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

        # `events` is closed first: its requests end now, also if sending is cancelled.
        async with _Heartbeat(part, ping, self.state.settings.ping_s, sign) as beat, aclosing(events):
            try:
                async for event in events:
                    while beat.sign_on_its_way is not None:
                        await beat.sign_on_its_way
                    beat.is_sending = True
                    await part(event)
                    beat.is_sending = False
                    beat.sent_at = loop.time()
            except Exception as e:
                if self.status == 0:
                    raise
                beat.is_sending = True
                await part(error_event(e, self.dialect))
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers.append((b"x-request-id", self.id.encode()))
        if self.unused:
            headers.append((b"x-llamapipe-unused", ", ".join(self.unused).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer_error(self, error: ApiError, dialect: Dialect, more: Headers = ()) -> None:
        """Sends an error. If an answer has begun, sends nothing, and the connection ends."""
        if self.status:
            return
        headers = [_JSON, *more]
        if not self.has_body:  # the rest of it may still come; it is no request
            headers.append((b"connection", b"close"))
        if error.status in BUSY:
            headers.append((b"retry-after", str(self.state.settings.retry_after_s).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.answer(msgspec.json.encode(error.body(dialect)), error.status, headers)


class _Heartbeat:
    """Sends signs of life on a stream that has nothing else to send.

    ``is_sending``, ``sent_at``: set by the stream. ``sign_on_its_way``: what the stream waits for before it sends.
    """

    def __init__(
        self,
        send: Callable[[bytes], Coroutine[Any, Any, None]],
        ping: bytes,
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
        """Looks whether the stream is silent. A timer for each event would cost more."""
        silent_s = 0.0 if self.is_sending else self._loop.time() - self.sent_at
        data = b"" if self.is_sending or self._sign is None else self._sign()
        if not data and silent_s >= self._ping_s:
            data = self._ping
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
        if sign is not None:  # it waits for a client that does not read
            if kind is not None:
                sign.cancel()
            await asyncio.wait([sign])


def _clear(error: BaseException) -> None:
    """Drops the values of the frames that an exception came through.

    A frame that knows its exception keeps what it holds, the request too, until the next garbage collection.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__, cause = None, cause.__context__


Handler = Callable[[Call], Awaitable[None]]


class Endpoint:
    """The ASGI application of one route.

    ``path``: the route's path, a label of the metrics. ``dialect``: the format of its errors. ``counted``: whether the
    API key is checked and the limits apply.
    """

    def __init__(
        self, handler: Handler, path: str, dialect: Dialect = "openai", counted: bool = True
    ) -> None:
        self.handler = handler
        self.path = path
        self.dialect: Dialect = dialect
        self.counted = counted

    def __repr__(self) -> str:
        return f"<Endpoint {self.handler!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        state: ServerState = scope["app"].state.llamapipe
        scope["route_path"] = self.path
        call = Call(state, scope, receive, send, self.dialect)
        try:
            key = state.check(call) if self.counted else None
            call.raw = await call.body()
            with state.admitted(call, self.counted, key):  # it counts from here: slow bodies keep nobody out
                await self._run(call)
        except HungUpError:
            call.status = call.status or 499
        except asyncio.CancelledError:
            call.status = call.status or 499
            raise
        except Exception as e:
            await self._failed(call, e)
            _clear(e)
        finally:
            call.release_body()
            state.finished(call)

    async def _run(self, call: Call) -> None:
        """Runs the handler, and cancels it if the client disconnects."""
        tasks = [asyncio.ensure_future(self.handler(call)), asyncio.ensure_future(call.hung_up())]
        work, gone = tasks
        call.refuse_with(work.cancel)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise HungUpError
            if work.cancelled() and call.is_refused:
                raise call.state.bodies.error()
            await work
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if not gone.cancelled():
                gone.exception()

    async def _failed(self, call: Call, error: Exception) -> None:
        answer = api_error(error)
        log_unexpected(error, f"id={call.id} {self.path}")
        if answer is None:
            _log.exception("id=%s %s failed", call.id, self.path)
            answer = ApiError(500, f"the server failed: {type(error).__name__}; its log has id {call.id}")
        with suppress(OSError):
            await call.answer_error(answer, self.dialect)

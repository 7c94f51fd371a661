"""Forwards requests from the front process to a model's process, and the answers back.

Open it to change what a model's process learns about a client, and what happens if that process ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import quote

from llamapipe._messages import quoted
from llamapipe.fleet._upstream import Upstream, UpstreamLostError
from llamapipe.fleet.pool import Pool, PooledModel
from llamapipe.server.dialects.ollama import empty_part
from llamapipe.server.endpoint import Exchange, LateResponse, ModelKind, error_event
from llamapipe.server.errors import ApiError, Dialect, shutting_down
from llamapipe.server.gate import ANSWER, CACHE, CLIENT, LOADED_NS, OWNER, PRIORITY, WORKER, Gate
from llamapipe.server.json_bytes import line

if TYPE_CHECKING:
    from types import EllipsisType

    from starlette.types import Receive, Scope, Send

# The client's headers that are forwarded. Others are not, because the model's process trusts our own headers.
_FORWARDED = (b"content-type", b"accept", b"anthropic-version", b"anthropic-beta", b"user-agent")
# The answer's headers that this process sets itself, or that belong to one connection.
_NOT_RETURNED = (
    b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id", b"x-llamapipe-worker",
)  # fmt: skip
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_STREAM_HEAD = ((b"content-type", b"text/event-stream; charset=utf-8"), *_UNBUFFERED)
_LINES_HEAD = ((b"content-type", b"application/x-ndjson"), *_UNBUFFERED)


class Proxy:
    """Asks the processes of a pool's models on behalf of a gate's clients. On the event loop's thread."""

    def __init__(self, gate: Gate, pool: Pool) -> None:
        self.gate = gate
        self.pool = pool

    def __repr__(self) -> str:
        return f"<Proxy {self.pool}>"

    async def ask(self, exchange: Exchange, model: PooledModel) -> tuple[int, bytes]:
        """Send a request without a body to a loaded model; return the status and body of the answer.

        Raises ConnectionError if the process has ended.
        """
        try:
            async with self.pool.connection(model) as upstream:
                await upstream.send(self.head(exchange, 0.0), b"")
                return upstream.status, await upstream.body()
        except UpstreamLostError:
            raise ConnectionError(f"the process of the model {quoted(model.name)} ended") from None

    def head(self, exchange: Exchange, waited_s: float) -> Iterable[bytes]:
        """Yield the lines of a request to a model's process."""
        scope = exchange.scope
        query: bytes = scope["query_string"]
        path = quote(exchange.path, "/:@!$&'()*+,;=-._~").encode()
        method = "GET" if exchange.method == "HEAD" else exchange.method
        yield b"%b %b%b HTTP/1.1" % (method.encode(), path, b"?" + query if query else b"")
        yield b"host: localhost"
        for name, value in scope["headers"]:
            if name in _FORWARDED:
                yield b"%b: %b" % (name, value)
        client = self.gate.tenant_of(exchange)
        share = client.share.hex() if isinstance(client.share, bytes) else str(client.share)
        yield b"x-request-id: " + exchange.id.encode()
        yield f"{CLIENT}: {share}".encode("latin-1", "replace")
        if client.cache is not None:
            yield f"{CACHE}: {client.cache}".encode()
        yield f"{OWNER}: {self.gate.owner_of(exchange)}".encode()
        if self.gate.store is not None:
            yield f"{ANSWER}: {scope.setdefault('llamapipe.answer', uuid.uuid4().hex)}".encode()
        if (inside := exchange.inside) is not None:
            yield f"{WORKER}: {inside.worker or ''}".encode()
            yield f"{PRIORITY}: {inside.priority}".encode()
        yield f"{LOADED_NS}: {round(waited_s * 1e9)}".encode()


def check_kind(model: PooledModel, kind: ModelKind) -> None:
    """Raise ApiError 400 if a model is known to be of a kind that the route does not serve."""
    embeds = model.embeds
    if embeds is None or embeds == (kind == "embedding") or kind == "any":
        return
    what = "embeds texts; it does not generate any" if embeds else "generates texts; it does not embed any"
    raise ApiError(400, f"the model {quoted(model.name)} {what}", "model", "model_kind")


class Forwarded(LateResponse):
    """Starts a model's process if necessary, and passes its answer on as it arrives.

    If the process ends before any of its answer has arrived, for example because it was killed, the request is sent
    once more to the next process. A request that crashes processes therefore ends at most two. A request with MCP tools
    is not sent again, because they may have been called.

    ``ttl_s``: as in ``Pool.lease``. Raises ApiError 400 for a model of another kind.
    """

    def __init__(
        self,
        proxy: Proxy,
        exchange: Exchange,
        model: PooledModel,
        kind: ModelKind,
        is_stream: bool,
        ttl_s: float | EllipsisType | None,
    ) -> None:
        check_kind(model, kind)
        super().__init__()
        exchange.n_prompt_tokens = exchange.n_completion_tokens = None  # the process of the model counts them
        self.raw_headers = []  # the length is not known
        self._proxy = proxy
        self._exchange = exchange
        self._model = model
        self._kind = kind
        self._is_stream = is_stream
        self._ttl_s = ttl_s
        self._body = b""
        self._has_begun = self._has_answer = False  # towards the client; by the process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask the process and send its answer. Raises ApiError only before the answer has begun."""
        began = monotonic()
        self._body, self._exchange.raw = self._exchange.raw, b""
        has_tools = self._exchange.route == "/v1/responses" and b'"mcp"' in self._body
        try:
            if not await self._send_answer(send, began, is_last=has_tools):
                await self._send_answer(send, began, is_last=True)
        except (UpstreamLostError, ConnectionError):
            error = ApiError(
                503,
                f"the process of the model {quoted(self._model.name)} ended; the next request starts it again",
                code="model_ended",
            )
            await self._fail(send, shutting_down() if self._proxy.gate.draining else error)
        except ApiError as error:
            await self._fail(send, error)
        await send({"type": "http.response.body", "body": b""})

    async def _send_answer(self, send: Send, began: float, is_last: bool = False) -> bool:
        """Ask the process and send its answer. Returns False if it ended before it answered and the next can be asked.

        Raises UpstreamLostError or ConnectionError if no other process can be asked or ``is_last``. Raises ApiError.
        """
        pool, model = self._proxy.pool, self._model
        process = None
        try:
            async with pool.lease(model, self._ttl_s) as loading:
                await self._until_loaded(loading, send)
                check_kind(model, self._kind)
                process = model.process
                async with pool.connection(model) as upstream:
                    await upstream.send(self._proxy.head(self._exchange, monotonic() - began), self._body)
                    self._has_answer = True
                    await self._pass_on(send, upstream)
        except (UpstreamLostError, ConnectionError):
            if (
                is_last
                or self._has_answer
                or self._proxy.gate.draining
                or not await pool.has_ended(model, process)
            ):
                raise
            return False
        return True

    async def _pass_on(self, send: Send, upstream: Upstream) -> None:
        self._body = b""
        self._exchange.is_forwarded = True
        if self._has_begun and upstream.status != 200:
            await self._part(send, await _error_part(upstream, self._exchange.dialect))
            return
        if not self._has_begun:
            await self._begin(send, upstream.status, upstream.headers)
        async for part in upstream.parts():
            self._exchange.release_body()
            await self._part(send, part)

    async def _until_loaded(self, loading: asyncio.Task[None], send: Send) -> None:
        """Wait for the load. Meanwhile, send a stream's head and keep-alives, so that the client does not give up."""
        settings = self._proxy.gate.settings
        began = monotonic()
        signs = self._is_stream and settings.ping_s > 0
        while not loading.done():
            waited_s = monotonic() - began
            left_s = None if settings.timeout_s is None else settings.timeout_s - waited_s
            if left_s is not None and left_s <= 0:
                raise ApiError(
                    504,
                    f"the model {quoted(self._model.name)} was not loaded within {settings.timeout_s:g} seconds, the "
                    "limit of this server for a request (--timeout)",
                    code="timeout",
                )
            limits = [limit for limit in (left_s, settings.ping_s if signs else None) if limit is not None]
            await asyncio.wait([loading], timeout=min(limits, default=None))
            if signs and not loading.done():
                if not self._has_begun:
                    await self._begin(
                        send, 200, _LINES_HEAD if self._exchange.dialect == "ollama" else _STREAM_HEAD
                    )
                await self._part(send, self._sign())
        await loading

    def _sign(self) -> bytes:
        """Return a keep-alive: a comment with the load's progress, or in Ollama's format a line without text."""
        if self._exchange.dialect != "ollama":
            return f": loading {self._model.name} {100 * self._model.progress:.0f} %\n\n".encode()
        return line(empty_part(self._model.name, self._exchange.route == "/api/chat"))

    # ---- the answer
    async def _begin(self, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        kept = [header for header in headers if header[0] not in _NOT_RETURNED]
        names = {name for name, _ in kept}
        kept += [header for header in self.raw_headers if header[0] not in names]
        self._has_begun = True
        self._exchange.status = self.status_code = status
        await send({"type": "http.response.start", "status": status, "headers": kept})

    async def _part(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _fail(self, send: Send, error: ApiError) -> None:
        """Send an error: with its status, or within a stream that has begun."""
        if not self._has_begun:
            raise error
        if not self._is_stream:
            raise ConnectionError(error.message)  # the connection ends, so that the client sees it
        await self._part(send, error_event(error, self._exchange.dialect))


async def _error_part(upstream: Upstream, dialect: Dialect) -> bytes:
    body = await upstream.body()
    if dialect == "ollama":
        return body + b"\n"
    return (b"event: error\n" if dialect == "anthropic" else b"") + b"data: " + body + b"\n\n"

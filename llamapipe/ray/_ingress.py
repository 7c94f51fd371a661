"""Defines ``Ingress``, which takes HTTP requests, hands each to a replica, and reports when the replica dies.

The ingress is a separate process. When a replica is killed, its output just stops. Only another process can tell the
client that the text is incomplete.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from llamapipe.ray._costs import HttpRequest
from llamapipe.server.errors import BUSY, ApiError, Dialect
from llamapipe.server.json_bytes import event
from llamapipe.server.settings import ServerSettings

_log = logging.getLogger("llamapipe.ray")


class Ingress:
    """Forwards requests to the replicas of ``EngineReplica``, over the handle ``replicas``.

    The routes and answers are the same as in ``llamapipe serve``. If a replica dies before its answer has begun, the
    answer is 503, which clients such as OpenAI's retry automatically. If it dies during a stream of events, the stream
    ends with an error event.
    """

    def __init__(self, replicas: Any, settings: ServerSettings | None = None) -> None:
        self._replicas = replicas
        self._settings = settings or ServerSettings()

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        dialect: Dialect = "anthropic" if "/v1/messages" in request.url.path else "openai"
        try:
            forwarded = await self._read(request)
            answer = self._replicas.options(stream=True).http.remote(forwarded)
            return await self._relay(aiter(answer), dialect)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as e:
            error = _api_error(e)
            if error is None:
                _log.exception("%s %s failed", request.method, request.url.path)
                error = ApiError(500, f"the server failed: {type(e).__name__}; its log says more")
            headers = {"retry-after": str(self._settings.retry_after_s)} if error.status in BUSY else {}
            body = msgspec.json.encode(error.body(dialect))
            return Response(body, error.status, headers, "application/json")

    async def _read(self, request: Request) -> HttpRequest:
        """Read the request with its body. Raises ApiError 413 over the limit."""
        limit, parts, n = self._settings.max_body_bytes, [], 0
        async for part in request.stream():
            n += len(part)
            if n > limit:
                raise ApiError(413, f"the body has at least {n} bytes; the limit of this server is {limit}")
            parts.append(part)
        scope = request.scope
        return HttpRequest(
            request.method,
            scope["path"],
            scope.get("root_path", ""),
            scope.get("query_string", b""),
            tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            b"".join(parts),
        )

    async def _relay(self, messages: AsyncIterator[list[dict[str, Any]]], dialect: Dialect) -> Response:
        """Return the answer once it has begun."""
        begun = await anext(messages)
        start, rest = begun[0], begun[1:]
        # Ray Serve adds the request's id to its answers; the replica has used the same id.
        headers = [(name, value) for name, value in start["headers"] if name != b"x-request-id"]
        is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
        if not is_stream:
            body = _join(rest)
            async for more in messages:
                body += _join(more)
            answer = Response(body, start["status"])
        else:
            answer = StreamingResponse(_events(rest, messages, dialect), start["status"])
        answer.raw_headers = headers
        return answer


async def _events(
    first: list[dict[str, Any]], messages: AsyncIterator[list[dict[str, Any]]], dialect: Dialect
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; the last one is an error if the replica dies."""
    if first:
        yield _join(first)
    try:
        async for more in messages:
            if part := _join(more):
                yield part
    except Exception as e:
        _log.exception("a stream ended early")
        error = _api_error(e) or ApiError(500, f"the server failed: {type(e).__name__}; its log says more")
        yield event(error.body(dialect), "error" if dialect == "anthropic" else None)


def _join(messages: list[dict[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def _api_error(error: Exception) -> ApiError | None:
    """Return the answer for one of Ray's errors; None for an unexpected error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RayActorError):
        return ApiError(
            503, "the replica that computed this answer died: send the request again", code="replica_died"
        )
    if isinstance(error, BackPressureError):
        return ApiError(429, "too many requests are waiting; try again later", code="queue_full")
    if isinstance(error, DeploymentUnavailableError):
        return ApiError(503, "no replica can be started; the log of Ray Serve says why", code="unavailable")
    return None

"""Requests that the server makes to itself, for answers in the background and for batches.

They are handled like clients' requests, with the same routes, field limits, log and metrics. Two things differ: the key
is not checked, because it was checked when the work was submitted, and they do not count towards ``max_requests``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol

from starlette.types import ASGIApp

INSIDE = "llamapipe.inside"  # a key of the ASGI scope, which clients cannot set
# Error codes after which a request is made again, as often as necessary. Other server errors may be permanent.
BUSY = ("shutting_down", "queue_full", "kv_cache_full", "too_many_requests", "too_many_bytes",
        "model_unloaded")  # fmt: skip


class Inside(NamedTuple):
    """The client for whom a request is made. ``key``: the digest of its API key; None if it has none.

    ``answer``: the id of a stored answer, without its prefix. ``worker``: see ``_runs.py``. ``priority``: see
    ``SamplingParams``.
    """

    key: bytes | None = None
    answer: str | None = None
    worker: str | None = None
    priority: int = 0


class LaterWork(Protocol):
    """Computes work for which no client waits; see ``_background.py``. Use it on the event loop's thread."""

    def start(self) -> None:
        """Start computing, including work that an earlier server left unfinished. A second call does nothing."""

    async def stop(self) -> None:
        """Stop computing, and leave unfinished work to the next server or to this server's other processes."""

    def wake(self) -> None:
        """Wake the computing task, because there may be work to compute or to cancel."""

    def tell(self) -> None:
        """Notify the waiting readers that streams have new events."""

    async def news(self) -> bool:
        """Wait until a stream may have new events. Returns False if the server is shutting down."""


class InsideAnswer(NamedTuple):
    """An answer. ``status``: 0 if there is none. ``is_whole``: it is complete. ``body``: empty if ``take`` got it."""

    status: int
    is_whole: bool
    body: bytes = b""


async def post(
    application: ASGIApp,
    path: str,
    body: bytes,
    take: Callable[[bytes], Awaitable[None]] | None = None,
    inside: Inside | None = None,
) -> InsideAnswer:
    """Post a JSON body to an application. ``take``: receives the parts of the answer. Cancel the call to hang up."""
    status, is_whole = 0, False
    parts: list[bytes] = []
    requests: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, is_whole
        if message["type"] == "http.response.start":
            status = message["status"]
            return
        if take is None:
            parts.append(message.get("body", b""))
        elif message.get("body"):
            await take(message["body"])
        is_whole = not message.get("more_body", False)

    scope: MutableMapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
    }
    if inside is not None:
        scope[INSIDE] = inside
        if inside.answer is not None:
            scope["llamapipe.answer"] = inside.answer
    await application(scope, receive, send)
    return InsideAnswer(status, is_whole, b"".join(parts))

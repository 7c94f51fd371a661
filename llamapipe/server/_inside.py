"""Requests that the server makes to itself: for answers in the background, and for batches.

They take the way of every request: the same routes, limits of fields, log and metrics. Only the key is not asked for,
because it was when the work was given, and they count for no limit of requests at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

INSIDE = "llamapipe.inside"  # in the scope, which no client reaches
# Codes of answers after which a request is made again, as often as need be. Other errors of servers may last.
BUSY = (
    "shutting_down",
    "queue_full",
    "kv_cache_full",
    "too_many_requests",
    "too_many_bytes",
    "model_unloaded",
)


class Inside(NamedTuple):
    """The client for whom a request is made. ``key``: the digest of an API key; None: there are no keys.

    ``answer``: the id of a stored answer, without its prefix. ``worker``: see ``_runs.py``. ``priority``: in the
    engine, see ``SamplingParams``.
    """

    key: bytes | None = None
    answer: str | None = None
    worker: str | None = None
    priority: int = 0


class LaterWork(Protocol):
    """Computes when no client waits; ``_background.py`` has it. On the event loop's thread."""

    def start(self) -> None:
        """Begin, also with what a server before this one left. A second call does nothing."""

    async def stop(self) -> None:
        """Leave what is not complete to the next server, or to other processes of this one."""

    def wake(self) -> None:
        """Wake the task that computes: there may be something to compute, or to end."""

    def tell(self) -> None:
        """Tell those who wait that streams have something new."""

    async def news(self) -> bool:
        """Wait until a stream may have something new. False: the server ends."""


class InsideAnswer(NamedTuple):
    """``status``: 0 if there was no answer. ``is_whole``: it was not cut off."""

    status: int
    is_whole: bool


async def post(
    application: ASGIApp,
    path: str,
    body: bytes,
    take: Callable[[bytes], Awaitable[None]],
    inside: Inside | None = None,
) -> InsideAnswer:
    """Ask an application. ``take``: gets the parts of the body of the answer. Cancel it to hang up."""
    status, is_whole = 0, False
    requests: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, is_whole
        if message["type"] == "http.response.start":
            status = message["status"]
            return
        if message.get("body"):
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
    return InsideAnswer(status, is_whole)

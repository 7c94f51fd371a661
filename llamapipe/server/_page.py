"""The page at ``/``, its files, and the route it reads: ``/timeline``, the engine's last steps."""

from __future__ import annotations

import asyncio
import math
from functools import lru_cache
from importlib.resources import files
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from llamapipe._messages import quoted
from llamapipe.pipeline.trace import ORDER
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError

if TYPE_CHECKING:
    from llamapipe.engine import Engine

_IDLE_S = 5.0  # recording stops after this time without a reader
_MAX_SPANS = 4000


class Timeline:
    """Records the engine's stages while a client reads them. Use it on the event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started = False
        self._idle: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Timeline {'on' if self._started else 'off'}>"

    async def since(self, after_s: float) -> dict[str, Any]:
        """The spans that ended after ``after_s``, in seconds of the server's clock, and the engine's current state."""
        if not self._engine.trace.on:
            self._engine.trace.start(_MAX_SPANS)
            self._started = True
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._stop)
        return await asyncio.to_thread(self._read, after_s)

    def _stop(self) -> None:
        if self._started and not self._engine.closed:
            self._engine.trace.stop()
        self._started = False

    def _read(self, after_s: float) -> dict[str, Any]:
        engine = self._engine
        stats = engine.stats()
        now = perf_counter()
        lanes = {stage: i for i, stage in enumerate(ORDER)}
        spans = [
            (lanes[span.stage], span.step, round(span.begin_s, 6), round(span.end_s, 6))
            for span in engine.trace.spans()
            if span.end_s > after_s and span.stage in lanes
        ]
        return {
            "now": now,
            "stages": ORDER,
            "spans": spans[-_MAX_SPANS:],
            "stats": {
                "n_completion_tokens": stats.n_completion_tokens,
                "n_prompt_tokens": stats.n_prompt_tokens,
                "n_active": stats.n_active,
                "n_queued": stats.n_queued,
                "n_used_cells": stats.n_used_cells,
                "n_cells": engine.n_cells,
                "n_threads": stats.n_threads,
            },
        }


_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# The last line turns off innerHTML and the like in browsers that know it: what a model writes is never parsed as HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(exchange: Exchange) -> Response:
    """``GET /``."""
    return _file("index.html")


async def page_file(exchange: Exchange) -> Response:
    """``GET /page/{name}``: the page's scripts and styles."""
    return _file(exchange.path_params["name"])


def _file(name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise ApiError(404, f"the page has no file {quoted(name)}")
    return Response(found, headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])


@lru_cache(maxsize=1)
def _files() -> dict[str, bytes]:
    """The page's files by name. No other file can be requested."""
    folder = files("llamapipe.server") / "page"
    return {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES
    }


async def timeline(exchange: Exchange) -> Response:
    """``GET /timeline?after=SECONDS``."""
    try:
        after_s = float(exchange.query_params.get("after") or 0)
        if not math.isfinite(after_s):
            raise ValueError
    except ValueError:
        raise ApiError(400, "after must be a number of seconds", "after") from None
    return JsonResponse(await exchange.server.timeline.since(after_s))

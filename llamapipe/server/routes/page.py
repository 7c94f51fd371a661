"""The page at ``/``, its files, and the routes it reads: the engine's recent steps, batches, answers, MCP servers."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.resources import files

from starlette.responses import PlainTextResponse, Response

from llamapipe._messages import quoted
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.kept import read
from llamapipe.server.store.runs import Runs

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# The last line disables innerHTML and the like in browsers that support it: a model's text is never parsed as HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_MOST_JOBS = 50  # of each kind
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


async def page_or_name(exchange: Exchange) -> Response:
    """``GET /``: returns the text by which clients recognize Ollama, or for browsers the server's page, if any."""
    if exchange.gate.settings.page and "text/html" in exchange.headers.get("accept", ""):
        return await page(exchange)
    return PlainTextResponse("Ollama is running")


async def page_file(exchange: Exchange) -> Response:
    """``GET /page/{name}``: the page's scripts and styles."""
    return _file(exchange.path_params["name"])


def _file(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        raise ApiError(404, f"the page has no file {quoted(name)}")
    return Response(content, headers=_HEADERS, media_type=_TYPES[name.rpartition(".")[2]])


@lru_cache(maxsize=1)
def _files() -> dict[str, bytes]:
    """Return the page's files by name. No other file can be requested."""
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


async def jobs(exchange: Exchange) -> Response:
    """``GET /jobs``: the client's recent batches, and its background answers that have not ended."""
    store, files = exchange.gate.store, exchange.gate.files
    if store is None or files is None:
        return JsonResponse({"is_stored": False, "batches": [], "answers": []})
    batches, _ = await read(exchange, files, files.batches, None, _MOST_JOBS)
    answers = await read(exchange, store, Runs(store).list_newest, _MOST_JOBS)
    return JsonResponse({"is_stored": True, "batches": batches, "answers": answers})


async def mcp_servers(exchange: Exchange) -> Response:
    """``GET /mcp``: the labels of the MCP servers that requests may name."""
    return JsonResponse({"servers": [{"server_label": label} for label in exchange.gate.mcp_labels()]})

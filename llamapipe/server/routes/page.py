"""The page at ``/``, its files, and the route it reads: ``/timeline``."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.resources import files

from llamapipe.arguments import quoted
from llamapipe.server.errors import ApiError
from llamapipe.server.exchange import Call

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# The last line turns off innerHTML and the like in browsers that know it: what a model writes is never parsed as HTML.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


async def page(call: Call) -> None:
    """``GET /``."""
    await _file(call, "index.html")


async def page_file(call: Call) -> None:
    """``GET /page/{name}``: the page's scripts and styles."""
    await _file(call, call.path_params["name"])


async def _file(call: Call, name: str) -> None:
    found = _files().get(name)
    if found is None:
        raise ApiError(404, f"the page has no file {quoted(name)}")
    kind = _TYPES[name.rpartition(".")[2]]
    headers = ((b"content-type", f"{kind}; charset=utf-8".encode()), *_HEADERS)
    await call.answer(found, headers=headers)


@lru_cache(maxsize=1)
def _files() -> dict[str, bytes]:
    """The page's files by name. No other file can be requested."""
    folder = files("llamapipe.server") / "page"
    return {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES
    }


async def timeline(call: Call) -> None:
    """``GET /timeline?after=SECONDS``."""
    try:
        after_s = float(call.query("after") or 0)
        if not math.isfinite(after_s):
            raise ValueError
    except ValueError:
        raise ApiError(400, "after must be a number of seconds", "after") from None
    await call.answer_json(await call.state.timeline.since(after_s))

"""What goes from the process that speaks HTTP to a replica: requests, and the text by which they are routed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PROMPTS = (
    "messages",
    "prompt",
    "input",
    "content",
)  # of the APIs of OpenAI and Anthropic, and of tokenizing


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request with its whole body; can be pickled. ``headers``: names in lower case."""

    method: str
    path: str
    root_path: str
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def scope(self) -> dict[str, Any]:
        """The request as an ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query_string,
            "root_path": self.root_path,
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


def prompt_bytes(arguments: Sequence[object]) -> bytes:
    """The prompt of a call of a replica, as bytes that begin alike if prompts do; empty if there is none.

    ``arguments``: an ``HttpRequest``, a text, token ids, or messages; what follows is ignored.
    """
    first = arguments[0] if arguments else None
    if isinstance(first, HttpRequest):
        return _of_body(first.body)
    return _of_value(first)


def _of_body(body: bytes) -> bytes:
    try:
        value = json.loads(body) if body else None
    except (ValueError, RecursionError):  # the replica's answer says what is wrong
        return b""
    if not isinstance(value, Mapping):
        return b""
    parts = [_of_value(value[name]) for name in ("tools", "system", "instructions") if value.get(name)]
    parts += [_of_value(value[name]) for name in _PROMPTS if value.get(name)][:1]
    return b"".join(parts)


def _of_value(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if value is None:
        return b""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return b"".join((item & 0xFFFFFFFF).to_bytes(4, "little") for item in value)
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return b""

"""Reads and checks the file of ``serve --mcp FILE``, in the JSON form that MCP clients read.

Open it to change what such a file may contain. Other clients use the same form, so one file can serve all::

    {"mcpServers": {
        "time": {"command": "mcp-server-time", "args": ["--local-timezone", "UTC"]},
        "docs": {"url": "https://mcp.example.com/mcp", "headers": {"Authorization": "Bearer ${DOCS_TOKEN}"}}}}

Keys that clients need for their user interfaces have no effect here. Any other unknown key is an error, because it may
be misspelt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llamapipe._messages import did_you_mean, quoted

_MOST_BYTES = 2**20
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The names and values of HTTP headers.
HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
VALUE = re.compile(r"[\x20-\x7e\x80-\xff]{0,8192}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_STDIO_KEYS = ("command", "args", "env", "cwd")
_HTTP_KEYS = ("url", "headers")
# Keys for other clients' user interfaces and approvals.
_UNUSED_KEYS = frozenset(
    ("name", "description", "icon", "disabled", "autoApprove", "alwaysAllow", "trust", "timeout", "type")
)
_STDIO_TYPES = ("stdio",)
_HTTP_TYPES = ("http", "streamable-http", "streamableHttp", "streamable_http")


@dataclass(frozen=True)
class StdioServer:
    """A server that is a child process. ``env``: variables in addition to the few that every child has."""

    label: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None

    def __repr__(self) -> str:
        return f"<StdioServer {self.label}: {self.command}>"  # without arguments and variables, which may be secrets


@dataclass(frozen=True)
class HttpServer:
    """A server at an address. ``headers``: sent with each request to it."""

    label: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<HttpServer {self.label}>"  # without the address and headers, which may be secrets


McpEntry = StdioServer | HttpServer


def entries_of(path: Path) -> dict[str, McpEntry]:
    """Return the servers of a file by label, without disabled servers.

    Raises OSError, ValueError.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{path} has more than {_MOST_BYTES} bytes")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from None
    servers = document.get("mcpServers") if isinstance(document, dict) else None
    if not isinstance(servers, dict):
        raise ValueError(f'{path} must be an object with "mcpServers", an object of servers by their labels')
    entries: dict[str, McpEntry] = {}
    for label, fields in servers.items():
        try:
            entry = _entry(label, fields)
        except ValueError as e:
            raise ValueError(f"{path}: the server {quoted(label)}: {e}") from None
        if entry is not None:
            entries[label] = entry
    return entries


def _entry(label: str, fields: Any) -> McpEntry | None:
    """Return one server; None if it is disabled. Raises ValueError."""
    if not _LABEL.fullmatch(label):
        raise ValueError("a label may have 64 of the characters A-Z, a-z, 0-9, '_', '.' and '-'")
    if not isinstance(fields, dict):
        raise ValueError("it must be an object")
    kind = fields.get("type")
    if kind == "sse":
        raise ValueError('the transport "sse" is no longer part of MCP: give the address of streamable HTTP')
    if kind is not None and kind not in (*_STDIO_TYPES, *_HTTP_TYPES):
        raise ValueError(f'type is {quoted(kind)}; it may be "stdio" or "http"')
    is_http = "url" in fields if kind is None else kind in _HTTP_TYPES
    known = _HTTP_KEYS if is_http else _STDIO_KEYS
    for key in fields:
        if key not in known and key not in _UNUSED_KEYS:
            raise ValueError(f"unknown key {quoted(key)}{did_you_mean(key, (*known, *_UNUSED_KEYS))}")
    disabled = fields.get("disabled", False)
    if not isinstance(disabled, bool):
        raise ValueError(f"disabled is {quoted(disabled)}; it must be true or false")
    if disabled:
        return None
    if is_http:
        return HttpServer(label, _url(_text(fields, "url")), _headers(fields))
    args = fields.get("args") or []
    if not isinstance(args, list) or not all(isinstance(value, str) for value in args):
        raise ValueError("args must be a list of texts")
    try:
        cwd = None if fields.get("cwd") is None else str(Path(_text(fields, "cwd")).expanduser())
    except RuntimeError as e:
        raise ValueError(f"cwd is {quoted(fields['cwd'])}: {e}") from None
    env = _texts(fields, "env")
    for name in env:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"env has {quoted(name)}, which is not the name of a variable")
    return StdioServer(label, _text(fields, "command"), tuple(map(_expand, args)), env, cwd)


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a text that is not empty")
    return _expand(value)


def _texts(fields: Mapping[str, Any], key: str) -> dict[str, str]:
    value = fields.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{key} must be an object of texts")
    return {name: _expand(text) for name, text in value.items()}


def _headers(fields: Mapping[str, Any]) -> dict[str, str]:
    headers = _texts(fields, "headers")
    for name, value in headers.items():
        if not HEADER.fullmatch(name) or not VALUE.fullmatch(value):
            raise ValueError(f"the header {quoted(name)} has characters that no header has, or too many")
    return headers


def _expand(text: str) -> str:
    """Return a text in which environment variables replace ``${NAME}`` and ``${NAME:-default}``.

    With these, the file need not contain secrets. Raises ValueError.
    """
    text.encode()  # raises, because JSON may have halves of characters
    if "\0" in text:
        raise ValueError("a text holds a NUL character")

    def value(match: re.Match[str]) -> str:
        known = os.environ.get(match[1], match[2])
        if known is None:
            raise ValueError(f"the environment has no variable {match[1]}")
        return known

    return _VARIABLE.sub(value, text)


def _url(text: str) -> str:
    split = urlsplit(text)
    if split.scheme not in ("http", "https") or not split.hostname:
        raise ValueError("url must be http://HOST/… or https://HOST/…")
    if split.port == 0 or any(ord(character) <= 32 or ord(character) == 127 for character in text):
        raise ValueError("url has the port 0, or spaces or control characters")
    return text

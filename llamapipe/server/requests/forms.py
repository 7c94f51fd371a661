"""Reads forms: bodies of parts, of which one may be a file (``multipart/form-data``)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import NamedTuple

from llamapipe._messages import listed, quoted
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError

_MOST_PARTS = 64


_MOST_TYPE = 300  # characters of a content type


_MOST_HEAD = 8192  # bytes of a part's headers


_BOUNDARY = re.compile(
    r"""multipart/form-data\s*;(?:[^"]*;)?\s*boundary="""
    r"""(?:"([\w'()+,./:=? -]{1,70})"|([\w'()+,./:=?-]{1,70}))\s*(?:;.*)?""",
    re.IGNORECASE | re.ASCII,
)


_DISPOSITION = rb"(?im)^content-disposition:\s*form-data\s*;[^\r\n]*?\b"


_NAME = re.compile(_DISPOSITION + rb'name="([^"\r\n]{1,200})"')


_FILENAME = re.compile(_DISPOSITION + rb'filename="([^"\r\n]{1,255})"')


class _Part(NamedTuple):
    name: str
    value: bytes
    filename: str | None


def form_parts(content_type: str, body: bytes) -> list[_Part]:
    """Return the fields of a form, in order. Raises ApiError 400 for an incomplete or invalid form."""
    match = _BOUNDARY.fullmatch(content_type.strip()) if len(content_type) <= _MOST_TYPE else None
    if match is None:
        raise ApiError(
            400,
            f"the body must be multipart/form-data with a boundary; its content-type is {quoted(content_type[:80])}",
        )
    mark = b"--" + (match[1] or match[2]).encode()
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if at == 1:
        raise ApiError(400, "the body's parts are not there: its boundary does not occur")
    parts: list[_Part] = []
    at += len(mark)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise ApiError(400, f"part {len(parts)} of the body does not begin with a line end")
        if len(parts) == _MOST_PARTS:
            raise ApiError(400, f"the body has more than {_MOST_PARTS} parts")
        head_end = body.find(b"\r\n\r\n", at, at + _MOST_HEAD)
        end = body.find(b"\r\n" + mark, head_end + 4)
        if head_end < 0 or end < 0:
            raise ApiError(400, f"part {len(parts)} of the body is not complete")
        name = _NAME.search(body[at + 2 : head_end])
        if name is None:
            raise ApiError(400, f"part {len(parts)} of the body has no name")
        filename = _FILENAME.search(body[at + 2 : head_end])
        parts.append(
            _Part(
                name[1].decode("utf-8", "replace"),
                body[head_end + 4 : end],
                None if filename is None else filename[1].decode("utf-8", "replace"),
            )
        )
        at = end + 2 + len(mark)
    return parts


def form_model(content_type: str, body: bytes) -> str | None:
    """Return the model that a form names. Raises ApiError 400."""
    models = [part.value for part in form_parts(content_type, body) if part.name == "model"]
    return models[0].decode("utf-8", "replace") if models else None


async def form_of(
    exchange: Exchange, known: Sequence[str], without_effect: Sequence[str] = ()
) -> dict[str, _Part]:
    """Return the known fields of the form in the body, and release the body. Raises ApiError 400 for other fields."""
    raw, exchange.raw = exchange.raw, b""
    parts = await asyncio.to_thread(form_parts, exchange.headers.get("content-type", ""), raw)
    del raw
    fields: dict[str, _Part] = {}
    for part in parts:
        name = part.name
        if name in without_effect:
            continue
        if name not in known:
            raise ApiError(400, f"the field {quoted(name[:80])} is unknown; there is {listed(known)}", name)
        if name in fields:
            raise ApiError(400, f"the field {name} is there twice", name)
        fields[name] = part
    exchange.note_unused(tuple(part.name for part in parts if part.name in without_effect))
    return fields

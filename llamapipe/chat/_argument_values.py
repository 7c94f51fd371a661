"""Reads arguments that are not JSON: Python literals, and the syntaxes of Gemma and MiniMax.

Each reader consumes one value and returns the decoded value. If an argument is a string, ``show`` gets the text as it
arrives. Text that cannot be a value and values nested deeper than ``_MAX_DEPTH`` raise Malformed immediately.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from llamapipe.chat._call_format import CallFormat
from llamapipe.chat._reader import (
    Malformed,
    Reading,
    TextBuffer,
)

T = TypeVar("T")
Show = Callable[[str], None]
KEY = re.compile(r"[^\s:={}\[\](),\"'<>]*")
_MAX_DEPTH = 60
_LITERALS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_AFTER_STRING = ",:)]}"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


def python_value(buffer: TextBuffer, show: Show | None = None, depth: int = 0) -> Reading[Any]:
    """Read a Python or JSON literal: a string, number, list, tuple or dict, or a constant such as True, false, None."""
    if depth > _MAX_DEPTH or not (yield from buffer.some()):
        raise Malformed
    if buffer.next_is("\"'"):
        return (yield from _python_string(buffer, show))
    if (yield from buffer.skip("{")):
        return dict((yield from _items(buffer, "}", lambda: _python_member(buffer, depth + 1))))
    if buffer.next_is("[("):
        end = "]" if buffer.take(1) == "[" else ")"
        return (yield from _items(buffer, end, lambda: python_value(buffer, depth=depth + 1)))
    return (yield from _scalar(buffer))


def _python_member(buffer: TextBuffer, depth: int) -> Reading[tuple[str, Any]]:
    key = yield from python_value(buffer, depth=depth)
    yield from buffer.expect(":")
    yield from buffer.spaces()
    if not isinstance(key, str):
        raise Malformed
    return key, (yield from python_value(buffer, depth=depth))


def _items(buffer: TextBuffer, end: str, item: Callable[[], Reading[T]]) -> Reading[list[T]]:
    """Read items with commas between them, up to and including ``end``."""
    items = []
    yield from buffer.spaces()
    while not (yield from buffer.skip(end)):
        items.append((yield from item()))
        yield from next_item(buffer, end)
    return items


def next_item(buffer: TextBuffer, end: str) -> Reading[None]:
    """Read the comma after an item and the spaces around the comma; no comma is required before ``end``."""
    yield from buffer.spaces()
    if not (yield from buffer.skip(",")) and not (yield from buffer.ahead(end)):
        raise Malformed
    yield from buffer.spaces()


def _scalar(buffer: TextBuffer) -> Reading[Any]:
    """Read a number, or a constant of Python or JSON."""
    yield from buffer.some()
    if buffer.next_is("-0123456789"):
        return (yield from buffer.json_value())
    word = yield from buffer.take_while(_WORD)
    if word not in _LITERALS:
        raise Malformed
    return _LITERALS[word]


def _python_string(buffer: TextBuffer, show: Show | None) -> Reading[str]:
    """Read a string in single, double, or three quotes."""
    quote = buffer.take(1)
    is_long = False
    if (yield from buffer.skip(quote)):
        if not (yield from buffer.skip(quote)):
            return ""
        is_long = True
    parts: list[str] = []

    def add(text: str) -> None:
        if show is None:
            parts.append(text)
        elif text:
            show(text)

    while True:
        add((yield from buffer.take_while(_PLAIN[quote])))
        if not (yield from buffer.some()):
            raise Malformed
        if buffer.next_is("\\"):
            add((yield from _escape(buffer)))
        elif is_long and not (yield from buffer.skip(quote * 3)):
            if not (yield from buffer.some()):
                raise Malformed
            add(buffer.take(1))
        elif is_long:
            return "".join(parts)
        else:
            mark = buffer.take(1)
            # Templates, and therefore models, do not escape the quote in a text such as it's. So a quote ends the
            # string only if a character that may follow a string comes next.
            after = yield from buffer.spaces()
            if (buffer.ended and not buffer.n) or buffer.next_is(_AFTER_STRING):
                return "".join(parts)
            add(mark + after)


def _escape(buffer: TextBuffer) -> Reading[str]:
    """Read the text of a backslash escape. The first half of a surrogate pair waits for the second."""
    buffer.take(1)
    if not (yield from buffer.some()):
        raise Malformed
    kind = buffer.take(1)
    if kind not in _HEX:
        return _ESCAPES.get(kind, kind if kind in "\"'\\/" else f"\\{kind}")
    code = yield from _digits(buffer, _HEX[kind])
    if 0xD800 <= code < 0xDC00 and (yield from buffer.skip("\\u")):
        low = yield from _digits(buffer, 4)
        if not 0xDC00 <= low < 0xE000:
            raise Malformed
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise Malformed
    return chr(code)


def _digits(buffer: TextBuffer, n: int) -> Reading[int]:
    while buffer.n < n and not buffer.ended:
        yield
    text = buffer.take(n)
    if len(text) < n or not re.fullmatch(r"[0-9a-fA-F]+", text):
        raise Malformed
    return int(text, 16)


def quoted_value(buffer: TextBuffer, quote: str, show: Show | None = None, depth: int = 0) -> Reading[Any]:
    """Read a value in Gemma's syntax: strings between ``quote``, keys without quotes."""
    if depth > _MAX_DEPTH or not (yield from buffer.some()):
        raise Malformed
    if (yield from buffer.skip(quote)):
        parts: list[str] = []
        if (
            yield from buffer.until((quote,), parts.append if show is None else show, shows_partial=False)
        ) is None:
            raise Malformed
        return "".join(parts)
    if (yield from buffer.skip("{")):
        return dict((yield from _items(buffer, "}", lambda: _quoted_member(buffer, quote, depth + 1))))
    if (yield from buffer.skip("[")):
        return (yield from _items(buffer, "]", lambda: quoted_value(buffer, quote, depth=depth + 1)))
    if (yield from buffer.ahead('"')):  # a model may write JSON's quotes
        return (yield from _python_string(buffer, show))
    return (yield from _scalar(buffer))


def _quoted_member(buffer: TextBuffer, quote: str, depth: int) -> Reading[tuple[str, Any]]:
    key = yield from quoted_key(buffer, quote)
    return key, (yield from quoted_value(buffer, quote, depth=depth))


def quoted_key(buffer: TextBuffer, quote: str) -> Reading[str]:
    """Read a key, including the colon and the spaces after it. Models may quote it."""
    if (yield from buffer.skip(quote)):
        parts: list[str] = []
        if (yield from buffer.until((quote,), parts.append)) is None:
            raise Malformed
        key = "".join(parts)
    elif (yield from buffer.ahead('"')):  # as for values
        key = yield from _python_string(buffer, None)
    else:
        parts = []
        if (yield from buffer.until((":", "}", "{", ",", "\n"), parts.append, takes_marker=False)) != ":":
            raise Malformed
        key = "".join(parts).strip()
    yield from buffer.expect(":")
    yield from buffer.spaces()
    return key


def nested_value(form: CallFormat, buffer: TextBuffer, depth: int = 0) -> Reading[Any]:
    """Read a value in MiniMax's syntax, up to ``value_end``; return its text, or its members as (key, value) pairs."""
    if depth > _MAX_DEPTH:
        raise Malformed
    parts: list[str] = []
    start, end = form.key_start, form.value_end
    common = end[: len(start)] if end.startswith(start) else ""
    if not common:
        raise Malformed
    if (yield from buffer.until((start,), parts.append, shows_partial=False, takes_marker=False)) is None:
        raise Malformed
    members: list[tuple[str, Any]] = []
    while not (yield from buffer.ahead(end)):
        yield from buffer.expect(start)
        key = yield from nested_key(form, buffer)
        members.append((key, (yield from nested_value(form, buffer, depth + 1))))
        yield from buffer.expect(end + key + form.value_close)
        yield from buffer.spaces()
    return members or "".join(parts)


def nested_key(form: CallFormat, buffer: TextBuffer) -> Reading[str]:
    """Read the key of a member, up to and including ``key_end``."""
    parts: list[str] = []
    ends = (form.key_end.strip(), form.key_start.strip(), "\n")
    marker = yield from buffer.until(ends, parts.append, takes_marker=False)
    if marker != ends[0] or not "".join(parts):
        raise Malformed
    buffer.take(len(marker))
    return "".join(parts)

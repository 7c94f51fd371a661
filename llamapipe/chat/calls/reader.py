"""Reads text that arrives in parts. The result does not depend on where the parts were cut.

Readers are generators: they yield where they need more text. A decision depends only on text that has arrived, and
later text never reverses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACES = " \t\r\n"


class Malformed(Exception):  # noqa: N818  (not an error: the text is something else)
    """The text is not what a reader expects."""


class TextBuffer:
    """Text that has arrived and is not consumed. ``ended`` is set when no more follows."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # the text before this index is consumed
        self.ended = False
        self._recorded: list[str] | None = None

    def feed(self, text: str) -> None:
        """Appends text, and drops consumed text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def rest(self) -> str:
        """The text that is not consumed."""
        return self.text[self.at :]

    def take(self, n: int) -> str:
        """Consumes ``n`` characters."""
        found = self.text[self.at : self.at + n]
        self.at += n
        if self._recorded is not None:
            self._recorded.append(found)
        return found

    def record(self, start: str = "") -> None:
        """Starts recording consumed text."""
        self._recorded = [start]

    def recorded(self) -> str:
        """The text consumed since ``record``; stops recording."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text


def until(buffer: TextBuffer, markers: tuple[str, ...], show: Callable[[str], None]) -> Reading[str | None]:
    """Consumes text up to and including the first marker, and passes the text before it to ``show``.

    Returns the marker; None if the text ended first. Text that may be the start of a marker is held back until this is
    decided.
    """
    pattern = _pattern(markers)
    while True:
        rest = buffer.rest
        found = pattern.search(rest)
        safe = found.start() if found else len(rest)
        held = len(rest) if buffer.ended else _start_of_marker(rest, markers, safe)
        if found and found.start() <= held:
            show(buffer.take(found.start()))
            return buffer.take(len(found.group()))
        show(buffer.take(min(held, safe)))
        if buffer.ended:
            return None
        yield


def _start_of_marker(text: str, markers: tuple[str, ...], end: int) -> int:
    """The index of the first incomplete marker at the text's end; ``len(text)`` if there is none."""
    longest = max(map(len, markers), default=1)
    for at in range(max(0, len(text) - longest + 1), min(len(text), end + 1)):
        tail = text[at:]
        if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
            return at
    return len(text)


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def spaces(buffer: TextBuffer) -> Reading[str]:
    """Consumes spaces and newlines."""
    taken = ""
    while True:
        rest = buffer.rest
        n = len(rest) - len(rest.lstrip(_SPACES))
        taken += buffer.take(n)
        if n < len(rest) or buffer.ended:
            return taken
        yield


def ahead(buffer: TextBuffer, text: str) -> Reading[bool]:
    """True if ``text`` follows; consumes nothing."""
    while True:
        rest = buffer.rest
        if rest.startswith(text):
            return True
        if buffer.ended or not text.startswith(rest):
            return False
        yield


def skip(buffer: TextBuffer, text: str) -> Reading[bool]:
    """Consumes ``text`` if it follows; returns whether it did."""
    found = yield from ahead(buffer, text)
    if found:
        buffer.take(len(text))
    return found


def expect(buffer: TextBuffer, text: str) -> Reading[None]:
    """Consumes ``text``; ignores spaces at its ends, and at these places in the buffer. Raises Malformed."""
    yield from spaces(buffer)
    inner = text.strip(_SPACES)
    if inner:
        if not (yield from skip(buffer, inner)):
            raise Malformed
        if text[-1:] in _SPACES:
            yield from spaces(buffer)


def take_while(buffer: TextBuffer, pattern: re.Pattern[str]) -> Reading[str]:
    """Consumes the longest text that matches ``pattern``, a repetition of single characters."""
    taken = ""
    while True:
        found = pattern.match(buffer.rest)
        n = found.end() if found else 0
        taken += buffer.take(n)
        if buffer.rest or buffer.ended:
            return taken
        yield


def json_value(buffer: TextBuffer, show: Callable[[str], None]) -> Reading[Any]:
    """Consumes one JSON object, array or string, and passes its text to ``show`` as it arrives.

    Returns the decoded value. Values of other types are passed on when they are complete. Raises Malformed at text that
    is not JSON.
    """
    if not (yield from _any(buffer)):
        raise Malformed
    scanner = _JsonScanner(buffer.rest[0])
    text = ""
    while True:
        n = scanner.scan(buffer.rest)
        piece = buffer.take(n)
        text += piece
        if scanner.done or buffer.ended:
            break
        if piece and scanner.is_open:
            show(piece)
        yield
    if not scanner.done and scanner.is_open:
        raise Malformed
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    show(piece if scanner.is_open else text)
    return value


def _any(buffer: TextBuffer) -> Reading[bool]:
    while not buffer.rest and not buffer.ended:
        yield
    return bool(buffer.rest)


class _JsonScanner:
    """Finds the end of a JSON value: brackets are counted outside strings."""

    def __init__(self, first: str) -> None:
        self.is_open = first in '{["'
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str) -> int:
        """How many characters of the text belong to the value."""
        for at, character in enumerate(text):
            if not self.is_open:
                if character in ",]} \t\r\n<[":
                    self.done = True
                    return at
            elif self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            if self.is_open and not self._in_string and self._depth <= 0:
                self.done = True
                return at + 1
        return len(text)

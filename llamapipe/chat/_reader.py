"""Reads text that arrives in parts. The result does not depend on where the parts were cut.

Readers are generators: they yield where they need more text. A decision depends only on text that has arrived, and
later text never reverses it.

``AnswerOutput`` collects the content, reasoning and calls that they read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from enum import Enum, auto
from functools import lru_cache
from typing import Any, TypeVar

from llamapipe.chat.results import ChatPiece, ToolCallDelta, new_call_id

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACES = " \t\r\n"
_SPACE_RUN = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):  # noqa: N818  (not an error: the text is something else)
    """The text does not have the form that a reader expects."""


class TextBuffer:
    """Text that has arrived and has not been consumed.

    ``ended`` is set when no more text follows, ``cut_off`` if the model was stopped before it had finished.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # the text before this index is consumed
        self.ended = self.cut_off = False
        self._recorded: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append text, and drop consumed text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def rest(self) -> str:
        """The text that has not been consumed."""
        return self.text[self.at :]

    @property
    def n(self) -> int:
        """The number of characters that have not been consumed."""
        return len(self.text) - self.at

    def next_is(self, characters: str) -> bool:
        """Return whether the next character is one of these."""
        return self.at < len(self.text) and self.text[self.at] in characters

    def take(self, n: int) -> str:
        """Consume ``n`` characters."""
        text = self.text[self.at : self.at + n]
        self.at += n
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def unread(self, text: str) -> None:
        """Put consumed text back before the rest."""
        self.text, self.at = text + self.rest, 0

    def record(self, start: str = "") -> None:
        """Start recording consumed text."""
        self._recorded = [start]

    def recorded_so_far(self) -> str:
        """Return the text consumed since ``record``."""
        return "".join(self._recorded or ())

    def recorded(self) -> str:
        """Return the text consumed since ``record``; stop recording."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text


def until(
    buffer: TextBuffer,
    markers: tuple[str, ...],
    show: Callable[[str], None],
    shows_partial: bool = True,
    takes_marker: bool = True,
) -> Reading[str | None]:
    """Consume text up to and including the first marker, and pass the text before it to ``show``.

    Returns the marker; None if the text ended first. Text that may be the start of a marker is held back until more
    text decides. ``shows_partial``: show an incomplete marker at the end of the text, unless the text was cut off.
    ``takes_marker``: consume the marker, too.
    """
    pattern = _pattern(markers)
    while True:
        match = pattern.search(buffer.text, buffer.at)
        safe = match.start() if match else len(buffer.text)
        is_whole = buffer.ended and (match is not None or shows_partial)
        held = _start_of_marker(buffer, markers, safe)
        is_cut = buffer.cut_off and match is None and _PART_OF_MARKER.match(buffer.text, held)
        if is_whole and not is_cut:
            held = len(buffer.text)
        elif match and is_run(match.group()) and match.end() == len(buffer.text):
            held = match.start()  # one more of its character would move it
        if match and match.start() < held:  # and later text cannot make it a longer marker
            show(buffer.take(match.start() - buffer.at))
            return buffer.take(len(match.group())) if takes_marker else match.group()
        show(buffer.take(min(held, safe) - buffer.at))
        if buffer.ended:
            buffer.take(buffer.n)
            return None
        yield


# Two characters, of which the first is in no word: the end of an answer that was cut off is hardly anything else.
_PART_OF_MARKER = re.compile(r"\W\S")


def _start_of_marker(buffer: TextBuffer, markers: tuple[str, ...], end: int) -> int:
    """Return the index of the first incomplete marker at the text's end, or the text's length."""
    text = buffer.text
    longest = max(map(len, markers), default=1)
    for at in range(max(buffer.at, len(text) - longest + 1), min(len(text), end + 1)):
        tail = text[at:]
        if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
            return at
    return len(text)


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(markers, key=len, reverse=True)
    # After "</b>" the last three of ">>>>" are the marker ">>>".
    ends = (f"(?!{re.escape(marker[0])})" if is_run(marker) else "" for marker in longest_first)
    return re.compile(
        "|".join(map("".join, zip(map(re.escape, longest_first), ends, strict=True))) or r"(?!)"
    )


def is_run(marker: str) -> bool:
    """Return whether a marker repeats one character, like ``>>>``."""
    return len(marker) > 1 and len(set(marker)) == 1


def spaces(buffer: TextBuffer) -> Reading[str]:
    """Consume spaces and newlines."""
    taken = ""
    while True:
        match = _SPACE_RUN.match(buffer.text, buffer.at)
        taken += buffer.take(len(match.group()) if match else 0)
        if buffer.n or buffer.ended:
            return taken
        yield


def ahead(buffer: TextBuffer, text: str) -> Reading[bool]:
    """Return whether ``text`` follows; consume nothing."""
    while True:
        if buffer.text.startswith(text, buffer.at):
            return True
        if buffer.ended or buffer.n >= len(text) or not text.startswith(buffer.rest):
            return False
        yield


def skip(buffer: TextBuffer, text: str) -> Reading[bool]:
    """Consume ``text`` if it follows; return whether it did."""
    is_next = yield from ahead(buffer, text)
    if is_next:
        buffer.take(len(text))
    return is_next


def expect(buffer: TextBuffer, text: str) -> Reading[None]:
    """Consume ``text``, but ignore spaces at its ends, also in the buffer. Raises Malformed."""
    yield from spaces(buffer)
    inner = text.strip(_SPACES)
    if inner:
        if not (yield from skip(buffer, inner)):
            raise Malformed
        if text[-1:] in _SPACES:
            yield from spaces(buffer)


def take_while(buffer: TextBuffer, pattern: re.Pattern[str]) -> Reading[str]:
    """Consume the longest text that matches ``pattern``, a repetition of single characters."""
    taken = ""
    while True:
        match = pattern.match(buffer.text, buffer.at)
        taken += buffer.take(len(match.group()) if match else 0)
        if buffer.n or buffer.ended:
            return taken
        yield


def one_of(buffer: TextBuffer, texts: Iterable[str]) -> Reading[str]:
    """Consume one of ``texts``, none of which is a prefix of another. Raises Malformed as soon as none can follow."""
    while True:
        for text in texts:
            if buffer.text.startswith(text, buffer.at):
                return buffer.take(len(text))
        may_follow = (len(text) > buffer.n and text.startswith(buffer.rest) for text in texts)
        if buffer.ended or not any(may_follow):
            raise Malformed
        yield


def _ignore(_: str) -> None: ...


def json_value(buffer: TextBuffer, show: Callable[[str], None] = _ignore) -> Reading[Any]:
    """Consume one JSON value, and pass the text of an object, an array or a string to ``show`` as it arrives.

    Returns the decoded value. Values of other types are passed to ``show`` when they are complete. Raises Malformed at
    the first character that cannot be part of JSON.
    """
    if not (yield from some(buffer)):
        raise Malformed
    is_open = buffer.next_is('{["')
    scanner = _JsonScanner()
    text = ""
    while True:
        piece = buffer.take(scanner.scan(buffer.text, buffer.at) - buffer.at)
        text += piece
        if scanner.failed:
            raise Malformed
        if scanner.done or buffer.ended:
            break
        if piece and is_open:
            show(piece)
        yield
    if not scanner.done and is_open:
        raise Malformed
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    show(piece if is_open else text)
    return value


def some(buffer: TextBuffer) -> Reading[bool]:
    """Wait for text; return False if it has ended."""
    while not buffer.n and not buffer.ended:
        yield
    return buffer.n > 0


class _Expect(Enum):
    """The part of a JSON value that the next character belongs to."""

    VALUE = auto()
    FIRST_ITEM = auto()  # or the end of the array
    KEY = auto()
    FIRST_KEY = auto()  # or the end of the object
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the object or array
    STRING = auto()  # the rest of a string
    ESCAPE = auto()
    NUMBER = auto()
    LITERAL = auto()


class _JsonScanner:
    """Follows the syntax of one JSON value to its end, or to the first character that cannot be part of it."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._expect = _Expect.VALUE
        self._stack: list[str] = []  # the open brackets
        self._is_key = False
        self._token = ""  # of an escape, a number or a literal

    def scan(self, text: str, at: int) -> int:
        """Return the end of the value's characters, reading from ``at``.

        Sets ``failed`` if a different character was required.
        """
        while at < len(text) and not self.done:
            if self._expect is _Expect.STRING:
                match = _PLAIN.match(text, at)
                at = match.end() if match else at
                if at == len(text):
                    break
            elif self._expect is _Expect.NUMBER and text[at] not in _OF_NUMBER:
                if not _NUMBER.fullmatch(self._token):
                    self.failed = True
                    break
                self._end_value()  # and this character belongs to what follows
                continue
            if not self._accepts(text[at]):
                self.failed = True
                break
            at += 1
        return at

    def _accepts(self, character: str) -> bool:
        """Take one character; return False if it cannot follow."""
        expect = self._expect
        if expect is _Expect.STRING:
            if character == "\\":
                self._expect, self._token = _Expect.ESCAPE, ""
            elif character == '"':
                self._end_string()
            else:
                return False  # a control character
            return True
        if expect in (_Expect.ESCAPE, _Expect.NUMBER, _Expect.LITERAL):
            self._token += character
            return self._accepts_token()
        if character in _SPACES:
            return True
        if expect in (_Expect.VALUE, _Expect.FIRST_ITEM):
            return self._begins_value(character, expect is _Expect.FIRST_ITEM)
        if expect in (_Expect.KEY, _Expect.FIRST_KEY):
            if character == '"':
                self._expect, self._is_key = _Expect.STRING, True
                return True
            return expect is _Expect.FIRST_KEY and self._closes(character)
        if expect is _Expect.COLON:
            self._expect = _Expect.VALUE
            return character == ":"
        if character == ",":
            self._expect = _Expect.KEY if self._stack[-1] == "{" else _Expect.VALUE
            return True
        return self._closes(character)

    def _accepts_token(self) -> bool:
        token = self._token
        if self._expect is _Expect.ESCAPE:
            if token[0] in '"\\/bfnrt' or len(token) == 5:
                self._expect = _Expect.STRING
            return token[0] in '"\\/bfnrt' or _ESCAPE.fullmatch(token) is not None
        if self._expect is _Expect.NUMBER:
            return len(token) <= _MAX_NUMBER and _START_OF_NUMBER.fullmatch(token) is not None
        if token in _LITERALS:
            self._end_value()
            return True
        return any(literal.startswith(token) for literal in _LITERALS)

    def _begins_value(self, character: str, may_close: bool) -> bool:
        if character in "{[":
            self._stack.append(character)
            self._expect = _Expect.FIRST_KEY if character == "{" else _Expect.FIRST_ITEM
        elif character == '"':
            self._expect, self._is_key = _Expect.STRING, False
        elif character in "-0123456789":
            self._expect, self._token = _Expect.NUMBER, character
        elif character in "tfn":
            self._expect, self._token = _Expect.LITERAL, character
        else:
            return may_close and self._closes(character)
        return True

    def _closes(self, character: str) -> bool:
        if character != {"{": "}", "[": "]"}[self._stack[-1]]:
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _end_string(self) -> None:
        if self._is_key:
            self._expect = _Expect.COLON
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._expect = _Expect.NEXT
        self.done = not self._stack


_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r"u[0-9a-fA-F]{0,4}")
_OF_NUMBER = frozenset("+-.0123456789eE")
_START_OF_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_NUMBER = 4300  # characters: Python's limit for integers
_LITERALS = ("true", "false", "null")


class AnswerOutput:
    """Parsed output that has not been returned yet. Spaces before a call and around reasoning are dropped.

    With ``stream_calls``, the pieces of a call are returned as they are read; otherwise, the call is returned when it
    is complete. ``control``: the texts of control tokens, which never become content. ``reasoning_format``: see
    ``ChatParser``.
    """

    def __init__(
        self,
        buffer: TextBuffer,
        stream_calls: bool,
        control: frozenset[str] = frozenset(),
        reasoning_format: str = "auto",
    ) -> None:
        self._buffer = buffer
        self._separates = reasoning_format != "none"
        self._shows_marks = reasoning_format in ("none", "deepseek-legacy")
        self.opened = (
            ""  # a marker of reasoning that the prompt ends with, and that no text of it follows yet
        )
        self._stream_calls = stream_calls
        self._control = _pattern(tuple(sorted(control)))
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._spaces = ""  # at the end of content: dropped if a call follows
        self._reasoning_spaces = ""
        self._after_call = False
        self._any_content = False
        self._any_reasoning = False
        self._begun = False  # a part of a call was returned, and the call is not complete
        self._n_calls = 0
        self._held: list[ToolCallDelta] = []  # of the call that is being read
        self.ended_in_call = False  # the text ended within a call of which a part was returned
        self.drops_incomplete = (
            False  # a call that the end of the text cuts off is dropped, else it is content
        )

    def piece(self) -> ChatPiece:
        """Return the output added since ``piece`` was last called."""
        deltas: list[ToolCallDelta] = []
        for delta in self._deltas:  # joins the pieces of one call
            if deltas and deltas[-1].index == delta.index:
                last = deltas[-1]
                deltas[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
            else:
                deltas.append(delta)
        piece = ChatPiece("".join(self._content), "".join(self._reasoning), tuple(deltas))
        self._content, self._reasoning, self._deltas = [], [], []
        return piece

    def content(self, text: str) -> None:
        """Add text of the answer."""
        if self._after_call and not self._any_content:
            text = text.lstrip()
        visible = text.rstrip()
        if visible:
            self._content.append(self._spaces + visible)
            self._spaces = text[len(visible) :]
            self._after_call = False
            self._any_content = True
        else:
            self._spaces += text

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        self.mark(text)
        if not self._separates:
            return
        visible = text.rstrip()
        if visible:
            self._reasoning.append(self._reasoning_spaces + visible)
            self._reasoning_spaces = text[len(visible) :]
            self._any_reasoning = True
        else:
            self._reasoning_spaces += text

    def mark(self, text: str) -> None:
        """Add a marker of reasoning or the spaces around it. These are content only if reasoning is."""
        if self._shows_marks and text:
            self.content(self.opened + text)
            self.opened = ""

    def thought(self) -> None:
        """Begin reasoning, separated from earlier reasoning by an empty line."""
        self._reasoning_spaces = "\n\n" if self._any_reasoning else ""

    def paragraph(self) -> None:
        """Begin another message, separated from the previous one by an empty line."""
        if not self._shows_marks:
            self._spaces = "\n\n" if self._any_content else ""
        self._reasoning_spaces = "\n\n" if self._any_reasoning else ""

    def end_text(self) -> None:
        """End the text at a marker: spaces before the marker are not part of the text."""
        self._spaces = ""

    def finish(self) -> None:
        """End the text."""
        if self._spaces and not self._after_call:
            self._content.append(self._spaces)
        self._spaces = ""

    # ---- calls
    @property
    def n_calls(self) -> int:
        """The number of calls that were read."""
        return self._n_calls

    def hold(self) -> bool:
        """Hold back each of the next calls until it is complete. Return the value for ``release``."""
        before, self._stream_calls = self._stream_calls, False
        return before

    def release(self, before: bool) -> None:
        """End ``hold``."""
        self._stream_calls = before

    def begin(self, name: str, id_: str | None) -> None:
        """Begin a call. ``id_``: the model's own id, if already known."""
        self._add(ToolCallDelta(self._n_calls, id_ or new_call_id(), name, ""))

    def identify(self, id_: str) -> None:
        """Set the model's own id of the current call. Has no effect once a part of the call was returned."""
        if self._held:
            self._held[0] = replace(self._held[0], id=id_)

    def more(self, text: str) -> None:
        """Add the next piece of the JSON text of the call's arguments."""
        self._add(ToolCallDelta(self._n_calls, None, None, text))

    def _add(self, delta: ToolCallDelta) -> None:
        if self._stream_calls:
            self._called(delta)
        else:
            self._held.append(delta)

    def _called(self, delta: ToolCallDelta) -> None:
        self._deltas.append(delta)
        self._spaces = ""
        self._after_call = True
        self._begun = True
        self._buffer.record()

    def end(self) -> None:
        """Complete the call."""
        for delta in self._held:
            self._called(delta)
        self._held = []
        self._begun = False
        self._n_calls += 1
        self._buffer.record()

    def give_back(self) -> None:
        """Turn text that was wrongly read as a call into content."""
        if self._begun:  # it stays unfinished
            self._begun = False
            self._n_calls += 1
            if self._buffer.ended:
                self.ended_in_call = True
                self._drop()
                return
        self._held = []
        if self.drops_incomplete and self._buffer.ended:
            self._drop()
        else:
            self.content(self.without_control(self._buffer.recorded()))

    def without_control(self, text: str) -> str:
        """Return the text without control tokens."""
        return self._control.sub("", text)

    def _drop(self) -> None:
        """Drop an incomplete call and the rest of the text, which belongs to it."""
        self._buffer.recorded()
        self._buffer.take(self._buffer.n)


class HeldCalls(AnswerOutput):
    """Calls that may prove to be text. Each has a name, the model's id, and the text of its arguments."""

    def __init__(self, buffer: TextBuffer) -> None:
        super().__init__(buffer, False)
        self.calls: list[tuple[str, str | None, str]] = []

    def begin(self, name: str, id_: str | None) -> None:
        """See the base class."""
        self.calls.append((name, id_, ""))

    def identify(self, id_: str) -> None:
        """See the base class."""
        name, _, arguments = self.calls[-1]
        self.calls[-1] = name, id_, arguments

    def more(self, text: str) -> None:
        """See the base class."""
        name, id_, before = self.calls[-1]
        self.calls[-1] = name, id_, before + text

    def end(self) -> None:
        """See the base class."""

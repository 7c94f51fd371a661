"""Reads text that arrives in parts. The result does not depend on where the parts were cut.

Readers are generators: they yield where they need more text. A decision depends only on text that has arrived, and
later text never reverses the decision.

``AnswerOutput`` collects the content, reasoning and calls that readers find.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeVar

from llamapipe.chat.results import ChatPiece, ToolCallDelta, decoded_json, new_call_id

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACES = " \t\r\n"
_SPACE_RUN = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):  # noqa: N818  (not an error: the text is something else)
    """The text does not have the form that a reader expects."""


class TextBuffer:
    """Text that has arrived and has not been consumed.

    ``ended``: no more text follows. ``cut_off``: the model was stopped before it had finished.
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
        """Return whether the next character has arrived and is one of ``characters``."""
        return self.at < len(self.text) and self.text[self.at] in characters

    def take(self, n: int) -> str:
        """Consume and return ``n`` characters."""
        text = self.text[self.at : self.at + n]
        self.at += n
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def unread(self, text: str) -> None:
        """Put ``text`` back before the rest, to be read again."""
        self.text, self.at = text + self.rest, 0

    def record(self, start: str = "") -> None:
        """Start recording consumed text. ``start``: the beginning of the record."""
        self._recorded = [start]

    def recorded_so_far(self) -> str:
        """Return the text consumed since ``record``; continue recording."""
        return "".join(self._recorded or ())

    def recorded(self) -> str:
        """Return the text consumed since ``record``; stop recording."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    # ---- readers
    def until(
        self,
        markers: tuple[str, ...],
        show: Callable[[str], None],
        shows_partial: bool = True,
        takes_marker: bool = True,
    ) -> Reading[str | None]:
        """Consume text up to and including the first marker, and pass the text before it to ``show``.

        Returns the marker; None if the text ended first. Text that may be the start of a marker is held back until more
        text decides. ``shows_partial``: show an incomplete marker at the end of the text, unless the text was cut off.
        ``takes_marker``: consume the marker, too; if False, the marker is the next text.
        """
        pattern = _pattern(markers)
        while True:
            match = pattern.search(self.text, self.at)
            safe = match.start() if match else len(self.text)
            is_whole = self.ended and (match is not None or shows_partial)
            held = self._start_of_marker(markers, safe)
            # An incomplete marker may begin with a whole one, as in "<|close|>respon".
            is_longer = match is None or (held <= match.start() and match.end() < len(self.text))
            is_cut = self.cut_off and is_longer and _PART_OF_MARKER.match(self.text, held)
            if is_whole and not is_cut:
                held = len(self.text)
            elif match and is_run(match.group()) and match.end() == len(self.text):
                held = match.start()  # one more of the marker's character would move the marker
            if match and match.start() < held:  # later text cannot make it a longer marker
                show(self.take(match.start() - self.at))
                return self.take(len(match.group())) if takes_marker else match.group()
            show(self.take(min(held, safe) - self.at))
            if self.ended:
                self.take(self.n)
                return None
            yield

    def _start_of_marker(self, markers: tuple[str, ...], end: int) -> int:
        """Return the index of the first incomplete marker at the text's end, or the text's length."""
        text = self.text
        longest = max(map(len, markers), default=1)
        for at in range(max(self.at, len(text) - longest + 1), min(len(text), end + 1)):
            tail = text[at:]
            if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
                return at
        return len(text)

    def ahead(self, text: str) -> Reading[bool]:
        """Return whether ``text`` follows; consume nothing."""
        while True:
            if self.text.startswith(text, self.at):
                return True
            if self.ended or self.n >= len(text) or not text.startswith(self.rest):
                return False
            yield

    def skip(self, text: str) -> Reading[bool]:
        """Consume ``text`` if it follows; return whether it did."""
        is_next = yield from self.ahead(text)
        if is_next:
            self.take(len(text))
        return is_next

    def expect(self, text: str) -> Reading[None]:
        """Consume ``text`` and the spaces before it; spaces at its ends are optional. Raises Malformed without it.

        If ``text`` ends with a space, the spaces after it are consumed as well.
        """
        yield from self.spaces()
        inner = text.strip(_SPACES)
        if inner:
            if not (yield from self.skip(inner)):
                raise Malformed
            if text[-1:] in _SPACES:
                yield from self.spaces()

    def take_while(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume and return the longest text that matches ``pattern``, a repetition of single characters."""
        taken = ""
        while True:
            match = pattern.match(self.text, self.at)
            taken += self.take(len(match.group()) if match else 0)
            if self.n or self.ended:
                return taken
            yield

    def spaces(self) -> Reading[str]:
        """Consume and return spaces, tabs and newlines."""
        return self.take_while(_SPACE_RUN)

    def one_of(self, texts: Iterable[str]) -> Reading[str]:
        """Consume and return one of ``texts``, none of which is a prefix of another.

        Raises Malformed as soon as none of them can follow.
        """
        while True:
            for text in texts:
                if self.text.startswith(text, self.at):
                    return self.take(len(text))
            may_follow = (len(text) > self.n and text.startswith(self.rest) for text in texts)
            if self.ended or not any(may_follow):
                raise Malformed
            yield

    def json_value(self, show: Callable[[str], object] = lambda _: None) -> Reading[Any]:
        """Consume one JSON value, and pass the text of an object, an array or a string to ``show`` as it arrives.

        Returns the decoded value. Values of other types are passed to ``show`` when they are complete. Raises Malformed
        at the first character that cannot be part of JSON.
        """
        if not (yield from self.some()):
            raise Malformed
        is_open = self.next_is('{["')
        scanner = _JsonScanner()
        text = ""
        while True:
            piece = self.take(scanner.scan(self.text, self.at) - self.at)
            text += piece
            if scanner.failed:
                raise Malformed
            if scanner.done or self.ended:
                break
            if piece and is_open:
                show(piece)
            yield
        if not scanner.done and is_open:
            raise Malformed
        try:
            value = decoded_json(text)
        except (ValueError, RecursionError):
            raise Malformed from None
        show(piece if is_open else text)
        return value

    def some(self) -> Reading[bool]:
        """Wait for text; return False if it has ended."""
        while not self.n and not self.ended:
            yield
        return self.n > 0


# At the end of an answer that was cut off, an incomplete marker that begins like this is dropped. Other text, such as a
# word or a single character, may belong to the answer.
_PART_OF_MARKER = re.compile(r"\W\S")


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(markers, key=len, reverse=True)
    # In "</b>>>>", the last three characters are the marker ">>>".
    ends = (f"(?!{re.escape(marker[0])})" if is_run(marker) else "" for marker in longest_first)
    return re.compile(
        "|".join(map("".join, zip(map(re.escape, longest_first), ends, strict=True))) or r"(?!)"
    )


def is_run(marker: str) -> bool:
    """Return whether a marker repeats one character, like ``>>>``."""
    return len(marker) > 1 and len(set(marker)) == 1


class _Expect(Enum):
    """The part of a JSON value that the next character belongs to."""

    VALUE = auto()
    FIRST_ITEM = auto()  # an item, or the end of the array
    NEXT_ITEM = auto()  # a comma, or the end of the array
    KEY = auto()
    FIRST_KEY = auto()  # a key, or the end of the object
    NEXT_MEMBER = auto()  # a comma, or the end of the object
    COLON = auto()
    STRING = auto()  # the rest of a string
    ESCAPE = auto()
    NUMBER = auto()
    LITERAL = auto()
    END = auto()  # the value is complete


_VALUES = {
    "{": _Expect.FIRST_KEY,
    "[": _Expect.FIRST_ITEM,
    '"': _Expect.STRING,
    **dict.fromkeys("-0123456789", _Expect.NUMBER),
    **dict.fromkeys("tfn", _Expect.LITERAL),
}
# The part that each character begins. END: the character ends the object or array.
_FOLLOWING = {
    _Expect.VALUE: _VALUES,
    _Expect.FIRST_ITEM: {**_VALUES, "]": _Expect.END},
    _Expect.NEXT_ITEM: {",": _Expect.VALUE, "]": _Expect.END},
    _Expect.KEY: {'"': _Expect.STRING},
    _Expect.FIRST_KEY: {'"': _Expect.STRING, "}": _Expect.END},
    _Expect.NEXT_MEMBER: {",": _Expect.KEY, "}": _Expect.END},
    _Expect.COLON: {":": _Expect.VALUE},
}


class _JsonScanner:
    """Follows the syntax of one JSON value to its end, or to the first character that cannot be part of the value."""

    def __init__(self) -> None:
        self.failed = False
        self._expect = _Expect.VALUE
        self._after = [_Expect.END]  # the parts after the current value or key and those around it
        self._token = ""  # the characters of an escape, a number or a literal

    @property
    def done(self) -> bool:
        """True if the value is complete."""
        return self._expect is _Expect.END

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
                self._expect = self._after[-1]  # this character belongs to the next part
                continue
            if not self._accepts(text[at]):
                self.failed = True
                break
            at += 1
        return at

    def _accepts(self, character: str) -> bool:
        """Take one character; return False if the character cannot be the next one."""
        expect = self._expect
        if expect is _Expect.STRING:
            self._expect, self._token = self._after[-1] if character == '"' else _Expect.ESCAPE, ""
            return character in '"\\'  # no control character
        if expect in (_Expect.ESCAPE, _Expect.NUMBER, _Expect.LITERAL):
            self._token += character
            return self._accepts_token()
        if character in _SPACES:
            return True
        following = _FOLLOWING[expect].get(character)
        if following is None:
            return False
        if character in ":]}":
            self._after.pop()
        elif expect in (_Expect.KEY, _Expect.FIRST_KEY):
            self._after.append(_Expect.COLON)
        elif character in "[{":
            self._after.append(_Expect.NEXT_ITEM if character == "[" else _Expect.NEXT_MEMBER)
        self._expect = self._after[-1] if following is _Expect.END else following
        self._token = character
        return True

    def _accepts_token(self) -> bool:
        token = self._token
        if self._expect is _Expect.ESCAPE:
            if token[0] in '"\\/bfnrt' or len(token) == 5:
                self._expect = _Expect.STRING
            return token[0] in '"\\/bfnrt' or _ESCAPE.fullmatch(token) is not None
        if self._expect is _Expect.NUMBER:
            return len(token) <= _MAX_NUMBER and _START_OF_NUMBER.fullmatch(token) is not None
        if token in _LITERALS:
            self._expect = self._after[-1]
        return any(literal.startswith(token) for literal in _LITERALS)


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
        # The start marker of reasoning at the end of the prompt, until text of the reasoning follows.
        self.opened = ""
        self._stream_calls = stream_calls
        self._control = _pattern(tuple(sorted(control)))
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._spaces = ""  # the spaces at the end of content, which are dropped if a call follows
        self._reasoning_spaces = ""
        self._after_call = False
        self._any_content = False
        self._any_reasoning = False
        self._begun = False  # a part of a call was returned, and the call is not complete
        self.n_calls = 0  # the number of calls that were read
        self._held: list[ToolCallDelta] = []  # the deltas of the call that is being read
        self.ended_in_call = False  # the text ended within a call of which a part was returned
        # True if a call that the end of the text cuts off is dropped; False if such a call becomes content.
        self.drops_incomplete = False

    def piece(self) -> ChatPiece:
        """Return the output added since ``piece`` was last called."""
        calls = (list(parts) for _, parts in groupby(self._deltas, lambda delta: delta.index))
        deltas = [replace(parts[0], arguments="".join(part.arguments for part in parts)) for parts in calls]
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
        """Add a marker of reasoning or the spaces around it. They become content only if reasoning does."""
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
        """End the output. Held spaces become content, except after a call."""
        if self._spaces and not self._after_call:
            self._content.append(self._spaces)
        self._spaces = ""

    # ---- calls
    @contextmanager
    def whole_calls(self) -> Iterator[None]:
        """Hold back each call that is read in this context until it is complete."""
        before, self._stream_calls = self._stream_calls, False
        try:
            yield
        finally:
            self._stream_calls = before

    def begin(self, name: str, id_: str | None) -> None:
        """Begin a call. ``id_``: the model's own id, if already known."""
        self._add(ToolCallDelta(self.n_calls, id_ or new_call_id(), name, ""))

    def identify(self, id_: str) -> None:
        """Set the model's own id of the current call. Has no effect once a part of the call was returned."""
        if self._held:
            self._held[0] = replace(self._held[0], id=id_)

    def more(self, text: str) -> None:
        """Add the next piece of the JSON text of the call's arguments."""
        self._add(ToolCallDelta(self.n_calls, None, None, text))

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
        self.n_calls += 1
        self._buffer.record()

    def give_back(self) -> None:
        """Turn text that was wrongly read as a call into content."""
        if self._begun:  # the returned part of the call stays unfinished
            self._begun = False
            self.n_calls += 1
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
    """Collects calls that may prove to be text, each with its name, the model's id, and the text of its arguments."""

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

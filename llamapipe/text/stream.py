"""Turns the token pieces of one request into the text that may be shown.

A piece may begin or end inside a UTF-8 character, so a character appears once it is complete. Text that may still
become part of a stop string is held back. The classes are plain Python. Feed each object from one thread at a time.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache

from llamapipe._messages import quoted


class Utf8Assembler:
    """Turns a series of byte pieces into text; holds a character back until its last byte arrives.

    The joined results of ``feed`` and ``finish`` equal ``b"".join(pieces).decode("utf-8", "replace")`` for any bytes,
    however they are cut. ``feed`` immediately returns U+FFFD for bytes that can no longer become a character, so at
    most three bytes are held back.

    One object serves one stream. It has no lock: feed it from one thread at a time.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    def __repr__(self) -> str:
        return f"Utf8Assembler(pending={self._pending!r})"

    @property
    def pending(self) -> bytes:
        """The bytes of a character that is not complete yet (0 to 3)."""
        return self._pending

    def feed(self, piece: bytes) -> str:
        """Return the characters that ``piece`` completes or contains: often the whole piece, sometimes ``""``."""
        if self._pending:
            piece = self._pending + piece
        text, n_used = utf_8_decode(piece, "replace", False)
        self._pending = piece[n_used:]
        return text

    def finish(self) -> str:
        """Return U+FFFD if the input ended inside a character, else ``""``; the next ``feed`` starts a new text."""
        if not self._pending:
            return ""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class TextOffsets:
    """Returns the character offset of each token of one text, in order.

    The offset of a token is the index of the character that contains the token's first byte. Tokens that split a
    character all have the character's index. ``offset``: the offset of the text's first character. ``skip_space``: a
    space at the beginning is not shown. ``known``: the offsets of tokens before the text, as from ``prompt_offsets``.
    """

    def __init__(self, offset: int = 0, skip_space: bool = False, known: Sequence[int] = ()) -> None:
        self._offset = offset
        self._skip_space = skip_space
        self._known = deque(known)
        self._assembler = Utf8Assembler()

    def __repr__(self) -> str:
        return f"TextOffsets(offset={self._offset})"

    def next(self, piece: bytes) -> int:
        """Return the offset of the next token. ``piece``: the token's bytes."""
        if self._known:
            return self._known.popleft()
        offset = self._offset
        if self._skip_space and piece:
            self._skip_space = False
            piece = piece.removeprefix(b" ")
        self._offset += len(self._assembler.feed(piece))
        return offset


def prompt_offsets(text: str, pieces: Iterable[tuple[bytes, bytes]]) -> list[int]:
    """Return the offset in ``text`` of each of its tokens, in characters, as ``TextOffsets`` counts.

    ``pieces``: for each token, its bytes, and its name if it is a control token, else its bytes again. Tokenizing may
    add a space before a text or after a control token, add control tokens, and drop spaces next to them.
    """
    data = text.encode("utf-8", "replace")
    at, offset = 0, 0  # in bytes, in characters
    offsets: list[int] = []
    for piece, written in pieces:
        forms = [form for form in (piece, piece[1:] if piece[:1] == b" " else b"", written) if form]
        begin = at
        if not any(data.startswith(form, at) for form in forms):
            while data[begin : begin + 1].isspace():
                begin += 1
            if not any(data.startswith(form, begin) for form in forms):
                begin = at
        match = next((len(form) for form in forms if data.startswith(form, begin)), None)
        if match is None:  # the token is not in the text, or has different bytes there
            match = 0 if piece in (b"", b" ") else min(len(piece), len(data) - at)
        offset += _n_begun(data[at:begin])
        # True inside a character that began in an earlier token.
        is_inside = begin < len(data) and 0x80 <= data[begin] < 0xC0
        offsets.append(offset - is_inside)
        at = begin + match
        offset += _n_begun(data[begin:at])
    return offsets


def _n_begun(data: bytes) -> int:
    """Return the number of characters that begin in these bytes."""
    return sum(not 0x80 <= byte < 0xC0 for byte in data)


class StopChecker:
    """Passes text through until one of ``stops`` is complete.

    The first stop string to be complete ends the text. If several end at the same character, the longest of them ends
    the text. So the result does not depend on how the text was cut into parts, no look-ahead is needed, and the
    returned text contains no stop string.

    The checker holds back exactly the longest tail of the text that begins a stop string. Its work is proportional to
    the length of the text and does not depend on the number of stop strings or their overlaps.

    Strings are compared by code points, without normalisation or case folding. One object serves one stream. It has
    no lock: feed it from one thread at a time. Checkers with the same stop strings share their tables.

    Raises TypeError for a ``str`` in place of a sequence and for items that are not ``str``, ValueError for an empty
    stop string.
    """

    __slots__ = ("_automaton", "_held", "_matched", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise TypeError(
                f"stop: expected a sequence of strings, got the string {quoted(stops)}; pass [{quoted(stops)}]"
            )
        for stop in stops:
            if not isinstance(stop, str):
                raise TypeError(f"stop: expected strings, got {quoted(stop)} of type {type(stop).__name__}")
            if not stop:
                raise ValueError("stop: an empty string would end every text before it begins; leave it out")
        self._automaton = _automaton(tuple(stops))
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def __repr__(self) -> str:
        return f"StopChecker(matched={self._matched!r}, held={self._held!r})"

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matched

    @property
    def held(self) -> str:
        """The tail held back because it may become a stop string."""
        return self._held

    def feed(self, text: str) -> str:
        """Take the next part of the text; return the text that may be shown now, ``""`` after a match."""
        automaton = self._automaton
        state = self._state
        if not state and automaton.first_characters.isdisjoint(text):
            return text if self._matched is None else ""
        if self._matched is not None:
            return ""

        children, fallback, match = automaton.children, automaton.fallback, automaton.match
        for position, character in enumerate(text):
            while (child := children[state].get(character)) is None and state:
                state = fallback[state]
            state = child or 0
            stop = match[state]
            if stop is not None:
                shown = (self._held + text[: position + 1])[: -len(stop)]
                self._matched, self._held, self._state = stop, "", 0
                return shown
        self._state = state
        shown = self._held + text
        n_shown = len(shown) - automaton.depth[state]
        self._held = shown[n_shown:]
        return shown[:n_shown]

    def finish(self) -> str:
        """Return the held tail, which can no longer become a stop string because generation has ended."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """The Aho-Corasick automaton of a set of strings. A state is the text's longest tail that begins one of them.

    Source: A. V. Aho, M. J. Corasick, Efficient string matching, Communications of the ACM 18 (6), 1975. State 0 is the
    empty tail. The automaton is immutable after its construction, so checkers of any thread can share it.
    """

    __slots__ = ("children", "depth", "fallback", "first_characters", "match")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]  # length of the state's tail in characters, which must be held back
        self.fallback: list[int] = [0]  # state of the next shorter tail that begins a string
        self.match: list[str | None] = [None]  # the longest string that ends in this state
        for string in strings:
            self._insert(string)
        self._link()
        self.first_characters = frozenset(self.children[0])

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            child = self.children[state].get(character)
            if child is None:
                child = len(self.children)
                self.children[state][character] = child
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.fallback.append(0)
                self.match.append(None)
            state = child
        self.match[state] = string

    def _link(self) -> None:
        """Fill ``fallback``, and ``match`` of the states whose tail ends with a shorter string, breadth first."""
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            shorter = self.fallback[state]
            if self.match[state] is None:
                self.match[state] = self.match[shorter]
            for character, child in self.children[state].items():
                candidate = shorter
                while character not in self.children[candidate] and candidate:
                    candidate = self.fallback[candidate]
                self.fallback[child] = self.children[candidate].get(character, 0)
                queue.append(child)


# Requests with the same stop strings share one automaton.
_automaton = lru_cache(maxsize=64)(_Automaton)


class TextStream:
    """Joins pieces into whole characters and ends the text before the first stop string.

    The joined results of ``push`` and ``finish`` are the text of all pieces (UTF-8, invalid bytes as U+FFFD) before the
    stop string. ``Utf8Assembler`` and ``StopChecker`` describe which text is held back. ``skip_space``: leave out a
    space at the beginning.

    One object serves one request. It has no lock: feed it from one thread at a time. In the engine, the engine thread
    feeds it once per token.

    Raises TypeError and ValueError for invalid stop strings, as ``StopChecker`` does.
    """

    __slots__ = ("_assembler", "_checker", "skip_space", "stopped")

    stopped: bool  # a plain attribute, because it is read once per token
    """True once a stop string is complete. No more text is returned; generation can end."""

    def __init__(self, stops: Sequence[str] = (), skip_space: bool = False) -> None:
        self._assembler = Utf8Assembler()
        self._checker = StopChecker(stops) if stops else None
        self.skip_space = skip_space
        self.stopped = False

    def __repr__(self) -> str:
        return f"TextStream(stopped={self.stopped}, pending={self._assembler.pending!r}, held={self.held!r})"

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return None if self._checker is None else self._checker.matched

    @property
    def held(self) -> str:
        """Characters held back because they may become a stop string."""
        return "" if self._checker is None else self._checker.held

    def copy(self) -> TextStream:
        """Return an independent stream in the same state."""
        new = copy(self)
        new._assembler = copy(self._assembler)
        new._checker = copy(self._checker)
        return new

    def push_shown(self, text: bytes) -> None:
        """Take bytes whose complete characters were shown before. An incomplete character at the end is held back."""
        self._assembler.feed(text)
        if text:
            self.skip_space = False

    def push(self, piece: bytes) -> str:
        """Take a token's bytes; return the text that may be shown now, sometimes ``""``."""
        text = self._assembler.feed(piece)
        if self.skip_space and piece:
            self.skip_space = False
            text = text.removeprefix(" ")
        checker = self._checker
        if checker is None:
            return text
        text = checker.feed(text)
        if checker.matched is not None:
            self.stopped = True
        return text

    def finish(self) -> str:
        """End the text; return the text that was held back. An incomplete character becomes U+FFFD."""
        text = self._assembler.finish()
        checker = self._checker
        if checker is None:
            return text
        text = checker.feed(text) + checker.finish()
        self.stopped = checker.matched is not None
        return text

"""The text of one request: takes token pieces, returns the text that may be shown.

It combines the assembler of characters with the checker of stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from llamapipe.text.detokenizer import Utf8Assembler
from llamapipe.text.stop import StopChecker


class TextStream:
    """Joins pieces into whole characters and ends the text before the first stop string.

    The results of `push` and `finish`, joined, are the text of all pieces (UTF-8, invalid bytes as U+FFFD) up to the
    stop string, which is not included. `Utf8Assembler` and `StopChecker` describe which text is held back.

    One object serves one request. It has no lock: feed it from one thread at a time (in the engine, the engine thread,
    once per token).

    Raises TypeError and ValueError for wrong stop strings, as `StopChecker` does.
    """

    __slots__ = ("_assembler", "_checker", "stopped")

    stopped: bool  # a plain attribute, because it is read once per token
    """True once a stop string is complete. No more text is returned; generation can end."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._assembler = Utf8Assembler()
        self._checker = StopChecker(stops) if stops else None
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
        """An independent stream in the same state."""
        new = copy(self)
        new._assembler = copy(self._assembler)
        new._checker = copy(self._checker)
        return new

    def push_shown(self, text: bytes) -> None:
        """Take bytes whose whole characters were shown before; only the last ones matter."""
        self._assembler.feed(text)

    def push(self, piece: bytes) -> str:
        """Take a token's bytes; return the text that may be shown now, sometimes ``""``."""
        text = self._assembler.feed(piece)
        checker = self._checker
        if checker is None:
            return text
        text = checker.feed(text)
        if checker.matched is not None:
            self.stopped = True
        return text

    def finish(self) -> str:
        """Return the text held back so far, because generation has ended; an incomplete character becomes U+FFFD."""
        text = self._assembler.finish()
        checker = self._checker
        if checker is None:
            return text
        text = checker.feed(text) + checker.finish()
        self.stopped = checker.matched is not None
        return text

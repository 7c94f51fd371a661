"""The text of one request: token pieces in, text that may be shown out."""

from __future__ import annotations

from collections.abc import Sequence

from llamapipe.text.detokenizer import Utf8Assembler
from llamapipe.text.stop import StopChecker


class TextStream:
    """Joins pieces into whole characters and ends the text before the first stop string.

    What `push` and `finish` return, joined, is the text of all pieces (UTF-8, bad bytes as U+FFFD) up to the
    stop string, without it. See `Utf8Assembler` and `StopChecker` for what is kept back and until when.

    One object serves one request; it has no lock and belongs to whichever thread feeds it (in the engine, the
    engine thread, once a token).

    Raises: what `StopChecker` raises for bad stop strings.
    """

    __slots__ = ("_assembler", "_checker", "stopped")

    stopped: bool  # a plain attribute: read once a token
    """True once a stop string is complete: nothing comes out any more, generation can end."""

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
        """Characters kept back because they may become a stop string."""
        return "" if self._checker is None else self._checker.held

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
        """Return what was kept back: generation ended. An incomplete character comes out as U+FFFD."""
        text = self._assembler.finish()
        checker = self._checker
        if checker is None:
            return text
        text = checker.feed(text) + checker.finish()
        self.stopped = checker.matched is not None
        return text

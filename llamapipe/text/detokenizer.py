"""Joins token pieces into whole characters: a piece may begin or end inside a UTF-8 character."""

from __future__ import annotations

from codecs import utf_8_decode


class Utf8Assembler:
    """Turns a series of byte pieces into text; holds a character back until its last byte arrives.

    The results of `feed` and `finish`, joined, equal ``b"".join(pieces).decode("utf-8", "replace")`` for any bytes cut
    in any way. Bytes that can no longer become a character are returned as U+FFFD at once, so at most three bytes are
    held back.

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
        """Return the characters that `piece` completes, in order; often the whole piece, sometimes ``""``."""
        if self._pending:
            piece = self._pending + piece
        text, n_used = utf_8_decode(piece, "replace", False)
        self._pending = piece[n_used:]
        return text

    def finish(self) -> str:
        """Return U+FFFD if the input ended inside a character, else ``""``; the next `feed` starts a new text."""
        if not self._pending:
            return ""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

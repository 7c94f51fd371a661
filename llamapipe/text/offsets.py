"""Finds where in a text each of its tokens begins."""

from __future__ import annotations

from llamapipe.text.detokenizer import Utf8Assembler


class TextOffsets:
    """Counts characters through the tokens of one text, in their order.

    The offset of a token is the index of the character that holds its first byte: where a character has several tokens,
    all of them have its index. ``skip_space``: the first piece begins with a space that is not in the text, which
    some vocabularies add.
    """

    def __init__(self, offset: int = 0, skip_space: bool = False) -> None:
        self._offset = offset
        self._skip_space = skip_space
        self._assembler = Utf8Assembler()

    def __repr__(self) -> str:
        return f"TextOffsets(offset={self._offset})"

    def next(self, piece: bytes) -> int:
        """The offset of the next token."""
        offset = self._offset
        if self._skip_space and piece:
            self._skip_space = False
            piece = piece.removeprefix(b" ")
        self._offset += len(self._assembler.feed(piece))
        return offset

"""Writes to a terminal with only the features that it has: colours, redrawing, width, characters."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Mapping
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_ASCII = {
    "│": "|",
    "─": "-",
    "✓": "+",
    "■": "x",
    "…": "...",
    "█": "#",
    "░": ".",
    "·": "-",
}
# Characters of width zero that only change their neighbours: soft hyphen, joiners and non-joiners (Persian words, Indic
# letters, emoji of several parts), and direction marks, which have no lasting effect, unlike embeddings.
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060"


class Terminal:
    """A text stream and the features that it supports.

    ``stream``: usually ``sys.stdout``. ``environ``: read for ``NO_COLOR`` (https://no-color.org) and ``TERM``.

    Colours and redrawing need a terminal whose ``TERM`` is not ``dumb``. ``NO_COLOR`` turns off only colours.
    """

    def __init__(self, stream: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self._stream = stream
        self.redraws = stream.isatty() and environ.get("TERM", "") not in ("", "dumb")
        self.colours = self.redraws and not environ.get("NO_COLOR")
        self._unicode = _can_encode(stream, "".join(_ASCII))

    def __repr__(self) -> str:
        return f"Terminal(redraws={self.redraws}, colours={self.colours}, columns={self.columns})"

    @property
    def columns(self) -> int:
        """The width in characters: from the terminal or ``$COLUMNS``, else 100."""
        return shutil.get_terminal_size((100, 24)).columns

    @property
    def lines(self) -> int:
        """The height in lines: from the terminal or ``$LINES``, else 24."""
        return shutil.get_terminal_size((100, 24)).lines

    def style(self, text: str, *names: str) -> str:
        """Return ``text`` in the named styles (bold, dim and four colours), or plain if colours are off."""
        if not self.colours or not names or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"

    def symbol(self, character: str) -> str:
        """Return ``character``, or an ASCII substitute if the stream cannot write it."""
        return character if self._unicode else _ASCII[character]

    def clip(self, text: str, n_before: int) -> str:
        """Return ``text`` cut to fit on one line after ``n_before`` characters."""
        width = self.columns - 1 - n_before
        dots = self.symbol("…")
        return text if len(text) <= width else text[: max(width - len(dots), 0)] + dots

    def text(self, text: str) -> str:
        """Return a model's text in a form that is safe to write: on a terminal, control characters are replaced."""
        if not self._stream.isatty() or text.isprintable():
            return text
        return "".join(c if c in "\n\t" or not _is_control(c) else "\ufffd" for c in text)

    def write(self, text: str) -> None:
        """Write a text and flush the stream."""
        self._stream.write(text)
        self._stream.flush()

    def redraw(self, text: str = "") -> None:
        """Replace the current line if the terminal can do that; else do nothing."""
        if self.redraws:
            self.write(f"\r\x1b[2K{text}")

    def line(self, text: str = "") -> None:
        """Write one line."""
        self.write(text + "\n")


class WordWrap:
    """Writes text that arrives in pieces, and wraps it between words at the terminal's width."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._column = 0
        self._word = ""  # not written yet, because the word may continue
        self._styles: tuple[str, ...] = ()
        self._written = False

    def __repr__(self) -> str:
        return f"<WordWrap column={self._column}>"

    def write(self, text: str, *styles: str) -> None:
        """Write a piece in the named styles. A change of style starts a new line."""
        if styles != self._styles:
            if self._written:
                self.end()
                self._terminal.line()
            self._styles = styles
        for character in text:
            if character not in " \n":
                if self._terminal.redraws and width(self._word + character) >= self._terminal.columns:
                    self._put_word()
                self._word += character
                continue
            self._put_word()
            if character == "\n":
                self._put("\n")
                self._column = 0
            elif not self._is_full(1):
                self._put(" ")
                self._column += 1
        if not self._terminal.redraws:
            self._put_word()

    def end(self) -> None:
        """End the line if it has text."""
        self._put_word()
        if self._column:
            self._put("\n")
        self._column = 0

    def _is_full(self, n: int) -> bool:
        return self._terminal.redraws and self._column + n >= self._terminal.columns

    def _put_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        n = width(word)
        if self._column and self._is_full(n):
            self._put("\n")
            self._column = 0
        self._put(word)
        self._column += n

    def _put(self, text: str) -> None:
        self._written = True
        self._terminal.write(self._terminal.style(text, *self._styles) if text.strip() else text)


def width(text: str) -> int:
    """Return how many columns a text takes: two for a wide character, none for one in ``_INVISIBLE``."""
    return sum(0 if _is_mark(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _is_mark(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me") or character in _INVISIBLE


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in _INVISIBLE


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

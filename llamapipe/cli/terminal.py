"""What the output can do (colours, redrawing, width, characters) and how to write to it."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Mapping
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_ASCII = {
    "│": "|",
    "─": "-",
    "●": "*",
    "✓": "+",
    "■": "x",
    "…": "...",
    "×": "x",
    "█": "#",
    "░": ".",
    "·": "-",
}


class Terminal:
    """A text stream and what may be written to it.

    Args:
        stream: usually ``sys.stdout``.
        environ: read for ``NO_COLOR`` (https://no-color.org) and ``TERM``.

    Colours and redrawing need a terminal that is not ``TERM=dumb``; ``NO_COLOR`` turns off colours alone.
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
        """Width in characters; the terminal's, ``$COLUMNS``, or 100."""
        return shutil.get_terminal_size((100, 24)).columns

    @property
    def lines(self) -> int:
        """Height in lines; the terminal's, ``$LINES``, or 24."""
        return shutil.get_terminal_size((100, 24)).lines

    def style(self, text: str, *names: str) -> str:
        """`text` in the named styles (keys: bold, dim and six colours), plain where colours are off."""
        if not self.colours or not names or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"

    def symbol(self, character: str) -> str:
        """`character`, or its ASCII stand-in where the stream cannot write it."""
        return character if self._unicode else _ASCII[character]

    def clip(self, text: str, n_before: int) -> str:
        """`text` cut to fit on one line after `n_before` characters."""
        width = self.columns - 1 - n_before
        dots = self.symbol("…")
        return text if len(text) <= width else text[: max(width - len(dots), 0)] + dots

    def text(self, text: str) -> str:
        """Model text as it may be written: on a terminal, control characters must not drive the terminal."""
        if not self._stream.isatty() or text.isprintable():
            return text
        return "".join(c if c in "\n\t" or not _is_control(c) else "\ufffd" for c in text)

    def write(self, text: str) -> None:
        """Write and flush."""
        self._stream.write(text)
        self._stream.flush()

    def line(self, text: str = "") -> None:
        """Write one line."""
        self.write(text + "\n")


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

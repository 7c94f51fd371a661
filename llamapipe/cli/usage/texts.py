"""Texts that a command works on: arguments, files and standard input. They are UTF-8 in every locale."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llamapipe.cli.options import UsageError


def read_texts(given: list[str], files: list[Path], lines: bool) -> list[str]:
    """All texts, in the order of the command line, files last; ``-`` is standard input. Raises UsageError, OSError.

    Without arguments and files, standard input is read if it is not a terminal. ``lines``: each line is a text.
    """
    texts: list[str] = []
    if not given and not files and not stdin_is_terminal() and (piped := read_stdin()):
        texts = _split(piped, lines)
    for text in given:
        texts += _split(read_stdin(), lines) if text == "-" else [given_text(text)]
    for file in files:
        texts += _split(read_file(file), lines)
    if not texts:
        raise UsageError("no text given; pass one as an argument, with -f FILE, or - for stdin")
    return texts


def given_text(text: str) -> str:
    """A text of the command line. Raises UsageError if it is not UTF-8, or the name of a model without its -m."""
    if names_model(text):
        raise UsageError(f"{text} names a model: pass it with -m")
    return utf8(os.fsencode(text), "the text")


def names_model(text: str) -> bool:
    """Whether an argument is the name of a model, and surely no text."""
    return text.lower().endswith(".gguf") and not any(map(str.isspace, text))


def stdin_is_terminal() -> bool:
    """Whether a person types; also True if there is no standard input."""
    return sys.stdin is None or sys.stdin.isatty()


def read_file(file: Path) -> str:
    """All of a file; ``-`` is standard input. Raises OSError, UsageError if it is not UTF-8."""
    return read_stdin() if str(file) == "-" else utf8(file.read_bytes(), str(file))


def read_stdin() -> str:
    """All of standard input. Raises UsageError if it is not UTF-8."""
    return "" if sys.stdin is None else utf8(sys.stdin.buffer.read(), "stdin")


def utf8(data: bytes, name: str) -> str:
    """Decodes a text, with the line ends of Unix. Raises UsageError, which calls it ``name``."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str, lines: bool) -> list[str]:
    """One text, less the line end that editors add, or one for each line that is not blank."""
    if lines:
        return [line for line in text.splitlines() if line.strip()]
    return [text.removesuffix("\n")]

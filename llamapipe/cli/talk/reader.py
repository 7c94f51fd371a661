"""Reads messages, which may have several lines, from a terminal or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llamapipe.cli.options import UsageError
from llamapipe.cli.usage.texts import utf8

_HISTORY_LINES = 1000
_QUOTES = '"""'


class Entry(NamedTuple):
    """What was entered: a message, or a command such as ``/help``."""

    text: str
    is_command: bool


def read_entry(read_line: Callable[[str], str]) -> Entry:
    """Reads one entry: a line, those that a backslash continues, or those between triple quotes.

    ``read_line``: reads a line after showing a prompt. Its EOFError is raised before the first line, and ends an entry
    that has begun. Raises UsageError for bytes that are not UTF-8.
    """
    line = read_line("> ")
    is_quoted = line.startswith(_QUOTES)
    lines = [line.removeprefix(_QUOTES)]
    with suppress(EOFError):
        if is_quoted:
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(read_line(". "))
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read_line(". "))
    if is_quoted:
        return Entry("\n".join(lines).rstrip().removesuffix(_QUOTES).strip("\n"), False)
    text = "\n".join(lines)
    return Entry(text, text.startswith("/") and "\n" not in text)


def typed_line(prompt: str) -> str:
    """A line typed at the terminal, or several that were pasted. Raises EOFError, UsageError if it is not UTF-8."""
    try:
        line = input(prompt)
    except UnicodeDecodeError as error:
        raise UsageError(f"the line is not UTF-8 text: {error}") from None
    return utf8(line.encode(sys.stdin.encoding or "utf-8", "surrogateescape"), "the line")


def piped_line(_: str) -> str:
    """A line of standard input. Raises EOFError, UsageError if it is not UTF-8."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return utf8(line, "stdin").removesuffix("\n")


class line_history:  # noqa: N801  (used like a function)
    """Line editing, with the lines of earlier conversations, where Python has readline."""

    def __init__(self) -> None:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        self._path = Path(state).expanduser() / "llamapipe" / "chat_history"

    def __enter__(self) -> None:
        with suppress(ImportError, OSError):
            import readline

            if "libedit" not in (readline.__doc__ or ""):
                # Pasted lines then are one entry. Python turns it off at the start.
                readline.parse_and_bind("set enable-bracketed-paste on")
            readline.set_history_length(_HISTORY_LINES)
            readline.read_history_file(self._path)

    def __exit__(self, *_: object) -> None:
        with suppress(ImportError, OSError):
            import readline

            self._path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(self._path)
            self._path.chmod(0o600)

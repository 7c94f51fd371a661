"""A terminal in a test: runs a command in a pseudo terminal and interprets what it writes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.run_script import heed_ctrl_c

_SEQUENCE = re.compile(r"\x1b\[(\??)(\d*(?:;\d+)*)([A-Za-z])")


class Screen:
    """The picture a terminal shows, of unlimited height; refuses sequences it does not know."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0
        self.cursor_visible = True
        self.n_styled = 0  # sequences that set colours or weights
        self.n_redraws = 0  # jumps back up

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                sequence = _SEQUENCE.match(text, at)
                assert sequence, f"unknown sequence {text[at : at + 10]!r}"
                self._control(*sequence.groups())
                at = sequence.end()
                continue
            self._character(text[at])
            at += 1

    def _character(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            while len(self.rows) <= self.row:
                self.rows.append([])
        else:
            assert character >= " ", f"unexpected control character {character!r}"
            assert self.column < self.columns, (
                f"a line is longer than the terminal: {''.join(self.rows[self.row])!r}"
            )
            row = self.rows[self.row]
            row += " " * (self.column + 1 - len(row))
            row[self.column] = character
            self.column += 1

    def _control(self, private: str, numbers: str, command: str) -> None:
        if command == "A":
            self.n_redraws += 1
            self.row -= int(numbers or 1)
            assert self.row >= 0, "moved above the first line"
        elif command == "K" and numbers == "2":
            self.rows[self.row] = []
        elif command == "m":
            self.n_styled += 1
        elif private and numbers == "25" and command in "hl":
            self.cursor_visible = command == "h"
        else:
            raise AssertionError(f"unknown sequence {private}{numbers}{command}")

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


def run_in_terminal(
    command: Sequence[str],
    *,
    columns: int,
    lines: int,
    env: Mapping[str, str],
    cwd: Path,
    interrupt_at: str | None = None,
) -> tuple[int, str]:
    """Run `command` in a pseudo terminal of that size; its exit status and all that it wrote, decoded.

    `interrupt_at`: send it SIGINT, as Ctrl-C does, once it has written this.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(env),
        cwd=cwd,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 65536):
                written += part
                if interrupt_at is not None and interrupt_at.encode() in written:
                    process.send_signal(signal.SIGINT)
                    interrupt_at = None
        except OSError:  # Linux's way to say that the other side is closed
            pass
        finally:
            os.close(ours)
        return process.wait(), written.decode()

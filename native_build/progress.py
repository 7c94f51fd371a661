"""Runs a build command: writes its output to a log, shows progress, and reports the errors in one message."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from native_build.errors import BuildError

_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
_TAIL = 30


def run(
    command: Sequence[str],
    log: TextIO,
    environment: dict[str, str],
    what: str,
    say: Callable[[str], None] | None,
) -> None:
    """Run ``command`` and write its output to ``log``. With ``say``, show its ``[k/n]`` lines as progress.

    On a terminal, one line is updated; elsewhere, a line is printed for each tenth of the work. Raises BuildError with
    the first compiler errors.
    """
    live = say is not None and sys.stderr.isatty()
    start, shown, expected = time.monotonic(), 0, 0
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line.rstrip())
            step = _STEP.match(line)
            if step is None or say is None:
                continue
            done, total = int(step[1]), int(step[2])
            if total != expected:  # a new run of ninja: CMake has added work
                shown, expected = 0, total
            seconds = int(time.monotonic() - start)
            text = f"{what} {done}/{total}, {seconds // 60}:{seconds % 60:02d}"
            if live:
                print(f"\r\x1b[K  {text}  {step[3].split('/')[-1][:50]}", end="", file=sys.stderr, flush=True)
            elif done * 10 // total > shown:
                shown = done * 10 // total
                say(text)
    if live:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    log.flush()
    if process.returncode != 0:
        errors = [line for line in lines if re.search(r"\berror\b|CMake Error|FAILED", line)][:8] or lines[
            -_TAIL:
        ]
        raise BuildError(
            f"{what} failed (exit code {process.returncode}):\n    " + "\n    ".join(errors),
            f"see {log.name}; fix the problem and run the same command with --clean",
        )

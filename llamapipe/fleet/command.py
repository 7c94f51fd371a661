"""The commands that start more processes of this program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import llamapipe
from llamapipe.errors import BackendError

ROOT = Path(llamapipe.__file__).parent.parent  # imported from there, whatever the working directory holds


def command_with(arguments: Sequence[str]) -> list[str]:
    """Return the command ``llamapipe`` with these arguments, for a process of this interpreter."""
    script = ROOT / "llamapipe_command.py"
    program = [str(script)] if script.exists() else ["-m", "llamapipe"]
    return [*interpreter(), *program, *arguments]


def interpreter() -> list[str]:
    """Return the interpreter with its own options.

    Raises BackendError in a program that was packed into one file.
    """
    if getattr(sys, "frozen", False):
        raise BackendError(
            "this program was packed with its interpreter (PyInstaller) and cannot start llamapipe's processes; serve "
            "one model in one process, or install Python and `pip install llamapipe`"
        )
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]

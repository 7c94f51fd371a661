"""Builds the commands that start more processes of this program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import llamapipe
from llamapipe.errors import BackendError

ROOT = Path(llamapipe.__file__).parent.parent  # where child processes import from

_CALL = """\
import sys
from importlib import import_module
root, module, function = sys.argv[1:]
sys.path.insert(0, root)
getattr(import_module(module), function)()
"""


def command_calling(function: Callable[[], None]) -> list[str]:
    """Return the command that calls a module's function in a new process of this interpreter. Raises BackendError."""
    return [*interpreter(), "-c", _CALL, str(ROOT), function.__module__, function.__name__]


def command_with(arguments: Sequence[str]) -> list[str]:
    """Return the command ``llamapipe`` with these arguments, for a new process of this interpreter."""
    script = ROOT / "llamapipe_command.py"
    program = [str(script)] if script.exists() else ["-m", "llamapipe"]
    return [*interpreter(), *program, *arguments]


def interpreter() -> list[str]:
    """Return the command of this interpreter, with its own options.

    Raises BackendError in a program that was packed into one file.
    """
    if getattr(sys, "frozen", False):
        raise BackendError(
            "this program was packed with its interpreter (PyInstaller) and cannot start llamapipe's processes; serve "
            "one model in one process, or install Python and `pip install llamapipe`"
        )
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]

"""Finds the interpreters on PATH that llamapipe supports: ``python -m native_build.wheels.interpreters`` lists them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIN_VERSION = (3, 10)
_NAME = re.compile(r"python3(\.\d+t?)?$")
_ASK = (
    "import json, sys, sysconfig; print(json.dumps([sys.executable, list(sys.version_info[:3]), "
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED')), sys.implementation.name]))"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter that runs."""

    path: str
    version: tuple[int, int, int]
    free_threaded: bool

    @property
    def name(self) -> str:
        """``3.14`` or ``3.14t``."""
        return f"{self.version[0]}.{self.version[1]}{'t' if self.free_threaded else ''}"


def find_interpreters(folders: Iterable[str] | None = None) -> list[Interpreter]:
    """Return the newest CPython of each minor version in ``folders`` (default: those in PATH), oldest version first."""
    folders = os.environ.get("PATH", "").split(os.pathsep) if folders is None else folders
    newest: dict[str, Interpreter] = {}
    for folder in folders:
        try:
            paths = sorted(path for path in Path(folder or ".").iterdir() if _NAME.match(path.name))
        except OSError:
            continue
        for path in paths:
            interpreter = ask(str(path))
            if interpreter is None or interpreter.version[:2] < MIN_VERSION:
                continue
            other = newest.get(interpreter.name)
            if other is None or other.version < interpreter.version:
                newest[interpreter.name] = interpreter
    return sorted(
        newest.values(), key=lambda interpreter: (interpreter.version[:2], interpreter.free_threaded)
    )


def ask(path: str) -> Interpreter | None:
    """Ask a program what it is; None if it does not run (a version manager's stand-in) or is not CPython."""
    try:
        done = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60)
        executable, version, free_threaded, implementation = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if implementation != "cpython":
        return None
    return Interpreter(executable, (version[0], version[1], version[2]), free_threaded)


if __name__ == "__main__":
    for interpreter in find_interpreters():
        sys.stdout.write(f"{interpreter.name}\t{interpreter.path}\n")

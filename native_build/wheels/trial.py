"""Tries a wheel in an empty environment: ``python -m native_build.wheels.trial WHEEL [BACKEND_WHEEL …]``.

For each interpreter on PATH that the wheel is for, it creates an empty environment, installs the wheels and their
requirements, and runs ``smoke.py``. The generated texts of all interpreters are compared.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from packaging.tags import platform_tags

from native_build.wheels.interpreters import Interpreter, ask, find_interpreters

_SMOKE = Path(__file__).with_name("smoke.py")


class TrialError(Exception):
    """A failed step, with the end of its output."""


def fits(wheel: Path, interpreter: Interpreter) -> bool:
    """Return whether the wheel's tag is for this interpreter."""
    tag, abi = wheel.stem.split("-")[-3:-1]
    if abi == "none":
        return True
    if abi == "abi3":
        return not interpreter.free_threaded and interpreter.version[1] >= int(tag.removeprefix("cp3"))
    return abi == f"cp{interpreter.name.replace('.', '')}"


def is_for_here(wheel: Path) -> bool:
    """Return whether the wheel's tag is for this system and processor."""
    platforms = set(platform_tags())
    return any(name in platforms for name in wheel.stem.split("-")[-1].split("."))


def try_wheels(
    wheels: Sequence[Path], interpreter: Interpreter, backends: Sequence[str] = (), extra: str = ""
) -> list[str]:
    """Install the wheels and run ``smoke.py``. Return its output lines. Raises TrialError with the failure's output."""
    with tempfile.TemporaryDirectory(prefix="llamapipe-trial-") as name:
        empty = Path(name)
        _run([interpreter.path, "-m", "venv", str(empty / "venv")], empty)
        python = str(empty / "venv" / "bin" / "python")
        # The newest pip is needed: an old Python's pip does not know the tags of new wheels.
        _run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], empty)
        first, *others = map(str, wheels)
        required = [f"llamapipe[{extra}] @ file://{first}" if extra else first, *others]
        _run([python, "-m", "pip", "install", "--quiet", *required], empty)
        devices = [text for backend in backends for text in ("--device", backend)]
        # On a software device the demo would take minutes.
        return _run([python, str(_SMOKE), *devices, *(("--brief",) if backends else ())], empty).splitlines()


def main() -> int:
    """Try the wheels with every interpreter that they are for. Return 1 if a trial fails or there is no interpreter."""
    parser = argparse.ArgumentParser(prog="python -m native_build.wheels.trial")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--interpreter", action="append", metavar="PATH", help="only these; default: PATH's")
    parser.add_argument("--newest", action="store_true", help="only the newest of them")
    parser.add_argument(
        "--extra", default="", help="of the first wheel, where there is a GIL, such as server"
    )
    args = parser.parse_args()
    wheels = [path.resolve() for path in args.wheels]
    backends = [
        match[1] for path in wheels if (match := re.match(r"llamapipe_(\w+?)-", path.name)) is not None
    ]
    named = [ask(path) for path in args.interpreter or ()]
    candidates = find_interpreters() if args.interpreter is None else [*filter(None, named)]
    interpreters = [
        interpreter for interpreter in candidates if all(fits(wheel, interpreter) for wheel in wheels)
    ]
    if args.newest:
        del interpreters[:-1]
    texts: dict[str, str] = {}
    failed = not interpreters
    for interpreter in interpreters:
        start = time.monotonic()
        try:
            # Not every package of an extra has a wheel for Pythons without the GIL.
            extra = "" if interpreter.free_threaded else args.extra
            *_, text, _ = lines = try_wheels(wheels, interpreter, backends, extra)
            texts[interpreter.name], result = text, ", ".join(lines)
        except TrialError as error:
            failed, result = True, f"failed: {error}"
        version = ".".join(map(str, interpreter.version))
        print(f"{interpreter.name} ({version}): {time.monotonic() - start:.1f} s, {result}", flush=True)
    if not interpreters:
        print(f"no interpreter on PATH matches {', '.join(path.name for path in wheels)}")
    if len(set(texts.values())) > 1:
        print("the generated texts differ")
        failed = True
    return int(failed)


def _run(command: Sequence[str], folder: Path) -> str:
    # Away from the clone, and without variables that lead to it.
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=1200
    )
    if done.returncode != 0:
        last = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise TrialError(f"{' '.join(command[:4])} failed ({done.returncode}):\n    {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

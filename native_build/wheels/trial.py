"""Tries a wheel where nothing else is: ``python -m native_build.wheels.trial WHEEL [BACKEND_WHEEL …]``.

For each interpreter on PATH that the wheel is for: an empty environment, the wheels and what they require, then
``llamapipe doctor``, ``demo`` (without backends) and a text that is compared between the interpreters.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from native_build.wheels.interpreters import Interpreter, ask, find_interpreters

_TEXT = """
import sys
import llamapipe as lp
with lp.Model.demo() as model, lp.Engine(model, n_threads=1) as engine:
    texts = engine.generate(["Once upon a time"] * 4, lp.SamplingParams(max_tokens=24, temperature=0))
print(repr(texts[0].text))
assert {done.text for done in texts} == {texts[0].text}, texts
print("GIL:", getattr(sys, "_is_gil_enabled", lambda: True)())
"""


class TrialError(Exception):
    """What failed, with the end of its output."""


def fits(wheel: Path, interpreter: Interpreter) -> bool:
    """Whether the wheel's tag is for this interpreter."""
    tag, abi = wheel.stem.split("-")[-3:-1]
    if abi == "none":
        return True
    if abi == "abi3":
        return not interpreter.free_threaded and interpreter.version[1] >= int(tag.removeprefix("cp3"))
    return abi == f"cp{interpreter.name.replace('.', '')}"


def try_wheels(wheels: Sequence[Path], interpreter: Interpreter, backends: Sequence[str] = ()) -> str:
    """Install and run; the text that was generated. Raises TrialError with the output of what failed."""
    with tempfile.TemporaryDirectory(prefix="llamapipe-trial-") as name:
        empty = Path(name)
        _run([interpreter.path, "-m", "venv", str(empty / "venv")], empty)
        python = str(empty / "venv" / "bin" / "python")
        # pip is the newest: that of an old Python does not know the tags of new wheels.
        _run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], empty)
        _run([python, "-m", "pip", "install", "--quiet", *map(str, wheels)], empty)
        command = str(empty / "venv" / "bin" / "llamapipe")
        report = json.loads(_run([command, "doctor", "--json"], empty, statuses=(0, 1)))
        if wrong := [finding for finding in report["findings"] if not finding["ok"]]:
            raise TrialError(f"doctor finds problems: {json.dumps(wrong, indent=1)}")
        found = {str(device["backend"]).lower() for device in report["devices"]}
        if missing := set(backends) - found:
            raise TrialError(
                f"no device for {', '.join(sorted(missing))}, only for {', '.join(sorted(found))}; "
                "on Debian, ci/setup_vulkan_debian.sh and GGML_VK_VISIBLE_DEVICES=0 set up a software device for Vulkan"
            )
        if not backends:  # on a software device it would take minutes
            _run([command, "demo"], empty)
        return _run([python, "-c", _TEXT], empty).strip()


def main() -> int:
    """Try the wheels with every interpreter that they are for; status 1 if one fails or there is none."""
    parser = argparse.ArgumentParser(prog="python -m native_build.wheels.trial")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--interpreter", action="append", metavar="PATH", help="only these; default: PATH's")
    parser.add_argument("--newest", action="store_true", help="only the newest of them")
    given = parser.parse_args()
    wheels = [path.resolve() for path in given.wheels]
    backends = [
        found[1] for path in wheels if (found := re.match(r"llamapipe_(\w+?)-", path.name)) is not None
    ]
    named = [ask(path) for path in given.interpreter or ()]
    candidates = find_interpreters() if given.interpreter is None else [found for found in named if found]
    interpreters = [found for found in candidates if all(fits(wheel, found) for wheel in wheels)]
    if given.newest:
        del interpreters[:-1]
    texts, failed = {}, not interpreters
    for interpreter in interpreters:
        start = time.monotonic()
        try:
            texts[interpreter.name] = try_wheels(wheels, interpreter, backends)
            result = texts[interpreter.name].replace("\n", ", ")
        except TrialError as error:
            failed, result = True, f"failed: {error}"
        version = ".".join(map(str, interpreter.version))
        print(f"{interpreter.name} ({version}): {time.monotonic() - start:.1f} s, {result}", flush=True)
    if not interpreters:
        print(f"no interpreter on PATH matches {', '.join(path.name for path in wheels)}")
    if len({text.splitlines()[0] for text in texts.values()}) > 1:
        print("the generated texts differ")
        failed = True
    return int(failed)


def _run(command: Sequence[str], folder: Path, statuses: tuple[int, ...] = (0,)) -> str:
    # Away from the clone, and without what leads to it.
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=600
    )
    if done.returncode not in statuses:
        last = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise TrialError(f"{' '.join(command[:4])} failed ({done.returncode}):\n    {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

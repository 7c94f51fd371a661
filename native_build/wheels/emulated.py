"""Runs each CPU module of a wheel for 64-bit ARM on a processor that qemu-user emulates.

``python -m native_build.wheels.emulated PYTHON [MODEL …]``: PYTHON runs under qemu-user and has the wheel installed.
For each kind of processor, the program prints which module is loaded, and how much log-probabilities differ from the
first processor's, with the bundled model and each MODEL.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# The value of QEMU_CPU, the module that must be chosen, and machines that choose it. qemu 7.2 emulates no processor
# like Graviton3's, which lacks SVE2: a processor with SVE2 runs without the modules that it would choose (_HIDDEN).
PROCESSORS = (
    ("cortex-a72", "armv8.0_1", "Raspberry Pi 4"),
    ("cortex-a76", "armv8.2_2", "Raspberry Pi 5"),
    ("neoverse-n1", "armv8.2_2", "Graviton2, Ampere Altra"),
    ("a64fx", "armv8.0_1", "A64FX, which has no products of bytes"),
    ("max,sve256=on,sve512=off", "armv8.2_3", "with SVE and without i8mm: no processor that we know of"),
    ("max,sve=off", "armv8.6_0", "AmpereOne, Apple M2"),
    ("max,sve256=on,sve512=off", "armv8.6_1", "Graviton3, with vectors of 256 bits"),
    ("max,sve128=on,sve256=off", "armv8.6_2", "Graviton4, with vectors of 128 bits"),
)
_HIDDEN = {"armv8.6_1": ("armv8.6_2",), "armv8.2_3": ("armv8.6_0", "armv8.6_1", "armv8.6_2")}
# The average difference allowed between two processors' log-probabilities, in nats: other instructions add in a
# different order, or in 16 bits. Wrong products differ by more than 1.
_MOST = 0.1
_PROGRAM = """
import json, pathlib, re, sys
import llamapipe as lp
values = []
for path in (None, *sys.argv[1:]):
    with lp.Model(path) if path else lp.Model.demo() as model, lp.Engine(model, n_threads=1, n_ctx=256) as engine:
        texts = [list(range(first, first + n)) for first, n in ((40, 80), (60, 2), (70, 3), (90, 7), (100, 18))]
        # One after the other: products of many rows, and of few.
        values.append([float(value) for text in texts for value in engine.score_tokens([text])[0].logprobs])
modules = set(re.findall(r"libggml-cpu-([\\w.]+)\\.so", pathlib.Path("/proc/self/maps").read_text()))
print(json.dumps([sorted(modules), values]))
"""


def run_on(
    processor: str, command: list[str], hidden: Sequence[str] = ()
) -> tuple[list[str], list[list[float]]]:
    """Return the loaded modules, and each model's log-probabilities. ``hidden``: modules to hide from the loader."""
    python, *models = command
    # Without variables that lead to the clone, which has no libraries for this processor.
    environment = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
    environment["QEMU_CPU"] = processor
    with tempfile.TemporaryDirectory() as name:
        if hidden:
            ask = "import llamapipe, sys; sys.stdout.write(llamapipe.__path__[0])"
            process = subprocess.run(
                [python, "-c", ask], capture_output=True, text=True, check=True, cwd=name, env=environment
            )
            shutil.copytree(process.stdout, Path(name) / "llamapipe")
            for module in hidden:
                (Path(name) / "llamapipe" / "native" / "lib" / f"libggml-cpu-{module}.so").unlink()
            environment["PYTHONPATH"] = name
        program = [python, "-c", _PROGRAM, *models]
        done = subprocess.run(
            program, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=name
        )
    modules, values = json.loads(done.stdout)
    return modules, values


def main() -> int:
    """Run on every processor. Return 1 if a processor chooses a wrong module or computes different results."""
    failed = False
    first: list[list[float]] = []
    for processor, module, machines in PROCESSORS:
        try:
            modules, values = run_on(processor, sys.argv[1:], _HIDDEN.get(module, ()))
        except subprocess.CalledProcessError as error:
            failed = True
            print(f"{processor} ({machines}): ended with status {error.returncode}", flush=True)
            continue
        first = first or values
        apart = [
            sum(abs(value - other) for value, other in zip(*pair, strict=True)) / len(pair[0])
            for pair in zip(first, values, strict=True)
        ]
        is_right = modules == [module] and all(distance <= _MOST for distance in apart)
        failed |= not is_right
        listed = ", ".join(f"{distance:.4f}" for distance in apart)
        word = "" if is_right else "WRONG: "
        print(
            f"{word}{processor} ({machines}): {', '.join(modules)}, nats apart on average: {listed}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

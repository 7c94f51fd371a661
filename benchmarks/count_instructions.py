"""Counts the instructions of fixed work of the scheduler and of sampling, and compares with the stored figures.

    python benchmarks/count_instructions.py            # fails where a count is more than 5 % off the stored one
    python benchmarks/count_instructions.py --store    # writes them down, for this Python on this processor's family

Times say little on a busy machine; valgrind's callgrind counts the same every time. Each work is run twice, with
another number of rounds, so that what comes before it does not count. A processor without the widest vectors is
emulated, so the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path[0:0] = [str(HERE.parent)]

from native_build.paths import PACKAGE_NATIVE  # noqa: E402
from native_build.sources import find_source  # noqa: E402
from native_build.toolchain import find_compilers  # noqa: E402

NATIVE_SOURCES = PACKAGE_NATIVE / "src"
STORED = HERE / "instructions.json"
TOLERANCE = 0.05
ROUNDS = (4, 24)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--work", nargs=2, metavar=("NAME", "ROUNDS"), help="runs it, without counting")
    args = parser.parse_args()
    if args.work:
        PYTHON_WORKS[args.work[0]](int(args.work[1]))
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is missing: apt-get install valgrind")
        return 1
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    key = f"{sys.implementation.name}-{sys.version_info[0]}.{sys.version_info[1]}-{platform.machine()}"
    with tempfile.TemporaryDirectory() as folder:
        commands = {name: [sys.executable, __file__, "--work", name] for name in PYTHON_WORKS}
        commands["sampling"] = [compiled_scans(Path(folder))]
        counts = {name: count(command) for name, command in commands.items()}
    if args.store:
        STORED.write_text(json.dumps(stored | {key: counts}, indent=1) + "\n", encoding="utf-8")
    if key not in stored and not args.store:
        print(f"nothing is stored for {key}, so nothing can be compared: {counts}")
        return 0
    status = 0
    for name, n in counts.items():
        before = stored.get(key, counts).get(name, n)
        change = n / before - 1
        print(f"{name}: {n} instructions a round, {change:+.1%} of the stored {before}")
        if abs(change) > TOLERANCE:
            print("  that is more than 5 %: find out why; if it is meant, or a gain, run this with --store")
            status = 1
    return status


def compiled_scans(folder: Path) -> str:
    """A program that scans rows; llama.cpp's own libraries are built for this machine, which valgrind does not know."""
    source = find_source(None, print).path
    program = folder / "scans"
    sources = [HERE / "scan_work.cpp", NATIVE_SOURCES / "scan.cpp"]
    includes = [NATIVE_SOURCES, source / "include", source / "ggml" / "include"]
    command = [*find_compilers().cxx, "-std=c++17", "-O3", *(f"-I{path}" for path in includes)]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    return str(program)


def count(command: Sequence[str]) -> int:
    """Instructions of one round."""
    few, many = (_counted([*command, str(n)]) for n in ROUNDS)
    return round((many - few) / (ROUNDS[1] - ROUNDS[0]))


def _counted(command: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        counter = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*counter, *command], capture_output=True, text=True, env=environment, check=False
        )
    counted = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or counted is None:
        raise RuntimeError(f"valgrind failed with {done.returncode}: {done.stderr[-2000:]}")
    return int(counted.group(1))


# ---- the works
def scheduling(n_rounds: int) -> None:
    """32 requests on 8 slots, from arriving to their last token, some of them cancelled.

    The scheduler is pure Python. Its package is not initialized: importing numpy takes a hundred times as many
    instructions, and never the same number.
    """
    package = sys.modules["llamapipe"] = ModuleType("llamapipe")
    package.__path__ = [str(HERE.parent / "llamapipe")]
    from llamapipe._engine.policy.core import Request, RequestSpec
    from llamapipe._engine.policy.kv import KvCache
    from llamapipe._engine.policy.scheduler import Scheduler

    gc.disable()  # it runs after a number of allocations, which other code makes too
    for _ in range(n_rounds):
        scheduler = Scheduler(KvCache(8), 256, 8 * 256, 128, 32)
        requests = [Request([1 + i % 7] * (8 + i), RequestSpec(16 + i)) for i in range(32)]
        for request in requests:
            scheduler.add(request)
        n_steps = 0
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, [7] * len(plan.requests))
            scheduler.cache.take_memory_ops()
            n_steps += 1
            if n_steps % 20 == 0:
                scheduler.cancel(next(r for r in requests if r.slot >= 0))


PYTHON_WORKS: dict[str, Callable[[int], None]] = {"scheduling": scheduling}


if __name__ == "__main__":
    sys.exit(main())

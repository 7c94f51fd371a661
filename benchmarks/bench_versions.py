"""Compares two installations of llamapipe in pairs, to see whether one of them is slower.

    python benchmarks/bench_versions.py OLD_PYTHON NEW_PYTHON MODEL.gguf [--n 1 8] [--pairs 11] [--json FILE]

Each interpreter belongs to an environment with llamapipe installed. A pair runs both sides, one after the other, in
random order, each in a new process: where a library lies in memory changes its speed by up to 15 %, so one process for
each side would compare places. Prints the median of each side in tokens per second, and the median, quartiles and
extremes of the pairs' ratios (new over old; above 1 is faster).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

N_PROMPT, N_GENERATE = 64, 64
WAYS = ("whole", "asyncio", "threads")


def work(model_path: str, n: int, n_threads: int, n_rounds: int) -> dict[str, float]:
    """The rate of each way, in generated tokens per second: the best of ``n_rounds`` after one that warms up."""
    import llamapipe as lp

    params = lp.SamplingParams(temperature=0, max_tokens=N_GENERATE, ignore_eos=True, speculate="off")

    def prompts(salt: int) -> list[list[int]]:
        return [
            [300 + (31 * (i + 64 * salt) + 7 * j * (i + 1) + j * j) % 1900 for j in range(N_PROMPT)]
            for i in range(n)
        ]

    def whole(engine: Any, salt: int) -> None:
        engine.generate(prompts(salt), params)

    def threads(engine: Any, salt: int) -> None:
        def read(prompt: list[int]) -> None:
            for _ in engine.stream(prompt, params):
                pass

        readers = [threading.Thread(target=read, args=(prompt,)) for prompt in prompts(salt)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    def tasks(engine: Any, salt: int) -> None:
        async def read(prompt: list[int]) -> None:
            async for _ in engine.astream(prompt, params):
                pass

        async def main() -> None:
            await asyncio.gather(*map(read, prompts(salt)))

        asyncio.run(main())

    rates: dict[str, float] = {}
    with (
        lp.Model(model_path) as model,
        lp.Engine(model, n_ctx=256, n_seq_max=n, n_threads=n_threads) as engine,
    ):
        for name, run in zip(WAYS, (whole, tasks, threads), strict=True):
            run(engine, 0)
            best = float("inf")
            for salt in range(1, n_rounds + 1):
                began = perf_counter()
                run(engine, salt)
                best = min(best, perf_counter() - began)
            rates[name] = n * N_GENERATE / best
    return rates


def run_side(python: str, arguments: argparse.Namespace, n: int) -> dict[str, float]:
    """``work`` in a new process of this interpreter, away from the source tree."""
    command = [python, str(Path(__file__).resolve()), "--worker", str(n), str(arguments.n_threads)]
    command += [str(arguments.rounds), str(Path(arguments.model).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def main() -> int:
    """Runs the pairs and prints a line for each number of requests and each way to call."""
    if sys.argv[1:2] == ["--worker"]:
        n, n_threads, n_rounds = map(int, sys.argv[2:5])
        print(json.dumps(work(sys.argv[5], n, n_threads, n_rounds)))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="the interpreter of the environment with the old version")
    parser.add_argument("new", help="the interpreter of the environment with the new version")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8], help="requests at once (default: 1 8)")
    parser.add_argument(
        "--pairs", type=int, default=11, help="pairs for each number of requests (default: 11)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds in a process (default: 3)")
    parser.add_argument("--n-threads", type=int, default=2, help="compute threads of each side (default: 2)")
    parser.add_argument("--json", type=Path, help="write all rates to this file")
    arguments = parser.parse_args()
    rates: dict[int, list[dict[str, dict[str, float]]]] = {}
    print(f"{'n':>3} {'way':8} {'old':>8} {'new':>8}   new/old: median (quartiles; lowest, highest)")
    for n in arguments.n:
        pairs = rates[n] = []
        for _ in range(arguments.pairs):
            sides = [("old", arguments.old), ("new", arguments.new)]
            random.shuffle(sides)
            pairs.append({name: run_side(python, arguments, n) for name, python in sides})
        for way in WAYS:
            old, new = ([pair[side][way] for pair in pairs] for side in ("old", "new"))
            ratios = sorted(b / a for a, b in zip(old, new, strict=True))
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            print(
                f"{n:3} {way:8} {statistics.median(old):8.0f} {statistics.median(new):8.0f}   "
                f"{statistics.median(ratios):.3f} ({low:.3f}, {high:.3f}; {ratios[0]:.3f}, {ratios[-1]:.3f})",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the default number of compute threads with fixed ones beside other work, which it starts itself.

    python benchmarks/bench_busy.py [MODEL.gguf ...] [--loads quiet,one,two,pulse] [--n 1,8] [--rounds 5] [--json FILE]
    python benchmarks/bench_busy.py --engines 2 ...      # two engines of the process compute at the same time

A cell is a model, a load and N requests at once. Its sides take turns: the default, which adapts, and fixed numbers of
threads. So all of them meet the same load. Printed are medians of generated tokens a second, and the default's median
over that of the better fixed number; the JSON has every turn. Loads: ``quiet``; ``one`` and ``two`` processes that
always compute; ``pulse``, one that computes and sleeps for a second each. Prompts of 64 tokens, 64 generated, greedy,
end of generation ignored, no prefix shared. Without a model: the bundled one.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Barrier, Thread
from time import perf_counter, sleep

import llamapipe as lp
from llamapipe.host.cores import usable_cores

_SPIN = "while True: pass"
_PULSE = """
import time
while True:
    end = time.perf_counter() + 1
    while time.perf_counter() < end: pass
    time.sleep(1)
"""
LOADS = {"quiet": [], "one": [_SPIN], "two": [_SPIN, _SPIN], "pulse": [_PULSE]}
_PERIOD_S = 2.0  # of the pulse: a turn lasts whole ones
_N_PROMPT = _N_GENERATE = 64
_SETTLE_S = 0.02  # the threads of the engine that computed before spin a little longer


@dataclass
class Cell:
    """One line of the table: tokens a second of each side, by round."""

    model: str
    load: str
    n: int
    n_engines: int
    tokens_per_s: dict[str, list[float]]
    n_threads: list[int]  # of the default's engines, at the end
    n_changes: list[int]

    @property
    def medians(self) -> dict[str, float]:
        """Tokens a second of each side."""
        return {side: statistics.median(values) for side, values in self.tokens_per_s.items()}

    @property
    def ratio(self) -> float:
        """The default over the better fixed number."""
        medians = self.medians
        return medians.pop("default") / max(medians.values())


@contextmanager
def neighbours(load: str) -> Iterator[None]:
    """Other work that runs until ``close``."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [subprocess.Popen([sys.executable, "-c", code]) for code in LOADS[load]]
        sleep(0.3)  # until they compute
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Side:
    """Engines with the same number of threads; several engines have a calling thread each."""

    def __init__(self, model: lp.Model, n: int, engines: Sequence[lp.Engine]) -> None:
        self.engines = engines
        self._n = n
        self._params = lp.SamplingParams(
            max_tokens=_N_GENERATE, temperature=0.0, ignore_eos=True, speculate="off"
        )
        self._n_vocab = min(model.n_vocab, 2000)
        self._salt = 0

    def _generate(self, engine: lp.Engine) -> None:
        self._salt += 1
        prompts = [
            [
                300 + (31 * (i + 64 * self._salt) + 7 * j * (i + 1) + j * j) % (self._n_vocab - 300)
                for j in range(_N_PROMPT)
            ]
            for i in range(self._n)
        ]
        engine.generate(prompts, self._params)

    def run(self, seconds: float) -> float:
        """Generated tokens a second of all engines together."""
        if len(self.engines) == 1:
            return self._turn(self.engines[0], perf_counter(), seconds)
        speeds = [0.0] * len(self.engines)
        ready = Barrier(len(self.engines))

        def work(i: int) -> None:
            ready.wait()
            speeds[i] = self._turn(self.engines[i], perf_counter(), seconds)

        threads = [Thread(target=work, args=(i,)) for i in range(len(self.engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(speeds)

    def _turn(self, engine: lp.Engine, began: float, seconds: float) -> float:
        n_tokens = 0
        while perf_counter() - began < seconds:
            self._generate(engine)
            n_tokens += self._n * _N_GENERATE
        return n_tokens / (perf_counter() - began)


def measure(
    model: lp.Model, name: str, load: str, n: int, n_engines: int, rounds: int, seconds: float
) -> Cell:
    """All sides in turns under one load."""
    fixed = sorted({1, usable_cores()})
    with ExitStack() as stack:
        sides = {
            label: Side(
                model,
                n,
                [
                    stack.enter_context(lp.Engine(model, n_ctx=256, n_seq_max=n, n_threads=n_threads))
                    for _ in range(n_engines)
                ],
            )
            for label, n_threads in [("default", None), *((f"{i} thread{'s' * (i > 1)}", i) for i in fixed)]
        }
        for side in sides.values():
            side.run(0.05)
        speeds: dict[str, list[float]] = {label: [] for label in sides}
        labels = list(sides)
        with neighbours(load):
            for i in range(rounds):
                for label in labels[i % len(labels) :] + labels[: i % len(labels)]:
                    sleep(_SETTLE_S)
                    speeds[label].append(
                        sides[label].run(max(seconds, _PERIOD_S if load == "pulse" else 0.0))
                    )
        stats = [engine.stats() for engine in sides["default"].engines]
    return Cell(
        name, load, n, n_engines, speeds, [s.n_threads for s in stats], [s.n_thread_changes for s in stats]
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files (default: the bundled model)")
    parser.add_argument("--bundled", action="store_true", help="also the bundled model")
    parser.add_argument("--loads", default=",".join(LOADS), help=f"of {','.join(LOADS)} (all)")
    parser.add_argument("--n", default="1,8", help="requests at once (1,8)")
    parser.add_argument("--engines", type=int, default=1, help="engines that compute at the same time (1)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--seconds", type=float, default=0.7, help="of a turn, with pulse at least 2 (0.7)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    loads = args.loads.split(",")
    if unknown := set(loads) - set(LOADS):
        parser.error(f"--loads: {', '.join(sorted(unknown))} is none of {', '.join(LOADS)}")
    cells: list[Cell] = []
    paths = [*args.models, *([None] if args.bundled or not args.models else [])]
    for path in paths:
        with lp.Model.demo() if path is None else lp.Model(path) as model:
            name = "bundled" if path is None else path.stem
            for load in loads:
                for n in map(int, args.n.split(",")):
                    cell = measure(model, name, load, n, args.engines, args.rounds, args.seconds)
                    if not cells:
                        print(
                            f"{'model':>8} {'load':>6} {'N':>2}",
                            *(f"{side:>10}" for side in cell.medians),
                            "  ratio  threads",
                        )
                    cells.append(cell)
                    print(
                        f"{name:>8} {load:>6} {n:>2}",
                        *(f"{value:10.0f}" for value in cell.medians.values()),
                        f"{cell.ratio:7.2f}  {cell.n_threads} after {cell.n_changes} changes",
                        flush=True,
                    )
    if args.json:
        about = {
            "machine": platform.processor() or platform.machine(),
            "cores": usable_cores(),
            "system": platform.release(),
        }
        args.json.write_text(json.dumps({**about, "cells": [asdict(cell) for cell in cells]}, indent=1))


if __name__ == "__main__":
    main()

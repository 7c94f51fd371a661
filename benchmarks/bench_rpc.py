"""Measures what it costs to place a model on RPC workers of this machine, against the same model in one process.

    python benchmarks/bench_rpc.py [MODEL.gguf] [--n 1 8] [--prompt 64] [--generate 64] [--threads 2] [--rounds 5]

Prints milliseconds per step and seconds to load the model. ``--threads``: of each process; workers compute one after
another, but their threads wait for each other where they share cores. Loopback only: a real network adds a round trip
for each worker and step. Greedy, end of generation ignored. The sides take turns, and each loads the model once a
round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after an installed llamapipe

import llamapipe as lp

SIDES = {"one process": 0, "one worker": 1, "two workers": 2}


class Figures(NamedTuple):
    """Of one round of one side."""

    load_s: float
    prompt_ms: float
    step_ms: float


def start_worker(stack: ExitStack, n_threads: int) -> str:
    """The address of a new worker, which ends with ``stack``."""
    command = [sys.executable, "-m", "llamapipe", "rpc-worker", "--port", "0", "--threads", str(n_threads)]
    folder = str(Path(lp.__file__).parent.parent)  # the package that is measured, wherever this runs
    environment = {**os.environ, "PYTHONPATH": folder}
    process = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd="/")
    )
    stack.callback(process.terminate)
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


def measure(model: Path, n_workers: int, args: argparse.Namespace) -> dict[int, Figures]:
    """One round, by number of requests at once."""
    with ExitStack() as stack:
        workers = [start_worker(stack, args.threads) for _ in range(n_workers)]
        began = perf_counter()
        loaded = stack.enter_context(lp.Model(model, rpc=workers) if workers else lp.Model(model))
        load_s = perf_counter() - began
        n_ctx = args.prompt + args.generate + 1
        engine = stack.enter_context(
            lp.Engine(loaded, n_ctx=n_ctx, n_seq_max=max(args.n), n_threads=args.threads, prefix_cache=False)
        )
        figures = {}
        for n in args.n:
            prompts = [[300 + i, *range(400, 399 + args.prompt)] for i in range(n)]
            seconds = []
            for n_tokens in (1, 1 + args.generate, 1, 1 + args.generate):  # the first two warm up
                params = lp.SamplingParams(
                    max_tokens=n_tokens, temperature=0, ignore_eos=True, speculate="off"
                )
                began = perf_counter()
                engine.generate(prompts, params)
                seconds.append(perf_counter() - began)
            prompt_s, whole_s = seconds[2:]
            figures[n] = Figures(load_s, 1e3 * prompt_s, 1e3 * (whole_s - prompt_s) / args.generate)
        return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", default=lp.demo_model_path())
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds = [{name: measure(args.model, n, args) for name, n in SIDES.items()} for _ in range(args.rounds)]
    print(f"{'side':12s} {'at once':>7s} {'load s':>7s} {'prompts ms':>10s} {'step ms':>8s} {'ratio':>6s}")
    for n in args.n:
        alone = [measured["one process"][n].step_ms for measured in rounds]
        for name in SIDES:
            rounds_of_name = [measured[name][n] for measured in rounds]
            load_s, prompt_ms, step_ms = (
                statistics.median(column) for column in zip(*rounds_of_name, strict=True)
            )
            ratio = statistics.median(
                measured.step_ms / base for measured, base in zip(rounds_of_name, alone, strict=True)
            )
            print(f"{name:12s} {n:7d} {load_s:7.2f} {prompt_ms:10.1f} {step_ms:8.2f} {ratio:6.2f}")


if __name__ == "__main__":
    main()

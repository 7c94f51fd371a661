"""Compares a job of Ray Data with one actor, and with more, with the bare engine: generated tokens a second.

    python benchmarks/bench_ray.py [MODEL.gguf] [--prompts 4000] [--tokens 32] [--rounds 3] [--actors 1] [--json FILE]

Needs the extra ``ray``. The sides take turns, each in a process of its own, so all of them meet the same load.
``bare``: ``engine.generate`` with the list of all prompts, in a worker of Ray that does nothing else, so that the
system gives it the same part of a busy machine. The others: what ``llamapipe.ray.complete`` does, over a Parquet file
of the same prompts, with the same engine options. Their rate counts from when the first rows came to an actor until the
last were done, with all pauses between, but without the start of Ray, of the actors and of the engines;
``whole_job_tokens_per_s`` counts from the start of the job until the driver has all rows. Greedy, end of generation
ignored. Without a model: the bundled one. Only loopback is used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter, time

import pyarrow as arrow
import pyarrow.parquet as parquet
import ray
import ray.data

import llamapipe as lp
import llamapipe.ray as lr
from llamapipe.ray.data import mapped

_OPTIONS: dict[str, object] = {"n_ctx": 256, "n_seq_max": 16}
_STORE_BYTES = 200 * 2**20
# Without a cluster Ray listens on loopback only.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def prompt(i: int) -> str:
    """Prompts that share no long prefix."""
    return f"{i} is a number. The"


class TimedCompleter(lr.Completer):
    """Adds to each row when its batch came to the actor and when it was done."""

    async def __call__(self, batch: arrow.Table) -> AsyncIterator[arrow.Table]:
        """The rows with their answers."""
        began_s = time()
        async for out in super().__call__(batch):
            timed = out.append_column("began_s", arrow.array([began_s] * out.num_rows))
            yield timed.append_column("ended_s", arrow.array([time()] * out.num_rows))


def bare(model: str, n: int, params: lp.SamplingParams) -> dict[str, float]:
    """The rate of the engine alone."""
    with lr.EngineSpec(model, _OPTIONS).opened() as engine:
        engine.generate([prompt(-i) for i in range(64)], params)
        begin = perf_counter()
        done = engine.generate([prompt(i) for i in range(n)], params)
        seconds = perf_counter() - begin
    return {"tokens_per_s": sum(one.n_completion_tokens for one in done) / seconds}


def start_ray(n_actors: int) -> None:
    """A small Ray on this machine."""
    ray.init(
        num_cpus=4 + n_actors,
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )


def with_ray(model: str, n: int, params: lp.SamplingParams, n_actors: int) -> dict[str, float]:
    """The rate of a job."""
    start_ray(n_actors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        parquet.write_table(arrow.table({"id": range(n), "prompt": [prompt(i) for i in range(n)]}), path)
        begin = perf_counter()
        given = {
            "spec": lr.EngineSpec(model, _OPTIONS),
            "prompt": "prompt",
            "params": params,
            "n_sharing": n_actors,
        }
        # As complete() does, with a class that notes when its batches begin and end.
        out = mapped(ray.data.read_parquet(str(path)), TimedCompleter, given, 128, (n_actors, n_actors), {})
        rows = arrow.concat_tables(out.iter_batches(batch_size=None, batch_format="pyarrow"))
        seconds = perf_counter() - begin
    ray.shutdown()
    assert sorted(rows["id"].to_pylist()) == list(range(n)), "rows are missing"
    n_tokens = sum(rows["n_completion_tokens"].to_pylist())
    in_actors_s = max(rows["ended_s"].to_pylist()) - min(rows["began_s"].to_pylist())
    return {"tokens_per_s": n_tokens / in_actors_s, "whole_job_tokens_per_s": n_tokens / seconds}


def measured(side: str, args: argparse.Namespace) -> dict[str, float]:
    """One turn of a side, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        args.model,
        "--prompts",
        str(args.prompts),
        "--tokens",
        str(args.tokens),
    ]
    environment = {**os.environ, **_SETTINGS}
    folders = [str(Path(lp.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [*command, "--side", side], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(lp.demo_model_path()))
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--actors", default="1", help="numbers of actors, with commas between")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    params = lp.SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    if args.side is not None:
        if args.side == "bare":
            start_ray(1)
            print(json.dumps(ray.get(ray.remote(bare).remote(args.model, args.prompts, params))))
        else:
            print(json.dumps(with_ray(args.model, args.prompts, params, int(args.side))))
        return
    sides = ["bare", *args.actors.split(",")]
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(args.rounds):
        for side in sides:
            turns[side].append(measured(side, args))
            print(f"round {number + 1}, {side:>4}: {turns[side][-1]}", flush=True)
    rates = {side: [turn["tokens_per_s"] for turn in found] for side, found in turns.items()}
    for side in sides[1:]:
        ratios = [ray / bare for ray, bare in zip(rates[side], rates["bare"], strict=True)]
        print(
            f"{side} actor(s): {statistics.median(rates[side]):,.0f} tokens/s, the engine alone "
            f"{statistics.median(rates['bare']):,.0f}: ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        args.json.write_text(
            json.dumps({**about, "prompts": args.prompts, "tokens": args.tokens, "turns": turns}, indent=1)
        )


if __name__ == "__main__":
    main()

"""Compares a job of Ray Data with one actor, and with more, with the bare engine: generated tokens a second.

    python benchmarks/bench_ray.py [MODEL.gguf] [--prompts 4000] [--tokens 32] [--rounds 3] [--actors 1] [--threads N]
                                 [--json FILE]

Needs the extra ``ray``. The sides take turns, each in a process of its own, so all of them meet the same load.
``bare``: ``engine.generate`` with the list of all prompts, in a worker of Ray that does nothing else, so that the
system gives it the same part of a busy machine. The others: what ``llamapipe.ray.complete`` does, over a Parquet file
of the same prompts, with the same engine options. Their rate counts from when the first rows came to an actor until the
last were done, with all pauses between, but without the start of Ray, of the actors and of the engines;
``whole_job_tokens_per_s`` counts from the start of the job until the driver has all rows. ``tokens_per_cpu_s`` divides
by the processor time of the engine's process, which a busy machine changes less. Both engines compute 64 prompts
before; the rate of the whole job contains them. ``--threads``: compute threads of the engine on both sides; with one
less than the cores, Ray's processes have a core. Greedy, end of generation ignored.
Without a model: the bundled one. Only loopback is used.
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
from time import perf_counter, process_time, time
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import ray
import ray.data

import llamapipe as lp
import llamapipe.ray as lr
from llamapipe.ray._data import map_rows

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


def warm_up(engine: lp.Engine, params: lp.SamplingParams) -> None:
    """Computes what is not timed: the first steps of an engine are slower."""
    engine.generate([prompt(-i) for i in range(64)], params)


class TimedCompleter(lr.Completer):
    """Adds to each row when its batch came to the actor and when it was done."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        warm_up(self.engine, self._format.params)

    async def __call__(self, batch: arrow.Table) -> AsyncIterator[arrow.Table]:
        """The rows with their answers."""
        began = {"began_s": time(), "began_cpu_s": process_time()}
        async for answered in super().__call__(batch):
            out = answered
            for name, value in {**began, "ended_s": time(), "ended_cpu_s": process_time()}.items():
                out = out.append_column(name, arrow.array([value] * out.num_rows))
            yield out


def spec(model: str, n_threads: int | None) -> lr.EngineSpec:
    """The engine of both sides."""
    return lr.EngineSpec(model, _OPTIONS | ({} if n_threads is None else {"n_threads": n_threads}))


def bare(model: str, n: int, params: lp.SamplingParams, n_threads: int | None) -> dict[str, float]:
    """The rate of the engine alone."""
    with spec(model, n_threads).open() as engine:
        warm_up(engine, params)
        begin, begin_cpu_s = perf_counter(), process_time()
        done = engine.generate([prompt(i) for i in range(n)], params)
        seconds, cpu_s = perf_counter() - begin, process_time() - begin_cpu_s
    n_tokens = sum(completion.n_completion_tokens for completion in done)
    return {"tokens_per_s": n_tokens / seconds, "tokens_per_cpu_s": n_tokens / cpu_s}


def start_ray(n_actors: int) -> None:
    """A small Ray on this machine."""
    ray.init(
        num_cpus=4 + n_actors,
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )


def with_ray(
    model: str, n: int, params: lp.SamplingParams, n_threads: int | None, n_actors: int
) -> dict[str, float]:
    """The rate of a job."""
    start_ray(n_actors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        parquet.write_table(arrow.table({"id": range(n), "prompt": [prompt(i) for i in range(n)]}), path)
        begin = perf_counter()
        arguments = {
            "spec": spec(model, n_threads),
            "prompt": "prompt",
            "params": params,
            "n_sharing": n_actors,
        }
        # As complete() does, with a class that notes when its batches begin and end.
        out = map_rows(
            ray.data.read_parquet(str(path)), TimedCompleter, arguments, 128, (n_actors, n_actors), {}
        )
        rows = arrow.concat_tables(out.iter_batches(batch_size=None, batch_format="pyarrow"))
        seconds = perf_counter() - begin
    ray.shutdown()
    assert sorted(rows["id"].to_pylist()) == list(range(n)), "rows are missing"
    n_tokens = sum(rows["n_completion_tokens"].to_pylist())
    in_actors_s = max(rows["ended_s"].to_pylist()) - min(rows["began_s"].to_pylist())
    rates = {"tokens_per_s": n_tokens / in_actors_s, "whole_job_tokens_per_s": n_tokens / seconds}
    if n_actors == 1:
        cpu_s = max(rows["ended_cpu_s"].to_pylist()) - min(rows["began_cpu_s"].to_pylist())
        rates["tokens_per_cpu_s"] = n_tokens / cpu_s
    return rates


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
    if args.threads is not None:
        command += ["--threads", str(args.threads)]
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
    parser.add_argument("--threads", type=int, help="of the engine, on both sides")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    params = lp.SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True, speculate="off")
    if args.side is not None:
        if args.side == "bare":
            start_ray(1)
            arguments = (args.model, args.prompts, params, args.threads)
            print(json.dumps(ray.get(ray.remote(bare).remote(*arguments))))
        else:
            print(json.dumps(with_ray(args.model, args.prompts, params, args.threads, int(args.side))))
        return
    sides = ["bare", *args.actors.split(",")]
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(args.rounds):
        for side in sides:
            turns[side].append(measured(side, args))
            print(f"round {number + 1}, {side:>4}: {turns[side][-1]}", flush=True)
    for side in sides[1:]:
        for unit in ("tokens_per_s", "tokens_per_cpu_s"):
            if unit in turns[side][0]:
                pairs = [
                    (turn[unit], alone[unit]) for turn, alone in zip(turns[side], turns["bare"], strict=True)
                ]
                ratios = [rate / alone for rate, alone in pairs]
                print(
                    f"{side} actor(s), {unit}: {statistics.median(rate for rate, _ in pairs):,.0f}, the engine alone "
                    f"{statistics.median(alone for _, alone in pairs):,.0f}: ratio {statistics.median(ratios):.3f} "
                    f"({min(ratios):.3f} to {max(ratios):.3f})"
                )
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        args.json.write_text(
            json.dumps(
                {
                    **about,
                    "prompts": args.prompts,
                    "tokens": args.tokens,
                    "threads": args.threads,
                    "turns": turns,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()

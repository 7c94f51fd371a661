"""Requests with LoRAs: throughput, first tokens and pauses, against llama-server in turns.

    python benchmarks/bench_adapters.py MODEL.gguf ... [--tokens 64] [--prompt 32] [--rounds 5] [--rank 16]

Random LoRAs on all matrices of the layers. Both servers get the same requests over HTTP: ``/completion`` as a stream,
prompts as tokens, no two begin alike, greedy, no end of generation. The cases: no adapter, one set for all eight
requests, four sets with two requests each; and ``unused``: the same without adapters, from a server that has loaded
four. Medians over the rounds; ``last`` is the last first token, ``gap`` the 99th percentile of the times between two
pieces of a stream, ``CPU`` the processor time that the server took: beside other work, compare that, with one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import httpx
import numpy as np
from local_server import SERVE, Server, cpu_seconds, running

sys.path.append(str(Path(__file__).resolve().parent / "compare"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

from peers import Missing, find_peers

import llamapipe as lp

N = 8
MATRICES = re.compile(r"blk\.\d+\.(?:attn_(?:q|k|v|output)|ffn_(?:gate|up|down))\.weight")


class Figures(NamedTuple):
    """Of one round: tokens a second, and seconds; ``cpu_s``: processor time of the server."""

    rate: float
    last_s: float
    gap_s: float
    cpu_s: float


def write_lora(path: Path, model: Path, rank: int, seed: int) -> Path:
    """Write a random LoRA for a model."""
    reader = gguf.GGUFReader(str(model))
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(seed)
    for tensor in reader.tensors:
        if MATRICES.fullmatch(tensor.name):
            n_columns, n_rows = (int(n) for n in tensor.shape)
            a = rng.standard_normal((rank, n_columns)) / np.sqrt(n_columns)
            b = rng.standard_normal((n_rows, rank)) * 0.02
            writer.add_tensor(f"{tensor.name}.lora_a", a.astype(np.float16))
            writer.add_tensor(f"{tensor.name}.lora_b", b.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """When the pieces of a stream came."""
    times: list[float] = []
    async with client.stream("POST", "/completion", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            is_piece = line.startswith("data: ") and not json.loads(line[6:]).get("stop")
            times += [time.perf_counter()] * is_piece
    return times


async def measure(
    port: int, pid: int, sets: list[Any], n_prompt: int, n_tokens: int, n_vocab: int, seed: int
) -> Figures:
    """One round: all requests at once."""
    rng = random.Random(seed)
    bodies = []
    for chosen in sets:
        prompt = [rng.randrange(300, n_vocab - 300) for _ in range(n_prompt)]
        body = {"prompt": prompt, "n_predict": n_tokens, "stream": True, "temperature": 0, "ignore_eos": True,
                "speculate": "off", "cache_prompt": False}  # fmt: skip
        if chosen is not None:
            body["lora"] = [{"id": chosen, "scale": 1.0}]
        bodies.append(body)
    limits = httpx.Limits(max_connections=N)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits) as client:
        began, cpu_began = time.perf_counter(), cpu_seconds(pid)
        streams = await asyncio.gather(*(stream(client, body) for body in bodies))
        seconds, cpu_s = time.perf_counter() - began, cpu_seconds(pid) - cpu_began
    gaps = [b - a for times in streams for a, b in pairwise(times)]
    return Figures(
        len(sets) * n_tokens / seconds,
        max(times[0] for times in streams) - began,
        statistics.quantiles(gaps, n=100)[-1],
        cpu_s,
    )


def report(figures: dict[tuple[str, str], list[Figures]]) -> None:
    """The medians so far."""
    if figures:
        print("| case | server | tokens/s | last first token, s | p99 gap, ms | CPU, s |")
        print("|---|---|---:|---:|---:|---:|")
    for (case, kind), rounds in figures.items():
        rate, last, gap, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {case} | {kind} | {rate:.1f} | {last:.2f} | {gap * 1e3:.0f} | {cpu:.2f} |", flush=True)


def command(kind: str, model: Path, loras: list[Path], args: argparse.Namespace) -> list[object]:
    """That starts a server."""
    n_ctx, threads = args.prompt + args.tokens + 8, args.threads
    if kind == "llama-server":
        files = [part for file in loras for part in ("--lora", file)]
        return [
            find_peers().program("llama-server"), "-m", model, "-np", N, "-c", N * n_ctx, "-t", threads, "-tb", threads,
            "-no-kvu", "--cache-ram", 0, "--log-disable", "--lora-init-without-apply", *files,
        ]  # fmt: skip
    named = [part for i, file in enumerate(loras) for part in ("--lora", f"{i}={file}")]
    itl = ["--max-itl-ms", "500"] if kind == "llamapipe max-itl" else []
    return [
        *SERVE, "-m", model, "--n-seq-max", N, "--n-ctx", n_ctx, "--n-threads", threads, "--n-threads-batch", threads,
        "--no-page", *named, *itl,
    ]  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for model in args.models:
        with lp.Model(model, vocab_only=True) as vocab:
            n_vocab = vocab.n_vocab
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            loras = [write_lora(Path(folder) / f"{i}.gguf", model, args.rank, i) for i in range(4)]
            kinds = ["llamapipe", "llamapipe max-itl", "llamapipe none", "llama-server"]
            ports: dict[str, Server] = {}
            for kind in kinds:
                try:
                    server_command = command(kind, model, [] if kind == "llamapipe none" else loras, args)
                except Missing as reason:
                    print(reason)
                    continue
                ports[kind] = stack.enter_context(running(*server_command))
            four = [i // 2 for i in range(N)]
            cases: list[tuple[str, str, list[Any]]] = [
                *(("one set", kind, [0] * N) for kind in ("llamapipe", "llama-server")),
                *(("four sets", kind, four) for kind in ("llamapipe", "llamapipe max-itl", "llama-server")),
                ("no adapter", "llamapipe none", [None] * N),
                ("unused", "llamapipe", [None] * N),
                ("unused", "llama-server", [None] * N),
            ]
            rounds: dict[tuple[str, str], list[Figures]] = {}
            for i in range(args.rounds + 1):
                load = os.getloadavg()[0]
                for case, kind, sets in cases:
                    if kind in ports:
                        n_tokens = args.tokens if i else 4  # the first round is for warming up
                        figures = asyncio.run(measure(*ports[kind], sets, args.prompt, n_tokens, n_vocab, i))
                        if i:
                            rounds.setdefault((case, kind), []).append(figures)
                print(f"{model.name}: round {i}, load average {load:.1f}", flush=True)
                report(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

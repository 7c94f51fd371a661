"""What stored answers cost: streams of ``/v1/responses`` from a server without ``--store`` and one with it, in turns.

    python benchmarks/bench_store.py MODEL.gguf
    python benchmarks/bench_store.py MODEL.gguf --streams 1 8 32 --rounds 9

Both servers get the same prompts in a round, and answer the same; no side finds what another cached.
The one with a store is asked twice, with ``store: false`` and with ``store: true``; each round begins with another
side. Rates are generated tokens per second from the first request to the last answer, and per second of the server's
processor time, which other work on the machine hardly changes. Ratios are medians of the ratios of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from local_server import SERVE, cpu_seconds, running

WORDS = (
    "fox tree river house boy girl cat dog sun moon hill road cake ball king snow bird fish boat song".split()
)
N_CTX = 512


async def ask(port: int, body: bytes) -> int:
    """Reads a stream to its end; the tokens of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    text = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    usage = text.rpartition(b'"output_tokens":')[2]
    if not usage[:1].isdigit():
        raise RuntimeError(f"the server said {text[:500]!r}")
    return int(usage.split(b",")[0])


def story(rng: random.Random) -> str:
    """A prompt whose answer is long."""
    first, second, third = rng.sample(WORDS, 3)
    return f"Tell me a long story about a {first}, a {second} and a {third}."


class Rates(NamedTuple):
    """Tokens per second, and per second of processor time."""

    wall: float
    cpu: float


async def ask_all(
    name: str, port: int, pid: int, store: bool, prompts: list[list[str]], n_generate: int
) -> Rates:
    """Streams at once, each with its prompts one after the other."""

    async def stream(texts: list[str]) -> int:
        n = 0
        for text in texts:
            body = {
                "input": text, "max_output_tokens": n_generate, "temperature": 0, "stream": True, "store": store,
                "cache_salt": name,
            }  # fmt: skip
            n += await ask(port, json.dumps(body).encode())
        return n

    began, cpu_began = time.perf_counter(), cpu_seconds(pid)
    n_tokens = sum(await asyncio.gather(*map(stream, prompts)))
    return Rates(n_tokens / (time.perf_counter() - began), n_tokens / (cpu_seconds(pid) - cpu_began))


def measure(args: argparse.Namespace, n: int) -> dict[str, list[Rates]]:
    """The rates of all rounds, by side."""
    rng = random.Random(n)
    rounds: dict[str, list[Rates]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = [*SERVE, "-m", args.model, "--n-seq-max", n, "--n-ctx", N_CTX, "--n-threads", args.threads]
        plain = stack.enter_context(running(*command))
        storing = stack.enter_context(running(*command, "--store", f"{folder}/answers.db"))
        sides = [
            ("no store", *plain, False),
            ("store: false", *storing, False),
            ("store: true", *storing, True),
        ]
        for i in range(args.rounds + 1):
            prompts = [[story(rng) for _ in range(-(-args.answers // n))] for _ in range(n)]
            for name, port, pid, store in sides[i % 3 :] + sides[: i % 3]:
                rates = asyncio.run(ask_all(name, port, pid, store, prompts, args.generate))
                what = f"{rates.wall:.0f} tokens/s, {rates.cpu:.0f} by processor time"
                print(f"{n} streams, round {i} of {args.rounds}, {name}: {what}", file=sys.stderr, flush=True)
                if i:  # the first round warms up
                    rounds.setdefault(name, []).append(rates)
        size = Path(folder, "answers.db").stat().st_size
        print(f"{n} streams: the file has {size / 2**20:.1f} MiB", file=sys.stderr)
    return rounds


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--answers", type=int, default=64, help="answers of all streams in a round")
    parser.add_argument("--generate", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side")
    args = parser.parse_args()
    for n in args.streams:
        rates = measure(args, n)
        for name, rounds in rates.items():
            text = (
                f"{n:3} streams  {name:12}  {statistics.median(rate.wall for rate in rounds):7.0f} tokens/s"
            )
            for other in ("no store", "store: false"):  # the latter is the same process
                pairs = list(zip(rounds, rates[other], strict=True))
                wall, cpu = (statistics.median(a[k] / b[k] for a, b in pairs) for k in range(2))
                text += f"  {wall:.3f} of {other}, {cpu:.3f} by processor time"
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

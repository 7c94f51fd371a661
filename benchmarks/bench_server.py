"""The server against llama-server and against the engine in process: streams of one client, in turns.

    python benchmarks/bench_server.py MODEL.gguf --llama-server PATH
    python benchmarks/bench_server.py MODEL.gguf --streams 1 8 32 --rounds 7

Each side gets prompts of random tokens and generates as many greedily; each round has other prompts. The client does as
little as it can: it looks for the first event and for the end of each answer. ``in process`` is the asyncio engine of
the same build, without HTTP. Rates are generated tokens per second from the first request to the last answer; first
tokens are medians. Ratios are medians of the ratios of a round's neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from local_server import SERVE, running

import llamapipe as lp


class Round(NamedTuple):
    """Generated tokens per second, and the median time to the first token in seconds."""

    rate: float
    first_s: float


Prompts = list[list[int]] | list[str]
Side = Callable[[Prompts], Round]
N_CTX = 256
_SILENCE_S = 120  # a server that sends nothing for so long hangs


def over_http(ports: int | list[int], n_generate: int, model: str | None = None) -> Side:
    """Streams from a server, or several in turn, all requests at once on connections made before."""
    turns = [ports] if isinstance(ports, int) else ports

    def run(prompts: Prompts) -> Round:
        connections = [
            socket.create_connection(("127.0.0.1", turns[i % len(turns)])) for i in range(len(prompts))
        ]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests = [request(prompt, n_generate, model) for prompt in prompts]
        selector = selectors.DefaultSelector()
        read = {connection.fileno(): bytearray() for connection in connections}
        firsts: list[float] = []
        began = time.perf_counter()
        for connection, data in zip(connections, requests, strict=True):
            connection.sendall(data)
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            ready_keys = selector.select(_SILENCE_S)
            if not ready_keys:
                raise RuntimeError(f"a server sent nothing for {_SILENCE_S} s")
            for key, _ in ready_keys:
                text, ready = read[key.fd], key.fileobj
                assert isinstance(ready, socket.socket)
                had_event = b"data:" in text[:2000]
                came = ready.recv(1 << 16)
                text += came
                if text and not text.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the server said {bytes(text[:500])!r}")
                if not had_event and b"data:" in text[:2000]:
                    firsts.append(time.perf_counter() - began)
                if not came or text.endswith(b"\r\n0\r\n\r\n"):
                    selector.unregister(ready)
        seconds = time.perf_counter() - began
        for connection in connections:
            connection.close()
        n_tokens = 0
        for text in read.values():
            usage = text.rpartition(b'"completion_tokens":')[2]
            if not usage[:1].isdigit():
                raise RuntimeError(f"the server said {bytes(text[:500])!r}")
            n_tokens += int(usage.split(b",")[0].split(b"}")[0])
        return Round(n_tokens / seconds, statistics.median(firsts))

    return run


def request(prompt: list[int] | str, n_generate: int, model: str | None = None) -> bytes:
    """A whole HTTP request for a stream."""
    body = json.dumps(
        {
            "prompt": prompt, "max_tokens": n_generate, "temperature": 0, "ignore_eos": True, "speculate": "off",
            "stream": True, "stream_options": {"include_usage": True}, **({"model": model} if model else {}),
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def in_process(engine: lp.Engine, n_generate: int) -> Side:
    """Streams of the asyncio engine in this process."""
    params = lp.SamplingParams(temperature=0, max_tokens=n_generate, ignore_eos=True, speculate="off")

    async def stream(prompt: list[int] | str, began: float) -> float:
        first = 0.0
        async for _ in engine.astream(prompt, params):
            first = first or time.perf_counter() - began
        return first

    async def every(prompts: Prompts) -> Round:
        began = time.perf_counter()
        firsts = await asyncio.gather(*(stream(prompt, began) for prompt in prompts))
        seconds = time.perf_counter() - began
        return Round(len(prompts) * n_generate / seconds, statistics.median(firsts))

    return lambda prompts: asyncio.run(every(prompts))


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, n: int, n_vocab: int) -> dict[str, list[Round]]:
    """All rounds of all sides for a number of streams."""
    ours = [*SERVE, "-m", args.model, "--n-seq-max", n, "--n-ctx", N_CTX, "--n-threads", args.threads]
    rounds: dict[str, list[Round]] = {}
    say(f"{n} streams: starting the servers")
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {
            "llamapipe serve": over_http(stack.enter_context(running(*ours)).port, args.generate)
        }
        if args.llama_server:
            theirs = [
                args.llama_server, "-m", args.model, "-np", n, "-c", n * N_CTX, "-t", args.threads, "-tb", args.threads,
                "-b", 2048, "-ub", 512, "--no-cache-prompt", "--cache-ram", 0, "--log-disable", "-no-kvu",
            ]  # fmt: skip
            sides["llama-server"] = over_http(stack.enter_context(running(*theirs)).port, args.generate)
        engine = stack.enter_context(lp.Engine(args.model, n_ctx=N_CTX, n_seq_max=n, n_threads=args.threads))
        sides["in process"] = in_process(engine, args.generate)
        rng = random.Random(n)
        for i in range(args.rounds + 1):
            prompts = [[rng.randrange(300, n_vocab) for _ in range(args.prompt)] for _ in range(n)]
            for name, side in sides.items():
                result = side(prompts)
                say(f"{n} streams, round {i} of {args.rounds}, {name}: {result.rate:.0f} tokens/s")
                if i:  # the first round warms up
                    rounds.setdefault(name, []).append(result)
    return rounds


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, help="the program of the pinned llama.cpp")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--generate", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side")
    args = parser.parse_args()
    with lp.Model(args.model, vocab_only=True) as model:
        n_vocab = model.n_vocab
    for n in args.streams:
        rounds = measure(args, n, n_vocab)
        ours = rounds["llamapipe serve"]
        for name, results in rounds.items():
            rate = statistics.median(result.rate for result in results)
            first_ms = 1e3 * statistics.median(result.first_s for result in results)
            ratio = statistics.median(a.rate / b.rate for a, b in zip(ours, results, strict=True))
            first = statistics.median(a.first_s / b.first_s for a, b in zip(ours, results, strict=True))
            print(
                f"{n:3} streams  {name:15}  {rate:7.0f} tokens/s  first {first_ms:6.1f} ms  "
                f"serve is {ratio:.2f} of it in rate, {first:.2f} in first token"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

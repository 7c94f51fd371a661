"""The server under clients that stream, hang up, send malformed requests and stay idle; counts the leaks afterwards.

    python benchmarks/soak_server.py [MODEL.gguf] --seconds 120 --clients 64
    python benchmarks/soak_server.py --clients 256 --idle 2000 --seconds 30

Fails if a well-formed request is not answered, if a sequence or a descriptor is left, or if memory grows by more than
5 % after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import llamapipe as lp
from llamapipe.server import ServerSettings, serve


def rss_mb() -> float:
    """Resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def n_descriptors() -> int:
    """Open descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def raw(body: bytes, path: str = "/v1/completions") -> bytes:
    """A whole HTTP request."""
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body


class Clients:
    """Clients of one server until a time, and what happened to their requests."""

    def __init__(self, port: int, end: float, n_ctx: int) -> None:
        self.port = port
        self.end = end
        self.n_ctx = n_ctx
        self.counts: Counter[str] = Counter()

    async def client(self, seed: int) -> None:
        """One client: a request after another, some of them bad, some of them given up."""
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            kind = rng.choices(("stream", "whole", "hang up", "malformed", "too long"), (6, 2, 4, 1, 1))[0]
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await self.one(kind, rng, reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.counts[f"{kind}: connection lost"] += 1
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def one(
        self, kind: str, rng: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One request on a connection of its own."""
        n = self.n_ctx * 2 if kind == "too long" else rng.randrange(4, 64)
        prompt = [rng.randrange(300, 2000) for _ in range(n)]
        body: dict[str, object] = {"prompt": prompt, "max_tokens": rng.randrange(4, 64), "ignore_eos": True}
        body["stream"] = kind in ("stream", "hang up")
        text = json.dumps(body).encode()
        if kind == "malformed":
            text = rng.choice((text[:-3], b"\xff" + text, b"[]", text.replace(b"prompt", b"promt")))
        request = raw(text)
        if kind == "hang up" and rng.random() < 0.3:
            writer.write(request[: rng.randrange(1, len(request))])
            await writer.drain()
            self.counts["hang up: in the request"] += 1
            return
        writer.write(request)
        await writer.drain()
        if kind == "hang up":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 3000)), rng.random() * 0.1)
            self.counts["hang up: in the answer"] += 1
            return
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        if status == 200 and kind == "stream":
            await reader.readuntil(b"data: [DONE]\n\n")
        self.counts[f"{kind}: {status}"] += 1


async def run(port: int, args: argparse.Namespace, n_ctx: int) -> Counter[str]:
    """All clients, and connections that only stay open."""
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(args.idle)]
    clients = Clients(port, time.monotonic() + args.seconds, n_ctx)
    tasks = [asyncio.ensure_future(clients.client(seed)) for seed in range(args.clients)]
    memory: list[float] = []
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=max(args.seconds / 40, 0.5))
        memory.append(rss_mb())
        print(f"\r{memory[-1]:6.0f} MB  {sum(clients.counts.values()):7} requests", end="", file=sys.stderr)
    for task in tasks:
        task.result()
    for _, writer in idle:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    for reader, writer in idle:
        clients.counts[f"idle: {(await reader.readuntil(b'}')).split(b' ')[1].decode()}"] += 1
        writer.close()
    quarter = memory[len(memory) // 4 :]
    print(f"\nmemory {quarter[0]:.0f} to {quarter[-1]:.0f} MB", file=sys.stderr)
    assert quarter[-1] < quarter[0] * 1.05, f"memory grew: {quarter}"
    return clients.counts


async def first(port: int) -> None:
    """A request that makes the server allocate what it keeps for ever."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw(b'{"prompt": "a", "max_tokens": 2, "stream": true}'))
    await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()


def main() -> int:
    """Runs the clients and checks for leaks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path, nargs="?", default=lp.demo_model_path())
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--idle", type=int, default=0, help="connections that stay open without a request")
    args = parser.parse_args()
    settings = ServerSettings(max_requests=4096)
    with lp.Engine(args.model, n_ctx=256, n_seq_max=16) as engine, serve(engine, settings=settings) as server:
        asyncio.run(first(server.port))
        before = n_descriptors()
        counts = asyncio.run(run(server.port, args, engine.n_ctx))
        end = time.monotonic() + 10
        while (engine.stats().n_active or n_descriptors() > before) and time.monotonic() < end:
            time.sleep(0.05)
        stats = engine.stats()
        engine.check_integrity()
        for what, n in sorted(counts.items()):
            print(f"{what:28} {n:7}")
        left = n_descriptors() - before
        print(f"left: {stats.n_active} requests, {stats.n_queued} queued, {left} descriptors")
        expected = {"stream: 200", "whole: 200", "malformed: 400", "too long: 400", "idle: 200"}
        wrong = {what for what in counts if not what.startswith("hang up")} - expected
        assert not wrong, wrong
        assert not stats.n_active and not stats.n_queued and left <= 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

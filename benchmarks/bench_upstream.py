"""What it costs the front process of several models to read an answer: our HTTP client against h11 and httpcore.

    python benchmarks/bench_upstream.py
    python benchmarks/bench_upstream.py --answers 500 --parts 50 --rounds 9

A process answers over a Unix socket, each time in parts of 100 bytes, as a stream of tokens comes. The clients read in
turns. ``CPU`` is the processor time of the client's process for an answer; ``parts`` is in how many pieces it got one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import h11
import httpcore

from llamapipe.fleet._upstream import Upstream

SIZE = 100
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PART = b"%x\r\n%b\r\n" % (SIZE, b"x" * SIZE)
Client = Callable[[str, int], Coroutine[None, None, tuple[int, int]]]  # bytes and parts of so many answers


def serve(path: str, n_parts: int) -> None:
    """The other process."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(HEAD)
                for _ in range(n_parts):
                    writer.write(PART)
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")

    async def run() -> None:
        server = await asyncio.start_unix_server(answer, path)
        await server.serve_forever()

    asyncio.run(run())


async def ours(path: str, n: int) -> tuple[int, int]:
    """``Upstream``."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, path)
    upstream = await Upstream.over(sock)
    n_bytes = n_parts = 0
    for _ in range(n):
        await upstream.send([b"GET / HTTP/1.1", b"host: localhost"], b"")
        async for part in upstream.parts():
            n_bytes += len(part)
            n_parts += 1
    upstream.close()
    return n_bytes, n_parts


async def with_h11(path: str, n: int) -> tuple[int, int]:
    """h11 over asyncio's streams."""
    reader, writer = await asyncio.open_unix_connection(path)
    connection = h11.Connection(h11.CLIENT)
    n_bytes = n_parts = 0
    for _ in range(n):
        request = h11.Request(method="GET", target="/", headers=[("host", "localhost")])
        writer.write(connection.send(request) or b"")
        connection.send(h11.EndOfMessage())
        while not isinstance(got := connection.next_event(), h11.EndOfMessage):
            if got is h11.NEED_DATA:
                connection.receive_data(await reader.read(2**16))
            elif isinstance(got, h11.Data):
                n_bytes += len(got.data)
                n_parts += 1
        connection.start_next_cycle()
    writer.close()
    return n_bytes, n_parts


async def with_httpcore(path: str, n: int) -> tuple[int, int]:
    """Httpcore's pool."""
    n_bytes = n_parts = 0
    async with httpcore.AsyncConnectionPool(uds=path) as pool:
        for _ in range(n):
            async with pool.stream("GET", "http://localhost/") as response:
                async for part in response.aiter_stream():
                    n_bytes += len(part)
                    n_parts += 1
    return n_bytes, n_parts


CLIENTS: dict[str, Client] = {"ours": ours, "h11": with_h11, "httpcore": with_httpcore}


def main() -> None:
    """Runs the clients in turns and prints the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--parts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "socket"))
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(path, args.parts), daemon=True
        )
        server.start()
        while not Path(path).exists():
            time.sleep(0.05)
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in CLIENTS}
        for _ in range(args.rounds):
            for name, client in CLIENTS.items():
                began = time.process_time()
                n_bytes, n_parts = asyncio.run(client(path, args.answers))
                spent = time.process_time() - began
                assert n_bytes == args.answers * args.parts * SIZE
                rounds[name].append((spent / args.answers * 1e6, n_parts / args.answers))
        server.terminate()
    print("| client | CPU, µs an answer | parts |\n|---|---|---|")
    for name, rows in rounds.items():
        cpu, parts = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {cpu:,.0f} | {parts:.0f} |")


if __name__ == "__main__":
    main()

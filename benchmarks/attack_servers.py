"""HTTP servers under attack: what each candidate below the ASGI application does, in a bounded time and number.

    python benchmarks/attack_servers.py                                  # llamapipe's layer over uvicorn
    python benchmarks/attack_servers.py httptools h11 granian hypercorn  # others, where they are installed

Each serves the same small application on the loopback address, in its own process. The program sends heads
without end, two million fields, 400 unfinished heads, 40 unfinished bodies of 15 MB, offers of HTTP/2, HTTP/1.0 and
ambiguous requests, and prints the answers, the memory that they cost, and how long ``/health`` took meanwhile. Then it
measures 256 streams of 64 events. Use it to choose a server, or before a new version of one is used;
``tests/server/attacks/test_attacks.py`` holds the server to the results.
"""

from __future__ import annotations

import argparse
import asyncio
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from local_server import free_port, healthy

KINDS = ("llamapipe", "httptools", "h11", "granian", "hypercorn")
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
EVENT = b'data: {"object":"text_completion","choices":[{"index":0,"text":"abc","finish_reason":null}]}\n\n'
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
REQUESTS = {
    "h2c, body": POST + H2C + b"Content-Length: 5\r\n\r\nhello",
    "HTTP/1.0 stream": b"GET /stream?2 HTTP/1.0\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nhello",
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": POST + CHUNKED + b"\r\nzz\r\nhello\r\n0\r\n\r\n",
    "space in a name": b"POST / HTTP/1.1\r\nHost : localhost\r\nContent-Length: 0\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "line feeds only": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "folded line": GET + b"A: b\r\n c\r\n\r\n",
}


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers the number of bytes of a body; ``/stream?N`` sends N events."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    n, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        n += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/stream":
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
        )
        for _ in range(int(scope["query_string"])):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
        return
    body = b"%d" % n
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(kind: str, port: int) -> None:
    """Serves the application until the process is ended."""
    if kind == "granian":
        from granian import Granian

        Granian(
            "attack_servers:application",
            port=port,
            interface="asgi",
            loop="asyncio",
            log_enabled=False,
            http="1",
        ).serve()
    elif kind == "hypercorn":
        from hypercorn.asyncio import serve as run
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"127.0.0.1:{port}"]
        config.errorlog = None
        asyncio.run(run(application, config))
    else:
        import uvicorn

        http: Any = kind
        if kind == "llamapipe":
            from llamapipe.server.connections import Connection, Connections

            http = partial(Connection, limits=Connections(1024, 10.0))
        uvicorn.run(
            application, port=port, http=http, loop="asyncio", lifespan="off", log_level="critical", ws="none"
        )


class Target:
    """A server under attack."""

    def __init__(self, kind: str) -> None:
        self.port = free_port()
        here = Path(__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, str(self.port)],
            cwd=here,
            env={"PYTHONPATH": str(here.parent), "PATH": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 60
        while not healthy(self.port):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{kind} does not start; is it installed?")
            time.sleep(0.05)

    def connect(self, timeout_s: float = 5.0) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)

    def answer(self, data: bytes) -> bytes:
        """What it says to some data, until it is silent for half a second."""
        said = b""
        with self.connect(0.5) as client, suppress(OSError):
            client.sendall(data)
            while part := client.recv(65536):
                said += part
        return said

    def _pids(self) -> list[int]:
        task = Path(f"/proc/{self.process.pid}/task")
        children = [path.read_text().split() for path in task.glob("*/children")]
        return [self.process.pid, *(int(pid) for pids in children for pid in pids)]

    def memory_mb(self) -> int:
        """Memory in use, of its processes."""
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids()]
        return sum(int(text.partition("VmRSS:")[2].split()[0]) for text in texts) // 1024

    def cpu_s(self) -> float:
        """Processor time, of its processes."""
        texts = [Path(f"/proc/{pid}/stat").read_text() for pid in self._pids()]
        return sum(sum(map(int, text.rpartition(")")[2].split()[11:13])) for text in texts) / 100

    def health(self) -> str:
        """How long ``/health`` takes now."""
        began = time.monotonic()
        said = self.answer(GET + b"Connection: close\r\n\r\n")
        return f"/health {(time.monotonic() - began) * 1e3:.0f} ms" if b"200" in said[:15] else "/health dead"


def send_until_refused(client: socket.socket, part: bytes, n: int) -> str:
    """Sends a part again and again, then reads the answer."""
    sent = 0
    with suppress(OSError):
        for _ in range(n):
            client.sendall(part)
            sent += len(part)
    said = b""
    with suppress(OSError):
        said = client.recv(1000)
    return f"{sent / 2**20:.0f} MB sent, {said[9:12].decode() or 'no answer'}"


@contextmanager
def many(target: Target, n: int, data: bytes) -> Iterator[list[socket.socket]]:
    """Connections that each send some data."""
    clients = [target.connect() for _ in range(n)]
    try:
        for client in clients:
            client.sendall(data)
        yield clients
    finally:
        for client in clients:
            client.close()


def fill(clients: list[socket.socket], n_bytes: int, seconds: float) -> None:
    """Sends as much to each as it takes within a time."""
    left = dict.fromkeys(clients, n_bytes)
    for client in clients:
        client.setblocking(False)
    end = time.monotonic() + seconds
    while left and time.monotonic() < end:
        for client in list(left):
            with suppress(BlockingIOError):
                try:
                    left[client] -= client.send(b"x" * min(65536, left[client]))
                except (BrokenPipeError, ConnectionResetError):
                    left[client] = 0
                if not left[client]:
                    del left[client]


def chunks(target: Target, n: int = 256, n_events: int = 64) -> tuple[float, float]:
    """Events per second of streams side by side, and microseconds of processor time for each."""
    selector = selectors.DefaultSelector()
    ends: dict[Any, bytes] = {}
    before, began = target.cpu_s(), time.monotonic()
    with many(target, n, b"GET /stream?%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % n_events) as clients:
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
            ends[client] = b""
        while ends:
            for key, _ in selector.select():
                part = key.fileobj.recv(2**18)  # type: ignore[union-attr]
                ends[key.fileobj] = (ends[key.fileobj] + part)[-20:]
                if not part or ends[key.fileobj].endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fileobj)
                    del ends[key.fileobj]
    seconds = time.monotonic() - began
    return n * n_events / seconds, (target.cpu_s() - before) / (n * n_events) * 1e6


def attack(kind: str) -> None:
    """Attacks one server and prints what it does."""
    target = Target(kind)
    try:
        print(kind)
        before = target.memory_mb()
        with target.connect() as client:
            client.sendall(GET + b"A: ")
            refusal = send_until_refused(client, b"a" * 65536, 1600)
        print(f"  a head of 100 MB: {refusal}, {target.memory_mb() - before} MB more, {target.health()}")
        with target.connect() as client:
            client.sendall(GET)
            refusal = send_until_refused(client, b"a: b\r\n" * 10_000, 200)
        print(f"  two million fields: {refusal}, {target.memory_mb() - before} MB more, {target.health()}")
        with many(target, 400, POST + b"A") as clients:
            print(f"  400 unfinished heads: {target.health()}")
            began = time.monotonic()
            clients[0].settimeout(14)
            try:
                clients[0].recv(1000)
                print(f"  an unfinished head is closed after {time.monotonic() - began:.0f} s")
            except TimeoutError:
                print("  an unfinished head is open for more than 14 s")
        before = target.memory_mb()
        with many(target, 40, POST + b"Content-Length: 15000000\r\n\r\n") as clients:
            fill(clients, 14_000_000, 10)
            print(f"  40 bodies of 15 MB: {target.memory_mb() - before} MB more, {target.health()}")
        for name, request in REQUESTS.items():
            said = target.answer(request)
            end = " in chunks" if b"chunked" in said.lower() else ""
            print(f"  {name}: {said[9:12].decode() or 'no answer'}{end}, {said[-12:]!r}")
        rounds = [chunks(target) for _ in range(5)]
        rate, cost = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"  {rate:.0f} chunks/s, {cost:.1f} us of processor time for each", flush=True)
    finally:
        target.process.terminate()
        target.process.wait()


def main() -> int:
    """Attacks the servers one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=["llamapipe"], help=", ".join(KINDS))
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], int(args.serve[1]))
        return 0
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    for kind in args.kinds:
        attack(kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())

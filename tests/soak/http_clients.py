"""HTTP clients that stream, hang up, send malformed requests and stay idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter

EXPECTED = {"stream: 200", "whole: 200", "chat: 200", "malformed: 400", "too long: 400", "idle: 200"}


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

    def unexpected(self) -> set[str]:
        """What happened and should not have."""
        return {what for what in self.counts if not what.startswith("hang up")} - EXPECTED

    async def run(self, n_clients: int, n_idle: int, seed: int) -> None:
        """All clients at once, and connections that stay open without a request until the others are done."""
        idle = [await asyncio.open_connection("127.0.0.1", self.port) for _ in range(n_idle)]
        await asyncio.gather(*(self._client(seed * n_clients + i) for i in range(n_clients)))
        for _, writer in idle:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        for reader, writer in idle:
            self.counts[f"idle: {(await reader.readuntil(b'}')).split(b' ')[1].decode()}"] += 1
            writer.close()

    async def _client(self, seed: int) -> None:
        """One client: a request after another, some of them bad, some of them given up."""
        rng = random.Random(seed)
        kinds = ("stream", "whole", "chat", "hang up", "malformed", "too long")
        while time.monotonic() < self.end:
            kind = rng.choices(kinds, (6, 2, 2, 4, 1, 1))[0]
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await self._one(kind, rng, reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.counts[f"{kind}: connection lost"] += 1
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def _one(
        self, kind: str, rng: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One request on a connection of its own."""
        n = self.n_ctx * 2 if kind == "too long" else rng.randrange(4, 64)
        body: dict[str, object] = {"max_tokens": rng.randrange(4, 64), "ignore_eos": True}
        if kind == "chat":
            body["messages"] = [{"role": "user", "content": f"Number {rng.randrange(10**6)}"}]
        else:
            body["prompt"] = [rng.randrange(300, 2000) for _ in range(n)]
        body["stream"] = kind in ("stream", "hang up")
        text = json.dumps(body).encode()
        if kind == "malformed":
            text = rng.choice((text[:-3], b"\xff" + text, b"[]", text.replace(b"prompt", b"promt")))
        request = raw(text, "/v1/chat/completions" if kind == "chat" else "/v1/completions")
        if kind == "hang up" and rng.random() < 0.1:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                for _ in range(rng.randrange(1, 150)):
                    writer.write(b" " * 100_000)
                    await writer.drain()
            self.counts["hang up: in a large body"] += 1
            return
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

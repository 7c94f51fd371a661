"""The HTTP client of the front process, for requests to a model's process.

Open it to change how bytes are transferred between the two. Answers are passed on in the pieces in which they arrive
and their bodies are not decoded. A slow reader stops the sender, because unread data stays in the socket. Use it on the
event loop's thread.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterable
from time import monotonic

import httptools

_MOST_UNREAD = 2**18  # bytes that may be read ahead
_IDLE_S = 30.0  # less than the 75 s after which the process closes idle connections


class UpstreamLostError(Exception):
    """The process closed the connection before its answer was complete."""


class Upstream(asyncio.Protocol):
    """One connection to a model's process: a request, then its answer, then the next request.

    ``status``, ``headers``: the answer's status and headers, after ``send``. ``is_free``: whether it can take a
    request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_free = True
        self._parts: deque[bytes] = deque()
        self._n_unread = 0
        self._is_complete = self._is_lost = self._is_paused = False
        self._arrived = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    async def over(cls, sock: socket.socket) -> Upstream:
        """Return a connection over a connected socket, which it owns and closes."""
        _, upstream = await asyncio.get_running_loop().create_connection(cls, sock=sock)
        return upstream

    def __repr__(self) -> str:
        return f"<Upstream {'free' if self.is_free else 'busy'}>"

    async def send(self, head: Iterable[bytes], body: bytes) -> None:
        """Send a request, and wait for the head of its answer. Raises UpstreamLostError."""
        assert self.is_free
        assert self._transport is not None
        self.is_free = self._is_complete = False
        self.status, self.headers = 0, []
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(b"\r\n".join([*head, b"content-length: %d" % len(body), b"", b""]))
        if body:
            self._transport.write(body)
        while not self.status:
            await self._wait()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the answer's body. Raises UpstreamLostError if it is incomplete."""
        while True:
            while self._parts:
                part = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
                self._parts.clear()
                self._n_unread = 0
                if self._is_paused and self._transport is not None:
                    self._is_paused = False
                    self._transport.resume_reading()
                yield part
            if self._is_complete:
                return
            await self._wait()

    async def body(self) -> bytes:
        """Return the whole body of the answer. Raises UpstreamLostError."""
        return b"".join([part async for part in self.parts()])

    def close(self) -> None:
        """Close the connection. The process then cancels an unanswered request."""
        self.is_free = False
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._is_lost:
            raise UpstreamLostError
        self._arrived.clear()
        await self._arrived.wait()

    # ---- called by the event loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. The event loop calls this once."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._n_unread > _MOST_UNREAD and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the connection is lost. The event loop calls this once."""
        self._is_lost, self.is_free = True, False
        self._arrived.set()

    # ---- called by the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header of the answer."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Record the status at the end of the answer's head."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._parts.append(body)
        self._n_unread += len(body)

    def on_message_complete(self) -> None:
        """Record the end of the answer."""
        self._is_complete = True
        self.is_free = not self._is_lost and self._parser.should_keep_alive()


class Upstreams:
    """The idle connections to one process."""

    def __init__(self) -> None:
        self._free: deque[tuple[float, Upstream]] = deque()

    def __repr__(self) -> str:
        return f"<Upstreams {len(self._free)} free>"

    def take(self) -> Upstream | None:
        """Take an idle connection that is still open; return None if there is none."""
        while self._free:
            since, upstream = self._free.pop()
            if upstream.is_free and monotonic() - since <= _IDLE_S:
                return upstream
            upstream.close()
        return None

    def put_back(self, upstream: Upstream) -> None:
        """Keep a connection for the next request if its answer was read to the end. Otherwise, close it."""
        if upstream.is_free:
            self._free.append((monotonic(), upstream))
        else:
            upstream.close()

    def close(self) -> None:
        """Close all idle connections. Call it when the process has ended."""
        for _, upstream in self._free:
            upstream.close()
        self._free.clear()

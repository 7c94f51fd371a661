"""What a supervisor and a worker tell each other, over two socket pairs.

Connections go over the first: one byte for each, with the socket attached, then one byte back when the worker has
taken it, or could not, and one when it has ended. Retiring and stopping are bytes there, too, so that they come after
all connections that were sent before. Everything else goes over the second, a line of JSON for each message. If one
side ends, the other reads the end of both.
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

CONNECTION, RETIRE, STOP, CANCEL = b"c", b"r", b"s", b"k"  # to the worker
TAKEN, REFUSED, ENDED = b"t", b"f", b"e"  # from the worker
_LINE_LIMIT = 2**24


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is told on its command line.

    ``connections``, ``messages``: descriptors of its ends of the socket pairs. ``devices``: names of the devices that
    its model may use; None: all. ``own_weights``: it reads the model into memory of its NUMA node, instead of mapping a
    file whose pages are on the node that read them first.
    """

    index: int
    connections: int
    messages: int
    n_threads: int
    devices: tuple[str, ...] | None = None
    own_weights: bool = False

    def text(self) -> str:
        """The options as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> WorkerOptions:
        """The options from JSON. Raises ValueError."""
        try:
            fields = json.loads(text)
            devices = fields.pop("devices")
            return cls(**fields, devices=None if devices is None else tuple(devices))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no options of a worker: {text}") from error

    def report_failure(self, message: str, is_usage: bool) -> None:
        """Tells the supervisor why this worker cannot serve. Raises OSError if there is none."""
        line = _encoded("failed", {"message": message, "is_usage": is_usage})
        with socket.socket(fileno=self.messages) as sock:
            sock.sendall(line)


class Messages:
    """The second socket. On an event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Messages:
        """Takes over a socket."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_LINE_LIMIT))

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message without waiting; does nothing if the other side is gone."""
        if not self._writer.is_closing():
            self._writer.write(_encoded(kind, fields))

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    async def close(self) -> None:
        """Closes the socket after what was sent has gone out."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def _encoded(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"

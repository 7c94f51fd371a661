"""The messages between a process of a fleet and the one that started it.

They talk over two socket pairs. The first carries connections: one byte for each, with the socket attached, then one
byte back when the process has taken or refused it, and another when it has ended. The commands to retire and to stop
are also bytes there, so that they arrive after all connections sent before. Everything else goes over the second pair,
one line of JSON per message. If one side ends, the other reads the end of both streams.

``_process`` has the parent's side, ``worker`` the child's.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

CONNECTION, RETIRE, STOP, CANCEL, KEEP, STOP_TOOLS = b"c", b"r", b"s", b"k", b"p", b"x"  # sent to the process
TAKEN, REFUSED, ENDED = b"t", b"f", b"e"  # sent by the process
_LINE_LIMIT = 2**24
Subject = Literal["families", "requests"]  # metrics, or the entries of ``/requests``
SUBJECTS: Final[tuple[Subject, ...]] = ("families", "requests")


@dataclass(frozen=True)
class ServedModel:
    """The model of one process of a ``Pool``, whose processes have different models.

    ``file``: as ``--model`` takes it. ``names``: names for clients; answers have the first. ``embeds``: it embeds or
    ranks texts instead of generating them. ``options``: command-line options, by the names of their arguments.
    ``cache_dir``: a private folder from which it loads cached prefixes, and where it saves them at its end if asked to;
    the command line's option takes precedence. ``yields``: it leaves the cores to other processes while it loads.
    """

    file: str
    names: tuple[str, ...]
    embeds: bool
    options: dict[str, Any]
    cache_dir: str | None = None
    yields: bool = False


@dataclass(frozen=True)
class WorkerOptions:
    """The options on a worker's command line.

    ``connections``, ``messages``: descriptors of its ends of the socket pairs. ``devices``: names of the devices that
    its model may use; None: all. ``own_weights``: it reads the model into memory of its own NUMA node, because a mapped
    file's pages stay on the node that read them first. ``served``: its model, if the command line names several.
    """

    index: int
    connections: int
    messages: int
    n_threads: int
    devices: tuple[str, ...] | None = None
    own_weights: bool = False
    served: ServedModel | None = None

    def text(self) -> str:
        """Return the options as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> WorkerOptions:
        """Read the options from JSON. Raises ValueError."""
        try:
            fields = json.loads(text)
            devices, served = fields.pop("devices"), fields.pop("served")
            if served is not None:
                served = ServedModel(**{**served, "names": tuple(served["names"])})
            return cls(**fields, devices=None if devices is None else tuple(devices), served=served)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no options of a worker: {text}") from error

    def report_progress(self, fraction: float) -> None:
        """Report the fraction of the model that is loaded to the supervisor. Call it only before ``Worker.start``."""
        with socket.socket(fileno=os.dup(self.messages)) as sock, suppress(OSError):
            sock.sendall(_encode("progress", {"fraction": fraction}))

    def report_failure(self, message: str, is_usage: bool) -> None:
        """Report to the supervisor why this worker cannot serve. Raises OSError if there is no supervisor."""
        line = _encode("failed", {"message": message, "is_usage": is_usage})
        with socket.socket(fileno=self.messages) as sock:
            sock.sendall(line)


class Messages:
    """One end of the second socket pair. On an event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Messages:
        """Take over a socket."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_LINE_LIMIT))

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message without waiting; does nothing if the other side is gone."""
        if not self._writer.is_closing():
            self._writer.write(_encode(kind, fields))

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end of the stream."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    async def close(self) -> None:
        """Close the socket once all sent messages have been written."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def _encode(kind: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"

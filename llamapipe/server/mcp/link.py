"""The MCP servers of another process: a model's process uses its front's servers, a worker its supervisor's.

Open it to change how a process that runs a model reaches the process that owns the servers. There is one set of servers
for each ``llamapipe serve``, however many processes run models.

Each question uses a connection to a Unix socket in a folder that only this user may read, with one line of JSON in each
direction. If the asking process closes the connection or dies, the call is cancelled.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from llamapipe.server.mcp.servers import CLOSED, LocalServers, McpError, Result, Tool

_MOST_LINE = 2**27  # bytes; the limits of a server's messages are lower


class _Question(msgspec.Struct, omit_defaults=True):
    """A question: for the labels of all servers, for a server's tools, or for a call of a tool."""

    label: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] = {}


class _Answer(msgspec.Struct, omit_defaults=True):
    """The answer to a question: the result, or the error."""

    labels: dict[str, str | None] | None = None
    tools: list[Tool] | None = None
    result: Result | None = None
    message: str | None = None
    code: int = CLOSED


class LinkedServers:
    """The servers of the process that listens at a socket; see ``McpServers``. Raises OSError if there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as answers:
            sock.connect(str(path))
            sock.sendall(_line(_Question()))
            labels = msgspec.json.decode(answers.readline(), type=_Answer).labels
        assert labels is not None
        self.labels: Mapping[str, str | None] = labels

    def __repr__(self) -> str:
        return f"<LinkedServers {len(self.labels)}>"

    async def tools(self, label: str) -> Sequence[Tool]:
        """See ``McpServers.tools``."""
        answer = await self._ask(_Question(label))
        assert answer.tools is not None
        return answer.tools

    async def call(self, label: str, tool: str, arguments: Mapping[str, Any]) -> Result:
        """See ``McpServers.call``."""
        answer = await self._ask(_Question(label, tool, dict(arguments)))
        assert answer.result is not None
        return answer.result

    def close(self) -> None:
        """Do nothing: the other process owns the servers."""

    async def _ask(self, question: _Question) -> _Answer:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_MOST_LINE)
            try:
                writer.write(_line(question))
                answer = msgspec.json.decode(await reader.readline(), type=_Answer)
            finally:
                writer.close()
        except (OSError, ValueError) as e:  # the other process ends
            raise McpError(f"the MCP servers cannot be reached: {e}") from None
        if answer.message is not None:
            raise McpError(answer.message, answer.code)
        return answer


@contextmanager
def listening(servers: LocalServers) -> Iterator[Path]:
    """Answer other processes of this user at a socket within the context; yield its path. Raises OSError."""
    with TemporaryDirectory(prefix="llamapipe-") as folder:  # a socket needs a short path
        path = Path(folder) / "mcp"
        serving = partial(_serve, servers)
        listener = servers.begin(asyncio.start_unix_server(serving, path, limit=_MOST_LINE)).result()

        async def end() -> None:
            listener.close()

        try:
            yield path
        finally:
            servers.begin(end()).result()


async def _serve(servers: LocalServers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one question, unless the asking process goes away first."""
    with suppress(OSError, ValueError):
        question = msgspec.json.decode(await reader.readline(), type=_Question)
        answer = asyncio.ensure_future(_answer(servers, question))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                writer.write(_line(answer.result()))
                await writer.drain()
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.wait({answer, gone})
    writer.close()


async def _answer(servers: LocalServers, question: _Question) -> _Answer:
    label, tool = question.label, question.tool
    if label is None:
        return _Answer(labels=dict(servers.labels))
    try:
        if tool is None:
            return _Answer(tools=list(await servers.tools(label)))
        return _Answer(result=await servers.call(label, tool, question.arguments))
    except McpError as e:
        return _Answer(message=e.message, code=e.code)


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"

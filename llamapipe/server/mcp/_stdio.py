"""MCP over the standard input and output of a child process, with limits on what it may write.

Open it to change how the process of an MCP server starts and ends, and which messages of it are accepted. It is
imported when the first such server is used, because it needs the package ``mcp``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from llamapipe.server.mcp.file import StdioServer

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_MOST_LINE = 2**23  # bytes of a message
_MOST_UNASKED = 2**26  # bytes that a server may send between two requests
_MOST_GARBAGE = 100  # lines that are not messages, such as banners
_MOST_STDERR = 2000  # bytes of the end of its standard error, for the log
_GRACE_S = 2.0  # the wait after its input is closed, and again after SIGTERM
# As with other clients, a child gets only these variables and those of its entry, not, for example, API keys.
_INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR")
if sys.platform == "win32":  # without SYSTEMROOT, programs do not start
    _INHERITED += ("SYSTEMROOT", "SYSTEMDRIVE", "COMSPEC", "PATHEXT", "TEMP", "TMP")
    _INHERITED += ("USERNAME", "USERPROFILE", "APPDATA", "LOCALAPPDATA")
# What the streams of the package raise when the other end is closed.
_CLOSED = (anyio.ClosedResourceError, anyio.BrokenResourceError)


class StdioProcess:
    """A child process that speaks MCP on its standard input and output.

    ``ended``: set when the child has closed its output or broken a rule. ``problem``: the rule that it broke.
    ``read_at``: when its last message arrived.
    """

    def __init__(self, entry: StdioServer) -> None:
        self._entry = entry
        self.ended = asyncio.Event()
        self.problem: str | None = None
        self.read_at = 0.0
        self._stderr = b""
        self._n_unasked = self._n_garbage = 0
        self._is_ending = False

    def __repr__(self) -> str:
        return f"<StdioProcess {self._entry.label}>"

    def last_words(self) -> str:
        """Return the end of what the child wrote to its standard error, for the log."""
        text = self._stderr.decode(errors="replace").strip()
        return f"; it wrote: {text}" if text else ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[TransportStreams]:
        """Run the child within the context, as a transport of the package ``mcp``."""
        entry = self._entry
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            entry.command,
            *entry.args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited | dict(entry.env),
            cwd=entry.cwd,
            limit=_MOST_LINE,
            start_new_session=True,
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            into, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            write, out_of = anyio.create_memory_object_stream[SessionMessage](0)
            tasks += [
                asyncio.ensure_future(self._read(process, into)),
                asyncio.ensure_future(self._write(process, out_of)),
                asyncio.ensure_future(self._read_stderr(process)),
            ]
            async with into, read, write, out_of:
                yield read, write
        finally:
            self._is_ending = True
            # In a separate task, because this one may be cancelled again.
            await asyncio.shield(asyncio.ensure_future(_stop(process, tasks)))

    async def _read(self, process: asyncio.subprocess.Process, into: Any) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._n_unasked += len(line)
                if self._n_unasked > _MOST_UNASKED:
                    self._is_bad(
                        process, f"wrote {self._n_unasked} bytes that nobody asked for, and is ended"
                    )
                    return
                if line.isspace():
                    continue
                try:
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError:
                    self._n_garbage += 1
                    if self._n_garbage > _MOST_GARBAGE:
                        self._is_bad(process, "writes lines that are not MCP messages, and is ended")
                        return
                    continue
                self.read_at = monotonic()
                await into.send(message)
            if not self._is_ending:
                self.problem = "ended"
        except ValueError:  # raised by readline
            self._is_bad(process, f"wrote a message of more than {_MOST_LINE} bytes, and is ended")
        except (OSError, *_CLOSED):
            pass
        finally:
            self.ended.set()
            with suppress(Exception):
                into.close()

    def _is_bad(self, process: asyncio.subprocess.Process, problem: str) -> None:
        """Kill a child that broke a rule."""
        self.problem = problem
        _end(process, at_once=True)

    async def _write(self, process: asyncio.subprocess.Process, out_of: Any) -> None:
        assert process.stdin is not None
        with suppress(OSError, *_CLOSED):
            async for item in out_of:
                self._n_unasked = 0
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Read the child's standard error, so that it never blocks, and keep the end."""
        assert process.stderr is not None
        while part := await process.stderr.read(2**16):
            self._stderr = (self._stderr + part)[-_MOST_STDERR:]


# ---- its end
async def _stop(process: asyncio.subprocess.Process, tasks: Sequence[asyncio.Task[None]]) -> None:
    """End a child and its descendants: close its input, wait, then send signals to its process group."""
    assert process.stdin is not None
    ended = asyncio.ensure_future(process.wait())
    try:
        with suppress(OSError):
            process.stdin.close()
        for at_once in (None, False, True):
            if at_once is not None:
                _end(process, at_once)
            if (await asyncio.wait({ended}, timeout=_GRACE_S))[0]:
                break
    finally:
        _end(process, at_once=True)  # end processes that the child left behind
        for task in (*tasks, ended):
            task.cancel()
        transport = getattr(process, "_transport", None)  # grandchildren may hold the pipes open
        if transport is not None:
            transport.close()
    await asyncio.wait({*tasks, ended})


def _end(process: asyncio.subprocess.Process, at_once: bool) -> None:
    """Send SIGTERM to a child's process group, or SIGKILL if ``at_once``.

    Windows has no such signals, so there only the child is killed.
    """
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL if at_once else signal.SIGTERM)

"""MCP servers, as child processes or at addresses: the tools that they list, and calls of these tools.

Open it to change how an MCP server is found, called and replaced; ``_stdio.py`` and ``_http.py`` carry the messages.

A server is somebody else's program: it may be slow, hang, die, or write without end, and this must affect only calls of
that server. So all servers are used on the event loop of a separate thread, and their messages are limited before they
are parsed. All requests share one set of servers. A server that has ended is started again when it is needed. If a
caller is cancelled, its call is cancelled.

The official package ``mcp`` implements the protocol. It is imported when the first server starts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

import llamapipe
from llamapipe._messages import quoted
from llamapipe.server.mcp.file import HttpServer, McpEntry, StdioServer

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import Transport

    from llamapipe.server.mcp._stdio import StdioProcess

T = TypeVar("T")
MOST_TOOLS = 1024  # of a server: a grammar cannot have more
_MOST_PAGES = 64
_MOST_ERROR = 300  # characters
_MOST_END_S = 10.0
_CANCEL_S = 2.0  # the wait for a request that was cancelled
_LATER_S = 1.0  # extra time, because the package itself ends a request at its limit
TIMED_OUT, CLOSED = -32001, -32000  # the package's codes
_LOST = (CLOSED, -32600, -32603)  # its codes for a useless address or a lost session
_log = logging.getLogger("llamapipe.server")


class Tool(msgspec.Struct, frozen=True):
    """A tool that a server lists. ``input_schema``: a JSON schema. ``is_read_only``: as the server says."""

    name: str
    description: str
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None

    @property
    def is_read_only(self) -> bool:
        """Whether the server says that the tool changes nothing."""
        return (self.annotations or {}).get("readOnlyHint") is True


class Image(msgspec.Struct, frozen=True):
    """An image of a result, in base64."""

    mime_type: str
    data: str


class Result(msgspec.Struct, frozen=True):
    """The result of a call: texts and images, in order. ``is_error``: the tool says that it failed."""

    parts: list[str | Image]
    is_error: bool


class McpError(Exception):
    """An MCP server cannot be used, or answered with an error. ``code``: the JSON-RPC error code."""

    def __init__(self, message: str, code: int = CLOSED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class McpServers(Protocol):
    """The servers of a file, in this process or in another. Use it on an event loop's thread."""

    @property
    def labels(self) -> Mapping[str, str | None]:
        """The servers: the address of each, or None for a child process."""

    async def tools(self, label: str) -> Sequence[Tool]:
        """Return the tools that a server lists. Raises McpError, KeyError for an unknown label."""

    async def call(self, label: str, tool: str, arguments: Mapping[str, Any]) -> Result:
        """Call a tool. If the task is cancelled, the call is, too. Raises McpError, KeyError for an unknown label."""

    def close(self) -> None:
        """End the servers that this object owns. Any thread may call it. A second call does nothing."""


class LocalServers:
    """The servers of this process; see ``McpServers``. ``start`` begins to start them, without waiting.

    ``timeout_s``: the limit for each call. ``start_s``: the limit for a start, and for listing the tools; by default,
    ``timeout_s``. Tasks of any event loop may call the methods.
    """

    def __init__(
        self, entries: Mapping[str, McpEntry], timeout_s: float, start_s: float | None = None
    ) -> None:
        self.labels = {
            label: entry.url if isinstance(entry, HttpServer) else None for label, entry in entries.items()
        }
        self._thread = LoopThread("llamapipe-mcp")
        self._connections = {label: Connection(entry, timeout_s, start_s) for label, entry in entries.items()}

    def __repr__(self) -> str:
        return f"<LocalServers {len(self._connections)}>"

    def start(self) -> None:
        """Start all servers, so that the first request need not wait. Failures are logged."""
        for connection in self._connections.values():
            self._thread.begin(connection.warm())

    async def tools(self, label: str) -> Sequence[Tool]:
        """See ``McpServers.tools``."""
        return await self._thread.run(self._connections[label].tools())

    async def call(self, label: str, tool: str, arguments: Mapping[str, Any]) -> Result:
        """See ``McpServers.call``."""
        return await self._thread.run(self._connections[label].call(tool, arguments))

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run another coroutine on the servers' loop. Raises McpError after ``close``."""
        return self._thread.begin(coroutine)

    def close(self) -> None:
        """End all servers, and wait a few seconds at most for their processes."""
        self._thread.close([connection.close for connection in self._connections.values()])


class ListedServer:
    """A server of the operator's file, which all requests share."""

    def __init__(self, servers: McpServers, label: str) -> None:
        self._servers = servers
        self._label = label

    def __repr__(self) -> str:
        return f"<ListedServer {self._label}>"

    async def tools(self) -> Sequence[Tool]:
        """See ``McpServers.tools``."""
        return await self._servers.tools(self._label)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        """See ``McpServers.call``."""
        return await self._servers.call(self._label, tool, arguments)

    def end(self) -> None:
        """Do nothing: other requests may need the server."""


class RemoteServers:
    """Servers at addresses that clients name. Requests do not share these, because clients may send secrets to them.

    ``hosts``: the hosts that clients may name. Tasks of any event loop may call the methods, any thread ``close``.
    """

    def __init__(self, hosts: Sequence[str], timeout_s: float) -> None:
        self.hosts = hosts
        self._timeout_s = timeout_s
        self._thread = LoopThread("llamapipe-mcp-remote")
        self._used: set[RemoteServer] = set()

    def __repr__(self) -> str:
        return f"<RemoteServers {len(self._used)}>"

    def open(self, label: str, url: str, headers: Mapping[str, str]) -> RemoteServer:
        """Return a server to use until its ``end``. It is not contacted before its first request."""
        connection = Connection(HttpServer(label, url, headers), self._timeout_s, hosts=self.hosts)
        return RemoteServer(self._thread, connection, self._used)

    def close(self) -> None:
        """End all servers."""
        self._thread.close([server.connection.close for server in tuple(self._used)])


class RemoteServer:
    """A server of ``RemoteServers``. ``used``: a set that holds it from its first request until its end."""

    def __init__(self, thread: LoopThread, connection: Connection, used: set[RemoteServer]) -> None:
        self.connection = connection
        self._thread = thread
        self._used = used

    def __repr__(self) -> str:
        return f"<RemoteServer {self.connection!r}>"

    async def tools(self) -> Sequence[Tool]:
        """See ``McpServers.tools``."""
        self._used.add(self)
        return await self._thread.run(self.connection.tools())

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        """See ``McpServers.call``."""
        self._used.add(self)
        return await self._thread.run(self.connection.call(tool, arguments))

    def end(self) -> None:
        """End the server, which the client no longer needs. Does not wait."""
        if self in self._used:
            self._used.discard(self)
            with suppress(McpError):  # all servers have ended
                self._thread.begin(self.connection.close())


# A server that a request may use.
McpServer = ListedServer | RemoteServer


class LoopThread:
    """An event loop in a thread, which starts on first use."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._has_begun = self._is_closed = False

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name}>"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Raises McpError after ``close``."""
        with self._lock:
            if self._is_closed:
                coroutine.close()
                raise McpError("the server is shutting down")
            if not self._has_begun:
                self._has_begun = True
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for a task of another loop, and return its result. A cancelled task cancels it."""
        return await asyncio.wrap_future(self.begin(coroutine))

    def close(self, endings: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()) -> None:
        """Run ``endings`` on the loop, then end the thread. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._has_begun:
                self._loop.close()
                return

        async def end() -> None:
            await asyncio.gather(*(ending() for ending in endings), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Connection:
    """One server, which is started when needed, and again after it has ended. Use it on one event loop.

    ``hosts``: the hosts that clients may name, if a client named this address; otherwise None.
    """

    def __init__(
        self,
        entry: McpEntry,
        timeout_s: float,
        start_s: float | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        self._entry = entry
        self._limits_s = (timeout_s, timeout_s if start_s is None else start_s)
        self._hosts = hosts
        self._life: _Life | None = None
        self._ending: set[_Life] = set()  # earlier lives, whose processes may still run
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Connection {self._entry.label}>"

    async def warm(self) -> None:
        """Start the server, and log whether it is ready."""
        with suppress(McpError):  # it is already in the log
            n = len(await self.tools())
            _log.info("the MCP server %s is ready: %d tools", quoted(self._entry.label), n)

    async def tools(self) -> list[Tool]:
        """Return the server's tools, cached until the list changes or the server ends. Raises McpError."""
        return await self._current_life().tools()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        """Call a tool. Raises McpError."""
        return await self._current_life().call(tool, arguments)

    async def close(self) -> None:
        """End the server."""
        self._is_closed = True
        lives = {*self._ending, *((self._life,) if self._life is not None else ())}
        await asyncio.gather(*(life.end() for life in lives))

    def _current_life(self) -> _Life:
        if self._is_closed:
            raise McpError("the server is shutting down")
        life = self._life
        if life is None or life.is_over:
            self._ending = {
                ending for ending in (*self._ending, life) if ending is not None and not ending.has_ended
            }
            life = self._life = _Life(self._entry, self._limits_s, self._hosts)
        return life


class _Life:
    """A server from one start to its end.

    One task owns the connection; requests run in the tasks of their callers. ``is_over``: it takes no more requests.
    ``n_running``: the number of requests that wait for answers.
    """

    def __init__(self, entry: McpEntry, limits_s: tuple[float, float], hosts: Sequence[str] | None) -> None:
        self._entry = entry
        self._timeout_s, self._start_s = limits_s
        self._hosts = hosts
        self._stdio: StdioProcess | None = None
        self._listing: asyncio.Task[list[Tool]] | None = None
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_look_at)
        self._owner = asyncio.ensure_future(self._keep_open())
        self.is_over = self._is_ending = False
        self.n_running = 0

    def __repr__(self) -> str:
        return f"<_Life {self._entry.label} n_running={self.n_running}{' over' if self.is_over else ''}>"

    async def tools(self) -> list[Tool]:
        """Return the tools that the server lists. Raises McpError."""
        if self._listing is None:
            self._listing = asyncio.ensure_future(self._ask(self._read_tools, self._start_s))
            self._listing.add_done_callback(self._finish_listing)
        return await asyncio.shield(self._listing)

    def _finish_listing(self, task: asyncio.Task[list[Tool]]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._listing is task:
            self._listing = None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        """Call a tool. Raises McpError."""
        return _result(
            await self._ask(
                lambda client: client.call_tool(tool, dict(arguments), self._timeout_s), self._timeout_s
            )
        )

    async def end(self) -> None:
        """End the server, even if callers wait for answers, and wait until it has ended."""
        self._finish()
        await asyncio.wait({self._owner}, timeout=_MOST_END_S)

    @property
    def has_ended(self) -> bool:
        return self._owner.done()

    def _finish(self) -> None:
        """Begin to end the server. Cancels its task only once, so that nothing interrupts the end of the process."""
        self.is_over = True
        ends_itself = self._stdio is not None and self._stdio.ended.is_set()
        if not self._is_ending and not ends_itself:
            self._is_ending = True
            self._owner.cancel()

    # ---- its task
    async def _keep_open(self) -> None:
        """Keep the connection open until the server ends or ``end`` is called."""
        try:
            from mcp import Client
            from mcp.types import Implementation

            async with Client(
                self._new_transport(),
                read_timeout_seconds=self._start_s,
                message_handler=self._on_message,
                client_info=Implementation(name="llamapipe", version=llamapipe.__version__),
                cache=None,
            ) as client:
                self._ready.set_result(client)
                await (self._stdio.ended if self._stdio is not None else asyncio.Event()).wait()
        except asyncio.CancelledError:
            pass
        except Exception as e:
            why = self._reason(e)
            if self._ready.done():
                self._tell(f"is gone: {why}")
            else:
                self._tell(f"did not start: {why}{self._last_words()}")
                self._ready.set_exception(self._error(f"did not start: {why}"))
        else:
            if not self.is_over:
                self._tell(f"{self._problem}{self._last_words()}")
        finally:
            self.is_over = True
            if not self._ready.done():
                self._ready.set_exception(self._error("ended before it was ready"))

    @property
    def _problem(self) -> str:
        return (None if self._stdio is None else self._stdio.problem) or "ended the connection"

    def _last_words(self) -> str:
        return "" if self._stdio is None else self._stdio.last_words()

    def _new_transport(self) -> Transport:
        if isinstance(self._entry, StdioServer):
            from llamapipe.server.mcp._stdio import StdioProcess

            self._stdio = StdioProcess(self._entry)
            return self._stdio.running()
        from llamapipe.server.mcp._http import over_http

        return over_http(self._entry.url, self._entry.headers, self._hosts)

    async def _on_message(self, message: object) -> None:
        if getattr(message, "method", None) == "notifications/tools/list_changed":
            self._listing = None

    # ---- requests
    async def _ask(self, ask: Callable[[Client], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """Send a request and return its answer. Raises McpError. Sets ``is_over`` if the server is no longer usable."""
        self.n_running += 1
        try:
            client = await self._await_start()
            began = monotonic()
            task = asyncio.ensure_future(ask(client))
            try:
                await asyncio.wait(
                    {task, self._owner},
                    timeout=limit_s + _LATER_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if task.done():
                    return task.result()
                raise (
                    self._error(self._problem) if self._owner.done() else self._timeout_error(began, limit_s)
                )
            except Exception as e:
                raise self._explain(e, began, limit_s) from None
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=_CANCEL_S)
        finally:
            self.n_running -= 1
            if self.is_over and not self.n_running:
                self._finish()

    async def _await_start(self) -> Client:
        done, _ = await asyncio.wait({self._ready}, timeout=self._start_s)
        if not done:
            what = f"did not start within {self._start_s:g} seconds"
            if not self.is_over:
                self._tell(f"{what} (--mcp-timeout){self._last_words()}")
            self._finish()
            raise self._error(what, TIMED_OUT)
        return self._ready.result()

    def _explain(self, error: Exception, began: float, limit_s: float) -> McpError:
        if isinstance(error, McpError):
            return error
        code = getattr(getattr(error, "error", None), "code", None)  # the code of the package's MCPError
        if code == TIMED_OUT:
            return self._timeout_error(began, limit_s)
        if self._stdio is not None and self._stdio.ended.is_set():
            self.is_over = True
            return self._error(self._problem)
        if code is None:
            return self._error(f"answered what cannot be used: {self._reason(error)}")
        # The session may be gone, so the next request begins another.
        if self._stdio is None and code in _LOST:
            self.is_over = True
        return McpError(_short(str(error)), int(code))

    def _timeout_error(self, began: float, limit_s: float) -> McpError:
        """Return the error for a request that was not answered in time.

        A child that sent nothing during that time hangs. It is ended, and the next request starts another.
        """
        if self._stdio is not None and self._stdio.read_at < began and not self.is_over:
            self._tell("hangs, and is ended")
            self._finish()
        return self._error(f"did not answer within {limit_s:g} seconds", TIMED_OUT)

    async def _read_tools(self, client: Client) -> list[Tool]:
        """Return the tools of all pages of the list. If two have the same name, keep the first. Raises McpError."""
        tools: dict[str, Tool] = {}
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if tool.name in tools:
                    self._tell(f"lists two tools called {quoted(tool.name)}: the first one counts")
                    continue
                notes = tool.annotations
                shown = (
                    None if notes is None else notes.model_dump(by_alias=True, mode="json", exclude_none=True)
                )
                tools[tool.name] = Tool(tool.name, tool.description or "", dict(tool.input_schema), shown)
            if len(tools) > MOST_TOOLS:
                raise self._error(f"lists over {MOST_TOOLS} tools, the most that a request can have")
            cursor = page.next_cursor
            if cursor is None:
                return list(tools.values())
        raise self._error(f"lists its tools in over {_MOST_PAGES} pages")

    def _error(self, what: str, code: int = CLOSED) -> McpError:
        return McpError(f"the MCP server {quoted(self._entry.label)} {what}", code)

    def _tell(self, what: str) -> None:
        _log.warning("the MCP server %s %s", quoted(self._entry.label), what)

    def _reason(self, error: BaseException) -> str:
        while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:  # of a task group
            error = inner[0]
        if isinstance(error, FileNotFoundError) and isinstance(self._entry, StdioServer):
            return f"there is no command {quoted(self._entry.command)}, or no folder to run it in"
        if self._stdio is not None and self._stdio.problem is not None:
            return self._stdio.problem
        if isinstance(error, ImportError):
            return f"it needs the package mcp: pip install 'llamapipe[mcp]' ({error})"
        return _short(str(error) or type(error).__name__)


def _look_at(future: asyncio.Future[Any]) -> None:
    """Retrieve an exception that nobody awaits, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


def _short(text: str) -> str:
    return text if len(text) <= _MOST_ERROR else f"{text[:_MOST_ERROR]} …"


# ---- results
def _result(answer: Any) -> Result:
    """Convert a ``CallToolResult`` of the package. Parts without a text or an image are only named."""
    parts: list[str | Image] = []
    for block in answer.content:
        kind = block.type
        if kind == "text":
            parts.append(block.text)
        elif kind == "image":
            parts.append(Image(block.mime_type, block.data))
        elif kind == "audio":
            parts.append(f"[audio: {block.mime_type}]")
        elif kind == "resource_link":
            parts.append(f"[resource {block.name}: {block.uri}]")
        elif (text := getattr(block.resource, "text", None)) is not None:
            parts.append(text)
        else:
            parts.append(f"[resource {block.resource.uri}: {block.resource.mime_type or 'binary'}]")
    if not parts and answer.structured_content is not None:
        parts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    return Result(parts, answer.is_error)

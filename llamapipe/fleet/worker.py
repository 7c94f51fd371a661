"""Runs in each worker process of a fleet: serves the connections that the supervisor hands over.

The worker also asks the supervisor for the metrics and requests of the other workers.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.fleet import link
from llamapipe.fleet._tasks import Tasks
from llamapipe.fleet.link import Messages, Subject, WorkerOptions
from llamapipe.host.cores import limit_cores
from llamapipe.server.application import app
from llamapipe.server.connections import Connection
from llamapipe.server.mcp.servers import McpServers
from llamapipe.server.metrics import Family, Metrics, render
from llamapipe.server.run import HttpServer
from llamapipe.server.settings import ServerSettings
from llamapipe.server.state import ServerState

_ANSWER_S = 5.0  # longer than the supervisor waits for a busy worker
_RETIRE_IDLE_S = 5  # how long a retiring worker waits for a request on a connection


class Worker:
    """One worker's link to its supervisor.

    Create it before the model is loaded. From then on, the process ends when its supervisor ends; once the worker is
    serving, it drains first. ``n_ready``, ``n_workers``: how many of the server's workers are ready, and how many there
    are, as the supervisor last reported. ``keeps_cache``: save cached prefixes for the model's next process.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.n_ready = self.n_workers = 0
        self.keeps_cache = self._has_failed = False
        limit_cores(options.n_threads)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # only the supervisor handles it
        self._connections = socket.socket(fileno=options.connections)
        self._connections.setblocking(False)
        self.is_serving = False
        self._unsent = b""
        self._questions: dict[int, asyncio.Future[list[Any]]] = {}
        self._n_questions = 0
        watch = threading.Thread(target=self._watch, name="llamapipe-supervisor-watch", daemon=True)
        watch.start()

    def __repr__(self) -> str:
        return f"<Worker {self.options.index}>"

    def _watch(self) -> None:
        """End the process if the supervisor ends during a load, which nothing else can interrupt."""
        poll = select.poll()
        poll.register(self._connections, 0)  # no events but the hang-up, which poll() always reports
        poll.poll()
        if not self.is_serving:
            os._exit(1)

    async def start(self, server: WorkerServer, metrics: Metrics) -> None:
        """Report that this worker is ready, and take connections from now on."""
        self._server = server
        self._metrics = metrics
        self._messages = await Messages.open(socket.socket(fileno=self.options.messages))
        self._task = asyncio.ensure_future(self._listen())
        self.is_serving = True
        self._messages.send("ready")
        asyncio.get_running_loop().add_reader(self._connections, self._read)

    async def finish(self) -> None:
        """Report the last metrics and requests, and stop taking connections."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connections)
        loop.remove_writer(self._connections)
        for about in link.SUBJECTS:
            await self._tell(0, about)
        await self._messages.close()
        self._task.cancel()

    def fail(self, message: str) -> None:
        """End this worker, which can no longer answer; the supervisor starts another one if necessary."""
        if not self._has_failed:
            self._has_failed = True
            self._messages.send("failed", message=message, is_usage=False)
            self._messages.send("leaving")
            self._server.stop(cancel=False)

    def leave(self) -> None:
        """Ask the supervisor to let this worker retire."""
        self._messages.send("leaving")

    async def text(self) -> bytes:
        """Return the metrics of all workers, or of this worker if the supervisor does not answer."""
        families = await self._ask("families")
        if families is None:
            return await asyncio.to_thread(self._metrics.text)
        return render(Family(*family) for family in families)

    async def requests(self) -> list[dict[str, Any]]:
        """Return the entries of ``GET /requests`` of all workers.

        If the supervisor does not answer, return only this worker's entries.
        """
        requests = await self._ask("requests")
        return self._recent_entries() if requests is None else requests

    def _recent_entries(self) -> list[dict[str, Any]]:
        entries = self._server.state.recent.entries()
        if self.options.served is not None:  # these entries name the model
            return entries
        return [{**entry, "worker": self.options.index} for entry in entries]

    async def _ask(self, about: Subject) -> list[Any] | None:
        """Return all workers' reports about a subject; None if the supervisor does not answer."""
        self._n_questions += 1
        number = self._n_questions
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._messages.send("ask", number=number, about=about)
        try:
            return await asyncio.wait_for(answer, _ANSWER_S)
        except (asyncio.TimeoutError, ConnectionError):
            return None
        finally:
            del self._questions[number]

    # ---- from the supervisor
    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, descriptors = b"", []
        if data == link.CONNECTION:
            # Without a free descriptor, no socket arrives with the byte.
            self._send(link.TAKEN if descriptors else link.REFUSED)
            for descriptor in descriptors:
                self._server.connect(_tcp_socket(descriptor), partial(self._send, link.ENDED))
        elif data == link.KEEP:
            self.keeps_cache = True
        elif data == link.STOP_TOOLS:
            self._server.state.stop_tools()
        elif data == link.RETIRE:
            self._server.retire()
        elif data == link.STOP:
            self._server.stop(cancel=False)
        elif data == link.CANCEL:
            self._server.stop(cancel=True)
        else:  # the supervisor has ended
            asyncio.get_running_loop().remove_reader(self._connections)
            self._server.stop(cancel=False)

    def _send(self, data: bytes) -> None:
        self._unsent += data
        loop = asyncio.get_running_loop()
        try:
            self._unsent = self._unsent[self._connections.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent = b""
        if self._unsent:
            loop.add_writer(self._connections, self._send, b"")
        else:
            loop.remove_writer(self._connections)

    async def _listen(self) -> None:
        told = Tasks()
        while (message := await self._messages.receive()) is not None:
            if message["kind"] == "workers":
                self.n_ready, self.n_workers = message["n_ready"], message["n_workers"]
            elif message["kind"] == "snapshot":
                told.start(self._tell(message["number"], message["about"]))
            elif message["kind"] == "answer":
                answer = self._questions.get(message["number"])
                if answer is not None and not answer.done():
                    answer.set_result(message["found"])
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the supervisor has ended"))

    async def _tell(self, number: int, about: Subject) -> None:
        with suppress(Exception):  # for example, the engine is closed
            answer = (
                self._recent_entries()
                if about == "requests"
                else await asyncio.to_thread(self._metrics.families)
            )
            self._messages.send("snapshot", number=number, about=about, found=answer)


def _tcp_socket(descriptor: int) -> socket.socket:
    """Return a descriptor's socket and set its protocol, which some systems do not report. See ``bound_socket``."""
    sock = socket.socket(fileno=descriptor)
    if sock.proto == socket.IPPROTO_TCP:
        return sock
    return socket.socket(sock.family, sock.type, socket.IPPROTO_TCP, fileno=sock.detach())


class WorkerServer(HttpServer):
    """Serves connections that the supervisor accepted. Use it on its event loop's thread."""

    def __init__(self, application: Starlette, worker: Worker, bound_to: str) -> None:
        super().__init__(application, bound_to, [("x-llamapipe-worker", str(worker.options.index))])
        self.worker = worker
        self._n_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retiring = False
        self._tasks, self._connecting = Tasks(), Tasks()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Retire at the first signal to this worker; end without waiting at the second."""
        self._n_signals += 1
        if self._n_signals == 1 and self._loop is not None:
            self._loop.call_soon_threadsafe(self.worker.leave)
        else:
            self.stop(cancel=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start without sockets to listen on."""
        await super().startup(sockets=[])
        await self.worker.start(self, self.state.metrics)
        self._loop = asyncio.get_running_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the running requests, then report the last metrics."""
        await super().shutdown(sockets=[])
        await self.worker.finish()

    def connect(self, sock: socket.socket, ended: Callable[[], None]) -> None:
        """Serve a connection, and call ``ended`` when it is closed."""
        self._connecting.start(self._connect(sock, ended))

    async def _connect(self, sock: socket.socket, ended: Callable[[], None]) -> None:
        def protocol() -> Connection:
            connection = Connection(self.config, self.server_state, self.lifespan.state, limits=self.limits)
            connection.ended = ended
            return connection

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, sock)
        except OSError:  # the client is gone
            sock.close()
            ended()

    def retire(self) -> None:
        """Answer requests on the open connections, close them as they become idle, and end."""
        if not self._retiring:
            self._retiring = True
            self._tasks.start(self._retire())

    async def _retire(self) -> None:
        # If a connection were closed immediately, a request on its way would fail. So the next answer on each
        # connection announces that it is the last, and only idle connections are closed.
        close = (b"connection", b"close")
        self.config.encoded_headers = [*self.config.encoded_headers, close]
        self.server_state.default_headers = [*self.server_state.default_headers, close]
        before = {connection: connection.cycle for connection in self._open()}
        for connection in before:
            connection.timeout_keep_alive = _RETIRE_IDLE_S
        asyncio.get_running_loop().call_later(_RETIRE_IDLE_S, partial(self._close_idle, before))
        while (self._connecting or self.server_state.connections) and not self.should_exit:
            await asyncio.sleep(0.05)
        self.stop(cancel=False)

    def _open(self) -> list[Connection]:
        return [other for other in self.server_state.connections if isinstance(other, Connection)]

    def _close_idle(self, before: Mapping[Connection, object]) -> None:
        for connection in self._open():
            cycle: RequestResponseCycle | None = connection.cycle  # None before the first request
            if before.get(connection) is cycle and (cycle is None or cycle.response_complete):
                connection.shutdown()

    def stop(self, cancel: bool) -> None:
        """Refuse new requests, and end when the running ones are answered, or immediately if ``cancel``."""
        self.state.draining = self.should_exit = True
        if cancel:
            self.force_exit = True


def run_worker(
    engine: Engine | None,
    worker: Worker,
    host: str,
    settings: ServerSettings,
    embedder: Embedder | None,
    mcp: McpServers | None,
) -> None:
    """Serve an engine on the connections that a supervisor gives to this worker. For the main thread.

    ``host``: the address that the supervisor listens on. ``mcp``: the supervisor's MCP servers.
    """
    application = app(engine, settings, embedder)
    state: ServerState = application.state.llamapipe
    state.is_behind_front = worker.options.served is not None
    state.worker = worker
    state.mcp = mcp
    WorkerServer(application, worker, host).run_program()

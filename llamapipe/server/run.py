"""Runs a server with uvicorn: ``llamapipe serve``, or from Python in another thread.

SIGTERM and Ctrl-C drain the server: it closes its port and idle connections, and ends when the running requests are
answered. A second signal cancels them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.host.at_exit import is_exiting
from llamapipe.server._application import ServerState, app
from llamapipe.server._connections import Connection, Connections
from llamapipe.server._front import Front, front_app
from llamapipe.server._gate import Gate
from llamapipe.server.pool import ModelEntry, Pool
from llamapipe.server.processes import has_terminal
from llamapipe.server.settings import ServerSettings
from llamapipe.server.worker import Worker
from llamapipe.structured.compile import prepare_vocabulary

_log = logging.getLogger("llamapipe.server")
BACKLOG = 2048  # connections that the system holds until they are accepted
_ACCEPT_AT_ONCE = 64  # connections that are accepted before the first of them is looked at
_RETIRE_IDLE_S = 5  # a retiring worker waits this long for a request on a connection


class _Uvicorn(uvicorn.Server):
    """Tells the application about a signal at once: uvicorn itself does so only after the last answer."""

    state: Gate
    limits: Connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets more connections wait in the system than are accepted at once: each of these needs a descriptor."""
        await super().startup(sockets=sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers the running requests, then closes what they store in."""
        await super().shutdown(sockets=sockets)
        await asyncio.to_thread(self.state.close_store)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Starts draining; a second signal ends the server without waiting."""
        self.state.draining = True
        if self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True


class _WorkerUvicorn(_Uvicorn):
    """Serves connections that a supervisor accepted; see ``ConnectionServer``."""

    worker: Worker

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._n_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retiring = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def handle_exit(self, sig: int, frame: object) -> None:
        """The first signal to this worker lets it retire, a second one ends it without waiting."""
        self._n_signals += 1
        if self._n_signals == 1 and self._loop is not None:
            self._loop.call_soon_threadsafe(self.worker.leave)
        else:
            self.stop(cancel=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Without sockets to listen on."""
        await super().startup(sockets=[])
        await self.worker.start(self, self.state.metrics)
        self._loop = asyncio.get_running_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers the running requests, then tells the last metrics."""
        await super().shutdown(sockets=[])
        await self.worker.finish()

    def connect(self, sock: socket.socket, ended: Callable[[], None]) -> None:
        """Serves a connection, and calls ``ended`` when it is closed."""
        _keep_until_done(self._connect(sock, ended), self._connecting)

    async def _connect(self, sock: socket.socket, ended: Callable[[], None]) -> None:
        def protocol() -> Connection:
            made = Connection(self.config, self.server_state, self.lifespan.state, limits=self.limits)
            made.ended = ended
            return made

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, sock)
        except OSError:  # the client is gone
            sock.close()
            ended()

    def retire(self) -> None:
        """Answers what comes on the connections that there are, closes them as they become idle, and ends."""
        if not self._retiring:
            self._retiring = True
            _keep_until_done(self._retire(), self._tasks)

    async def _retire(self) -> None:
        # To close a connection at once could cross a request on its way, which its client would see fail. So the next
        # answer on each says that it is the last, and only those without a request for a while are closed.
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
        """Refuses new requests and ends when the running ones are answered; ``cancel``: at once."""
        self.state.draining = self.should_exit = True
        if cancel:
            self.force_exit = True


class _FrontUvicorn(_Uvicorn):
    """Serves the models of a pool, and ends their processes at its end."""

    front: Front
    pool: Pool

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._n_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._had_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()

    def _hang_up(self) -> None:
        """Reads the list of models again. Where the terminal was closed, stops, as programs without a handler do."""
        if self._had_terminal and not has_terminal():
            self.handle_exit(signal.SIGHUP, None)
            return
        _keep_until_done(self._reload(), self._tasks)

    async def _reload(self) -> None:
        with suppress(OSError, ValueError):  # which are in the log
            await self.front.reload()

    def handle_exit(self, sig: int, frame: object) -> None:
        """The first signal starts draining, the second cancels what runs, the third kills the processes."""
        super().handle_exit(sig, frame)
        self._n_signals += 1
        if self._n_signals > 1 and self._loop is not None:
            self._loop.call_soon_threadsafe(self.pool.cancel, self._n_signals > 2)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Loads what is wanted at the start."""
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():  # as uvicorn itself
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self.pool.start()
        if self.state.settings.ollama:
            _keep_until_done(self.front.describe_all(), self._tasks)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers the running requests, then ends the processes."""
        self.pool.end_watches()
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets=sockets)
        if self.force_exit:
            self.pool.cancel()
        await self.pool.close()
        self.front.close()


def _keep_until_done(coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Starts a task; a loop alone would let it be collected."""
    task = asyncio.ensure_future(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on an address.

    Create it before the model is loaded: the port is then known and reserved. Raises OSError if the address
    cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio sets TCP_NODELAY only on sockets that name it. Without it, the second part of an answer
    # waits up to 40 ms for the client's acknowledgement of the first.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.set_inheritable(True)
    except BaseException:
        sock.close()
        raise
    return sock


def _host_of(sock: socket.socket) -> str:
    """The address that a socket listens on; that of a Unix socket is no loopback address."""
    address = sock.getsockname()
    return str(address[0]) if isinstance(address, tuple) else f"unix:{address!s}"


S = TypeVar("S", bound=_Uvicorn)


def _server(kind: type[S], application: Starlette, headers: list[tuple[str, str]] | None = None) -> S:
    state: Gate = application.state.llamapipe
    limits = Connections(state.settings.max_connections_per_address, state.settings.head_timeout_s)
    config = uvicorn.Config(
        application,
        headers=headers,
        http=partial(Connection, limits=limits),  # type: ignore[arg-type]
        loop="asyncio",
        lifespan="off",  # handle_exit() and close() set ``draining`` instead
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_ACCEPT_AT_ONCE,
        timeout_keep_alive=75,
        ws="none",  # there is no such route, and a connection must not change its protocol
    )
    logging.getLogger("uvicorn.error").addFilter(_until_exit)
    server = kind(config)
    server.state, server.limits = state, limits
    return server


def _until_exit(record: logging.LogRecord) -> bool:
    """Requests that the end of the interpreter cuts are no errors of the application, as uvicorn says."""
    return not is_exiting()


def run_server(
    engine: Engine | None,
    sock: socket.socket,
    settings: ServerSettings | None = None,
    embedder: Embedder | None = None,
    more_sockets: Sequence[socket.socket] = (),
) -> None:
    """Serves an engine on a socket until SIGTERM or Ctrl-C. For the main thread; engine and embedder stay open.

    ``more_sockets``: further sockets to serve; they listen on the same address.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _server(_Uvicorn, app(engine, settings, embedder))
    server.state.bound_to = _host_of(sock)
    server.run(sockets=[sock, *more_sockets])


def run_worker(
    engine: Engine | None,
    worker: Worker,
    host: str,
    settings: ServerSettings | None = None,
    embedder: Embedder | None = None,
) -> None:
    """Serves an engine on the connections that a supervisor gives to this worker. For the main thread.

    ``host``: the address that the supervisor listens on.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    headers = [("x-llamapipe-worker", str(worker.options.index))]
    application = app(engine, settings, embedder)
    state: ServerState = application.state.llamapipe
    state.is_behind_front = worker.options.served is not None
    server = _server(_WorkerUvicorn, application, headers)
    server.worker = state.worker = worker
    server.state.bound_to = host
    server.run(sockets=[])


def run_front(
    pool: Pool,
    sock: socket.socket,
    settings: ServerSettings,
    entries: Callable[[], Sequence[ModelEntry]],
    more_sockets: Sequence[socket.socket] = (),
) -> None:
    """Serves several models on a socket until SIGTERM or Ctrl-C. For the main thread.

    ``entries``: the models after SIGHUP, or ``/models?reload=1``; raises OSError or ValueError to leave them as they
    are. Called in another thread.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    application = front_app(settings, pool, entries)
    server = _server(_FrontUvicorn, application)
    server.pool, server.front = pool, application.state.llamapipe
    server.state.bound_to = _host_of(sock)
    server.run(sockets=[sock, *more_sockets])


class serve:  # noqa: N801  (used like a function: ``with serve(engine) as server``)
    """Serves an engine, an embedder or both from a thread, until ``close``.

    A ``with`` block closes it at its end::

        with lp.Engine("model.gguf") as engine, llamapipe.server.serve(engine, port=8000) as server:
            print(server.url)

    ``port`` 0 chooses a free port. Any thread. Raises OSError if the address cannot be used, ImportError without the
    extra ``server``.
    """

    def __init__(
        self,
        engine: Engine | None,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: ServerSettings | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        application = app(engine, settings, embedder)
        if engine is not None:  # here, not while the first request with a schema holds up the others
            prepare_vocabulary(engine.model.vocab)
        try:
            self._socket = bound_socket(host, port)
        except BaseException:
            application.state.llamapipe.close_store()
            raise
        self._server = _server(_Uvicorn, application)
        self.host, self.port = self._socket.getsockname()[:2]
        self._server.state.bound_to = self.host
        self._thread = threading.Thread(target=self._run, name="llamapipe-server", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<serve {self.url}>"

    @property
    def url(self) -> str:
        """The server's address, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def close(self, drain: bool = True) -> None:
        """Stops the server; the engine stays open. ``drain``: answer the running requests first."""
        self._server.state.draining = True
        self._server.should_exit = True
        if not drain:
            self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> serve:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

"""Runs a server with uvicorn, for ``llamapipe serve`` or from Python in another thread.

SIGTERM and Ctrl-C drain the server: it closes its port and idle connections, and ends when the running requests are
answered. A second signal cancels these requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType

import uvicorn
from starlette.applications import Starlette

from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.host.at_exit import is_exiting
from llamapipe.server.application import app
from llamapipe.server.connections import Connection, Connections
from llamapipe.server.gate import Gate
from llamapipe.server.settings import ServerSettings
from llamapipe.structured.compile import prepare_vocabulary

BACKLOG = 2048  # connections that the system holds until they are accepted
_ACCEPT_AT_ONCE = 64  # connections that are accepted before any is read


class HttpServer(uvicorn.Server):
    """Serves one application with uvicorn. Reports a signal to the application immediately, not after the last answer.

    ``bound_to``: the address that it listens on. ``headers``: sent with every answer. ``state``: the gate that all
    requests pass.
    """

    def __init__(
        self, application: Starlette, bound_to: str, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.state: Gate = application.state.llamapipe
        self.state.bound_to = bound_to
        settings = self.state.settings
        self.limits = Connections(settings.max_connections_per_address, settings.head_timeout_s)
        config = uvicorn.Config(
            application,
            headers=list(headers),
            http=partial(Connection, limits=self.limits),  # type: ignore[arg-type]
            loop="asyncio",
            lifespan="off",  # handle_exit() and close() set ``draining`` instead
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_ACCEPT_AT_ONCE,
            timeout_keep_alive=75,
            ws="none",  # no route has WebSockets, and a connection must not change its protocol
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_until_exit)

    def run_program(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Serve until SIGTERM or Ctrl-C. Call it in the main thread of a program that does nothing else."""
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self.run(sockets=list(sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, with a long backlog, in which waiting connections need no descriptor."""
        await super().startup(sockets=sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)
        self.state.start_background()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the running requests, then close the resources that they used."""
        self.state.stop_tools()
        await self.state.stop_background()
        await super().shutdown(sockets=sockets)
        await asyncio.to_thread(self.state.release)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Start draining; a second signal ends the server without waiting."""
        self.state.draining = True
        if self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Create it before the model is loaded: the port is then known and reserved. Raises OSError if the address
    cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The socket names its protocol, because asyncio sets TCP_NODELAY only on such sockets. Without TCP_NODELAY, the
    # second part of an answer waits up to 40 ms for the client's acknowledgement of the first.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere, the option would let other programs take the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.set_inheritable(True)
    except BaseException:
        sock.close()
        raise
    return sock


def host_of(sock: socket.socket) -> str:
    """Return the address that a socket listens on; for a Unix socket ``unix:PATH``, which is not a loopback address."""
    address = sock.getsockname()
    return str(address[0]) if isinstance(address, tuple) else f"unix:{address!s}"


def _until_exit(record: logging.LogRecord) -> bool:
    """Return False for log records about requests that were cut off by the end of the server or the interpreter.

    uvicorn would log these requests as errors of the application.
    """
    is_cut = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not is_cut and not is_exiting()


def run_server(
    engine: Engine | None,
    sock: socket.socket,
    settings: ServerSettings,
    embedder: Embedder | None,
    more_sockets: Sequence[socket.socket],
) -> None:
    """Serve an engine on a socket until SIGTERM or Ctrl-C. Call it in the main thread.

    The engine and the embedder stay open. ``more_sockets``: further sockets that listen on the same address.
    """
    HttpServer(app(engine, settings, embedder), host_of(sock)).run_program([sock, *more_sockets])


class serve:  # noqa: N801  (used like a function: ``with serve(engine) as server``)
    """Serves an engine, an embedder or both from a thread, until ``close``.

    A ``with`` block closes the server at its end::

        with lp.Engine("model.gguf") as engine, llamapipe.server.serve(engine, port=8000) as server:
            print(server.url)

    ``port`` 0 chooses a free port. Any thread may use the server. Raises OSError if the address cannot be used,
    ImportError without the extra ``server``.
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
        if engine is not None:  # now, because it would hold up the first request with a schema
            prepare_vocabulary(engine.model.vocab)
        try:
            self._socket = bound_socket(host, port)
        except BaseException:
            application.state.llamapipe.release()
            raise
        self.host, self.port = self._socket.getsockname()[:2]
        self._server = HttpServer(application, self.host)
        run = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, name="llamapipe-server", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<serve {self.url}>"

    @property
    def url(self) -> str:
        """The server's address, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self, drain: bool = True) -> None:
        """Stop the server; the engine stays open. ``drain``: answer the running requests first."""
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

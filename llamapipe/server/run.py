"""Runs a server with uvicorn: ``llamapipe serve``, or from Python in a thread of its own.

SIGTERM and Ctrl-C drain the server: it refuses new requests and stops when the running ones are answered. A second
signal cancels them.
"""

from __future__ import annotations

import logging
import socket
import threading
from types import TracebackType

import uvicorn

from llamapipe.embedding.embedder import Embedder
from llamapipe.engine.engine import Engine
from llamapipe.server.application import app
from llamapipe.server.settings import ServerSettings
from llamapipe.server.state import ServerState

BACKLOG = 2048  # connections that the system holds until they are accepted


class _Uvicorn(uvicorn.Server):
    """Tells the application about a signal at once: uvicorn itself does so only after the last answer."""

    state: ServerState

    def handle_exit(self, sig: int, frame: object) -> None:
        """Starts draining; a second signal ends the server without waiting."""
        self.state.draining = True
        if self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True


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


def _server(engine: Engine, settings: ServerSettings | None, embedder: Embedder | None) -> _Uvicorn:
    application = app(engine, settings, embedder)
    config = uvicorn.Config(
        application,
        http="httptools",
        loop="asyncio",
        lifespan="off",  # handle_exit() and close() set ``draining`` instead
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
    )
    server = _Uvicorn(config)
    server.state = application.state.llamapipe
    return server


def run_server(
    engine: Engine,
    sock: socket.socket,
    settings: ServerSettings | None = None,
    embedder: Embedder | None = None,
) -> None:
    """Serves an engine on a socket until SIGTERM or Ctrl-C. For the main thread; engine and embedder stay open."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    _server(engine, settings, embedder).run(sockets=[sock])


class serve:  # noqa: N801  (used like a function: ``with serve(engine) as server``)
    """Serves an engine from its own thread, until ``close``.

    A ``with`` block closes it at its end::

        with lp.Engine("model.gguf") as engine, llamapipe.server.serve(engine, port=8000) as server:
            print(server.url)

    ``port`` 0 chooses a free port. Any thread. Raises OSError if the address cannot be used, ImportError without the
    extra ``server``.
    """

    def __init__(
        self,
        engine: Engine,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: ServerSettings | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        self._socket = bound_socket(host, port)
        self._server = _server(engine, settings, embedder)
        self.host, self.port = self._socket.getsockname()[:2]
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

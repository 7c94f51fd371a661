"""One server twice: alone in this process, and as the front process of several models, which forwards to another.

Whoever attacks a server should find the same in both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette

import llamapipe as lp
from llamapipe.cli._models_file import look
from llamapipe.fleet.catalog import ModelEntry
from llamapipe.fleet.command import command_with
from llamapipe.fleet.front import Front, FrontServer
from llamapipe.fleet.placement import Placement
from llamapipe.fleet.pool import ModelState, Pool
from llamapipe.host.cores import core_shares
from llamapipe.server import ServerSettings, app, serve
from llamapipe.server.application import application_of
from llamapipe.server.run import bound_socket
from support.control import PATIENCE_S, wait_until

KINDS = ("alone", "front")


class _Alone:
    """A running server with the bundled model, by the name ``demo``. ``state``: its keys, limits and counts."""

    def __init__(self, server: serve, engine: lp.Engine) -> None:
        self.host, self.port, self.url = server.host, server.port, server.url
        self.state, self.limits = server._server.state, server._server.limits
        self._engine = engine

    def n_prompt_tokens(self) -> float:
        """Prompt tokens that the model has computed."""
        return self._engine.stats().n_prompt_tokens

    def n_active(self) -> float:
        """Requests that it computes."""
        return self._engine.stats().n_active


class _Front:
    """The same: the front in a thread of this process, the model in another process."""

    def __init__(self, host: str, settings: ServerSettings, options: dict[str, Any]) -> None:
        self._socket = bound_socket(host, 0)
        self.host, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{self.host}:{self.port}"
        self._pool = _pool(options)
        self._server = FrontServer(settings, self._pool, list, host)
        self.state, self.limits = self._server.state, self._server.limits
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        (model,) = self._pool.models
        wait_until(lambda: model.state is ModelState.LOADED)

    def _value(self, name: str) -> float:
        assert self._server.loop is not None
        asked = asyncio.run_coroutine_threadsafe(self._pool.families(), self._server.loop)
        families = asked.result(PATIENCE_S)
        return sum(value for family in families for sample, _, value in family.samples if sample == name)

    def n_prompt_tokens(self) -> float:
        return self._value("llamapipe_computed_prompt_tokens_total")

    def n_active(self) -> float:
        return self._value("llamapipe_requests_running")

    def __enter__(self) -> _Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.state.draining = self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._socket.close()


Served = _Alone | _Front


def _pool(options: dict[str, Any]) -> Pool:
    entry = ModelEntry("demo", str(lp.demo_model_path()), options=options, preload=True)
    return Pool([entry], command_with(["serve"]), Placement(core_shares(1)[0]), partial(look, {}))


class Starter:
    """Starts servers of one kind; ``options``: of the engine."""

    def __init__(self, kind: str, engine: lp.Engine, options: dict[str, Any]) -> None:
        self.kind = kind
        self._engine = engine
        self._options = options

    @contextmanager
    def __call__(self, host: str = "127.0.0.1", **settings: Any) -> Iterator[Served]:
        """A server with these settings."""
        server_settings = ServerSettings(**{"model_names": ("demo",), **settings})
        if self.kind == "front":
            with _Front(host, server_settings, self._options) as front:
                yield front
        else:
            with serve(self._engine, host, settings=server_settings) as server:
                yield _Alone(server, self._engine)

    def application(self) -> Starlette:
        """The application alone."""
        if self.kind == "front":
            front = Front(ServerSettings(), _pool(self._options), list)
            return application_of(front, front.routes())
        return app(self._engine)


@contextmanager
def starter(kind: str, model: lp.Model, **options: Any) -> Iterator[Starter]:
    """Servers of a kind of ``KINDS``, whose engine has these options."""
    with lp.Engine(model, **options) as engine:
        yield Starter(kind, engine, options)

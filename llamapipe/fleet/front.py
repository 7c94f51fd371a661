"""The front process of several models: checks clients, finds the process of a request's model, and forwards requests.

Open this file to change what a server with ``--models`` does beyond one with a single model. It has the same routes and
a few more. The front process reads only a few fields of a body, such as the name of the model, and forwards bodies and
answers unchanged. A request waits until its model is loaded; a stream gets keep-alives until then.

Keys, limits, the guard and the log belong to this process; the models' processes trust what it says about a client.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response

from llamapipe._messages import listed, quoted
from llamapipe.fleet._hang_up import on_hang_up
from llamapipe.fleet._ollama import OllamaModels
from llamapipe.fleet._proxy import Forwarded, Proxy
from llamapipe.fleet._status import Watch, entry_of
from llamapipe.fleet._tasks import Tasks
from llamapipe.fleet.catalog import ModelEntry
from llamapipe.fleet.pool import ModelState, Pool, PooledModel
from llamapipe.server.application import OLLAMA_ROUTES, PAGE_ROUTES, ROUTES, STORE_ROUTES, application_of
from llamapipe.server.body_budget import BodyBudget
from llamapipe.server.endpoint import (
    SUBMITTED,
    Endpoint,
    EventStream,
    Exchange,
    JsonResponse,
    ModelKind,
    get,
    post,
)
from llamapipe.server.errors import ApiError, shutting_down
from llamapipe.server.gate import Gate
from llamapipe.server.json_bytes import event
from llamapipe.server.mcp.file import entries_of
from llamapipe.server.metrics import CONTENT_TYPE, Family, Metrics, Sample, render
from llamapipe.server.requests.forms import form_model
from llamapipe.server.requests.ollama_models import kept_s
from llamapipe.server.routes import page, system
from llamapipe.server.run import HttpServer
from llamapipe.server.settings import ServerSettings
from llamapipe.work.long_work import LongWork
from llamapipe.work.tenant import is_of

if TYPE_CHECKING:
    from types import EllipsisType

T = TypeVar("T")


class Peeked(msgspec.Struct):
    """The fields that are read from a request's body. ``name``: the older name of ``model`` in Ollama's API."""

    model: Any = None
    name: Any = None
    stream: Any = None
    keep_alive: Any = None


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True):
    """``POST /models/load`` and ``/models/unload``."""

    model: str


_MOST_WATCHES = 100
_log = logging.getLogger("llamapipe.server")
_PEEK = msgspec.json.Decoder(Peeked)


class Front(Gate):
    """The state that all requests share in the front process."""

    def __init__(
        self, settings: ServerSettings, pool: Pool, entries: Callable[[], Sequence[ModelEntry]]
    ) -> None:
        super().__init__(settings, Metrics(None), BodyBudget(settings.max_bodies_bytes))
        self.pool = pool
        self._entries = entries
        self._reloading = asyncio.Lock()
        self.created = int(time.time())
        self.n_watches = 0  # open streams of /models/sse
        self.ollama = OllamaModels(pool, settings)
        self._proxy = Proxy(self, pool)
        self._work = LongWork()
        self._mcp_labels = () if settings.mcp is None else tuple(entries_of(Path(settings.mcp)))

    def mcp_labels(self) -> Sequence[str]:
        """See ``Gate.mcp_labels``; the models' processes share the MCP servers."""
        return self._mcp_labels

    async def convert(self, function: Callable[..., T], *arguments: Any, size: int) -> T:
        """See ``Gate.convert``."""
        return await self._work.run(function, *arguments, size=size)

    def close(self) -> None:
        """End the threads."""
        self._work.close()

    # ---- which model
    async def model_of(self, name: str | None, kind: ModelKind) -> PooledModel:
        """Return the model with this name or, without a name, the only one of this kind. Raises ApiError 400, 404."""
        if name is not None:
            return self.pool.find(name)
        await self.pool.identify(self.pool.models)
        embeds = kind == "embedding"
        able = [model for model in self.pool.models if model.embeds is embeds]
        if kind == "filling" and len(able) > 1:
            able = await self._filling(able) or able
        if len(able) == 1:
            return able[0]
        names = [model.name for model in able]
        what = f"model is missing; there is {listed(names)}" if names else "no model here does this"
        raise ApiError(400, what, "model")

    async def _filling(self, models: Sequence[PooledModel]) -> list[PooledModel]:
        """Return those models whose vocabularies have tokens for filling in the middle."""
        there = [model for model in models if model.facts is not None]
        described = await self.ollama.describe(there)
        return [
            model
            for model, shown in zip(there, described, strict=True)
            if shown is not None and "insert" in shown["capabilities"]
        ]

    async def forward(self, endpoint: Endpoint, exchange: Exchange) -> Response:
        """Forward a request to the model that its body or its query names."""
        name: object = exchange.query_params.get("model")
        is_stream = False
        ttl_s: float | EllipsisType | None = ...
        if endpoint.form:
            name = form_model(exchange.headers.get("content-type", ""), exchange.raw)
        elif exchange.raw:
            peeked = await exchange.peek(_PEEK)
            name = peeked.name if peeked.model is None else peeked.model
            if exchange.dialect == "ollama" and peeked.keep_alive not in (None, ""):
                ttl_s = kept_s(peeked.keep_alive)
            if endpoint.streams:
                is_stream = exchange.dialect == "ollama" if peeked.stream is None else peeked.stream is True
        if not isinstance(name, str | None):
            raise ApiError(400, "model must be a string", "model")
        model = await self.model_of(name or None, endpoint.model)
        await self.pool.identify([model])
        return Forwarded(self._proxy, exchange, model, endpoint.model, is_stream, ttl_s)

    # ---- about the models
    async def reload(self) -> None:
        """Read the list of models again. Raises OSError or ValueError for a bad list, and then changes nothing."""
        async with self._reloading:
            try:
                self.pool.replace(await asyncio.to_thread(self._entries))
            except (OSError, ValueError) as e:
                _log.error("the models stay as they are: %s", e)
                raise

    async def list_models(self, exchange: Exchange) -> Response:
        """``GET /v1/models``: every model, with its state. ``?reload=1``: read the list again first."""
        if exchange.query_params.get("reload"):
            try:
                await self.reload()
            except (OSError, ValueError):
                what = "the list of --models cannot be read again, and the models stay as they are; the log says why"
                raise ApiError(500, what) from None
        data = [
            entry_of(model, name, self.created, self.settings.allow_delete)
            for model in self.pool.models
            for name in (*model.names, *model.entry.adapters)
        ]
        used, budget = self.pool.used, self.pool.budget
        memory = {"used_bytes": used.n_bytes, "budget_bytes": budget.n_bytes}
        if budget.gpu_bytes is not None:
            memory |= {"gpu_used_bytes": used.gpu_bytes, "gpu_budget_bytes": budget.gpu_bytes}
        return JsonResponse({"object": "list", "data": data, "has_more": False, "memory": memory})

    async def get_model(self, exchange: Exchange) -> Response:
        """``GET /v1/models/{id}``."""
        name = exchange.path_params["id"]
        return JsonResponse(entry_of(self.pool.find(name), name, self.created, self.settings.allow_delete))

    async def delete_model(self, exchange: Exchange) -> Response:
        """``DELETE /v1/models/{id}``: answers 403 for a model of the list, and 404 for any other."""
        model = self.pool.find(exchange.path_params["id"])
        raise ApiError(
            403, f"the model {quoted(model.name)} is in the list of --models; take it out there", "model"
        )

    async def watch(self, exchange: Exchange) -> Response:
        """``GET /models/sse``: an event for each change of a state, a load's progress or the list."""
        if self.n_watches >= _MOST_WATCHES:
            raise ApiError(
                429, f"{_MOST_WATCHES} clients watch the models, which is the limit", code="too_many_requests"
            )
        return EventStream(exchange, self._changes())

    async def _changes(self) -> AsyncGenerator[bytes, None]:
        self.n_watches += 1
        try:
            told = Watch(self.pool)
            yield SUBMITTED
            seen = 0
            while (now := await self.pool.news(seen)) is not None:
                seen = now
                for change in told.changes():  # a slow reader misses changes that were undone meanwhile
                    yield event(change)
        finally:
            self.n_watches -= 1

    async def load(self, exchange: Exchange, request: ModelRequest) -> Response:
        """``POST /models/load``: begins a load and does not wait for it."""
        model = self.pool.find(request.model)
        if model.state in (ModelState.LOADED, ModelState.LOADING):
            raise ApiError(400, f"the model {quoted(model.name)} is {model.state.value} already", "model")
        self.pool.load(model)
        return JsonResponse({"success": True})

    async def unload(self, exchange: Exchange, request: ModelRequest) -> Response:
        """``POST /models/unload``: unloads a model once its requests are answered."""
        model = self.pool.find(request.model)
        if model.state not in (ModelState.LOADED, ModelState.LOADING):
            raise ApiError(400, f"the model {quoted(model.name)} is {model.state.value} already", "model")
        self.pool.unload(model)
        return JsonResponse({"success": True})

    async def timeline(self, exchange: Exchange) -> Response:
        """``GET /timeline?model=NAME``: the timeline of a loaded model. Does not keep the model loaded."""
        name = exchange.query_params.get("model")
        models = self.pool.models if name is None else [self.pool.find(name)]
        there = [model for model in models if model.state is ModelState.LOADED and not model.embeds]
        if len(there) != 1:
            return JsonResponse({"now": 0, "stages": [], "spans": [], "stats": None})
        try:
            status, body = await self._proxy.ask(exchange, there[0])
        except ConnectionError:
            raise ApiError(503, f"the process of the model {quoted(there[0].name)} ended") from None
        return Response(body, status, media_type="application/json")

    async def requests(self, exchange: Exchange) -> Response:
        """``GET /requests``: the client's recent requests, including those that reached no model, the newest first."""
        told = [*self.recent.entries(), *await self.pool.requests()]
        told.sort(key=lambda entry: -entry["ended_at"])
        last = told[: self.settings.keep_requests]
        return JsonResponse({"object": "list", "data": self.own_requests(exchange, last)})

    async def reset_prefix_cache(self, exchange: Exchange) -> Response:
        """``POST /reset_prefix_cache``: resets the cache of the model in the query, or of all models. Loads nothing."""
        system.refuse_resets(exchange)
        name = exchange.query_params.get("model")
        for model in self.pool.models if name is None else [self.pool.find(name)]:
            if not model.embeds:
                await self._reset_cache(exchange, model)
        return JsonResponse({})

    async def _reset_cache(self, exchange: Exchange, model: PooledModel) -> None:
        try:
            await self._forget_prefixes(exchange, model)
        except (OSError, ValueError) as e:
            what = f"the cached prefixes of {quoted(model.name)} cannot be forgotten: {e}"
            raise ApiError(500, what) from None

    async def _forget_prefixes(self, exchange: Exchange, model: PooledModel) -> None:
        if model.state in (ModelState.LOADED, ModelState.LOADING):
            # If the model's process ends meanwhile, its cached prefixes are gone, or in files.
            with suppress(ApiError, ConnectionError):
                async with self.pool.lease(model, model.ttl_s) as ready:
                    await ready
                    status, body = await self._proxy.ask(exchange, model)
                    if status == 200:
                        return
                    raise ValueError(body.decode(errors="replace"))
        await self.pool.forget_prefixes(model, is_of(self.tenant_of(exchange).cache))

    # ---- about the server
    async def health(self, exchange: Exchange) -> Response:
        """``GET /health``: 200, or 503 while the server drains. Loads nothing."""
        if self.draining:
            raise shutting_down()
        n_loaded = sum(model.state is ModelState.LOADED for model in self.pool.models)
        return JsonResponse({"status": "ok", "models_loaded": n_loaded, "models": len(self.pool.models)})

    async def ping(self, exchange: Exchange) -> Response:
        """``GET /ping``."""
        await self.health(exchange)
        return JsonResponse({})

    async def metrics_text(self, exchange: Exchange) -> Response:
        """``GET /metrics``: the metrics of this process and of all models, each model with a label."""
        own = self.metrics.families()
        known = {family.name for family in own}
        of_models = [family for family in await self.pool.families() if family.name not in known]
        loaded, taken = "llamapipe_model_loaded", "llamapipe_model_memory_bytes"
        states: list[Sample] = []
        bytes_of: list[Sample] = []
        for model in self.pool.models:
            labels = {"model": model.name}
            states.append((loaded, labels, float(model.state is ModelState.LOADED)))
            bytes_of.append((taken, labels, float(model.memory.n_bytes)))
        text = render(
            [
                *own,
                *of_models,
                Family(loaded, "Whether a model is loaded.", "gauge", states),
                Family(taken, "Memory that a model takes.", "gauge", bytes_of),
            ]
        )
        return Response(text, media_type=CONTENT_TYPE)

    def routes(self) -> list[Endpoint]:
        """Return the routes of a server with one model, and the routes that only several models need."""
        endpoints = [
            get("/v1/models", self.list_models, "All models, with their states.", aliases=("/models",)),
            get("/v1/models/{id:path}", self.get_model, "One model.", ("404",)),
            Endpoint("DELETE", "/v1/models/{id:path}", self.delete_model, "Refused.", ("403", "404")),
            post("/models/load", self.load, ModelRequest, "Load a model."),
            post("/models/unload", self.unload, ModelRequest, "Unload a model."),
            get("/models/sse", self.watch, "Tells states of models as they change.", ("429",),
                media=EventStream.media_type),
            get("/health", self.health, "Whether the server accepts requests.", ("503",), has_key=False,
                aliases=("/v1/health",)),
            get("/ping", self.ping, "Whether the server accepts requests.", ("503",), has_key=False),
            get("/version", system.version, "The version of llamapipe."),
            Endpoint("POST", "/reset_prefix_cache", self.reset_prefix_cache,
                "Forget the cached tokens that no request uses.", ("404",)),
            get("/metrics", self.metrics_text, "Metrics for Prometheus.", media="text/plain"),
            get("/requests", self.requests, "Where the time of the last requests went."),
            get("/openapi.json", system.openapi),
            *STORE_ROUTES,  # this process answers them from the store's file, without a model
        ]  # fmt: skip
        if self.settings.page:
            endpoints += [get("/timeline", self.timeline), *PAGE_ROUTES]
            if not self.settings.ollama:
                endpoints += [get("/", page.page, has_key=False)]
        if self.settings.ollama:
            endpoints += self.ollama.routes()
        here = {(endpoint.method, endpoint.path) for endpoint in endpoints}
        forwarded = [
            endpoint.with_handler(partial(self.forward, endpoint))
            for endpoint in (*ROUTES, *(OLLAMA_ROUTES if self.settings.ollama else ()))
            if (endpoint.method, endpoint.path) not in here
        ]
        return [*endpoints, *forwarded]


class FrontServer(HttpServer):
    """Serves the models of a pool, and ends their processes when it shuts down.

    ``entries``: reads the list of models again, on SIGHUP or ``/models?reload=1``. It is called in another thread. If
    it raises OSError or ValueError, the models are unchanged.
    """

    def __init__(
        self,
        settings: ServerSettings,
        pool: Pool,
        entries: Callable[[], Sequence[ModelEntry]],
        bound_to: str,
    ) -> None:
        self.front = Front(settings, pool, entries)
        super().__init__(application_of(self.front, self.front.routes()), bound_to)
        self.pool = pool
        self.loop: asyncio.AbstractEventLoop | None = None
        self._n_signals = 0
        self._tasks = Tasks()

    async def _reload(self) -> None:
        with suppress(OSError, ValueError):  # they are already in the log
            await self.front.reload()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Drain at the first signal, cancel running requests at the second, and kill the processes at the third."""
        super().handle_exit(sig, frame)
        self._n_signals += 1
        if self._n_signals > 1 and self.loop is not None:
            self.loop.call_soon_threadsafe(self.pool.cancel, self._n_signals > 2)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to load the models to preload."""
        await super().startup(sockets=sockets)
        self.loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():  # where uvicorn installs its own handlers
            on_hang_up(
                lambda: self._tasks.start(self._reload()), partial(self.handle_exit, signal.SIGHUP, None)
            )
        self.pool.start()
        if self.state.settings.ollama:
            self._tasks.start(self.front.ollama.describe_all())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the running requests, then end the processes."""
        self.pool.end_watches()
        self.pool.stop_tools()
        self._tasks.cancel()
        await super().shutdown(sockets=sockets)
        if self.force_exit:
            self.pool.cancel()
        await self.pool.close()
        self.front.close()

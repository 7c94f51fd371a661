"""The front process of several models: it checks clients, finds the process of a request's model, and forwards bytes.

Open this file to change what a server with ``--models`` does beyond one with a single model. It has the same routes.
It reads only a few fields of a body, such as the name of the model, and forwards the bytes of bodies and answers as
they are. A request whose model must be loaded waits; a stream gets signs of life meanwhile.

Keys, limits, the guard and the log are here; the processes of models trust what this one says about a client.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from llamapipe import hub
from llamapipe._messages import listed, quoted
from llamapipe.errors import ModelLoadError
from llamapipe.ollama_models import PREFIX as OLLAMA
from llamapipe.server import _ollama_files, _page, _system, ollama
from llamapipe.server._application import OLLAMA_ROUTES, ROUTES, STORE_ROUTES, application_of
from llamapipe.server._describe import Asked, describe
from llamapipe.server._gate import ANSWER, CACHE, CLIENT, LOADED_NS, OWNER, Gate
from llamapipe.server._guard import BodyBudget
from llamapipe.server._metrics import CONTENT_TYPE, Metrics, rendered
from llamapipe.server._transcriptions import form_model
from llamapipe.server._upstream import Upstream, UpstreamLostError
from llamapipe.server.endpoint import (
    SUBMITTED,
    Endpoint,
    EventStream,
    Exchange,
    JsonResponse,
    LateResponse,
    error_event,
    event,
    get,
    line,
    post,
)
from llamapipe.server.errors import ApiError, Dialect, shutting_down
from llamapipe.server.ollama import full_name, kept_s
from llamapipe.server.pool import ModelEntry, ModelState, Pool, PooledModel, hub_entries
from llamapipe.work.long_work import LongWork
from llamapipe.work.tenant import is_of

if TYPE_CHECKING:
    from types import EllipsisType

    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send

    from llamapipe.server.settings import ServerSettings

T = TypeVar("T")
# What the process of a model reads; it trusts our own headers, so those of clients do not pass.
_FORWARDED = (b"content-type", b"accept", b"anthropic-version", b"anthropic-beta", b"user-agent")
# Of this process, or of the connection.
_NOT_RETURNED = (
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"date",
    b"server",
    b"x-request-id",
    b"x-llamapipe-worker",
)
_LINES = "application/x-ndjson"
_EMBEDS = frozenset(
    ("/v1/embeddings", "/embedding", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings")
)
_FILLS = frozenset(("/infill", "/v1/fim/completions"))
_STREAMS = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/fim/completions",
     "/completion", "/infill", "/api/chat", "/api/generate")
)  # fmt: skip
_OF_ANY_MODEL = frozenset(("/model_info",))
# These are about the server, not about one of its models.
_OWN = frozenset(
    ("/v1/models", "/v1/models/{id:path}", "/health", "/ping", "/version", "/metrics", "/openapi.json", "/",
     "/requests", "/reset_prefix_cache")
)  # fmt: skip
_NOT_HERE = frozenset(
    ("/api/pull", "/api/copy", "/api/delete", "/api/tags", "/api/show", "/api/ps", "/api/version")
)


class Peeked(msgspec.Struct):
    """What is read of a request's body. ``name``: the older name of ``model`` in Ollama's API."""

    model: Any = None
    name: Any = None
    stream: Any = None
    keep_alive: Any = None


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True):
    """``POST /models/load`` and ``/models/unload``."""

    model: str


_MOST_WATCHES = 100
_AT_ONCE = 8  # models that are described without a break
_FOR_EVER_S = 100 * 365 * 86_400.0
_log = logging.getLogger("llamapipe.server")
_PEEK = msgspec.json.Decoder(Peeked)


class Front(Gate):
    """What all requests share in the front process."""

    def __init__(
        self, settings: ServerSettings, pool: Pool, entries: Callable[[], Sequence[ModelEntry]]
    ) -> None:
        super().__init__(settings, Metrics(None), BodyBudget(settings.max_bodies_bytes))
        self.pool = pool
        self._entries = entries
        self._reloading = asyncio.Lock()
        self.created = int(time.time())
        self.n_watches = 0  # clients of /models/sse
        self._described: dict[tuple[str, Asked], dict[str, Any] | None] = {}  # by the file's digest
        self._describing = asyncio.Lock()
        self._work = LongWork()

    async def convert(self, function: Callable[..., T], *arguments: Any, size: int) -> T:
        """As ``Gate.convert``."""
        return await self._work.run(function, *arguments, size=size)

    def close(self) -> None:
        """Ends the threads."""
        self._work.close()

    # ---- which model
    async def model_of(self, name: str | None, route: str) -> PooledModel:
        """The model that answers at a route. Raises ApiError 400, 404."""
        if name is not None:
            return self.pool.find(name)
        await self.pool.identify(self.pool.models)
        embeds = route in _EMBEDS
        able = [model for model in self.pool.models if _embeds(model) is embeds]
        if route in _FILLS and len(able) > 1:
            able = await self._filling(able) or able
        if len(able) == 1:
            return able[0]
        names = [model.name for model in able]
        what = f"model is missing; there is {listed(names)}" if names else "no model here does this"
        raise ApiError(400, what, "model")

    async def _filling(self, models: Sequence[PooledModel]) -> list[PooledModel]:
        """Those of the models whose vocabularies have tokens for filling in."""
        there = [model for model in models if model.facts is not None]
        described = await self._describe(there)
        return [
            model
            for model, shown in zip(there, described, strict=True)
            if shown is not None and "insert" in shown["capabilities"]
        ]

    async def forward(self, exchange: Exchange) -> Response:
        """Any request about one model, which its body or its query names."""
        name: object = exchange.query_params.get("model")
        is_stream = False
        ttl_s: float | EllipsisType | None = ...
        if exchange.route == "/v1/audio/transcriptions":
            name = form_model(exchange.headers.get("content-type", ""), exchange.raw)
        elif exchange.raw:
            peeked = await exchange.peek(_PEEK)
            name = peeked.name if peeked.model is None else peeked.model
            if exchange.dialect == "ollama" and peeked.keep_alive is not None:
                ttl_s = kept_s(peeked.keep_alive)
            if exchange.route in _STREAMS:
                is_stream = exchange.dialect == "ollama" if peeked.stream is None else peeked.stream is True
        if not isinstance(name, str | None):
            raise ApiError(400, "model must be a string", "model")
        model = await self.model_of(name or None, exchange.route)
        await self.pool.identify([model])
        check_kind(model, exchange.route)
        exchange.n_prompt_tokens = exchange.n_completion_tokens = None  # the process of the model counts them
        return Forwarded(self, exchange, model, is_stream, ttl_s)

    def head(self, exchange: Exchange, waited_s: float) -> Iterable[bytes]:
        """The lines of a request to a model's process."""
        scope = exchange.scope
        query: bytes = scope["query_string"]
        path = quote(exchange.path, "/:@!$&'()*+,;=-._~").encode()
        method = "GET" if exchange.method == "HEAD" else exchange.method
        yield b"%b %b%b HTTP/1.1" % (method.encode(), path, b"?" + query if query else b"")
        yield b"host: localhost"
        for name, value in scope["headers"]:
            if name in _FORWARDED:
                yield b"%b: %b" % (name, value)
        client = self.tenant_of(exchange)
        share = client.share.hex() if isinstance(client.share, bytes) else str(client.share)
        yield b"x-request-id: " + exchange.id.encode()
        yield f"{CLIENT}: {share}".encode("latin-1", "replace")
        if client.cache is not None:
            yield f"{CACHE}: {client.cache}".encode()
        if self.store is not None:
            yield f"{OWNER}: {self.owner_of(exchange)}".encode()
            yield f"{ANSWER}: {scope.setdefault('llamapipe.answer', uuid.uuid4().hex)}".encode()
        yield f"{LOADED_NS}: {round(waited_s * 1e9)}".encode()

    # ---- about the models
    async def reload(self) -> None:
        """Reads the list of models again. Raises OSError and ValueError, after which they are as they were."""
        async with self._reloading:
            try:
                self.pool.replace(await asyncio.to_thread(self._entries))
            except (OSError, ValueError) as e:
                _log.error("the models stay as they are: %s", e)
                raise

    async def list_models(self, exchange: Exchange) -> Response:
        """``GET /v1/models``: every model, with its state. ``?reload=1``: after the list was read again."""
        if exchange.query_params.get("reload"):
            try:
                await self.reload()
            except (OSError, ValueError):
                what = "the list of --models cannot be read again, and the models stay as they are; the log says why"
                raise ApiError(500, what) from None
        data = [
            self._entry(model, name)
            for model in self.pool.models
            for name in (*model.names, *model.entry.adapters)
        ]
        memory = {"used_bytes": self.pool.used_bytes, "budget_bytes": self.pool.budget_bytes}
        if self.pool.gpu_budget_bytes is not None:
            memory |= {
                "gpu_used_bytes": self.pool.used_gpu_bytes,
                "gpu_budget_bytes": self.pool.gpu_budget_bytes,
            }
        return JsonResponse({"object": "list", "data": data, "has_more": False, "memory": memory})

    async def get_model(self, exchange: Exchange) -> Response:
        """``GET /v1/models/{id}``."""
        name = exchange.path_params["id"]
        return JsonResponse(self._entry(self.pool.find(name), name))

    async def delete_model(self, exchange: Exchange) -> Response:
        """``DELETE /v1/models/{id}``: answers 403 for a model of the list and 404 for any other."""
        model = self.pool.find(exchange.path_params["id"])
        raise ApiError(
            403, f"the model {quoted(model.name)} is in the list of --models; take it out there", "model"
        )

    def _entry(self, model: PooledModel, name: str) -> dict[str, Any]:
        """A model by one of its names. What counts for the model stands at its first name only."""
        status: dict[str, Any] = {"value": model.state.value}
        if model.state is ModelState.LOADING:
            status["progress"] = model.progress
        elif model.state is ModelState.UNLOADED and model.failure is not None:
            status |= {"failed": True, "exit_code": 1, "error": model.failure}
        facts = model.facts
        made: dict[str, Any] = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self.created,
            "owned_by": "llamapipe",
            "status": status,
            "architecture": {
                "input_modalities": ["text"] if facts is None else list(facts.takes),
                "output_modalities": ["text"],
            },
            **({} if facts is None else {"capabilities": ["embedding" if facts.embeds else "completion"]}),
        }
        if name in model.entry.adapters:
            return {**made, "root": model.name, "parent": model.name}
        if name != model.name:
            return {**made, "root": model.name}
        return {
            **made,
            "aliases": list(model.names[1:]),
            "adapters": list(model.entry.adapters),
            "tags": [],
            "can_remove": self.settings.allow_delete and model.entry.reference is not None,
            "pinned": model.entry.keep,
            "n_requests": model.n_users,
            **(
                {}
                if facts is None
                else {"memory_bytes": model.n_bytes or facts.n_bytes, "context_length": facts.n_ctx}
            ),
        }

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
            told = _Told(self.pool)
            yield SUBMITTED
            seen = 0
            while (now := await self.pool.news(seen)) is not None:
                seen = now
                for change in told.changes():  # a slow reader misses what was undone meanwhile
                    yield event(change)
        finally:
            self.n_watches -= 1

    async def load(self, exchange: Exchange, request: ModelRequest) -> Response:
        """``POST /models/load``: begins a load."""
        model = self.pool.find(request.model)
        if model.state in (ModelState.LOADED, ModelState.LOADING):
            raise ApiError(400, f"the model {quoted(model.name)} is {model.state.value} already", "model")
        self.pool.load(model)
        return JsonResponse({"success": True})

    async def unload(self, exchange: Exchange, request: ModelRequest) -> Response:
        """``POST /models/unload``: ends a model when its requests are answered."""
        model = self.pool.find(request.model)
        if model.state not in (ModelState.LOADED, ModelState.LOADING):
            raise ApiError(400, f"the model {quoted(model.name)} is {model.state.value} already", "model")
        self.pool.unload(model)
        return JsonResponse({"success": True})

    async def timeline(self, exchange: Exchange) -> Response:
        """``GET /timeline?model=NAME``: of a loaded model. It neither loads a model nor keeps it loaded."""
        name = exchange.query_params.get("model")
        given = self.pool.models if name is None else [self.pool.find(name)]
        there = [model for model in given if model.state is ModelState.LOADED and not _embeds(model)]
        if len(there) != 1:
            return JsonResponse({"now": 0, "stages": [], "spans": [], "stats": None})
        try:
            async with self.pool.connection(there[0]) as upstream:
                await upstream.send(self.head(exchange, 0.0), b"")
                body = b"".join([part async for part in upstream.parts()])
        except (UpstreamLostError, ConnectionError):
            raise ApiError(503, f"the process of the model {quoted(there[0].name)} ended") from None
        return Response(body, upstream.status, media_type="application/json")

    async def requests(self, exchange: Exchange) -> Response:
        """``GET /requests``: of the models that are loaded, and those that came to none, the newest first."""
        found = self.recent.entries()
        for model in self.pool.models:
            if model.state is ModelState.LOADED:
                with suppress(UpstreamLostError, ConnectionError):
                    async with self.pool.connection(model) as upstream:
                        await upstream.send(self.head(exchange, 0.0), b"")
                        body = b"".join([part async for part in upstream.parts()])
                        found += msgspec.json.decode(body)["data"]
        found.sort(key=lambda entry: -entry["ended_at"])
        return JsonResponse({"object": "list", "data": found[: self.settings.keep_requests]})

    async def reset_prefix_cache(self, exchange: Exchange) -> Response:
        """``POST /reset_prefix_cache``: of the model that the query names, or of all. Loads nothing."""
        _system.refuse_resets(exchange)
        name = exchange.query_params.get("model")
        for model in self.pool.models if name is None else [self.pool.find(name)]:
            if not _embeds(model):
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
            # If this fails, what the model had is gone, or on disk.
            with suppress(ApiError, UpstreamLostError, ConnectionError):
                async with self.pool.lease(model, model.ttl_s) as ready:
                    await ready
                    async with self.pool.connection(model) as upstream:
                        await upstream.send(self.head(exchange, 0.0), b"")
                        body = b"".join([part async for part in upstream.parts()])
                        if upstream.status == 200:
                            return
                        raise ValueError(body.decode(errors="replace"))
        await self.pool.forget_prefixes(model, is_of(self.tenant_of(exchange).cache))

    # ---- as Ollama
    async def tags(self, exchange: Exchange) -> Response:
        """``GET /api/tags``: the models whose files are here."""
        await self.pool.identify(self.pool.models)
        there = [model for model in self.pool.models if model.facts is not None]
        described = await self._describe(there)
        found = []
        for model, shown in zip(there, described, strict=True):
            for name in (*model.names, *model.entry.adapters):
                entry = _listed(model, name)
                if entry is not None:
                    found.append(entry if shown is None else {**entry, "capabilities": shown["capabilities"]})
        return JsonResponse({"models": found})

    async def show(self, exchange: Exchange, request: ollama.ShowRequest) -> Response:
        """``POST /api/show``: what the file says about a model. Loads nothing that is on this machine."""
        name = request.model or request.name
        if not name:
            raise ApiError(400, "model is missing; give a name of /api/tags", "model")
        model = self.pool.find(name)
        await self.pool.identify([model])
        if model.facts is None:
            what = (
                "cannot be read"
                if model.entry.is_local
                else "is not downloaded yet: the first request does it"
            )
            raise ApiError(
                404, f"the file of the model {quoted(model.name)} {what}", "model", "model_not_found"
            )
        (shown,) = await self._describe([model])
        if shown is None:
            raise ApiError(503, f"the vocabulary of the model {quoted(model.name)} cannot be loaded", "model")
        shown = {**shown, "details": dict(model.facts.details)}  # sizes are known without the weights
        made = ollama.with_context_length(shown, model.facts.n_ctx)
        return JsonResponse({**made, "modified_at": _date(model.facts.modified_s)})

    async def _describe(self, models: Sequence[PooledModel]) -> list[dict[str, Any] | None]:
        """What ``describe`` says about models whose files are known; each file is looked at once."""
        keys = []
        for model in models:
            facts = model.facts
            assert facts is not None
            template = model.entry.options.get("chat_template")
            keys.append((facts.digest, Asked(facts.file, facts.embeds, template)))
        async with self._describing:
            new = [key for key in dict.fromkeys(keys) if key not in self._described]
            if new:
                made = await describe([asked for _, asked in new])
                self._described |= dict(zip(new, made, strict=True))
        return [self._described[key] for key in keys]

    async def describe_all(self) -> None:
        """Finds out what all models can do, before a client asks: that takes seconds."""
        await self.pool.identify(self.pool.models)
        there = [model for model in self.pool.models if model.facts is not None]
        # A few at a time: a client that asks for one model waits for these, not for all.
        for start in range(0, len(there), _AT_ONCE):
            await self._describe(there[start : start + _AT_ONCE])

    async def pull(self, exchange: Exchange, request: _ollama_files.PullRequest) -> Response:
        """``POST /api/pull``: downloads a model and serves it; one of the list may wait for its first request."""
        name = _ollama_files.named(request)
        if self.pool.get(name) is not None:
            return await _ollama_files.answered(exchange, request, None)

        async def serve(path: Path) -> None:
            cached = hub_entries(await asyncio.to_thread(hub.cached_models))
            entry = next((entry for entry in cached if entry.file == str(path)), None)
            if entry is None or self.pool.get(name) is not None:
                return
            served = self.pool.get(entry.name)
            if served is not None and served.entry.file == entry.file:
                entry = served.entry
            asked = name.removesuffix(":latest")
            self.pool.add(entry if asked in entry.names else replace(entry, aliases=(*entry.aliases, asked)))

        return await _ollama_files.answered(exchange, request, name, serve)

    async def delete(self, exchange: Exchange, request: _ollama_files.DeleteRequest) -> Response:
        """``DELETE /api/delete``: a name made by a copy, or a file of the hub's cache, which is served no longer."""
        name = _ollama_files.named(request)
        model = self.pool.find(name)
        if name.removesuffix(":latest") in model.copies:
            _ollama_files.check_allowed(exchange, self.settings.allow_delete, "--allow-delete")
            self.pool.forget(name)
            return Response()
        reference = model.entry.reference
        if model.entry.file.startswith(OLLAMA):
            raise ApiError(403, f"the model {quoted(model.name)} belongs to Ollama: use ollama rm", "model")
        if reference is None:
            raise ApiError(
                403, f"the model {quoted(model.name)} is in the list of --models; take it out there", "model"
            )
        _ollama_files.check_allowed(exchange, self.settings.allow_delete, "--allow-delete")
        self.pool.drop(model)
        try:
            await asyncio.to_thread(hub.delete, *hub.parse(reference))
        except ModelLoadError as e:  # it was deleted meanwhile
            raise ApiError(404, str(e), "model", "model_not_found") from None
        return Response()

    async def copy(self, exchange: Exchange, request: _ollama_files.CopyRequest) -> Response:
        """``POST /api/copy``: another name for a model, until the server ends. Loads nothing."""
        _ollama_files.check_allowed(exchange, self.settings.allow_pull, "--allow-pull")
        model = self.pool.find(request.source)
        if request.source.removesuffix(":latest") in model.entry.adapters:
            raise ApiError(400, f"{quoted(request.source)} is an adapter, which has one name", "source")
        _ollama_files.check_destination(request.destination)
        self.pool.copy(model, request.destination)
        return Response()

    async def running(self, exchange: Exchange) -> Response:
        """``GET /api/ps``: the models that are loaded."""
        found = []
        for model in self.pool.models:
            if (
                model.state is ModelState.LOADED
                and model.facts is not None
                and (entry := _listed(model, model.name))
            ):
                left_s = _FOR_EVER_S if model.expires_at is None else model.expires_at - monotonic()
                kept = {key: entry[key] for key in ("name", "model", "digest", "details")}
                found.append(
                    {**kept, "size": model.n_bytes + model.gpu_bytes, "size_vram": model.gpu_bytes,
                     "expires_at": _date(time.time() + left_s), "context_length": model.facts.n_ctx}
                )  # fmt: skip
        return JsonResponse({"models": found})

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
        """``GET /metrics``: of this process, and of all models with a label for each."""
        own = self.metrics.families()
        known = {name for name, *_ in own}
        more = [family for family in await self.pool.families() if family[0] not in known]
        counted = {name for name, *_ in more}
        gauges: list[Any] = [
            (
                "llamapipe_model_loaded",
                "Whether a model is loaded.",
                "gauge",
                [
                    ("llamapipe_model_loaded", {"model": m.name}, float(m.state is ModelState.LOADED))
                    for m in self.pool.models
                ],
            ),
            (
                "llamapipe_model_memory_bytes",
                "Memory that a model takes.",
                "gauge",
                [
                    ("llamapipe_model_memory_bytes", {"model": m.name}, float(m.n_bytes))
                    for m in self.pool.models
                ],
            ),
        ]
        text = rendered([*(family for family in own if family[0] not in counted), *more, *gauges])
        return Response(text, media_type=CONTENT_TYPE)

    def routes(self) -> list[Endpoint]:
        """The routes of a server with one model, and those about several."""
        made = [
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
            get("/version", _system.version, "The version of llamapipe."),
            Endpoint("POST", "/reset_prefix_cache", self.reset_prefix_cache,
                "Forget the cached tokens that no request uses.", ("404",)),
            get("/metrics", self.metrics_text, "Metrics for Prometheus.", media="text/plain"),
            get("/requests", self.requests, "Where the time of the last requests went."),
            get("/openapi.json", _system.openapi),
            *STORE_ROUTES,  # this process reads the same file, and no model is needed
        ]  # fmt: skip
        if self.settings.page:
            made += [get("/timeline", self.timeline), get("/page/{name}", _page.page_file, has_key=False)]
            if not self.settings.ollama:
                made += [get("/", _page.page, has_key=False)]
        if self.settings.ollama:
            made += [
                get("/", ollama.root, has_key=False),
                get("/api/version", ollama.version, "The version of this API."),
                get("/api/tags", self.tags, "The models."),
                post("/api/show", self.show, ollama.ShowRequest, "What a model is and can do."),
                get("/api/ps", self.running, "The models that are loaded."),
                post(
                    "/api/pull",
                    self.pull,
                    _ollama_files.PullRequest,
                    "Download a model.",
                    ("403", "404", "429"),
                ),
                post(
                    "/api/copy",
                    self.copy,
                    _ollama_files.CopyRequest,
                    "Give a model another name.",
                    ("403", "404"),
                ),
                post(
                    "/api/delete",
                    self.delete,
                    _ollama_files.DeleteRequest,
                    "Delete a downloaded model, or a name.",
                    ("403", "404"),
                    method="DELETE",
                ),
            ]
        forwarded = [
            endpoint.answered_by(self.forward)
            for endpoint in (*ROUTES, *(OLLAMA_ROUTES if self.settings.ollama else ()))
            if endpoint.path not in _OWN | _NOT_HERE and endpoint not in STORE_ROUTES
        ]
        return [*made, *forwarded]


def front_app(settings: ServerSettings, pool: Pool, entries: Callable[[], Sequence[ModelEntry]]) -> Starlette:
    """The application of the front process. ``entries``: see ``run_front``."""
    front = Front(settings, pool, entries)
    return application_of(front, front.routes())


class _Told:
    """What one client of ``/models/sse`` knows about the models. Its events are those of llama-server's router."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._names, self._states = self._now()

    def __repr__(self) -> str:
        return f"<_Told {len(self._states)} models>"

    def _now(self) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[Any, ...]]]:
        models = self._pool.models
        names = {model.name: (*model.names, *model.entry.adapters) for model in models}
        # With the time of a failure, so that a repeated one is a change.
        return names, {
            model.name: (model.state, model.progress, model.failure, model.failed_at) for model in models
        }

    def changes(self) -> list[dict[str, Any]]:
        """The events for what has changed since the last call."""
        (names, states), (old_names, old_states) = self._now(), (self._names, self._states)
        self._names, self._states = names, states
        found: list[dict[str, Any]] = [
            {"model": name, "event": "model_remove"} for name in old_states if name not in states
        ]
        if names != old_names:
            found.append({"model": "*", "event": "models_reload"})
        for model in self._pool.models:
            before = old_states.get(model.name)
            if before is not None and before != states[model.name]:
                found.append({"model": model.name, "event": "model_status", "data": _status(model)})
        return found


def _status(model: PooledModel) -> dict[str, Any]:
    """A model's state, in the form of llama-server's router. A load has stages there; ours has one."""
    made: dict[str, Any] = {"status": model.state.value}
    if model.state is ModelState.LOADING:
        stage = "text_model"
        made["progress"] = {"stages": [stage], "current": stage, "value": model.progress}
    elif model.state is ModelState.UNLOADED:
        made["exit_code"] = 0 if model.failure is None else 1
        if model.failure is not None:
            made["error"] = model.failure
    return made


def _listed(model: PooledModel, name: str) -> dict[str, Any] | None:
    """A model in Ollama's lists by one of its names; None: its file is not known."""
    facts = model.facts
    if facts is None:
        return None
    is_adapter = name in model.entry.adapters
    return {
        "name": full_name(name),
        "model": full_name(name),
        "modified_at": _date(facts.modified_s),
        "size": facts.size_bytes,
        "digest": facts.digest,
        "details": {
            **facts.details,
            "context_length": facts.n_ctx,
            **({"parent_model": full_name(model.name)} if is_adapter else {}),
        },
        "capabilities": ["embedding" if facts.embeds else "completion"],
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _embeds(model: PooledModel) -> bool | None:
    """Whether a model embeds texts; None: not known."""
    return model.entry.embeds if model.facts is None else model.facts.embeds


def check_kind(model: PooledModel, route: str) -> None:
    """Raises ApiError 400 for a model that does not do what a route is for, if that is known."""
    embeds = _embeds(model)
    if embeds is None or embeds == (route in _EMBEDS) or route in _OF_ANY_MODEL:
        return
    what = "embeds texts; it does not generate any" if embeds else "generates texts; it does not embed any"
    raise ApiError(400, f"the model {quoted(model.name)} {what}", "model", "model_kind")


class Forwarded(LateResponse):
    """The answer of a model's process, passed on as it comes.

    If the process ends before any of its answer has come, such as when it was killed and nobody has noticed yet, the
    next one is asked, once: a request that ends processes ends no more than two.
    """

    def __init__(
        self,
        front: Front,
        exchange: Exchange,
        model: PooledModel,
        is_stream: bool,
        ttl_s: float | EllipsisType | None,
    ) -> None:
        super().__init__()
        self.raw_headers = []  # no length
        self._front = front
        self._exchange = exchange
        self._model = model
        self._is_stream = is_stream
        self._ttl_s = ttl_s
        self._body = b""
        self._has_begun = self._has_answer = False  # towards the client; from the process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks the process and sends its answer. Raises ApiError before the answer has begun."""
        began = monotonic()
        self._body, self._exchange.raw = self._exchange.raw, b""
        try:
            if not await self._answered(send, began):
                await self._answered(send, began, is_last=True)
        except (UpstreamLostError, ConnectionError):
            error = ApiError(
                503,
                f"the process of the model {quoted(self._model.name)} ended; the next request starts it again",
                code="model_ended",
            )
            await self._fail(send, shutting_down() if self._front.draining else error)
        except ApiError as error:
            await self._fail(send, error)
        await send({"type": "http.response.body", "body": b""})

    async def _answered(self, send: Send, began: float, is_last: bool = False) -> bool:
        """Asks the process and sends its answer. False: it has ended before, and the next one can be asked.

        Raises UpstreamLostError and ConnectionError if it has not, or ``is_last``; ApiError.
        """
        pool, model = self._front.pool, self._model
        process = None
        try:
            async with pool.lease(model, self._ttl_s) as loading:
                await self._until_loaded(loading, send)
                check_kind(model, self._exchange.route)
                process = model.process
                async with pool.connection(model) as upstream:
                    await upstream.send(self._front.head(self._exchange, monotonic() - began), self._body)
                    self._has_answer = True
                    await self._pass_on(send, upstream)
        except (UpstreamLostError, ConnectionError):
            if (
                is_last
                or self._has_answer
                or self._front.draining
                or not await pool.has_ended(model, process)
            ):
                raise
            return False
        return True

    async def _pass_on(self, send: Send, upstream: Upstream) -> None:
        self._body = b""
        self._exchange.is_forwarded = True
        if self._has_begun and upstream.status != 200:
            await self._part(send, await _error_part(upstream, self._exchange.dialect))
            return
        if not self._has_begun:
            await self._begin(send, upstream.status, upstream.headers)
        async for part in upstream.parts():
            self._exchange.release_body()
            await self._part(send, part)

    async def _until_loaded(self, loading: asyncio.Task[None], send: Send) -> None:
        """Waits. A stream gets its head and signs of life meanwhile, so that no client gives up."""
        settings = self._front.settings
        began = monotonic()
        signs = self._is_stream and settings.ping_s > 0
        while not loading.done():
            waited_s = monotonic() - began
            left_s = None if settings.timeout_s is None else settings.timeout_s - waited_s
            if left_s is not None and left_s <= 0:
                raise ApiError(
                    504,
                    f"the model {quoted(self._model.name)} was not loaded within {settings.timeout_s:g} seconds, the "
                    "limit of this server for a request (--timeout)",
                    code="timeout",
                )
            limits = [limit for limit in (left_s, settings.ping_s if signs else None) if limit is not None]
            await asyncio.wait([loading], timeout=min(limits, default=None))
            if signs and not loading.done():
                if not self._has_begun:
                    await self._begin(
                        send, 200, _LINES_HEAD if self._exchange.dialect == "ollama" else _STREAM_HEAD
                    )
                await self._part(send, self._sign())
        await loading

    def _sign(self) -> bytes:
        """A sign of life: a comment with the progress, or Ollama's line without text, which changes nothing."""
        if self._exchange.dialect != "ollama":
            return f": loading {self._model.name} {100 * self._model.progress:.0f} %\n\n".encode()
        return line(ollama.empty_part(self._model.name, self._exchange.route == "/api/chat"))

    # ---- the answer
    async def _begin(self, send: Send, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        kept = [header for header in headers if header[0] not in _NOT_RETURNED]
        names = {name for name, _ in kept}
        kept += [header for header in self.raw_headers if header[0] not in names]
        self._has_begun = True
        self._exchange.status = self.status_code = status
        await send({"type": "http.response.start", "status": status, "headers": kept})

    async def _part(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _fail(self, send: Send, error: ApiError) -> None:
        """Tells an error: with its status, or in the stream that has begun."""
        if not self._has_begun:
            raise error
        if not self._is_stream:
            raise ConnectionError(error.message)  # the connection ends, so that the client sees it
        await self._part(send, error_event(error, self._exchange.dialect))


_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_STREAM_HEAD = ((b"content-type", b"text/event-stream; charset=utf-8"), *_UNBUFFERED)
_LINES_HEAD = ((b"content-type", _LINES.encode()), *_UNBUFFERED)


async def _error_part(upstream: Upstream, dialect: Dialect) -> bytes:
    """The body of an error, as an event."""
    body = b"".join([part async for part in upstream.parts()])
    if dialect == "ollama":
        return body + b"\n"
    return (b"event: error\n" if dialect == "anthropic" else b"") + b"data: " + body + b"\n\n"

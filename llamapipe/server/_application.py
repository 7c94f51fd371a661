"""The ASGI application: its table of routes, and the state that all requests share.

Open it to add a route, or to see what a request finds when it arrives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llamapipe._messages import instead_of, listed, path_meant, quoted
from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.errors import BackendError
from llamapipe.llama.adapter import Adapter
from llamapipe.server import (
    _adapters,
    _anthropic,
    _chat,
    _completions,
    _conversations,
    _embeddings,
    _llama_server,
    _mistral,
    _ollama_files,
    _page,
    _responses,
    _slots,
    _system,
    _tokens,
    _transcriptions,
    ollama,
)
from llamapipe.server._gate import Gate
from llamapipe.server._generation import check_template_args, refuse_long_chat
from llamapipe.server._guard import BodyBudget, Guard
from llamapipe.server._metrics import Metrics
from llamapipe.server._sampling import LoraScale
from llamapipe.server.endpoint import Endpoint, Exchange, Handler, LineStream, get, post
from llamapipe.server.errors import ApiError
from llamapipe.server.settings import ServerSettings
from llamapipe.wanted import time_limit
from llamapipe.work.long_work import size_of

if TYPE_CHECKING:
    from llamapipe.llama.adapter import ControlVector
    from llamapipe.llama.model import Model

T = TypeVar("T")
_log = logging.getLogger("llamapipe.server")


class WorkerLink(Protocol):
    """What a server knows of the others, if it is one of several on a port.

    ``n_ready``, ``n_workers``: how many there are.
    """

    n_ready: int
    n_workers: int

    async def text(self) -> bytes:
        """The metrics of all of them."""

    def fail(self, message: str) -> None:
        """Ends this one, which can answer nothing any longer."""


class ServerState(Gate):
    """One server's engine, embedder or both, and settings. Use it on the event loop's thread.

    ``model_names``: the names clients may use for the model; answers contain the first. ``worker``: the link to the
    other processes, if this is one of several.
    """

    def __init__(
        self, engine: Engine | None, settings: ServerSettings, embedder: Embedder | None = None
    ) -> None:
        owner = embedder if engine is None else engine
        assert owner is not None
        self.model_names = (
            settings.model_names if engine is None else settings.model_names or (engine.model.name,)
        )
        metrics = Metrics(engine, *self.model_names[:1])
        super().__init__(settings, metrics, BodyBudget(settings.max_bodies_bytes))
        self.recent.model = next(iter(self.model_names), None)
        self._engine = engine
        self.embedder = embedder
        self._offload = owner.offload
        self.worker: WorkerLink | None = None
        self.embedding_names = settings.embedding_names
        if embedder is not None and not self.embedding_names:
            self.embedding_names = (embedder.model.name,)
        self.modelfiles = (
            ollama.modelfiles(engine.model.path) if engine is not None and settings.ollama else {}
        )
        self.created = int(time.time())
        self.copies: list[str] = []  # further names of the model, that clients made
        self.loaded_adapters: dict[str, Adapter] = {}  # by clients
        if engine is not None and engine.kv_events is not None and len(settings.api_keys) > 1:
            _log.warning(
                "no KV events are published: each of the %d API keys has a prefix cache",
                len(settings.api_keys),
            )

    async def in_thread(self, function: Callable[..., T], *arguments: Any, size: int = 0) -> T:
        """``function(*arguments)`` in a thread: for what would hold up the event loop. Fair to clients.

        ``size``: the characters that it converts. Raises TimeoutError after ``timeout_s``.
        """
        with time_limit(self.settings.timeout_s):
            return await self._offload(function, *arguments, size=size)

    async def convert(self, function: Callable[..., T], *arguments: Any, size: int) -> T:
        """As ``Gate.convert``, in the queue of all conversions."""
        return await self.in_thread(function, *arguments, size=size)

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError 404 for a server that only embeds."""
        if self._engine is None:
            raise ApiError(404, "no model that generates is loaded here", "model", "model_not_found")
        return self._engine

    @property
    def has_engine(self) -> bool:
        """Whether it generates."""
        return self._engine is not None

    @property
    def is_closed(self) -> bool:
        """Whether its engine, or the embedder of a server that only embeds, is closed."""
        owner = self.embedder if self._engine is None else self._engine
        return owner is None or owner.closed

    @property
    def failure(self) -> BackendError | None:
        """Why its engine answers nothing any longer; None while it works."""
        return None if self._engine is None else self._engine.failure

    def finished(self, exchange: Exchange) -> None:
        """As ``Gate.finished``. A worker whose engine has failed ends, so that the next one takes its place."""
        super().finished(exchange)
        if self.worker is not None and (failure := self.failure) is not None:
            self.worker.fail(str(failure))

    @cached_property
    def timeline(self) -> _page.Timeline:
        """Its engine's last steps. Raises as ``engine``."""
        return _page.Timeline(self.engine)

    @property
    def chat_names(self) -> tuple[str, ...]:
        """The names of the model that generates, those that clients made included."""
        return (*self.model_names, *self.copies)

    @property
    def adapters(self) -> tuple[Adapter | ControlVector, ...]:
        """Those that requests may name."""
        return () if self._engine is None else self._engine.adapters

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters, which clients use as those of models."""
        return tuple(adapter.name for adapter in self.adapters if adapter.name not in self.chat_names)

    def adapter_of(self, name: str | None) -> dict[str, str]:
        """The field of ``SamplingParams`` that a model's name asks for: none unless it is that of an adapter."""
        return {"adapter": name} if name is not None and name in self.adapter_names else {}

    @property
    def loras(self) -> list[Adapter]:
        """The LoRAs in the order of their numbers, which llama-server's clients use."""
        return [adapter for adapter in self.adapters if isinstance(adapter, Adapter)]

    def adapters_of(self, name: str | None, chosen: Sequence[LoraScale] | None) -> dict[str, Any]:
        """The field of ``SamplingParams`` that a model's name or ``lora`` asks for. Raises ApiError 400."""
        named = self.adapter_of(name)
        if chosen is None:
            return dict(named)
        if named:
            raise ApiError(400, "model is the name of an adapter, and lora chooses others; give one", "lora")
        there = self.loras
        found: dict[Adapter, float] = {}
        for lora in chosen:
            numbers = range(len(there)) if isinstance(lora.id, int) else (adapter.name for adapter in there)
            at = next((i for i, known in enumerate(numbers) if known == lora.id), None)
            if at is None:
                raise ApiError(
                    400,
                    f"there is no adapter {quoted(lora.id)}; GET /lora-adapters lists {len(there)}",
                    "lora",
                )
            if there[at] in found:
                raise ApiError(400, f"lora names the adapter {quoted(lora.id)} twice", "lora")
            found[there[at]] = lora.scale
        return {"adapter": found or None}

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all models that are served."""
        return (
            self.chat_names + self.adapter_names + (self.embedding_names if self.embedder is not None else ())
        )

    @property
    def models(self) -> list[Model]:
        """The models that are served."""
        return [owner.model for owner in (self._engine, self.embedder) if owner is not None]

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any],
    ) -> list[int]:
        """The tokens of a conversation, computed in a worker thread.

        Raises ApiError 400 for reserved arguments, InvalidRequestError for a conversation that is too long.
        """
        check_template_args(template_args)
        refuse_long_chat(self, messages)
        return await self.in_thread(
            partial(
                self.engine.model.tokenize_chat,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **template_args,
            ),
            size=size_of(messages),
        )

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer. Raises ApiError 404 for a model that is not served."""
        if self._engine is None:
            raise ApiError(404, "no model that generates is loaded here", "model", "model_not_found")
        return self._served(name, self.chat_names + self.adapter_names)

    def check_name(self, name: str | None) -> str:
        """The name of a model or an adapter, whatever it does. Raises ApiError 404 if there is none."""
        return self._served(name, self.all_names)

    def check_embedder(self, name: str | None) -> tuple[Embedder, str]:
        """The embedding model and its name for the answer. Raises ApiError 404."""
        if self.embedder is None:
            raise ApiError(
                404,
                "no embedding model is loaded; start with --embeddings FILE",
                "model",
                "model_not_found",
            )
        return self.embedder, self._served(name, self.embedding_names)

    def _served(self, name: str | None, names: tuple[str, ...]) -> str:
        if name is None:
            return names[0]
        # The front process chose this one: it also knows names that came after the start.
        if name not in names and self.settings.any_model_name:
            return names[0]
        if name not in names and not self.is_behind_front:
            raise ApiError(
                404,
                f"the model {quoted(name)} is not served here; there is {listed(names)} (--alias gives it other names)",
                "model",
                "model_not_found",
            )
        return name


def app(
    engine: Engine | None, settings: ServerSettings | None = None, embedder: Embedder | None = None
) -> Starlette:
    """An ASGI application that serves an engine, for uvicorn or inside another application.

    ``embedder``: for embeddings and reranking; with it, ``engine`` may be None. The caller owns and closes the engine
    and the embedder. Use one application and one event loop for each engine.

    Raises TypeError if an argument has another type, ImportError without the extra ``server``.
    """
    if not isinstance(engine, Engine) if embedder is None else not isinstance(engine, Engine | None):
        raise TypeError(f"engine must be an Engine, not {type(engine).__name__}")
    if embedder is not None and not isinstance(embedder, Embedder):
        raise TypeError(f"embedder must be an Embedder, not {type(embedder).__name__}")
    if settings is not None and not isinstance(settings, ServerSettings):
        raise TypeError(f"settings must be ServerSettings, not {type(settings).__name__}")
    state = ServerState(engine, settings or ServerSettings(), embedder)
    endpoints = (
        *ROUTES,
        *(OLLAMA_ROUTES if state.settings.ollama else ()),
        *(PAGE_ROUTES if state.settings.page else ()),
    )
    return application_of(state, endpoints)


def application_of(gate: Gate, endpoints: Iterable[Endpoint]) -> Starlette:
    """The application of these routes. Requests pass the gate first."""
    application = Starlette(
        routes=[
            Route(path, endpoint, methods=[endpoint.method])
            for endpoint in endpoints
            for path in (endpoint.path, *endpoint.aliases)
        ],
        middleware=[Middleware(_WithoutSlash), Middleware(Guard, state=gate)],
        exception_handlers={ApiError: _answer_error, HTTPException: _answer_error},
        lifespan=_lifespan(gate),
    )
    # A redirect would lose the scheme behind a proxy, and clients the body.
    application.router.redirect_slashes = False
    application.state.llamapipe = gate
    return application


def _of_model(handler: Handler) -> Handler:
    """A handler without a body that answers 404 if the query names a model that is not served."""

    async def checked(exchange: Exchange) -> Response:
        name = exchange.query_params.get("model")
        state = exchange.server
        if name and not any(ollama.is_named(name, known) for known in state.all_names):
            state.check_name(name)
        return await handler(exchange)

    return checked


# What uses the engine may take longer than the server allows; a status for each other reason is in every route.
_GENERATES = ("504",)
_OF_STORE = ("400", "404", "500")
_CHANGES_STORE = ("400", "404", "500", "507")
# About what is stored. No model is needed, and any process can answer.
STORE_ROUTES = (
    get(
        "/v1/responses/{id}",
        _conversations.get_response,
        "A stored answer.",
        _OF_STORE,
        aliases=("/responses/{id}",),
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{id}",
        _conversations.delete_response,
        "Delete a stored answer.",
        _CHANGES_STORE,
        aliases=("/responses/{id}",),
    ),
    get(
        "/v1/responses/{id}/input_items",
        _conversations.input_items,
        "What a stored answer was made from.",
        _OF_STORE,
        aliases=("/responses/{id}/input_items",),
    ),
    post(
        "/v1/conversations",
        _conversations.create,
        _conversations.ConversationRequest,
        "Begin a stored conversation.",
        _CHANGES_STORE,
        ("/conversations",),
    ),
    get(
        "/v1/conversations/{id}",
        _conversations.get_conversation,
        "A stored conversation.",
        _OF_STORE,
        aliases=("/conversations/{id}",),
    ),
    post(
        "/v1/conversations/{id}",
        _conversations.update,
        _conversations.MetadataRequest,
        "Change the metadata of a conversation.",
        _CHANGES_STORE,
        ("/conversations/{id}",),
    ),
    Endpoint(
        "DELETE",
        "/v1/conversations/{id}",
        _conversations.delete_conversation,
        "Delete a conversation with its items and answers.",
        _CHANGES_STORE,
        aliases=("/conversations/{id}",),
    ),
    post(
        "/v1/conversations/{id}/items",
        _conversations.add_items,
        _conversations.ItemsRequest,
        "Append items to a conversation.",
        _CHANGES_STORE,
        ("/conversations/{id}/items",),
    ),
    get(
        "/v1/conversations/{id}/items",
        _conversations.list_items,
        "The items of a conversation.",
        _OF_STORE,
        aliases=("/conversations/{id}/items",),
    ),
    get(
        "/v1/conversations/{id}/items/{item}",
        _conversations.get_item,
        "An item of a conversation.",
        _OF_STORE,
        aliases=("/conversations/{id}/items/{item}",),
    ),
    Endpoint(
        "DELETE",
        "/v1/conversations/{id}/items/{item}",
        _conversations.delete_item,
        "Delete an item of a conversation.",
        _CHANGES_STORE,
        aliases=("/conversations/{id}/items/{item}",),
    ),
)
ROUTES = (
    post(
        "/v1/chat/completions",
        _chat.chat_completions,
        _chat.ChatRequest,
        "Answer a conversation.",
        _GENERATES,
        ("/chat/completions",),
    ),
    post(
        "/v1/completions",
        _completions.completions,
        _completions.CompletionRequest,
        "Complete text or tokens.",
        _GENERATES,
    ),
    post(
        "/completion",
        _llama_server.completion,
        _llama_server.LlamaCompletionRequest,
        "Complete text or tokens, in llama-server's format.",
        _GENERATES,
        ("/completions",),
    ),
    post(
        "/infill",
        _llama_server.infill,
        _llama_server.InfillRequest,
        "Fill in the text between a prefix and a suffix, in llama-server's format.",
        _GENERATES,
        model="filling",
    ),
    post(
        "/v1/fim/completions",
        _mistral.fim_completions,
        _mistral.FimRequest,
        "Fill in the text between a prompt and a suffix, in Mistral's format.",
        _GENERATES,
        model="filling",
    ),
    post(
        "/v1/responses",
        _responses.responses,
        _responses.ResponsesRequest,
        "Answer an input, stored with --store.",
        _GENERATES,
        ("/responses",),
    ),
    post(
        "/v1/chat/completions/input_tokens",
        _chat.count_tokens,
        _chat.ChatRequest,
        "Count the tokens of a conversation, in OpenAI's format.",
        aliases=("/chat/completions/input_tokens",),
    ),
    post(
        "/v1/responses/input_tokens",
        _responses.count_tokens,
        _responses.ResponsesRequest,
        "Count the tokens of an input.",
        aliases=("/responses/input_tokens",),
    ),
    *STORE_ROUTES,
    post(
        "/v1/messages",
        _anthropic.messages,
        _anthropic.MessagesRequest,
        "Answer a conversation, in Anthropic's format.",
        _GENERATES,
    ),
    post(
        "/v1/messages/count_tokens",
        _anthropic.count_tokens,
        _anthropic.CountTokensRequest,
        "Count the tokens of a conversation.",
    ),
    Endpoint(
        "POST",
        "/v1/audio/transcriptions",
        _transcriptions.transcriptions,
        "The text of a sound, which is a file of a form.",
        _GENERATES,
        aliases=("/audio/transcriptions",),
        form=_transcriptions.FIELDS,
    ),
    post(
        "/v1/embeddings",
        _embeddings.embeddings,
        _embeddings.EmbeddingRequest,
        "Embed texts.",
        model="embedding",
    ),
    post(
        "/embedding",
        _embeddings.llama_embedding,
        _embeddings.LlamaEmbeddingRequest,
        "Embed texts, in llama-server's format.",
        aliases=("/embeddings",),
        model="embedding",
    ),
    post(
        "/v1/rerank",
        _embeddings.rerank,
        _embeddings.RerankRequest,
        "Rank documents for a query.",
        aliases=("/rerank", "/reranking", "/v1/reranking", "/v2/rerank"),
        model="embedding",
    ),
    post(
        "/v1/score",
        _embeddings.score,
        _embeddings.ScoreRequest,
        "Score pairs of texts.",
        aliases=("/score",),
        model="embedding",
    ),
    get("/v1/models", _system.list_models, "The models that are served.", aliases=("/models",)),
    get("/v1/models/{id:path}", _system.get_model, "One model.", ("404",)),
    Endpoint(
        "DELETE",
        "/v1/models/{id:path}",
        _system.delete_model,
        "Refused for a model that is served.",
        ("403", "404"),
    ),
    post("/tokenize", _tokens.tokenize, _tokens.TokenizeRequest, "Tokenize text or a conversation."),
    post("/detokenize", _tokens.detokenize, _tokens.DetokenizeRequest, "The text of tokens."),
    post("/apply-template", _tokens.apply_template, _tokens.TemplateRequest, "The prompt of a conversation."),
    get("/tokenizer_info", _of_model(_tokens.tokenizer_info), "Properties of the tokenizer."),
    get(
        "/lora-adapters",
        _of_model(_llama_server.lora_adapters),
        "The adapters, with the numbers that `lora` has for them.",
    ),
    post("/v1/load_lora_adapter", _adapters.load, _adapters.LoadRequest, "Load a LoRA.", ("403", "404")),
    post(
        "/v1/unload_lora_adapter", _adapters.unload, _adapters.UnloadRequest, "Unload a LoRA.", ("403", "404")
    ),
    get("/props", _of_model(_llama_server.props), "The model's template and the defaults of requests."),
    get("/slots", _of_model(_llama_server.slots), "How many slots compute a request."),
    Endpoint(
        "POST",
        "/slots/{id}",
        _of_model(_slots.slot_action),
        "Save, restore or erase the cells of a conversation.",
        ("400", "403", "404", "413", "507"),
    ),
    get("/slots/files", _of_model(_slots.saved_files), "The saved conversations.", ("403",)),
    Endpoint(
        "DELETE",
        "/slots/files/{filename}",
        _of_model(_slots.delete_file),
        "Delete a saved conversation.",
        ("400", "403", "404", "413", "507"),
    ),
    get("/model_info", _of_model(_system.model_info), "Sizes of the model and of the engine.", model="any"),
    get(
        "/health",
        _system.health,
        "Whether the server accepts requests.",
        ("503",),
        has_key=False,
        aliases=("/v1/health",),
    ),
    get("/ping", _system.ping, "Whether the server accepts requests.", ("503",), has_key=False),
    get("/version", _system.version, "The version of llamapipe."),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        _of_model(_system.reset_prefix_cache),
        "Forget the cached tokens that no request uses.",
        ("404",),
    ),
    get("/metrics", _system.metrics, "Metrics for Prometheus.", media="text/plain"),
    get("/requests", _system.requests, "Where the time of the last requests went."),
    get("/openapi.json", _system.openapi),
)
_LINES = LineStream.media_type
OLLAMA_ROUTES = (
    post(
        "/api/chat",
        ollama.chat,
        ollama.OllamaChatRequest,
        "Answer a conversation, as Ollama.",
        _GENERATES,
        (),
        _LINES,
    ),
    post(
        "/api/generate", ollama.generate, ollama.GenerateRequest, "Answer a prompt.", _GENERATES, (), _LINES
    ),
    post("/api/embed", ollama.embed, ollama.EmbedRequest, "Embed texts.", model="embedding"),
    post(
        "/api/embeddings", ollama.old_embeddings, ollama.OldEmbedRequest, "Embed a text.", model="embedding"
    ),
    post("/api/show", ollama.show, ollama.ShowRequest, "What a model is and can do."),
    get("/api/tags", ollama.tags, "The models that are served."),
    get("/api/ps", ollama.loaded_models, "The models that are loaded."),
    get("/api/version", ollama.version, "The version of this API."),
    post(
        "/api/pull",
        _ollama_files.pull,
        _ollama_files.PullRequest,
        "Download a model.",
        ("403", "507"),
        (),
        _LINES,
    ),
    post(
        "/api/copy", _ollama_files.copy, _ollama_files.CopyRequest, "Give the model another name.", ("403",)
    ),
    post(
        "/api/delete",
        _ollama_files.delete,
        _ollama_files.DeleteRequest,
        "Delete a file.",
        ("403",),
        method="DELETE",
    ),
    get("/", ollama.root, has_key=False),
)
PAGE_ROUTES = (
    get("/", _page.page, has_key=False),
    get("/page/{name}", _page.page_file, has_key=False),
    get("/timeline", _of_model(_page.timeline)),
)


class _WithoutSlash:
    """Middleware that serves a path with a slash at its end like the path without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
        if path.endswith("/") and len(path.removeprefix(root)) > 1:
            scope = {**scope, "path": path.rstrip("/")}
        await self._app(scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answers an error of a route, and a request for an unknown path or method, in the format of the path's API."""
    exchange: Exchange = request.scope["llamapipe.exchange"]
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        headers = error.headers
        hint = None
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        if error.status_code == 404:
            hint = _path_hint(exchange.path.rstrip("/"), routes)
        elif error.status_code == 405:  # Starlette names the methods of the first route of this path
            scope = request.scope
            here = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
            methods = sorted({method for route in here for method in route.methods or ()})
            headers = {"allow": ", ".join(methods)}
            hint = "use " + " or ".join(method for method in methods if method != "HEAD")
        message = f"{exchange.method} {exchange.path}: {error.detail}{f'; {hint}' if hint else ''}"
        error = ApiError(error.status_code, message)
    assert isinstance(error, ApiError)
    return exchange.prepare(exchange.error_response(error, headers))


def _path_hint(path: str, routes: Iterable[Route]) -> str | None:
    """What to use instead of a path that has no route."""
    advice = instead_of(path, "paths")
    if advice is not None:
        return advice
    meant = path_meant(path, {route.path for route in routes if "{" not in route.path})
    return None if meant is None else f"did you mean {meant}?"


def _lifespan(state: Gate) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        yield
        state.draining = True
        await asyncio.to_thread(state.close_store)

    return lifespan

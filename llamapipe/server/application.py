"""The ASGI application: its table of routes, and the state that all requests share.

Open it to add a route, or to see what a request finds when it arrives.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llamapipe._engine.long_work import size_of
from llamapipe._engine.tenant import Tenant, tenant
from llamapipe.arguments import quoted
from llamapipe.embedding.embedder import Embedder
from llamapipe.engine.engine import Engine
from llamapipe.host.memory import return_freed_memory
from llamapipe.server.anthropic import count_tokens, messages
from llamapipe.server.chat import chat_completions
from llamapipe.server.completions import completions
from llamapipe.server.embeddings import embeddings, rerank
from llamapipe.server.endpoint import Call, Endpoint, Handler
from llamapipe.server.errors import ApiError, Dialect, dialect_of
from llamapipe.server.generation import check_template_args, refuse_long_chat
from llamapipe.server.guard import BodyBudget, Guard
from llamapipe.server.metrics import Metrics
from llamapipe.server.openapi import ALIASES
from llamapipe.server.page import Timeline, page, page_file, timeline
from llamapipe.server.responses import responses
from llamapipe.server.settings import ServerSettings
from llamapipe.server.system import delete_model, get_model, health, list_models, metrics, model_info, openapi
from llamapipe.server.tokens import apply_template, detokenize, tokenize, tokenizer_info
from llamapipe.server.wire.other_servers import path_hint

if TYPE_CHECKING:
    from llamapipe.server.worker import Worker

_PATH_CHARACTERS = "/:@!$&'()*+,;=-._~"  # the others are escaped in the log: a path may hold line breaks
_POLLED = ("/timeline", "/health", "/v1/health", "/metrics")
_TRIM_AFTER_S = 1.0
_log = logging.getLogger("llamapipe.server")


class ServerState:
    """One server's engine and settings. Use it on the event loop's thread.

    ``model_names``: the names clients may use for the model; answers contain the first. ``n_requests``: requests being
    served. ``worker``: the link to the other processes, if this is one of several. ``bound_to``: the address that the
    server listens on; None inside of another server, which tells it with each request.
    """

    def __init__(self, engine: Engine, settings: ServerSettings, embedder: Embedder | None = None) -> None:
        self.engine = engine
        self.embedder = embedder
        self.settings = settings
        self.in_thread = engine._long_work.run  # for what would hold up the event loop; fair to clients
        self.worker: Worker | None = None
        self.bound_to: str | None = None
        self.timeline = Timeline(engine)
        self.bodies = BodyBudget(settings.max_bodies_bytes)
        self.model_names = settings.model_names or (engine.model.path.stem,)
        self.metrics = Metrics(engine, self.model_names[0])
        self.embedding_names = settings.embedding_names
        if embedder is not None and not self.embedding_names:
            self.embedding_names = (embedder.model.path.stem,)
        self.created = int(time.time())
        self.n_requests = 0
        self.draining = False
        self._trims = False  # soon
        if engine.kv_events is not None and len(settings.api_keys) > 1:
            _log.warning(
                "no KV events are published: each of the %d API keys has a prefix cache",
                len(settings.api_keys),
            )
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    def __repr__(self) -> str:
        return f"<ServerState n_requests={self.n_requests}{' draining' if self.draining else ''}>"

    def check(self, call: Call) -> bytes | None:
        """Checks a request before its body is read. Returns the digest of its key, None without keys."""
        key = self._check_key(call)
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        self._check_room()
        return key

    def _check_room(self) -> None:
        if self.n_requests >= self.settings.max_requests:
            raise ApiError(
                429,
                f"{self.n_requests} requests are being served, which is the limit of this server; try again later",
                code="too_many_requests",
            )

    @contextmanager
    def admitted(self, call: Call, counted: bool, key: bytes | None) -> Iterator[None]:
        """Counts a request, whose body has arrived, while it is served. Raises ApiError if there are too many.

        Whatever is asked of the engine meanwhile is asked for this client: see ``Tenant``.
        """
        if counted:
            self._check_room()
        self.n_requests += counted
        token = tenant.set(self._tenant(call, key))
        try:
            yield
        finally:
            tenant.reset(token)
            self.n_requests -= counted

    def _tenant(self, call: Call, key: bytes | None) -> Tenant:
        """The client: its key if there are several, with a prefix cache for each; else its address."""
        if key is not None and len(self._keys) > 1:
            return Tenant(key, key.hex(), self.settings.grammar_timeout_s)
        address: Sequence[Any] | None = call.scope.get("client")
        return Tenant(address[0] if address else "no address", None, self.settings.grammar_timeout_s)

    def _check_key(self, call: Call) -> bytes | None:
        """The digest of the client's key; None if no key is needed. Raises ApiError."""
        if not self._keys:
            return None
        given = call.headers.get(b"x-api-key", b"")
        scheme, _, token = call.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        # Digests have the same length and all keys are compared, so the time reveals nothing about the keys.
        digest = hashlib.sha256(given).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            problem = (
                "the API key is not one of this server's" if given else "this server asks for an API key"
            )
            raise ApiError(
                401,
                f"{problem}; send the key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        return digest

    def trim_later(self) -> None:
        """Returns freed memory to the system soon, after a large body: the C library would keep it."""
        if not self._trims:
            self._trims = True
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trims = False
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all models that are served."""
        return self.model_names + (self.embedding_names if self.embedder is not None else ())

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
        return _served(name, self.model_names)

    def check_embedder(self, name: str | None) -> tuple[Embedder, str]:
        """The embedding model and its name for the answer. Raises ApiError 404."""
        if self.embedder is None:
            raise ApiError(
                404,
                "no embedding model is loaded; start with --embeddings FILE",
                "model",
                "model_not_found",
            )
        return self.embedder, _served(name, self.embedding_names)

    def finished(self, call: Call) -> None:
        """Counts and logs an answered request. What programs ask for every second is logged at the level DEBUG."""
        seconds = perf_counter() - call.started_at
        self.metrics.answered(call, seconds)
        is_polled = call.status < 400 and call.scope["path"] in _POLLED
        _log.log(
            logging.DEBUG if is_polled else logging.INFO,
            "%s %s %d %.0f ms n_prompt_tokens=%s n_completion_tokens=%s id=%s",
            call.scope["method"],
            quote(call.scope["path"], _PATH_CHARACTERS),
            call.status,
            seconds * 1e3,
            "-" if call.n_prompt_tokens is None else call.n_prompt_tokens,
            "-" if call.n_completion_tokens is None else call.n_completion_tokens,
            call.id,
        )


def _served(name: str | None, names: tuple[str, ...]) -> str:
    if name is None:
        return names[0]
    if name not in names:
        there = ", ".join(map(repr, names))
        raise ApiError(
            404,
            f"the model {quoted(name)} is not served here; there is {there} (--alias gives it other names)",
            "model",
            "model_not_found",
        )
    return name


def app(
    engine: Engine, settings: ServerSettings | None = None, embedder: Embedder | None = None
) -> Starlette:
    """An ASGI application that serves an engine, for uvicorn or inside another application.

    ``embedder``: for embeddings and reranking. The caller owns and closes the engine and the embedder. Use one
    application and one event loop for each engine.

    Raises TypeError if an argument has another type, ImportError without the extra ``server``.
    """
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an Engine, not {type(engine).__name__}")
    if embedder is not None and not isinstance(embedder, Embedder):
        raise TypeError(f"embedder must be an Embedder, not {type(embedder).__name__}")
    if settings is not None and not isinstance(settings, ServerSettings):
        raise TypeError(f"settings must be ServerSettings, not {type(settings).__name__}")
    state = ServerState(engine, settings or ServerSettings(), embedder)
    application = Starlette(
        routes=routes(state),
        middleware=[Middleware(Guard, state=state), Middleware(_WithoutSlash)],
        exception_handlers={HTTPException: _http_error},
        lifespan=_lifespan(state),
    )
    application.router.redirect_slashes = (
        False  # a redirect would lose the scheme behind a proxy, and clients the body
    )
    application.state.llamapipe = state
    return application


class _WithoutSlash:
    """Middleware that serves a path with a slash at its end like the path without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
        if path.endswith("/") and len(path.removeprefix(root)) > 1:
            scope = {**scope, "path": path.rstrip("/")}
        await self._app(scope, receive, send)


def routes(state: ServerState) -> list[Route]:
    """Every route of the server."""
    made = [
        _route("POST", "/v1/completions", completions),
        _route("POST", "/v1/chat/completions", chat_completions),
        _route("POST", "/v1/responses", responses),
        _route("POST", "/v1/embeddings", embeddings),
        _route("POST", "/v1/rerank", rerank),
        _route("POST", "/v1/messages", messages, "anthropic"),
        _route("POST", "/v1/messages/count_tokens", count_tokens, "anthropic"),
        _route("GET", "/v1/models", list_models),
        _route("GET", "/v1/models/{id:path}", get_model),
        _route("DELETE", "/v1/models/{id:path}", delete_model),
        _route("GET", "/model_info", model_info),
        _route("POST", "/tokenize", tokenize),
        _route("POST", "/detokenize", detokenize),
        _route("GET", "/tokenizer_info", tokenizer_info),
        _route("POST", "/apply-template", apply_template),
        _route("GET", "/openapi.json", openapi),
        _route("GET", "/health", health, counted=False),
        _route("GET", "/metrics", metrics),
    ]
    by_path = {(route.path, method): route for route in made for method in route.methods or ()}
    for alias, path, method in ALIASES:
        route = by_path[path, method]
        made.append(Route(alias, route.endpoint, methods=[method], name=route.name))
    if state.settings.page:
        made += [
            _route("GET", "/", page, counted=False),
            _route("GET", "/page/{name}", page_file, counted=False),
            _route("GET", "/timeline", timeline),
        ]
    return made


def _route(
    method: str, path: str, handler: Handler, dialect: Dialect = "openai", counted: bool = True
) -> Route:
    endpoint = Endpoint(handler, path, dialect, counted)
    return Route(path, endpoint, methods=[method], name=handler.__name__)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers requests for unknown paths and methods, in the API's error format."""
    assert isinstance(error, HTTPException)
    hint = path_hint(request.scope["path"]) if error.status_code == 404 else ""
    message = f"{request.method} {request.url.path}: {error.detail}{hint}"
    return _Refusal(ApiError(error.status_code, message), error.headers or {})


class _Refusal(Response):
    """The answer to a request that has no route: with an id, in the log and the metrics, as other answers."""

    def __init__(self, error: ApiError, headers: Mapping[str, str]) -> None:
        super().__init__(status_code=error.status)
        self._error = error
        self._more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: ServerState = scope["app"].state.llamapipe
        scope["route_path"] = "other"
        call = Call(state, scope, receive, send)
        try:
            await call.answer_error(self._error, dialect_of(scope["path"]), self._more)
        finally:
            state.finished(call)


def _lifespan(state: ServerState) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        yield
        state.draining = True

    return lifespan

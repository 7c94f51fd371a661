"""The ASGI application of a server: its routes and their limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llamapipe.embedding.embedder import Embedder
from llamapipe.engine.engine import Engine
from llamapipe.server.errors import ApiError, Dialect, dialect_of
from llamapipe.server.exchange import Call, Endpoint, Handler
from llamapipe.server.guard import Guard
from llamapipe.server.routes import (
    chat,
    completions,
    embeddings,
    messages,
    models,
    page,
    responses,
    system,
    tokens,
)
from llamapipe.server.settings import ServerSettings
from llamapipe.server.state import ServerState
from llamapipe.server.wire.openapi import ALIASES
from llamapipe.server.wire.other_servers import path_hint


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
        _route("POST", "/v1/completions", completions.completions),
        _route("POST", "/v1/chat/completions", chat.chat_completions),
        _route("POST", "/v1/responses", responses.responses),
        _route("POST", "/v1/embeddings", embeddings.embeddings),
        _route("POST", "/v1/rerank", embeddings.rerank),
        _route("POST", "/v1/messages", messages.messages, "anthropic"),
        _route("POST", "/v1/messages/count_tokens", messages.count_tokens, "anthropic"),
        _route("GET", "/v1/models", models.list_models),
        _route("GET", "/v1/models/{id:path}", models.get_model),
        _route("DELETE", "/v1/models/{id:path}", models.delete_model),
        _route("GET", "/model_info", models.model_info),
        _route("POST", "/tokenize", tokens.tokenize),
        _route("POST", "/detokenize", tokens.detokenize),
        _route("GET", "/tokenizer_info", tokens.tokenizer_info),
        _route("POST", "/apply-template", tokens.apply_template),
        _route("GET", "/openapi.json", system.openapi),
        _route("GET", "/health", system.health, counted=False),
        _route("GET", "/metrics", system.metrics),
    ]
    by_path = {(route.path, method): route for route in made for method in route.methods or ()}
    for alias, path, method in ALIASES:
        route = by_path[path, method]
        made.append(Route(alias, route.endpoint, methods=[method], name=route.name))
    if state.settings.page:
        made += [
            _route("GET", "/", page.page, counted=False),
            _route("GET", "/page/{name}", page.page_file, counted=False),
            _route("GET", "/timeline", page.timeline),
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

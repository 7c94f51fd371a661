"""The ASGI application and its table of routes. Open this file to add a route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llamapipe._messages import instead_of, path_meant
from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.server import _background
from llamapipe.server._guard import Guard
from llamapipe.server.endpoint import Endpoint, Exchange, Handler, LineStream, delete, get, post
from llamapipe.server.errors import ApiError
from llamapipe.server.gate import Gate
from llamapipe.server.requests.ollama_models import is_named, read_modelfiles
from llamapipe.server.routes import (
    adapters,
    anthropic,
    chat,
    completions,
    conversations,
    embeddings,
    files,
    llama_server,
    mistral,
    ollama,
    ollama_descriptions,
    ollama_files,
    page,
    responses,
    slots,
    system,
    tokens,
    transcriptions,
)
from llamapipe.server.settings import ServerSettings
from llamapipe.server.state import ServerState


def app(
    engine: Engine | None, settings: ServerSettings | None = None, embedder: Embedder | None = None
) -> Starlette:
    """Return an ASGI application that serves an engine, for uvicorn or inside another application.

    ``embedder``: for embeddings and reranking; with an embedder, ``engine`` may be None. The caller owns the engine and
    the embedder, and closes them. Use one application and one event loop for each engine.

    Raises TypeError if an argument has the wrong type, ImportError without the extra ``server``.
    """
    if not isinstance(engine, Engine) if embedder is None else not isinstance(engine, Engine | None):
        raise TypeError(f"engine must be an Engine, not {type(engine).__name__}")
    if embedder is not None and not isinstance(embedder, Embedder):
        raise TypeError(f"embedder must be an Embedder, not {type(embedder).__name__}")
    if settings is not None and not isinstance(settings, ServerSettings):
        raise TypeError(f"settings must be ServerSettings, not {type(settings).__name__}")
    state = ServerState(engine, settings or ServerSettings(), embedder)
    if state.settings.ollama:
        read_modelfiles(state)
    endpoints = (
        *ROUTES,
        *(OLLAMA_ROUTES if state.settings.ollama else ()),
        *((*_PAGE_ROUTES, *PAGE_ROUTES) if state.settings.page else ()),
    )
    return application_of(state, endpoints)


def application_of(gate: Gate, endpoints: Iterable[Endpoint]) -> Starlette:
    """Return the application with these routes. Every request passes the gate first."""
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
    # Behind a proxy, a redirect would lose the scheme, and clients would lose the body.
    application.router.redirect_slashes = False
    application.state.llamapipe = gate
    if gate.store is not None:
        gate.background = _background.Background(gate, gate.store, application)
    return application


def _of_model(handler: Handler) -> Handler:
    """Wrap a handler without a body, so that it answers 404 if the query names a model that is not served."""

    async def checked(exchange: Exchange) -> Response:
        name = exchange.query_params.get("model")
        state = exchange.server
        if name and not is_named(name, *state.all_names):
            state.check_name(name)
        return await handler(exchange)

    return checked


# More statuses of routes that use the engine, which may take longer than the server allows.
_GENERATES = ("504",)
_OF_SLOTS = ("400", "403", "404", "413", "507")
_BYTES, _LINES = "application/octet-stream", LineStream.media_type


def _store_route(endpoint: Endpoint) -> Endpoint:
    """Return a route of the store with the store's statuses, and with an alias without ``/v1``."""
    statuses = ("400", "404", "500") if endpoint.method == "GET" else ("400", "404", "500", "507")
    return replace(endpoint, more_statuses=statuses, aliases=(endpoint.path.removeprefix("/v1"),))


# Routes for stored data, which need no model, so that any process can answer.
STORE_ROUTES = tuple(map(_store_route, (
    get("/v1/responses/{id}", conversations.get_response, "A stored answer."),
    delete("/v1/responses/{id}", conversations.delete_response, "Delete a stored answer."),
    Endpoint("POST", "/v1/responses/{id}/cancel", _background.cancel, "Cancel an answer in the background."),
    get("/v1/responses/{id}/input_items", conversations.input_items, "What a stored answer was made from."),
    post("/v1/conversations", conversations.create, conversations.ConversationRequest,
         "Begin a stored conversation."),
    get("/v1/conversations/{id}", conversations.get_conversation, "A stored conversation."),
    post("/v1/conversations/{id}", conversations.update, conversations.MetadataRequest,
         "Change the metadata of a conversation."),
    delete("/v1/conversations/{id}", conversations.delete_conversation,
           "Delete a conversation with its items and answers."),
    post("/v1/conversations/{id}/items", conversations.add_items, conversations.ItemsRequest,
         "Append items to a conversation."),
    get("/v1/conversations/{id}/items", conversations.list_items, "The items of a conversation."),
    get("/v1/conversations/{id}/items/{item}", conversations.get_item, "An item of a conversation."),
    delete("/v1/conversations/{id}/items/{item}", conversations.delete_item, "Delete an item of a conversation."),
    Endpoint("POST", "/v1/files", files.upload, "Upload a file of requests for a batch.",
             form=files.FORM),
    get("/v1/files", files.list_files, "The files."),
    get("/v1/files/{id}", files.get_file, "A file."),
    get("/v1/files/{id}/content", files.content, "The bytes of a file.", media=_BYTES),
    delete("/v1/files/{id}", files.delete_file, "Delete a file."),
    post("/v1/batches", files.create_batch, files.BatchRequest, "Answer the requests in a file."),
    get("/v1/batches", files.list_batches, "The batches."),
    get("/v1/batches/{id}", files.get_batch, "A batch."),
    Endpoint("POST", "/v1/batches/{id}/cancel", files.cancel_batch, "Cancel a batch."),
)))  # fmt: skip
ROUTES = (
    post("/v1/chat/completions", chat.chat_completions, chat.ChatRequest, "Answer a conversation.", _GENERATES,
         ("/chat/completions",)),
    post("/v1/completions", completions.completions, completions.CompletionRequest, "Complete text or tokens.",
         _GENERATES),
    post("/completion", llama_server.completion, llama_server.LlamaCompletionRequest,
         "Complete text or tokens, in llama-server's format.", _GENERATES, ("/completions",)),
    post("/infill", llama_server.infill, llama_server.InfillRequest,
         "Fill in the text between a prefix and a suffix, in llama-server's format.", _GENERATES, model="filling"),
    post("/v1/fim/completions", mistral.fim_completions, mistral.FimRequest,
         "Fill in the text between a prompt and a suffix, in Mistral's format.", _GENERATES, model="filling"),
    post("/v1/responses", responses.responses, responses.ResponsesRequest, "Answer an input, stored with --store.",
         ("424", *_GENERATES, "404", "500", "507"), ("/responses",)),
    post("/v1/chat/completions/input_tokens", chat.count_tokens, chat.ChatRequest,
         "Count the tokens of a conversation, in OpenAI's format.", aliases=("/chat/completions/input_tokens",)),
    post("/v1/responses/input_tokens", responses.count_tokens, responses.ResponsesRequest,
         "Count the tokens of an input.", ("424",), ("/responses/input_tokens",)),
    *STORE_ROUTES,
    post("/v1/messages", anthropic.messages, anthropic.MessagesRequest,
         "Answer a conversation, in Anthropic's format.", _GENERATES),
    post("/v1/messages/count_tokens", anthropic.count_tokens, anthropic.CountTokensRequest,
         "Count the tokens of a conversation."),
    Endpoint("POST", "/v1/audio/transcriptions", transcriptions.transcriptions,
             "The text of a sound, which is a file of a form.", _GENERATES, aliases=("/audio/transcriptions",),
             form=transcriptions.FIELDS),
    post("/v1/embeddings", embeddings.embeddings, embeddings.EmbeddingRequest, "Embed texts.", model="embedding"),
    post("/embedding", embeddings.llama_embedding, embeddings.LlamaEmbeddingRequest,
         "Embed texts, in llama-server's format.", aliases=("/embeddings",), model="embedding"),
    post("/v1/rerank", embeddings.rerank, embeddings.RerankRequest, "Rank documents for a query.",
         aliases=("/rerank", "/reranking", "/v1/reranking", "/v2/rerank"), model="embedding"),
    post("/v1/score", embeddings.score, embeddings.ScoreRequest, "Score pairs of texts.", aliases=("/score",),
         model="embedding"),
    get("/v1/models", system.list_models, "The models that are served.", aliases=("/models",)),
    get("/v1/models/{id:path}", system.get_model, "One model.", ("404",)),
    delete("/v1/models/{id:path}", system.delete_model, "Refused for a model that is served.", ("403", "404")),
    post("/tokenize", tokens.tokenize, tokens.TokenizeRequest, "Tokenize text or a conversation."),
    post("/detokenize", tokens.detokenize, tokens.DetokenizeRequest, "The text of tokens."),
    post("/apply-template", chat.apply_template, chat.ChatRequest, "The prompt of a conversation."),
    get("/tokenizer_info", _of_model(tokens.tokenizer_info), "Properties of the tokenizer."),
    get("/lora-adapters", _of_model(llama_server.lora_adapters),
        "The adapters, with the numbers that `lora` has for them."),
    post("/v1/load_lora_adapter", adapters.load, adapters.LoadRequest, "Load a LoRA.", ("403", "404")),
    post("/v1/unload_lora_adapter", adapters.unload, adapters.UnloadRequest, "Unload a LoRA.", ("403", "404")),
    get("/props", _of_model(llama_server.props), "The model's template and the defaults of requests."),
    get("/slots", _of_model(llama_server.slots), "How many slots compute a request."),
    get("/slots/files", _of_model(slots.saved_files), "The saved conversations.", ("403",)),
    Endpoint("POST", "/slots/files", slots.upload, "Upload a saved conversation.", _OF_SLOTS, form=slots.FORM),
    get("/slots/files/{filename}", _of_model(slots.download), "A saved conversation.", ("400", "403", "404", "507"),
        media=_BYTES),
    delete("/slots/files/{filename}", _of_model(slots.delete_file), "Delete a saved conversation.", _OF_SLOTS),
    Endpoint("POST", "/slots/{id}", _of_model(slots.slot_action),
             "Save, restore or erase the cells of a conversation.", _OF_SLOTS),
    get("/model_info", _of_model(system.model_info), "Sizes of the model and of the engine.", model="any"),
    get("/health", system.health, "Whether the server accepts requests.", ("503",), has_key=False,
        aliases=("/v1/health",)),
    get("/ping", system.ping, "Whether the server accepts requests.", ("503",), has_key=False),
    get("/version", system.version, "The version of llamapipe."),
    Endpoint("POST", "/reset_prefix_cache", _of_model(system.reset_prefix_cache),
             "Forget the cached tokens that no request uses.", ("404",)),
    get("/metrics", system.metrics, "Metrics for Prometheus.", media="text/plain"),
    get("/requests", system.requests, "Where the time of the last requests went."),
    get("/openapi.json", system.openapi),
)  # fmt: skip
OLLAMA_ROUTES = (
    post("/api/chat", ollama.chat, ollama.OllamaChatRequest, "Answer a conversation, as Ollama.", _GENERATES,
         stream_media=_LINES),
    post("/api/generate", ollama.generate, ollama.GenerateRequest, "Answer a prompt.", _GENERATES,
         stream_media=_LINES),
    post("/api/embed", ollama.embed, ollama.EmbedRequest, "Embed texts.", model="embedding"),
    post("/api/embeddings", ollama.old_embeddings, ollama.OldEmbedRequest, "Embed a text.", model="embedding"),
    post("/api/show", ollama_descriptions.show, ollama_descriptions.ShowRequest, "What a model is and can do."),
    get("/api/tags", ollama_descriptions.tags, "The models that are served."),
    get("/api/ps", ollama_descriptions.loaded_models, "The models that are loaded."),
    get("/api/version", ollama_descriptions.version, "The version of this API."),
    post("/api/pull", ollama_files.pull, ollama_files.PullRequest, "Download a model.", ("403", "507"),
         stream_media=_LINES),
    post("/api/copy", ollama_files.copy, ollama_files.CopyRequest, "Give the model another name.", ("403",)),
    post("/api/delete", ollama_files.delete, ollama_files.DeleteRequest, "Delete a file.", ("403",), method="DELETE"),
    get("/", page.page_or_name, has_key=False),
)  # fmt: skip
_PAGE_ROUTES = (get("/", page.page, has_key=False), get("/timeline", _of_model(page.timeline)))
PAGE_ROUTES = (  # the page's routes that need no model
    get("/page/{name}", page.page_file, has_key=False),
    get("/jobs", page.jobs, "Batches, and answers in the background that have not ended.", ("500",)),
    get("/mcp", page.mcp_servers, "The MCP servers that requests may name."),
)


class _WithoutSlash:
    """Middleware that serves a path with a trailing slash like the path without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
        if path.endswith("/") and len(path.removeprefix(root)) > 1:
            scope = {**scope, "path": path.rstrip("/")}
        await self._app(scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer an error of a route, and a request for an unknown path or method, in the format of the path's API."""
    exchange: Exchange = request.scope["llamapipe.exchange"]
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        headers = error.headers
        hint = None
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        here = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        is_id = all("{" in route.path for route in here)
        if error.status_code == 405 and is_id and instead_of(exchange.path, "paths") is not None:
            error, headers = HTTPException(404), None  # "compact" is no id of an answer
        if error.status_code == 404:
            hint = _path_hint(exchange.path.rstrip("/"), routes)
        elif error.status_code == 405:  # Starlette names only the methods of the path's first route
            methods = sorted({method for route in here for method in route.methods or ()})
            headers = {"allow": ", ".join(methods)}
            hint = "use " + " or ".join(method for method in methods if method != "HEAD")
            hint += _INSTEAD.get(exchange.path, "")
        message = f"{exchange.method} {exchange.path}: {error.detail}{f'; {hint}' if hint else ''}"
        error = ApiError(error.status_code, message)
    assert isinstance(error, ApiError)
    return exchange.prepare(exchange.error_response(error, headers))


_INSTEAD = {  # advice for methods that llama-server has
    "/lora-adapters": "; each request chooses its adapters with lora",
    "/models": "; /api/pull of --ollama downloads a model, and /api/delete deletes it",
}


def _path_hint(path: str, routes: Iterable[Route]) -> str | None:
    """Return advice for a path that has no route; None if there is none."""
    # What clients upload there becomes part of a model.
    advice = instead_of("/api/create" if path.startswith("/api/blobs/") else path, "paths")
    if advice is not None:
        return advice
    meant = path_meant(path, {route.path for route in routes if "{" not in route.path})
    return None if meant is None else f"did you mean {meant}?"


def _lifespan(state: Gate) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        state.start_background()
        yield
        state.draining = True
        await state.stop_background()
        await asyncio.to_thread(state.release)

    return lifespan

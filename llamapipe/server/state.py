"""The state that all requests of a server share: its engine, its embedder, the names of its models.

This module knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

from llamapipe._messages import listed, quoted
from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.errors import BackendError
from llamapipe.llama.adapter import Adapter, ControlVector
from llamapipe.llama.model import Model
from llamapipe.server._client_request import ClientRequest
from llamapipe.server._timeline import Timeline
from llamapipe.server.body_budget import BodyBudget
from llamapipe.server.errors import no_model, shutting_down
from llamapipe.server.gate import Gate
from llamapipe.server.mcp.servers import McpServers, RemoteServers
from llamapipe.server.metrics import Metrics
from llamapipe.server.settings import ServerSettings
from llamapipe.wanted import time_limit

T = TypeVar("T")
_log = logging.getLogger("llamapipe.server")


class WorkerLink(Protocol):
    """Connects a server to the other workers, if it is one of several on a port.

    ``n_ready``, ``n_workers``: how many workers are ready, and how many there are.
    """

    n_ready: int
    n_workers: int

    async def text(self) -> bytes:
        """Return the metrics of all workers."""

    async def requests(self) -> list[dict[str, Any]]:
        """Return where the time of all workers' most recent requests went, the newest first."""

    def fail(self, message: str) -> None:
        """End this worker, because it can no longer answer anything."""


class ServerState(Gate):
    """One server's engine, embedder or both, and settings. Use it on the event loop's thread.

    ``model_names``: the names clients may use for the model; answers contain the first. ``worker``: the link to the
    other workers, if this is one of several. ``mcp``: the MCP servers of the operator's file. ``mcp_remote``: the
    servers that clients name by address. Both are None if there are none.
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
        self.created = int(time.time())
        self.copies: list[str] = []  # further names of the model, that clients made
        self.loaded_adapters: dict[str, Adapter] = {}  # by clients
        self.loading_adapters: set[str] = set()
        self._tool_calls: set[asyncio.Future[Any]] = set()
        self._has_stopped_tools = False
        try:
            self.mcp: McpServers | None = settings.open_mcp()
        except BaseException:
            super().release()
            raise
        self.mcp_remote = (
            RemoteServers(settings.mcp_urls, settings.mcp_timeout_s) if settings.mcp_urls else None
        )
        if engine is not None and engine.kv_events is not None and len(settings.api_keys) > 1:
            _log.warning(
                "no KV events are published: each of the %d API keys has a prefix cache",
                len(settings.api_keys),
            )

    def release(self) -> None:
        """Do the same as ``Gate.release``, and end the MCP servers."""
        super().release()
        for servers in (self.mcp, self.mcp_remote):
            if servers is not None:
                servers.close()

    def mcp_labels(self) -> Sequence[str]:
        """See ``Gate.mcp_labels``."""
        return () if self.mcp is None else tuple(self.mcp.labels)

    def stop_tools(self) -> None:
        """Cancel tool calls: their requests learn that the server is shutting down, and no other call begins."""
        self._has_stopped_tools = True
        for call in self._tool_calls:
            call.cancel()

    async def ask_tools(self, asked: Awaitable[T]) -> T:
        """Await an MCP server's answer, which may take minutes. Raises ApiError 503 when this server shuts down."""
        call = asyncio.ensure_future(asked)
        if self._has_stopped_tools:
            call.cancel()
        self._tool_calls.add(call)
        try:
            await asyncio.wait({call})
            if call.cancelled():
                raise shutting_down()
            return call.result()
        finally:
            call.cancel()
            self._tool_calls.discard(call)

    async def in_thread(self, function: Callable[..., T], *arguments: Any, size: int = 0) -> T:
        """Run ``function(*arguments)`` in a thread, because it would hold up the event loop. Clients take turns.

        ``size``: the number of characters to convert. Raises TimeoutError after ``timeout_s``.
        """
        with time_limit(self.settings.timeout_s):
            return await self._offload(function, *arguments, size=size)

    async def convert(self, function: Callable[..., T], *arguments: Any, size: int) -> T:
        """See ``Gate.convert``, in the queue of all conversions."""
        return await self.in_thread(function, *arguments, size=size)

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError 404 for a server that only embeds."""
        if self._engine is None:
            raise no_model("no model that generates is loaded here")
        return self._engine

    @property
    def n_slots(self) -> int | None:
        """See ``Gate.n_slots``."""
        return None if self._engine is None else self._engine.n_seq_max

    @property
    def has_engine(self) -> bool:
        """Whether the server has an engine that generates text."""
        return self._engine is not None

    @property
    def is_closed(self) -> bool:
        """Whether its engine, or the embedder of a server that only embeds, is closed."""
        owner = self.embedder if self._engine is None else self._engine
        return owner is None or owner.closed

    @property
    def failure(self) -> BackendError | None:
        """Why its engine no longer answers; None while it works."""
        return None if self._engine is None else self._engine.failure

    def note_answered(self, request: ClientRequest) -> None:
        """Do as ``Gate.note_answered``. A worker whose engine has failed ends, so that a new one replaces it."""
        super().note_answered(request)
        if self.worker is not None and (failure := self.failure) is not None:
            self.worker.fail(str(failure))

    @cached_property
    def timeline(self) -> Timeline:
        """The most recent steps of its engine. Raises the errors of ``engine``."""
        return Timeline(self.engine)

    @property
    def chat_names(self) -> tuple[str, ...]:
        """The names of the model that generates, including names that clients added."""
        return (*self.model_names, *self.copies)

    @property
    def adapters(self) -> tuple[Adapter | ControlVector, ...]:
        """The adapters that requests may name."""
        return () if self._engine is None else self._engine.adapters

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the adapters, which clients use like names of models."""
        return tuple(adapter.name for adapter in self.adapters if adapter.name not in self.chat_names)

    def adapter_of(self, name: str | None) -> dict[str, str]:
        """Return the field of ``SamplingParams`` that a model's name asks for; none unless it names an adapter."""
        if name is None or (known := self._known_name(name, self.adapter_names)) is None:
            return {}
        return {"adapter": known}

    @property
    def loras(self) -> list[Adapter]:
        """The LoRAs in the order of their numbers, which llama-server's clients use."""
        return [adapter for adapter in self.adapters if isinstance(adapter, Adapter)]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all served models."""
        return (
            self.chat_names + self.adapter_names + (self.embedding_names if self.embedder is not None else ())
        )

    @property
    def models(self) -> list[Model]:
        """The served models."""
        return [owner.model for owner in (self._engine, self.embedder) if owner is not None]

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer. Raises ApiError 404 for a model that is not served."""
        if self._engine is None:
            raise no_model("no model that generates is loaded here")
        return self._served_name(name, self.chat_names + self.adapter_names)

    def check_name(self, name: str | None) -> str:
        """Return the name of a model of any kind or of an adapter. Raises ApiError 404 if there is none."""
        served = self._served_name(name, self.all_names)
        return self._known_name(served, self.all_names) or served

    def check_embedder(self, name: str | None) -> tuple[Embedder, str]:
        """Return the embedding model and its name for the answer. Raises ApiError 404."""
        if self.embedder is None:
            raise no_model("no embedding model is loaded; start with --embeddings FILE")
        return self.embedder, self._served_name(name, self.embedding_names)

    def _known_name(self, name: str, names: tuple[str, ...]) -> str | None:
        """Return the one of ``names`` that ``name`` is; None if it is none of them.

        Ollama's lists have ``:latest`` after names, and its clients also send these names to ``/v1``.
        """
        if name in names:
            return name
        short = name.removesuffix(":latest")
        return short if self.settings.ollama and short in names else None

    def _served_name(self, name: str | None, names: tuple[str, ...]) -> str:
        if name is None:
            return names[0]
        if self._known_name(name, names) is not None:
            return name
        # The front process chose this one: it also knows names that came after the start.
        if name not in names and self.settings.any_model_name:
            return names[0]
        if name not in names and not self.is_behind_front:
            embeds = names == self.embedding_names
            if name in self.all_names:
                what = (
                    "generates texts; one that embeds them"
                    if embeds
                    else "embeds texts; one that generates them"
                )
                raise no_model(f"the model {quoted(name)} {what} is {listed(names)}")
            flag = "--embeddings-alias" if embeds else "--alias"
            raise no_model(
                f"the model {quoted(name)} is not served here; there is {listed(names)} ({flag} gives it other names)"
            )
        return name

"""State shared by all requests of a server: the engine, the settings, the counts, and whether it is draining."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from llamapipe.arguments import quoted
from llamapipe.engine.frontend.long_work import size_of
from llamapipe.engine.frontend.tenant import Tenant, tenant
from llamapipe.host.memory import return_freed_memory
from llamapipe.server.bodies import BodyBudget
from llamapipe.server.errors import ApiError
from llamapipe.server.metrics import Metrics
from llamapipe.server.prompts import refuse_long_chat
from llamapipe.server.settings import ServerSettings
from llamapipe.server.timeline import Timeline
from llamapipe.server.wire.template_args import check_template_args

if TYPE_CHECKING:
    from llamapipe.embedding.embedder import Embedder
    from llamapipe.engine.engine import Engine
    from llamapipe.server.exchange import Call
    from llamapipe.server.workers.worker import Worker

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

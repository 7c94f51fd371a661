"""Decides who may use a server, and how much at once: keys, limits and counts of requests.

Open this file to change what every request passes before its route. It knows no engine, because the front process of
several models also has a gate. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import quote

from llamapipe.host.memory import return_freed_memory
from llamapipe.server._client_request import ClientRequest, Recent
from llamapipe.server._inside import Inside, LaterWork
from llamapipe.server._times import RequestTimes
from llamapipe.server.body_budget import BodyBudget
from llamapipe.server.errors import ApiError, shutting_down
from llamapipe.server.metrics import Metrics
from llamapipe.server.settings import ServerSettings
from llamapipe.work.tenant import Tenant, tenant

T = TypeVar("T")
_PATH_CHARACTERS = "/:@!$&'()*+,;=-._~"  # others are escaped in the log: a path may have line breaks
_POLLED = ("/timeline", "/requests", "/jobs", "/ping", "/health", "/v1/health", "/metrics")
_TRIM_AFTER_S = 1.0
_TRIM_BYTES = 2**20
_SMALL_BYTES = 2**16  # smaller bodies are frequent, and do not count
# Headers from the front process to a model's process: the fields of ``Tenant``, and the wait for the model.
CLIENT, CACHE, LOADED_NS = "x-llamapipe-client", "x-llamapipe-cache", "x-llamapipe-loaded-ns"
# Likewise: the owner of the request and of the data that it stores, and the id of a stored answer.
OWNER, ANSWER = "x-llamapipe-owner", "x-llamapipe-answer"
# Likewise: the fields of ``Inside``, for a request that the front process made itself.
WORKER, PRIORITY = "x-llamapipe-run-by", "x-llamapipe-priority"
_OF_CLIENT = Inside()
_log = logging.getLogger("llamapipe.server")


class Gate:
    """One server's keys, limits and counts.

    ``n_requests``: the number of requests being served. ``bound_to``: the address that the server listens on; None
    inside another server, which gives it with each request. ``is_behind_front``: only the front process of several
    models reaches this server; it has checked the client and names it in headers. ``store``: stored answers. ``files``:
    clients' files and batches. Both are open until ``release``, and None if the server stores nothing. ``background``:
    computes answers and batches for which no client waits; None without a store.

    Raises OSError and StoreError for a file of stored answers that cannot be used.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics, bodies: BodyBudget) -> None:
        self.settings = settings
        self.metrics = metrics
        self.bodies = bodies
        self.bound_to: str | None = None
        self.is_behind_front = False
        self.n_requests = 0
        self.recent = Recent(settings.keep_requests)
        self.n_pulls = 0  # downloads that clients asked for
        self.draining = False
        self._trims = False  # whether `_trim` will run
        self._n_freed = 0  # bytes since the last trim
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self.store = settings.open_store()
        try:
            self.files = settings.open_files()
        except BaseException:
            if self.store is not None:
                self.store.close()
            raise
        self.background: LaterWork | None = None

    def release(self) -> None:
        """Close the files of stored data, if any. A second call does nothing. Blocks; any thread may call it."""
        for database in (self.store, self.files):
            if database is not None:
                database.close()

    @property
    def n_slots(self) -> int | None:
        """The number of requests that the engine computes at once; None without an engine."""
        return None

    def start_background(self) -> None:
        """Start to compute the answers and batches that wait in the store. A second call does nothing."""
        if self.background is not None:
            self.background.start()

    async def stop_background(self) -> None:
        """Stop computing, and leave unfinished work to the next server or to this server's other processes."""
        if self.background is not None:
            await self.background.stop()

    def mcp_labels(self) -> Sequence[str]:
        """Return the labels of the MCP servers that requests may name."""
        return ()

    def stop_tools(self) -> None:
        """Cancel the running tool calls of requests, because the server is shutting down."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} n_requests={self.n_requests}{' draining' if self.draining else ''}>"

    def check(self, request: ClientRequest) -> None:
        """Check a request before its body is read, and set its ``key``. Raises ApiError."""
        inside = request.inside
        request.key = self._check_key(request) if inside is None else inside.key
        if self.draining:
            raise shutting_down()
        if inside is None:
            self._check_room()

    def _check_room(self) -> None:
        if self.n_requests >= self.settings.max_requests:
            raise ApiError(
                429,
                f"{self.n_requests} requests are being served, which is the limit of this server (--max-requests); try "
                "again later",
                code="too_many_requests",
            )

    @contextmanager
    def admit(self, request: ClientRequest, counted: bool) -> Iterator[None]:
        """Count a request within the context, after its body has arrived. Raises ApiError if there are too many.

        Within the context, calls of the engine are made for this client; see ``Tenant``.
        """
        counted = counted and request.inside is None
        if counted:
            self._check_room()
        request.n_others = self.n_requests
        self.n_requests += counted
        token = tenant.set(self.tenant_of(request))
        try:
            yield
        finally:
            tenant.reset(token)
            self.n_requests -= counted

    def tenant_of(self, request: ClientRequest) -> Tenant:
        """Return the client: its key if there are several keys, each with a separate prefix cache; else its address."""
        priority = self.inside_of(request).priority
        if self.is_behind_front:
            cache = request.headers.get(CACHE) or None
            return self._tenant(request.headers.get(CLIENT, ""), cache, priority)
        key = request.key
        if key is not None and len(self._keys) > 1:
            return self._tenant(key, key.hex(), priority)
        return self._tenant(request.client.host if request.client else "no address", None, priority)

    def _tenant(self, share: Hashable, cache: str | None, priority: int) -> Tenant:
        return Tenant(share, cache, self.settings.grammar_timeout_s, self.settings.max_sound_s, priority)

    def inside_of(self, request: ClientRequest) -> Inside:
        """Return the client for whom the server made a request itself; an empty ``Inside`` for a client's request."""
        if self.is_behind_front and WORKER in request.headers:
            headers = request.headers
            return Inside(worker=headers[WORKER] or None, priority=int(headers.get(PRIORITY, "0")))
        return request.inside or _OF_CLIENT

    def owner_of(self, request: ClientRequest) -> str:
        """Return the owner of this request and its data: a digest of its key; without keys, an empty text."""
        if self.is_behind_front:
            return request.headers.get(OWNER, "")
        # The store's file reveals neither the key nor the digest with which it is compared.
        return "" if request.key is None else _owner(request.key)

    def own_requests(self, request: ClientRequest, entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries of ``GET /requests`` that a client may see: with keys, those of its own key.

        If there is only one key, also returns requests that were refused before their key was checked.
        """
        owner = self.owner_of(request) if self._keys else None
        seen = (owner,) if len(self._keys) > 1 else (owner, "")
        return [
            {name: value for name, value in entry.items() if name != "owner"}
            for entry in entries
            if owner is None or entry["owner"] in seen
        ]

    def key_of(self, owner: str) -> bytes | None:
        """Return the digest of an owner's key; None without keys.

        Raises LookupError if the server no longer has this key.
        """
        if not self._keys and not owner:
            return None
        for key in self._keys:
            if _owner(key) == owner:
                return key
        raise LookupError("its API key is no longer one of this server's")

    def answer_id(self, request: ClientRequest) -> str:
        """Return the id of a stored answer, without its prefix.

        It differs from the request's id, which a client may send twice. The front process chooses it. If a process
        dies, the front process asks another with the same id, so that the second answer replaces the first.
        """
        answer_id: str | None = request.scope.get("llamapipe.answer")
        if self.is_behind_front:
            answer_id = request.headers.get(ANSWER)
        return uuid.uuid4().hex if answer_id is None else answer_id

    def _check_key(self, request: ClientRequest) -> bytes | None:
        """Return the digest of the client's key; None if no key is needed. Raises ApiError."""
        if not self._keys or (self.settings.open_metrics and request.route == "/metrics"):
            return None
        api_key = request.headers.get("x-api-key", "")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            api_key = token.strip()
        # Digests have the same length, and all keys are compared, so the time reveals nothing about the keys.
        digest = hashlib.sha256(api_key.encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            problem = (
                "the API key is not one of this server's" if api_key else "this server asks for an API key"
            )
            raise ApiError(
                401,
                f"{problem}; send the key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        return digest

    async def convert(self, function: Callable[..., T], *arguments: Any, size: int) -> T:
        """Return ``function(*arguments)``, computed in a thread to keep the event loop free. Clients take turns.

        ``size``: the bytes to convert. The total size of large bodies that are converted at once is limited.
        """
        raise NotImplementedError

    def note_freed(self, n_bytes: int) -> None:
        """Record that memory of a body was freed.

        Large amounts are returned to the system soon, because the C library would keep them.
        """
        if n_bytes > _SMALL_BYTES:
            self._n_freed += n_bytes
        if self._n_freed > _TRIM_BYTES and not self._trims:
            self._trims, self._n_freed = True, 0
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
        self._trims = False
        self.note_freed(0)  # starts another trim if much was freed during this one

    def note_answered(self, request: ClientRequest) -> None:
        """Count and log an answered request.

        Requests to routes that programs poll, and requests that a model's process logs, are logged at level DEBUG.
        """
        times = request.times
        seconds = perf_counter() - times.arrived_at
        self.metrics.count_answer(request, seconds)
        self.recent.add(request, self.owner_of(request), seconds)
        if self.background is not None and request.is_forwarded and request.route == "/v1/responses":
            self.background.wake()  # a model's process may have stored an answer to compute
        is_quiet = request.is_forwarded or (request.status < 400 and request.path in _POLLED)
        _log.log(
            logging.DEBUG if is_quiet else logging.INFO,
            "%s %s %d %.0f ms n_prompt_tokens=%s n_completion_tokens=%s%s id=%s",
            request.method,
            quote(request.path, _PATH_CHARACTERS),
            request.status,
            seconds * 1e3,
            "-" if request.n_prompt_tokens is None else request.n_prompt_tokens,
            "-" if request.n_completion_tokens is None else request.n_completion_tokens,
            _where(times) if times.was_computed else "",
            request.id,
        )


def _owner(key: bytes) -> str:
    return hashlib.sha256(b"owner of answers" + key).hexdigest()


def _where(times: RequestTimes) -> str:
    """Return the phases of a request with their milliseconds, for the log."""
    phases = "".join(f" {name}={ms:.0f}" for name, ms in times.phases_ms().items() if ms or name == "queue")
    return f" n_cached_tokens={times.n_cached}{phases}"

"""Estimates a request's cost on each replica: the part of its prompt not yet computed there, and the load.

This module is pure: it uses neither Ray nor clocks. Requests go from the HTTP process to a replica, and are routed by
the bytes of their prompts. KV cells also depend on the adapters and the salt, so each prompt has an owner: the
request's adapters with their scales, and its salt. Prompts of different owners share no chunks.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

from llamapipe.params import SamplingParams

_PROMPTS = ("messages", "prompt", "input", "content")  # fields in all APIs and for tokenizing


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request with its whole body; can be pickled. ``headers``: names in lower case."""

    method: str
    path: str
    root_path: str
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def scope(self) -> dict[str, Any]:
        """Return the request as an ASGI scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query_string,
            "root_path": self.root_path,
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


class AdapterNames(NamedTuple):
    """The adapters of a deployment. A request's body does not say whether ``model`` names one.

    ``names``: the names that requests use, LoRAs first, in the order of the numbers in the field ``lora``.
    ``activated``: the activated LoRAs among them. Up to the invocation, which usually ends a prompt, a request for such
    a LoRA shares the cells of requests without the adapter, so it is routed like a request without the adapter.
    """

    names: Sequence[str] = ()
    activated: Collection[str] = ()


NO_ADAPTERS = AdapterNames()


def prompt_and_owner(
    arguments: Sequence[object], options: Mapping[str, object], adapters: AdapterNames = NO_ADAPTERS
) -> tuple[bytes, bytes]:
    """Return the prompt of a replica's call, as bytes that begin alike if prompts do, and the owner of its cells.

    The prompt is empty if the call has none; the owner is empty without adapters and salt. ``arguments``: an
    ``HttpRequest``; or a text, token ids or messages, with ``SamplingParams``. ``options``: arguments by name, which
    may include ``SamplingParams``.
    """
    first = arguments[0] if arguments else None
    if isinstance(first, HttpRequest):
        body = _body(first.body)
        return _of_body(body), _owner(_choice(body, adapters), body.get("cache_salt"), adapters)
    params = arguments[1] if len(arguments) > 1 else options.get("params")
    if isinstance(params, SamplingParams):
        return _of_value(first), _owner(params.adapter, params.cache_salt, adapters)
    return _of_value(first), b""


def _body(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a body. A body that is not an object has none; the replica reports the error."""
    try:
        value = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}


def _of_body(body: Mapping[str, Any]) -> bytes:
    parts = [_of_value(body[name]) for name in ("tools", "system", "instructions") if body.get(name)]
    parts += [_of_value(body[name]) for name in _PROMPTS if body.get(name)][:1]
    return b"".join(parts)


def _choice(body: Mapping[str, Any], adapters: AdapterNames) -> object:
    """Return the adapters that a body names as its model or by number, in the form of ``SamplingParams.adapter``."""
    model = body.get("model")
    if isinstance(model, str):
        for name in (model, model.removesuffix(":latest")):  # Ollama's clients may append this suffix
            if name in adapters.names:
                return name
    try:
        return {adapters.names[lora["id"]]: lora.get("scale", 1.0) for lora in body.get("lora") or ()}
    except (TypeError, LookupError):  # the replica refuses the request
        return None


def _owner(choice: object, salt: object, adapters: AdapterNames) -> bytes:
    """Return 16 bytes for adapters and a salt, which may come from an unchecked body; empty if there are neither."""
    scales = choice if isinstance(choice, Mapping) else {choice: 1.0}
    try:
        used = sorted(
            (str(name), float(scale))
            for name, scale in scales.items()
            if name is not None and scale and name not in adapters.activated
        )
    except (TypeError, ValueError, OverflowError):  # a scale that is not a number
        used = []
    if not used and not isinstance(salt, str):
        return b""
    return blake2b(repr((used, salt)).encode(), digest_size=16).digest()


def _of_value(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if value is None:
        return b""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return b"".join((item & 0xFFFFFFFF).to_bytes(4, "little") for item in value)
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return b""


R = TypeVar("R", bound=Hashable)
CHUNK_BYTES = 64  # prefixes are compared in chunks of this size


def chunks_of(prompt: bytes, owner: bytes = b"") -> list[int]:
    """Return a number for each whole chunk of a prompt, computed from the owner, the chunk and all earlier chunks.

    Equal prefixes of one owner have equal numbers. ``owner``: at most 64 bytes.
    """
    numbers = []
    state = blake2b(digest_size=8, key=owner)
    for end in range(CHUNK_BYTES, len(prompt) + 1, CHUNK_BYTES):
        state.update(prompt[end - CHUNK_BYTES : end])
        numbers.append(int.from_bytes(state.copy().digest(), "little"))
    return numbers


@dataclass(frozen=True)
class _Routed(Generic[R]):
    """A request that a replica is working on, its cost there, and its prompt."""

    replica: R
    cost: int
    n_bytes: int
    chunks: Sequence[int]


class PrefixCosts(Generic[R]):
    """The prefixes and the open work of each replica, as this router knows them. One thread.

    ``n_remembered_bytes``: how many bytes of the most recent prompts are remembered for each replica; choose about as
    much as fits into its KV cells. ``request_bytes``: the cost of a request's generated tokens, in bytes of prompt.
    Prompt bytes stand for tokens, because a router has no tokenizer and only compares costs.
    """

    def __init__(self, n_remembered_bytes: int = 2**18, request_bytes: int = 1024) -> None:
        self._most_chunks = max(n_remembered_bytes // CHUNK_BYTES, 1)
        self._request_bytes = request_bytes
        self._known: dict[R, OrderedDict[int, None]] = {}  # numbers of chunks, the most recent last
        self._routed: dict[str, _Routed[R]] = {}
        self._load: dict[R, int] = {}
        self._n_running: dict[R, int] = {}

    def __repr__(self) -> str:
        return f"<PrefixCosts n_replicas={len(self._known)} n_running={len(self._routed)}>"

    def n_matched(self, replica: R, chunks: Sequence[int]) -> int:
        """Return how many of a prompt's first chunks a replica has computed."""
        known = self._known.get(replica)
        if known is None:
            return 0
        return next((i for i, chunk in enumerate(chunks) if chunk not in known), len(chunks))

    def cost(self, replica: R, n_bytes: int, chunks: Sequence[int], n_queued: int = 0) -> int:
        """Return the work, in bytes of prompt, that a replica has until this request is done.

        ``n_queued``: the number of requests that the replica reportedly has. Those that were not routed here came from
        other routers, and count as requests without a prompt.
        """
        unmatched = n_bytes - self.n_matched(replica, chunks) * CHUNK_BYTES
        n_others = max(n_queued - self._n_running.get(replica, 0), 0)
        return unmatched + self._load.get(replica, 0) + n_others * self._request_bytes

    def rank(
        self, replicas: Iterable[R], n_bytes: int, chunks: Sequence[int], n_queued: Mapping[R, int]
    ) -> list[R]:
        """Rank replicas, the cheapest first; among equals, by fewer requests, then by the given order."""
        costs = {
            replica: (self.cost(replica, n_bytes, chunks, n_queued.get(replica, 0)), n_queued.get(replica, 0))
            for replica in replicas
        }
        return sorted(costs, key=costs.__getitem__)

    def route(self, request: str, replica: R, n_bytes: int, chunks: Sequence[int]) -> None:
        """Record that a replica will get a request; a request recorded for another replica moves."""
        self._remove(request)
        cost = n_bytes - self.n_matched(replica, chunks) * CHUNK_BYTES + self._request_bytes
        self._routed[request] = _Routed(replica, cost, n_bytes, chunks)
        self._load[replica] = self._load.get(replica, 0) + cost
        self._n_running[replica] = self._n_running.get(replica, 0) + 1
        known = self._known.setdefault(replica, OrderedDict())
        # From the end, so that the first chunks, which other prompts may share, are forgotten last.
        for chunk in reversed(chunks[: self._most_chunks]):
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > self._most_chunks:
            known.popitem(last=False)

    def record_accepted(self, request: str, replica: R) -> None:
        """Record which replica got a request. Requests that have ended or were never recorded are ignored."""
        routed = self._routed.get(request)
        if routed is not None and routed.replica != replica:
            self.route(request, replica, routed.n_bytes, routed.chunks)

    def finish(self, request: str, replica: R | None = None) -> None:
        """Record that a request has ended, for any reason.

        ``replica``: do nothing if another replica has the request.
        """
        routed = self._routed.get(request)
        if routed is not None and replica in (None, routed.replica):
            self._remove(request)

    def _remove(self, request: str) -> None:
        routed = self._routed.pop(request, None)
        if routed is not None and routed.replica in self._load:
            self._load[routed.replica] -= routed.cost
            self._n_running[routed.replica] -= 1

    def keep(self, replicas: Iterable[R]) -> None:
        """Forget all replicas except these."""
        gone = self._known.keys() - set(replicas)
        for replica in gone:
            del self._known[replica], self._load[replica], self._n_running[replica]
        self._routed = {name: routed for name, routed in self._routed.items() if routed.replica not in gone}

"""Settings of a server: limits, API keys and model names, checked when they are created."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llamapipe._messages import explains_fields, listed, quoted, readable
from llamapipe._options import ACCESS, LIMITS, SERVER
from llamapipe._sampling_table import OPTIONS
from llamapipe.arguments import check_flag, check_option, path_of
from llamapipe.llama.fim import FimOrder
from llamapipe.params import SamplingParams

if TYPE_CHECKING:
    from llamapipe.server.mcp.servers import LocalServers
    from llamapipe.server.store.answers import Store
    from llamapipe.server.store.files import Files

_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]*")
_HOST = re.compile(r"\*|\[[0-9A-Fa-f:.]+\](:\d+)?|[^/\s:\[\]]+(:\d+)?|[0-9A-Fa-f:.]+")
_OTHER_DEFAULTS = ("sampler_order", "reasoning_budget_message", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
                   "dry_sequence_breakers")  # fmt: skip
TEMPLATE_PARAMETERS = frozenset(
    {"self", "messages", "tools", "add_generation_prompt"}
)  # of Model.render_chat
# Fields whose values are sequences of strings.
_NAMES = (
    "model_names",
    "embedding_names",
    "api_keys",
    "cors_origins",
    "allow_hosts",
    "media_urls",
    "mcp_urls",
)
_API_KEY = re.compile(r"[!-~](?:[ -~]*[!-~])?")


@explains_fields
@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server; frozen.

    - ``model_names``: the names clients may use for the model; answers contain the first. Default: the file's name.
    - ``embedding_names``: the names of the embedding model, likewise.
    - ``api_keys``: requests must carry one of them as a bearer token or in ``x-api-key``. Empty: no key is required.
      With several keys, each has a separate prefix cache, and requests of different keys take turns; otherwise requests
      of different addresses take turns.
    - ``open_metrics``: ``/metrics`` needs no key.
    - ``cors_origins``: origins whose pages may call the server, ``("*",)`` for all. Pages of this server, of this
      machine (``http://localhost:3000``) and of editors and desktop apps (``vscode-webview://``, ``app://``,
      ``tauri://``, ``file://``, ``chrome-extension://`` …) always may; pages of other origins are answered with 403.
    - ``allow_hosts``: further names that clients may use for the server, ``("*",)`` for any. A server that listens on
      loopback answers 403 to names that are not this machine's; on other addresses every name is allowed while this is
      empty.
    - ``max_body_bytes``: largest request body; larger ones are answered with 413.
    - ``max_bodies_bytes``: total size of the bodies that are being read or whose requests have no answer yet (for a
      stream, no token), beyond the first 64 KiB of each. Over the limit, the largest body of the client with the most
      bytes is answered with 503.
    - ``max_requests``: requests served simultaneously, including those in the engine's queue; more are answered with
      429. A request counts when its body has arrived.
    - ``max_connections_per_address``: connections from one address; the next one replaces the oldest one without a
      running request. All clients behind a proxy share its address. 0: no limit.
    - ``max_n``: maximum number of choices of one request, summed over its prompts.
    - ``max_messages``: maximum number of messages of a conversation (each part of a message counts), of items of a
      Responses input, or of texts to embed, rank or score.
    - ``max_text_characters``: a text, or the contents of a conversation, may be longer only if it can fit the context;
      otherwise it is refused before it is rendered or tokenized. Also the maximum characters of a text to embed or
      rank, and the maximum tokens to detokenize.
    - ``max_sound_s``: maximum length of a sound, in seconds. Preparing a sound is a single call, which ``timeout_s``
      cannot interrupt.
    - ``retry_after_s``: seconds in the ``Retry-After`` header of answers 429 and 503.
    - ``timeout_s``: seconds that a request may take; slower ones are answered with 504. None: no limit.
    - ``head_timeout_s``: seconds in which the head of a request must arrive; slower ones are answered with 408.
    - ``body_timeout_s``: seconds in which a request's body must arrive; slower ones are answered with 408.
    - ``ping_s``: a stream that has nothing to send for this many seconds sends a sign of life: a comment, or
      Anthropic's event ``ping``. 0: never.
    - ``grammar_timeout_s``: seconds of processor time that compiling and following a prompt's constraint may take;
      after that, its request fails. None: 30, the default of ``SamplingParams``.
    - ``strict``: refuse fields of a request that have no effect here, such as ``store``, and hosted tools. Otherwise
      they are accepted, and the answer's header ``x-llamapipe-unused`` names them.
    - ``any_model_name``: any name of a model in a request means the one that is served, as in llama-server; an
      adapter's name still means the adapter. Answers have the model's own name.
    - ``slot_save_path``: a folder in which clients may save the KV cells of conversations, and from which they may load
      them. None: they may not.
    - ``slot_transfer``: clients may download and upload these files.
    - ``lora_path``: a folder; clients may load the LoRAs in it, and unload them. None: they may not.
    - ``media_path``: a folder; ``file://`` addresses of images may name files below it. None: no files are read.
    - ``media_urls``: hosts, ``HOST`` or ``HOST:PORT``, that images may be fetched from. A host name that resolves to a
      private address is refused; such an address must itself be listed. Empty: nothing is fetched.
    - ``fim_order``: whether a prompt for filling in begins with the prefix (``"psm"``) or the suffix (``"spm"``).
    - ``sampling``: defaults for options of ``SamplingParams`` that a request leaves out: sampler options, by name, and
      ``reasoning_budget_message``.
    - ``reasoning``: for chats that do not say how much a model may reason. "off": not at all; the template turns it
      off, if it can, and reasoning that begins nevertheless is closed immediately. "auto": the template decides. A
      number: at most that many tokens (``SamplingParams.reasoning_budget``). ``template_args``: a JSON object with
      arguments of the chat template; a request's arguments override them.
    - ``system``: the system prompt of conversations that have none, in every API; a system prompt in the request or in
      a Modelfile replaces it. Transcriptions and ``/apply-template`` do not use it.
    - ``keep_requests``: the number of recent requests for which ``/requests`` and the page show where their time went,
      without texts.
    - ``store``: a file in which the answers of ``/v1/responses`` and conversations are stored; it is created if need
      be, and only its user may read it. None: nothing is stored. ``store_bytes``: its maximum size, beyond which the
      least recently used answers are deleted. ``store_days``: answers are also deleted after that many days without
      use.
    - ``mcp``: a file of MCP servers, in the form that MCP clients read; requests to ``/v1/responses`` may name these
      servers by label. They are started with this server. None: there are none. ``mcp_urls``: hosts, as in
      ``media_urls``, on which requests may name MCP servers by address. Empty: they may not. ``mcp_timeout_s``: seconds
      in which an MCP server must start, and answer each call. ``max_mcp_calls``: tool calls for one answer; after that,
      the model continues without calls. ``max_mcp_characters``: the maximum characters of a call's result; the rest is
      cut off.
    - ``max_background``: answers with ``background: true`` that may be waiting or running for one key; more are
      answered with 429.
    - ``files_bytes``: total size of the files that clients upload and of their batches' results; each key has an equal
      share. They are kept in a second file next to the store, for ``store_days`` unless the client says otherwise.
    - ``page``: serve the page at ``/``.
    - ``ollama``: also serve Ollama's API under ``/api``. ``allow_pull``, ``allow_delete``: its clients may download
      models from the Hugging Face Hub and give the model more names, and may delete downloaded files.

    Raises TypeError or ValueError, which names the field. ``docs/reference/options.md`` has the ranges.
    """

    model_names: tuple[str, ...] = ()
    embedding_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_bodies_bytes: int = 64 * 2**20
    max_requests: int = 1024
    max_connections_per_address: int = 1024
    max_n: int = 128
    max_messages: int = 10_000
    max_text_characters: int = 2**20
    max_sound_s: float = 300.0
    retry_after_s: int = 1
    timeout_s: float | None = None
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    ping_s: float = 5.0
    grammar_timeout_s: float | None = 10.0
    strict: bool = False
    any_model_name: bool = False
    keep_requests: int = 200
    page: bool = True
    ollama: bool = False
    allow_pull: bool = False
    allow_delete: bool = False
    fim_order: FimOrder = "psm"
    sampling: Mapping[str, Any] | None = None
    reasoning: str = "auto"
    template_args: str | None = None
    system: str | None = None
    slot_save_path: str | os.PathLike[str] | None = None
    slot_transfer: bool = False
    lora_path: str | os.PathLike[str] | None = None
    media_path: str | os.PathLike[str] | None = None
    media_urls: tuple[str, ...] = ()
    store: str | os.PathLike[str] | None = None
    store_bytes: int = 2**30
    store_days: int = 30
    mcp: str | os.PathLike[str] | None = None
    mcp_urls: tuple[str, ...] = ()
    mcp_timeout_s: float = 60.0
    max_mcp_calls: int = 32
    max_mcp_characters: int = 65_536
    max_background: int = 100
    files_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in _NAMES:
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name in ("model_names", "embedding_names"):
            object.__setattr__(self, name, tuple(map(readable, getattr(self, name))))
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins: {quoted(origin)} is not an origin; write scheme://host, scheme://host:port or '*'"
                )
        for host in self.allow_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"allow_hosts: {quoted(host)} is not a host; write a name without a scheme, or '*'"
                )
        for option in (*SERVER, *ACCESS, *LIMITS):
            check_option(option, getattr(self, option.name))
        check_flag("ollama", self.ollama)
        for name in ("allow_pull", "allow_delete"):
            if getattr(self, name) and not self.ollama:
                raise ValueError(f"{name} needs ollama, whose routes it is for")
        if self.sampling is not None:
            object.__setattr__(self, "sampling", _defaults(self.sampling))
        for name in ("reasoning", "template_args", "system"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "reasoning"):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        if self.reasoning not in ("off", "auto") and not re.fullmatch("[0-9]{1,9}", self.reasoning):
            also = " (auto: as the model's template has it)" if self.reasoning == "on" else ""
            raise ValueError(
                f"reasoning is {quoted(self.reasoning)}; it must be off, auto or a number of tokens, such as 4096{also}"
            )
        self.default_template_args()
        for name in ("media_urls", "mcp_urls"):
            for host in getattr(self, name):
                if host == "*" or not _HOST.fullmatch(host):
                    raise ValueError(f"{name}: {quoted(host)} is not a host; write HOST or HOST:PORT")
        for name in ("slot_save_path", "lora_path", "media_path"):
            if (path := getattr(self, name)) is not None:
                folder = path_of(path)
                if not folder.is_dir():
                    raise ValueError(f"{name}: {folder} is not a folder")
                object.__setattr__(self, name, folder)
        if self.store is not None:
            object.__setattr__(self, "store", path_of(self.store))
        if self.mcp is not None:
            object.__setattr__(self, "mcp", path_of(self.mcp))
        if any(not _API_KEY.fullmatch(key) for key in self.api_keys):
            raise ValueError(
                "api_keys: a key must be printable ASCII without spaces at its ends, and not empty: "
                "HTTP headers cannot carry others"
            )

    def open_store(self) -> Store | None:
        """Open the file of stored answers; return None if ``store`` is None. Raises OSError and StoreError."""
        if self.store is None:
            return None
        from llamapipe.server.store.answers import Store

        return Store(path_of(self.store), self.store_bytes, self.store_days)

    def open_mcp(self) -> LocalServers | None:
        """Start the MCP servers of the file ``mcp``, if it is set. Raises OSError, and ValueError for a bad file."""
        if self.mcp is None:
            return None
        from llamapipe.server.mcp.file import entries_of
        from llamapipe.server.mcp.servers import LocalServers

        try:
            entries = entries_of(path_of(self.mcp))
        except ValueError as e:
            raise ValueError(f"mcp: {e}") from None
        servers = LocalServers(entries, self.mcp_timeout_s)
        servers.start()
        return servers

    def open_files(self) -> Files | None:
        """Open the file of clients' files and batches; return None without a store. Raises OSError and StoreError."""
        if self.store is None:
            return None
        from llamapipe.server.store.files import Files

        path = path_of(self.store)
        return Files(
            path.with_name(f"{path.name}-files"), self.files_bytes, len(self.api_keys), self.store_days
        )

    def default_template_args(self) -> dict[str, Any]:
        """Return the default arguments of the template. Raises ValueError."""
        if self.template_args is None:
            return {}
        try:
            arguments = json.loads(self.template_args)
        except ValueError as e:
            raise ValueError(f"template_args is not JSON: {e}") from None
        if not isinstance(arguments, dict):
            raise ValueError('template_args must be a JSON object, such as {"enable_thinking": false}')
        if wrong := sorted(TEMPLATE_PARAMETERS.intersection(arguments)):
            raise ValueError(f"template_args may not hold {quoted(wrong[0])}: the request defines it")
        return arguments

    def __repr__(self) -> str:
        return f"ServerSettings(model_names={self.model_names}, n_api_keys={len(self.api_keys)})"


DEFAULTS = tuple(
    option
    for option in OPTIONS
    if option.name != "infill" and (option.is_native or option.sampler or option.name in _OTHER_DEFAULTS)
)


def _defaults(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(sampling, Mapping):
        raise TypeError(f"sampling must be a mapping, not {type(sampling).__name__}")
    known = [option.name for option in DEFAULTS]
    for name in sampling:
        if name not in known:
            raise ValueError(
                f"sampling: {quoted(name)} cannot be set for all requests; there is {listed(known)}"
            )
    try:
        SamplingParams(**sampling)
    except (TypeError, ValueError) as e:
        raise type(e)(f"sampling: {e}") from None
    return MappingProxyType(dict(sampling))


def _names(field: str, values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{field} must be a sequence of strings")
    values = tuple(values)
    if not all(isinstance(value, str) for value in values):
        raise TypeError(f"{field} must be a sequence of strings")
    return values

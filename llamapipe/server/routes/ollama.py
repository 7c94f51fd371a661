"""Ollama's API under ``/api``: chats, texts and embeddings. ``ollama_descriptions`` describes the models.

Open it to change what Ollama's clients send and read. Answers are streams of JSON lines by default; the last line has
the counts and times. A model's name may end with ``:latest``. Options that tell Ollama how to load the model, such as
``num_ctx``, have no effect. The header ``x-llamapipe-unused`` names these options. It also names fields that Ollama
itself does not read: unknown options, and fields of other APIs.

Answers are always read from the engine as a stream, and joined for a client that wants no stream.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from starlette.responses import Response

from llamapipe._messages import quoted
from llamapipe.arguments import check_tokens
from llamapipe.chat.options import ChatOptions
from llamapipe.embedding import Embedder
from llamapipe.llama.adapter import Adapter, ControlVector
from llamapipe.llama.fim import FimText, fim_room
from llamapipe.ollama_models import StoredModel, names_of
from llamapipe.params import SamplingParams
from llamapipe.server._fields import Lenient, Only, Unused
from llamapipe.server._tools import check_functions
from llamapipe.server.dialects.ollama import OllamaEncoder, empty_part, nanoseconds
from llamapipe.server.endpoint import Exchange, JsonResponse, LineStream
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import ChatJob, fim_prompt_of, prompts_of
from llamapipe.server.requests.job import Job, Part, TextJob, encode_stream, join
from llamapipe.server.requests.limits import CHAT_TOP, check_n_messages, check_top
from llamapipe.server.requests.media import PlacedPart
from llamapipe.server.requests.sampling import FROM_TABLE, Formats, Sampling, Tokenize
from llamapipe.server.routes.completions import token_limit
from llamapipe.server.routes.embeddings import embedded
from llamapipe.server.state import ServerState

_LATEST = ":latest"
_log = logging.getLogger("llamapipe.server")
_NO_IMAGES = "this server makes no images"
_DURATION = re.compile(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)", re.ASCII)
_MOST_KEPT_S = 1e8
_Format = Literal["", "json"] | dict[str, Any]
_Think = bool | Literal["", "low", "medium", "high", "max"]
_KeepAlive = int | float | str


# ---- requests
if TYPE_CHECKING:

    class _Table(Formats, kw_only=True):
        """The options of the table."""

else:
    _Table = msgspec.defstruct(
        "_Table", FROM_TABLE, bases=(Formats,), module=__name__, kw_only=True, forbid_unknown_fields=True
    )


class Options(_Table, Lenient, kw_only=True):
    """The field ``options``: all options of the table, and Ollama's options.

    As in Ollama, numbers may have any type that can hold one, and are clamped to their range.
    """

    n: Annotated[int | None, Only(1, instead="an answer of this API is one")] = None
    num_predict: int | None = None
    # Options for loading a model in Ollama; some clients write these numbers with a decimal point.
    num_ctx: Annotated[float | None, Unused()] = None
    num_batch: Annotated[float | None, Unused()] = None
    num_gpu: Annotated[float | None, Unused()] = None
    main_gpu: Annotated[float | None, Unused()] = None
    num_thread: Annotated[float | None, Unused()] = None
    num_keep: Annotated[float | None, Unused()] = None
    use_mmap: Annotated[bool | None, Unused()] = None
    use_mlock: Annotated[bool | None, Unused()] = None
    draft_num_predict: Annotated[float | None, Unused()] = None
    # Options that Ollama's clients still send, although its server no longer has them.
    embedding_only: Annotated[bool | None, Unused(False)] = None
    f16_kv: Annotated[bool | None, Unused()] = None
    logits_all: Annotated[bool | None, Unused(False)] = None
    low_vram: Annotated[bool | None, Unused(False)] = None
    num_gqa: Annotated[float | None, Unused()] = None
    numa: Annotated[bool | None, Unused(False)] = None
    penalize_newline: Annotated[bool | None, Unused()] = None
    rope_frequency_base: Annotated[float | None, Unused()] = None
    rope_frequency_scale: Annotated[float | None, Unused()] = None
    tfs_z: Annotated[float | None, Unused(1.0, 1)] = None
    vocab_only: Annotated[bool | None, Unused(False)] = None
    # A field of Open WebUI, which Ollama does not read either: Ollama's field is `think`.
    reasoning_effort: Annotated[str | None, Unused()] = None

    def sampling(self, state: ServerState, **more: Any) -> SamplingParams:
        """Return the options as ``SamplingParams``, with Ollama's defaults. Raises ApiError 400."""
        tokenize = partial(state.engine.model.vocab.tokenize, add_special=False)
        return self.params_with(state.settings.sampling or {}, tokenize, **more)

    def params_with(self, defaults: Mapping[str, Any], tokenize: Tokenize, **more: Any) -> SamplingParams:
        """Return the options as ``SamplingParams``, like ``sampling``.

        ``defaults``: the operator's options. ``tokenize``: tokenizes the keys of ``logit_bias``.
        """
        values = {
            name: defaults.get(name, value)
            for name, value in _DEFAULTS.items()
            if getattr(self, name) is None
        }
        for name in ("temperature", "top_k"):
            if (number := getattr(self, name)) is not None:
                values[name] = max(number, 0)
        for name in ("top_p", "min_p"):
            if (share := getattr(self, name)) is not None:
                values[name] = min(max(share, 0.0), 1.0)
        asked = None if self.num_predict is None else max(self.num_predict, -1)
        limit = token_limit(**{"options.num_predict": asked})
        values["max_tokens"] = None if limit is None else max(limit, 1)
        sampling = Sampling(**{name: getattr(self, name) for name in _Table.__struct_fields__})
        if sampling.stop is not None:
            sampling.stop = [
                text
                for text in ([sampling.stop] if isinstance(sampling.stop, str) else sampling.stop)
                if text
            ]
        return sampling.params_with(defaults, tokenize, **values, **more)

    @classmethod
    def accept_fields(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the options with numbers and texts converted to their types. Unknown options have no effect."""
        kinds = {field.name: field.type for field in msgspec.structs.fields(cls)}
        unread = _unread(fields, kinds)
        return {
            name: _as(kinds.get(name, Any), value) for name, value in fields.items() if name not in unread
        }, unread


def _as(kind: Any, value: Any) -> Any:
    """Return a value converted to a type if possible, else unchanged."""
    whole = int(value) if isinstance(value, float) and math.isfinite(value) else value
    for candidate in (value, whole):
        with suppress(msgspec.ValidationError):
            return msgspec.convert(candidate, kind, strict=False)
    return value


_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}


class Modelfile(NamedTuple):
    """The settings that Ollama's store has for a name, in addition to the model's file."""

    options: Options
    system: str
    license: str
    parameters: str
    digest: str


NO_MODELFILE = Modelfile(Options(), "", "", "", "")


_MODELFILES: WeakKeyDictionary[ServerState, Mapping[str, Modelfile]] = WeakKeyDictionary()


def read_modelfiles(state: ServerState) -> None:
    """Read the Modelfiles that Ollama's store has for a server's model. Call it before the server starts."""
    if state.has_engine:
        _MODELFILES[state] = modelfiles(state.engine.model.path)


def modelfiles(path: Path) -> dict[str, Modelfile]:
    """Return the Modelfiles of a model's file, by name; none for a file that is not in Ollama's store."""
    return {stored.name: _modelfile(stored) for stored in names_of(path)}


def _modelfile(stored: StoredModel) -> Modelfile:
    stored_parameters = stored.parameters
    known = {name: value for name, value in stored_parameters.items() if name in Options.__struct_fields__}
    try:
        options = msgspec.convert(known, Options)
        options.params_with({}, lambda _: [])
    except (msgspec.ValidationError, ApiError) as e:
        _log.warning("the parameters of %s in Ollama's store are not used: %s", stored.name, e)
        options = Options()
    values = [
        (name, value)
        for name, several in stored_parameters.items()
        for value in (several if isinstance(several, list) else [several])
    ]
    parameters = "\n".join(f"{name} {json.dumps(value)}" for name, value in values)
    return Modelfile(options, stored.text("system"), stored.text("license"), parameters, stored.digest)


def modelfile_of(files: Mapping[str, Modelfile], *names: str) -> Modelfile:
    """Return the Modelfile of the first of these names that has one, else an empty Modelfile."""
    for wanted in names:
        for known, modelfile in files.items():
            if is_named(wanted, known):
                return modelfile
    return NO_MODELFILE


def modelfile_for(state: ServerState, name: str) -> Modelfile:
    """Return the Modelfile of a name; if it has none, that of the name with which the model was loaded."""
    return modelfile_of(_MODELFILES.get(state, {}), name, state.engine.model.name)


class OllamaRequest(Lenient, kw_only=True):
    """The base of requests that accept what Ollama accepts: Ollama ignores unknown fields."""

    @classmethod
    def accept_fields(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of this route. Unknown fields have no effect, but fields of other routes are refused."""
        unread = _unread(fields, (*cls.__struct_fields__, *_OF_ROUTES))
        return {name: value for name, value in fields.items() if name not in unread}, unread


_LIKE_A_NAME = 0.8  # difflib's ratio


def _unread(names_there: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the unknown names that resemble no known name. Others are probably misspelt, and are refused."""
    names = list(known)
    return [
        name
        for name in names_there
        if name not in names
        and not (len(name) <= _MOST_OF_NAME and get_close_matches(name, names, 1, _LIKE_A_NAME))
    ]


_MOST_OF_NAME = 64  # characters; to compare longer names takes too long
# Fields on which the answer of a route depends, if the route has them.
_OF_ROUTES = ("context", "images", "input", "messages", "prompt", "raw", "suffix", "system", "template")


class Generates(OllamaRequest, kw_only=True):
    """The fields of a request for an answer."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: _Format | None = None
    think: _Think | None = None
    keep_alive: Annotated[_KeepAlive | None, Unused(-1, -1.0, "-1s", "-1m", "")] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: Annotated[bool | None, Unused()] = None  # the operator sets it with --overflow
    _debug_render_only: Annotated[bool | None, Only(False, instead="/apply-template writes the prompt")] = (
        None
    )

    def sampling(self, state: ServerState, **more: Any) -> SamplingParams:
        """Return the options as ``SamplingParams``. Raises ApiError 400."""
        _check_duration(self.keep_alive)
        n_top = check_top("top_logprobs", self.top_logprobs or 0, CHAT_TOP)
        if self.logprobs:
            more["logprobs"] = n_top
        if (adapter := adapter_of(state, self.model)) is not None:
            more["adapter"] = adapter
        options, set_there = self.options or Options(), modelfile_for(state, self.model).options
        missing = {
            name: value
            for name in Options.__struct_fields__
            if getattr(options, name) is None and (value := getattr(set_there, name)) is not None
        }
        return msgspec.structs.replace(options, **missing).sampling(state, **more)

    @property
    def is_empty(self) -> bool:
        """Whether the request asks for no tokens."""
        return self.options is not None and self.options.num_predict == 0

    @property
    def schema(self) -> Any:
        """The JSON schema that the answer must match; None allows any text."""
        if self.format == "json":
            return {"type": "object"}
        return None if self.format == "" else self.format  # {} allows any JSON


class OllamaChatRequest(Generates, kw_only=True):
    """``POST /api/chat``. ``truncate``: drop the oldest turns of a conversation that is too long; true by default."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(Generates, kw_only=True):
    """``POST /api/generate``: answers a prompt as a message, or with ``raw`` or ``suffix`` continues its text."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    template: Annotated[
        str | None, Only("", instead="the operator sets it: llamapipe serve --chat-template")
    ] = None
    images: list[Any] | None = None
    width: Annotated[int | None, Only(0, instead=_NO_IMAGES)] = None
    height: Annotated[int | None, Only(0, instead=_NO_IMAGES)] = None
    steps: Annotated[int | None, Only(0, instead=_NO_IMAGES)] = None


class EmbedRequest(OllamaRequest, kw_only=True):
    """``POST /api/embed``."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Annotated[Options | None, Unused()] = None
    keep_alive: Annotated[_KeepAlive | None, Unused(-1, -1.0, "-1s", "-1m", "")] = None


class OldEmbedRequest(OllamaRequest, kw_only=True):
    """``POST /api/embeddings``: the older form, for one text."""

    model: str
    prompt: str = ""
    options: Annotated[Options | None, Unused()] = None
    keep_alive: Annotated[_KeepAlive | None, Unused(-1, -1.0, "-1s", "-1m", "")] = None


def _check_duration(keep_alive: _KeepAlive | None) -> None:
    if isinstance(keep_alive, str) and keep_alive and not _DURATION.fullmatch(keep_alive):
        raise ApiError(
            400,
            f'keep_alive is {quoted(keep_alive)}; give seconds, or a duration such as "5m" or "1h30m"',
            "keep_alive",
        )


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)


def kept_s(keep_alive: object) -> float | None:
    """Return the seconds of ``keep_alive``; None: forever. Raises ApiError 400."""
    if isinstance(keep_alive, bool) or not isinstance(keep_alive, int | float | str):
        raise ApiError(400, "keep_alive must be seconds or a duration", "keep_alive")
    if isinstance(keep_alive, str):
        _check_duration(keep_alive)
        seconds = sum(float(n) * _UNITS_S[unit] for n, unit in _PART.findall(keep_alive))
        seconds = -seconds if keep_alive.startswith("-") else seconds
    else:
        seconds = float(min(max(keep_alive, -1), _MOST_KEPT_S))  # integers may be too large for a float
    return seconds if 0 <= seconds < _MOST_KEPT_S else None


# ---- names
def is_named(name: str, *known: str) -> bool:
    """Return whether a name is one of the known names, with or without ``:latest``."""
    return name.removesuffix(_LATEST) in [other.removesuffix(_LATEST) for other in known]


def full_name(name: str) -> str:
    """Return a name with its tag, ``:latest`` by default, as in Ollama's lists."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def check_chat_model(state: ServerState, name: str) -> None:
    """Raise ApiError 404 for a model that is not served, 400 for one that does not generate."""
    if is_named(name, *state.chat_names, *state.adapter_names):
        return
    if state.embedder is not None and is_named(name, *state.embedding_names):
        raise ApiError(
            400, f"the model {quoted(name)} embeds texts; it does not generate any", "model", "model_kind"
        )
    state.check_model(name)


def adapter_of(state: ServerState, name: str) -> Adapter | ControlVector | None:
    """Return the adapter with this name; None if it is the name of a model."""
    if is_named(name, *state.chat_names):
        return None
    return next((adapter for adapter in state.adapters if is_named(name, adapter.name)), None)


def _embedder(state: ServerState, name: str) -> Embedder:
    """Return the embedder with this name. Raises ApiError 404, or 400 for a model that does not embed."""
    embedder = state.embedder
    if embedder is not None and is_named(name, *state.embedding_names):
        return embedder
    if is_named(name, *state.chat_names):
        other = (
            f"the one here is {quoted(state.embedding_names[0])}" if embedder else "start the server with one"
        )
        raise ApiError(
            400,
            f"the model {quoted(name)} generates texts; an embedding model embeds: {other} (--embeddings)",
        )
    return state.check_embedder(name)[0]


# ---- chat
async def chat(exchange: Exchange, request: OllamaChatRequest) -> Response:
    """``POST /api/chat``: answers a conversation. Without messages, the model is only loaded."""
    state = exchange.server
    check_chat_model(state, request.model)
    params = request.sampling(state)
    if not request.messages:
        return _loaded(exchange, request)
    check_n_messages(state, request.messages, "messages")
    check_functions(request.tools)
    messages = engine_messages(request.messages)
    system = modelfile_for(state, request.model).system
    if system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return await _conversation(exchange, request, messages, params, request.tools)


async def _conversation(
    exchange: Exchange,
    request: OllamaChatRequest | GenerateRequest,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    tools: list[dict[str, Any]] | None = None,
    before: Sequence[int] = (),
) -> Response:
    options = ChatOptions(
        tools=[{"type": "function", **tool} for tool in tools] if tools else None,
        response_format=request.schema,
        template_args=await _thinking(exchange.server, request),
        continue_last=messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls"),
        truncation="error" if request.truncate is False else "auto",
    )
    job = ChatJob(exchange, messages, params, options, "format", request.is_empty, before)
    is_chat = isinstance(request, OllamaChatRequest)
    return await _answered(exchange, request, job, with_context=not is_chat)


async def _answered(
    exchange: Exchange,
    request: OllamaChatRequest | GenerateRequest,
    job: Job[Part],
    with_context: bool = False,
) -> Response:
    """Return the answer as a stream or in one piece, as the client asks."""
    if request.top_logprobs and not request.logprobs:
        exchange.note_unused(("top_logprobs",))
    encoder = OllamaEncoder(
        request.model,
        isinstance(request, OllamaChatRequest),
        exchange.server.engine.model.vocab,
        exchange.times,
        request.stream is False,
        request.is_empty,
        with_context,
        exchange.loaded_ns,
    )
    parts = encode_stream(exchange, job, encoder)
    if request.stream is not False:
        return LineStream(exchange, parts, ping=encoder.ping())
    return JsonResponse(await join(parts))


async def _thinking(state: ServerState, request: Generates) -> dict[str, Any]:
    """Return the template's arguments that turn reasoning on or off.

    Raises ApiError 400 for a model that cannot reason.
    """
    think = request.think
    if think is None or think == "":
        return {}
    form = await state.in_thread(state.engine.model.chat_prompts.chat_format)
    if think is False:
        return {"enable_thinking": False, **form.reasoning_off}
    if form.reasoning is None:
        raise ApiError(400, f"the model {quoted(request.model)} does not support thinking", "think")
    return {"enable_thinking": True, **({"reasoning_effort": think} if isinstance(think, str) else {})}


def engine_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in the engine's form. Raises ApiError 400.

    In this API, a result may name only its tool, and a call may have no id. Some templates need the name and the id.
    """
    converted: list[dict[str, Any]] = []
    waiting: dict[str, str] = {}  # the names of the calls without a result, by id
    by_name: defaultdict[str, dict[str, None]] = defaultdict(dict)  # the ids of these calls, by name
    for i, message in enumerate(messages):
        fields = {
            key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")
        }
        for key in ("thinking", "tool_name"):
            if message.get(key) is not None and not isinstance(message[key], str):
                raise ApiError(400, f"messages.{i}.{key} must be text", f"messages.{i}.{key}")
        if message.get("thinking"):
            fields["reasoning_content"] = message["thinking"]
        calls = fields.get("tool_calls")
        if isinstance(calls, list):
            fields["tool_calls"] = [_with_id(call, f"call_{i}_{j}") for j, call in enumerate(calls)]
            for call in fields["tool_calls"]:
                if isinstance(call, dict) and isinstance(call["id"], str):  # the engine refuses others
                    by_name[waiting.get(call["id"], "")].pop(call["id"], None)
                    waiting[call["id"]] = called = _name(call)
                    by_name[called][call["id"]] = None
        if message.get("role") == "tool":
            name = message.get("tool_name")
            if name:
                fields["name"] = name
            candidates = by_name[name] if name else waiting
            if not fields.get("tool_call_id") and candidates:
                fields["tool_call_id"] = next(iter(candidates))
            answered = fields.get("tool_call_id")
            if isinstance(answered, str) and answered in waiting:
                by_name[waiting.pop(answered)].pop(answered, None)
        if fields.get("content") is None:
            fields["content"] = ""
        if message.get("images"):
            fields["content"] = _with_images(f"messages.{i}.images", fields["content"], message["images"])
        converted.append(fields)
    return converted


def _with_images(place: str, content: Any, images: Any) -> list[dict[str, Any]]:
    """Return the parts of a message: images, which this API sends in base64, then the text. Raises ApiError 400."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ApiError(400, f"{place} must be a list of base64 texts", place)
    urls = [image if image[:5].lower() == "data:" else f"data:;base64,{image}" for image in images]
    parts: list[dict[str, Any]] = [
        PlacedPart(f"{place}.{i}", {"type": "image_url", "image_url": {"url": url}})
        for i, url in enumerate(urls)
    ]
    return [*parts, {"type": "text", "text": content}]


def _with_id(call: Any, new_id: str) -> Any:
    if not isinstance(call, dict):
        return call  # the engine refuses it
    function = call.get("function")
    if isinstance(function, dict):  # the index among the answer's calls is not part of a call
        call = {**call, "function": {key: value for key, value in function.items() if key != "index"}}
    return {**call, "id": call.get("id") or new_id}


def _name(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _loaded(exchange: Exchange, request: OllamaChatRequest | GenerateRequest) -> Response:
    """Answer a request without a prompt, which loads or unloads the model in Ollama. Here, the model stays loaded."""
    part = empty_part(request.model, isinstance(request, OllamaChatRequest))
    unloads = request.keep_alive in (0, "0", "0s")
    return JsonResponse({**part, "done": True, "done_reason": "unload" if unloads else "load"})


# ---- texts
async def generate(exchange: Exchange, request: GenerateRequest) -> Response:
    """``POST /api/generate``: answers a prompt. Without a prompt, the model is only loaded."""
    state = exchange.server
    check_chat_model(state, request.model)
    before = _context(state, request.context)
    if request.raw and (request.system or before):
        raise ApiError(400, "raw takes the prompt as it is; leave system and context out", "raw")
    if not request.prompt and not request.suffix:
        request.sampling(state)
        return _loaded(exchange, request)
    text = request.prompt or ""
    # A model without a template continues texts, as in Ollama.
    if request.raw or request.suffix or state.engine.model.chat_template is None:
        if request.images:
            raise ApiError(400, "images need the model's template; leave raw and suffix out", "images")
        return await _text(exchange, request, text, before)
    content: Any = _with_images("images", text, request.images) if request.images else text
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    system = request.system or modelfile_for(state, request.model).system
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return await _conversation(exchange, request, messages, request.sampling(state), before=before)


def _context(state: ServerState, tokens: list[int] | None) -> list[int]:
    try:
        return check_tokens("context", tokens or (), state.engine.model.n_vocab)
    except ValueError as e:
        raise ApiError(400, str(e), "context") from None


async def _text(exchange: Exchange, request: GenerateRequest, text: str, before: list[int]) -> Response:
    state = exchange.server
    if request.system and not request.suffix:
        raise ApiError(400, "system: this model has no chat template, so no place for it", "system")
    if request.think not in (None, False, ""):
        raise ApiError(
            400, "think: only a model that answers messages thinks; leave raw and suffix out", "think"
        )
    constraint = {} if request.schema is None else {"json_schema": request.schema}
    params = request.sampling(state, **constraint)
    if request.suffix and request.truncate is not False:
        gap = FimText(text, request.suffix, order=state.settings.fim_order)
        room = fim_room(state.engine.n_ctx, params.max_tokens)
        tokens = (await fim_prompt_of(state, gap, room, "suffix")).tokens
    else:
        (tokens,) = await prompts_of(state, text, "prompt", suffix=request.suffix or None)
    tokens = [*before, *tokens]
    return await _answered(exchange, request, TextJob(exchange, [tokens], params, is_empty=request.is_empty))


# ---- embeddings
async def embed(exchange: Exchange, request: EmbedRequest) -> Response:
    """``POST /api/embed``: returns vectors of length 1."""
    embedder = _embedder(exchange.server, request.model)
    _check_duration(request.keep_alive)
    texts = [request.input] if isinstance(request.input, str) else request.input
    if texts in ([], [""]):
        rows, n_tokens = [], 0
    else:
        vectors, n_tokens = await embedded(
            exchange, embedder, "input", texts, request.dimensions or None, request.truncate is not False
        )
        rows = vectors.tolist()
    return JsonResponse(
        {
            "model": request.model,
            "embeddings": rows,
            "total_duration": nanoseconds(perf_counter() - exchange.times.arrived_at) + exchange.loaded_ns,
            "load_duration": exchange.loaded_ns,
            "prompt_eval_count": n_tokens,
        }
    )


async def old_embeddings(exchange: Exchange, request: OldEmbedRequest) -> Response:
    """``POST /api/embeddings``: returns the vector of one text, not normalized."""
    embedder = _embedder(exchange.server, request.model)
    _check_duration(request.keep_alive)
    if not request.prompt:
        return JsonResponse({"embedding": []})
    vectors, _ = await embedded(
        exchange, embedder, "prompt", [request.prompt], None, truncate=True, normalize=False
    )
    return JsonResponse({"embedding": vectors[0].tolist()})

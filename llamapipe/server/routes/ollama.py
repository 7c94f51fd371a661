"""Ollama's API under ``/api``: chats, texts and embeddings. ``ollama_descriptions`` describes the models.

Open it to change what Ollama's clients send and read. Answers are streams of JSON lines by default; the last line has
the counts and times. A model's name may end with ``:latest``. Options that tell Ollama how to load the model, such as
``num_ctx``, have no effect. The header ``x-llamapipe-unused`` names these options. It also names fields that Ollama
itself does not read: unknown options, and fields of other APIs.

Answers are always read from the engine as a stream, and joined for a client that wants no stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Annotated, Any, Literal

import msgspec
from starlette.responses import Response

from llamapipe._messages import quoted
from llamapipe.arguments import check_tokens
from llamapipe.chat.options import ChatOptions
from llamapipe.embedding import Embedder
from llamapipe.llama.fim import FimText, fim_room
from llamapipe.params import SamplingParams
from llamapipe.server._fields import Only, Unused
from llamapipe.server._tools import check_functions
from llamapipe.server.dialects.ollama import OllamaEncoder, empty_part, nanoseconds
from llamapipe.server.endpoint import Exchange, JsonResponse, LineStream
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import ChatJob, fim_prompt_of, prompts_of
from llamapipe.server.requests.job import Job, Part, TextJob, encode_stream, join
from llamapipe.server.requests.limits import CHAT_TOP, check_n_messages, check_top
from llamapipe.server.requests.media import PlacedPart
from llamapipe.server.requests.ollama_models import (
    KeepAlive,
    OllamaRequest,
    Options,
    adapter_of,
    check_chat_model,
    check_duration,
    is_named,
    modelfile_for,
)
from llamapipe.server.requests.vectors import embed_texts
from llamapipe.server.state import ServerState

_NO_IMAGES = "this server makes no images"
_Format = Literal["", "json"] | dict[str, Any]
_Think = bool | Literal["", "low", "medium", "high", "max"]


# ---- requests


class Generates(OllamaRequest, kw_only=True):
    """The fields of a request for an answer."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: _Format | None = None
    think: _Think | None = None
    keep_alive: Annotated[KeepAlive | None, Unused(-1, -1.0, "-1s", "-1m", "")] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: Annotated[bool | None, Unused()] = None  # the operator sets it with --overflow
    _debug_render_only: Annotated[bool | None, Only(False, instead="/apply-template writes the prompt")] = (
        None
    )

    def sampling(self, state: ServerState, **more: Any) -> SamplingParams:
        """Return the options as ``SamplingParams``. Raises ApiError 400."""
        check_duration(self.keep_alive)
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
    keep_alive: Annotated[KeepAlive | None, Unused(-1, -1.0, "-1s", "-1m", "")] = None


class OldEmbedRequest(OllamaRequest, kw_only=True):
    """``POST /api/embeddings``: the older form, for one text."""

    model: str
    prompt: str = ""
    options: Annotated[Options | None, Unused()] = None
    keep_alive: Annotated[KeepAlive | None, Unused(-1, -1.0, "-1s", "-1m", "")] = None


# ---- names


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
    check_duration(request.keep_alive)
    texts = [request.input] if isinstance(request.input, str) else request.input
    if texts in ([], [""]):
        rows, n_tokens = [], 0
    else:
        vectors, n_tokens = await embed_texts(
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
    check_duration(request.keep_alive)
    if not request.prompt:
        return JsonResponse({"embedding": []})
    vectors, _ = await embed_texts(
        exchange, embedder, "prompt", [request.prompt], None, truncate=True, normalize=False
    )
    return JsonResponse({"embedding": vectors[0].tolist()})

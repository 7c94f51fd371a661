"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, in Anthropic's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from starlette.responses import Response

from llamapipe._messages import did_you_mean, quoted
from llamapipe.chat.options import ChatOptions
from llamapipe.server._fields import Only, Unused, unused_fields
from llamapipe.server._tools import check_number
from llamapipe.server.dialects.anthropic import AnthropicEncoder
from llamapipe.server.endpoint import EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError, as_sent, wrong
from llamapipe.server.json_bytes import event
from llamapipe.server.requests.generation import ChatJob, n_prompt_tokens, note_unread, template_args
from llamapipe.server.requests.job import encode_stream, record_counts
from llamapipe.server.requests.limits import check_n_messages
from llamapipe.server.requests.media import PlacedPart
from llamapipe.server.requests.sampling import Sampling

# Tools that Anthropic's service runs, or whose definitions only its models know. In a request, a date follows the name.
_HOSTED = ("advisor", "bash", "browser_toolset", "code_execution", "computer", "mcp_toolset", "memory",
           "text_editor", "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search")  # fmt: skip


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons before it answers, and the maximum tokens of its reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Annotated[str | None, Unused("summarized")] = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer. ``effort`` is passed to the template as ``reasoning_effort``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[dict[str, Any] | None, Unused()] = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ClientTool(msgspec.Struct, kw_only=True):
    """A tool that the caller runs. Tools of other types have further fields."""

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Annotated[dict[str, Any] | None, Unused()] = None
    eager_input_streaming: Annotated[bool | None, Unused(False)] = None
    input_examples: Annotated[list[dict[str, Any]] | None, Unused([])] = None
    defer_loading: Annotated[bool | None, Unused(False)] = None
    allowed_callers: Annotated[list[str] | None, Unused(["direct"])] = None

    @property
    def hosted(self) -> str | None:
        """The tool's name, if the model does not see the tool because nobody here can run it; else None."""
        base = (self.type or "").rstrip("0123456789_")
        return base if base in _HOSTED else None

    def as_openai(self) -> dict[str, Any]:
        """Return the definition in OpenAI's form. Raises ApiError 400 for a tool of an unknown type."""
        if self.type not in (None, "custom"):
            hint = did_you_mean(str(self.type), ("custom", *_HOSTED), "Anthropic's tools")
            raise ApiError(
                400,
                f"the tool {quoted(self.name)} has the type {quoted(self.type)}; it may be 'custom'{hint}",
                "tools",
            )
        if self.name is None:
            raise ApiError(400, "tools: a tool needs a name", "tools")
        if self.input_schema is None:  # it is missing, or has another API's name, such as parameters
            raise ApiError(
                400,
                f'the tool {quoted(self.name)} has no input_schema; one without arguments has {{"type": "object"}}',
                "tools",
            )
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.input_schema,
        }
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that ``/v1/messages`` and its token count share."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Fields about Anthropic's service: caches, billing, storage, and tools that it runs.
    betas: Annotated[list[str] | None, Unused([])] = None
    cache_control: Annotated[dict[str, Any] | None, Unused()] = None
    compaction: Annotated[dict[str, Any] | None, Unused()] = None
    context_management: Annotated[dict[str, Any] | None, Unused({}, {"edits": []})] = None
    mcp_servers: Annotated[list[dict[str, Any]] | None, Unused([])] = None
    speed: Annotated[str | None, Unused("standard")] = None
    user_profile_id: Annotated[str | None, Unused()] = None
    workspace_id: Annotated[str | None, Unused()] = None

    def unused(self) -> tuple[str, ...]:
        """Return the fields without effect, and the tools that the model does not see, for the header."""
        tools = self.tools or ()
        names = [(tool.hosted,) if tool.hosted is not None else unused_fields(tool) for tool in tools]
        fields = [f"tools.{name}" for name in chain.from_iterable(names)]
        if any(_wants_citations(message.get("content")) for message in self.messages):
            fields.append("messages.content.citations")
        return tuple(dict.fromkeys(fields))

    def functions(self) -> list[dict[str, Any]] | None:
        """Return the tools in OpenAI's form. Raises ApiError 400."""
        check_number(self.tools)
        return [tool.as_openai() for tool in self.tools or () if tool.hosted is None] or None


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``. ``min_p``, ``seed``, ``cache_salt`` and ``chat_template_kwargs`` are extensions."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    billing_policy: Annotated[Any, Unused()] = None
    container: Annotated[Any, Unused()] = None
    diagnostics: Annotated[Any, Unused()] = None
    fallback_credit_token: Annotated[Any, Unused()] = None
    fallbacks: Annotated[Any, Unused([])] = None
    inference_geo: Annotated[str | None, Unused()] = None
    metadata: Annotated[dict[str, Any] | None, Unused({})] = None
    service_tier: Annotated[str | None, Unused("auto", "standard_only")] = None
    # The tool runners of Anthropic's clients set it. Once they read the details, they send the conversation instead.
    thread: Annotated[
        Any,
        Only(
            instead="this server stores no answers; leave it out, and send the whole conversation",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        ),
    ] = None


class CountTokensRequest(CountRequest, kw_only=True):
    """``POST /v1/messages/count_tokens``. Fields that affect only the answer have no effect."""

    max_tokens: Annotated[Any, Unused()] = None
    stop_sequences: Annotated[Any, Unused([])] = None
    stream: Annotated[Any, Unused(False)] = None
    temperature: Annotated[Any, Unused()] = None
    top_p: Annotated[Any, Unused()] = None
    top_k: Annotated[Any, Unused()] = None
    min_p: Annotated[Any, Unused()] = None
    seed: Annotated[Any, Unused()] = None
    cache_salt: Annotated[Any, Unused()] = None
    billing_policy: Annotated[Any, Unused()] = None
    container: Annotated[Any, Unused()] = None
    diagnostics: Annotated[Any, Unused()] = None
    fallback_credit_token: Annotated[Any, Unused()] = None
    fallbacks: Annotated[Any, Unused([])] = None
    inference_geo: Annotated[Any, Unused()] = None
    metadata: Annotated[Any, Unused({})] = None
    service_tier: Annotated[Any, Unused("auto", "standard_only")] = None
    thread: Annotated[Any, Unused()] = None


_PING = event({"type": "ping"}, "ping")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "cache_salt")


async def messages(exchange: Exchange, request: MessagesRequest) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    model = exchange.server.check_model(request.model)
    exchange.note_unused(request.unused())
    await note_unread(exchange, request.chat_template_kwargs)
    job, encoder = _job(exchange, request), AnthropicEncoder(f"msg_{exchange.id}", model, exchange.times)
    if request.stream:
        return EventStream(exchange, encode_stream(exchange, job, encoder), ping=_PING)
    done = await job.complete()
    return JsonResponse(encoder.whole(done.choices[0], record_counts(exchange, done)))


async def count_tokens(exchange: Exchange, request: CountTokensRequest) -> Response:
    """Count the tokens of a conversation's prompt."""
    exchange.server.check_model(request.model)
    exchange.note_unused(request.unused())
    await note_unread(exchange, request.chat_template_kwargs)
    _check_numbers(exchange, request)
    conversation = messages_of(request)
    n = await n_prompt_tokens(
        exchange,
        conversation,
        request.functions(),
        _template_args(request),
        continue_last=_continues(conversation),
    )
    return JsonResponse({"input_tokens": n})


def _job(exchange: Exchange, request: MessagesRequest) -> ChatJob:
    _check_numbers(exchange, request)
    if request.max_tokens < 1:
        raise ApiError(400, f"max_tokens is {request.max_tokens}; it must be 1 or more", "max_tokens")
    sampling = Sampling(**{name: getattr(request, name) for name in _SAMPLING}, stop=request.stop_sequences)
    conversation = messages_of(request)
    config = request.output_config
    if config is not None and config.format is not None and request.output_format is not None:
        raise ApiError(
            400, "output_format is the older name of output_config.format; give one of them", "output_format"
        )
    answer_format = request.output_format if config is None or config.format is None else config.format
    functions = request.functions()
    choice, parallel = _choice(request.tool_choice, bool(functions))
    options = ChatOptions(
        functions,
        choice,
        parallel,
        None if answer_format is None else answer_format.schema,
        _template_args(request),
        continue_last=_continues(conversation),
    )
    thinking = request.thinking
    params = sampling.params(
        exchange.server,
        {"stop": "stop_sequences", "reasoning_budget": "thinking.budget_tokens"},
        max_tokens=request.max_tokens,
        reasoning_budget=thinking.budget_tokens
        if thinking is not None and thinking.type == "enabled"
        else None,
        **exchange.server.adapter_of(request.model),
    )
    field = "output_format" if request.output_format is not None else "output_config.format"
    return ChatJob(exchange, conversation, params, options, field)


def _continues(conversation: Sequence[Message]) -> bool:
    """Return whether the answer continues the last message."""
    return bool(conversation) and conversation[-1]["role"] == "assistant"


def _check_numbers(exchange: Exchange, request: CountRequest) -> None:
    """Raise ApiError 400 for more messages or blocks than the server allows."""
    check_n_messages(exchange.server, request.messages, "messages")
    check_n_messages(exchange.server, request.system, "system")


def _choice(tool_choice: ToolChoice | None, has_tools: bool) -> tuple[str | dict[str, Any], bool]:
    """Return the engine's ``tool_choice``, and whether an answer may have several calls."""
    if tool_choice is None:
        return ("auto" if has_tools else "none"), True
    if tool_choice.type == "auto" and not has_tools:
        return "none", True
    parallel = not tool_choice.disable_parallel_tool_use
    if tool_choice.type == "tool" and tool_choice.name is None:
        raise ApiError(400, "tool_choice: the type 'tool' needs a name", "tool_choice.name")
    if tool_choice.type == "tool" and has_tools:
        return {"type": "function", "function": {"name": tool_choice.name}}, parallel
    if tool_choice.type in ("any", "tool") and not has_tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", "tool_choice")
    return {"auto": "auto", "any": "required", "none": "none"}[tool_choice.type], parallel


def _template_args(request: CountRequest) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if request.thinking is not None and request.thinking.type in ("enabled", "disabled"):
        args["enable_thinking"] = request.thinking.type == "enabled"
    effort = None if request.output_config is None else request.output_config.effort
    return args | template_args(request.chat_template_kwargs, effort, "output_config.effort")


Message = dict[str, Any]
_READ = ("text", "document", "search_result")


def messages_of(request: CountRequest) -> list[Message]:
    """Return the conversation in OpenAI's form, with the system prompt first. Raises ApiError 400, with the field."""
    messages: list[Message] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text("system", request.system)})
    for index, message in enumerate(request.messages):
        messages += _converted(f"messages.{index}", message)
    return messages


def _converted(place: str, message: Mapping[str, Any]) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    extra = message.keys() - {"role", "content"}
    if extra:
        raise wrong(place, min(extra), f"unknown field {quoted(min(extra))}")
    if role not in ("user", "assistant", "system"):
        raise wrong(place, "role", f"the role is {as_sent(role)}; it may be 'user' or 'assistant'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong(place, "content", "content must be text or a list of blocks")
    blocks = [_block(f"{place}.content.{i}", block) for i, block in enumerate(content)]
    return _assistant(blocks) if role == "assistant" else _user(role, blocks)


def _block(place: str, block: Any) -> tuple[str, Mapping[str, Any], str]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise ApiError(400, f"{place} must be an object with a type", place)
    return kind, block, place


Blocks = Sequence[tuple[str, Mapping[str, Any], str]]


def _user(role: str, blocks: Blocks) -> list[Message]:
    """Convert a user message. Its tool results become separate messages before it, as templates expect."""
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    for kind, block, place in blocks:
        if kind in _READ:
            parts.append({"type": "text", "text": _read(place, kind, block)})
        elif kind == "image":
            parts.append(_image(place, block))
        elif kind == "tool_result":
            text = _text(f"{place}.content", block.get("content") or "")
            if block.get("is_error"):
                text = f"Error: {text}"
            results.append(
                {"role": "tool", "tool_call_id": _string(place, block, "tool_use_id"), "content": text}
            )
        else:
            raise _unsupported(place, kind)
    if all(part["type"] == "text" for part in parts):
        if parts or not results:
            results.append({"role": role, "content": "".join(part["text"] for part in parts)})
    else:
        results.append({"role": role, "content": parts})
    return results


def _image(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block with an image as a part in OpenAI's form. Raises ApiError 400."""
    source = block.get("source")
    form = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and form == "url":
        url = _string(f"{place}.source", source, "url")
        return PlacedPart(place, {"type": "image_url", "image_url": {"url": url}})
    if not isinstance(source, Mapping) or form != "base64":
        raise wrong(
            place, "source", f"an image must have a source of the type 'base64' or 'url', not {as_sent(form)}"
        )
    kind, data = _string(f"{place}.source", source, "media_type"), _string(f"{place}.source", source, "data")
    return PlacedPart(place, {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})


def _assistant(blocks: Blocks) -> list[Message]:
    message: Message = {"role": "assistant", "content": ""}
    calls: list[dict[str, object]] = []
    for kind, block, place in blocks:
        if kind == "text":
            message["content"] += _string(place, block, "text")
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _string(
                place, block, "thinking"
            )
        elif kind == "tool_use":
            if "input" not in block:
                raise wrong(place, "input", "a call needs its input")
            # Any value is accepted: a client may have repaired a call that was cut off to a value that is no object.
            function = {"name": _string(place, block, "name"), "arguments": block["input"]}
            calls.append({"id": _string(place, block, "id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # only Anthropic's service can read it
            raise _unsupported(place, kind)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} must be text or a list of text blocks", place)
    texts = []
    for i, part in enumerate(content):
        kind, block, inner = _block(f"{place}.{i}", part)
        if kind not in _READ:
            raise _unsupported(inner, kind)
        texts.append(_read(inner, kind, block))
    return "".join(texts)


def _wants_citations(content: Any) -> bool:
    """Return whether a block, or a result in it, asks for citations."""
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            citations = block.get("citations")
            if (isinstance(citations, dict) and citations.get("enabled")) or _wants_citations(
                block.get("content")
            ):
                return True
    return False


def _read(place: str, kind: str, block: Mapping[str, Any]) -> str:
    if kind == "text":
        return _string(place, block, "text")
    told = ("title", "source") if kind == "search_result" else ("title", "context")
    title = "".join(f"{_string(place, block, key)}\n" for key in told if block.get(key) is not None)
    if kind == "search_result":
        return f"{title}{_text(f'{place}.content', block.get('content'))}\n"
    source = block.get("source")
    form = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and form == "text":
        return f"{title}{_string(f'{place}.source', source, 'data')}\n"
    if isinstance(source, Mapping) and form == "content":
        return f"{title}{_text(f'{place}.source.content', source.get('content'))}\n"
    raise wrong(place, "source", f"a document must hold text here, not a source of the type {as_sent(form)}")


def _string(place: str, block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise wrong(place, key, f"{key} must be text, not {json.dumps(value)[:40]}")
    return value


def _unsupported(place: str, kind: str) -> ApiError:
    return ApiError(400, f"{place} has the type {quoted(kind)}, which is not supported here", place)

"""Requests of OpenAI's Responses API, and their input as the messages that templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from llamapipe.arguments import did_you_mean, quoted
from llamapipe.server.errors import ApiError
from llamapipe.server.wire.fields import Only, Unused
from llamapipe.server.wire.tools import ClientName, Tools, custom_arguments, qualified

Message = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
# Further parts of an answer that clients may ask for: of hosted tools, which do not run here, and of what is stored.
_INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
_STATELESS = Only(instead="this server stores no answers; send the whole input")
# Items of an input that say what a hosted tool did, without its result.
_HOSTED_ITEMS = (
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "mcp_list_tools",
    "compaction_trigger",
)


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``effort`` is given to the template."""

    effort: str | None = None
    summary: Annotated[str | None, Unused()] = None
    generate_summary: Annotated[str | None, Unused()] = None
    context: Annotated[str | None, Unused("auto", "all_turns")] = None
    mode: Annotated[str | None, Unused("standard")] = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text. ``strict`` has no effect: a schema always holds."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, Unused("medium")] = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: Annotated[bool | None, Unused(False)] = None
    include_usage: Annotated[bool | None, Only(instead="the last event of this API has the usage")] = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``. ``chat_template_kwargs``: further variables of the template."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # OpenAI's, for what a hosted service does: storage, jobs, billing, moderation.
    previous_response_id: Annotated[str | None, _STATELESS] = None
    conversation: Annotated[str | dict[str, Any] | None, _STATELESS] = None
    prompt: Annotated[dict[str, Any] | None, _STATELESS] = None
    background: Annotated[bool | None, Only(False, instead="this server answers at once")] = None
    background_options: Annotated[dict[str, Any] | None, Unused({})] = None
    context_management: Annotated[list[dict[str, Any]] | None, Unused([])] = None
    access_programs: Annotated[dict[str, Any] | None, Unused({})] = None
    client_metadata: Annotated[dict[str, Any] | None, Unused({})] = None
    image: Annotated[dict[str, Any] | None, Unused({})] = None
    max_tool_calls: Annotated[int | None, Unused()] = None
    metadata: Annotated[dict[str, Any] | None, Unused({})] = None
    moderation: Annotated[dict[str, Any] | None, Unused()] = None
    prompt_cache_key: Annotated[str | None, Unused()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Unused({})] = None
    prompt_cache_retention: Annotated[str | None, Unused()] = None
    safety_identifier: Annotated[str | None, Unused()] = None
    service_tier: Annotated[str | None, Unused("auto", "default")] = None
    store: Annotated[bool | None, Unused(False)] = None
    user: Annotated[str | None, Unused()] = None
    # vLLM's and llamapipe's own.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int | None, Only(0)] = None
    request_id: Annotated[str | None, Unused()] = None

    def unused(self) -> tuple[str, ...]:
        """What the request asks for and has no effect, besides fields. Raises ApiError 400 for an unknown value."""
        asked = [one for one in self.include or () if one != LOGPROBS]
        for one in asked:
            if one not in _INCLUDABLE:
                known = (LOGPROBS, *_INCLUDABLE)
                raise ApiError(400, f"include: {quoted(one)} is unknown{did_you_mean(one, known)}", "include")
        items: Sequence[Mapping[str, Any]] = () if isinstance(self.input, str) else self.input
        hosted = [kind for kind in _HOSTED_ITEMS if any(item.get("type") == kind for item in items)]
        return (*(f"include.{one}" for one in asked), *(f"input.{kind}" for kind in hosted))

    def check(self) -> None:
        """Raises ApiError 400 for stream options without a stream."""
        if self.stream_options is not None and self.stream is None:
            raise ApiError(400, "stream_options is given, but stream is not", "stream_options")


def messages_of(request: ResponsesRequest, tools: Tools) -> list[Message]:
    """The conversation, the instructions first. Raises ApiError, which names the place.

    ``tools``: their names tell how the model knows the tools that were called.
    """
    made: list[Message] = []
    if request.instructions is not None:
        made.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*made, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        _add(made, f"input.{index}", item, tools)
    if not made:
        raise ApiError(400, "input is empty; give text or at least one item", "input")
    return made


def _add(made: list[Message], place: str, item: Mapping[str, Any], tools: Tools) -> None:
    """Adds an item. Reasoning, text and calls of one answer become one message."""
    kind = item.get("type")
    if kind is None:  # the API lets messages and references leave it out
        kind = "item_reference" if "id" in item and "role" not in item else "message"
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise ApiError(
                400,
                f"{place}: the role is {quoted(role)}; it may be user, assistant, system or developer",
                f"{place}.role",
            )
        content = _text(f"{place}.content", item.get("content"))
        if role == "assistant":
            _answer(made)["content"] += content
        else:
            made.append({"role": role, "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        message = _answer(made)
        message["reasoning_content"] = message.get("reasoning_content", "") + _text(f"{place}.content", parts)
    elif kind in ("function_call", "custom_tool_call"):
        if kind == "custom_tool_call":
            arguments = custom_arguments(_string(place, item, "input"))
        else:
            arguments = _string(place, item, "arguments")
        function = {"name": _name(place, item, tools), "arguments": arguments}
        call = {"id": _string(place, item, "call_id"), "type": "function", "function": function}
        _answer(made).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(f"{place}.output", item.get("output"))
        made.append({"role": "tool", "tool_call_id": _string(place, item, "call_id"), "content": text})
    elif kind == "item_reference":
        raise ApiError(
            404,
            f"{place}: the item {quoted(item.get('id'))} is not here: this server stores no answers; send the item "
            "itself (clients do with store: false)",
            f"{place}.id",
            "not_found",
        )
    elif kind not in _HOSTED_ITEMS:
        raise ApiError(
            400, f"{place} has the type {quoted(kind)}, which is not supported here", f"{place}.type"
        )


def _name(place: str, item: Mapping[str, Any], tools: Tools) -> str:
    """The name by which the model knows the tool that an item calls."""
    name, namespace = _string(place, item, "name"), item.get("namespace")
    for flat in (name, qualified(name, namespace) if isinstance(namespace, str) else name):
        known = tools.names.get(flat)
        if known is not None and known == ClientName(name, namespace, known.is_custom):
            return flat
    return qualified(name, namespace) if isinstance(namespace, str) else name


def _answer(made: list[Message]) -> Message:
    """The message of the model that is being put together."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} must be text or a list of parts", place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            texts.append(_string(f"{place}.{i}", part, "refusal"))
            continue
        if kind not in ("input_text", "output_text", "reasoning_text", "summary_text", "text"):
            raise ApiError(
                400,
                f"{place}.{i} has the type {quoted(kind)}; this server reads text only",
                f"{place}.{i}.type",
            )
        texts.append(_string(f"{place}.{i}", part, "text"))
    return "".join(texts)


def _string(place: str, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: {key} must be text", f"{place}.{key}")
    return value

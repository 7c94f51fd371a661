"""Requests of OpenAI's Responses API, and their input as the messages that templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from llamapipe.server.errors import ApiError
from llamapipe.server.wire.openai import StreamOptions

Message = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
# Options that need answers to be stored, or a service that runs tools and jobs by itself.
_STATEFUL = ("previous_response_id", "conversation", "prompt", "context_management")


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``effort`` is given to the template; the rest has no effect here."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """The format of the answer's text. ``strict`` has no effect: a schema always holds."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text; ``verbosity`` has no effect here."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``. ``chat_template_kwargs``: further variables of the template."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted with the only value that holds here.
    priority: int | None = None
    background: bool | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    # No effect on this server: a hosted service uses these for storage, billing or moderation.
    max_tool_calls: int | None = None
    metadata: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None

    def unused(self) -> tuple[str, ...]:
        """The given options that have no effect on this server."""
        names = [name for name in _HOSTED if getattr(self, name) is not None]
        for field, inner in (
            ("reasoning", "summary"),
            ("reasoning", "generate_summary"),
            ("text", "verbosity"),
        ):
            if getattr(getattr(self, field), inner, None) is not None:
                names.append(f"{field}.{inner}")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            names.append("stream_options.include_obfuscation")
        return tuple(names)

    def check(self) -> None:
        """Raises ApiError 400 for what a server without storage cannot do."""
        for name in _STATEFUL:
            if getattr(self, name) is not None:
                raise ApiError(
                    400, f"{name} is not supported: this server stores no answers; send the whole input", name
                )
        if self.priority:
            raise ApiError(400, f"priority is {self.priority}; only 0 is supported", "priority")
        if self.background:
            raise ApiError(400, "background is not supported: this server answers at once", "background")
        if self.truncation not in (None, "disabled"):
            raise ApiError(
                400,
                f"truncation is {self.truncation!r}; only 'disabled' is supported: shorten the input",
                "truncation",
            )
        unknown = [one for one in self.include or () if one != LOGPROBS]
        if unknown:
            raise ApiError(400, f"include may only hold {LOGPROBS!r}, not {unknown[0]!r}", "include")
        if self.stream_options is not None and self.stream is None:
            raise ApiError(400, "stream_options is given, but stream is not", "stream_options")
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise ApiError(
                400,
                "include_usage is not an option of this API: the last event has the usage",
                "stream_options",
            )


_HOSTED = (
    "max_tool_calls",
    "metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


def messages_of(request: ResponsesRequest) -> list[Message]:
    """The conversation, the instructions first. Raises ApiError 400, which names the place."""
    made: list[Message] = []
    if request.instructions is not None:
        made.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*made, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        _add(made, f"input.{index}", item)
    if not made:
        raise ApiError(400, "input is empty; give text or at least one item", "input")
    return made


def _add(made: list[Message], place: str, item: Mapping[str, Any]) -> None:
    """Adds an item. Reasoning, text and calls of one answer become one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise ApiError(
                400,
                f"{place}: the role is {role!r}; it may be user, assistant, system or developer",
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
    elif kind == "function_call":
        function = {"name": _string(place, item, "name"), "arguments": _string(place, item, "arguments")}
        call = {"id": _string(place, item, "call_id"), "type": "function", "function": function}
        _answer(made).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _text(f"{place}.output", item.get("output"))
        made.append({"role": "tool", "tool_call_id": _string(place, item, "call_id"), "content": text})
    else:
        raise ApiError(400, f"{place} has the type {kind!r}, which is not supported here", f"{place}.type")


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
        if kind not in ("input_text", "output_text", "reasoning_text", "summary_text", "text"):
            raise ApiError(
                400, f"{place}.{i} has the type {kind!r}; this server reads text only", f"{place}.{i}.type"
            )
        texts.append(_string(f"{place}.{i}", part, "text"))
    return "".join(texts)


def _string(place: str, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: {key} must be text", f"{place}.{key}")
    return value


def tools_of(request: ResponsesRequest) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any]]:
    """The tools and the choice among them, as for chat completions. Raises ApiError 400."""
    tools = []
    for i, tool in enumerate(request.tools or ()):
        if tool.get("type") != "function":
            raise ApiError(
                400,
                f"tools.{i} has the type {tool.get('type')!r}; only functions, which the client runs, are supported",
                f"tools.{i}.type",
            )
        function = {
            key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None
        }
        tools.append({"type": "function", "function": function})
    choice = request.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise ApiError(
                400,
                f"tool_choice has the type {choice.get('type')!r}; it may be 'function'",
                "tool_choice.type",
            )
        choice = _string("tool_choice", choice, "name")
    elif choice not in (None, "auto", "none", "required"):
        raise ApiError(
            400,
            f"tool_choice is {choice!r}; it may be 'auto', 'none', 'required' or a function",
            "tool_choice",
        )
    if not tools and choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", "tool_choice")
    return tools or None, choice or ("auto" if tools else "none")

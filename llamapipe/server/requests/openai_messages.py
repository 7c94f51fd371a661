"""Messages in OpenAI's format as the engine takes them, and which part of the last one an answer continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamapipe._messages import quoted
from llamapipe.server._tools import custom_arguments
from llamapipe.server.errors import ApiError, as_sent
from llamapipe.server.requests.generation import (
    Continued,
)

Message = Mapping[str, Any]


_CONTINUED: dict[bool | str | None, Any] = {
    None: False,
    False: False,
    True: True,
    "content": "content",
    "reasoning_content": "reasoning",
}


def continued_part(
    messages: Sequence[Message], wanted: bool | str | None, adds_prompt: bool | None
) -> Continued:
    """Return which part of the last message a prompt ends in. Raises ApiError 400.

    ``wanted``, ``adds_prompt``: the fields ``continue_final_message`` and ``add_generation_prompt``.
    """
    if _has_prefix(messages) and wanted is None:
        wanted = True
    if wanted and adds_prompt:
        raise ApiError(
            400,
            "add_generation_prompt begins a new message, and continue_final_message or prefix continues the last one; "
            "give one of them",
            "continue_final_message",
        )
    role = messages[-1].get("role") if messages else None
    if wanted and isinstance(role, str) and role != "assistant":
        raise ApiError(
            400,
            f"continue_final_message or prefix is set, and the last message has the role {quoted(role)}: only an "
            "assistant message can be continued",
            "continue_final_message",
        )
    part: Continued = _CONTINUED[wanted]
    return part


def _has_prefix(messages: Sequence[Message]) -> bool:
    """Return whether the last message has ``"prefix": true``, as in the APIs of DeepSeek and Mistral, and of LiteLLM.

    Raises ApiError 400 if the field is no bool, or true in an earlier message.
    """
    for i, message in enumerate(messages):
        prefix = message.get("prefix")
        if prefix is None or prefix is False:
            continue
        if prefix is not True:
            raise ApiError(
                400,
                f"messages.{i}.prefix is {as_sent(prefix)}; it must be true or false",
                f"messages.{i}.prefix",
            )
        if i < len(messages) - 1:
            raise ApiError(
                400,
                f"messages.{i}.prefix is true; only the last message can be continued: leave it out here",
                f"messages.{i}.prefix",
            )
    return bool(messages) and messages[-1].get("prefix") is True


def engine_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with custom tool calls and OpenAI's older ``function_call`` converted to function calls."""
    converted: list[Message] = []
    for message in messages:
        role, older = message.get("role"), message.get("function_call")
        calls = message.get("tool_calls")
        if role == "function":  # the result of an older function_call
            converted.append({**message, "role": "tool"})
        elif role == "assistant" and isinstance(older, Mapping) and not calls:
            call = {"id": f"call_{len(converted)}", "type": "function", "function": dict(older)}
            rest = {key: value for key, value in message.items() if key != "function_call"}
            converted.append({**rest, "tool_calls": [call]})
        elif isinstance(calls, list):
            converted.append({**message, "tool_calls": [_call(call) for call in calls]})
        else:
            converted.append(message)
    return converted


def _call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": function}

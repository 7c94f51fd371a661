"""Converts messages of chat completions to the form that the engine takes: some fields have older and rarer forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamapipe.server.wire.tools import custom_arguments

Message = Mapping[str, Any]


def engine_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls of custom tools, and OpenAI's older ``function_call``, as calls of functions."""
    made: list[Message] = []
    for message in messages:
        role, older = message.get("role"), message.get("function_call")
        calls = message.get("tool_calls")
        if role == "function":  # the result of an older function_call
            made.append({**message, "role": "tool"})
        elif role == "assistant" and isinstance(older, Mapping) and not calls:
            call = {"id": f"call_{len(made)}", "type": "function", "function": dict(older)}
            rest = {key: value for key, value in message.items() if key != "function_call"}
            made.append({**rest, "tool_calls": [call]})
        elif isinstance(calls, list):
            made.append({**message, "tool_calls": [_call(call) for call in calls]})
        else:
            made.append(message)
    return made


def _call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": function}

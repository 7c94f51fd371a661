"""The items of the Responses API as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamapipe._messages import did_you_mean, quoted
from llamapipe.media.decode import is_media
from llamapipe.server._tools import ClientName, Tools, custom_arguments, qualify, tools_of
from llamapipe.server.errors import ApiError, as_sent, wrong
from llamapipe.server.requests.mcp_tools import plain_items
from llamapipe.server.requests.media import PlacedPart
from llamapipe.server.store.answers import Item

Message = dict[str, Any]


LOGPROBS = "message.output_text.logprobs"


# Further parts of an answer that clients may ask for: of hosted tools, which do not run here, and of what is stored.
_INCLUDABLE = ("file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
               "message.input_image.image_url", "computer_call_output.output.image_url",
               "code_interpreter_call.outputs", "reasoning.encrypted_content")  # fmt: skip


NO_TOOLS = tools_of(None, None, is_flat=True)


# Items of an input that say what a hosted tool did, without its result.
HOSTED_ITEMS = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
                 "mcp_list_tools", "compaction_trigger")  # fmt: skip


def check_include(names: Sequence[str]) -> list[str]:
    """Return the values of ``include`` that have no effect here.

    Raises ApiError 400 for an unknown value.
    """
    asked = [name for name in names if name != LOGPROBS]
    for name in asked:
        if name not in _INCLUDABLE:
            known = (LOGPROBS, *_INCLUDABLE)
            raise ApiError(400, f"include: {quoted(name)} is unknown{did_you_mean(name, known)}", "include")
    return asked


def messages_of(
    instructions: str | None, input_items: Sequence[Item], tools: Tools, earlier: Sequence[Item] = ()
) -> list[Message]:
    """Return the conversation, with the instructions first. Raises ApiError, which names the field.

    ``tools``: give the names by which the model knows the tools that were called. ``earlier``: stored items that
    precede the given ones.
    """
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for place, items in (("earlier", earlier), ("input", input_items)):
        for index, item in enumerate(items):
            _add(messages, f"{place}.{index}", item, tools)
    if not messages:
        raise ApiError(400, "input is empty; give text or at least one item", "input")
    return messages


def check_items(items: Sequence[Item]) -> None:
    """Raise ApiError 400 for items that no conversation may have."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        _add(messages, f"items.{index}", item, NO_TOOLS)


def _add(messages: list[Message], place: str, item: Mapping[str, Any], tools: Tools) -> None:
    """Add an item to the messages. Reasoning, text and calls of one answer become one message."""
    kind = item.get("type")
    if kind is None:  # the API lets messages and references leave it out
        kind = "item_reference" if "id" in item and "role" not in item else "message"
    if not isinstance(item.get("status"), (str, type(None))):  # it would be stored, and told to clients
        raise wrong(place, "status", "the status must be text")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise wrong(
                place, "role", f"the role is {as_sent(role)}; it may be user, assistant, system or developer"
            )
        if role == "assistant":
            _answer(messages)["content"] += _text(f"{place}.content", item.get("content"))
        else:
            messages.append({"role": role, "content": _parts(f"{place}.content", item.get("content"))})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        message = _answer(messages)
        message["reasoning_content"] = message.get("reasoning_content", "") + _text(f"{place}.content", parts)
    elif kind in ("function_call", "custom_tool_call"):
        if kind == "custom_tool_call":
            arguments: Any = custom_arguments(_string(place, item, "input"))
        else:
            arguments = item.get("arguments")  # of a call that was cut off, these may be anything
        function = {"name": _name(place, item, tools), "arguments": arguments}
        call = {"id": _string(place, item, "call_id"), "type": "function", "function": function}
        _answer(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(f"{place}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": _string(place, item, "call_id"), "content": text})
    elif kind == "item_reference":
        raise ApiError(
            404,
            f"{place}: the item {as_sent(item.get('id'))} is not here: this server stores no answers (llamapipe serve "
            "--store FILE does); send the item itself (clients do with store: false)",
            f"{place}.id",
            "not_found",
        )
    elif (parts := plain_items(item)) is not None:
        for part in parts:
            _add(messages, place, part, tools)
    elif kind not in HOSTED_ITEMS:
        raise ApiError(
            400, f"{place} has the type {quoted(kind)}, which is not supported here", f"{place}.type"
        )


def _name(place: str, item: Mapping[str, Any], tools: Tools) -> str:
    """Return the name by which the model knows the tool that an item calls."""
    name, namespace = _string(place, item, "name"), item.get("namespace")
    for flat in (name, qualify(name, namespace) if isinstance(namespace, str) else name):
        known = tools.names.get(flat)
        if known is not None and known == ClientName(name, namespace, known.is_custom):
            return flat
    return qualify(name, namespace) if isinstance(namespace, str) else name


def _answer(messages: list[Message]) -> Message:
    """Return the model's message that is being assembled."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _parts(place: str, content: Any) -> str | list[dict[str, Any]]:
    """Return the content of a message: text, or parts if it has images or sounds."""
    if not isinstance(content, list) or not any(is_media(part) for part in content):
        return _text(place, content)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in ("input_image", "input_audio"):
            if part.get("file_id") is not None:
                raise ApiError(
                    400, f"{place}.{i}: this server stores no files; send a data URL", f"{place}.{i}.file_id"
                )
            parts.append(PlacedPart(f"{place}.{i}", part))
        else:
            parts.append({"type": "text", "text": _text(place, [part])})
    return parts


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
                f"{place}.{i} has the type {as_sent(kind)}; this server reads text only",
                f"{place}.{i}.type",
            )
        texts.append(_string(f"{place}.{i}", part, "text"))
    return "".join(texts)


def _string(place: str, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise wrong(place, key, f"{key} must be text")
    return value

"""Converts messages of Anthropic's API to the messages that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamapipe.arguments import quoted
from llamapipe.chat.results import ToolCall
from llamapipe.engine.chat_results import call_message
from llamapipe.server.errors import ApiError
from llamapipe.server.wire.anthropic import CountRequest

Message = dict[str, Any]
_READ = ("text", "document", "search_result")


def messages_of(request: CountRequest) -> list[Message]:
    """The conversation, the system prompt first. Raises ApiError 400, which names the place."""
    made: list[Message] = []
    if request.system is not None:
        made.append({"role": "system", "content": _text("system", request.system)})
    for index, message in enumerate(request.messages):
        made += _converted(f"messages.{index}", message)
    return made


def _converted(place: str, message: Mapping[str, Any]) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    extra = message.keys() - {"role", "content"}
    if extra:
        raise ApiError(400, f"{place}: unknown field {quoted(min(extra))}", f"{place}.{min(extra)}")
    if role not in ("user", "assistant", "system"):
        raise ApiError(
            400, f"{place}: the role is {quoted(role)}; it may be 'user' or 'assistant'", f"{place}.role"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: content must be text or a list of blocks", f"{place}.content")
    blocks = [_block(f"{place}.content.{i}", block) for i, block in enumerate(content)]
    return _assistant(blocks) if role == "assistant" else _user(role, blocks)


def _block(place: str, block: Any) -> tuple[str, Mapping[str, Any], str]:
    """A block's type, the block and its place."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise ApiError(400, f"{place} must be an object with a type", place)
    return kind, block, place


Blocks = Sequence[tuple[str, Mapping[str, Any], str]]


def _user(role: str, blocks: Blocks) -> list[Message]:
    """Converts a user message. Tool results become separate messages before it, as templates expect."""
    results: list[Message] = []
    texts: list[str] = []
    for kind, block, place in blocks:
        if kind in _READ:
            texts.append(_read(place, kind, block))
        elif kind == "tool_result":
            text = _text(place, block.get("content") or "")
            if block.get("is_error"):
                text = f"Error: {text}"
            results.append(
                {"role": "tool", "tool_call_id": _string(place, block, "tool_use_id"), "content": text}
            )
        else:
            raise _unsupported(place, kind)
    if texts or not results:
        results.append({"role": role, "content": "".join(texts)})
    return results


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
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise ApiError(400, f"{place}: input must be an object", f"{place}.input")
            call = ToolCall(_string(place, block, "id"), _string(place, block, "name"), arguments)
            calls.append(call_message(call))
        elif kind != "redacted_thinking":  # only Anthropic's service can read it
            raise _unsupported(place, kind)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text(place: str, content: Any) -> str:
    """Text, or the text of a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} must be text or a list of text blocks", place)
    texts = []
    for i, one in enumerate(content):
        kind, block, inner = _block(f"{place}.{i}", one)
        if kind not in _READ:
            raise _unsupported(inner, kind)
        texts.append(_read(inner, kind, block))
    return "".join(texts)


def _read(place: str, kind: str, block: Mapping[str, Any]) -> str:
    """The text of a block that holds text. Raises ApiError 400."""
    if kind == "text":
        return _string(place, block, "text")
    title = f"{block['title']}\n" if isinstance(block.get("title"), str) else ""
    if kind == "search_result":
        return f"{title}{_text(f'{place}.content', block.get('content'))}\n"
    source = block.get("source")
    form = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and form == "text":
        return f"{title}{_string(f'{place}.source', source, 'data')}\n"
    if isinstance(source, Mapping) and form == "content":
        return f"{title}{_text(f'{place}.source.content', source.get('content'))}\n"
    raise ApiError(
        400, f"{place}: a document must hold text here, not the source {quoted(form)}", f"{place}.source"
    )


def _string(place: str, block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: {key} must be text, not {json.dumps(value)[:40]}", f"{place}.{key}")
    return value


def _unsupported(place: str, kind: str) -> ApiError:
    return ApiError(400, f"{place} has the type {quoted(kind)}, which is not supported here", place)

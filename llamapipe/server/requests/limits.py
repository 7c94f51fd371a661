"""Limits on what a request may ask for. Open it to add a limit that several routes share.

The numbers are fields of ``ServerSettings``. Each limit is checked before the data that it limits is processed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.server.errors import ApiError, as_sent
from llamapipe.server.gate import Gate
from llamapipe.server.state import ServerState

MAX_TOP = 100
CHAT_TOP = 20  # the most top log-probabilities in OpenAI's and Ollama's chats
_MOST_PAIRS, _MOST_OF_KEY, _MOST_OF_VALUE = 16, 64, 512  # of OpenAI's metadata


def refuse_long(state: ServerState, what: str, n_characters: int) -> None:
    """Raise InvalidRequestError for a text that cannot fit the context, if it is longer than the server allows."""
    most, n_ctx = state.settings.max_text_characters, state.engine.n_ctx
    if n_characters <= most:
        return
    n_least = state.engine.model.vocab.least_tokens(n_characters)
    if n_least >= n_ctx:
        raise InvalidRequestError(
            f"the {what} has {n_characters} characters, at least {n_least} tokens; n_ctx is {n_ctx}, and the limit of "
            f"this server for a text that cannot fit is {most} (--max-text-characters): shorten it"
        )


def refuse_long_chat(state: ServerState, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a long conversation before it is rendered, as ``refuse_long`` does with a text."""
    refuse_long(state, "conversation", sum(_n_characters(message.get("content")) for message in messages))


def _n_characters(content: object) -> int:
    """Count the characters of a message's content: text, or parts with text."""
    if isinstance(content, list):
        content = [part.get("text") if isinstance(part, dict) else part for part in content]
        return sum(len(text) for text in content if isinstance(text, str))
    return len(content) if isinstance(content, str) else 0


def check_n_messages(state: Gate, items: object, name: str) -> None:
    """Raise ApiError 400 for a conversation with too many messages, before any is processed.

    ``items``: the conversation, in field ``name``. Each part of a message counts as a message, because processing the
    parts holds up the event loop.
    """
    most = state.settings.max_messages
    if not isinstance(items, list):
        return
    if len(items) > most:
        raise ApiError(
            400,
            f"{name} has {len(items)} items; the limit of this server is {most} (--max-messages): send the last ones",
            name,
        )
    if _has_more_parts(items, most):
        raise ApiError(
            400,
            f"{name} has over {most} messages and parts of them, the limit of this server (--max-messages): send the "
            "last ones, or fewer parts with longer texts",
            name,
        )


# Fields of a message, or of a tool's result in it, that may be lists.
_PARTS = ("content", "output", "images", "tool_calls")


def _has_more_parts(messages: list[Any], most: int) -> bool:
    """Return whether messages have more than ``most`` parts; a message without a list is a single part."""
    n = 0
    stack = [messages]
    while stack and n <= most:
        values = stack.pop()
        n += len(values)
        if n > most:
            break
        for value in values:
            if isinstance(value, dict):
                lists = [parts for key in _PARTS if isinstance(parts := value.get(key), list) and parts]
                n -= bool(lists)  # the parts count instead of the message
                stack += lists
    return n > most


def total_choices(state: ServerState, n: int) -> None:
    """Raise ApiError 400 if a request asks for more choices than the server allows."""
    most = state.settings.max_n
    if n > most:
        raise ApiError(
            400, f"the request asks for {n} choices in all; the limit of this server is {most} (--max-n)", "n"
        )


def check_top(name: str, value: int | None, most: int = MAX_TOP) -> int | None:
    """Check a number of alternatives. Raises ApiError 400 outside 0 to ``most``."""
    if value is not None and not 0 <= value <= most:
        raise ApiError(400, f"{name} is {value}; it must be from 0 to {most}", name)
    return value


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raise ApiError 400 for metadata beyond the API's limits."""
    metadata = metadata or {}
    if len(metadata) > _MOST_PAIRS:
        raise ApiError(400, f"metadata has {len(metadata)} pairs; it may have {_MOST_PAIRS}", "metadata")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise ApiError(
                400, f"metadata: the value of {quoted(key)} is {as_sent(value)}; it must be text", "metadata"
            )
        if len(key) > _MOST_OF_KEY or len(value) > _MOST_OF_VALUE:
            raise ApiError(
                400,
                f"metadata: {quoted(key)} is too long; a key may have {_MOST_OF_KEY} characters, a value "
                f"{_MOST_OF_VALUE}",
                "metadata",
            )

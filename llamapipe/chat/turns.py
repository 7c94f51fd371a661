"""Drops the oldest turns of a conversation that does not fit into the context.

The engine (``truncation="auto"``), the server and ``llamapipe chat`` use ``kept_messages``. A turn begins with a user's
message. When a conversation does not fit, turns are dropped until it fills half of the context, not just until it fits:
the prompts after it then begin with the same tokens, which the prefix cache has. A caller sends its whole conversation
each time, so the same turns must be dropped again. That is why the function replays how the conversation grew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

MessageT = TypeVar("MessageT", bound=Mapping[str, Any])
_SYSTEM = ("system", "developer")
_MOST_CHARACTERS = (
    64  # for each token of the context, of the turns that are looked at: older ones are gone anyway
)


def kept_messages(
    messages: Sequence[MessageT],
    n_tokens: Callable[[list[MessageT]], int],
    n_ctx: int,
    max_tokens: int | None,
) -> list[MessageT]:
    """The conversation, without its oldest turns if its prompt leaves too little room for the answer.

    Room is needed for ``max_tokens``, at most a quarter of ``n_ctx``. The system messages at the beginning and the last
    turn stay; if they alone fill the context, nothing is dropped. ``n_tokens``: counts the tokens of a prompt.
    """
    n_free = n_ctx // 4 if max_tokens is None else max(min(max_tokens, n_ctx // 4), 1)
    n_head = next(
        (i for i, message in enumerate(messages) if message.get("role") not in _SYSTEM), len(messages)
    )
    messages = list(messages)
    head, turns = messages[:n_head], _turns(messages[n_head:])
    n_left = _MOST_CHARACTERS * n_ctx - sum(len(str(message)) for message in head)
    n_looked_at = 0
    for turn in reversed(turns):
        n_left -= sum(len(str(message)) for message in turn)
        if n_left < 0 and n_looked_at:
            break
        n_looked_at += 1
    recent = turns[len(turns) - n_looked_at :]
    if len(turns) < 2 or (n_looked_at == len(turns) and n_tokens(messages) + n_free <= n_ctx):
        return messages
    begin = _first_after_growing(head, recent, n_tokens, n_ctx, n_free)
    for first in range(begin, len(recent)):  # the sizes of turns do not add up exactly
        kept = [*head, *(message for turn in recent[first:] for message in turn)]
        n = n_tokens(kept)
        if n + n_free <= n_ctx:
            return kept
    return kept if n < n_ctx else messages


def _turns(messages: list[MessageT]) -> list[list[MessageT]]:
    """The messages in groups, each of which begins with a user's message after one of another role.

    What precedes the first one, such as a greeting, belongs to the first turn: templates may refuse to count the tokens
    of messages without a user's.
    """
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    begins = [i for i in users[1:] if messages[i - 1].get("role") != "user"]
    if messages:
        begins.insert(0, 0)
    return [messages[begin:end] for begin, end in zip(begins, [*begins[1:], len(messages)], strict=True)]


def _first_after_growing(
    head: list[MessageT],
    turns: list[list[MessageT]],
    n_tokens: Callable[[list[MessageT]], int],
    n_ctx: int,
    n_free: int,
) -> int:
    """The first turn that is kept if the turns come one after the other."""
    sizes = [n_tokens(turn) for turn in turns]
    n = n_tokens([*head, *turns[0]]) - sizes[0]  # the head's
    first = 0
    for index, size in enumerate(sizes):
        n += size
        if n + n_free > n_ctx:
            while first < index and n > n_ctx // 2:
                n -= sizes[first]
                first += 1
    return first

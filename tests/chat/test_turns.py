"""Which turns of a conversation are dropped when it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from llamapipe.chat.messages import kept_messages

Message = dict[str, Any]
SYSTEM = {"role": "system", "content": "s" * 10}


def turn(name: str, n: int = 10) -> list[Message]:
    return [{"role": "user", "content": name * n}, {"role": "assistant", "content": name.upper() * n}]


def n_tokens(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def test_nothing_is_dropped_while_the_answer_has_room() -> None:
    messages = [SYSTEM, *turn("a"), *turn("b")]
    assert kept_messages(messages, n_tokens, 60, 10) == messages
    assert kept_messages(messages, n_tokens, 100, None) == messages  # None: a quarter
    assert len(kept_messages(messages, n_tokens, 59, 10)) == 3


def test_a_conversation_without_turns_stays() -> None:
    assert kept_messages([SYSTEM], n_tokens, 60, 10) == [SYSTEM]
    assert kept_messages([SYSTEM], n_tokens, 1, 10) == [SYSTEM]


def test_the_system_messages_and_the_last_turn_stay() -> None:
    developer = {"role": "developer", "content": "d"}
    kept = kept_messages([SYSTEM, developer, *turn("a"), *turn("b"), *turn("c")], n_tokens, 60, 1)
    assert kept == [SYSTEM, developer, *turn("c")]


@pytest.mark.parametrize("n_last", [100, 1000])
def test_a_turn_that_is_too_long_drops_nothing(n_last: int) -> None:
    messages = [SYSTEM, *turn("a"), {"role": "user", "content": "b" * n_last}]
    assert kept_messages(messages, n_tokens, 60, 1) == messages


def test_a_turn_is_dropped_as_a_whole() -> None:
    call: Message = {"role": "assistant", "content": "c" * 10, "tool_calls": []}
    result = {"role": "tool", "content": "r" * 10}
    first: list[Message] = [{"role": "user", "content": "u"}, {"role": "user", "content": "u"}, call, result]
    assert kept_messages([*first, *turn("a")], n_tokens, 30, 1) == turn("a")


def test_a_conversation_that_grows_begins_alike_for_many_turns() -> None:
    """The prefix cache has the prompt's beginning, although the caller sends everything each time."""
    messages: list[Message] = [SYSTEM]
    begins = []
    for i in range(60):
        messages.append({"role": "user", "content": f"{i:010d}"})
        kept = kept_messages(messages, n_tokens, 400, 40)
        assert n_tokens(kept) + 40 <= 400
        begins.append(kept[1]["content"])
        messages.append({"role": "assistant", "content": f"{i:010d}"})
    changes = sum(begin != other for begin, other in pairwise(begins))
    assert begins[0] == begins[15] and changes == 5


def test_a_very_long_history_costs_no_more_than_its_end() -> None:
    messages = [message for _ in range(5000) for message in turn("a", 50)]
    counted = 0

    def counts(some: Sequence[Message]) -> int:
        nonlocal counted
        counted += n_tokens(some)
        return n_tokens(some)

    kept = kept_messages(messages, counts, 300, 10)
    assert n_tokens(kept) <= 290 and kept[-1] == messages[-1]
    assert counted < 60_000


def test_a_greeting_belongs_to_the_first_turn() -> None:
    """Templates may refuse to render messages without a user's."""

    def counted(messages: Sequence[Message]) -> int:
        assert any(message["role"] == "user" for message in messages)
        return n_tokens(messages)

    greeting = {"role": "assistant", "content": "g" * 10}
    messages = [SYSTEM, greeting, *turn("a"), *turn("b"), *turn("c")]
    assert kept_messages(messages, counted, 60, 1) == [SYSTEM, *turn("b"), *turn("c")]
    assert kept_messages(messages, counted, 100, 1) == messages


def grown(
    n_tokens: Callable[[Sequence[Message]], int], n_ctx: int, n_free: int, n_turns: int
) -> list[tuple[str, int]]:
    """The first message that is kept, and the prompt's tokens, in each turn of a conversation that grows."""
    messages: list[Message] = [SYSTEM]
    turns = []
    for i in range(n_turns):
        messages.append({"role": "user", "content": f"{i:010d}"})
        kept = kept_messages(messages, n_tokens, n_ctx, n_free)
        assert n_tokens(kept) + n_free <= n_ctx
        turns.append((kept[1]["content"], n_tokens(kept)))
        messages.append({"role": "assistant", "content": f"{i:020d}"})
    return turns


def test_what_the_template_writes_once_is_counted_once() -> None:
    """Tools that take half of the context leave the other half to the turns."""
    turns = grown(lambda messages: 200 + n_tokens(messages), 400, 20, 60)
    assert all(n >= 250 for _, n in turns[20:])  # a turn of 30 tokens, at least, besides the last
    assert max(n for _, n in turns[20:]) > 340
    changes = sum(begin != other for (begin, _), (other, _) in pairwise(turns))
    assert changes <= 60 // 2


def test_the_room_is_used_again() -> None:
    """After a cut the conversation grows until it is full again; what a template adds to every prompt is no turn's."""
    turns = grown(lambda messages: 30 + n_tokens(messages), 8000, 256, 900)
    first_cut = next(i for i, (begin, _) in enumerate(turns) if begin != turns[0][0])
    later = [n for _, n in turns[first_cut:]]
    assert max(later) > 8000 - 256 - 60 and min(later) > 3900


def test_a_cut_is_made_once() -> None:
    """Whether the last turn has its answer yet makes no difference to what is dropped: no cut follows another."""
    for n_ctx in range(300, 420, 7):
        begins = [begin for begin, _ in grown(n_tokens, n_ctx, 20, 60)]
        changed = [i for i, (begin, other) in enumerate(pairwise(begins)) if begin != other]
        assert len(changed) > 3 and all(b - a >= 3 for a, b in pairwise(changed)), n_ctx


def test_results_stay_with_their_calls() -> None:
    """Also where a user writes between them."""
    call: Message = {"role": "assistant", "content": "c" * 5, "tool_calls": [{"id": "1"}]}
    result = {"role": "tool", "content": "r" * 5, "tool_call_id": "1"}
    user = {"role": "user", "content": "u" * 5}
    asked = [user, call, dict(user, content="w" * 5), result, {"role": "assistant", "content": "A" * 5}]
    messages = [SYSTEM, *turn("a"), *asked, *turn("b"), *turn("c")]
    for n_ctx in range(20, 120):
        kept = kept_messages(messages, n_tokens, n_ctx, 1)
        assert (result in kept) == (call in kept), n_ctx
        assert kept[-2:] == turn("c")

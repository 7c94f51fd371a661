"""Histories that a template would refuse or omit: of other models and programs, and with calls that were cut off."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.chat_families import FAMILIES
from support.chat_templates import template

from llamapipe.chat.messages import with_short_ids, with_single_calls
from llamapipe.chat.template import ChatTemplate
from llamapipe.errors import InvalidRequestError

USER = {"role": "user", "content": "What now?"}
ANSWER = {"role": "assistant", "content": "Well."}


def calls(*ids: str | None, content: str = "") -> dict[str, Any]:
    tool_calls = [
        {"id": call_id, "type": "function", "function": {"name": f"f{n}", "arguments": {"n": n}}}
        for n, call_id in enumerate(ids)
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def result(call_id: str | None, text: str = "noon") -> dict[str, Any]:
    return {"role": "tool", "content": text, **({} if call_id is None else {"tool_call_id": call_id})}


def shown(family: str, *messages: dict[str, Any]) -> str:
    return template(FAMILIES[family].template).render(messages)


@pytest.mark.parametrize("family", ["Mistral list", "Mistral args"])
@pytest.mark.parametrize("call_id", ["call_Zx8", "toolu_01A09q90qw90lq917835lq9", "", None, "0"])
def test_ids_of_other_models(family: str, call_id: str | None) -> None:
    text = shown(family, USER, calls(call_id), result(call_id), ANSWER, USER)
    called, answered = re.findall(r'(?:id": ?"|\[CALL_ID\]|\[TOOL_RESULTS\])([A-Za-z0-9]{9})\b', text)
    assert called == answered
    assert text == shown(family, USER, calls(call_id), result(call_id), ANSWER, USER)


def test_own_ids_stay() -> None:
    messages = [USER, calls("abc123XYZ"), result("abc123XYZ")]
    assert with_short_ids(messages) == messages
    assert "abc123XYZ" in shown("Mistral args", *messages)


def test_ids_belong_together() -> None:
    history = [
        USER,
        calls("a", None, "c"),
        result("c"),
        result(None),
        result("a"),
        calls(None),
        result(None),
        result("?"),
    ]
    shortened = with_short_ids(history)
    ids = [call["id"] for call in shortened[1]["tool_calls"]]
    (later,) = [call["id"] for call in shortened[5]["tool_calls"]]
    assert [message["tool_call_id"] for message in shortened[2:5]] == [ids[2], ids[1], ids[0]]
    assert shortened[6]["tool_call_id"] == later
    assert len({*ids, later, shortened[7]["tool_call_id"]}) == 5


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ANSWER, ANSWER, USER],
        [USER, ANSWER, calls("abc123XYZ"), result("abc123XYZ"), ANSWER, USER],
        [USER, calls("abc123XYZ", content="I look"), USER],
        [USER, calls("abc123XYZ", "abc123XY0"), USER],
        [ANSWER, USER],
        [{"role": "system", "content": "Brief."}, ANSWER, USER],
    ],
)
@pytest.mark.parametrize("family", ["Mistral list", "Mistral args", "Llama"])
def test_answers_in_a_row_and_calls_without_results(family: str, messages: list[dict[str, Any]]) -> None:
    text = shown(family, *messages)
    for message in messages:
        # Llama's template shows the call, not the text before it.
        assert message["content"] in text or (family == "Llama" and message.get("tool_calls"))
        for call in message.get("tool_calls") or ():
            assert call["function"]["name"] in text


def test_parallel_calls_where_a_template_shows_one() -> None:
    messages = [USER, calls("a", "b", content="I look."), result("b", "two"), result("a", "one"), ANSWER]
    single = with_single_calls(messages)
    assert [message.get("tool_call_id") or message["role"] for message in single] == [
        "user",
        *("assistant", "a"),
        *("assistant", "b"),
        "assistant",
    ]
    assert [message["content"] for message in single] == ["What now?", "I look.", "one", "", "two", "Well."]
    text = shown("Llama", *messages)
    assert text.index("f0") < text.index("one") < text.index("f1") < text.index("two")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_list_of_calls_is_none(family: str) -> None:
    assert shown(family, USER, {**ANSWER, "tool_calls": []}, USER) == shown(family, USER, ANSWER, USER)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_without_a_call(family: str) -> None:
    """A program that drops old messages may drop the call and keep its result."""
    assert "noon" in shown(family, USER, ANSWER, result("abc123XYZ"), USER)


PLAIN = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}: {{ m.content }}>{% endfor %}"
)


def test_what_a_template_omits_is_text_of_the_user() -> None:
    critic = {"role": "critic", "content": "Bad."}
    assert ChatTemplate(PLAIN).render([USER, critic]) == "<user: What now?><user: Bad.>"
    assert ChatTemplate(PLAIN).render([USER, calls("a"), result("a")]).endswith("><user: noon>")
    every = "{% for m in messages %}<{{ m.role }}: {{ m.content }}>{% endfor %}"
    assert (
        ChatTemplate(every).render([USER, critic, result("a")])
        == "<user: What now?><critic: Bad.><tool: noon>"
    )


def test_a_template_that_refuses_everything_says_its_reason() -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages: never"):
        ChatTemplate("{{ raise_exception('never') }}").render([USER, calls("a", "b"), ANSWER, ANSWER])

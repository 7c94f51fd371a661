"""Answers that `max_tokens` cuts off within a call: no part of the call is content, whatever its format."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_families import FAMILIES, FULL, TOOLS, Family
from support.chat_templates import ByteVocabulary, renderer

import llamapipe as lp
from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.results import ChatMessage
from llamapipe.compat.formats import FUNCTION_CALLING


@pytest.mark.parametrize("choice", ["required", "get_weather"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_every_beginning_of_a_call(family: Family, choice: str) -> None:
    form = ChatFormat.of(renderer(family.template), ByteVocabulary(family.specials).special_id)
    for n in range(len(family.full) + 1):
        for stream_calls in (False, True):
            parser = form.parser(TOOLS, choice, prompt_tail=family.tail, stream_calls=stream_calls)
            answer = ChatMessage([*map(parser.feed, family.full[:n]), parser.finish()])
            assert answer.content == ""
            if not stream_calls:
                assert not answer.tool_calls or answer.tool_calls[0].arguments == FULL
    assert answer.tool_calls


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_call_that_the_model_chose(family: Family) -> None:
    """Where a marker begins calls, at most a part of a marker is content; where JSON does, it stays content."""
    form = ChatFormat.of(renderer(family.template), ByteVocabulary(family.specials).special_id)

    def contents(cut_off: bool) -> list[str]:
        found = []
        for n in range(len(family.full)):
            parser = form.parser(TOOLS, "auto", prompt_tail=family.tail)
            found.append(ChatMessage([*map(parser.feed, family.full[:n]), parser.finish(cut_off)]).content)
        return found

    if family.full.lstrip().startswith(("{", "[get", "<|python_tag|>")):
        assert contents(True) == contents(False)
    else:
        assert max(map(len, contents(True))) < 40  # the longest marker
        assert '"' not in "".join(contents(True))


@pytest.mark.parametrize("n", [1, 3, 14, 30])
def test_an_engine_that_is_forced(demo: lp.Model, n: int) -> None:
    params = lp.SamplingParams(temperature=0, max_tokens=n)
    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": "get_weather"}
    with lp.Model(demo.path, chat_template=FUNCTION_CALLING) as model, lp.Engine(model, n_ctx=1024) as engine:
        answer = engine.chat("Hello", params, **given)
        assert (answer.content, answer.tool_calls, answer.finish_reason) == ("", (), "length")
        parts = list(engine.stream_chat("Hello", params, **given))
        assert [part.content for part in parts if part.content] == []
        assert parts[-1].finish_reason == "length"

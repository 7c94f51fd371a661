"""Answers that `max_tokens` cuts off within a call: no part of the call is content, whatever its format."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_families import FAMILIES, FULL, TOOLS, Family
from support.chat_templates import form_of

import llamapipe as lp
from llamapipe.chat.results import ChatMessage
from llamapipe.compat.formats import FUNCTION_CALLING


@pytest.mark.parametrize("choice", ["required", "get_weather"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_every_beginning_of_a_call(family: Family, choice: str) -> None:
    form = form_of(family.template, family.specials)
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
    """Where a marker begins calls, at most its first character is content; where JSON does, it stays content."""
    form = form_of(family.template, family.specials)

    def contents(cut_off: bool) -> list[str]:
        texts = []
        for n in range(len(family.full)):
            parser = form.parser(TOOLS, "auto", prompt_tail=family.tail)
            texts.append(ChatMessage([*map(parser.feed, family.full[:n]), parser.finish(cut_off)]).content)
        return texts

    tag = "<|python_tag|>" if family.full.startswith("<|python_tag|>") else ""
    if tag or family.full.lstrip().startswith(("{", "[get")):
        assert contents(True)[len(tag) :] == contents(False)[len(tag) :]
        assert all(len(text) <= 1 for text in contents(True)[: len(tag)])
    else:
        assert all(len(text) <= 1 or text.isalpha() for text in contents(True)), contents(True)


def test_text_that_ends_like_a_marker() -> None:
    """Only where the answer was cut off is it taken for the start of one, and not if it may be a word."""
    family = FAMILIES["Hermes"]
    form = form_of(family.template, family.specials)
    for text, is_cut_off, content in (
        ("Now a<to", False, "Now a<to"),
        ("Now a<to", True, "Now a"),
        ("Now a<", True, "Now a<"),
        ("Now a<t ", True, "Now a<t "),
    ):
        parser = form.parser(TOOLS, "auto", prompt_tail=family.tail)
        assert ChatMessage([*map(parser.feed, text), parser.finish(is_cut_off)]).content == content


@pytest.mark.parametrize(
    ("end", "content"),
    [("<|close|>", "Yes"), ("<|close|>respon", "Yes"), ("<|close|>response", "Yes"), ("<|close|>x", "Yesx")],
)
def test_a_marker_of_control_tokens_and_text_that_is_cut(end: str, content: str) -> None:
    """The text between the control tokens is no content."""
    family = FAMILIES["Kimi K3"]
    form = form_of(family.template, family.specials)
    for parts in ([f"Yes{end}"], [*f"Yes{end}"]):
        parser = form.parser(TOOLS, "auto", prompt_tail=family.tail + "".join(family.think or ()))
        pieces = [parser.feed("<|open|>response<|sep|>"), *map(parser.feed, parts)]
        assert ChatMessage([*pieces, parser.finish(cut_off=True)]).content == content


def test_a_head_that_is_cut_is_no_call() -> None:
    """Kimi K3 may leave out the number after the name; where the text ends within it, it was not left out."""
    form = form_of("Kimi-K3")
    assert form.calls is not None and form.reasoning is not None
    tail = form.reasoning.start + form.reasoning.end
    text = form.calls.written([("", "get_weather", FULL)])
    for n in range(len(text)):
        parser = form.parser(TOOLS, "auto", prompt_tail=tail, stream_calls=True)
        answer = ChatMessage([*map(parser.feed, text[:n]), parser.finish(cut_off=True)])
        assert all(not call.is_complete or call.arguments == FULL for call in answer.tool_calls), text[:n]


@pytest.mark.parametrize("n", [1, 3, 14, 30])
def test_an_engine_that_is_forced(demo: lp.Model, n: int) -> None:
    params = lp.SamplingParams(temperature=0, max_tokens=n)
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "get_weather"}
    with lp.Model(demo.path, chat_template=FUNCTION_CALLING) as model, lp.Engine(model, n_ctx=1024) as engine:
        answer = engine.chat("Hello", params, **options)
        assert (answer.content, answer.tool_calls, answer.finish_reason) == ("", (), "length")
        parts = list(engine.stream_chat("Hello", params, **options))
        assert [part.content for part in parts if part.content] == []
        assert parts[-1].finish_reason == "length"

"""Calls written as plain JSON, without the markers of the template: read where the answer consists of nothing else."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from support.chat_families import FAMILIES, FULL, HERMES, PARIS, TOOLS
from support.chat_templates import ByteVocabulary, cuts, renderer

from llamapipe.chat.chat_format import ChatFormat, differs_from_calls
from llamapipe.chat.parser import ChatParser
from llamapipe.chat.results import ChatMessage
from llamapipe.chat.tools import Tool

WEATHER = f'{{"name": "get_weather", "arguments": {json.dumps(FULL, ensure_ascii=False)}}}'
NOW = '{"name": "now", "arguments": {}}'
INDENTED = json.dumps({"name": "get_weather", "arguments": FULL}, indent=2)
WITH_MARKERS = '{"name": "get_weather", "arguments": {"city": "<tool_call> ``` </tool_call>"}}'
CALLS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "bare": (WEATHER, [("get_weather", FULL)]),
    "spaces": (f"\n {WEATHER} \n", [("get_weather", FULL)]),
    "indented": (INDENTED, [("get_weather", FULL)]),
    "fence": (f"```json\n{INDENTED}\n```", [("get_weather", FULL)]),
    "fence without a language": (f"```\n{WEATHER}\n```\n", [("get_weather", FULL)]),
    "fence in one line": (f"``` {NOW} ```", [("now", {})]),
    "fence that is not closed": (f"```json\n{WEATHER}\n", [("get_weather", FULL)]),
    "list": (f"[{WEATHER}, {NOW}]", [("get_weather", FULL), ("now", {})]),
    "list of one": (f"[\n{NOW}\n]", [("now", {})]),
    "list in a fence": (f"```json\n[\n  {WEATHER},\n  {NOW}\n]\n```", [("get_weather", FULL), ("now", {})]),
    "one after the other": (f"{WEATHER}\n{NOW}", [("get_weather", FULL), ("now", {})]),
    "arguments first": ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', [("get_weather", PARIS)]),
    "parameters": ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [("get_weather", PARIS)]),
    "arguments as text": (
        json.dumps({"name": "get_weather", "arguments": json.dumps(PARIS)}),
        [("get_weather", PARIS)],
    ),
    "id": (f'{{"id": "1", {NOW[1:]}', [("now", {})]),
    "doubled braces, as Qwen2.5-Coder's template shows them": (f"{{{NOW}}}", [("now", {})]),
    "markers in a string": (WITH_MARKERS, [("get_weather", {"city": "<tool_call> ``` </tool_call>"})]),
}
# No calls, and the start of each that might still have become one.
TEXTS = {
    "other object": ('{"title": "get_weather"}', '{"t'),
    "other name": ('{"name": "get_weathers", "arguments": {}}', '{"name": "get_weather'),
    "start of a name": ('{"name": "get_weath", "arguments": {}}', '{"name": "get_weath'),
    "other key": (f'{{"role": "x", {NOW[1:]}', '{"'),
    "no arguments": ('{"name": "now"}', '{"name": "now"'),
    "arguments twice": ('{"arguments": {}, "parameters": {}, "name": "now"}', '{"arguments": {}, "'),
    "arguments in a list": ('{"name": "now", "arguments": []}', '{"name": "now", "arguments": '),
    "bad JSON": ('{"name": "now", "arguments": {x}}', '{"name": "now", "arguments": {'),
    "text after it": (f"{NOW} is what I call.", f"{NOW} "),
    "text before it": (f"I call {NOW}", ""),
    "text after a fence": (f"```json\n{NOW}\n```\nThis calls it.", f"```json\n{NOW}\n```\n"),
    "two fences": (f"```\n{NOW}\n```\n```\n{NOW}\n```", f"```\n{NOW}\n```\n"),
    "Python": ("```python\nnow()\n```", "```python\n"),
    "inline code": ("`now()`", "`"),
    "numbers": ("[1, 2]", "["),
    "empty list": ("[]", "["),
    "list with something else": (f"[{NOW}, 1]", f"[{NOW}, "),
    "trailing comma": (f"[{NOW},]", f"[{NOW},"),
    "braces doubled before it only": (f"{{{NOW}", f"{{{NOW}"),
    "cut off": (WEATHER[:-1], WEATHER[:-1]),
    "list that is cut off": (f"[{NOW}", f"[{NOW}"),
}
for _name in ("NaN", "-Infinity"):  # Python reads them, and no other program
    _text = json.dumps({"name": "get_weather", "arguments": f'{{"days": {_name}}}'})
    TEXTS[f"{_name} in arguments as text"] = (_text, _text[:-2])
MARKED = ("Hermes", "Mistral list", "Mistral args", "DeepSeek V3.1", "Qwen3-Coder", "GLM")


@lru_cache
def form_of(name: str) -> ChatFormat:
    family = FAMILIES[name]
    return ChatFormat.of(renderer(family.template), ByteVocabulary(family.specials).special_id)


def parser_of(name: str, lenient: bool = True, **options: Any) -> ChatParser:
    settings = {"prompt_tail": FAMILIES[name].tail, "stream_calls": True, "lenient": lenient, **options}
    return form_of(name).parser(TOOLS, settings.pop("choice", "auto"), **settings)


def parse(name: str, text: str, **options: Any) -> ChatMessage:
    """The answer; the same for every cut."""
    answers = []
    for parts in cuts(text, everywhere=True):
        parser = parser_of(name, **options)
        answer = ChatMessage([*map(parser.feed, parts), parser.finish()])
        answers.append((answer.content, answer.reasoning, calls_of(answer)))
        assert answers[-1] == answers[0], parts
    return answer


def calls_of(answer: ChatMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize("case", CALLS)
def test_plain_json_is_read_as_calls(case: str) -> None:
    text, calls = CALLS[case]
    answer = parse("Hermes", text)
    assert (calls_of(answer), answer.content) == (calls, "")
    assert len({call.id for call in answer.tool_calls}) == len(calls)
    assert [json.loads(call.arguments_text) for call in answer.tool_calls] == [
        arguments for _, arguments in calls
    ]


def test_marked_arguments_as_text_that_are_no_json_are_content() -> None:
    call = json.dumps({"name": "get_weather", "arguments": '{"days": NaN}'})
    text = f"<tool_call>\n{call}\n</tool_call>"
    answer = parse("Hermes", text, stream_calls=False)
    assert (answer.content, answer.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("parameters", "is_kept"),
    [
        ({}, False),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {}, "additionalProperties": False}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object", "additionalProperties": {"type": "string"}}, True),
        ({"type": "object", "patternProperties": {"^t": {}}}, True),
        ({"type": "object", "properties": {"type": {"type": "string"}}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, True),
    ],
    ids=str,
)
def test_a_tool_without_parameters_gets_none(parameters: dict[str, Any], is_kept: bool) -> None:
    """Qwen2.5-Coder repeats the schema that it was shown."""
    schema = {"type": "object", "properties": {}}
    text = json.dumps({"name": "now", "arguments": schema})
    parser = form_of("Hermes").parser(
        [Tool("now", "The time.", parameters)], "auto", prompt_tail=HERMES.tail, lenient=True
    )
    answer = ChatMessage([parser.feed(text), parser.finish()])
    assert calls_of(answer) == [("now", schema if is_kept else {})]


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_held_back_only_while_it_may_become_a_call(case: str) -> None:
    text, held = TEXTS[case]
    answer = parse("Hermes", text)
    assert (answer.content, answer.tool_calls) == (text, ())
    parser = parser_of("Hermes")
    shown = ""
    for i, character in enumerate(text):
        shown += parser.feed(character).content
        assert shown == ("" if i < len(held) else text[: i + 1].rstrip()), (i, shown)


@pytest.mark.parametrize("case", [*CALLS, *TEXTS])
def test_strict_reads_none_of_them(case: str) -> None:
    text = (CALLS | TEXTS)[case][0]
    if "<tool_call>" not in text:
        answer = parse("Hermes", text, lenient=False)
        assert (answer.content, answer.tool_calls) == (text, ())


@pytest.mark.parametrize("name", MARKED)
def test_every_family_with_markers(name: str) -> None:
    for text, calls in (CALLS["fence"], CALLS["list"]):
        assert calls_of(parse(name, text)) == calls
    family = FAMILIES[name]
    assert calls_of(parse(name, family.full)) == [("get_weather", FULL)]
    assert calls_of(parse(name, f"{NOW}\n{family.paris}")) == [("get_weather", PARIS)]
    for text in (family.unknown, *family.broken):
        assert parse(name, text, stream_calls=False).content == family.visible(text)


def test_a_family_whose_calls_are_plain_json() -> None:
    """Its own form is streamed; a list and a fence are read, too."""
    for case in ("fence", "list", "fence without a language"):
        assert calls_of(parse("Llama", CALLS[case][0])) == CALLS[case][1]
    parser = parser_of("Llama")
    assert sum(bool(parser.feed(c).tool_calls) for c in FAMILIES["Llama"].full) > 10


def test_one_call_where_several_are_not_allowed() -> None:
    for case in ("list", "one after the other", "list in a fence"):
        text = CALLS[case][0]
        answer = parse("Hermes", text, parallel=False)
        assert (answer.content, answer.tool_calls) == (text, ())
    assert calls_of(parse("Hermes", CALLS["list of one"][0], parallel=False)) == [("now", {})]


def test_calls_after_reasoning_are_read() -> None:
    answer = parse("Hermes", f"<think>\nHm.\n</think>\n\n{CALLS['fence'][0]}")
    assert (answer.reasoning, answer.content, calls_of(answer)) == ("Hm.", "", [("get_weather", FULL)])


@pytest.mark.parametrize("choice", ["none", "required", "now"])
def test_other_choices_read_none(choice: str) -> None:
    parser = parser_of("Hermes", choice=choice)
    assert parser.feed(NOW).tool_calls == parser.finish().tool_calls == ()


def test_names_with_dots_and_of_one_that_begins_another() -> None:
    tools = (Tool("fs.read"), Tool("fs.read_all"), Tool("fs"))
    form = form_of("Hermes")
    for tool in tools:
        parser = form.parser(tools, "auto", prompt_tail=HERMES.tail, lenient=True)
        text = f'{{"name": "{tool.name}", "arguments": {{}}}}'
        answer = ChatMessage([*map(parser.feed, text), parser.finish()])
        assert [call.name for call in answer.tool_calls] == [tool.name]


@pytest.mark.parametrize("whitespace", ["spaced", "compact", "flexible"])
def test_a_plain_call_stays_possible_beside_a_schema(whitespace: str) -> None:
    vocabulary = ByteVocabulary(())
    form = ChatFormat.of(renderer(HERMES.template), vocabulary.special_id)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert differs_from_calls(schema) and differs_from_calls({"type": "object"})
    options: dict[str, Any] = {"prompt_tail": "", "schema": schema, "whitespace": whitespace, "plain": True}
    grammar = form.grammar(TOOLS, "auto", True, **options)
    assert grammar is not None
    wrong = '{"name": "get_weathers", "arguments": {"city": "Paris"}}'
    for text in (
        '{"city":"Paris"}' if whitespace == "compact" else '{"city": "Paris"}',
        HERMES.paris,
        NOW,
        '{"name":"get_weather","arguments":{"city":"Paris"}}',
    ):
        assert vocabulary.accepted(grammar, text) == (text, True)
    assert vocabulary.accepted(grammar, wrong)[0] != wrong
    for choice in ("required", "now", "none"):
        grammar = form.grammar(TOOLS, choice, True, **options)
        assert grammar is not None and vocabulary.accepted(grammar, NOW)[0] != NOW


def test_a_schema_that_has_the_members_of_a_call_is_no_call() -> None:
    members = {"name": {"type": "string"}, "arguments": {"type": "object"}}
    assert not differs_from_calls({"type": "object", "properties": members})
    assert not differs_from_calls({"$defs": {"a": {"properties": members}}, "$ref": "#/$defs/a"})

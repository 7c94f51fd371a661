"""Every template of the pinned llama.cpp: what it writes as calls is allowed by its grammar, and read by its parser."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_families import FULL, PARIS, TOOLS
from support.chat_templates import ByteVocabulary, names, parse_answer, renderer, template

from llamapipe.chat._template_probe import common_start
from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.template import ChatTemplate
from llamapipe.chat.tools import check_tools
from llamapipe.errors import InvalidRequestError

# These show no tools, or calls in messages of a format that is not understood.
WITHOUT_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "google-gemma-2-2b-it",
    "google-translategemma-4b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
EOG = ("<|eom_id|>", "<|END_OF_TURN_TOKEN|>", "<｜hy_eos:opensource｜>")


@pytest.mark.parametrize("name", names())
def test_calls_as_the_template_writes_them(name: str) -> None:
    vocabulary = ByteVocabulary(EOG)
    form = ChatFormat.of(renderer(name), vocabulary.special_id, lambda token: token >= 256)
    assert form.supports_tools == (name not in WITHOUT_TOOLS)
    if form.calls is None:
        return
    tail = f"{form.reasoning.start}{form.reasoning.end}" if form.reasoning else form.calls.prompted
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("abcdefgh1", "get_weather", FULL),
        ("abcdefgh2", "now", {}),
    ]
    for n in (1, 2) if form.calls.parallel else (1,):
        text = form.calls.written(calls[:n]).removeprefix("" if form.reasoning else tail)
        for choice in ("auto", "required"):
            grammar = form.grammar(TOOLS, choice, True, prompt_tail=tail)
            assert grammar is not None and vocabulary.accepted(grammar, text) == (text, True)
        answer = parse_answer(form.parser(TOOLS, "auto", prompt_tail=tail), text)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [call[1:] for call in calls[:n]]
        assert (answer.content, answer.reasoning) == ("", "")


@pytest.mark.parametrize("name", names())
def test_a_history_of_calls_is_read_back(name: str) -> None:
    """What the template itself renders of an answer with calls."""
    render = renderer(name)
    vocabulary = ByteVocabulary(EOG)
    form = ChatFormat.of(render, vocabulary.special_id, lambda token: token >= 256)
    if not form.supports_tools:
        return
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    tools = [tool.as_openai() for tool in TOOLS]
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    text = ""
    write = form.calls.written if form.calls is not None and form.calls.in_content else None
    for content in ("", None):  # one template wants None
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        if "Paris" not in text:
            chat = [*messages, answer]
            text = template(name).render(chat, tools=tools, add_generation_prompt=False, write_calls=write)
    prompt = render(messages, tools=tools, add_generation_prompt=True)
    text = text[len(common_start(text, prompt)) :]
    tail = form.calls.prompted if form.calls is not None else ""
    calls = parse_answer(form.parser(TOOLS, "auto", prompt_tail=tail), text).tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", PARIS)]


# These want what no conversation of plain messages has: a thought in each answer, languages with each message.
NEEDS_MORE = {"IFM-K2-Horizon", "google-translategemma-4b-it"}
# This one writes the first message of the system before the last one of the user.
SYSTEM_AT_THE_END = {"mistralai-Mistral-Nemo-Instruct-2407"}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("name", [name for name in names() if name not in NEEDS_MORE])
def test_messages_of_the_system_stand_where_they_were_given(name: str) -> None:
    for role in ("system", "developer"):
        check_places(name, role)


def check_places(name: str, role: str) -> None:
    first, late = said(role, "Qfirst."), said(role, "Qlate.")
    user, answer, again = said("user", "Qask."), said("assistant", "Qreply."), said("user", "Qagain.")
    for chat in (
        [first, user, answer, late, again],
        [first, user, answer, late],
        [first, user, late, answer, again],
        [first, user, late],
        [user, answer, late, again],
        [first, late, user],
        [said("system", "Qfirst."), said("developer", "Qlate."), user],
        [first, user, answer, late, said(role, "Qlater."), again],
        [first, user],
    ):
        text = template(name).render(chat)
        shown = [message for message in chat if message is not first or name not in SYSTEM_AT_THE_END]
        places = [text.rfind(message["content"]) for message in shown]
        assert places == sorted(places) and places[0] >= 0, (chat, text)
        assert first["content"] in text or first not in chat


@pytest.mark.parametrize("name", names())
def test_a_message_of_the_system_after_a_tool_is_not_lost(name: str) -> None:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "now", "arguments": {}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Qthought."}
    result = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "now", "content": "Qresult."}
    chat = [said("user", "Qask."), calls, result]
    definitions = [tool.as_openai() for tool in TOOLS]
    try:
        before = template(name).render(chat, tools=definitions)
    except InvalidRequestError:
        return  # it refuses the conversation without that message, too
    text = template(name).render([*chat, said("system", "Qlate.")], tools=definitions)
    result_at = text.rfind("Qresult.") if "Qresult." in before else text.rfind("Qask.") + 1
    assert text.rfind("Qask.") < result_at < text.rfind("Qlate.")


@pytest.mark.parametrize("name", names())
def test_arguments_that_are_no_object_are_shown_as_they_are(name: str) -> None:
    def chat(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "now", "arguments": arguments}}
        calls = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Qthought."}
        return [said("user", "Qask."), calls]

    definitions = [tool.as_openai() for tool in TOOLS]
    try:
        whole = template(name).render(chat({"qxkey": "qxvalue"}), tools=definitions)
    except InvalidRequestError:
        return  # it refuses calls without a result, or any
    samples: tuple[Any, ...] = ('{"city": "Par', "[1, 2", '"x"', "null", "x", [], None)
    for arguments in samples:
        text = template(name).render(chat(arguments), tools=definitions)
        if "qxvalue" in whole and arguments is not None:
            assert (arguments if isinstance(arguments, str) else "[]") in text


DEFINITIONS = {
    "Place": {"type": "object", "properties": {"a": {"type": "string"}}},
    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
}
_STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PARAMETERS: list[Any] = [
    True,
    False,
    {},
    {"description": "x"},
    {"type": "null"},
    {"type": ["string"]},
    {"type": ["string", "null"], "default": None},
    {"type": ["string", "integer", "null"]},
    {"enum": ["a", 1, None]},
    {"const": 1},
    _STRING_OR_NULL,
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"$ref": "#/$defs/Place"}]},
    {"$ref": "#/$defs/Place"},
    {"$ref": "#/$defs/Node"},
    {"not": {"type": "string"}},
    {"properties": {"y": {"type": "string"}}},
    {"items": {"type": "string"}},
    {"type": "object"},
    {"type": "object", "additionalProperties": True},
    {"type": "object", "properties": {"y": {}, "z": True}},
    {"type": ["object", "null"], "properties": {"y": {"type": ["array", "null"], "items": {}}}},
    {"type": "array"},
    {"type": "array", "items": True},
    {"type": "array", "items": {"type": "array", "items": {}}},
    {"type": "array", "items": _STRING_OR_NULL},
    {"type": "array", "prefixItems": [{"type": "string"}, {}, True]},
    {"anyOf": [{"type": "array", "items": {"anyOf": [{"type": "string"}, True]}}, {"$ref": "#/$defs/Node"}]},
]


@pytest.mark.parametrize("name", names())
def test_parameters_of_every_form_are_shown(name: str) -> None:
    """Macros of templates that convert types may know no list of types, no null and no schema that is True."""

    def shown(schema: Any) -> str:
        parameters = {"type": "object", "properties": {"Qxparameter": schema}, "$defs": DEFINITIONS}
        tools = check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        return template(name).render([said("user", "Hi")], tools=[tool.as_openai() for tool in tools])

    if name in WITHOUT_TOOLS:
        return
    is_shown = "Qxparameter" in shown({"type": "string"})
    for schema in PARAMETERS:
        text = shown(schema)  # functionary leaves out parameters whose schema is True or False
        assert ("Qxparameter" in text) == is_shown or (isinstance(schema, bool) and "functionary" in name)


def test_parameters_that_a_template_refuses_are_named() -> None:
    source = (
        "{% macro kind(s) %}{{ 'int' if s.format == 'int' else kind(s) }}{% endmacro %}"
        "{% for t in tools %}{% for k, v in t.function.parameters.properties.items() %}{{ k }}: {{ kind(v) }}"
        "{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    properties = {"n": {"format": "int"}, "when": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
    functions = [
        {"name": "first", "parameters": {"type": "object", "properties": {"n": {"format": "int"}}}},
        {"name": "second", "parameters": {"type": "object", "properties": properties}},
    ]
    chat_template = ChatTemplate(source)
    tools = [{"type": "function", "function": function} for function in functions]
    assert chat_template.render([said("user", "Hi")], tools=tools[:1]) == "n: intHi"
    with pytest.raises(InvalidRequestError, match="the parameter 'when' of the tool 'second'"):
        chat_template.render([said("user", "Hi")], tools=tools)

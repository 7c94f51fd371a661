"""Arguments between markers of their own: schemas are followed, or refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.chat_families import FAMILIES
from support.chat_templates import ByteVocabulary, renderer

from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.results import ChatMessage
from llamapipe.chat.tools import Tool
from llamapipe.errors import InvalidRequestError

FAMILY = FAMILIES["Qwen3-Coder"]
VOCABULARY = ByteVocabulary(FAMILY.specials)
FORMAT = ChatFormat.of(renderer(FAMILY.template), VOCABULARY.special_id)


def of(properties: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **others}


def accepts(parameters: dict[str, Any], **arguments: str) -> bool:
    """Whether a call with these arguments is allowed. Raises InvalidRequestError."""
    grammar = FORMAT.grammar((Tool("f", "", parameters),), "required", True, prompt_tail=FAMILY.tail)
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    assert grammar is not None
    return VOCABULARY.accepts(grammar, f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"allOf": [{"type": "integer"}]}, "3", "x y"),
        ({"allOf": [{"$ref": "#/$defs/E"}], "description": "one of two"}, "p", "zzz"),
        ({"type": "string", "enum": ["x", None, 3]}, "x", "3"),
        ({"type": ["string", "null"], "enum": ["x", None]}, "null", "y"),
        ({"$ref": "#/$defs/any"}, "x", None),
        ({"$ref": "#/$defs/either/anyOf/1"}, "7", "x"),
        ({"$ref": "#/$defs/with%20space"}, "7", "x"),
        ({"type": "string", "format": "date"}, "2026-11-23", "x"),
        ({"type": "string", "format": "path"}, "a/b", None),
        ({"type": "string", "format": "date-time"}, "2026-11-23t23:59:60z", "2026-11-31T00:00:00Z"),
        ({"type": "string", "format": "email"}, "a.b.c+d@mail.my-company.co.uk", "a@"),
        ({"type": "string", "format": "uri"}, "http://[::1]:65535/a%20b?c=d#e", "x y"),
        # An anchor belongs to its option; a match may stand anywhere.
        ({"type": "string", "pattern": "^a|b$"}, "ax", "xa"),
        ({"type": "string", "pattern": "^a|b$"}, "xb", "bx"),
        ({"type": "string", "pattern": "/(?=[a-c])"}, "x/b", "x/d"),
        ({"type": "string", "pattern": r"^\w+$"}, "Müller", "a b"),
    ],
)
def test_schemas_that_are_followed(schema: dict[str, Any], good: str, bad: str | None) -> None:
    shared = {
        "E": {"enum": ["p", "q"], "type": "string"},
        "any": True,
        "either": {"anyOf": [{"type": "boolean"}, {"type": "integer"}]},
        "with space": {"type": "integer"},
    }
    parameters = of({"a": schema}, required=["a"], **{"$defs": shared})
    assert accepts(parameters, a=good)
    assert bad is None or not accepts(parameters, a=bad)


@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM", "Gemma 4", "MiniMax M3", "LFM 2.5", "Kimi K3"])
@pytest.mark.parametrize("key", ["Content-Type", "a.b", "First Name", "größe", "1", "$ref", "a/b", "a" * 60])
def test_names_that_no_schema_lists(name: str, key: str) -> None:
    """The mask does not turn them into other names, neither of arguments nor of members of an object."""
    family = FAMILIES[name]
    vocabulary = ByteVocabulary(family.specials)
    form = ChatFormat.of(renderer(family.template), vocabulary.special_id)
    assert form.calls is not None
    tail = family.tail + "".join(family.think or ())
    whole, inner = of({}, additionalProperties=True), of({"headers": {"type": "object"}})
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [(inner, {"headers": {key: "x"}})]
    if name != "LFM 2.5" or (" " not in key and "/" not in key):  # names of arguments in Python
        cases.append((whole, {key: "x"}))
    for parameters, arguments in cases:
        tools = (Tool("get_weather", "", parameters),)
        said = form.calls.written([("functions.get_weather:0", "get_weather", arguments)])
        grammar = form.grammar(tools, "required", True, prompt_tail=tail)
        assert grammar is not None and vocabulary.accepts(grammar, said), said
        parser = form.parser(tools, "required", prompt_tail=tail)
        (call,) = ChatMessage([parser.feed(said), parser.finish()]).tool_calls
        assert call.arguments == arguments


def test_arguments_without_names_follow_their_schema() -> None:
    parameters = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert accepts(parameters, a="3") and not accepts(parameters, a="x")


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        (
            of({"a": {"type": "string", "not": {"const": "x"}}}),
            "'not' cannot be enforced .* at #/properties/a",
        ),
        (of({"a": False}, required=["a"]), "'a' is required, but no value satisfies its schema"),
        (of({"a": {"enum": [1], "type": "string"}}, required=["a"]), "'a' is required, but no value"),
        (of({"a": {"enum": ["x", "y"], "pattern": "x"}}), "'pattern' cannot be combined with 'enum'"),
        (of({"a": {"$ref": "#/$defs/none"}}), "no schema at the reference '#/"),
        (of({"a": {"type": "string"}}, minProperties=1), "'minProperties' at the top"),
        (of(None), "'properties' is None; it must be an object"),
        (of({"a": {"$ref": "#/properties/a"}}), "refers to itself"),
        (of({"a>b": {"type": "string"}}), "must not be called 'a>b'"),
    ],
)
def test_schemas_that_are_refused(parameters: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        accepts(parameters, a="x")


QUOTED = '"quoted"\\ \t\x01'
TEXTS = ("", "a", "\n", "\n\n", "\na\n", QUOTED, "é\U0001f600", "<para", "</para", "a\n</param\n", "null")


@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_string_is_passed_on_as_it_comes(name: str, text: str) -> None:
    """In parts, whose sum is what a whole call gives, however the text is cut; a cut call has what came of it."""
    family = FAMILIES[name]
    form = ChatFormat.of(renderer(family.template), ByteVocabulary(family.specials).special_id)
    assert form.calls is not None
    key, end = form.calls.key_end, form.calls.value_end
    parameters = of({"s": {"type": "string"}, "t": {"type": ["string", "null"]}, "n": {"type": "integer"}})
    tools = (Tool("get_weather", "", parameters),)
    start = form.calls.key_start
    pairs = "".join(start + k + key + v + end for k, v in (("s", text), ("n", "5"), ("t", text)))
    said = form.calls.opening + "get_weather" + form.calls.after_name + pairs + form.calls.call_end
    expected = {"s": text, "n": 5, "t": None if text == "null" else text}

    def parts(said: str, stream_calls: bool) -> list[Any]:
        parser = form.parser(tools, "auto", prompt_tail=family.tail, stream_calls=stream_calls)
        pieces = [*map(parser.feed, said), parser.finish(cut_off=True)]
        return [delta for piece in pieces for delta in piece.tool_calls]

    for streams in (False, True):
        deltas = parts(said, streams)
        assert json.loads("".join(delta.arguments for delta in deltas)) == expected
    long = said.replace(start + "s" + key + text + end, start + "s" + key + "word " * 50 + end, 1)
    assert len(parts(long, True)) > 200
    cut = "".join(delta.arguments for delta in parts(long[: long.index("word ") + 12], True))
    assert cut == '{"s": "word word wo'


CALLS = {
    "Qwen3-Coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "GLM": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "value",
    [["</parameter>", "b"], [{"c": "\n</arg_value>\n</tool_call>"}], ["\\", '</parameter>"</arg_value>']],
)
def test_a_value_of_json_may_contain_its_end(name: str, value: Any) -> None:
    """The grammar allows it inside a string, so it does not end the value."""
    family = FAMILIES[name]
    vocabulary = ByteVocabulary(())  # the markers as text
    form = ChatFormat.of(renderer(family.template), vocabulary.special_id)
    tools = (Tool("f", "", of({"a": {"type": "array"}, "b": {"type": "string"}})),)
    text = CALLS[name].format(json.dumps(value))
    grammar = form.grammar(tools, "required", True, prompt_tail=family.tail)
    assert grammar is not None and vocabulary.accepts(grammar, text)
    for parts in ([text], list(text)):
        parser = form.parser(tools, "auto", prompt_tail=family.tail, stream_calls=True)
        answer = ChatMessage([*map(parser.feed, parts), parser.finish()])
        assert [call.arguments for call in answer.tool_calls] == [{"a": value, "b": "x"}]
        assert answer.content == ""


def read(schema: Any, text: str) -> ChatMessage:
    """The answer that consists of one call with this text as its argument."""
    parser = FORMAT.parser((Tool("f", "", of({"a": schema})),), "auto", prompt_tail=FAMILY.tail)
    said = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    return ChatMessage([parser.feed(said), parser.finish()])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "number"}, "1e400", 10**400),
        ({"type": "object"}, '{"b": [-1.5e400]}', {"b": [-15 * 10**399]}),
        ({}, "1e400", 10**400),
        ({}, "NaN", "NaN"),
        ({}, "-Infinity", "-Infinity"),
        ({}, "1e5000", "1e5000"),
        ({}, "-1e99999999999999999999", "-1e99999999999999999999"),
        ({"anyOf": [{"type": "number", "multipleOf": 0.5}, {"type": "string"}]}, "1e400", 10**400),
        ({"anyOf": [{"type": "number", "multipleOf": 0.1}, {"type": "string"}]}, "0.3", 0.3),
        ({"anyOf": [{"type": "number", "multipleOf": 0.1}, {"type": "string"}]}, "0.35", "0.35"),
        ({"anyOf": [{"type": "number", "multipleOf": 0}, {"type": "string"}]}, "3", "3"),
    ],
)
def test_numbers_that_floats_cannot_hold(schema: Any, text: str, value: Any) -> None:
    """The arguments are JSON, which has no Infinity, and the value is the one that was written."""
    (call,) = read(schema, text).tool_calls
    assert call.arguments == {"a": value}
    assert call.arguments_text == json.dumps({"a": value})


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number"}, "NaN"),
        ({"type": "array"}, "[Infinity]"),
        ({"type": "number"}, "1e5000"),
        ({"type": "number"}, "1e99999999999999999999"),
    ],
)
def test_what_is_no_number_in_json_is_no_argument(schema: Any, text: str) -> None:
    answer = read(schema, text)
    assert answer.tool_calls == () and text in answer.content


@pytest.mark.parametrize("name", ["Qwen3-Coder", "MiniMax M3"])
def test_types_are_kept_where_a_schema_cannot_be_followed(name: str) -> None:
    """A string that looks like another value stays a string, whatever another argument of the tool is."""
    properties = {
        "list": {"type": ["string", "array"], "items": {"type": "string"}},
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "ref": {"$ref": "#/$defs/S"},
        "one": {"enum": ["1", "2"]},
        "circle": {"$ref": "#/$defs/C"},
        "count": {"type": "integer"},
    }
    definitions = {"S": {"type": "string"}, "C": {"anyOf": [{"$ref": "#/$defs/C"}, {"type": "string"}]}}
    tool = Tool("get_weather", "", of(properties, **{"$defs": definitions}))
    family = FAMILIES[name]
    vocabulary = ByteVocabulary(family.specials)
    form = ChatFormat.of(renderer(family.template), vocabulary.special_id)
    assert form.calls is not None
    with pytest.raises(InvalidRequestError, match="refers to itself"):
        form.grammar((tool,), "auto", True, prompt_tail=family.tail)
    relaxed = form.relaxed(tool, keeps_types=True)
    assert relaxed.parameters["properties"]["zip"] == {"type": ["null", "string"]}
    arguments = {"list": "1", "zip": "12345", "ref": "1", "one": "2", "count": 3}
    said = form.calls.written([("", "get_weather", arguments)])
    grammar = form.grammar((relaxed,), "auto", True, prompt_tail=family.tail)
    assert grammar is not None and vocabulary.accepts(grammar, said)
    for either in (relaxed, tool):
        parser = form.parser((either,), "auto", prompt_tail=family.tail)
        (call,) = ChatMessage([parser.feed(said), parser.finish()]).tool_calls
        assert call.arguments == arguments


@pytest.mark.parametrize(
    "circle",
    [{"anyOf": [{"$ref": "#/$defs/C"}, {"type": "string"}]}, {"allOf": [{"$ref": "#/$defs/C"}]}],
)
def test_a_reference_in_a_circle_is_refused(circle: Any) -> None:
    parameters = of({"a": {"$ref": "#/$defs/C"}}, **{"$defs": {"C": circle}})
    with pytest.raises(InvalidRequestError, match="a reference refers to itself"):
        accepts(parameters, a="x")


@pytest.mark.parametrize("name", ["Qwen3-Coder", "MiniMax M3"])
@pytest.mark.parametrize(
    "others",
    [{"anyOf": [{"properties": {"b": {"type": "string"}}}]}, {"patternProperties": {"^b": {}}}],
    ids=str,
)
def test_names_that_other_keywords_allow_are_allowed(name: str, others: dict[str, Any]) -> None:
    """Also where the rest of the schema cannot be followed."""
    family = FAMILIES[name]
    vocabulary = ByteVocabulary(family.specials)
    form = ChatFormat.of(renderer(family.template), vocabulary.special_id)
    assert form.calls is not None
    tool = Tool("get_weather", "", of({"a": {"type": "string"}}, **others))
    with pytest.raises(InvalidRequestError, match="at the top level"):
        form.grammar((tool,), "auto", True, prompt_tail=family.tail)
    grammar = form.grammar((form.relaxed(tool, keeps_types=True),), "auto", True, prompt_tail=family.tail)
    said = form.calls.written([("", "get_weather", {"a": "x", "b": "y"})])
    assert grammar is not None and vocabulary.accepts(grammar, said)


@pytest.mark.parametrize("kinds", [["string", None], [1, "string"], ["string", ["array"]], [{}]])
def test_a_type_that_is_no_name_leaves_any_value(kinds: Any) -> None:
    """The types of the other arguments stay."""
    tool = Tool("f", "", of({"a": {"type": kinds}, "b": {"type": "string"}}))
    properties = FORMAT.relaxed(tool, keeps_types=True).parameters["properties"]
    assert properties == {"a": {}, "b": {"type": "string"}}


@pytest.mark.parametrize("name", ["Qwen3-Coder", "MiniMax M3", "Gemma 4", "LFM 2.5", "Kimi K3"])
def test_objects_that_hold_themselves(name: str) -> None:
    family = FAMILIES[name]
    vocabulary = ByteVocabulary(family.specials)
    form = ChatFormat.of(renderer(family.template), vocabulary.special_id)
    assert form.calls is not None
    ref = {"$ref": "#/$defs/T"}
    tree = of(
        {"v": {"type": "integer"}, "kids": {"type": "array", "items": ref}, "next": ref}, required=["v"]
    )
    tools = (Tool("get_weather", "", of({"t": ref}, **{"$defs": {"T": tree}})),)
    tail = family.tail + "".join(family.think or ())
    grammar = form.grammar(tools, "required", True, prompt_tail=tail)
    assert grammar is not None
    value = {"v": 1, "kids": [{"v": 2}, {"v": 3, "next": {"v": 4, "kids": [{"v": 5}]}}]}
    for arguments, is_valid in (({"t": value}, True), ({"t": {**value, "next": {}}}, False)):
        said = form.calls.written([("functions.get_weather:0", "get_weather", arguments)])
        assert vocabulary.accepts(grammar, said) == is_valid
        parser = form.parser(tools, "required", prompt_tail=tail)
        (call,) = ChatMessage([parser.feed(said), parser.finish()]).tool_calls
        assert call.arguments == arguments


def test_alternatives_that_references_multiply_are_bounded() -> None:
    ends = [f"#/$defs/d{i + 1}" for i in range(40)]
    twice = {f"d{i}": {"anyOf": [{"$ref": end}, {"$ref": end, "maxLength": 9}]} for i, end in enumerate(ends)}
    parameters = of({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": {**twice, "d40": {"type": "string"}}})
    with pytest.raises(InvalidRequestError, match="'anyOf' has more than 2000 alternatives"):
        accepts(parameters, a="x")


def test_alternatives_may_not_be_nested_without_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        schema = {"anyOf": [schema]}
    with pytest.raises(InvalidRequestError, match="'anyOf' is nested in more than 50 others"):
        accepts(of({"a": schema}), a="x")


def test_an_object_that_no_alternative_allows_is_text() -> None:
    schema = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"b": False}}]}
    (call,) = read(schema, '{"b": 1}').tool_calls
    assert call.arguments == {"a": '{"b": 1}'}

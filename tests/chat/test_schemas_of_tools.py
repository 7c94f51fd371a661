"""Schemas as APIs write them, in every style of calls: the mask allows what they allow, and values stay as they are."""

from __future__ import annotations

import itertools
import json
import logging
from functools import cache
from time import thread_time
from typing import Any

import jsonschema
import pytest
from support.chat_families import FAMILIES
from support.chat_templates import parse_answer, renderer
from support.guided import accepts

import llamapipe as lp
from llamapipe.chat._call_format import CallFormat, Style
from llamapipe.chat._tagged_arguments import TaggedArguments, _both
from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.tools import Tool
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.compile import compile_guide

STYLES = ("Hermes", "Qwen3-Coder", "Gemma 4", "MiniMax M3", "LFM 2.5")


def of(properties: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **others}


DEFINITIONS = {
    "short": {"type": "string", "maxLength": 1},
    "few": {"type": "integer", "minimum": 0, "maximum": 3},
    "letter": {"enum": ["x", "y"]},
    "two": of({"a": {"type": "integer"}, "b": {"type": "integer"}}, required=["a"]),
    "Map«string,object»": {"type": "integer"},
    "Page<Item>": {"type": "integer"},
    "Page[Item]": {"type": "integer"},
    "100%": {"type": "integer"},
    "C#": {"type": "integer"},
}
KEYED = [of({"v": {"type": kind}}, required=["v"]) for kind in ("integer", "string")]
# The schema of an argument, and values that are written and read, or must not be written.
CASES: dict[str, tuple[Any, list[Any]]] = {
    "keywords beside anyOf": ({"type": "string", "anyOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, ["a", "c", 1]),
    "length beside anyOf": ({"maxLength": 1, "type": "string", "anyOf": [{"pattern": "a"}, {"enum": ["b"]}]}, ["aa"]),
    "enum beside anyOf": ({"enum": ["x", "y", 1], "anyOf": [{"type": "string"}, {"const": "z"}]}, ["x", "z", 1]),
    "anyOf and oneOf": ({"anyOf": [{"type": "integer"}, {"type": "boolean"}], "oneOf": [{"type": "boolean"}]}, [1]),
    "enum and bounds": ({"enum": [1, 2, 3], "minimum": 2}, [1, 2]),
    "enum and length": ({"enum": ["a", "bb"], "minLength": 2}, ["a", "bb"]),
    "enum and const": ({"enum": ["x", "y"], "const": "y"}, ["x", "y"]),
    "reference and length": ({"$ref": "#/$defs/short", "maxLength": 3}, ["x", "xx"]),
    "reference and bound": ({"$ref": "#/$defs/few", "maximum": 30}, [2, 8]),
    "reference and enum": ({"$ref": "#/$defs/letter", "enum": ["x", "z"]}, ["x", "y", "z"]),
    "reference and required": ({"$ref": "#/$defs/two", "required": ["b"]}, [{"a": 1, "b": 2}, {"b": 2}, {"a": 1}]),
    "allOf and length": ({"type": "string", "allOf": [{"maxLength": 1}], "maxLength": 5}, ["x", "xx"]),
    "required, not listed": (of({"a": {"type": "integer"}}, required=["b"]), [{"b": 1}, {"a": 1, "b": "x"}, {"a": 1}]),
    "other members": (of({"a": {"type": "string"}}, additionalProperties={"type": "integer"}),
                      [{"a": "x"}, {"a": "x", "b": 1}, {"ab": 1, "b": 2}, {"b": "x"}]),
    "any other members": (of({"a": {"type": "boolean"}}, additionalProperties=True), [{"a": True, "b": "x"}]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}, {"x": "z"}]),
    "member that allows nothing": (of({"x": {"type": "string", "enum": [1]}, "y": {}}), [{"y": 1}, {"x": 1}, {}]),
    "member that is false": (of({"x": False, "y": {"type": "integer"}}), [{"y": 1}, {"x": 1}]),
    "items that allow nothing": ({"type": "array", "items": {"type": "string", "enum": [1]}}, [[], [1], [""]]),
    "alternative that allows nothing": (
        {"anyOf": [{"type": "string", "enum": [1]}, False, {"minimum": 3, "maximum": 2, "type": "integer"},
                   {"type": "boolean"}]}, [True, 1, ""]),
    "nullable": ({"type": "string", "nullable": True, "maxLength": 2}, [None, "x"]),
    "nullable reference": ({"$ref": "#/$defs/few", "nullable": True}, [None, 2, 8]),
    "nullable allOf": ({"allOf": [{"$ref": "#/$defs/two"}], "nullable": True}, [None, {"a": 1}, {"b": 1}]),
    **{f"reference to {name}": ({"$ref": f"#/$defs/{name}"}, [1, "x"]) for name in [*DEFINITIONS][4:]},
    "text that looks like another type": ({"anyOf": KEYED}, [{"v": 1}, {"v": "x"}]),
    "arrays of two types": ({"anyOf": [{"type": "array", "items": {"type": kind}} for kind in ("integer", "string")]},
                            [[1], ["x"], []]),
    "array or object": ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, of({"item": {"const": "x"}})]},
                        [[1], {"item": "x"}, ["y"]]),
    "enum of objects": ({"enum": [{"k": "é", "n": 1}, {"k": "b"}, [1, 2], "x", 3]}, [{"k": "é", "n": 1}, [1, 2], [1]]),
    "array beside its const": ({"anyOf": [{"const": [1]}, {"type": "array", "items": {"type": "integer"}}]},
                               [[1], [1, 2], ["x"]]),
    "discriminator": ({"oneOf": [of({"t": {"const": c}, c: {"type": "integer"}}, required=["t"]) for c in "xy"],
                       "discriminator": {"propertyName": "t"}}, [{"t": "x", "x": 1}, {"t": "y"}, {"x": 1}]),
    "types of allOf": ({"allOf": [of({"a": {"type": "integer"}}), {"required": ["a"]}]}, [{"a": 1}, {}, None, "x"]),
}  # fmt: skip
# Some values cannot be told apart in a text, and some schemas cannot be written: the tool loses its guarantee.
REFUSED = {("Gemma 4", "types of allOf"), ("MiniMax M3", "types of allOf")}


@cache
def form_of(name: str) -> ChatFormat:
    return ChatFormat.of(renderer(FAMILIES[name].template), lambda text: None)


@pytest.mark.parametrize("name", STYLES)
def test_the_mask_allows_what_a_schema_allows(tiny: lp.Model, name: str) -> None:
    form, tail = form_of(name), FAMILIES[name].tail + "".join(FAMILIES[name].think or ())
    assert form.calls is not None
    for case, (schema, values) in CASES.items():
        parameters = of({"a": schema}, required=["a"], **{"$defs": DEFINITIONS})
        tools = (Tool("f", "", parameters),)
        if (name, case) in REFUSED:
            with pytest.raises(InvalidRequestError, match="'allOf'"):
                form.grammar(tools, "required", False, prompt_tail=tail)
            continue
        grammar = form.grammar(tools, "required", False, prompt_tail=tail)
        factory = compile_guide(tiny, lark=grammar)
        for value in values:
            is_valid = jsonschema.Draft202012Validator(parameters).is_valid({"a": value})
            is_valid |= value is None and "nullable" in case
            said = form.calls.written([("1", "f", {"a": value})])
            if name == "LFM 2.5":  # values inside others are JSON
                said = said.replace("True", "true").replace("None", "null")
            assert accepts(tiny, factory.new(), said) == is_valid, (case, value)
            if is_valid:
                answer = parse_answer(form.parser(tools, "required", prompt_tail=tail), said)
                assert [call.arguments for call in answer.tool_calls] == [{"a": value}], (case, value)


@pytest.mark.parametrize("name", STYLES)
def test_arguments_beside_the_listed_ones(tiny: lp.Model, name: str) -> None:
    """Names that begin as another one, and arguments that allow nothing."""
    form, tail = form_of(name), FAMILIES[name].tail + "".join(FAMILIES[name].think or ())
    assert form.calls is not None
    listed = {"a": {"type": "string"}, "abc": {"type": "integer"}, "no": {"enum": []}}
    cases: list[tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]] = [
        (
            {"type": "integer"},
            [{}, {"a": "x"}, {"a": "x", "ab": 1, "b": 2}, {"abc": 1, "abcd": 2}],
            [{"b": "x"}],
        ),
        (True, [{"b": "x"}, {"a": "x", "b": 1}], [{"abc": "x"}]),
        (False, [{"a": "x"}], [{"b": 1}, {"ab": 1}]),
    ]
    for others, right, wrong in cases:
        tools = (Tool("f", "", of(listed, additionalProperties=others)),)
        grammar = form.grammar(tools, "required", False, prompt_tail=tail)
        factory = compile_guide(tiny, lark=grammar)
        for arguments in [*right, *wrong, {"no": 1}, {"no": ""}]:
            said = form.calls.written([("1", "f", arguments)])
            assert accepts(tiny, factory.new(), said) == (arguments in right), (others, arguments)
        for arguments in right:
            answer = parse_answer(
                form.parser(tools, "required", prompt_tail=tail),
                said := form.calls.written([("1", "f", arguments)]),
            )
            assert [call.arguments for call in answer.tool_calls] == [arguments], said


@pytest.mark.parametrize("name", STYLES)
def test_required_arguments_that_are_not_listed(tiny: lp.Model, name: str) -> None:
    form, tail = form_of(name), FAMILIES[name].tail + "".join(FAMILIES[name].think or ())
    assert form.calls is not None
    for parameters, right, wrong in (
        (
            of({"a": {"type": "integer"}}, required=["b"]),
            [{"b": 1}, {"a": 1, "b": "x"}],
            [{"a": 1}, {"b": 1, "c": 1}],
        ),
        (
            of({"a": {}}, required=["b"], additionalProperties={"type": "integer"}),
            [{"b": 1}],
            [{"a": 1}, {"b": "x"}],
        ),
    ):
        grammar = form.grammar((Tool("f", "", parameters),), "required", False, prompt_tail=tail)
        factory = compile_guide(tiny, lark=grammar)
        for arguments in [*right, *wrong]:
            said = form.calls.written([("1", "f", arguments)])
            assert accepts(tiny, factory.new(), said) == (arguments in right), (parameters, arguments)


def test_a_string_that_an_alternative_allows_is_not_converted() -> None:
    """Gemma writes marks around strings, so "1" is no number, whichever alternative is the first."""
    form, tail = form_of("Gemma 4"), FAMILIES["Gemma 4"].tail
    assert form.calls is not None
    arrays = [{"type": "array", "items": {"type": kind}} for kind in ("integer", "string")]
    cases: list[tuple[Any, Any]] = [({"anyOf": KEYED}, {"v": "1"}), ({"anyOf": arrays}, ["1"])]
    for schema, value in cases:
        tools = (Tool("f", "", of({"a": schema})),)
        said = form.calls.written([("1", "f", {"a": value})])
        (call,) = parse_answer(form.parser(tools, "auto", prompt_tail=tail), said).tool_calls
        assert call.arguments == {"a": value}, json.dumps(schema)


def test_items_that_may_repeat_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with caplog.at_level(logging.WARNING, "llamapipe"):
        for _ in range(2):
            form_of("Gemma 4").grammar((Tool("f", "", of({"a": schema})),), "required", False, prompt_tail="")
    assert sum("'uniqueItems' is not enforced" in record.getMessage() for record in caplog.records) <= 1


def test_time_does_not_grow_with_the_alternatives_of_each_level() -> None:
    ref = {"$ref": "#/$defs/J", "title": "a value"}
    objects = [of({"k": ref, name: {"type": "integer"}}) for name in "xyz"]
    parameters = of({"a": {"anyOf": [ref, {"type": "string"}]}}, **{"$defs": {"J": {"anyOf": objects}}})
    for name in ("Qwen3-Coder", "Gemma 4", "MiniMax M3"):
        form, value = form_of(name), {"k": 1}
        assert form.calls is not None
        for _ in range(14):
            value = {"k": value}  # type: ignore[dict-item]
        said = form.calls.written([("1", "f", {"a": value})])
        parser = form.parser((Tool("f", "", parameters),), "auto", prompt_tail=FAMILIES[name].tail)
        began_s = thread_time()
        parse_answer(parser, said)
        assert thread_time() - began_s < 1, name


def test_many_references_to_one_large_schema() -> None:
    values = [f"v{i}" for i in range(5000)]
    schema = {"enum": values, "anyOf": [{"$ref": "#/$defs/e"}] * 1900}
    parameters = of({"a": schema}, **{"$defs": {"e": {"enum": [*values]}}})
    began_s = thread_time()
    grammar = form_of("Gemma 4").grammar((Tool("f", "", parameters),), "required", False, prompt_tail="")
    assert grammar is not None and thread_time() - began_s < 1


_PARTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": ["integer", "null"]},
    {"type": ["number", "array"]},
    {"type": "object"},
    {"enum": [1, "a", True, None, {"a": 1}]},
    {"enum": [True, "ab", [], 2]},
    {"const": 1},
    {"const": True},
    {"minLength": 1, "maxLength": 1},
    {"maxLength": 2, "title": "t"},
    {"pattern": "a"},
    {"pattern": "b"},
    {"minimum": 1},
    {"minimum": 2, "exclusiveMaximum": 3},
    {"exclusiveMaximum": 2},
    {"required": ["a"]},
    {"required": ["b"], "properties": {"a": {"type": "integer"}}},
    {"properties": {"b": {"const": 1}}},
    {"additionalProperties": False, "properties": {"a": {}}},
    {"additionalProperties": {"type": "integer"}},
    {"items": {"type": "integer"}, "minItems": 1},
    {"prefixItems": [{"const": 1}], "maxItems": 2},
    {"anyOf": [{"type": "integer"}, {"minLength": 2}]},
    {"anyOf": [{"required": ["a"]}, {"type": "array"}]},
    {"oneOf": [{"minimum": 2}, {"type": "array"}]},
    {"not": {"const": 1}},
    {"if": {"type": "integer"}, "then": {"minimum": 2}},
    {"if": {"type": "string"}, "else": {"type": "object"}},
]
_VALUES: list[Any] = [
    "",
    "a",
    "ab",
    "b",
    0,
    1,
    2,
    2.5,
    True,
    None,
    [],
    [1],
    [2, 1],
    ["a"],
    {},
    {"a": 1},
    {"a": "a"},
]
_VALUES += [{"b": 1}, {"a": 1, "b": 1}, {"b": "a", "c": 1}]


def test_two_schemas_as_one() -> None:
    """What both allow, for every pair and some triples; also for the alternatives of a schema with others beside."""
    validators = [jsonschema.Draft202012Validator(part) for part in _PARTS]
    valid = [[validator.is_valid(value) for value in _VALUES] for validator in validators]
    arguments = TaggedArguments(CallFormat(Style.TAGGED), {})
    for i, j in itertools.product(range(len(_PARTS)), repeat=2):
        k = (i + 5 * j) % len(_PARTS)
        both = _both(_both(_PARTS[i], _PARTS[j]), _PARTS[k])
        options = arguments.alternatives(both)
        either = [jsonschema.Draft202012Validator(option) for option in options]
        whole = jsonschema.Draft202012Validator(both)
        for n, value in enumerate(_VALUES):
            expected = valid[i][n] and valid[j][n] and valid[k][n]
            assert whole.is_valid(value) == expected, (_PARTS[i], _PARTS[j], _PARTS[k], value)
            if "oneOf" not in json.dumps(both):
                assert any(option.is_valid(value) for option in either) == expected, (both, options, value)

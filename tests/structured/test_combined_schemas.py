"""Keywords that deny or combine schemas: the mask against jsonschema, value by value.

Two rules: what a schema allows, the mask allows, in some order of members; and where it allows more, it warns.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.guided import accepts

import llamapipe as lp
from llamapipe.errors import InvalidRequestError
from llamapipe.structured import _logic
from llamapipe.structured._logic import others_than, without_logic
from llamapipe.structured.compile import compile_guide
from llamapipe.structured.schema import closed_objects

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from keyword_table import PAGE, with_table

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
AB = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}}
KIND = {"properties": {"kind": {"enum": ["x", "y"]}, "v": {}, "w": {}}, "type": "object"}
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        -1,
        1.5,
        2.5,
        "",
        "a",
        "ab",
        "abc",
        "b",
        [],
        [1],
        [1, 2],
        ["a"],
        [1, "a"],
        [None],
    ),
    *(
        {},
        {"a": 1},
        {"b": 1},
        {"a": "a"},
        {"a": 1, "b": 2},
        {"b": "a", "c": 1},
        {"c": 1},
        {"a": 1, "b": 1, "c": 1},
    ),
    *(
        {"a": None},
        {"a": 1.5},
        {"a": "ab", "b": None},
        {"a": {"b": 1}},
        {"a": []},
        {"a": 2, "c": "a"},
        {"b": True},
    ),
    *({"a": "a", "b": True}, {"a": "a", "b": True, "c": 1}, {"c": 1, "d": 2}, {"a": "a", "c": 1}),
    *({"kind": "x"}, {"kind": "x", "v": 1}, {"kind": "y"}, {"kind": "y", "w": 1}, {"w": 1}, {"v": 1}),
]
EXACT: list[dict[str, Any]] = [
    # oneOf: schemas of different types, constants, required names; and schemas that overlap
    {"oneOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": {"type": "string"}}]},
    {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}]},
    {"oneOf": [{"type": "integer", "maximum": 1}, {"type": "integer", "exclusiveMinimum": 1}]},
    {"oneOf": [{**KIND, "properties": {"kind": {"const": value}}, "required": ["kind"]} for value in "xy"]},
    {**KIND, "oneOf": [{"properties": {"kind": {"const": value}}} for value in "xy"], "required": ["kind"]},
    {"oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}], "$defs": {"s": {"type": "string", "minLength": 1}}},
    {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {**AB, "oneOf": [{"required": ["a", "b"]}, {"required": ["c"]}]},
    {"oneOf": [{**AB, "required": ["a"], "additionalProperties": False}, {"type": "object", "required": ["c"]}]},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", 2]}]},
    {"allOf": [{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, AB]},
    {**KIND, "oneOf": [{"properties": {"kind": schema}, "required": ["kind"]}
                       for schema in ({"const": "x"}, {"not": {"enum": ["x", 1]}})]},
    {"type": ["string", "integer"], "oneOf": [{"enum": ["a", 1]}, {"not": {"anyOf": [{"const": "a"}, {"const": 1}]}}]},
    # not
    {**AB, "not": {"required": ["a"]}},
    {**AB, "not": {"required": ["a", "b"]}},
    {**AB, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"not": {"type": "string"}},
    {"not": {"type": ["string", "number"]}},
    {"type": "string", "not": {"enum": ["a", "abc", ""]}},
    {"enum": [1, 2, "a", "b"], "not": {"enum": [1, "a"]}},
    {"type": "integer", "not": {"enum": [1, 3]}},
    {"type": "number", "not": {"minimum": 2}},
    {"not": {"enum": [1, "a", None, True, {}, []]}},
    {"properties": {"a": {"not": {"type": "null"}}}},
    {"not": {"properties": {"a": {"type": "string"}}, "type": "object"}},
    {"not": {"not": {"type": "string", "minLength": 2}}},
    {"type": "array", "not": {"minItems": 2}},
    # if
    {**KIND, "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}, "then": {"required": ["v"]}},
    {**KIND, "if": {"required": ["v"]}, "then": {"required": ["kind"]}, "else": {"required": ["w"]}},
    {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "boolean"}},
    # What other members require.
    {**AB, "dependentRequired": {"a": ["b"]}},
    {**AB, "dependentRequired": {"a": ["b"], "b": ["a"]}},
    {**AB, "dependentSchemas": {"a": {"properties": {"b": {"const": True}}, "required": ["b"]}}},
    {"$schema": DRAFT_7, **AB, "dependencies": {"a": ["b"]}},
    {"$schema": DRAFT_7, **AB, "dependencies": {"a": {"required": ["c"]}}},
    # The number of members.
    *({**AB, "minProperties": 1, "additionalProperties": more} for more in (True, False)),
    *({**AB, "maxProperties": n, "additionalProperties": more} for n in (0, 1, 2) for more in (True, False)),
    {**AB, "minProperties": 1, "maxProperties": 1},
    {**AB, "minProperties": 2, "additionalProperties": False},
    {"minProperties": 3, "properties": {"a": {}}, "additionalProperties": False},
    # Keywords beside a reference count since draft 2019; places of definitions; identifiers.
    {"$ref": "#/$defs/s", "maxLength": 1, "$defs": {"s": {"type": "string"}}},
    {"$schema": DRAFT_7, "$ref": "#/definitions/s", "maxLength": 1, "definitions": {"s": {"type": "string"}}},
    {"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}, "not": {"const": "a"}},
    # What no other keyword has said.
    {**AB, "unevaluatedProperties": False},
    {"allOf": [AB], "properties": {"c": {"type": "integer"}}, "unevaluatedProperties": False},
    {"$ref": "#/$defs/s", "properties": {"c": {}}, "unevaluatedProperties": {"const": 2}, "$defs": {"s": AB}},
    {"allOf": [{**AB, "additionalProperties": {"type": "integer"}}], "unevaluatedProperties": False},
    {"allOf": [{"prefixItems": [{"type": "integer"}]}], "unevaluatedItems": False},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}},
    {"items": {"type": "integer"}, "unevaluatedItems": False},
    {"properties": {"a": {"$dynamicRef": "#n"}}, "$defs": {"n": {"$dynamicAnchor": "n", "type": "string"}}},
    {"type": ["array", "null"], "contains": {"const": 1}, "items": {"type": "string"}},
    # A map: its names have no order.
    {"type": "object", "propertyNames": {"enum": ["b", "a"]}, "additionalProperties": {"type": "integer"}},
    {"allOf": [{"propertyNames": {"enum": ["b", "a"]}}, AB]},
    {"properties": {"a": {"$ref": "#/x/y"}}, "x": {"y": {"not": {"$ref": "#/x/z"}}, "z": {"type": "string"}}},
]  # fmt: skip
# The keyword of the warning, and its place.
WIDE: list[tuple[dict[str, Any], str, str]] = [
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf", "#"),
    ({"items": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}, "oneOf", "#/items"),
    ({"not": {"type": "integer"}}, "not", "#"),
    ({"type": "string", "not": {"pattern": "^a"}}, "not", "#"),
    ({"type": "object", "not": {"additionalProperties": {"type": "string"}}}, "not", "#"),
    ({"if": {"pattern": "^a"}, "then": {"maxLength": 1}}, "if", "#"),
    ({"type": "array", "contains": {"pattern": "^a"}, "maxContains": 1}, "maxContains", "#"),
    ({"allOf": [{"type": "array", "contains": {"const": 1}}]}, "contains", "#/allOf/0"),
    ({"type": "array", "contains": {"const": 1}, "minContains": 300}, "contains", "#"),
    ({"type": "object", "minProperties": 2}, "minProperties", "#"),
    (
        {"type": "object", "anyOf": [AB, {"required": ["c"]}], "unevaluatedProperties": False},
        "unevaluatedProperties",
        "#",
    ),
    ({"if": {"prefixItems": [{"const": 1}]}, "then": {}, "unevaluatedItems": False}, "unevaluatedItems", "#"),
    (
        {"type": "object", "properties": {f"p{i}": {} for i in range(40)}, "minProperties": 20},
        "minProperties",
        "#",
    ),
    (
        {"type": "object", "dependentRequired": {f"a{i}": [f"b{i}"] for i in range(20)}},
        "dependentRequired",
        "#",
    ),
]
NOTHING: list[tuple[dict[str, Any], str]] = [
    ({"not": {}}, "at #: 'not': no value satisfies it"),
    ({"type": "string", "not": {"type": "string"}}, "at #: 'not': no value"),
    (
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        "at #: 'oneOf': no value satisfies exactly one of its schemas",
    ),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "at #: 'maxProperties': no value"),
    (
        {"dependentRequired": []},
        "at #: 'dependentRequired' is \\[\\]; it must be an object of lists of names",
    ),
    ({"not": {"items": {"minLength": -1}}}, "at #/not/items: 'minLength' is -1; it must be a count"),
    ({"not": 1}, "at #: 'not' is 1; it must be a schema"),
    (
        {"properties": {"a": {"$dynamicRef": "#n"}}},
        r"at #/properties/a: '\$dynamicRef' is supported only where",
    ),
]


def orders(value: Any, most: int = 60) -> list[str]:
    """A value as compact JSON, with its members in every order."""
    if isinstance(value, dict):
        texts = (
            "{"
            + ",".join(f"{json.dumps(name)}:{text}" for (name, _), text in zip(members, inner, strict=True))
            + "}"
            for members in itertools.permutations(value.items())
            for inner in itertools.product(*(orders(member, 6) for _, member in members))
        )
    elif isinstance(value, list):
        texts = (
            "[" + ",".join(items) + "]" for items in itertools.product(*(orders(item, 6) for item in value))
        )
    else:
        return [json.dumps(value)]
    return list(itertools.islice(texts, most))


def validator(schema: dict[str, Any]) -> Any:
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)


def compare(demo: lp.Model, schema: dict[str, Any]) -> Iterator[tuple[Any, bool, bool]]:
    """Each value, whether it is valid, and whether the mask allows it."""
    factory = compile_guide(demo, json_schema=schema)
    valid = validator(schema)
    for value in VALUES:
        allowed = False
        for text in orders(value):
            with factory.new() as guide:
                allowed = allowed or accepts(demo, guide, text)
        yield value, valid.is_valid(value), allowed


@pytest.mark.parametrize("schema", EXACT, ids=lambda schema: json.dumps(schema)[:80])
def test_what_is_valid_is_allowed_and_nothing_else(
    demo: lp.Model, schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert [value for value, valid, allowed in compare(demo, schema) if valid != allowed] == []
    assert not caplog.records


_ITEMS = [None, 1, 2, "a", "b", {"k": 1}]
_FIRST = [{"type": "null"}, {"type": "integer"}]
CONTAINS: list[dict[str, Any]] = [
    {"contains": {"const": 1}},
    {"contains": {"const": 1}, "minContains": 2},
    {"contains": {"const": 1}, "maxContains": 1},
    {"contains": {"type": "string"}, "minContains": 0, "maxContains": 1},
    {"contains": {"type": "string"}, "minContains": 2.0, "maxContains": 2.0, "maxItems": 3},
    {"contains": {"type": "integer", "minimum": 2}, "minItems": 2, "maxItems": 3},
    {"contains": {"enum": [2, "b"]}, "maxContains": 2, "items": {"enum": [1, 2, "a"]}},
    {"contains": {"const": 2}, "prefixItems": _FIRST},
    {"contains": {"const": 2}, "prefixItems": _FIRST, "items": False},
    {"contains": {"type": "string"}, "prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
    {"contains": True, "minContains": 2},
    {"contains": True, "maxContains": 2},
    {"contains": False, "minContains": 0},
    {"contains": {"type": "string"}, "minContains": 0, "maxContains": 0},
    {"contains": {"required": ["k"]}},
    {"contains": {"type": "object", "required": ["k"]}, "maxContains": 1},
    {"contains": {"anyOf": [{"const": 1}, {"const": "a"}]}, "minContains": 2},
    {"contains": {"pattern": "^a"}, "items": {"type": "string"}},
    {"contains": {"$ref": "#/$defs/one"}, "$defs": {"one": {"const": 1}}},
]


@pytest.mark.parametrize("whitespace", ["compact", "spaced"])
@pytest.mark.parametrize("schema", CONTAINS, ids=json.dumps)
def test_items_are_counted(
    demo: lp.Model, schema: dict[str, Any], whitespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All arrays of up to three items, and some longer ones."""
    schema = {"type": ["array", "null"], **schema}
    valid, factory = validator(schema), compile_guide(demo, json_schema=schema, json_whitespace=whitespace)
    rng = random.Random(5)
    arrays = [[*items] for n in range(4) for items in itertools.product(_ITEMS, repeat=n)]
    arrays += [rng.choices(_ITEMS, k=rng.randint(4, 9)) for _ in range(50)]
    separators = (", ", ": ") if whitespace == "spaced" else (",", ":")
    for value in (None, *arrays):
        with factory.new() as guide:
            allowed = accepts(demo, guide, json.dumps(value, separators=separators))
        assert allowed == valid.is_valid(value), value
    assert not caplog.records


def test_items_of_long_arrays_are_counted(demo: lp.Model) -> None:
    """The parser's work for an item does not grow with the array: 5,000 items of a step are the limit."""
    schema = {"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}, "maxContains": 1}
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    for last, is_allowed in ((1, True), (2, False)):
        with compile_guide(demo, json_schema=schema).new() as guide:
            text = json.dumps({"a": [2] * 6000 + [last]}, separators=(",", ":"))
            assert accepts(demo, guide, text) == is_allowed


@pytest.mark.parametrize("case", WIDE, ids=lambda case: json.dumps(case[0])[:80])
def test_wider_with_a_warning(
    demo: lp.Model, case: tuple[dict[str, Any], str, str], caplog: pytest.LogCaptureFixture
) -> None:
    schema, keyword, pointer = case
    assert [value for value, valid, allowed in compare(demo, schema) if valid and not allowed] == []
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        f"json_schema at {pointer}: '{keyword}' is not enforced exactly, so more is allowed: "
    )


def test_schemas_that_exclude_each_other_need_no_alternatives() -> None:
    """Only objects count where the schema around them allows no others; a value that `not` lists is excluded."""
    listed = {"required": ["t"], "properties": {"t": {"enum": ["a", "b"]}}}
    others = {"required": ["t"], "properties": {"t": {"type": "string", "not": {"enum": ["a", "b", "c"]}}}}
    rewritten, warnings = without_logic({"type": "object", "oneOf": [listed, others]})
    assert rewritten["oneOf"][0] == listed and "anyOf" not in json.dumps(rewritten) and not warnings
    # Any other value satisfies both.
    rewritten, _ = without_logic({"oneOf": [listed, others]})
    assert rewritten["oneOf"][0] != listed


@pytest.mark.parametrize(
    ("names", "more", "good", "bad", "warning"),
    [
        # As pydantic writes dict[HttpUrl, int] and dict[Annotated[str, Field(min_length=1, pattern="^x")], int].
        ({"format": "uri", "maxLength": 2083, "minLength": 1}, {}, "http://a-b.c/", "a b", "'maxLength'"),
        ({"format": "email", "minLength": 1}, {}, "a@b", "", ""),
        ({"pattern": "^a", "maxLength": 2}, {}, "abc", "b", "'maxLength'"),
        ({"minLength": 1}, {"patternProperties": {"^x": {"type": "integer"}}}, "xa", "", "'propertyNames'"),
        ({"enum": [1, 2]}, {}, "", "1", "no listed value is a string"),
    ],
)
def test_names_that_several_keywords_restrict(
    demo: lp.Model,
    names: dict[str, Any],
    more: dict[str, Any],
    good: str,
    bad: str,
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {
        "type": "object",
        "propertyNames": names,
        **(more or {"additionalProperties": {"type": "integer"}}),
    }
    factory = compile_guide(demo, json_schema=schema, json_whitespace="compact")
    for name, expected in ((good, "enum" not in names), (bad, bool(more))):
        with factory.new() as guide:
            assert accepts(demo, guide, f'{{"{name}":1}}') is expected
    assert warning in caplog.text and bool(caplog.records) == bool(warning)


@pytest.mark.parametrize(("schema", "message"), NOTHING, ids=lambda value: json.dumps(value)[:60])
def test_what_allows_nothing_is_refused(demo: lp.Model, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^json_schema {message}"):
        compile_guide(demo, json_schema=schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "http://example.com/x"}, "'$ref' to another document, 'http://example.com/x'; put what it"),
        (
            {"properties": {"a": {"$ref": "#x"}}},
            "'$ref' to the anchor 'x', which is not found here; refer to it",
        ),
        (
            {"patternProperties": {"a": {}, "b+": {}}},
            "'patternProperties': /a/ and /b+/ may match the same name; write patterns that exclude each other",
        ),
    ],
)
def test_refusals_say_what_to_do(demo: lp.Model, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        compile_guide(demo, json_schema=schema)
    assert f": {message}" in str(refused.value)


def test_a_member_that_nothing_satisfies_is_left_out(demo: lp.Model) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"type": "string"}}, "b": {}}}
    factory = compile_guide(demo, json_schema=schema)
    assert accepts(demo, factory.new(), '{"b":1}')
    assert not accepts(demo, factory.new(), '{"a":"x"}')


class Maker:
    """Random schemas of keywords that meet each other's values."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def root(self) -> dict[str, Any]:
        while True:
            schema = self.schema(0)
            if isinstance(schema, dict):
                return {**schema, "$defs": {"x": self.schema(2), "y": self.schema(3)}}

    def schema(self, depth: int) -> Any:
        rng = self.rng
        if depth > 3 or rng.random() < 0.05:
            return rng.choice([True, False, {}])
        plain = ["type", "enum", "const", "required", "number", "length", "count of items"]
        deep = [
            *(
                "properties",
                "properties",
                "items",
                "not",
                "not",
                "oneOf",
                "oneOf",
                "anyOf",
                "allOf",
                "if",
                "then",
            ),
            *(
                "dependentRequired",
                "dependentSchemas",
                "count of members",
                "additionalProperties",
                "$ref",
                "contains",
                "unevaluatedProperties",
                "unevaluatedItems",
            ),
        ]
        schema: dict[str, Any] = {}
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            self.add(schema, rng.choice(plain + deep if depth < 3 else plain), depth + 1)
        return schema

    def add(self, schema: dict[str, Any], keyword: str, depth: int) -> None:
        rng = self.rng
        types = [
            "object",
            "object",
            "string",
            "integer",
            "number",
            "array",
            "null",
            "boolean",
            ["string", "null"],
        ]
        match keyword:
            case "type":
                schema["type"] = rng.choice(types)
            case "enum":
                schema["enum"] = rng.choices(VALUES, k=rng.randint(1, 4))
            case "const":
                schema["const"] = rng.choice(VALUES)
            case "required":
                schema["required"] = rng.sample("abc", rng.randint(1, 2))
            case "number":
                name = rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
                schema[name] = rng.choice([0, 1, 2, 1.5])
            case "length" | "count of items" | "count of members":
                of = {"length": "Length", "count of items": "Items", "count of members": "Properties"}[
                    keyword
                ]
                schema[rng.choice(["min", "max"]) + of] = rng.randint(0, 3)
            case "properties":
                schema["properties"] = {
                    name: self.schema(depth) for name in rng.sample("abc", rng.randint(1, 3))
                }
            case "items":
                schema["items"] = self.schema(depth)
                if rng.random() < 0.3:
                    schema["prefixItems"] = [self.schema(depth)]
            case "oneOf" | "anyOf" | "allOf":
                schema[keyword] = [self.schema(depth) for _ in range(rng.randint(1, 3))]
            case "then":
                schema.update(
                    {"if": self.schema(depth), "then": self.schema(depth), "else": self.schema(depth)}
                )
            case "dependentRequired":
                schema[keyword] = {rng.choice("abc"): [rng.choice("abc")] for _ in range(2)}
            case "dependentSchemas":
                schema[keyword] = {rng.choice("abc"): self.schema(depth)}
            case "$ref":
                schema[keyword] = f"#/$defs/{rng.choice('xy')}"
            case "additionalProperties" | "unevaluatedProperties" | "unevaluatedItems":
                schema[keyword] = rng.choice([False, False, self.schema(depth)])
            case _:
                schema[keyword] = self.schema(depth)


def test_random_schemas_are_never_narrower_and_wider_only_with_a_warning(
    demo: lp.Model, caplog: pytest.LogCaptureFixture
) -> None:
    n_exact = n_wide = 0
    for seed in range(300):
        schema = Maker(seed).root()
        caplog.clear()
        try:
            compared = list(compare(demo, schema))
        except (InvalidRequestError, RecursionError):  # references in a circle
            continue
        narrower = [value for value, valid, allowed in compared if valid and not allowed]
        wider = [value for value, valid, allowed in compared if allowed and not valid]
        assert not narrower, (seed, schema, narrower)
        assert not wider or caplog.records, (seed, schema, wider)
        n_exact += not caplog.records
        n_wide += bool(caplog.records)
    assert n_exact > 80 and n_wide > 40, (n_exact, n_wide)


def test_the_page_says_what_masks_allow(demo: lp.Model) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text, demo), "run: python tools/keyword_table.py"


def test_other_texts_match_the_pattern() -> None:
    import re

    rng = random.Random(3)
    for _ in range(200):
        left_out = {"".join(rng.choices("ab^-]\\.\n", k=rng.randint(0, 3))) for _ in range(rng.randint(1, 6))}
        pattern = others_than(left_out)
        assert pattern is not None
        for text in {
            *left_out,
            *("".join(rng.choices("ab^-]\\.\nc", k=rng.randint(0, 4))) for _ in range(40)),
        }:
            assert bool(re.fullmatch(pattern[1:-1], text)) == (text not in left_out), (pattern, text)
    assert others_than(["x" * 10_000]) is None


@pytest.mark.parametrize(
    "identifier",
    ["my schema", "a b#", "#foo", "x%zz", "", "{x}", "http://[::1", "http://h:port/", "1a:b", "urn:x:y"],
)
def test_identifiers_need_not_be_uris(demo: lp.Model, identifier: str) -> None:
    definitions = {"$defs": {"n": {"type": "integer"}}}
    root = {"$id": identifier, "properties": {"a": {"$ref": "#/$defs/n"}}, "type": "object", **definitions}
    inner = {"type": "object", "properties": {"a": {"$id": identifier, "$ref": "#/$defs/n", **definitions}}}
    for schema in (root, inner):
        factory = compile_guide(demo, json_schema=schema)
        assert accepts(demo, factory.new(), '{"a":1}'), schema
        assert not accepts(demo, factory.new(), '{"a":"x"}'), schema


def test_arguments_of_tools_do_not_close_alternatives() -> None:
    """Only the whole of an object lists its members."""
    parts = {"properties": {"b": {"const": True}}}
    open_ones: list[dict[str, Any]] = [
        {**AB, "anyOf": [parts, {"required": ["a"]}]},
        {**AB, "oneOf": [parts, {"properties": {"b": {"const": False}}}]},
        {**AB, "if": parts, "then": {"properties": {"c": {}}, "required": ["c"]}},
        {**AB, "dependentSchemas": {"a": {"properties": {"c": {}}}}},
        {**AB, "dependencies": {"a": {"properties": {"c": {}}}}},
    ]
    for schema in open_ones:
        assert closed_objects(schema) == schema
    assert closed_objects({"anyOf": [AB, {"type": "null"}]})["anyOf"][0]["additionalProperties"] is False
    assert closed_objects({**AB, "not": {"required": ["a", "b"]}})["additionalProperties"] is False


def test_schemas_of_a_oneof_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair that overlaps is compared again and again within alternatives; what was found is kept."""
    counts: list[int] = []
    original = _logic._kinds

    def counted(node: dict[str, Any]) -> frozenset[str]:
        counts[-1] += 1
        return original(node)

    monkeypatch.setattr(_logic, "_kinds", counted)
    for n in (8, 16):
        counts.append(0)
        branches = []
        for i in range(n):
            either = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
            properties = {"kind": {"enum": [f"k{i}", f"k{i + 1}"]}, "n": {"minimum": i}, "other": either}
            branches.append({"type": "object", "properties": properties, "required": ["kind"]})
        assert without_logic({"oneOf": branches})[1] == []
    assert counts[0] < 400 and counts[1] < 800


NULLABLE: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "format": "date", "nullable": True}, ["2024-01-01", None], ["x", 1]),
    ({"type": "array", "items": {"type": "integer", "nullable": True}}, [[1, None]], [None, ["a"]]),
    ({"type": "string", "nullable": True, "enum": ["a", None]}, ["a", None], ["b"]),
    ({"type": "string", "nullable": True, "enum": ["a"]}, ["a"], [None]),
    ({"nullable": True, "allOf": [{"$ref": "#/$defs/s"}], "$defs": {"s": {"type": "string"}}}, ["a", None], [1]),
    ({"nullable": True, "oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
    ({"nullable": False, "type": "string"}, ["a"], [None]),
    ({"type": "object", "properties": {"nullable": {"const": True}}}, [{"nullable": True}], [{"nullable": "x"}]),
]  # fmt: skip


@pytest.mark.parametrize("case", NULLABLE, ids=lambda case: json.dumps(case[0]))
def test_nullable_of_openapi(demo: lp.Model, case: tuple[dict[str, Any], list[Any], list[Any]]) -> None:
    schema, right, wrong = case
    factory = compile_guide(demo, json_schema=schema)
    for value in right + wrong:
        with factory.new() as guide:
            assert accepts(demo, guide, json.dumps(value, separators=(",", ":"))) == (value in right), value

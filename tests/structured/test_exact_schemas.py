"""Parts of schemas that llguidance alone would get wrong or refuse: numbers, names, unique items, formats, patterns."""

from __future__ import annotations

import json
import logging
import random
import re
from fractions import Fraction
from time import thread_time
from typing import Any

import jsonschema
import pytest
from support.guided import accepts

import llamapipe as lp
from llamapipe.chat._lark import json_value
from llamapipe.compat.formats import FUNCTION_CALLING
from llamapipe.errors import InvalidRequestError
from llamapipe.structured._grammar import SchemaGrammar, integer_range, number_bound
from llamapipe.structured.compile import compile_guide

LARGE = 2**60
INTEGERS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"enum": [9007199254740993]}, [9007199254740993], [9007199254740992, 9007199254740994]),
    ({"const": 1234567890123456789}, [1234567890123456789], [1234567890123456768]),
    ({"minimum": 2**63, "maximum": 2**63 + 5}, [2**63, 2**63 + 5], [2**63 - 1, 2**63 + 6]),
    ({"minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**63), -1, 0, 2**63 - 1], [-(2**63) - 1, 2**63]),
    ({"minimum": 0, "maximum": 2**64 - 1}, [0, 7, 2**64 - 1], [-1, 2**64]),
    ({"exclusiveMaximum": 10**18}, [10**18 - 1, -(10**30)], [10**18]),
    ({"maximum": 1e20}, [10**20, 0, -5], [10**20 + 1]),
    ({"exclusiveMinimum": 2**127, "maximum": 2**128}, [2**127 + 1, 2**128], [2**127, 2**128 + 1]),
    ({"minimum": -(2**128), "exclusiveMaximum": -(2**127)}, [-(2**128), -(2**127) - 1], [-(2**127), 0]),
    ({"type": ["integer", "null"], "minimum": LARGE}, [None, LARGE], [LARGE - 1]),
    ({"enum": [1, LARGE + 1, {"a": [LARGE + 1]}]}, [LARGE + 1, {"a": [LARGE + 1]}], [LARGE, {"a": [LARGE]}]),
    ({"enum": [1, 2.5, LARGE, "x"], "maximum": LARGE - 1}, [1, 2.5, "x"], [LARGE, LARGE - 1]),
    ({"type": "number", "minimum": 0, "maximum": 2**63}, [0.5, 2**63], [-0.5, 2**63 + 1]),
    ({"type": ["number", "string"], "maximum": 2**63 - 1}, ["x", -1e4, 2**63 - 1], [2**63]),
    ({"type": "number", "exclusiveMinimum": 7, "maximum": 7.5}, [7.25, 7.5], [7, 7.75]),
    ({"exclusiveMinimum": 2**53}, [2**53 + 1], [2**53 - 1, 2**53]),
    ({"exclusiveMaximum": -(2**53)}, [-(2**53) - 1], [-(2**53), 0]),
    ({"type": "number", "exclusiveMaximum": -(1e15 + 0.5)}, [-(10**15) - 1], [-(1e15 + 0.5), -(1e15 + 0.25)]),
]
E = {"enum": ["x", "y"], "type": "string"}
PARTS: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "number", "minimum": 1e15 + 0.5},
        ["1000000000000000.5", "1000000000000001"],
        ["1000000000000000.4", "1000000000000000.49"],
    ),
    (
        {"type": "number", "exclusiveMinimum": -794011191720790.2, "maximum": 817187854029950.2},
        ["-794011191720790.1", "817187854029950.2"],
        ["-794011191720790.2", "-794011191720790.21", "817187854029950.21"],
    ),
    # Of two lower bounds, the higher one counts.
    (
        {"type": "number", "exclusiveMinimum": -1, "minimum": -0.7, "exclusiveMaximum": 0},
        ["-0.7", "-0.5"],
        ["-0.71", "-0", "0"],
    ),
    # Around a part that is written here, all others are as they were.
    (
        {
            "properties": {
                "a": {"type": "string"},
                "n": {"anyOf": [{"type": "integer", "maximum": 2**63 - 1}, {"type": "null"}]},
                "z": {"$ref": "#/$defs/Z"},
            },
            "type": "object",
            "required": ["n"],
            "additionalProperties": False,
            "$defs": {"Z": {"type": "object", "properties": {"s": {"$ref": "#"}}}},
        },
        [
            '{"n":null}',
            '{"a":"x\\n\\"","n":9223372036854775807}',
            '{"n":1,"z":{"s":{"n":null},"k":[1,{}]}}',
        ],
        ['{"n":9223372036854775808}', '{"a":"x"}', '{"n":1,"x":1}', '{"n":1,"z":{"s":{}}}', '{"n":1,"n":2}'],
    ),
    (
        {"type": "array", "items": {"type": "integer", "minimum": LARGE}, "minItems": 1, "maxItems": 2},
        [f"[{LARGE}]", f"[{LARGE},{LARGE}]"],
        ["[]", "[1]", f"[{LARGE},{LARGE},{LARGE}]"],
    ),
    (
        {
            "type": "array",
            "prefixItems": [{"type": "integer", "minimum": LARGE}, {"type": "string"}],
            "minItems": 1,
        },
        [f"[{LARGE}]", f'[{LARGE},"a"]', f'[{LARGE},"a",[1]]'],
        ["[]", f"[{LARGE},1]"],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": LARGE}, "minProperties": 1},
        [f'{{"a":{LARGE}}}', f'{{"a":{LARGE},"b\\"":{LARGE}}}'],
        ["{}", '{"a":1}'],
    ),
    (
        {"type": "object", "properties": {"a": {"const": LARGE}, "b": True}},
        ["{}", f'{{"a":{LARGE}}}', '{"b":[]}', f'{{"a":{LARGE},"b":0,"c":1}}'],
        ['{"a":1}', '{"c":1,"a":1}'],
    ),
    (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"t": {"const": "a"}, "n": {"const": LARGE}},
                    "required": ["t"],
                },
                {"type": "object", "properties": {"t": {"const": "b"}}, "required": ["t"]},
            ]
        },
        [f'{{"t":"a","n":{LARGE}}}', '{"t":"b","n":1}'],
        ['{"t":"a","n":1}', '{"t":"c"}'],
    ),
    ({"allOf": [{"type": "integer", "minimum": LARGE}]}, [str(LARGE)], ["1"]),
    # uniqueItems
    (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", {"x": 1}]}},
        ["[]", '["b","a"]', '["b",{"x":1},"a"]'],
        ['["a","a"]', '["a",{"x":1},"a"]', '["c"]'],
    ),
    (
        {
            "type": "array",
            "uniqueItems": True,
            "minItems": 2,
            "maxItems": 2,
            "items": {"enum": ["a", "b", "c"]},
        },
        ['["b","a"]', '["c","a"]'],
        ["[]", '["a"]', '["a","a"]', '["a","b","c"]'],
    ),
    (
        {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/E"}, "$defs": {"E": E}},
        ['["y","x"]'],
        ['["x","x"]'],
    ),
    ({"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}, ["[true,false]"], ["[true,true]"]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
    # propertyNames
    (
        {
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {"type": "integer"},
        },
        ["{}", '{"a":1}', '{"b":2}', '{"a":1,"b":2}'],
        ['{"c":1}', '{"a":"x"}'],
    ),
    (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": E}},
        ['{"x":[1],"y":"q"}'],
        ['{"z":1}'],
    ),
    ({"type": "object", "propertyNames": {"const": "a"}}, ['{"a":1}', "{}"], ['{"b":1}']),
    (
        {
            "type": "object",
            "propertyNames": {"maxLength": 2},
            "properties": {"xq": {"type": "null"}, "xyz": True},
        },
        ['{"xq":null,"xa":1}', "{}"],
        ['{"xyz":1}', '{"abc":1}', '{"xq":1}'],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xq":null,"xa":1}', "{}"], ['{"y":1}']),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"a":1}'], ['{"ab":1}']),
    ({"type": "object", "propertyNames": {"format": "date"}}, ['{"2024-02-29":1}'], ['{"2023-02-29":1}']),
    # What says nothing.
    ({"type": "string", "format": "no such format", "minLength": 2.0}, ['"ab"'], ['"a"']),
    ({"then": {"maxLength": 1}, "minContains": 2, "type": "string"}, ['"ab"'], ["1"]),
    ({"format": "date", "pattern": "^2", "type": "string"}, ['"2024-02-29"'], ['"1999-01-01"', '"2"']),
]
DECIMALS = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*)$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$",
    r"^(?=.*[A-Z])(?=.*[0-9]).{2,6}$",
    r"^(?!foo|bar)\w+$",
    r"^a(?=b)[bc]{2}$|^-?(?!0)\d(?:1|(?!2)\d)$",
]


def check(demo: lp.Model, schema: Any, right: list[str], wrong: list[str]) -> None:
    factory = compile_guide(demo, json_schema=schema)
    for text in right + wrong:
        with factory.new() as guide:
            assert accepts(demo, guide, text) == (text in right), (schema, text)


@pytest.mark.parametrize("case", INTEGERS, ids=lambda case: str(case[0])[:50])
def test_numbers_are_exact(demo: lp.Model, case: tuple[Any, list[Any], list[Any]]) -> None:
    schema, right, wrong = case
    if not schema.keys() & {"type", "enum", "const"}:
        schema = {"type": "integer", **schema}
    check(
        demo,
        schema,
        *([json.dumps(value, separators=(",", ":")) for value in values] for values in (right, wrong)),
    )


@pytest.mark.parametrize("case", PARTS, ids=lambda case: json.dumps(case[0])[:60])
def test_parts(demo: lp.Model, case: tuple[Any, list[str], list[str]]) -> None:
    check(demo, *case)


def test_spaces_around_what_is_written_here(demo: lp.Model) -> None:
    schema = {"type": "object", "properties": {"n": {"const": LARGE}}, "required": ["n"]}
    for text in ('{ "n" :%d}', '{"n": %d,\n   "x": 1}', ' {"n":%d}', '{"n":%d} ', '{"n":   %d}'):
        with compile_guide(demo, json_schema=schema, json_whitespace="flexible").new() as guide:
            expected = not text.startswith(" ") and not text.endswith(" ") and ":   " not in text
            assert accepts(demo, guide, text % LARGE) == expected, text


def test_ranges_of_numbers() -> None:
    rng = random.Random(5)
    for _ in range(500):
        a, b = sorted(rng.randint(-size, size) for size in rng.choices((30, 2000, 10**6), k=2))
        low, high = rng.choice([a, None]), rng.choice([b, None])
        numbers = re.compile(integer_range(low, high))
        for x in {a - 1, a, a + 1, b - 1, b, b + 1, 0, 1, -1, rng.randint(-3000, 3000)}:
            expected = (low is None or x >= low) and (high is None or x <= high)
            assert bool(numbers.fullmatch(str(x))) == expected, (low, high, x)
    for _ in range(1000):
        bound = Fraction(rng.randint(-300, 300), rng.choice([1, 2, 4, 5, 10, 100, 1000]))
        keyword = rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
        numbers = re.compile(number_bound(bound, keyword))
        for _ in range(20):
            number = bound + rng.choice(
                [Fraction(0), Fraction(rng.randint(-30, 30), 10 ** rng.randint(0, 4))]
            )
            text = f"{float(number):.6f}".rstrip("0") + "0" * rng.randint(0, 2)
            expected = {
                "minimum": number >= bound,
                "maximum": number <= bound,
                "exclusiveMinimum": number > bound,
                "exclusiveMaximum": number < bound,
            }[keyword]
            assert bool(numbers.fullmatch(text.removesuffix("."))) == expected, (bound, keyword, text)


@pytest.mark.parametrize("pattern", DECIMALS)
def test_look_ahead(demo: lp.Model, pattern: str) -> None:
    rng = random.Random(1)
    texts = [
        "",
        ".",
        "-",
        "1.5",
        "+.5",
        "007",
        "1234.56",
        "12345",
        "1.234",
        "1.5000",
        "foo",
        "food",
        "fo",
        "aA1",
        "abc",
    ]
    texts += [
        "abb",
        "acb",
        "-12",
        "13",
        "03",
        *("".join(rng.choices("0123.-+aAb", k=rng.randint(1, 6))) for _ in range(150)),
    ]
    factory = compile_guide(demo, json_schema={"type": "string", "pattern": pattern})
    for text in texts:
        with factory.new() as guide:
            assert accepts(demo, guide, json.dumps(text)) == bool(re.search(pattern, text)), text


def test_unique_items_that_cannot_be_told_apart_are_warned_of(
    demo: lp.Model, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"properties": {"s": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}}}
    with caplog.at_level(logging.WARNING, "llamapipe"):
        factory = compile_guide(demo, json_schema=schema)
        compile_guide(demo, json_schema=schema)
    with factory.new() as guide:
        assert accepts(demo, guide, '{"s":[1,1]}')
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("json_schema at #/properties/s: 'uniqueItems' is not enforced")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": LARGE, "multipleOf": 3}, "at #: 'multipleOf'"),
        (
            {"items": {"allOf": [{"type": "integer", "minimum": LARGE}, {"type": "integer"}]}},
            "at #/items: 'allOf'",
        ),
        (
            {"allOf": [{"type": "number", "minimum": 1e15 + 0.5}, {"title": "a"}, {"maximum": 1e300}]},
            "at #: 'allOf': numbers of over 15 digits",
        ),
        (
            {"properties": {"n": {"minimum": LARGE}, "b": {"items": {"$ref": "#/properties/b"}}}},
            "'#/properties/b' cannot be followed in a schema with numbers of over 15 digits, .* into '\\$defs'",
        ),
        ({"type": "integer", "minimum": LARGE, "maximum": 5}, "at #: 'minimum': no integer"),
        (
            {"type": "integer", "minimum": 10**500},
            "at #: 'minimum': it must be a number of at most 400 digits",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(demo: lp.Model, schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        compile_guide(demo, json_schema=schema)


_UNIQUE: dict[str, Any] = {"items": {"enum": [1, 2]}, "uniqueItems": True}
_VALUES = ["[1]", "[1,1]", "{}", "true", "null", "1", "1.5", '"a"', '"b"']


@pytest.mark.parametrize(
    ("kinds", "options", "right"),
    [
        (["boolean", "string"], [{"type": "array", **_UNIQUE}, {"type": "string"}], ['"a"', '"b"']),
        ("string", [_UNIQUE], ['"a"', '"b"']),
        (["array", "string"], [_UNIQUE, {"enum": ["a", 1]}], ["[1]", '"a"', '"b"']),
        (["array", "string"], [{"type": "array", **_UNIQUE}, {"enum": [1, 2]}], ["[1]"]),
        (["array", "integer"], [{"type": "array", **_UNIQUE}, {"type": "number"}], ["[1]", "1"]),
        (["array", "number"], [{"type": "array", **_UNIQUE}, {"type": "integer"}], ["[1]", "1"]),
        (["array", "null"], [{"type": "array", **_UNIQUE}, True], ["[1]", "[1,1]", "null"]),
        (["array", "null"], [{"type": "array", **_UNIQUE}, False], ["[1]"]),
        (["array", "null"], [{"anyOf": [_UNIQUE]}, {"type": "string"}], ["[1]", "null"]),
        (["array", "number"], [_UNIQUE, {"$ref": "#/$defs/n"}], ["[1]", "1", "1.5"]),
        (["array", "null"], [{"type": "array", **_UNIQUE}, {"$ref": "#/$defs/n"}], ["[1]"]),
        (["array", "string"], [{"type": "array", **_UNIQUE}, {"$ref": "#/$defs/letter"}], ["[1]", '"a"']),
        (["string", "null"], [{"pattern": "^(?=b)"}, {"$ref": "#/$defs/letter"}], ['"a"', '"b"', "null"]),
        ("string", [{"pattern": "^(?=a)"}, {"enum": [1, LARGE]}], ['"a"']),
        ("integer", [{"maximum": LARGE}], ["1"]),
    ],
)
def test_types_beside_alternatives(demo: lp.Model, kinds: Any, options: list[Any], right: list[str]) -> None:
    """A type beside them holds for each, also where one is written here."""
    schema = {"type": kinds, "anyOf": options, "$defs": {"n": {"type": "number"}, "letter": {"enum": ["a"]}}}
    check(demo, schema, right, [text for text in _VALUES if text not in right])


@pytest.mark.parametrize("name", ["any", "array", "circle"])
def test_a_type_beside_references_is_not_ignored(demo: lp.Model, name: str) -> None:
    definitions = {
        "any": {"type": ["string", "null"]},
        "array": {"type": ["array", "boolean"], "items": {"$ref": "#/$defs/flag"}},
        "flag": {"anyOf": [{"const": LARGE}, {"type": "boolean"}]},
        "circle": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/circle"}}, {"minimum": LARGE}]},
    }
    options = [{"const": [LARGE]}, {"$ref": f"#/$defs/{name}"}]
    check_values(demo, {"type": ["array", "null"], "anyOf": options, "$defs": definitions}, _LARGE_VALUES)


@pytest.mark.parametrize("step", [1, -1])
def test_a_name_of_a_definition_may_end_like_a_type(demo: lp.Model, step: int) -> None:
    """The definition "a", narrowed to strings, is not the definition "a string"."""
    definitions = {"a": {"type": ["string", "integer"], "maximum": LARGE}, "a string": {"const": LARGE}}
    options = [{"type": "string", "anyOf": [{"$ref": "#/$defs/a"}]}, {"$ref": "#/$defs/a string"}]
    check_values(demo, {"anyOf": options[::step], "$defs": definitions}, _LARGE_VALUES)


_LARGE_VALUES: list[Any] = [
    None,
    True,
    "a",
    1,
    LARGE,
    [],
    [True],
    [1],
    ["a"],
    [LARGE],
    [LARGE, True],
    [[LARGE]],
    {},
]
_LARGE_VALUES += [{"a": LARGE}, {"a": 1}, {"a": "a"}, {"b": LARGE}, {"a": [LARGE], "b": "a"}]


def check_values(demo: lp.Model, schema: Any, values: list[Any]) -> None:
    """The mask allows a value if jsonschema does, and a schema that allows none of the values is refused."""
    validator = jsonschema.Draft202012Validator(schema)
    right = [json.dumps(value) for value in values if validator.is_valid(value)]
    if not right:
        with pytest.raises(InvalidRequestError):
            compile_guide(demo, json_schema=schema)
        return
    factory = compile_guide(demo, json_schema=schema)
    for value in values:
        text = json.dumps(value, separators=(",", ":"))
        assert accepts(demo, factory.new(), text) == (json.dumps(value) in right), (schema, text)


_NOTHING: list[Any] = [
    False,
    {"enum": []},
    {"enum": [1], "type": "string"},
    {"enum": [LARGE], "type": "string"},
    {"allOf": [{"type": "string"}, {"type": "null"}]},
    {"type": "integer", "minimum": LARGE, "maximum": 5},
    {"type": "number", "minimum": 1e15 + 0.5, "maximum": 5},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 3},
    {"type": "array", "items": {"minimum": LARGE}, "minItems": 2, "maxItems": 1},
    {"type": "object", "properties": {"a": False, "b": {"const": LARGE}}, "required": ["a", "b"]},
]
_N = {"$ref": "#/$defs/n"}


@pytest.mark.parametrize("i", range(len(_NOTHING)), ids=lambda i: json.dumps(_NOTHING[i])[:40])
def test_parts_that_allow_nothing_are_left_out(demo: lp.Model, i: int) -> None:
    """Alternatives, items and members that need not be there, beside parts that are written here."""
    nothing, large = _NOTHING[i], {"type": "integer", "minimum": LARGE}
    parts: list[Any] = [
        {"anyOf": [nothing, large]},
        {"anyOf": [{"anyOf": [nothing, {"oneOf": [_N]}]}, large]},
        {"type": ["integer", "array"], "anyOf": [_N, large]},
        {"anyOf": [{"type": "array", "items": nothing}, large]},
        {"anyOf": [{"type": "array", "items": _N, "minItems": 1}, large]},
        {"type": "array", "prefixItems": [large, _N]},
        {"type": "object", "properties": {"a": nothing, "b": large}},
        {"type": "object", "properties": {"b": large}, "additionalProperties": nothing},
        {"type": ["object", "string"], "properties": {"a": _N, "b": large}, "required": ["a"]},
        # A rule refers to the rule around it, which allows nothing.
        {"anyOf": [{"$ref": "#/$defs/circle"}, large]},
    ]
    circle = {"type": "object", "properties": {"b": {"$ref": "#/$defs/circle"}, "c": large, "a": _N}}
    for part in parts[i % 3 :: 3]:
        definitions = {"n": nothing, "circle": {**circle, "required": ["a"]}}
        check_values(demo, {**part, "$defs": definitions}, _LARGE_VALUES)


@pytest.mark.parametrize("nothing", _NOTHING[1:], ids=lambda nothing: json.dumps(nothing)[:40])
def test_references_to_what_allows_nothing_are_left_out(demo: lp.Model, nothing: Any) -> None:
    """Also where no part is written here, for an answer and inside the grammar of a chat."""
    definitions = {"n": nothing, "m/~": {"anyOf": [_N]}}
    for schema in (
        {"type": "array", "items": {"$ref": "#/$defs/m~1~0"}},
        {"type": "object", "properties": {"a": _N, "b": {"type": "integer"}}},
        {"anyOf": [_N, {"type": "array", "prefixItems": [_N]}, {"type": "string"}]},
    ):
        check_values(demo, {**schema, "$defs": definitions}, _LARGE_VALUES)
    inside = f"start: {json_value({**schema, '$defs': definitions})}"
    assert accepts(demo, compile_guide(demo, lark=inside).new(), '"a"')


@pytest.mark.parametrize("nothing", _NOTHING, ids=lambda nothing: json.dumps(nothing)[:40])
@pytest.mark.parametrize("other", [{"type": "string"}, {"type": "integer", "minimum": LARGE}])
def test_what_refers_to_nothing_may_allow_something(demo: lp.Model, nothing: Any, other: Any) -> None:
    """An empty array or object, whether the alternatives are written here or not."""
    definitions = {
        "n": nothing,
        "list": {"type": "array", "items": _N},
        "object": {"type": "object", "properties": {"a": _N, "b": {}}},
        "lists": {"type": "array", "items": {"$ref": "#/$defs/object"}},
    }
    for name in ("list", "object", "lists"):
        for part in ({"$ref": f"#/$defs/{name}"}, definitions[name]):
            check_values(demo, {"anyOf": [part, other], "$defs": definitions}, [*_LARGE_VALUES, [{}]])
    check_values(demo, {**definitions["list"], "$defs": definitions}, _LARGE_VALUES)


@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, 1), (1, 2), (2, 2), (0, 0)])
def test_counts_of_items_and_members(demo: lp.Model, least: int, most: int) -> None:
    large = {"type": "integer", "minimum": LARGE}
    values = [[LARGE] * n for n in range(4)] + [dict.fromkeys("abc"[:n], LARGE) for n in range(4)]
    counts = {"minItems": least, "maxItems": most, "minProperties": least, "maxProperties": most}
    check_values(
        demo, {"type": ["array", "object"], "items": large, "additionalProperties": large, **counts}, values
    )


def test_a_schema_without_any_alternative_names_the_part(demo: lp.Model) -> None:
    inside = {"type": "integer", "minimum": LARGE, "maximum": 5}
    schema = {
        "anyOf": [{"type": "array", "items": inside, "minItems": 1}, {"enum": [LARGE], "type": "string"}]
    }
    with pytest.raises(
        InvalidRequestError, match=r"^json_schema at #/anyOf/1: 'enum': no value satisfies it$"
    ):
        compile_guide(demo, json_schema=schema)
    with pytest.raises(InvalidRequestError, match="at #/anyOf/0/items: 'minimum': no integer is from"):
        compile_guide(demo, json_schema={"anyOf": [schema["anyOf"][0]]})


def test_many_references_beside_a_type() -> None:
    """The references of the whole schema are not looked at for each alternative, which took seconds."""
    names = [f"d{i}" for i in range(1500)]
    options = [{"const": LARGE}, *({"$ref": f"#/$defs/{name}"} for name in names)]
    definitions = {name: {"enum": [name, 1]} for name in names}
    grammar = SchemaGrammar({"type": "string", "anyOf": options, "$defs": definitions}, "compact")
    began_s = thread_time()
    assert "d1499" in grammar.text()
    assert thread_time() - began_s < 1


def test_errors_beside_what_is_written_here_have_their_place(demo: lp.Model) -> None:
    """The same in an answer's schema, and in one inside the grammar of a chat."""
    schema = {"type": "object", "properties": {"n": {"const": LARGE}, "b": {"items": {"pattern": "x(y"}}}}
    inside = f"start: FREE | {json_value({'type': 'string'})} | {json_value(schema)}\nFREE: /x*/"
    for options in ({"json_schema": schema}, {"lark": inside}):
        with pytest.raises(InvalidRequestError) as caught:
            compile_guide(demo, **options)
        assert str(caught.value).startswith(
            "json_schema cannot be compiled at #/properties/b/items: 'pattern' is not a regular expression"
        )


def test_arguments_of_tools_are_exact(demo: lp.Model) -> None:
    schema = {"type": "object", "properties": {"n": {"const": LARGE + 1}}, "required": ["n"]}
    function = {"name": "count", "parameters": schema}
    with (
        lp.Model(lp.demo_model_path(), chat_template=FUNCTION_CALLING) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=1) as engine,
    ):
        out = engine.chat(
            "Count.", tools=[{"type": "function", "function": function}], tool_choice="required"
        )
    assert [call.arguments["n"] for call in out.tool_calls] == [LARGE + 1]


def test_a_definition_that_is_used_often_is_written_once(demo: lp.Model) -> None:
    """Copies of it beside an exact number would be too large for llguidance."""
    large = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(400)}}
    names = [f"p{i}" for i in range(60)]
    schema = {
        "type": "object",
        "properties": {"n": {"const": LARGE}, **{name: {"$ref": "#/$defs/D"} for name in names}},
        "$defs": {"D": large},
    }
    factory = compile_guide(demo, json_schema=schema)
    assert accepts(demo, factory.new(), f'{{"n":{LARGE},"p1":{{"k3":"x"}},"p59":{{}}}}')
    assert not accepts(demo, factory.new(), f'{{"n":{LARGE},"p1":{{"k3":4}}}}')
    for name in names:
        schema["properties"][name] = {"type": "array", "items": {"$ref": "#/$defs/D"}}  # type: ignore[index]
    with pytest.raises(
        InvalidRequestError, match=r"^json_schema at #/properties/p\d+: '\$ref': with the defin"
    ):
        compile_guide(demo, json_schema=schema)


P = {"$defs": {"P": {"enum": ["a", "b", "cc"]}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {**P, "type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/P", "enum": ["a", "b"]}},
            ['["a","b"]'],
            ['["cc"]'],
        ),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "cc"], "pattern": "^[ab]$"}},
            ['["a","b"]'],
            ['["cc"]'],
        ),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": [1, 1.0, True, "1"]}},
            ['[1,true,"1"]'],
            ["[1,1.0]", "[1,1]"],
        ),
        ({"type": "object", "propertyNames": {"const": "a", "enum": ["b"]}}, ["{}"], ['{"a":1}', '{"b":1}']),
        (
            {
                "type": "object",
                "propertyNames": {"minLength": 2},
                "properties": {"a": {}, "bb": {"type": "string"}},
                "additionalProperties": False,
            },
            ['{"bb":"x"}', "{}"],
            ['{"a":1}', '{"cc":1}', '{"bb":1}'],
        ),
    ],
)
def test_keywords_beside_listed_values_count(
    demo: lp.Model, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    factory = compile_guide(demo, json_schema=schema)
    assert [text for text in right if not accepts(demo, factory.new(), text)] == []
    assert [text for text in wrong if accepts(demo, factory.new(), text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**P, "propertyNames": {"$ref": "#/$defs/P", "maxLength": 1}}, r"#/propertyNames: '\$ref'"),
        (
            {
                "propertyNames": {"minLength": 2},
                "properties": {"bb": {"type": "string"}},
                "additionalProperties": {"type": "integer"},
            },
            "#: 'propertyNames' is not supported together with 'properties' and",
        ),
    ],
)
def test_what_cannot_be_written_beside_names_is_refused(demo: lp.Model, schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^json_schema at {message}"):
        compile_guide(demo, json_schema=schema)


def test_long_forced_text_leaves_a_grammar_as_it_is(demo: lp.Model) -> None:
    """Forced text is looked up with a separate lexer. When that is exhausted, guesses end and the request continues."""
    schema = {"const": "the quick brown fox " * 6500}
    factory = compile_guide(demo, json_schema=schema)
    tokens = demo.tokenize(json.dumps(schema["const"])[:80], add_special=False)[:-2]
    for _ in range(2):
        with factory.new() as guide:
            for token in tokens:
                guide.forced(4)
                guide.accept(token)
            guide.prepare()


def test_forced_text_follows_its_tokens(demo: lp.Model) -> None:
    factory = compile_guide(demo, json_schema={"const": "the quick brown fox " * 20})
    with factory.new() as guide:
        text = guide.forced(200)
        assert guide.forced(5) == text[:5]
        for i, token in enumerate(text[:40]):
            guide.accept(token)
            assert guide.forced(9) == text[i + 1 : i + 10]
        guide.rollback(30)
        assert guide.forced(9) == text[10:19]
        guide.reset(text[:3])
        assert guide.forced(9) == text[3:12]

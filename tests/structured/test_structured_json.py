"""JSON schemas: what is generated is valid, and what cannot be kept is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from support.chains import Chain
from support.guided import guided, text_of
from support.random_schemas import SchemaMaker

import llamapipe as lp
from llamapipe.errors import InvalidRequestError
from llamapipe.llama import Context, Model
from llamapipe.structured.compile import compile_guide
from llamapipe.structured.schema import MAX_REQUIRED

N_SCHEMAS = 200


@pytest.fixture(scope="module")
def context(demo: Model) -> Iterator[Context]:
    with Context(demo, n_ctx=1024, n_threads=1) as opened:
        yield opened


def some_sampler(model: Model, seed: int) -> Chain:
    """Greedy, cautious or wild: the grammar must hold under all of them."""
    rng = random.Random(seed)
    chain = Chain(model.vocab, seed)
    if rng.random() < 0.1:
        return chain.add_temperature(0.0)
    if rng.random() < 0.3:
        chain.add_top_k(rng.randint(1, 40))
    if rng.random() < 0.3:
        chain.add_top_p(rng.uniform(0.5, 1.0))
    if rng.random() < 0.3:
        chain.add_min_p(rng.uniform(0.01, 0.2))
    return chain.add_temperature(rng.choice((0.5, 1.0, 1.5, 3.0)))


def generate(context: Context, schema: dict[str, Any], seed: int) -> str:
    model = context.model
    with compile_guide(model, json_schema=schema).new() as guide, some_sampler(model, seed) as sampler:
        tokens, ended = guided(context, model.tokenize("Once upon a time,"), guide, sampler, 1000)
    text = text_of(model, tokens)
    assert ended, f"not at its end after {len(tokens)} tokens: {text[:200]}"
    return text


def test_random_samples_of_random_schemas_are_valid(context: Context) -> None:
    for seed in range(N_SCHEMAS):
        schema = SchemaMaker(seed).schema()
        text = generate(context, schema, seed)
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_any_json(context: Context) -> None:
    """Without bounds a text may go on for ever; every prefix that was allowed can still be finished."""
    factory = compile_guide(context.model, json_schema=True, json_whitespace="flexible")
    for text in ("{}", '[1, 2.5e3, {"a": null}]', '{\n  "a": [\n    true\n  ]\n}', '"\\u0001\\n"'):
        with factory.new() as guide:
            for token in context.model.tokenize(text, add_special=False):
                guide.accept(token)
            assert guide.may_end, text


def test_spaces_are_bounded(demo: Model) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    piece = {demo.piece(t): t for t in range(demo.n_vocab)}

    def n_spaces(start: bytes, space: bytes, json_whitespace: str = "flexible") -> int:
        with compile_guide(demo, json_schema=schema, json_whitespace=json_whitespace).new() as guide:
            for byte in start:
                guide.accept(piece[bytes([byte])])
            for n in range(100):
                if not guide.mask()[piece[space] // 32] >> (piece[space] % 32) & 1:
                    return n
                guide.accept(piece[space])
        raise AssertionError("no bound")

    assert n_spaces(b"[", b" ") == 2
    assert n_spaces(b"[\n", b" ") == 40
    assert n_spaces(b"[1,", b" ") == 2
    assert n_spaces(b"", b" ") == 0
    for start in (b"", b"[", b"[1", b"[1,"):
        assert [n_spaces(start, space, "compact") for space in (b" ", b"\n", b"\t")] == [0, 0, 0], start


# What llguidance cannot keep, and the place that the message names.
# Small multiples whose least common multiple is large, at places that JSON Schema names late or not at all.
MULTIPLES = {"type": "integer", "allOf": [{"multipleOf": 99_991}, {"multipleOf": 9}]}
REFUSED: dict[str, tuple[Any, str]] = {
    "type": (
        {"properties": {"a": {"items": {"type": "strin"}}}},
        "at #/properties/a/items: Invalid type: strin",
    ),
    "uniqueItems": (
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 3},
        "at #: 'uniqueItems': 'minItems' is 3, but 'items' has 2 values",
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"not": {"const": "x"}}},
        "at #/propertyNames: 'not' is not supported for names",
    ),
    "dynamicRef": ({"$dynamicRef": "#x"}, "dynamicRef"),
    "look-around": ({"items": {"pattern": "(a(?=b))*"}}, "at #/items: 'pattern': look-around in"),
    "pattern": (
        {"properties": {"a/b": {"type": "string", "pattern": "x(y"}}},
        r"#/properties/a~1b: 'pattern'[^^]*unclosed[^^]*\^",
    ),
    "remote": ({"$ref": "http://example.org/x"}, "to another document, .http://example.org/x.; put what"),
    "reference": ({"$ref": "#/$defs/x"}, "'/\\$defs/x' does not exist"),
    "in a definition": (
        {"$defs": {"q": {"pattern": "x(y"}}, "items": {"$ref": "#/$defs/q"}},
        "at #/items: .pattern. is not a regular expression",
    ),
    "empty range": (
        {"type": "integer", "minimum": 5, "maximum": 1},
        r"minimum \(5\) is greater than maximum",
    ),
    "nothing": (False, "which no JSON satisfies"),
    "loop": ({"$ref": "#"}, "allows no first token"),
    "draft 3": ({"type": "integer", "divisibleBy": 2}, "at #: 'divisibleBy' is of draft 3"),
    "options": ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "'x-guidance' is not supported"),
    "patterns": ({"patternProperties": {f"^{i}$": {} for i in range(101)}}, "at most 100"),
    "multiples": (
        {"allOf": [{"multipleOf": n} for n in (97, 89, 83, 0.5)]},
        "common multiple 1433078 \\(in steps of 1/2\\)",
    ),
    "multiples of unevaluated members": ({"unevaluatedProperties": MULTIPLES}, "common multiple 899919"),
    "multiples of unevaluated items": ({"unevaluatedItems": MULTIPLES}, "common multiple 899919"),
    "multiples elsewhere": ({"$ref": "#/x/0", "x": [MULTIPLES]}, "common multiple 899919"),
    "multiples behind two references": (
        {"items": {"$ref": "#/x/a"}, "x": {"a": {"$ref": "#/y"}}, "y": MULTIPLES},
        "common multiple 899919",
    ),
    "multiples behind an address": (
        {"$id": "http://a.b/c", "$ref": "c#/x", "x": MULTIPLES},
        "common multiple 899919",
    ),
    "options elsewhere": ({"$ref": "#/x", "x": {"x-guidance": {}}}, "at #/x: 'x-guidance' is not supported"),
    "a wrong part of unevaluated items": (
        {"unevaluatedItems": {"dependencies": 5}},
        "at #/unevaluatedItems: 'dependencies' is 5; it must be an object of",
    ),
    "wrong unevaluated members": (
        {"unevaluatedProperties": 5},
        "at #: 'unevaluatedProperties' is 5; it must",
    ),
    "a wrong part of names": (
        {"propertyNames": {"minLength": "x"}},
        "at #/propertyNames: 'minLength' is 'x'; it must be a count",
    ),
    "properties": (
        {"type": "object", "properties": {f"p{i}": {} for i in range(1800)}},
        "too large: .*(max is 2000|limit 5000)",
    ),
    "required": ({"required": [str(i) for i in range(MAX_REQUIRED + 1)]}, "at most 2000"),
    "no JSON": ('{"type":\n "string",}', "is not valid JSON: .* at line 2 column 1"),
    "no schema": ("[1]", "must be a JSON object or boolean, not an array"),
    "NaN": ('{"minimum": NaN}', "NaN is not a number"),
    "infinity": ({"minimum": float("inf")}, "cannot be read as JSON"),
    "deep text": ('{"items":' * 100_000 + "true" + "}" * 100_000, "nested too deeply|limit"),
    "deep": ('{"items":' * 200 + "true" + "}" * 200, "more than 126 levels"),
    "long": ({"const": "a" * 300_000}, "characters; the limit is"),
}


@pytest.mark.parametrize(
    "schema",
    [
        {key: 10**400}
        for key in (
            *(
                "minimum",
                "maximum",
                "exclusiveMinimum",
                "exclusiveMaximum",
                "multipleOf",
                "minLength",
                "maxLength",
            ),
            *("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"),
        )
    ]
    + [
        {"minimum": 10**400, "exclusiveMaximum": 1.5},
        {"contains": {}, "maxContains": 10**400},
        {
            "not": {"maxLength": 10**400},
            "minItems": 10**400,
            "prefixItems": [{}],
            "contains": {"type": "null"},
        },
        {"properties": {"a": {}, "b": {}}, "maxProperties": 10**400, "minProperties": 1},
    ],
)
def test_numbers_that_no_double_holds_are_followed_or_refused(demo: Model, schema: dict[str, Any]) -> None:
    with suppress(InvalidRequestError):
        compile_guide(demo, json_schema=schema)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(demo: Model, name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compile_guide(demo, json_schema=schema)
    assert str(caught.value).startswith("json_schema ")
    assert "llguidance {" not in str(caught.value)


def test_an_exclusive_bound_is_not_accepted(demo: Model) -> None:
    kept: list[dict[str, Any]] = [
        {"type": "number", "exclusiveMinimum": 7},
        {"type": "number", "exclusiveMinimum": 7, "maximum": 8},
        {"type": "number", "exclusiveMinimum": -7.5, "exclusiveMaximum": -6},
        {"type": "number", "exclusiveMinimum": 7, "maximum": 7.5},
        {"maximum": -7, "exclusiveMaximum": -7, "minimum": -7.5},
    ]
    piece = {demo.piece(t): t for t in range(demo.n_vocab)}
    for schema in kept:
        with compile_guide(demo, json_schema=schema).new() as guide:
            for byte in str(schema.get("exclusiveMaximum", schema.get("exclusiveMinimum"))).encode():
                guide.accept(piece[bytes([byte])])
            assert not guide.may_end, schema


def test_the_same_schema_in_every_form(demo: Model) -> None:
    schema = {"type": "string", "enum": ["é"]}
    forms: list[Any] = [schema, json.dumps(schema), json.dumps(schema, indent=2, ensure_ascii=False)]
    assert len({id(compile_guide(demo, json_schema=form)) for form in forms}) == 1


def test_order_of_properties_is_the_schemas(context: Context) -> None:
    names = ["b", "a", "c"]
    schema = {
        "type": "object",
        "properties": {name: {"const": 1} for name in names},
        "required": ["c", "b", "a"],
        "additionalProperties": False,
    }
    assert list(json.loads(generate(context, schema, 1))) == names


def test_schemas_are_not_written_to(demo: Model) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    before = json.dumps(schema)
    compile_guide(demo, json_schema=schema)
    assert json.dumps(schema) == before
    assert lp.__version__

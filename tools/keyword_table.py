"""Write the table of keywords in docs/structured.md: what masks allow of small schemas.

    python tools/keyword_table.py

Each row is a schema with JSON texts that it allows and forbids. The tool compiles the schema and asks the mask. A test
fails if the page says something else.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

from page_sections import cell, with_section

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe

import llamapipe as lp
from llamapipe.errors import DecodeError, InvalidRequestError
from llamapipe.structured.compile import compile_guide

PAGE = Path(__file__).parent.parent / "docs" / "structured.md"
BEGIN, END = "<!-- keywords: python tools/keyword_table.py -->\n", "<!-- end of keywords -->\n"


class Case(NamedTuple):
    """A schema of a keyword, JSON texts that are valid by the schema, and others that are not."""

    keyword: str
    schema: dict[str, Any]
    valid: tuple[str, ...]
    invalid: tuple[str, ...]


OBJECT = {"type": "object", "properties": {"a": {}, "b": {}}}
CASES = (
    Case("type", {"type": "integer"}, ("1", "-7", "2.0"), ("2.5", '"1"')),
    Case("type", {"type": ["number", "null"]}, ("1", "1.5", "1e3", "null"), ('"1"', "true")),
    Case("enum", {"enum": [1, "a", None]}, ("1", '"a"', "null", "1.0"), ("2", '"b"')),
    Case("const", {"const": 9007199254740993}, ("9007199254740993",), ("9007199254740992",)),
    Case("minimum, maximum", {"type": "integer", "minimum": 3, "maximum": 12}, ("3", "12"), ("2", "13")),
    Case("minimum, maximum", {"type": "number", "maximum": 6.93}, ("6.93", "-1.5", "6.9"), ("6.94", "7")),
    Case("minimum, maximum", {"type": "number", "minimum": 0}, ("0", "0.5", "1e-06"), ("-1", "-1e3")),
    Case("multipleOf", {"type": "integer", "multipleOf": 3}, ("0", "9", "-3"), ("1", "10")),
    Case("multipleOf", {"type": "number", "multipleOf": 0.01}, ("0.25", "7", "1.10", "1.1"), ("0.255",)),
    Case("multipleOf", {"type": "number", "multipleOf": 0.25}, ("0.25", "7", "1.50", "1.5"), ("0.3",)),
    Case(
        "minLength, maxLength",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ('"ab"', '"é😀\\""'),
        ('"a"', '"abcd"'),
    ),
    Case("pattern", {"type": "string", "pattern": "^[a-z]+$"}, ('"ab"',), ('"A"', '""')),
    Case("pattern", {"type": "string", "pattern": "^(?!x)[a-z]+$"}, ('"ab"',), ('"xa"',)),
    Case("pattern", {"type": "string", "pattern": r"^\w$"}, ('"a"',), ('"é"', '"-"')),
    Case("pattern", {"type": "string", "pattern": "(?<=a)b"}, ('"ab"',), ('"b"',)),
    Case("format", {"type": "string", "format": "email"}, ('"j.s@my-company.com"',), ('"j"',)),
    Case(
        "format",
        {"type": "string", "format": "date-time"},
        ('"2024-02-29T10:00:00Z"',),
        ('"2024-02-29"', '"x"'),
    ),
    Case("format", {"type": "string", "format": "regex"}, ('"a+"',), ('"("',)),
    Case(
        "items, prefixItems",
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}},
        ("[]", "[null,1]"),
        ("[1]", "[null,null]"),
    ),
    Case(
        "minItems, maxItems",
        {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
        ("[null]",),
        ("[]", "[null,null,null]"),
    ),
    Case(
        "uniqueItems",
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
        ("[2,1]",),
        ("[1,1]",),
    ),
    Case(
        "uniqueItems",
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        ("[2,1]",),
        ("[1,1]",),
    ),
    Case("contains", {"type": "array", "contains": {"const": 1}}, ("[2,1]",), ("[]", "[2]")),
    Case(
        "properties, required",
        {**OBJECT, "required": ["b"]},
        ('{"a":1,"b":2}', '{"b":2,"c":3}', '{"b":2,"a":1}'),
        ('{"a":1}',),
    ),
    Case("additionalProperties", {**OBJECT, "additionalProperties": False}, ("{}", '{"b":1}'), ('{"c":1}',)),
    Case(
        "patternProperties",
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}},
        ('{"x1":null}', '{"y":1}'),
        ('{"x1":1}',),
    ),
    Case(
        "patternProperties",
        {"type": "object", "patternProperties": {"a": {}, "b": {"type": "null"}}},
        ('{"a":1}',),
        ('{"b":1}',),
    ),
    Case(
        "propertyNames",
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}},
        ('{"y":1,"x":2}',),
        ('{"z":1}',),
    ),
    Case(
        "minProperties, maxProperties", {**OBJECT, "maxProperties": 1}, ("{}", '{"b":1}'), ('{"a":1,"b":2}',)
    ),
    Case("minProperties, maxProperties", {"type": "object", "minProperties": 1}, ('{"x":1}',), ("{}",)),
    Case(
        "dependentRequired",
        {**OBJECT, "dependentRequired": {"a": ["b"]}},
        ("{}", '{"a":1,"b":2}'),
        ('{"a":1}',),
    ),
    Case(
        "unevaluatedProperties",
        {"allOf": [OBJECT], "unevaluatedProperties": False},
        ('{"a":1}',),
        ('{"c":1}',),
    ),
    Case(
        "unevaluatedProperties",
        {
            "anyOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {}}}],
            "unevaluatedProperties": False,
        },
        ('{"a":1,"b":1}', '{"b":1}'),
        ('{"b":1,"a":2}', '{"c":1}'),
    ),
    Case(
        "unevaluatedItems",
        {"type": "array", "allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False},
        ("[]", "[1]"),
        ("[1,2]",),
    ),
    Case(
        "allOf, anyOf",
        {"anyOf": [{"type": "null"}, {"type": "integer", "allOf": [{"minimum": 2}]}]},
        ("null", "2"),
        ("1",),
    ),
    Case(
        "oneOf", {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, ('"ab"',), ('"a"', "1")
    ),
    Case(
        "oneOf",
        {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        ('"a"', '"b"'),
        ('"ab"', '"c"'),
    ),
    Case("not", {"type": "string", "not": {"enum": ["a"]}}, ('"b"', '""'), ('"a"',)),
    Case("not", {"type": "string", "not": {"pattern": "^a"}}, ('"b"',), ('"ab"',)),
    Case(
        "if, then, else",
        {**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        ("{}", '{"a":1,"b":2}'),
        ('{"a":1}',),
    ),
    Case("$ref", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}}, ("null",), ("1",)),
    Case("$ref", {"$ref": "http://example.com/other"}, (), ()),
    Case(
        "$dynamicRef",
        {"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "null"}}},
        ("null",),
        ("1",),
    ),
)


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n += 1


def with_table(text: str, model: lp.Model) -> str:
    """The page with the table as the masks are. A handler counts warnings, so they are not shown."""
    lines = ["| keyword | schema | mask | differs in |", "|---|---|---|---|"]
    for case in CASES:
        mask, differs = _result(case, model)
        shown = ", ".join(f"`{keyword}`" for keyword in differs)
        keywords = ", ".join(f"`{keyword}`" for keyword in case.keyword.split(", "))
        schema = json.dumps(case.schema, ensure_ascii=False)
        lines.append(f"| {keywords} | `{cell(schema)}` | {mask} | {cell(shown)} |")
    table = "\n".join(lines) + "\n"
    return with_section(text, BEGIN, END, table)


def _result(case: Case, model: lp.Model) -> tuple[str, list[str]]:
    log, handler = logging.getLogger("llamapipe"), _Log()
    log.addHandler(handler)
    was, log.propagate = log.propagate, False
    try:
        factory = compile_guide(model, json_schema=case.schema)
    except InvalidRequestError:
        return "refused", []
    finally:
        log.removeHandler(handler)
        log.propagate = was
    lost = [text for text in case.valid if not _accepts(model, factory, text)]
    more = [text for text in case.invalid if _accepts(model, factory, text)]
    names = [*(["narrower"] if lost else []), *(["wider"] if more else [])]
    if not names:
        return "exact", []
    warned = ", with a warning" if handler.n else ""
    return " and ".join(names) + warned, lost + more


def _accepts(model: lp.Model, factory: Any, text: str) -> bool:
    try:
        with factory.new() as guide:
            for token in model.tokenize(text, add_special=False):
                guide.accept(token)
            return bool(guide.may_end)
    except DecodeError:
        return False


if __name__ == "__main__":
    with lp.Model.demo() as demo:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), demo), encoding="utf-8")

"""Random JSON schemas that only finitely short texts satisfy, and the same from a seed on any machine."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "home", "a b", 'quo"te', "größe", "x/y", "back\\slash", "日本", "kind")
# Each describes few and short texts.
PATTERNS = (
    "^[a-c]{1,4}$",
    "^(cat|dog)s?$",
    "^[0-9]{3}-[0-9]{2}$",
    "^[A-Z][a-z]{0,5}$",
    "^[A-Za-z0-9_]{2,3}$",
    '^[^x"]{1,3}$',
)


class SchemaMaker:
    """Makes schemas: every kind of value, nested ``depth`` levels at most."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self, depth: int = 3) -> dict[str, Any]:
        schema = self._value(depth)
        if self._random.random() < 0.3:
            schema = self._with_definitions(depth, schema)
        return schema

    def _with_definitions(self, depth: int, rest: dict[str, Any]) -> dict[str, Any]:
        return {
            "$defs": {"part": self._value(depth - 1), "node": self._node()},
            "type": "object",
            "properties": {
                "first": {"$ref": "#/$defs/part"},
                "rest": rest,
                "node": {"$ref": "#/$defs/node"},
            },
            "required": ["first", "rest", "node"][: self._random.randint(1, 3)],
            "additionalProperties": False,
        }

    def _node(self) -> dict[str, Any]:
        """Refers to itself; leaves are as likely as branches, and there is at most one branch."""
        return {
            "anyOf": [
                {"type": "null"},
                {"type": "integer", "minimum": 0, "maximum": 9},
                {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            ]
        }

    def _value(self, depth: int) -> dict[str, Any]:
        simple = (self._string, self._integer, self._number, self._choice, self._constant)
        nested = (self._object, self._array, self._tuple, self._any_of)
        make = self._random.choice(simple if depth <= 0 else simple + nested * 3)
        return make(depth)

    def _string(self, depth: int) -> dict[str, Any]:
        kind = self._random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._random.choice(("date", "uuid", "ipv4"))}
        least = self._random.randint(0, 5)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 10)}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(-200, 200)
        schema: dict[str, Any] = {
            "type": "integer",
            "minimum": low,
            "maximum": low + self._random.randint(7, 1000),
        }
        if self._random.random() < 0.3:
            schema["multipleOf"] = self._random.randint(2, 7)
        if self._random.random() < 0.3:
            schema["exclusiveMinimum"] = low - 1
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        """With a step, as it may have any count of digits otherwise; exact in binary, as jsonschema divides floats."""
        low = self._random.randint(-50, 50) / 4
        return {
            "type": "number",
            "minimum": low,
            "exclusiveMaximum": low + self._random.randint(8, 100) / 8,
            "multipleOf": self._random.choice((0.25, 0.5)),
        }

    def _choice(self, depth: int) -> dict[str, Any]:
        values: list[Any] = [*self._random.sample(WORDS, 3), 7, -1.5, True, None, [1, "two"], {"k": {}}]
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _constant(self, depth: int) -> dict[str, Any]:
        return {"const": self._random.choice([*WORDS, 12, None, False, {"a": [1, {}]}, []])}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(WORDS, self._random.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: self._value(depth - 1) for name in names},
            "required": self._random.sample(names, self._random.randint(0, len(names))),
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._value(depth - 1),
            "minItems": least,
            "maxItems": least + self._random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> dict[str, Any]:
        first = [self._value(depth - 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth - 1) for _ in range(self._random.randint(2, 3))]}

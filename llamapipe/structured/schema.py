"""Checks JSON schemas before llguidance compiles them.

``schema_object`` refuses a schema if llguidance would silently ignore a part of it, or would need unbounded time or
memory. An error in a subschema names the subschema's JSON pointer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError

# Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = ("items", "additionalItems", "additionalProperties")
_LIST = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
# In this private keyword, `_logic` writes schemas for the items that `contains` counts and for the other items.
COUNTED = "$counted"
MAPS = ("properties", "patternProperties", "$defs", "definitions", COUNTED)
# The same for the keywords that `_logic` and `_rewrite` replace.
_ONE_OF_LOGIC = (
    *("not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_MAPS_OF_LOGIC = ("dependentSchemas", "dependencies")
# With one of these keywords, a schema says which other properties it allows, or combines with other schemas.
_ABOUT_OTHERS = {
    "additionalProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas",
    "dependencies",
}  # fmt: skip
# Keywords that OpenAPI 3.0 may combine with ``nullable``.
_OTHER_PARTS = {"$ref", "allOf", "anyOf", "oneOf"}
# Assertions of draft 3, which llguidance would ignore.
_DRAFT_3 = ("divisibleBy", "disallow", "extends")
# The maximum nesting of objects and lists in schemas, messages and tools, as in a body for the server. Python allows
# 1000 nested calls, and some functions need two per level.
MAX_DEPTH = 256
# Limits of keywords for which llguidance does not bound time and memory.
MAX_REQUIRED = 2000  # names in one list; 20,000 take 3 s, and time grows with the square of the number
MAX_PATTERNS = 100  # patternProperties; 200 take 2.5 s, 400 over 12 s
MAX_MULTIPLE = 100_000  # least common multiple of all multipleOf; 100,000 take 0.9 s, 700,000 10 s and 400 MB
# Where JSON permits spaces, at most one match of this pattern is allowed. The pattern fits every usual layout, and it
# stops a model from generating spaces without end.
SPACE = r"\x20{1,2}|\n[\x20\t]{0,40}"
# llguidance may read `oneOf` as `anyOf`, because `_logic` makes the schemas of a `oneOf` exclusive.
_STRICT = {"lenient": False, "coerce_one_of": True}
# The values of SamplingParams.json_whitespace, with llguidance's options for each.
WHITESPACE: dict[str, dict[str, Any]] = {
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", **_STRICT},
    "compact": {"whitespace_flexible": False, **_STRICT},
    "flexible": {"whitespace_pattern": SPACE, **_STRICT},
}

Schema = Mapping[str, Any] | bool | str


def schema_object(schema: Any) -> dict[str, Any]:
    """Return a checked copy of the schema, made of plain JSON values; ``true`` becomes ``{}``.

    Raises TypeError for other types, InvalidRequestError for invalid JSON and for schemas that llguidance would not
    follow exactly.
    """
    value = json.loads(schema_text(schema))
    if value is True:
        return {}
    if value is False:
        raise InvalidRequestError("json_schema at #: 'false', which no JSON satisfies")
    if not isinstance(value, dict):
        raise InvalidRequestError(f"json_schema must be a JSON object or boolean, not {_kind(value)}")
    parts = _reachable(value)
    for pointer, part in parts:
        _refuse(pointer, part)
    references = [part["$ref"] for _, part in parts if "$ref" in part]
    if all(resolved(value, reference) for reference in references):
        _check_costs([part for _, part in parts])
    else:  # a reference is an address or an anchor, which only llguidance resolves
        _check_costs(list(_objects(value)))
    return value


def _reachable(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the subschemas, and the schemas at other places that references name, each with its pointer."""
    parts: list[tuple[str, dict[str, Any]]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("#", schema)]
    for start, node in waiting:
        for pointer, part in subschemas(node, logic=True, seen=seen):
            parts.append((start + pointer[1:], part))
            if (place := resolved(schema, part.get("$ref"))) is not None:
                waiting.append(place)
    return parts


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def ref_stands_alone(root: dict[str, Any]) -> bool:
    """Return whether a schema follows draft 4, 6 or 7, in which keywords next to ``$ref`` have no effect."""
    draft = root.get("$schema")
    return isinstance(draft, str) and re.search(r"json-schema\.org/draft-0[3-7]/", draft) is not None


def pointer_to(pointer: str, name: str) -> str:
    """Return the JSON pointer to the member ``name`` of the value at ``pointer``."""
    return f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"


def resolved(root: dict[str, Any], reference: Any) -> tuple[str, Any] | None:
    """Return the pointer and the value that a ``$ref`` into ``root`` names; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    value: Any = root
    for name in steps_of(reference)[1:]:
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return unquote(reference), value


def steps_of(reference: str) -> list[str]:
    """Return the decoded steps of a reference to a JSON pointer. The first step is ``#``."""
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(reference).split("/")]


def check_depth(name: str, value: Any) -> None:
    """Raise InvalidRequestError for a value with more than ``MAX_DEPTH`` levels of objects and lists."""
    level = [value] if isinstance(value, (Mapping, list, tuple)) else []
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for part in level:
            inner += part.values() if isinstance(part, Mapping) else part
        # By id(), because a list may hold another one twice.
        level = [*{id(part): part for part in inner if isinstance(part, (Mapping, list, tuple))}.values()]
        if not level:
            return
    raise InvalidRequestError(
        f"{name} nested too deeply: more than {MAX_DEPTH} levels of objects and lists; nest fewer"
    )


def identity(value: Any) -> str:
    """Return a text that equal JSON values share: 1 and 1.0 are equal, 1 and true are not."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(inner) for name, inner in part.items()}
        if isinstance(part, list):
            return [*map(plain, part)]
        return int(part) if isinstance(part, float) and part.is_integer() else part

    return json.dumps(plain(value), sort_keys=True)


def json_type(value: object) -> str:
    """Return the JSON type of a decoded value; a number is "number"."""
    if isinstance(value, bool):
        return "boolean"
    return "object" if isinstance(value, Mapping) else _TYPES.get(type(value), "number")


_TYPES = {str: "string", type(None): "null", list: "array"}


def schema_text(schema: Any) -> str:
    """Return the schema as JSON text, with keys in their given order. Raises as ``schema_object`` does."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema, parse_constant=_no_number)
        elif not isinstance(schema, (Mapping, bool)):
            raise TypeError(f"json_schema must be a dict, a bool or JSON text, not {type(schema).__name__}")
        check_depth("json_schema is", schema)
        return json.dumps(schema, allow_nan=False, default=_plain)
    except json.JSONDecodeError as e:
        raise InvalidRequestError(
            f"json_schema is not valid JSON: {e.msg} at line {e.lineno} column {e.colno}"
        ) from None
    except RecursionError:
        raise InvalidRequestError(
            f"json_schema is nested too deeply: more than {MAX_DEPTH} levels of objects and lists; nest fewer"
        ) from None
    except InvalidRequestError:
        raise
    except ValueError as e:  # NaN, a cycle, an integer of over 4,300 digits
        raise InvalidRequestError(f"json_schema cannot be read as JSON: {e}") from None


def with_options(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    """Return the schema with options for llguidance.

    ``whitespace``: the allowed spaces, a key of ``WHITESPACE``. The options also include strictness.
    """
    return {**schema, "x-guidance": WHITESPACE[whitespace]}


def without_options(schema: Any) -> tuple[dict[str, Any], str] | None:
    """Return the arguments of ``with_options`` from its result; None for any other value."""
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    for whitespace, settings in WHITESPACE.items():
        if options == settings:
            return {key: value for key, value in schema.items() if key != "x-guidance"}, whitespace
    return None


def closed_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which objects allow only the listed names or patterns, unless the schema allows others.

    Parts of an ``allOf``, and objects that are combined with other schemas, stay unchanged, because none of them lists
    all properties.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    parts = list(subschemas(copy))
    combined: list[Any] = []  # schemas that list only a part of an object's members
    for _, part in parts:
        others = part.keys() & {"properties", "patternProperties", "additionalProperties", "$ref", "allOf"}
        for keyword in ("allOf", "anyOf", "oneOf"):
            is_part = (
                len(part.get("allOf", ())) > 1 or others != {"allOf"} if keyword == "allOf" else bool(others)
            )
            if isinstance(part.get(keyword), list) and is_part:
                combined += part[keyword]
    are_parts = {id(member) for member in combined}
    named = {
        member["$ref"]
        for member in combined
        if isinstance(member, dict) and isinstance(member.get("$ref"), str)
    }
    for pointer, part in parts:
        lists = any(isinstance(part.get(key), dict) for key in ("properties", "patternProperties"))
        is_open = lists and not part.keys() & _ABOUT_OTHERS
        if is_open and "/allOf/" not in pointer and id(part) not in are_parts and pointer not in named:
            part["additionalProperties"] = False
            if not part.get("patternProperties"):  # a required member may be missing in the list
                listed = part["properties"]
                part["properties"] = {
                    **listed,
                    **{n: {} for n in part.get("required", ()) if n not in listed},
                }
    return copy


def takes_nothing(schema: dict[str, Any]) -> bool:
    """Return whether ``closed_objects`` allows no object except ``{}``."""
    closed = closed_objects(schema)
    is_closed = closed.get("additionalProperties") is False
    return is_closed and not closed.get("properties") and not closed.get("patternProperties")


def subschemas(
    schema: dict[str, Any], *, logic: bool = False, seen: set[int] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema and its subschemas, each with its JSON pointer, parents first.

    ``logic``: include the subschemas of keywords that negate or combine, such as ``not`` and ``if``. ``seen``: the
    ``id()`` of each schema to leave out with its subschemas; yielded schemas are added.
    """
    of_one, of_maps = (ONE + _ONE_OF_LOGIC, MAPS + _MAPS_OF_LOGIC) if logic else (ONE, MAPS)
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        pointer, part = waiting.pop()
        if not isinstance(part, dict) or (seen is not None and id(part) in seen):
            continue
        if seen is not None:
            seen.add(id(part))
        yield pointer, part
        inner: list[tuple[str, Any]] = [(f"{pointer}/{key}", part[key]) for key in of_one if key in part]
        for key in _LIST:
            if isinstance(part.get(key), list):
                inner += [(f"{pointer}/{key}/{i}", member) for i, member in enumerate(part[key])]
        for key in of_maps:
            if isinstance(part.get(key), dict):
                inner += [
                    (pointer_to(f"{pointer}/{key}", name), member) for name, member in part[key].items()
                ]
        waiting += reversed(inner)


def with_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without OpenAPI 3.0's ``nullable``, a keyword that JSON Schema does not have.

    Null becomes an additional type or alternative.
    """
    if not any(part.get("nullable") is True for _, part in subschemas(schema, logic=True)):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for _, part in list(subschemas(copy, logic=True)):
        if part.pop("nullable", False) is not True:
            continue
        if isinstance(part.get("type"), str):
            part["type"] = [*{part["type"]: 0, "null": 0}]
        elif "type" not in part and (moved := {key: part.pop(key) for key in _OTHER_PARTS & part.keys()}):
            part["anyOf"] = [moved, {"type": "null"}]
    return copy


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("properties", "patternProperties"), (_is_schema_map, "an object of schemas")),
    **dict.fromkeys(
        ("$defs", "definitions"), (lambda value: isinstance(value, dict), "an object of schemas")
    ),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), (_is_schemas, "a list of schemas")),
    **dict.fromkeys(
        ("additionalProperties", *_ONE_OF_LOGIC),
        (_is_schema, "a schema"),
    ),
    **dict.fromkeys(
        (f"{end}{what}" for what in ("Length", "Items", "Properties", "Contains") for end in ("min", "max")),
        (_is_count, "a count"),
    ),
    "dependentSchemas": (_is_schema_map, "an object of schemas"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
        "an object of lists of names",
    ),
    "dependencies": (
        lambda value: (
            isinstance(value, dict)
            and all(_is_schema(member) or _is_names(member) for member in value.values())
        ),
        "an object of schemas and lists of names",
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), (lambda v: _is_number(v) or isinstance(v, bool), "a number")
    ),
    **dict.fromkeys(("pattern", "format", "$ref"), (lambda value: isinstance(value, str), "a text")),
    "items": (lambda value: _is_schema(value) or _is_schemas(value), "a schema"),
    "required": (_is_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "type": (lambda value: isinstance(value, str) or _is_names(value), "a name or a list of names"),
}


def _refuse(pointer: str, part: dict[str, Any]) -> None:
    for keyword, value in part.items():
        is_right, what = _SHAPES.get(keyword, (None, ""))
        if is_right is not None and not is_right(value):
            raise InvalidRequestError(
                f"json_schema at {pointer}: {quoted(keyword)} is {quoted(value)}; it must be {what}"
            )
    old = [key for key in _DRAFT_3 if key in part]
    if old:
        raise InvalidRequestError(
            f"json_schema at {pointer}: {quoted(old[0])} is of draft 3, which is not supported"
        )
    if "x-guidance" in part:
        raise InvalidRequestError(
            f"json_schema at {pointer}: 'x-guidance' is not supported; spaces, separators and strictness are fixed"
        )
    required = part.get("required")
    n_required = len(required) if isinstance(required, list) else 0
    if n_required > MAX_REQUIRED:
        raise InvalidRequestError(
            f"json_schema at {pointer}: 'required' has {n_required} names; at most {MAX_REQUIRED} are supported"
        )


def _check_costs(parts: list[dict[str, Any]]) -> None:
    """Check the cost of all parts together, because llguidance may merge any of them. Raises InvalidRequestError."""
    n_patterns = sum(
        len(p["patternProperties"]) for p in parts if isinstance(p.get("patternProperties"), dict)
    )
    if n_patterns > MAX_PATTERNS:
        raise InvalidRequestError(
            f"json_schema at #: {n_patterns} patterns in 'patternProperties'; at most {MAX_PATTERNS} are supported"
        )
    from fractions import Fraction

    steps = {Fraction(str(p["multipleOf"])) for p in parts if _is_number(p.get("multipleOf"))} - {Fraction(0)}
    unit = math.lcm(*(step.denominator for step in steps))
    common = math.lcm(*(int(step * unit) for step in steps))
    if common > MAX_MULTIPLE:
        raise InvalidRequestError(
            f"json_schema at #: 'multipleOf' with the least common multiple {common} (in steps of "
            f"{Fraction(1, unit)}); at most {MAX_MULTIPLE} is supported"
        )


def _plain(value: Any) -> Any:
    """Convert mappings other than dict for ``json``. Raises TypeError for any other type."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"json_schema holds a {type(value).__name__}, which JSON cannot represent")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _kind(value: Any) -> str:
    return {"null": "null", "array": "an array", "string": "a string"}.get(json_type(value), "a number")

"""Rewrites JSON schemas so that llguidance can follow their keywords exactly.

llguidance refuses some keywords that its other keywords can express, and follows some formats only roughly. Such parts
of a schema are replaced by equivalent ones: formats and ``propertyNames`` by patterns and listed names. ``_grammar``
writes the parts without an equivalent.

If a part can be replaced only by a wider one, there is a warning. A part is never replaced by a narrower one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.formats import ANY_STRING, FORMATS
from llamapipe.structured.patterns import LOOK_AROUND, translated
from llamapipe.structured.schema import identity, resolved, subschemas

Node = dict[str, Any]
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "additionalItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    ),
    "number": (*BOUNDS, "multipleOf"),
    "boolean": (),
    "null": (),
}  # fmt: skip
# Keywords that restrict values; all others are annotations.
ASSERTIONS = {
    "type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains", "minContains",
    "maxContains", "unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "propertyNames", "$dynamicRef", "$recursiveRef", *(keyword for group in OF_TYPE.values() for keyword in group),
}  # fmt: skip
# Keywords that `_grammar` can combine in a schema for values of one or several types.
OF_TYPED = {"type", "contains", "minContains", "maxContains"}.union(*OF_TYPE.values())
_OTHER_ASSERTIONS = {
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
}  # fmt: skip


def rewritten(schema: Node) -> tuple[Node, list[str]]:
    """Return a copy that llguidance can follow, with the same or a wider meaning, and a warning for each wider part.

    Raises InvalidRequestError, with keyword and pointer, for a part that cannot be replaced. ``uniqueItems`` stays
    where the items come from a list of at most 63 values; elsewhere it is left out, with a warning.
    """
    copy: Node = json.loads(json.dumps(schema))
    warnings: list[str] = []
    parts = list(subschemas(copy))
    for _, part in parts:
        _simplify(part)
    for pointer, part in parts:
        warnings += _rewrite_unique_items(copy, pointer, part)
    for pointer, part in parts:
        if "propertyNames" in part:
            warnings += _rewrite_property_names(copy, pointer, part)
    reasons = [(pointer, reason) for pointer, part in parts if (reason := _rewrite_format(part)) is not None]
    return copy, [*warnings, *_warnings_of_formats(reasons)]


def target(root: Node, node: Any, is_plain: bool = False) -> Any:
    """Return the schema that a ``$ref`` leads to; a schema without one, or with a bad one, is returned as it is.

    ``is_plain``: follow the reference only if no other keyword restricts the value.
    """
    for _ in range(100):
        if not isinstance(node, dict) or "$ref" not in node:
            return node
        place = resolved(root, node["$ref"])
        if place is None or (is_plain and node.keys() & ASSERTIONS != {"$ref"}):
            return node
        node = place[1]
    return node


def listed_values(root: Node, node: Any) -> list[Any] | None:
    """Return the values that a schema lists by ``enum``, ``const`` or the type boolean or null; None if it does not.

    Other keywords of the schema may exclude some of them.
    """
    node = target(root, node)
    if not isinstance(node, dict):
        return None
    if isinstance(node.get("enum"), list):
        values = node["enum"]
    elif "const" in node:
        values = [node["const"]]
    elif node.get("type") in ("boolean", "null"):
        values = [False, True] if node["type"] == "boolean" else [None]
    else:
        return None
    seen: dict[str, Any] = {}
    for value in values:
        seen.setdefault(identity(value), value)
    return list(seen.values())


def _lists_exactly(root: Node, node: Any) -> bool:
    """Return whether a schema allows exactly its listed values, within its type and bounds."""
    node = target(root, node, is_plain=True)
    if not isinstance(node, dict):
        return False
    keywords = node.keys() & ASSERTIONS
    return keywords <= {"enum", "const", "type", *BOUNDS} and not {"enum", "const"} <= keywords


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords that have no effect unless one of these others is there.
_ALONE = {
    "minContains": {"contains"},
    "maxContains": {"contains"},
    "then": {"if"},
    "else": {"if"},
    "if": {"then", "else", "unevaluatedItems", "unevaluatedProperties"},
}


def _simplify(part: Node) -> None:
    """Remove keywords without effect, write counts as integers, and translate patterns for llguidance."""
    for keyword, others in _ALONE.items():
        if keyword in part and not others & part.keys():
            del part[keyword]
    for keyword in _COUNTS:
        if isinstance(part.get(keyword), float) and part[keyword].is_integer():
            part[keyword] = int(part[keyword])
    for names in (part, part.get("propertyNames")):
        if isinstance(names, dict) and isinstance(names.get("pattern"), str):
            names["pattern"] = translated(names["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        patterns = part["patternProperties"].items()
        part["patternProperties"] = {translated(pattern): inner for pattern, inner in patterns}


def _rewrite_format(part: Node) -> str | None:
    """Replace ``format`` with a pattern. If that is impossible, remove it and return the reason."""
    name = part.pop("format", None)
    if not isinstance(name, str) or name in ANY_STRING or not _may_be_text(part):
        return None
    if name not in FORMATS:
        return f"{quoted(name)} is not known"
    if LOOK_AROUND.search(part.get("pattern", "")):
        return f"{quoted(name)} is used with a 'pattern' that has look-around"
    pattern = FORMATS[name].pattern
    if part.get("minLength") == 1 and re.fullmatch(pattern, "") is None:
        del part["minLength"]  # the pattern implies it, and it makes masks slower
    _add_pattern(part, f"^(?:{pattern})$")
    return None


def _may_be_text(part: Node) -> bool:
    """Return whether a part allows strings that it does not list."""
    kinds = part.get("type", "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds) and not part.keys() & {"enum", "const"}


def _warnings_of_formats(reasons: list[tuple[str, str]]) -> list[str]:
    if not reasons:
        return []
    shown = "; ".join(f"{reason} (at {quoted(pointer)})" for pointer, reason in reasons[:_MOST_NAMED])
    more = f"; and {len(reasons) - _MOST_NAMED} more" if len(reasons) > _MOST_NAMED else ""
    warning = (
        f"json_schema: 'format' is not enforced, so the result may have other strings: {shown}{more}; check the "
        "result, or use 'pattern'"
    )
    return [warning]


_MOST_NAMED = 5  # maximum number of formats that a warning names


def _add_pattern(part: Node, pattern: str) -> None:
    if "pattern" not in part:
        part["pattern"] = pattern
        return
    kind = {"type": "string"} if part.get("type") == "string" else {}
    part["allOf"] = [*part.get("allOf", ()), {**kind, "pattern": pattern}]


def _rewrite_unique_items(root: Node, pointer: str, part: Node) -> Iterator[str]:
    """Remove ``uniqueItems`` where it has no effect or cannot be enforced. Yield the warning, if any."""
    if "uniqueItems" not in part:
        return
    unique = part["uniqueItems"]
    most = part.get("maxItems")
    if unique is False or (isinstance(most, int) and most <= 1):
        del part["uniqueItems"]
        return
    if unique is not True:
        raise InvalidRequestError(
            f"json_schema at {pointer}: 'uniqueItems' is {quoted(unique)}; it must be a boolean"
        )
    values = listed_values(root, part.get("items"))
    is_exact = _lists_exactly(root, part.get("items")) and "prefixItems" not in part
    if values is not None and is_exact and len(values) <= MAX_UNIQUE:
        return
    del part["uniqueItems"]
    yield (
        f"json_schema at {pointer}: 'uniqueItems' is not enforced: only items of a schema with at most {MAX_UNIQUE} "
        "values in 'enum', and no keyword that excludes some, can be told apart; look for repeated items in the result"
    )


MAX_UNIQUE = 63  # maximum number of values: the parameter of a rule in llguidance has a bit for each


def _rewrite_property_names(root: Node, pointer: str, part: Node) -> Iterator[str]:
    """Replace ``propertyNames`` with listed names or a pattern of names. Yield warnings, if any."""
    names = target(root, part.pop("propertyNames"), is_plain=True)
    if names is True or names == {}:
        return
    if not isinstance(names, dict):
        names = {"enum": []}  # false allows no name
    for keyword in sorted(names.keys() & _OTHER_ASSERTIONS):
        raise InvalidRequestError(
            f"json_schema at {pointer}/propertyNames: {quoted(keyword)} is not supported for names; use 'enum', "
            "'const' or 'pattern'"
        )
    if names.get("type", "string") != "string" and "string" not in names["type"]:
        names = {"enum": []}
    others = part.get("additionalProperties", True)
    values = names.get("enum")
    if "const" in names:
        values = [names["const"]] if values is None or names["const"] in values else []
    patterns = list(_name_patterns(names))
    properties = part.get("properties", {})
    listed = [*properties, *(name for name in part.get("required", ()) if name not in properties)]

    if (listed or values is not None) and "pattern" in names:
        # Python's regular expressions could not check the names: they may take forever, and have another syntax.
        raise InvalidRequestError(
            f"json_schema at {pointer}/propertyNames: 'pattern' is not supported together with listed names; list the "
            "names that match it"
        )
    known = re.compile(FORMATS[names["format"]].pattern if names.get("format") in FORMATS else "(?s:.*)")
    least, most = names.get("minLength", 0), names.get("maxLength", math.inf)

    def fits(name: Any) -> bool:
        return isinstance(name, str) and least <= len(name) <= most and known.fullmatch(name) is not None

    if part.get("patternProperties"):
        yield _names_warning(pointer, "propertyNames", "it is used with 'patternProperties'")
        return
    if values is not None and not listed and (allowed := [name for name in values if fits(name)]):
        # Without listed members, the names may come in any order.
        part["patternProperties"] = {f"^(?:{'|'.join(map(_literally, dict.fromkeys(allowed)))})$": others}
        part["additionalProperties"] = False
        if not _may_be_combined(pointer, part):  # llguidance refuses it if the other part lists members
            part.setdefault("maxProperties", len(allowed))
        return
    if values and not any(isinstance(name, str) for name in values):
        yield f"json_schema at {pointer}/propertyNames: no listed value is a string, so the object will have no members"
    allowed = [name for name in (listed if values is None else values) if fits(name)]
    part["properties"] = {name: properties.get(name, others) for name in allowed}
    for name in listed:
        if name not in allowed:
            part["properties"][name] = False
    part["additionalProperties"] = False
    if values is None and patterns and others is not False:
        if part["properties"] and others is not True and others != {}:
            raise InvalidRequestError(
                f"json_schema at {pointer}: 'propertyNames' is not supported together with 'properties' and a schema "
                "in 'additionalProperties'"
            )
        for keyword in patterns[1:]:
            yield _names_warning(
                f"{pointer}/propertyNames", keyword[0], f"it is used with {quoted(patterns[0][0])}"
            )
        part["patternProperties"] = {patterns[0][1]: others}
    elif values is None:
        part["additionalProperties"] = others
    if "type" not in part and not part["properties"]:
        part["properties"] = {}


def _may_be_combined(pointer: str, part: Node) -> bool:
    return (
        bool(part.keys() & _OTHER_ASSERTIONS)
        or re.search(r"/(allOf|[$]defs|definitions)/", pointer) is not None
    )


def _literally(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):X}}}" for character in text)


def _name_patterns(names: Node) -> Iterator[tuple[str, str]]:
    """Yield each keyword that restricts names, with its pattern; skip a ``minLength`` that the format implies."""
    if isinstance(names.get("pattern"), str):
        yield "pattern", names["pattern"]
    form = FORMATS.get(names["format"]) if isinstance(names.get("format"), str) else None
    if form is not None:
        yield "format", f"^(?:{form.pattern})$"
    least, most = names.get("minLength", 0), names.get("maxLength")
    if least == 1 and form is not None and re.fullmatch(form.pattern, "") is None:
        least = 0
    if least or most is not None:
        keyword = "maxLength" if most is not None else "minLength"
        yield keyword, f"^(?s:.){{{int(least)},{'' if most is None else int(most)}}}$"


def _names_warning(pointer: str, keyword: str, reason: str) -> str:
    return f"json_schema at {pointer}: {quoted(keyword)} is not enforced exactly, so more names are allowed: {reason}"

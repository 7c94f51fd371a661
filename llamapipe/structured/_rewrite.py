"""Rewrites JSON schemas into keywords that llguidance follows exactly.

llguidance refuses some keywords that others of its keywords can express, and knows some formats only roughly. Each part
of a schema is replaced by an equal one: formats and ``propertyNames`` by patterns and listed names. ``_grammar``
writes what has no equal part.

The formats of strings that are enforced are listed here, each as a regular expression for the whole string. A
format is an annotation in JSON Schema: formats that are not listed here are ignored. Those listed allow a subset of
what their RFC allows, so that readers in Python accept every text: no year 0000, no leap seconds, no numbers that
overflow, host names whose last label is a word.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import subschemas

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
# Divisible by 4, and by 400 if by 100.
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    rf"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_ZONE = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_ZONE}"
_N = "[0-9]{1,6}"
_DURATION_TIME = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION_DATE = rf"(?:[0-9]{{1,4}}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_N}W)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_WORD_LABEL = r"[a-zA-Z](?:[a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
_DOMAIN = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9]{0,30}[a-zA-Z0-9])?\.){1,4}[a-zA-Z]{2,24}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = rf"{_ATOM}{{1,24}}(?:\.{_ATOM}{{1,24}}){{0,1}}@{_DOMAIN}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H}:){{7}}{_H}"]
    + [f"(?:{_H}(?::{_H}){{0,{n}}})?::(?:{_H}(?::{_H}){{0,{5 - n}}})?" for n in range(6)]
    + [f"{_H}(?::{_H}){{6}}::"]
)
_HEX = "[0-9a-fA-F]"
_PORT = r"(?::[1-9][0-9]{0,3})?"
_SEGMENT = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_QUERY = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})"
_USER = r"(?:[a-zA-Z0-9._~-]{1,32}(?::[a-zA-Z0-9._~-]{1,32})?@)?"
_HOST = rf"(?:(?:{_LABEL}\.)*{_WORD_LABEL}|{_IPV4})"
_REST = rf"(?:\?{_QUERY}*)?(?:#{_QUERY}*)?"
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]{0,15}"
_URI = rf"{_SCHEME}:(?://{_USER}{_HOST}{_PORT}(?:/{_SEGMENT}*)*|{_SEGMENT}+(?:/{_SEGMENT}*)*){_REST}"


def _uuid(version: str = _HEX, variant: str = _HEX) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}"


FORMATS: Final[dict[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": rf"(?:{_LABEL}\.){{0,2}}{_WORD_LABEL}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uuid": _uuid(),
    # Not in JSON Schema; pydantic writes them.
    **{f"uuid{n}": _uuid(str(n), "[89abAB]") for n in range(1, 9)},
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    "ipv4network": rf"{_IPV4}(?:/32)?",
    "ipv6network": rf"(?:{_IPV6})(?:/128)?",
    "ipvanynetwork": rf"{_IPV4}(?:/32)?|(?:{_IPV6})(?:/128)?",
    "ipv4interface": rf"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?",
    "ipv6interface": rf"(?:{_IPV6})(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?",
    "ipvanyinterface": rf"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?|(?:{_IPV6})(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?",
    "base64": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",
    "base64url": r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?",
}
_log = logging.getLogger("llamapipe")
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
# What restricts values. All else is an annotation.
ASSERTIONS = {
    "type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains", "minContains",
    "maxContains", "unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "propertyNames", "$dynamicRef", "$recursiveRef", *(keyword for group in OF_TYPE.values() for keyword in group),
}  # fmt: skip
# Keywords that say nothing about a value by themselves.
_OF_NAMES = {"enum", "const", "pattern", "format", "minLength", "maxLength"}
_OTHER_ASSERTIONS = {
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
}  # fmt: skip


def rewritten(schema: Node) -> Node:
    """A copy that means the same. Raises InvalidRequestError, with keyword and pointer, for what has no equal.

    ``uniqueItems`` stays where the items are a list of values; elsewhere it is left out, with a warning.
    """
    copy: Node = json.loads(json.dumps(schema))
    parts = list(subschemas(copy))
    for _, part in parts:
        _simplify(part)
    for pointer, part in parts:
        _rewrite_unique_items(copy, pointer, part)
    for pointer, part in parts:
        if "propertyNames" in part:
            _rewrite_property_names(copy, pointer, part)
    for _, part in parts:
        _rewrite_format(part)
    return copy


def resolved(root: Node, reference: Any) -> tuple[str, Any] | None:
    """The pointer and the value that a ``$ref`` into the same schema names; None if it names something else."""
    if not isinstance(reference, str) or not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    value: Any = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return unquote(reference), value


def target(root: Node, node: Any) -> Any:
    """What a schema that is only a reference refers to; the schema itself otherwise."""
    for _ in range(100):
        if not isinstance(node, dict) or "$ref" not in node:
            return node
        found = resolved(root, node["$ref"])
        if found is None:
            return node
        node = found[1]
    return node


def _plain_target(root: Node, node: Any) -> Any:
    """The same, up to a reference beside which something else restricts the value."""
    for _ in range(100):
        if not isinstance(node, dict) or node.keys() & ASSERTIONS != {"$ref"}:
            return node
        found = resolved(root, node["$ref"])
        if found is None:
            return node
        node = found[1]
    return node


def identity(value: Any) -> str:
    """A text that equal values of JSON share: 1 and 1.0 are equal, 1 and true are not."""

    def plain(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: plain(inner) for name, inner in one.items()}
        if isinstance(one, list):
            return [*map(plain, one)]
        return int(one) if isinstance(one, float) and one.is_integer() else one

    return json.dumps(plain(value), sort_keys=True)


def listed_values(root: Node, node: Any) -> list[Any] | None:
    """The values that a schema lists by ``enum``, ``const``, ``boolean`` or ``null``; None if it lists none.

    What else it says may exclude some of them.
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
    """Whether the values that a schema allows are those that it lists, less those of other types and beyond bounds."""
    node = _plain_target(root, node)
    if not isinstance(node, dict):
        return False
    keywords = node.keys() & ASSERTIONS
    return keywords <= {"enum", "const", "type", *BOUNDS} and not {"enum", "const"} <= keywords


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords that say nothing without another one.
_ALONE = {
    "minContains": {"contains"},
    "maxContains": {"contains"},
    "then": {"if"},
    "else": {"if"},
    "if": {"then", "else", "unevaluatedItems", "unevaluatedProperties"},
}


def _simplify(part: Node) -> None:
    """Leaves out what says nothing, and writes counts as integers."""
    for keyword, others in _ALONE.items():
        if keyword in part and not others & part.keys():
            del part[keyword]
    for keyword in _COUNTS:
        if isinstance(part.get(keyword), float) and part[keyword].is_integer():
            part[keyword] = int(part[keyword])
    if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
        del part["format"]


def _rewrite_format(part: Node) -> None:
    name = part.get("format")
    if not isinstance(name, str):
        return
    del part["format"]
    _add_pattern(part, f"^(?:{FORMATS[name]})$")


def _add_pattern(part: Node, pattern: str) -> None:
    if "pattern" not in part:
        part["pattern"] = pattern
        return
    kind = {"type": "string"} if part.get("type") == "string" else {}
    part["allOf"] = [*part.get("allOf", ()), {**kind, "pattern": pattern}]


def _rewrite_unique_items(root: Node, pointer: str, part: Node) -> None:
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
    _log.warning(
        "json_schema at %s: 'uniqueItems' is not enforced: only items of a schema with at most %d values in 'enum', "
        "and no keyword that excludes some, can be told apart; look for repeated items in the result",
        pointer,
        MAX_UNIQUE,
    )


MAX_UNIQUE = 63  # values that the parameter of a rule in llguidance can count, one bit each


def _rewrite_property_names(root: Node, pointer: str, part: Node) -> None:
    names = _plain_target(root, part.pop("propertyNames"))
    if names is True or names == {}:
        return
    if not isinstance(names, dict):
        names = {"enum": []}  # false: no name is right
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
    given = part.get("properties", {})
    listed = [*given, *(name for name in part.get("required", ()) if name not in given)]

    if (listed or values is not None) and "pattern" in names:
        # Python's own regular expressions may take for ever, and have another syntax.
        raise InvalidRequestError(
            f"json_schema at {pointer}/propertyNames: 'pattern' is not supported beside listed names; list the names "
            "that match it"
        )
    known = re.compile(FORMATS.get(names.get("format", ""), "(?s:.*)"))
    least, most = names.get("minLength", 0), names.get("maxLength", math.inf)

    def fits(name: Any) -> bool:
        return isinstance(name, str) and least <= len(name) <= most and known.fullmatch(name) is not None

    if part.get("patternProperties"):
        raise InvalidRequestError(
            f"json_schema at {pointer}: 'propertyNames' is not supported beside 'patternProperties'"
        )
    if values is not None:
        allowed = [name for name in values if fits(name)]
        part["properties"] = {name: given.get(name, True if name in given else others) for name in allowed}
    else:
        allowed = [name for name in listed if fits(name)]
        part["properties"] = {name: given.get(name, others) for name in allowed}
    for name in listed:
        if name not in allowed:
            part["properties"][name] = False
    part["additionalProperties"] = False
    if values is None and patterns and others is not False:
        if part["properties"] and others is not True and others != {}:
            raise InvalidRequestError(
                f"json_schema at {pointer}: 'propertyNames' is not supported beside both 'properties' and a schema in "
                "'additionalProperties'"
            )
        part["patternProperties"] = {_all_of(patterns, pointer): others}
    elif values is None:
        part["additionalProperties"] = others
    if "type" not in part and not part["properties"]:
        part["properties"] = {}


def _name_patterns(names: Node) -> Iterator[str]:
    if isinstance(names.get("pattern"), str):
        yield names["pattern"]
    if isinstance(names.get("format"), str) and names["format"] in FORMATS:
        yield f"^(?:{FORMATS[names['format']]})$"
    least, most = names.get("minLength", 0), names.get("maxLength")
    if least or most is not None:
        yield f"^(?s:.){{{int(least)},{'' if most is None else int(most)}}}$"


def _all_of(patterns: list[str], pointer: str) -> str:
    if len(patterns) > 1:
        raise InvalidRequestError(
            f"json_schema at {pointer}/propertyNames: 'pattern', 'format' and 'maxLength' are supported one at a time"
        )
    return patterns[0]

"""Arguments that are each written between markers, as in ``<parameter=city>Paris</parameter>``.

A string is written as it is, any other value as JSON. If a schema allows both, a value is read as a string, except
that ``null`` is read as null if the schema allows it. The formats in ``_FORMATS`` are enforced; others are annotations.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llamapipe.arguments import quoted
from llamapipe.chat.calls.call_format import CallFormat
from llamapipe.chat.calls.lark import ANY, GAP, Literals, Rules, json_value, regex_text
from llamapipe.errors import InvalidRequestError

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
_SHARED = ("$defs", "definitions")
_NOTES = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
     "readOnly", "writeOnly", "strict", "contentEncoding", "contentMediaType", "contentSchema"}
)  # fmt: skip
_OF_OBJECT = _NOTES | {"type", "properties", "required", "additionalProperties"}
_OF_STRING = _NOTES | {
    "type",
    "enum",
    "const",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "anyOf",
    "oneOf",
}


class TaggedArguments:
    """The arguments of one tool: makes a grammar for them, and reads their values from text."""

    def __init__(self, form: CallFormat, parameters: dict[str, Any]) -> None:
        """Raises InvalidRequestError for parameters that cannot be written one by one."""
        self._form = form
        self._root = parameters
        whole = self._resolved(parameters)
        wrong = [key for key in whole if key not in _OF_OBJECT]
        if wrong:
            raise InvalidRequestError(
                f"parameters use {quoted(wrong[0])} at the top level, which this model's calls cannot express: they "
                "write each argument separately. List the arguments in 'properties'"
            )
        properties = whole.get("properties", {})
        if not isinstance(properties, dict):
            raise InvalidRequestError("parameters: 'properties' must be an object")
        self._properties: dict[str, dict[str, Any]] = {
            name: self._resolved(one) for name, one in properties.items()
        }
        for name, one in self._properties.items():
            self._check(name, one)
        self._required = set(whole.get("required", ()))
        unlisted = self._required - self._properties.keys()
        if unlisted:
            raise InvalidRequestError(
                f"parameters: {quoted(min(unlisted))} is required but not listed in 'properties', "
                "as this model's calls need"
            )
        others = whole.get("additionalProperties")
        self._is_open = not self._properties and others is not False
        self._open_schema = self._resolved(others) if isinstance(others, dict) else {}
        self._check("additionalProperties", self._open_schema)

    def _check(self, name: str, schema: dict[str, Any]) -> None:
        """Raises InvalidRequestError for what the text of an argument cannot express or enforce."""
        if self._form.key_end.strip() and self._form.key_end.strip() in name:
            raise InvalidRequestError(f"an argument must not be called {quoted(name)} in this model's calls")
        if "string" not in self._types(schema):
            return
        for one in self._alternatives(schema):
            wrong = [key for key in one if key not in _OF_STRING]
            if wrong and "string" in self._types(one) and ("type" in one or len(one.keys() - _NOTES) > 0):
                raise InvalidRequestError(
                    f"argument {quoted(name)}: {quoted(wrong[0])} cannot be enforced for a string in this model's "
                    f"calls, at #/properties/{name.replace('~', '~0').replace('/', '~1')}"
                )

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The schema that a chain of local references ends in; ``allOf`` with one member is that member."""
        for _ in range(20):
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                raise InvalidRequestError(
                    f"parameters: {quoted(schema)} allows no value"
                    if schema is False
                    else f"parameters: {quoted(schema)} is not a schema"
                )
            one_of_all = schema.get("allOf")
            if isinstance(one_of_all, list) and len(one_of_all) == 1 and "$ref" not in schema:
                schema = {
                    **self._resolved(one_of_all[0]),
                    **{k: v for k, v in schema.items() if k != "allOf"},
                }
                continue
            target = schema.get("$ref")
            if not isinstance(target, str):
                return schema
            found = self._at(target)
            if found is True:
                found = {}
            if not isinstance(found, dict):
                raise InvalidRequestError(f"parameters: there is no schema at the reference {quoted(target)}")
            schema = {**found, **{k: v for k, v in schema.items() if k != "$ref"}}
        raise InvalidRequestError("parameters: a reference refers to itself")

    def _at(self, target: str) -> Any:
        """What a local reference refers to; None if there is nothing."""
        found: Any = self._root
        if target == "#":
            return found
        if not target.startswith("#/"):
            return None
        for part in target[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found

    # ---- the grammar
    def grammar(self, literals: Literals, rules: Rules) -> str:
        """The elements that match the arguments, in the schema's order."""
        form = self._form
        parts = []
        for name, schema in self._properties.items():
            start = literals.text(form.key_start + name + form.key_end)
            one = f"{start} {self._value(schema, literals, rules)} {_rest(form.value_end)}"
            parts.append(one if name in self._required else f"({one})?")
        if self._is_open:
            key = f"{literals.text(form.key_start)} /[a-zA-Z_][a-zA-Z0-9_]{{0,39}}/ {literals.text(form.key_end)}"
            parts.append(
                f"({key} {self._value(self._open_schema, literals, rules)} {_rest(form.value_end)})*"
            )
        return " ".join(parts)

    def _value(self, schema: dict[str, Any], literals: Literals, rules: Rules) -> str:
        """A value up to and including the visible part of its end."""
        end = self._form.value_end.rstrip()
        chosen = _choices(schema)
        if chosen is not None:
            texts = " | ".join(literals.text(_as_text(one)) or '""' for one in chosen)
            return f"({texts}) {literals.text(end)}"
        if "string" in self._types(schema):
            marker = self._form.value_end.strip()
            token = literals.token(marker)
            body = " | ".join(f"({one})" for one in self._strings(schema))
            if token is None:
                body = f"({body}) & ~/(?s:.*{regex_text(marker)}.*)/"
                return rules.lazy(f"{rules.terminal(body)} {json.dumps(end)}")
            return f"{rules.terminal(body)} {token}"
        shared = {key: self._root[key] for key in _SHARED if key in self._root}
        return f"{json_value({**shared, **schema})} {GAP} {literals.text(end.lstrip())}"

    def _strings(self, schema: dict[str, Any]) -> list[str]:
        """The strings of each alternative of a schema, and null, as terms of a terminal."""
        found = ['"null"'] if "null" in self._types(schema) else []
        for one in self._alternatives(schema):
            chosen = _choices(one)
            if chosen is not None:
                found += [json.dumps(text) for text in chosen if isinstance(text, str)]
            elif "string" in self._types(one):
                found.append(" & ".join(_patterns(one)))
        return found

    # ---- what a schema allows
    def _alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return [other for one in schema[key] for other in self._alternatives(self._resolved(one))]
        return [schema]

    def _types(self, schema: dict[str, Any]) -> set[str]:
        """The types that a schema allows; those of every JSON value where it names none."""
        found: set[str] = set()
        for one in self._alternatives(schema):
            named = one.get("type")
            if isinstance(named, str):
                found.add(named)
            elif isinstance(named, list):
                found.update(named)
            elif (chosen := _choices(one)) is not None:
                found.update(_type_of(value) for value in chosen)
            elif "properties" in one:
                found.add("object")
            elif "items" in one:
                found.add("array")
            else:
                found.update(("string", "any", "null"))
        return found

    # ---- values
    def key_known(self, key: str) -> bool:
        """True if an argument may have this name."""
        return self._is_open or key in self._properties

    def value(self, key: str, text: str) -> Any:
        """The value of an argument from the text between its markers.

        Raises ValueError if it is neither JSON nor a string that the schema allows.
        """
        form = self._form
        if form.key_end.endswith("\n"):
            text = text.removeprefix("\n")
        if form.value_end.startswith("\n"):
            text = text.removesuffix("\n")
        schema = self._properties.get(key, self._open_schema)
        chosen = _choices(schema)
        if chosen is not None:
            for one in chosen:
                if _as_text(one) == text:
                    return one
        types = self._types(schema)
        if "string" not in types:
            return json.loads(text)
        if "any" in types:
            try:
                return json.loads(text)
            except ValueError:
                return text
        return None if text == "null" and "null" in types else text


def _rest(value_end: str) -> str:
    return GAP if value_end.rstrip() != value_end else ""


def _patterns(schema: dict[str, Any]) -> list[str]:
    """Regular expressions that a string must match, all of them."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    found = [f"/(?s:.{{{least},{most}}})/" if least or most != "" else f"/{ANY}/"]
    if schema.get("format") in _FORMATS:
        found.append(f"/{_FORMATS[schema['format']]}/")
    if isinstance(schema.get("pattern"), str):
        pattern: str = schema["pattern"]
        before = "" if pattern.startswith("^") else ANY
        after = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else ANY
        inner = pattern.removeprefix("^")[: None if after else -1]
        found.append(f"/{before}({_with_escaped_slashes(inner)}){after}/")
    return found


def _with_escaped_slashes(pattern: str) -> str:
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def _type_of(value: Any) -> str:
    return "string" if isinstance(value, str) else "null" if value is None else "other"


def _choices(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    if not isinstance(values, list):
        return None
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else None
    return values if names is None else [value for value in values if _is_of(value, names)]


def _is_of(value: Any, names: set[str]) -> bool:
    """Whether a value has one of these JSON types."""
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, (int, float)):
        return "number" in names or ("integer" in names and value == int(value))
    known = {str: "string", type(None): "null", list: "array", dict: "object"}
    return known.get(type(value)) in names


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

"""Writes the grammar of the arguments of a call, for templates that write each argument separately.

Open this file to change what the grammar allows between the markers of an argument. ``argument_grammar`` is the entry
point. ``Style`` lists the styles: TAGGED, PYTHON, QUOTED and NESTED. The formats and patterns of strings come from
``llamapipe.structured``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llamapipe._messages import quoted
from llamapipe.chat._call_format import CDATA, CDATA_END, CallFormat, Style, python_text, segments
from llamapipe.chat._lark import ANY, GAP, NOTHING, SPACES, WHITE, Literals, Rules, json_value, regex_text
from llamapipe.chat._tagged_arguments import NOTES, OF_OBJECT, TaggedArguments, as_text, listed, of_kind
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.formats import FORMATS
from llamapipe.structured.patterns import as_lark, translated
from llamapipe.structured.schema import json_type

_MOST_NAME_CHARS = 64  # of a name that no schema lists
_NO_PYTHON = {"allOf", "not", "if", "enum", "const", "$dynamicRef", "$recursiveRef"}
_KINDS = ("number", "boolean", "null", "array", "object")
_OF_ARRAY = NOTES | {"type", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"}


def argument_grammar(arguments: TaggedArguments, literals: Literals, rules: Rules) -> str:
    """Return the elements that match the arguments, in any order, from the end of the head to the call's end."""
    writer = _ArgumentWriter(arguments, literals, rules)
    style = arguments.form.style
    join = f'"," {SPACES}' if style in (Style.PYTHON, Style.QUOTED) else ""
    others = arguments.open_schema if arguments.is_open else None
    members = writer.members(arguments.properties, arguments.required, others, join, arguments.hidden)
    if not join:
        return members
    start, end = ("(", ")") if style is Style.PYTHON else ("{", "}")
    return f'"{start}" {members} "{end}"'


class _ArgumentWriter:
    def __init__(self, arguments: TaggedArguments, literals: Literals, rules: Rules) -> None:
        self._arguments = arguments
        self._form = arguments.form
        self._literals = literals
        self._rules = rules
        self._any_name = _any_name(arguments.form)

    def members(
        self,
        properties: dict[str, dict[str, Any]],
        required: set[str],
        others: dict[str, Any] | None,
        join: str,
        hidden: Sequence[str] = (),
    ) -> str:
        """Write the listed members in any order, and any number of ``others``.

        If ``others`` is None, there are no other members. ``hidden``: names that none of the others may have.
        """
        before, self._any_name = (
            self._any_name,
            self._other_name(hidden) if others is not None else self._any_name,
        )
        member = None if others is None else self.member(None, others)
        self._any_name = before
        if properties:
            is_open = others is not None
            members = [
                (name in required, self.member(name, schema, is_open)) for name, schema in properties.items()
            ]
            return self._rules.in_any_order(members, join, member)
        if member is None:
            return ""
        return f"({member} ({join} {member})*)?" if join else f"({member})*"

    def _other_name(self, hidden: Sequence[str]) -> str:
        """Return a terminal for the names that are not in ``hidden``."""
        any_name = _any_name(self._form)
        if not hidden:
            return any_name
        return self._rules.terminal(f"{any_name} & ~({' | '.join(map(json.dumps, hidden))})")

    def member(self, name: str | None, schema: dict[str, Any], is_open: bool = False) -> str:
        """Write an argument, or a member of an object. If ``name`` is None, any name is allowed.

        ``is_open``: there are also members with any name, so that the name must be a terminal.
        """
        form, text = self._form, self._literals
        if name is not None:
            self._arguments.check_name(name)
        if form.style in (Style.PYTHON, Style.QUOTED):
            key = self._any_name if name is None else json.dumps(name)
            if form.style is Style.PYTHON:
                return f'{key} "=" {self._python(schema)}'
            return f'{key} ":" {self._deep(schema, "")}'
        if form.style is Style.NESTED:
            if name is None:
                key = f"{text.text(form.key_start)} {self._any_name} {text.text(form.key_end)}"
                if schema.keys() - NOTES:
                    value = self._deep(schema, form.value_end)
                    return f"{key} {value} {_any_name(form)} {text.text(form.value_close)}"
                return f"{key} {self._any_nested()}"
            # As one text, the lexer would prefer it to a member of any name with the same beginning.
            start = f"{text.text(form.key_start)} {json.dumps(name)} {text.text(form.key_end)}"
            return f"{start} {self._deep(schema, form.value_end + name + form.value_close)}"
        key = (
            f"{text.text(form.key_start)} {self._any_name}"
            if name is None
            else f"{text.text(form.key_start)} {json.dumps(name)}"
            if is_open
            else text.text(form.key_start + name)
        )
        return f"{key} {self._tagged(schema)} {_between_tags(form)}"

    # ---- <key>value</key>
    def _tagged(self, schema: dict[str, Any]) -> str:
        """Write the rest of an argument after its key, up to the end marker without the spaces around the marker."""
        form, text = self._form, self._literals
        end = form.value_end.rstrip()
        options: dict[str, list[str]] = {}  # values by the text between key and value
        chosen = listed(schema)
        if chosen is not None:
            for value in chosen:
                texts = dict.fromkeys((as_text(value), as_text(value, ensure_ascii=False)))
                option = f"({' | '.join(text.text(each) or NOTHING for each in texts)}) {text.text(end)}"
                options.setdefault(form.key_end_of(json_type(value)), []).append(option)
        else:
            types = self._arguments.types(schema)
            if "string" in types:
                key_end = form.key_end_of("string")
                options.setdefault(key_end, []).append(self._string(schema, end))
            # If every string is allowed, the strings include the texts of all values of other types.
            is_free = not form.key_ends and self._is_free(schema)
            ends = form.key_ends or tuple((kind, form.key_end) for kind in _KINDS)
            for key_end in () if is_free else dict.fromkeys(end for kind, end in ends if kind in _KINDS):
                kinds = {kind for kind, other in ends if kind in _KINDS and other == key_end}
                values = self._values(schema, kinds)
                if values:
                    value = f"({' | '.join(values)}) {GAP} {text.text(end.lstrip())}"
                    options.setdefault(key_end, []).append(value)
        parts = [f"{text.tags(key_end)} ({' | '.join(values)})" for key_end, values in options.items()]
        return f"({' | '.join(parts)})"

    def _values(self, schema: dict[str, Any], kinds: set[str]) -> list[str]:
        arguments = self._arguments
        types = arguments.types(schema)
        if types <= kinds | ({"integer"} if "number" in kinds else set()) and "any" not in types:
            return [json_value(arguments.with_shared(schema))]
        elements = []
        for option in arguments.alternatives(schema):
            named = arguments.types(option)
            allowed = kinds if "any" in named else (named & kinds)
            if "number" in kinds and "integer" in named:
                allowed = allowed | {"integer"}
            if (chosen := listed(option)) is not None:
                values = [value for value in chosen if json_type(value) in allowed]
                elements += [json_value({"enum": values})] if values else []
            elif allowed:
                elements.append(json_value(arguments.with_shared({**option, "type": sorted(allowed)})))
        return elements

    def _string(self, schema: dict[str, Any], end: str) -> str:
        """Write an unquoted string, up to and including ``end``. Exclude text that would be read as CDATA."""
        form, text = self._form, self._literals
        marker = end.strip()
        limit = form.key_start.strip() if form.style is Style.NESTED else marker
        first = segments(marker)[0]
        token = text.token(first)
        others = ""
        strings = _strings(
            self._arguments, schema, with_null=not form.key_ends and form.style is Style.TAGGED
        )
        body = " | ".join(f"({pattern})" for pattern in strings)
        wrapped = ""
        if form.cdata:
            others = f" & ~/{WHITE}{regex_text(CDATA)}(?s:.*)/"
            cdata_end = json.dumps(CDATA_END)
            inner = self._rules.terminal(f"({body}) & ~/(?s:.*{regex_text(CDATA_END)}.*)/")
            wrapped = f"{json.dumps(CDATA)} {self._rules.lazy(f'{inner} {cdata_end}')} {text.text(end)}"
        if token is None:
            body = f"({body}) & ~/(?s:.*{regex_text(limit)}.*)/{others}"
            plain = self._rules.lazy(f"{self._rules.terminal(body)} {json.dumps(end)}")
        else:
            plain = f"{self._rules.terminal(f'({body}){others}' if others else body)} {text.text(marker)}"
        return f"({plain} | {wrapped})" if wrapped else plain

    def _is_free(self, schema: dict[str, Any]) -> bool:
        """Return whether every string is a valid value."""
        arguments = self._arguments
        return any(
            _is_free(option) and "string" in arguments.types(option)
            for option in arguments.alternatives(schema)
        )

    # ---- key=value
    def _python(self, schema: dict[str, Any]) -> str:
        """Write a value as JSON; also allow strings and constants as Python writes them."""
        arguments = self._arguments
        chosen = listed(schema)
        if chosen is not None:
            texts = [text for value in chosen for text in _python_texts(value)]
            return f"({' | '.join(map(json.dumps, dict.fromkeys(texts)))})"
        # Only json_value enforces the other keywords.
        plain = [option for option in arguments.alternatives(schema) if not option.keys() & _NO_PYTHON]
        types = {kind for option in plain for kind in arguments.types(option)}
        options = [json_value(arguments.with_shared(schema))]
        if any(_is_free(option) and "string" in arguments.types(option) for option in plain):
            options.append(r"/'([^'\\\n\r]|\\[\\'\"nrt])*'/")
        if types & {"boolean", "any"}:
            options += ['"True"', '"False"']
        if "null" in types:
            options.append('"None"')
        return f"({' | '.join(options)})"

    # ---- values whose members and items are not JSON, either
    def _deep(self, schema: dict[str, Any], end: str) -> str:
        """Write a value in the style QUOTED or NESTED, then ``end``."""
        key = (id(self._arguments), end, json.dumps(schema, sort_keys=True))
        return self._rules.recursive(key, lambda _: self._deep_body(schema, end))

    def _deep_body(self, schema: dict[str, Any], end: str) -> str:
        arguments, form = self._arguments, self._form
        closed = self._literals.text(end)
        nested = form.style is Style.NESTED
        types = arguments.types(schema)
        options: list[str] = []
        if "any" in types and listed(schema) is None:
            if nested:
                return f"{self._string({}, end)} | {self._any_members()} {closed}"
            return f"{self._any()} {closed}"
        if "string" in types and nested and listed(schema) is None:
            options.append(self._string(schema, end))
        for option in arguments.alternatives(schema):
            chosen = listed(option)
            if chosen is not None:
                texts = [self._listed(value) or NOTHING for value in chosen]
                options.append(f"({' | '.join(texts)}) {closed}")
                continue
            kinds = arguments.types(option)
            scalars = sorted(kinds - {"string", "array", "object"})
            for kind in [*sorted(kinds.difference(scalars)), *scalars[:1]]:
                if kind == "string":
                    if not nested:
                        start = self._literals.text(form.quote)
                        options.append(f"{start} {self._string({**option, 'type': 'string'}, form.quote)}")
                elif kind == "array":
                    options.append(f"{self._array(of_kind(option, kind))} {closed}")
                elif kind == "object":
                    options.append(f"{self._object(of_kind(option, kind))} {closed}")
                elif not (nested and self._is_free(schema)):
                    value = json_value(arguments.with_shared({**option, "type": scalars}))
                    quote = self._literals.text(form.quote)
                    # Some templates write numbers between the marks of strings.
                    if quote:
                        both = f"({value} | {quote} {value} {quote})"
                        options.append(value if "string" in types else both)
                    else:
                        options.append(f"{value} {closed}")
        return " | ".join(options)

    def _listed(self, value: Any) -> str:
        """Write a listed value in the style QUOTED or NESTED by parts, as other values are written.

        As one text, the lexer would prefer it to an alternative with the same beginning.
        """
        form, text = self._form, self._literals
        if form.style is Style.NESTED and isinstance(value, (dict, list)):
            pairs = value.items() if isinstance(value, dict) else ((form.item, item) for item in value)
            return " ".join(
                f"{text.text(form.key_start)} {json.dumps(key)} {text.text(form.key_end)} {self._listed(item)} "
                f"{text.text(form.value_end + key + form.value_close)}"
                for key, item in pairs
            )
        if form.style is Style.NESTED:
            return text.text(form.nested_text(value))
        join = f' "," {SPACES} '
        if isinstance(value, list):
            return f'"[" {join.join(map(self._listed, value))} "]"'
        if isinstance(value, dict):
            members = (f'{json.dumps(key)} ":" {self._listed(item)}' for key, item in value.items())
            return f'"{{" {join.join(members)} "}}"'
        return text.text(form.quoted_text(value))

    def _array(self, schema: dict[str, Any]) -> str:
        arguments, form = self._arguments, self._form
        _refuse_others(schema, _OF_ARRAY)
        nested = form.style is Style.NESTED
        if nested and not form.item:
            return json_value(arguments.with_shared({**schema, "type": "array"}))

        def item(of: Any) -> str:
            resolved = {} if of is False else arguments.resolved(of)
            if of is False or not arguments.alternatives(resolved):
                return ""
            return self.member(form.item, resolved) if nested else self._deep(resolved, "")

        if schema.get("uniqueItems"):
            _warn_once(
                "'uniqueItems' is not enforced in this model's calls; look for repeated items in arguments"
            )
        first = [item(item_schema) for item_schema in schema.get("prefixItems", ())]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if "" in first:  # no item can be in this place
            first = first[: first.index("")]
            most = len(first) if most is None else min(most, len(first))
        rest = item(schema.get("items", True))
        if least > (len(first) if not rest else least) or (most is not None and least > most):
            raise InvalidRequestError(f"parameters: no array has {least} items; the schema allows fewer")
        join = "" if nested else f'"," {SPACES}'
        inner = _sequence(first, rest, least, most, join)
        return inner or NOTHING if nested else f'"[" {inner} "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        arguments, form = self._arguments, self._form
        _refuse_others(schema, OF_OBJECT)
        nested = form.style is Style.NESTED
        if nested and not form.item:
            return json_value(arguments.with_shared({**schema, "type": "object"}))
        join = "" if nested else f'"," {SPACES}'
        others = schema.get("additionalProperties", True)
        required = dict.fromkeys(schema.get("required", ()))
        properties = {**dict.fromkeys(required, others), **schema.get("properties", {})}
        open_schema = None if others is False else arguments.resolved(others)
        if open_schema is not None and not arguments.alternatives(open_schema):
            open_schema = None
        members = arguments.members(properties, set(required))
        inner = self.members(members, set(required), open_schema, join, tuple(properties))
        return inner or NOTHING if nested else f'"{{" {inner} "}}"'

    def _any(self) -> str:
        """Write any value in the style QUOTED."""

        def body(name: str) -> str:
            quote = self._literals.text(self._form.quote)
            pair = f'{self._any_name} ":" {name}'
            scalar = json_value({"type": ["number", "boolean", "null"]})
            return (
                f"{quote} {self._string({}, self._form.quote)} | {scalar}"
                f' | "{{" ({pair} ("," {SPACES} {pair})*)? "}}" | "[" ({name} ("," {SPACES} {name})*)? "]"'
            )

        return self._rules.recursive("any", body)

    def _any_members(self) -> str:
        """Write one or more members of any object or array in the style NESTED."""
        form, text = self._form, self._literals
        start = f"{text.text(form.key_start)} {self._any_name} {text.text(form.key_end)}"
        return self._rules.recursive("members", lambda _: f"({start} {self._any_nested()})+")

    def _any_nested(self) -> str:
        """Write any value in the style NESTED, and its end."""
        form, text = self._form, self._literals
        end = f"{self._any_name} {text.text(form.value_close)}"

        def body(_: str) -> str:
            return f"{self._string({}, form.value_end)} {end} | {self._any_members()} {text.text(form.value_end)} {end}"

        return self._rules.recursive("nested", body)


def _any_name(form: CallFormat) -> str:
    """Return a terminal for a name that no schema lists, such as ``Content-Type`` or ``First Name``.

    It leaves out the characters that markers of calls begin with.
    """
    if form.style is Style.PYTHON:
        first = inner = last = r"\w$.-"
    else:
        last = r"\w$@.\/-"
        first = r"\w$@.-" if form.style is Style.NESTED else last
        inner = last if form.key_end[:1].isspace() else f" {last}"
    return f"/[{first}]([{inner}]{{0,{_MOST_NAME_CHARS - 2}}}[{last}])?/"


@lru_cache(64)
def _warn_once(message: str) -> None:
    """Log a warning, but not for each answer."""
    logging.getLogger("llamapipe").warning("tools: %s", message)


def _refuse_others(schema: dict[str, Any], known: frozenset[str]) -> None:
    wrong = [key for key in schema if key not in known]
    if wrong:
        raise InvalidRequestError(
            f"parameters use {quoted(wrong[0])} in an object or an array, which this model's calls cannot express"
        )


def _sequence(first: list[str], rest: str, least: int, most: int | None, join: str) -> str:
    """Write ``least`` to ``most`` items with ``join`` between them: each of ``first`` once, then repeated ``rest``."""
    n = len(first)
    low, high = max(0, least - max(n, 1)), None if most is None else most - max(n, 1)
    after = f"{join} {rest}".strip()
    repeated = f"({after}){{{low},{'' if high is None else max(high, 0)}}}" if rest and high != 0 else ""
    if not first:
        if not rest or most == 0:
            return ""
        whole = f"{rest} {repeated}".strip()
        return whole if least > 0 else f"({whole})?"
    text = repeated
    for i in range(n - 1, -1, -1):
        if most is not None and i >= most:
            continue
        text = f"{join if i else ''} {first[i]} {text}".strip()
        if i >= least:
            text = f"({text})?"
    return text


def _strings(arguments: TaggedArguments, schema: dict[str, Any], with_null: bool) -> list[str]:
    """Return terms of a terminal for the strings that each alternative of a schema allows; with ``with_null``, null."""
    terms = ['"null"'] if with_null and "null" in arguments.types(schema) else []
    for option in arguments.alternatives(schema):
        chosen = listed(option)
        if chosen is not None:
            terms += [json.dumps(text) for text in chosen if isinstance(text, str)]
        elif "string" in arguments.types(option):
            terms.append(" & ".join(_patterns(option)))
    return terms


def _is_free(schema: dict[str, Any]) -> bool:
    """Return whether a schema does not restrict strings."""
    return not schema.keys() & {"pattern", "format", "minLength", "maxLength", "enum", "const"}


def _python_texts(value: Any) -> list[str]:
    texts = [json.dumps(value), json.dumps(value, ensure_ascii=False), python_text(value)]
    if isinstance(value, str) and not re.search(r"['\\\x00-\x1f]", value):
        texts.append(f"'{value}'")
    return texts


def _between_tags(form: CallFormat) -> str:
    """Return optional spaces between two arguments if the template writes spaces there or at a call's end."""
    return GAP if form.value_end.rstrip() != form.value_end or form.call_end.lstrip() != form.call_end else ""


def _patterns(schema: dict[str, Any]) -> list[str]:
    """Return regular expressions, all of which a string must match."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    patterns = [f"/(?s:.{{{least},{most}}})/" if least or most != "" else f"/{ANY}/"]
    if schema.get("format") in FORMATS:
        patterns.append(f"/{_with_escaped_slashes(FORMATS[schema['format']].pattern)}/")
    if isinstance(schema.get("pattern"), str) and (pattern := as_lark(translated(schema["pattern"]))):
        patterns.append(f"({pattern})")
    return patterns


def _with_escaped_slashes(pattern: str) -> str:
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)

"""Grammars of whole answers: optional reasoning, then free text, tool calls, or JSON.

They are written in llguidance's dialect of Lark. Some templates write each argument of a call between markers, as in
``<parameter=city>Paris</parameter>``: ``TaggedArguments`` writes the grammar of these and reads them. A string is
written as it is, any other value as JSON. If a schema allows both, a value is read as a string, except that ``null`` is
read as null if the schema allows it. The formats in ``_FORMATS`` are enforced; others are annotations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llamapipe._messages import quoted
from llamapipe.chat._call_format import CallFormat, ReasoningMarkers, Style, segments
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import SPACE, with_options

SpecialId = Callable[[str], "int | None"]
# The spaces that may follow an end marker (not all models write the template's newlines), and those between the parts
# of JSON.
GAP, SPACES = "GAP?", "SP?"
TERMINALS = f"GAP: /[ \\n]{{1,8}}/\nSP: /{SPACE}/"
# Any text, as a part of a regular expression.
ANY = "(?s:.*)"


class Literals:
    """Writes text as Lark. Markers that are one control token of the vocabulary become that token."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id

    def token(self, marker: str) -> str | None:
        """The control token of a marker, ``<[id]>``; None if it is text."""
        found = self._special_id(marker) if len(marker) > 1 else None
        return None if found is None else f"<[{found}]>"

    def text(self, text: str) -> str:
        """The elements that match ``text`` exactly; empty for empty text."""
        parts: list[str] = []
        plain = ""
        for segment in segments(text):
            token = self.token(segment)
            if token is None:
                plain += segment
                continue
            parts += [json.dumps(plain)] * bool(plain) + [token]
            plain = ""
        return " ".join(parts + [json.dumps(plain)] * bool(plain))

    def edge(self, text: str) -> str:
        """Like ``text``, but the spaces and newlines at its start and its end may vary.

        If one option begins with a newline and another does not, both can be tried only with such freedom.
        """
        inner = text.strip()
        before = GAP if inner and text[0] != inner[0] else ""
        after = GAP if text and text[-1:] != inner[-1:] else ""
        return " ".join(part for part in (before, self.text(inner), after) if part)


class Rules:
    """The rules of one grammar, in the order in which they are needed."""

    def __init__(self, literals: Literals) -> None:
        self._literals = literals
        self._lines: list[str] = []
        self._lazy: dict[str, str] = {}  # names by body: equal ones, as of many arguments, are one rule
        self._terminals: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """Adds a rule, or a terminal if its name is in capitals; returns the name."""
        self._lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Adds a terminal; returns its name."""
        if body not in self._terminals:
            self._terminals[body] = self.add(f"TEXT_{len(self._terminals) + 1}", body)
        return self._terminals[body]

    def lazy(self, body: str) -> str:
        """Adds a rule whose text ends where it first matches; returns its name."""
        if body not in self._lazy:
            self._lazy[body] = f"lazy_{len(self._lazy) + 1}"
            self._lines.append(f"{self._lazy[body]}[lazy]: {body}")
        return self._lazy[body]

    def up_to(self, marker: str, text: str = f"/{ANY}/") -> str:
        """The elements that match text up to and including the first ``marker``."""
        token = self._literals.token(marker)
        return self.lazy(f"{text} {json.dumps(marker)}") if token is None else f"{text} {token}"

    def write(self, start: str) -> str:
        """The grammar's text."""
        return "\n".join([f"start: {start}", *self._lines, TERMINALS]) + "\n"


def json_value(schema: dict[str, Any], whitespace: str = "flexible") -> str:
    """The element that matches JSON of a schema. ``whitespace``: see ``SamplingParams.json_whitespace``.

    Models write the arguments of calls as they were trained to, mostly with spaces.
    """
    return f"%json {json.dumps(with_options(schema, whitespace))}"


def regex_text(text: str) -> str:
    """``text`` as a part of a regular expression between slashes."""
    return re.sub(r"([][.^$*+?(){}|\\/&~])", r"\\\1", text).replace("\n", r"\n")


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
            name: self._resolved(member) for name, member in properties.items()
        }
        for name, member in self._properties.items():
            self._check(name, member)
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
        for option in self._alternatives(schema):
            wrong = [key for key in option if key not in _OF_STRING]
            if (
                wrong
                and "string" in self._types(option)
                and ("type" in option or len(option.keys() - _NOTES) > 0)
            ):
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
            texts = " | ".join(literals.text(_as_text(value)) or '""' for value in chosen)
            return f"({texts}) {literals.text(end)}"
        if "string" in self._types(schema):
            marker = self._form.value_end.strip()
            token = literals.token(marker)
            body = " | ".join(f"({pattern})" for pattern in self._strings(schema))
            if token is None:
                body = f"({body}) & ~/(?s:.*{regex_text(marker)}.*)/"
                return rules.lazy(f"{rules.terminal(body)} {json.dumps(end)}")
            return f"{rules.terminal(body)} {token}"
        shared = {key: self._root[key] for key in _SHARED if key in self._root}
        return f"{json_value({**shared, **schema})} {GAP} {literals.text(end.lstrip())}"

    def _strings(self, schema: dict[str, Any]) -> list[str]:
        """The strings of each alternative of a schema, and null, as terms of a terminal."""
        found = ['"null"'] if "null" in self._types(schema) else []
        for option in self._alternatives(schema):
            chosen = _choices(option)
            if chosen is not None:
                found += [json.dumps(text) for text in chosen if isinstance(text, str)]
            elif "string" in self._types(option):
                found.append(" & ".join(_patterns(option)))
        return found

    # ---- what a schema allows
    def _alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return [
                    other for option in schema[key] for other in self._alternatives(self._resolved(option))
                ]
        return [schema]

    def _types(self, schema: dict[str, Any]) -> set[str]:
        """The types that a schema allows; those of every JSON value where it names none."""
        found: set[str] = set()
        for option in self._alternatives(schema):
            named = option.get("type")
            if isinstance(named, str):
                found.add(named)
            elif isinstance(named, list):
                found.update(named)
            elif (chosen := _choices(option)) is not None:
                found.update(_type_of(value) for value in chosen)
            elif "properties" in option:
                found.add("object")
            elif "items" in option:
                found.add("array")
            else:
                found.update(("string", "any", "null"))
        return found

    # ---- values
    def is_text(self, key: str) -> bool:
        """Whether the text of an argument is its value, whatever it is: then it can be passed on as it comes."""
        schema = self._properties.get(key, self._open_schema)
        return _choices(schema) is None and self._types(schema) == {"string"}

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
            for value in chosen:
                if _as_text(value) == text:
                    return value
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


class ToolLike(Protocol):
    """The attributes of a tool that a grammar needs."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The checked JSON schema of its arguments."""


@dataclass(frozen=True)
class AnswerGrammar:
    """The answers that a request allows.

    - ``tools``: the tools that may be called; empty for none. ``required``: the answer consists of calls only.
    - ``schema``: the JSON schema of the text; None for free text. ``whitespace``: the spaces of such JSON.
    - ``reasoning``: its markers if the answer may begin with reasoning, and whether the prompt has opened it.
    """

    tools: Sequence[ToolLike]
    required: bool
    parallel: bool
    schema: dict[str, Any] | None
    reasoning: ReasoningMarkers | None
    reasoning_open: bool
    whitespace: str = "compact"


class GrammarWriter:
    """Writes one Lark grammar. Rules are collected in the order in which they are needed."""

    def __init__(self, form: CallFormat | None, answer: AnswerGrammar, literals: Literals) -> None:
        self._form = form
        self._answer = answer
        self._literals = literals
        self._rules = Rules(literals)
        self._excluded: list[str] = []  # free text must not begin with a match of these

    def write(self) -> str:
        """The grammar's text."""
        answer = self._answer
        before = self._reasoning() if answer.reasoning else ""
        main = self._main()
        start = f"{before} {main}".strip()
        if answer.reasoning_open and not answer.required and answer.schema is None:
            start += " | THINKING"  # a model may end without closing its reasoning
            self._rules.add("THINKING", f"/{ANY}/")
        elif answer.reasoning and self._free:
            start += f" | {self._reasoning_start()} THINKING"
            self._rules.add("THINKING", f"/{ANY}/")
        return self._rules.write(start)

    # ---- reasoning
    def _reasoning(self) -> str:
        markers = self._answer.reasoning
        assert markers is not None
        rest = self._rules.up_to(markers.end) + ("" if self._free else f" {GAP}")
        if self._answer.reasoning_open:
            return rest
        if self._literals.token(markers.start) is None:
            self._excluded.append(rf"\s*{regex_text(markers.start)}")
        return f"({self._reasoning_start()} {rest})?"

    def _reasoning_start(self) -> str:
        markers = self._answer.reasoning
        assert markers is not None
        # One terminal, so that other text that begins with spaces is not a longer match.
        return self._literals.token(markers.start) or f"/[ \\n]{{0,4}}{regex_text(markers.start)}/"

    # ---- what follows the reasoning
    @property
    def _free(self) -> bool:
        return not self._answer.required and self._answer.schema is None

    def _main(self) -> str:
        answer = self._answer
        options: list[str] = []
        if not self._free:
            if answer.schema is not None and not answer.required:
                options.append(json_value(answer.schema, answer.whitespace))
            if answer.tools:
                options.append(self._forced_calls())
        else:
            options += self._free_calls()
            options.append("FREE")
            self._rules.add("FREE", self._free_text())
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _free_text(self) -> str:
        return f"/{ANY}/" + "".join(f" & ~/(?s:{text}.*)/" for text in self._excluded)

    def _forced_calls(self) -> str:
        form = self._form
        assert form is not None
        self._add_calls(form, form.opening)
        return "calls" if form.trigger else self._python_tag("calls")

    def _free_calls(self) -> list[str]:
        """The options for free text followed by calls; a trigger in the text always begins a call."""
        form = self._form
        assert form is not None
        trigger = form.trigger
        if not trigger:
            return self._bare_calls(form)
        self._add_calls(form, form.opening[len(trigger) :])
        return [f"{self._rules.up_to(trigger, 'FREE')} calls"]

    def _bare_calls(self, form: CallFormat) -> list[str]:
        """Calls without a marker. The whole answer is a call if it begins like one."""
        first = json.dumps(form.members[0].key)
        self._excluded.append(rf"\s*\{{\s*{regex_text(first)}")
        # One terminal, so that free text, which can begin in the same way, is not a longer match.
        self._rules.add("OPENING", rf"/[ \n]{{0,2}}\{{[ \n]{{0,2}}{regex_text(first)}/")
        self._add_calls(form, "", opened=True)
        return [self._python_tag("calls")]

    def _python_tag(self, calls: str) -> str:
        tag = self._literals.token(PYTHON_TAG)
        return calls if tag is None else f"{tag}? {calls}"

    # ---- calls
    def _add_calls(self, form: CallFormat, opening: str, opened: bool = False) -> None:
        """The rule ``calls``: what is left of the opening, calls, and the end of their section."""
        text = self._literals
        names = []
        for i, tool in enumerate(self._answer.tools):
            names.append(self._rules.add(f"call_{i}", self._call(form, tool, opened)))
        call = f"({' | '.join(names)})"
        parts = [text.edge(opening), call]
        if self._answer.parallel and form.parallel:
            between = text.edge(form.separator + form.call_start)
            parts.append(f"({between} {call})*")
        end = form.section_end
        parts.append(text.edge(end.rstrip()))
        self._rules.add("calls", " ".join(part for part in parts if part))

    def _call(self, form: CallFormat, tool: ToolLike, opened: bool) -> str:
        text = self._literals
        if form.style is Style.JSON:
            parts = [self._object(form, tool, opened)]
        else:
            parts = [json.dumps(tool.name)]
            if form.id_start:
                parts.append(f"({text.text(form.id_start)} /[a-zA-Z0-9]{{9}}/)?")
            parts.append(text.edge(form.after_name))
            if form.style is Style.NAMED:
                parts.append(json_value(tool.parameters))
            else:
                parts.append(TaggedArguments(form, tool.parameters).grammar(text, self._rules))
        # Any spaces may precede the end of a call, because the template's own may have been generated already.
        end = form.call_end
        parts.append(text.edge(end.rstrip()))
        return " ".join(part for part in parts if part)

    def _object(self, form: CallFormat, tool: ToolLike, opened: bool) -> str:
        parts = []
        for i, member in enumerate(form.members):
            if opened and i == 0:
                parts.append("OPENING")
            else:
                parts += ['"{"' if i == 0 else '","', SPACES, json.dumps(json.dumps(member.key))]
            parts += [SPACES, '":"', SPACES]
            if member.role == "name":
                parts.append(json.dumps(json.dumps(tool.name)))
            elif member.role == "arguments":
                parts.append(json_value(tool.parameters))
            elif member.role == "id":
                parts.append('/"[a-zA-Z0-9]{9}"/')
            else:
                parts.append(json.dumps(member.constant))
            parts.append(SPACES)
        return " ".join([*parts, '"}"'])


# Llama 3.1 and its successors may write this token before a call.
PYTHON_TAG = "<|python_tag|>"

"""The format in which a template writes tool calls: the markers, and the text between them.

Open this file to change how calls are written in a known format, or to add a style. ``_template_probe`` finds a
template's format. Grammars, parsers and templates that omit calls use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from llamapipe.structured.schema import json_type

# A tag such as <tool_call> or <|python_tag|>, a marker such as [TOOL_CALLS], a marker of MiniMax such as
# ]<]minimax[>[, or one character.
_SEGMENT = re.compile(r"\]<\][a-z]+\[>\[|<[^<>\s](?:[^<>\n]*[^<>\s])?>|\[/?[A-Z][A-Z_]+\]|.", re.DOTALL)

# Optional marks around a string in XML.
CDATA, CDATA_END = "<![CDATA[", "]]>"
# Llama 3.1 and its successors may write the first of these tokens before a call; Llama 4 writes the others around it.
PYTHON_TAG = "<|python_tag|>"
PYTHON_TAGS = (PYTHON_TAG, "<|python_start|>", "<|python_end|>")
_BARE = ("", "[")  # the text before calls that begin without a marker
_WORD, _WORD_END = re.compile(r"[\w.:\-]*"), re.compile(r"[\w.:\-]*$")


class Style(Enum):
    """The form of the text between a call's start and its end."""

    JSON = auto()  # one object that holds name and arguments
    NAMED = auto()  # the name, then the arguments as a JSON object
    TAGGED = auto()  # the name, then every argument between its own markers
    PYTHON = auto()  # name(key=value, …) with Python's literals, or JSON's
    QUOTED = auto()  # name{key:value,…}, with a marker before and after each string
    NESTED = auto()  # as TAGGED, also for the members of objects and the items of arrays


class Slot(Enum):
    """A part of a call that differs between calls."""

    NAME = auto()
    ID = auto()
    NUMBER = auto()  # counts the calls in the answer or in the conversation


@dataclass(frozen=True)
class Member:
    """A member of a call's JSON object.

    ``role`` is "name", "arguments", "id", "number" (the member counts calls) or "constant". For the last two roles,
    ``constant`` holds the JSON text that the probe found.
    """

    key: str
    role: str
    constant: str = ""


@dataclass(frozen=True)
class CallFormat:
    """The format of calls: ``section_start (call_start CALL call_end) separator … section_end``.

    - JSON: CALL is an object of ``members``, in that order.
    - NAMED: CALL is ``head`` and the arguments as JSON. A head consists of text, the name, and perhaps an id and a
      number.
    - TAGGED: CALL is ``head``, and for each argument ``key_start`` KEY ``key_end`` VALUE ``value_end``. If the text
      after a key depends on the type of the value, ``key_ends`` lists one or more texts for each type. ``cdata``: a
      string may be ``<![CDATA[…]]>``.
    - NESTED: like TAGGED, with KEY and ``value_close`` after ``value_end``. Items of an array have the key ``item``.
    - PYTHON: CALL is NAME ``(`` KEY ``=`` VALUE ``, `` … ``)``.
    - QUOTED: CALL is ``head``, ``{`` KEY ``:`` VALUE ``,`` … ``}``; ``quote`` precedes and follows a string.

    ``in_content``: the template does not show calls, so calls are written into the message's text. ``prompted``: the
    start of the opening, if prompts end with it. The first call then begins with the rest of the opening.

    Spaces and newlines at the edges of markers are as the template writes them. A parser need not require them.
    """

    style: Style
    section_start: str = ""
    call_start: str = ""
    call_end: str = ""
    separator: str = ""
    section_end: str = ""
    parallel: bool = True
    members: tuple[Member, ...] = ()
    head: tuple[str | Slot, ...] = (Slot.NAME,)
    first_number: int = 0
    key_start: str = ""
    key_end: str = ""
    key_ends: tuple[tuple[str, str], ...] = ()
    value_end: str = ""
    value_close: str = ""
    item: str = ""
    quote: str = ""
    cdata: bool = False
    in_content: bool = False
    prompted: str = ""

    @property
    def opening(self) -> str:
        """All text before the first call."""
        return (self.section_start + self.call_start).lstrip()

    @property
    def after_name(self) -> str:
        """The text between the head's last slot and the arguments."""
        last = self.head[-1]
        return last if isinstance(last, str) else ""

    @property
    def id_head(self) -> tuple[str | Slot, ...]:
        """The parts of an id that includes the call's number, such as ``functions.NAME:0``; empty without a number."""
        if Slot.NUMBER not in self.head:
            return ()
        start = _WORD_END.search(self.call_start)
        assert start is not None
        parts = (start.group(), *self.head[: self.head.index(Slot.NUMBER) + 1])
        before = self.call_start[: start.start()]
        is_word = all(_WORD.fullmatch(part) for part in parts if isinstance(part, str))
        return parts if is_word and (not before or before.endswith((">", "]"))) else ()

    def written(self, calls: Sequence[tuple[str, str, Mapping[str, Any]]], number: str | None = None) -> str:
        """Write calls (id, name, arguments) as the template does. ``number``: a text in place of each call's number."""
        parts = [
            self.call_start
            + self._written(*call, str(self.first_number + i) if number is None else number)
            + self.call_end
            for i, call in enumerate(calls)
        ]
        return self.section_start + self.separator.join(parts) + self.section_end

    def _written(self, id_: str, name: str, arguments: Mapping[str, Any], number: str) -> str:
        if self.style is Style.JSON:
            values = {"name": _json(name), "arguments": _json(arguments), "id": _json(id_)}
            members = (
                f"{_json(m.key)}: "
                + (_numbered(m.constant, number) if m.role == "number" else values.get(m.role, m.constant))
                for m in self.members
            )
            return f"{{{', '.join(members)}}}"
        if self.style is Style.PYTHON:
            pairs = ", ".join(f"{key}={python_text(value)}" for key, value in arguments.items())
            return f"{name}({pairs})"
        slots = {Slot.NAME: name, Slot.ID: id_, Slot.NUMBER: number}
        start = "".join(part if isinstance(part, str) else slots[part] for part in self.head)
        if self.style is Style.NAMED:
            return start + _json(arguments)
        if self.style is Style.QUOTED:
            return start + self.quoted_text(arguments)
        if self.style is Style.NESTED:
            return start + self.nested_text(arguments)
        return start + "".join(self._argument(key, value) for key, value in arguments.items())

    def _argument(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else _json(value)
        if self.cdata and isinstance(value, str) and "\n" in value:
            text = f"{CDATA}{text}{CDATA_END}"
        return self.key_start + key + self.key_end_of(json_type(value)) + text + self.value_end

    def key_end_of(self, kind: str) -> str:
        """Return the text between a key and a value of a JSON type."""
        return dict(self.key_ends).get(kind, self.key_end)

    def quoted_text(self, value: Any) -> str:
        """Write a value in the style QUOTED."""
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{key}:{self.quoted_text(item)}' for key, item in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self.quoted_text, value))}]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else _json(value)

    def nested_text(self, value: Any) -> str:
        """Write a value in the style NESTED."""
        if isinstance(value, Mapping):
            return "".join(self.nested_member(key, self.nested_text(item)) for key, item in value.items())
        if isinstance(value, list):
            return "".join(self.nested_member(self.item, self.nested_text(item)) for item in value)
        return value if isinstance(value, str) else _json(value)

    def nested_member(self, key: str, text: str) -> str:
        """Write a member in the style NESTED with a value's text."""
        return self.key_start + key + self.key_end + text + self.value_end + key + self.value_close

    @property
    def trigger(self) -> str:
        """The marker that distinguishes calls from text; empty if calls begin without a marker."""
        opening = self.opening
        first = segments(opening)[:1]
        if opening in _BARE and self.style in (Style.JSON, Style.PYTHON):
            return ""
        return first[0] if first and len(first[0]) > 1 else opening.rstrip()


def python_text(value: Any) -> str:
    """Write a JSON value as a Python literal, with its strings as JSON, which Python reads as well."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_json(key)}: {python_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(python_text, value))}]"
    if value is None or isinstance(value, bool):
        return str(value)
    return _json(value)


def _numbered(constant: str, number: str) -> str:
    """Return the JSON text of a number, as a JSON string if ``constant`` is a JSON string."""
    return f'"{number}"' if constant.startswith('"') else number


@dataclass(frozen=True)
class ReasoningMarkers:
    """The markers before and after the reasoning, without spaces and newlines."""

    start: str
    end: str


def segments(text: str) -> list[str]:
    """Cut ``text`` into tags and single characters."""
    return _SEGMENT.findall(text)


def n_tags(text: str) -> int:
    """Return the number of tags in a text."""
    return sum(len(segment) > 1 for segment in segments(text))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

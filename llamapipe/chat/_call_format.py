"""How a template writes tool calls and reasoning: the markers, the text between them, and how both are found.

The template renders conversations with known texts, and these texts are searched in the result. The method follows
llama.cpp's docs/autoparser.md. The text around a known name and known arguments is the format of a call. Two calls in
one message show what ends the first and starts the second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Protocol, TypedDict

# A tag such as <tool_call> or <|python_tag|>, a marker such as [TOOL_CALLS], or one character.
_SEGMENT = re.compile(r"<[^<>\s](?:[^<>\n]*[^<>\s])?>|\[/?[A-Z][A-Z_]+\]|.", re.DOTALL)


class Style(Enum):
    """The form of the text between a call's start and its end."""

    JSON = auto()  # one object that holds name and arguments
    NAMED = auto()  # the name, then the arguments as a JSON object
    TAGGED = auto()  # the name, then every argument between its own markers


@dataclass(frozen=True)
class Member:
    """A member of a call's JSON object: ``role`` is "name", "arguments", "id", or "constant" with its JSON text."""

    key: str
    role: str
    constant: str = ""


@dataclass(frozen=True)
class CallFormat:
    """The text of calls: ``section_start (call_start CALL call_end) separator … section_end``.

    - JSON: CALL is an object of ``members``, in that order.
    - NAMED: CALL is NAME, ``id_start`` and an id where the model writes one, ``after_name``, and the arguments as JSON.
    - TAGGED: CALL is NAME, ``after_name``, and for each argument ``key_start`` KEY ``key_end`` VALUE ``value_end``.

    Spaces and newlines at the edges of markers are as the template writes them. A parser need not insist on them.
    """

    style: Style
    section_start: str = ""
    call_start: str = ""
    call_end: str = ""
    separator: str = ""
    section_end: str = ""
    parallel: bool = True
    members: tuple[Member, ...] = ()
    after_name: str = ""
    id_start: str = ""
    key_start: str = ""
    key_end: str = ""
    value_end: str = ""

    @property
    def opening(self) -> str:
        """All text before the first call."""
        return (self.section_start + self.call_start).lstrip()

    def written(self, calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
        """Calls, each an id, a name and arguments, as the template writes them."""
        parts = [self.call_start + self._written(*call) + self.call_end for call in calls]
        return self.section_start + self.separator.join(parts) + self.section_end

    def _written(self, id_: str, name: str, arguments: Mapping[str, Any]) -> str:
        if self.style is Style.JSON:
            values = {"name": _json(name), "arguments": _json(arguments), "id": _json(id_)}
            members = (f"{_json(m.key)}: {values.get(m.role, m.constant)}" for m in self.members)
            return f"{{{', '.join(members)}}}"
        start = name + (self.id_start + id_ if self.id_start else "") + self.after_name
        if self.style is Style.NAMED:
            return start + _json(arguments)
        texts = {key: value if isinstance(value, str) else _json(value) for key, value in arguments.items()}
        return start + "".join(
            self.key_start + key + self.key_end + text + self.value_end for key, text in texts.items()
        )

    @property
    def trigger(self) -> str:
        """The marker that distinguishes calls from text; empty if calls begin without one."""
        opening = self.opening
        first = segments(opening)[:1]
        return first[0] if first and len(first[0]) > 1 else opening.rstrip()


@dataclass(frozen=True)
class ReasoningMarkers:
    """The markers before and after the reasoning, without spaces and newlines."""

    start: str
    end: str


def segments(text: str) -> list[str]:
    """``text`` cut into tags and single characters; joined they are the text again."""
    return _SEGMENT.findall(text)


def common_start(a: str, b: str) -> str:
    """The longest common start of both that does not cut a tag."""
    n = 0
    for left, right in zip(segments(a), segments(b), strict=False):
        if left != right:
            break
        n += len(left)
    return a[:n]


def common_end(a: str, b: str) -> str:
    """The longest common end of both that does not cut a tag."""
    n = 0
    for left, right in zip(reversed(segments(a)), reversed(segments(b)), strict=False):
        if left != right:
            break
        n += len(left)
    return a[len(a) - n :]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


_CONTENT, _REASONING = "Qxcontentqx.", "Qxreasonqx."
_NAMES = ("qxfirst", "qxsecond")
_IDS = ("Qxid00001", "Qxid00002")
_ARGUMENTS = {"qxkeyone": "qxvalueone", "qxkeytwo": "qxvaluetwo"}
_USER = {"role": "user", "content": "Qxquestionqx."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "qxtool",
        "description": "Qxdescription.",
        "parameters": {"type": "object", "properties": {"qxx": {"type": "string", "description": "Qx."}}},
    },
}
# Pairs that models write although their template shows them only at the end of a prompt, or not at all.
KNOWN_REASONING = tuple(
    ReasoningMarkers(start, end)
    for start, end in (
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<thinking>", "</thinking>"),
    )
)
_MAX_MARKER = 100  # characters; longer text is not a marker
# Names of template arguments that switch reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")


class Render(Protocol):
    """Renders a conversation with a template."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """The text. Raises any exception if the template refuses the conversation."""


class TemplateProbe:
    """Renders of one template. A render that the template refuses is None."""

    def __init__(self, render: Render) -> None:
        self._render = render
        plain = self._rendered([_USER, {"role": "assistant", "content": _CONTENT}], prompt=False)
        self._head, _, tail = (plain or "").rpartition(_CONTENT)
        self._turn_end = tail.strip()
        self.prompt = self._rendered([_USER], prompt=True) or ""

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        switches: Mapping[str, bool] | None = None,
    ) -> str | None:
        try:
            return self._render(messages, tools=tools, add_generation_prompt=prompt, **(switches or {}))
        except Exception:  # a template may refuse in any way: its own error, or one of jinja2
            return None

    # ---- tool calls
    def calls(self, n: int, arguments: Mapping[str, Any] = _ARGUMENTS) -> str | None:
        """The assistant's text with ``n`` calls and no content, as the template writes it; None if it shows none."""
        for content in ("", None):
            for given in (dict(arguments), json.dumps(arguments)):
                text = self._calls(n, content, given)
                if text is not None and all(str(value) in text for value in arguments.values()):
                    return text
        return None

    def _calls(self, n: int, content: str | None, arguments: dict[str, Any] | str) -> str | None:
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name in zip(_IDS[:n], _NAMES[:n], strict=True)
        ]
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        text = self._rendered([_USER, message], prompt=False, tools=[_TOOL])
        head = self._rendered(
            [_USER, {"role": "assistant", "content": _CONTENT}], prompt=False, tools=[_TOOL]
        )
        if text is None or any(name not in text for name in _NAMES[:n]):
            return None
        head = (head or self._head).rpartition(_CONTENT)[0]
        text = text[len(common_start(text, head)) :]
        last = text.rfind(_NAMES[n - 1])
        end = text.find(self._turn_end, last) if self._turn_end else -1
        return text if end < 0 else text[:end]

    def call_format(self) -> CallFormat | None:
        """The format of calls; None if the template shows none, or one that is not understood."""
        one = self.calls(1)
        if one is None:
            return None
        both = self.calls(2)
        for find in (_json_format, _named_format, _tagged_format):
            found = find(one, both)
            if found is not None:
                return self._confirmed(found, one, both)
        return None

    def _confirmed(self, form: CallFormat, one: str, both: str | None) -> CallFormat | None:
        """The format if it reproduces the template's text, for single calls only if it fails for two; else None."""
        if not form.trigger and form.style is not Style.JSON:
            return None
        markers = (form.section_start, form.call_start, form.call_end, form.section_end, form.after_name)
        if any(len(marker) > _MAX_MARKER or _IDS[0] in marker for marker in markers):
            return None
        numbers = {key: 7041 + i for i, key in enumerate(_ARGUMENTS)}
        with_numbers = self.calls(1, numbers)
        if not _writes(form, one) or (with_numbers and not _writes(form, with_numbers, numbers)):
            return None
        if form.parallel and not (both and _writes(form, both, n=2)):
            return replace(form, parallel=False)
        return form

    # ---- reasoning
    def reasoning(self) -> ReasoningMarkers | None:
        """The markers around reasoning; None if the template has none."""
        for key in ("reasoning_content", "reasoning", "thinking"):
            message = {"role": "assistant", "content": _CONTENT, key: _REASONING}
            text = self._rendered([_USER, message], prompt=False)
            before, found, after = (text or "").rpartition(_REASONING)
            if found and _CONTENT in after:
                start = segments(before.rstrip())[-1:]
                end = segments(after.partition(_CONTENT)[0].strip())[:1]
                if start and end and len(start[0]) > 1 and len(end[0]) > 1:
                    found_markers = ReasoningMarkers(start[0], end[0])
                    # Markers of every message, such as <|end|>, do not distinguish reasoning from text.
                    return None if self._in_user_turn(found_markers) else found_markers
        call = self.calls(1) or ""
        for known in KNOWN_REASONING:
            shown = known.start in self.prompt or (known.start in call and known.end in call)
            if shown or self._removes(known):
                return known
        return None

    def _in_user_turn(self, markers: ReasoningMarkers) -> bool:
        text = self._rendered([_USER], prompt=False) or ""
        before, _, after = text.rpartition(_USER["content"])
        around = "".join(segments(before.rstrip())[-1:]) + after
        return markers.start in around or markers.end in around

    def _removes(self, markers: ReasoningMarkers) -> bool:
        """True if the template drops reasoning that is part of the content."""
        text = markers.start + _REASONING + markers.end + _CONTENT
        rendered = self._rendered([_USER, {"role": "assistant", "content": text}, _USER], prompt=False)
        return rendered is not None and _CONTENT in rendered and _REASONING not in rendered

    def reasoning_off(self) -> dict[str, Any]:
        """Template arguments that switch reasoning off; empty if none does."""
        for name in _SWITCHES:
            on = self._rendered([_USER], prompt=True, switches={name: True})
            off = self._rendered([_USER], prompt=True, switches={name: False})
            if on is not None and off is not None and on != off:
                return {name: False}
        return {}


# ---- from the text of one call, and of two, to a format
def _json_format(one: str, both: str | None) -> CallFormat | None:
    found = _call_object(one, _NAMES[0])
    if found is None:
        return None
    start, end, members = found
    second = _call_object(both, _NAMES[1]) if both else None
    first = _call_object(both, _NAMES[0]) if both else None
    between = both[first[1] : second[0]] if both and first and second else None
    edges = _edges(one[:start], between, one[end:])
    return CallFormat(Style.JSON, **edges, parallel=between is not None, members=members)


def _call_object(text: str, name: str) -> tuple[int, int, tuple[Member, ...]] | None:
    """The innermost JSON object that holds the name and the arguments: its start, its end, its members."""
    at = text.find(name)
    start = text.rfind("{", 0, max(at, 0))
    while start >= 0:
        value, end = _decoded(text, start)
        if isinstance(value, dict) and name in value.values() and _ARGUMENTS in value.values():
            return start, end, tuple(_member(key, inner, name) for key, inner in value.items())
        start = text.rfind("{", 0, start)
    return None


def _member(key: str, value: object, name: str) -> Member:
    if value == name:
        return Member(key, "name")
    if value == _ARGUMENTS:
        return Member(key, "arguments")
    return Member(key, "id") if value in _IDS else Member(key, "constant", json.dumps(value))


def _named_format(one: str, both: str | None) -> CallFormat | None:
    def find(text: str, n: int) -> tuple[int, int, int] | None:
        """The positions where the name starts, the arguments start, and the arguments end."""
        at = text.find(_NAMES[n])
        start = text.find("{", at)
        while at >= 0 and start >= 0:
            value, end = _decoded(text, start)
            if value == _ARGUMENTS:
                return at, start, end
            start = text.find("{", start + 1)
        return None

    found = find(one, 0)
    if found is None:
        return None
    name, start, end = found
    after_name = one[name + len(_NAMES[0]) : start]
    id_start, id_, rest = after_name.partition(_IDS[0])
    if id_:
        after_name = rest
    first, second = (find(both, 0), find(both, 1)) if both else (None, None)
    between = both[first[2] : second[0]] if both and first and second else None
    edges = _edges(one[:name], between, one[end:])
    return CallFormat(
        Style.NAMED,
        **edges,
        parallel=between is not None,
        after_name=after_name,
        id_start=id_start if id_ else "",
    )


def _tagged_format(one: str, both: str | None) -> CallFormat | None:
    def find(text: str, n: int) -> list[int] | None:
        """The starts of the name and of both keys and values, in order, and the end of the second value."""
        places = [text.find(_NAMES[n])]
        for part in (part for item in _ARGUMENTS.items() for part in item):
            places.append(text.find(part, max(places[-1], 0)))
        return None if min(places) < 0 else [*places, places[-1] + len(list(_ARGUMENTS.values())[-1])]

    places = find(one, 0)
    if places is None:
        return None
    (key_1, value_1), _ = _ARGUMENTS.items()
    after_name = one[places[0] + len(_NAMES[0]) : places[1]]
    key_end = one[places[1] + len(key_1) : places[2]]
    between_values = one[places[2] + len(value_1) : places[3]]
    key_start = common_end(after_name, between_values)
    # Space before a key belongs to the marker before it: an argument may also be the first, the last, or the only one.
    key_start = key_start.lstrip()
    n = len(key_start)
    after_name, value_end = after_name[: len(after_name) - n], between_values[: len(between_values) - n]
    first, second = (find(both, 0), find(both, 1)) if both else (None, None)
    between = both[first[5] : second[0]] if both and first and second else None
    rest = one[places[5] :]
    if not rest.startswith(value_end):
        value_end = value_end.rstrip()
    if not key_start or not key_end or not value_end.strip() or not rest.startswith(value_end):
        return None
    cut = len(value_end)
    edges = _edges(one[: places[0]], between[cut:] if between is not None else None, rest[cut:])
    return CallFormat(
        Style.TAGGED,
        **edges,
        parallel=between is not None,
        after_name=after_name,
        key_start=key_start,
        key_end=key_end,
        value_end=value_end,
    )


class _Edges(TypedDict, total=False):
    """The parts around a call and around a section of calls, as fields of ``CallFormat``."""

    section_start: str
    call_start: str
    call_end: str
    separator: str
    section_end: str


def _edges(before: str, between: str | None, after: str) -> _Edges:
    """Cuts the text before, between and after calls into the parts that belong to a call and those of a section."""
    if between is None:
        return {"call_start": _without_reasoning(before.lstrip()), "call_end": after.rstrip()}
    call_start = common_end(before, between)
    between = between[: len(between) - len(call_start)]
    section_start = before[: len(before) - len(call_start)].lstrip()
    call_end = common_start(between, after)
    separator = between[len(call_end) :]
    if not section_start:  # space before a call separates it from the one before
        stripped = call_start.lstrip()
        separator += call_start[: len(call_start) - len(stripped)]
        call_start = stripped
    section_end = after[len(call_end) :].rstrip()
    stripped = call_end.rstrip()
    if stripped and stripped != call_end:  # space after a call, too
        space = call_end[len(stripped) :]
        call_end, separator = stripped, space + separator
        section_end = space + section_end if section_end else ""
    return {
        "section_start": _without_reasoning(section_start),
        "call_start": call_start,
        "call_end": call_end,
        "separator": separator,
        "section_end": section_end,
    }


def _without_reasoning(text: str) -> str:
    """The text without the empty reasoning that some templates write before calls."""
    for known in KNOWN_REASONING:
        if text.startswith(known.start) and known.end in text:
            return text.partition(known.end)[2].lstrip()
    return text


def _writes(form: CallFormat, text: str, arguments: Mapping[str, Any] = _ARGUMENTS, n: int = 1) -> bool:
    """True if the format writes the probe's calls as ``text``, apart from spaces."""
    written = form.written([(id_, name, arguments) for id_, name in zip(_IDS[:n], _NAMES[:n], strict=True)])
    return "".join(written.split()) == "".join(_without_reasoning(text.lstrip()).split())


def _decoded(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None, start

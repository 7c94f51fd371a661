"""Finds out how a template writes tool calls: the markers, and the text between them.

Open this file if the calls of a new template are not found. ``_call_format`` holds the result.

The probe renders conversations with known texts and searches the result for these texts. The method follows llama.cpp's
docs/autoparser.md. The text around a known name and known arguments is the format of a call. Two calls in one message
show what ends the first call and starts the second.

Only text that all calls share is fixed. Where the first call, the second call and a later call in the conversation
differ, they hold a name, an id, or a number. Values of every type show how each type is written. If a template shows
the tools but not the calls, markers in the vocabulary or the prompt identify the format (``_known_formats``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, TypedDict

from llamapipe.chat._call_format import (
    CDATA,
    CDATA_END,
    CallFormat,
    Member,
    ReasoningMarkers,
    Slot,
    Style,
    n_tags,
    segments,
)
from llamapipe.structured.schema import json_type

CONTENT = "Qxcontentqx."
_NAMES = ("qxfirst", "qxsecond", "qxthird")
_IDS = ("Qxid00001", "Qxid00002", "Qxid00003")
_ARGUMENTS = {"qxkeyone": "qxvalueone", "qxkeytwo": "qxvaluetwo"}
# A value of each type that a template may write differently from a string.
_TYPED = {
    "qxfloat": 7042.5,
    "qxnumber": 7041,
    "qxboolean": True,
    "qxnull": None,
    "qxlistone": [7043],
    "qxlisttwo": [{"qxmember": 7044}],
    "qxarray": ["qxitem"],
    "qxobject": {"qxmember": "qxinner"},
}
_HARD = 'qx<&>"qx\nqx'  # characters with a meaning in XML or JSON
USER = {"role": "user", "content": "Qxquestionqx."}
TOOL = {
    "type": "function",
    "function": {
        "name": "qxtool",
        "description": "Qxdescription.",
        "parameters": {"type": "object", "properties": {"qxx": {"type": "string", "description": "Qx."}}},
    },
}
# Reasoning markers that models write although their template shows them only at the end of a prompt, or not at all.
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
MAX_MARKER = 100  # characters; longer text is not a marker


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
        """Return the rendered text. May raise any exception if the template refuses the conversation."""


class TemplateProbe:
    """Renders conversations with one template and searches the results."""

    def __init__(self, render: Render) -> None:
        self._render = render
        plain = self.rendered([USER, {"role": "assistant", "content": CONTENT}], prompt=False)
        self._head, _, tail = plain.rpartition(CONTENT)
        self._turn_end = tail.strip()
        self.prompt = self.rendered([USER], prompt=True)
        user = self.rendered([USER], prompt=False)
        self._user_end = user.rpartition(USER["content"])[2].strip()

    def rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        switches: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation; return an empty text if the template refuses it."""
        try:
            return self._render(messages, tools=tools, add_generation_prompt=prompt, **(switches or {}))
        except Exception:  # a template may refuse with its error or with one of jinja2
            return ""

    # ---- tool calls
    @cached_property
    def shows_tools(self) -> bool:
        """True if prompts contain the definitions of the tools."""
        return "qxtool" in self._prompt_with_tools

    @cached_property
    def _prompt_with_tools(self) -> str:
        return self.rendered([USER], prompt=True, tools=[TOOL])

    def calls(self, n: int) -> str | None:
        """Return the assistant's text with ``n`` calls and no content; None if the template shows none."""
        return next((sample.call if n == 1 else sample.both for sample in self._samples), None)

    @cached_property
    def _samples(self) -> list[_Sample]:
        """The samples with distinct texts, one for each form of a message in which the template shows whole calls."""
        samples: list[_Sample] = []
        for content in ("", None):
            for as_text in (False, True):
                form = _Form(content, as_text)
                call = self._calls(form, 1, _ARGUMENTS)
                listed = self._calls(form._replace(is_listed=True), 1, _ARGUMENTS)
                if call is None:
                    continue
                if listed is not None and "".join(listed.split()) != "".join(call.split()):
                    form, call = form._replace(is_listed=True), listed
                if all(call != other.call for other in samples):
                    both = self._calls(form, 2, _ARGUMENTS)
                    later = self._calls(form, 1, _ARGUMENTS, later=True)
                    samples.append(_Sample(form, call, both, later))
        return samples

    def _calls(
        self, form: _Form, n: int, arguments: Mapping[str, Any], later: bool = False, prompted: bool = False
    ) -> str | None:
        """Return the text of ``n`` calls; None if the template omits a part of them.

        ``later``: the calls follow another call in the conversation. ``prompted``: return the text as it follows the
        prompt; otherwise, omit the text that also precedes a plain answer.
        """
        call_arguments = json.dumps(arguments) if form.as_text else arguments
        tools = [_defined(name, arguments) for name in _NAMES] if form.is_listed else [TOOL]

        def message(first: int, end: int) -> dict[str, Any]:
            calls = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": call_arguments}}
                for id_, name in zip(_IDS[first:end], _NAMES[first:end], strict=True)
            ]
            return {"role": "assistant", "content": form.content, "tool_calls": calls}

        before = [USER]
        if later:
            result = {"role": "tool", "tool_call_id": _IDS[2], "name": _NAMES[2], "content": "Qxresultqx."}
            before += [message(2, 3), result]
        text = self.rendered([*before, message(0, n)], prompt=False, tools=tools)
        content_only = {"role": "assistant", "content": CONTENT}
        head = self.rendered([*before, content_only], prompt=False, tools=tools)
        needed = [*_NAMES[:n], *(value for value in arguments.values() if isinstance(value, str))]
        if any(part not in text for part in needed if part != _HARD):
            return None
        head, _, tail = (head or self._head + CONTENT + self._turn_end).rpartition(CONTENT)
        if prompted:
            head, tail = self.rendered(before, prompt=True, tools=tools), ""
        text = text[len(common_start(text, head)) :]
        text = self._without_header(text)
        empty = common_start(text, tail)  # the end of an empty message text
        if 0 < n_tags(empty) < n_tags(tail):
            text = text[len(empty) :]
        last = text.rfind(_NAMES[n - 1])
        end = text.find(self._turn_end, last) if self._turn_end else -1
        if end >= 0:
            return text[:end]
        if len(self._turn_end) > MAX_MARKER:  # text that follows every message
            return text[: len(text) - len(common_end(text, self._turn_end))]
        # Cut off the text that ends every turn. A single tag may also occur within calls.
        whole = text.rstrip()
        common = common_end(whole, common_end(self._turn_end, self._user_end) or self._user_end)
        rest = whole.removesuffix(common) if common.startswith(("<", "[")) else whole
        return text if n_tags(common) < 2 and common in rest else rest

    def _without_header(self, text: str) -> str:
        """Return the text without the end of the prompt, which some templates repeat before calls."""
        start, prompt = text.lstrip(), self.prompt[-MAX_MARKER:]
        for match in re.finditer("<", prompt):
            header = prompt[match.start() :].rstrip()
            if "assistant" in header and start.startswith(header):
                return start[len(header) :]
        return text

    @cached_property
    def _prompted_samples(self) -> list[_Sample]:
        """The samples in which the prompt ends with the text that also precedes the second call.

        Their first call begins with that text.
        """
        samples = []
        for sample in self._samples:
            form = sample.form
            call, both = (self._calls(form, n, _ARGUMENTS, prompted=True) or "" for n in (1, 2))
            later = self._calls(form, 1, _ARGUMENTS, later=True, prompted=True)
            first, second = (both[: max(both.find(name), 0)] for name in _NAMES[:2])
            before = common_end(self.prompt, second.removesuffix(first)) if second.endswith(first) else ""
            if len(before) > 1 and before != second:
                samples.append(_Sample(form, before + call, before + both, later and before + later, before))
        return samples

    def call_format(self, is_token: Callable[[str], bool]) -> CallFormat | None:
        """Return the format of calls; None if the template shows no calls, or writes them in an unknown format.

        ``is_token``: returns whether a text is one control token of the vocabulary.
        """
        template_format = next(self._formats(self._samples), None) or next(
            self._formats(self._prompted_samples), None
        )
        if (template_format is None or not template_format.trigger) and self.shows_tools:
            plain, prompt = self.prompt, self._prompt_with_tools
            for marks, form in _known_formats(is_token):
                if any((mark in prompt and mark not in plain) or is_token(mark) for mark in marks):
                    return replace(form, in_content=template_format is None)
        return template_format

    def shows(self, form: CallFormat) -> bool:
        """Return whether the template writes calls as this format does."""
        whole = replace(form, section_start="", section_end="")
        return any(_writes(whole, sample.call, is_whole=False) for sample in self._samples)

    def _formats(self, samples: Sequence[_Sample]) -> Iterator[CallFormat]:
        for find in (_json_format, _named_format, _tagged_format, _quoted_format, _python_format):
            for sample in samples:
                form = find(sample)
                if form is not None and sample.prompted:
                    form = replace(form, prompted=sample.prompted)
                confirmed = None if form is None else self._confirmed(form, sample)
                if confirmed is not None:  # the text after calls without a section ends the turn
                    yield confirmed if confirmed.section_start else replace(confirmed, section_end="")

    def _confirmed(self, form: CallFormat, sample: _Sample) -> CallFormat | None:
        """Return the format if it reproduces the template's text; else None.

        A format that fails only for two calls is returned as a format for single calls.
        """
        if not form.trigger and form.style not in (Style.JSON, Style.PYTHON):
            return None
        markers = (form.section_start, form.call_start, form.call_end, form.section_end, *form.head)
        if any(
            isinstance(marker, str) and (len(marker) > MAX_MARKER or _IDS[0] in marker) for marker in markers
        ):
            return None
        if form.style in (Style.TAGGED, Style.NESTED):
            typed = self._with_types(form, sample.form)
            if typed is None:
                return None
            form = typed
        if form.style not in (Style.PYTHON, Style.QUOTED):  # in these, templates do not quote values properly
            numbers = {key: 7041 + i for i, key in enumerate(_ARGUMENTS)}
            with_numbers = self._calls(sample.form, 1, numbers, prompted=bool(sample.prompted))
            with_numbers = with_numbers and sample.prompted + with_numbers
            if with_numbers and not _writes(form, with_numbers, numbers):
                return None
            if not _writes(form, sample.call):
                return None
            call = replace(form, section_start="", section_end="")  # templates may omit these in later calls
            if sample.later and not _writes(call, sample.later, is_whole=False):
                return None
            if form.parallel and not (sample.both and _writes(form, sample.both, n=2)):
                return replace(form, parallel=False)
        return form

    def _with_types(self, form: CallFormat, message_form: _Form) -> CallFormat | None:
        """Return the format with the markers for each type of argument; None if the form of strings is unknown."""
        hard = self._calls(message_form, 1, {"qxhard": _HARD})
        if hard is not None and "qxhard" in hard:
            text = hard.partition("qxhard")[2].removeprefix(form.key_end)
            if text.startswith(f"{CDATA}{_HARD}{CDATA_END}"):
                form = replace(form, cdata=True)
            elif not text.startswith(_HARD):
                return None
        text = self._calls(message_form, 1, _TYPED) or ""
        places = {key: text.find(key) for key in _TYPED}
        ends = [("string", form.key_end)]
        for key, at in places.items():
            value = _TYPED[key]
            region = text[at + len(key) : min([p for p in places.values() if p > at], default=len(text))]
            positions = [
                n
                for written in _spellings(value)
                if (n := region.find(written + form.value_end.rstrip())) >= 0
            ]
            if at >= 0 and positions:
                ends.append((json_type(value), region[: min(positions)]))
        if form.style is Style.NESTED:
            item = re.search(rf"{re.escape(form.key_start)}(\w+){re.escape(form.key_end)}qxitem", text)
            return replace(form, item=item[1] if item else "")
        is_typed = any(end != form.key_end for _, end in ends)
        return replace(form, key_ends=tuple(dict.fromkeys(ends))) if is_typed else form


def common_start(a: str, b: str) -> str:
    """Return the longest common start of two texts that does not cut a tag."""
    return a[: _n_common(segments(a), segments(b))]


def common_end(a: str, b: str) -> str:
    """Return the longest common end of two texts that does not cut a tag."""
    return a[len(a) - _n_common(segments(a)[::-1], segments(b)[::-1]) :]


def _n_common(a: list[str], b: list[str]) -> int:
    """Return the number of characters in the segments with which both lists begin."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(len(segment) for segment, _ in pairs)


def _spellings(value: object) -> tuple[str, ...]:
    return (json.dumps(value, ensure_ascii=False), json.dumps(value, separators=(",", ":")), str(value))


def _defined(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Define a tool with these arguments, for templates that write the types of its definition."""
    properties = {key: _type_of(value) for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Qx.", "parameters": parameters}}


def _type_of(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"type": "array", "items": _type_of(value[0])}
    kind = json_type(value)
    return {"type": "integer" if kind == "number" and isinstance(value, int) else kind}


class _Form(NamedTuple):
    """The form of a message with calls: content, whether arguments are JSON text, whether tools are listed."""

    content: str | None
    as_text: bool
    is_listed: bool = False


class _Sample(NamedTuple):
    """The texts of one call, two calls and a later call, and their start, if the prompt ends with it."""

    form: _Form
    call: str
    both: str | None
    later: str | None
    prompted: str = ""


# ---- from the text of calls to a format
def _json_format(sample: _Sample) -> CallFormat | None:
    call, both = sample.call, sample.both
    place = _call_object(call, _NAMES[0])
    if place is None:
        return None
    start, end, members = place
    second = _call_object(both, _NAMES[1]) if both else None
    first = _call_object(both, _NAMES[0]) if both else None
    between = both[first[1] : second[0]] if both and first and second else None
    later = _call_object(sample.later, _NAMES[0]) if sample.later else None
    for other in (second, later):
        members = members if other is None else tuple(map(_varying, members, other[2]))
    edges = _edges(call[:start], between, call[end:])
    number = next((member.constant for member in members if member.role == "number"), "0")
    return CallFormat(
        Style.JSON,
        **edges,
        parallel=between is not None,
        members=members,
        first_number=int(number.strip('"')),
    )


def _varying(member: Member, other: Member) -> Member:
    """Return the member as a number or an id if it differs from the same member of another call."""
    if member.role != "constant" or member.constant == other.constant:
        return member
    return replace(member, role="number" if member.constant.strip('"').isdecimal() else "id")


def _call_object(text: str, name: str) -> tuple[int, int, tuple[Member, ...]] | None:
    """Find the innermost JSON object that holds the name and the arguments; return its start, end and members."""
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


class _Place(NamedTuple):
    """The start of a call's name, the end of its head, and the end of the call."""

    name: int
    head_end: int
    end: int


_Locate = Callable[[str, int], "_Place | None"]  # takes a text and the index of a call's name


def _named_format(sample: _Sample) -> CallFormat | None:
    def find(text: str, n: int) -> _Place | None:
        at = text.find(_NAMES[n])
        start = text.find("{", at)
        while at >= 0 and start >= 0:
            value, end = _decoded(text, start)
            if value == _ARGUMENTS:
                return _Place(at, start, end)
            start = text.find("{", start + 1)
        return None

    return _laid_out(CallFormat(Style.NAMED), sample, find)


def _argument_places(text: str, n: int) -> list[int] | None:
    """Return the starts of the name and of both keys and values, in order, and the second value's end; or None."""
    places = [text.find(_NAMES[n])]
    for part in (part for item in _ARGUMENTS.items() for part in item):
        places.append(text.find(part, max(places[-1], 0)))
    return None if min(places) < 0 else [*places, places[-1] + len(list(_ARGUMENTS.values())[-1])]


def _tagged_format(sample: _Sample) -> CallFormat | None:
    call = sample.call
    places = _argument_places(call, 0)
    if places is None:
        return None
    (key_1, value_1), (key_2, _) = _ARGUMENTS.items()
    before_key = call[places[0] + len(_NAMES[0]) : places[1]]
    key_end = call[places[1] + len(key_1) : places[2]]
    value_end, repeated, key_start = call[places[2] + len(value_1) : places[3]].partition(key_1)
    value_close = ""
    if repeated:  # <key>value</key>
        value_close, key_start = key_end, key_start.removeprefix(key_end)
        if not key_start.endswith("<") or not value_end.endswith("</") or not before_key.endswith(key_start):
            return None
    else:
        between_values = value_end
        key_start = common_end(before_key, between_values)
        # Space before a key belongs to the preceding marker, because an argument may be the first, last or only one.
        key_start = key_start.lstrip()
        value_end = between_values[: len(between_values) - len(key_start)]
    rest = call[places[5] :]
    if not repeated and not rest.startswith(value_end):
        value_end = value_end.rstrip()
    whole_end = value_end + (key_2 + value_close if repeated else "")
    if "<" not in key_start and "[" not in key_start:
        return None
    if not key_end or not value_end.strip() or not rest.startswith(whole_end):
        return None

    def find(text: str, n: int) -> _Place | None:
        places = _argument_places(text, n)
        if places is None:
            return None
        return _Place(places[0], places[1] - len(key_start), places[5] + len(whole_end))

    form = CallFormat(
        Style.NESTED if repeated else Style.TAGGED,
        key_start=key_start,
        key_end=key_end,
        value_end=value_end,
        value_close=value_close,
    )
    return _laid_out(form, sample, find)


def _quoted_format(sample: _Sample) -> CallFormat | None:
    """Find the format NAME{KEY:VALUE,KEY:…}, with a marker before and after each string."""
    call = sample.call
    places = _argument_places(call, 0)
    if places is None:
        return None
    (key_1, value_1), _ = _ARGUMENTS.items()
    quote = call[places[1] + len(key_1) : places[2]].removeprefix(":")
    between, rest = call[places[2] + len(value_1) : places[3]], call[places[5] :]
    if not quote.strip() or between != f"{quote}," or not rest.startswith(f"{quote}}}"):
        return None

    def find(text: str, n: int) -> _Place | None:
        places = _argument_places(text, n)
        return None if places is None else _Place(places[0], places[1] - 1, places[5] + len(quote) + 1)

    form = _laid_out(CallFormat(Style.QUOTED, quote=quote), sample, find)
    return None if form is None or form.after_name else form


def _python_format(sample: _Sample) -> CallFormat | None:
    """Find the format NAME(KEY=VALUE, …). The quotes of strings are ignored: templates omit them."""
    (key_1, value_1), (key_2, value_2) = _ARGUMENTS.items()

    def find(text: str, n: int) -> _Place | None:
        pattern = rf"({_NAMES[n]})\({key_1}=[\"']?{value_1}[\"']?,? *{key_2}=[\"']?{value_2}[\"']?\)"
        match = re.search(pattern, text)
        return match and _Place(match.start(), match.end(1), match.end())

    return _laid_out(CallFormat(Style.PYTHON), sample, find)


_ID_MARK, _NUMBER_MARK = "\x01", "\x02"
_SLOT = re.compile(f"({_ID_MARK}|{_NUMBER_MARK}|{_NAMES[0]})")
_DIGITS = re.compile("([0-9]+)")


def _with_numbers(texts: list[str]) -> tuple[list[str], list[str]]:
    """Mark each number in which texts with the same end differ; return the texts and the first text's numbers."""
    split = [_DIGITS.split(text) for text in texts]
    numbers: list[str] = []
    for at in range(1, min(map(len, split)) + 1):
        column = {parts[-at] for parts in split}
        if at % 2 == 0 and len(column) > 1:
            numbers.insert(0, split[0][-at])
            for parts in split:
                parts[-at] = _NUMBER_MARK
        elif len(column) > 1:
            break
    return ["".join(parts) for parts in split], numbers


def _cut(text: str) -> tuple[str, str]:
    at = min((n for mark in (_ID_MARK, _NUMBER_MARK) if (n := text.find(mark)) >= 0), default=len(text))
    return text[:at], text[at:]


def _laid_out(form: CallFormat, sample: _Sample, find: _Locate) -> CallFormat | None:
    """Complete a format with the head of calls and the text around calls."""
    place = find(sample.call, 0)
    if place is None:
        return None
    first, second = (find(sample.both, 0), find(sample.both, 1)) if sample.both else (None, None)
    later = find(sample.later, 0) if sample.later else None
    others: list[tuple[str, str, int]] = []  # texts before and after the name of another call, and its number
    if sample.both and first and second:
        name_end = second.name + len(_NAMES[1])
        others.append((sample.both[first.end : second.name], sample.both[name_end : second.head_end], 1))
    if sample.later and later:
        name_end = later.name + len(_NAMES[0])
        others.append((sample.later[: later.name], sample.later[name_end : later.head_end], 0))
    name_end = place.name + len(_NAMES[0])
    calls = [(sample.call[: place.name], sample.call[name_end : place.head_end], 0), *others]
    befores = [before.replace(_IDS[n], _ID_MARK) for before, _, n in calls]
    afters = [after.replace(_IDS[n], _ID_MARK).replace(_NAMES[n], _NAMES[0]) for _, after, n in calls]
    befores, left = _with_numbers(befores)
    afters, right = _with_numbers(afters)
    numbers = left + right
    start, head = _cut(befores[0])
    between = _cut(befores[1])[0] if sample.both and first and second else None
    parts = _SLOT.split(f"{head}{_NAMES[0]}{afters[0]}")
    slots = {_ID_MARK: Slot.ID, _NUMBER_MARK: Slot.NUMBER, _NAMES[0]: Slot.NAME}
    return replace(
        form,
        **_edges(start, between, sample.call[place.end :]),
        parallel=between is not None,
        head=tuple(slots.get(part, part) for part in parts if part),
        first_number=int(numbers[0]) if numbers else 0,
    )


class _Edges(TypedDict, total=False):
    """The parts around a call and around a section of calls, as fields of ``CallFormat``."""

    section_start: str
    call_start: str
    call_end: str
    separator: str
    section_end: str


def _edges(before: str, between: str | None, after: str) -> _Edges:
    """Cut the text before, between and after calls into the parts of a call and the parts of a section."""
    if between is None:
        return {"call_start": _without_reasoning(before.lstrip()), "call_end": after.rstrip()}
    call_start = common_end(before, between)
    between = between[: len(between) - len(call_start)]
    section_start = before[: len(before) - len(call_start)].lstrip()
    call_end = common_start(between, after)
    separator = between[len(call_end) :]
    if not section_start:  # space before a call separates it from the preceding call
        stripped = call_start.lstrip()
        separator += call_start[: len(call_start) - len(stripped)]
        call_start = stripped
    section_end = after[len(call_end) :].rstrip()
    stripped = call_end.rstrip()
    if stripped and stripped != call_end:  # space after a call separates it from the next call
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
    """Return the text without the empty reasoning that some templates write before calls."""
    for known in KNOWN_REASONING:
        if text.startswith((known.start, known.end)) and known.end in text:
            return text.partition(known.end)[2].lstrip()
    return text


def _writes(
    form: CallFormat, text: str, arguments: Mapping[str, Any] = _ARGUMENTS, n: int = 1, is_whole: bool = True
) -> bool:
    """Return whether the format writes the probe's calls as ``text``, except for spaces and the numbers of calls.

    If ``is_whole`` is False, ``text`` may have other text before and after the calls.
    """
    calls = [(id_, name, arguments) for id_, name in zip(_IDS[:n], _NAMES[:n], strict=True)]
    written = "".join(form.written(calls, _NUMBER_MARK).split())
    pattern = re.escape(written).replace(_NUMBER_MARK, "[0-9]+")
    match = re.fullmatch if is_whole else re.search
    return match(pattern, "".join(_without_reasoning(text.lstrip()).split())) is not None


def _decoded(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None, start


# ---- formats that templates do not show
def _known_formats(is_token: Callable[[str], bool]) -> Iterator[tuple[tuple[str, ...], CallFormat]]:
    """Yield marks, and the format that applies if the vocabulary or the prompt with tools has one of the marks."""
    members = (Member("name", "name"), Member("arguments", "arguments"))
    objects = CallFormat(Style.JSON, separator=", ", members=members)
    yield (
        ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),  # LFM 2
        CallFormat(
            Style.PYTHON,
            section_start="<|tool_call_start|>[",
            separator=", ",
            section_end="]<|tool_call_end|>",
        ),
    )
    yield ("functools[",), replace(objects, section_start="functools[", section_end="]")
    end = "<|/tool_call|>" if is_token("<|/tool_call|>") else ""  # Phi 4 writes it, Granite 3 does not
    yield ("<|tool_call|>",), replace(objects, section_start="<|tool_call|>[", section_end="]" + end)
    yield (
        ("<tool_call>",),
        replace(objects, call_start="<tool_call>\n", call_end="\n</tool_call>", separator="\n"),
    )
    yield (
        ("[func_name1(",),
        CallFormat(Style.PYTHON, section_start="[", separator=", ", section_end="]"),
    )

"""Parses generated text into content, reasoning and tool calls as it arrives.

Calls are read in the format that probing the template has found. Some models, such as Qwen2.5-Coder, write calls as
plain JSON although their template shows markers. The whole answer is then one or more objects with a name and
arguments, or a list of such objects, perhaps in a Markdown fence. Anything else is text. No grammar limits these calls,
so their arguments need not match the schema. But a tool without parameters gets no arguments, as with a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llamapipe.chat._answer_markers import AnswerMarkers
from llamapipe.chat._argument_values import (
    KEY,
    nested_key,
    nested_value,
    next_item,
    python_value,
    quoted_key,
    quoted_value,
)
from llamapipe.chat._call_format import (
    CDATA,
    CDATA_END,
    PYTHON_TAGS,
    CallFormat,
    ReasoningMarkers,
    Slot,
    Style,
    segments,
)
from llamapipe.chat._harmony import HarmonyReader
from llamapipe.chat._reader import (
    AnswerOutput,
    HeldCalls,
    Malformed,
    Reading,
    TextBuffer,
)
from llamapipe.chat._tagged_arguments import TaggedArguments, only_types
from llamapipe.chat.results import ChatPiece, decoded_json
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import takes_nothing

_NAME = re.compile(r"[\w.\-]*")
_ID, _NUMBER = re.compile(r"[\w\-]*"), re.compile(r"[0-9]*")
_WITHOUT_TAGS = re.compile("|".join(map(re.escape, PYTHON_TAGS)))
# Models trained on several formats confuse these two names of a call's arguments.
_ARGUMENTS_KEYS = ("arguments", "parameters")


@dataclass
class _Read:
    """The members of a call's JSON object that have been read."""

    name: str | None = None
    id: str | None = None
    arguments: str | None = None
    begun: bool = False
    is_shown: bool = False  # the arguments were returned


def _parts(marker: str) -> list[str]:
    """Split the end marker of a call or a section into parts that spaces may separate."""
    text = marker.strip()
    if segments(text)[:1] == ["]"]:
        return ["]", *filter(None, [text[1:].strip()])]
    return text.split()


class CallReader:
    """Reads one section of calls. Its generators raise Malformed if the text is not a call of a known tool."""

    def __init__(
        self, form: CallFormat, tools: Mapping[str, dict[str, Any]], output: AnswerOutput, lenient: bool
    ) -> None:
        """``lenient``: calls may differ from the template in known ways."""
        self._form = form
        self._tools = tools
        self._output = output
        self._lenient = lenient
        self._roles = {member.key: member.role for member in form.members}
        for key in _ARGUMENTS_KEYS:
            self._roles.setdefault(key, "arguments")
        self._roles.setdefault("function", "function")
        self._has_id = any(member.role in ("id", "number") for member in form.members)
        self._end_parts = _parts(form.call_end)
        self.opening = form.opening

    @property
    def openings(self) -> dict[str, str]:
        """The markers that begin calls, each with the text required after it."""
        form = self._form
        if not form.trigger:
            return {form.opening[:1] or "{": ""} if self._lenient and form.style is Style.JSON else {}
        openings = {form.trigger: form.opening[len(form.trigger) :]}
        if self._lenient:  # models leave out the outer of two markers
            inner = form.opening[len(form.trigger) :].lstrip()
            first = segments(inner)[:1]
            marker = first[0] if first and len(first[0]) > 1 else inner.rstrip()
            if inner.startswith(("<", "[")) and len(marker) > 1:
                openings[marker] = inner[len(marker) :]
        return openings

    def section(self, buffer: TextBuffer, opening: str, is_whole: bool = True) -> Reading[None]:
        """Read the rest of the opening after the trigger, calls, and the end of their section.

        If ``is_whole`` is False, the outer markers are optional. Raises Malformed.
        """
        form = self._form
        section_end = _parts(form.section_end)
        following = (form.separator + form.call_start).strip()
        yield from buffer.expect(opening)
        while True:
            yield from self._call(buffer)
            yield from self._end(buffer, following, is_whole)
            self._output.end()
            if not form.section_start and not form.separator.strip():
                return
            yield from buffer.spaces()
            if not form.section_start and not (yield from buffer.ahead(following)):
                return
            if buffer.ended and not buffer.n:
                return
            if section_end and (yield from buffer.skip(section_end[0])):
                for part in section_end[1:]:
                    yield from buffer.spaces()
                    if not (yield from buffer.skip(part)) and buffer.n:
                        raise Malformed
                return
            if following and (not section_end or not is_whole) and not (yield from buffer.ahead(following)):
                return
            yield from buffer.expect(form.separator)
            yield from buffer.expect(form.call_start)

    def _call(self, buffer: TextBuffer) -> Reading[None]:
        if self._form.style is Style.JSON:
            return self._object(buffer)
        return self._named(buffer) if self._form.style is Style.NAMED else self._one_by_one(buffer)

    def _end(self, buffer: TextBuffer, following: str, is_whole: bool) -> Reading[None]:
        """Read the end marker of a call. After JSON, the marker is optional at the text's end and before another call.

        If the marker has several parts, only the first part is required at the end of the text, or if ``is_whole`` is
        False.
        """
        yield from buffer.spaces()
        form = self._form
        ends_itself = form.style in (Style.JSON, Style.NAMED)
        for i, marker in enumerate(self._end_parts):
            if i:
                yield from buffer.spaces()
            while (cut_off := buffer.n < len(marker) and marker.startswith(buffer.rest)) and not buffer.ended:
                yield
            if cut_off and (i or ends_itself):
                buffer.take(buffer.n)
            elif not (yield from buffer.skip(marker)):
                is_next = ends_itself and len(following) > 1 and (yield from buffer.ahead(following))
                if not is_next and not (i and not is_whole):
                    raise Malformed

    # ---- {"name": …, "arguments": …}
    def _object(self, buffer: TextBuffer) -> Reading[None]:
        call = _Read()
        yield from self._members(buffer, call)
        if call.name is None:
            raise Malformed
        if not call.begun:
            self._output.begin(call.name, call.id)
        if not call.is_shown:
            self._output.more("{}" if call.arguments is None else call.arguments)

    def _members(self, buffer: TextBuffer, call: _Read, is_inner: bool = False) -> Reading[None]:
        """Read an object into ``call``. In OpenAI's form, which some models write, "function" is an inner object."""
        yield from buffer.expect("{")
        yield from buffer.spaces()
        while not (yield from buffer.skip("}")):
            key = yield from _string(buffer)
            yield from buffer.expect(":")
            yield from buffer.spaces()
            role = self._roles.get(key, "")
            if role == "arguments" and call.arguments is None:
                if call.name is not None and (yield from buffer.ahead("{")):
                    if not call.begun:
                        call.begun = True
                        self._output.begin(call.name, call.id)
                    yield from buffer.json_value(self._output.more)
                    call.arguments, call.is_shown = "", True
                else:
                    held = _unquoted((yield from buffer.json_value()))
                    call.arguments = json.dumps(held, ensure_ascii=False)
            elif role == "function" and not is_inner and (yield from buffer.ahead("{")):
                yield from self._members(buffer, call, is_inner=True)
            else:
                value = yield from buffer.json_value()
                if role == "name" or (role == "function" and call.name is None):
                    call.name = self._known(value)
                    if call.id is not None or not self._has_id:
                        call.begun = True
                        self._output.begin(call.name, call.id)
                elif role in ("id", "number") and isinstance(value, (str, int)):
                    call.id = str(value)
                    if call.begun:
                        self._output.identify(call.id)
            yield from buffer.spaces()
            if not (yield from buffer.skip(",")) and not (yield from buffer.ahead("}")):
                raise Malformed
            yield from buffer.spaces()

    # ---- NAME, perhaps with an id and a number
    def _head(self, buffer: TextBuffer) -> Reading[tuple[str, str | None]]:
        """Read the text before the arguments. Text between the name and an id or a number is optional."""
        parts = self._form.head
        slots: dict[str | Slot, str] = {}
        at = 0
        while at < len(parts):
            part, at = parts[at], at + 1
            if isinstance(part, str):
                if at < len(parts) and parts[at] is not Slot.NAME and Slot.NAME in slots:
                    if not (yield from buffer.skip(part)):
                        if buffer.n and part.startswith(buffer.rest):
                            raise Malformed  # the text ended within this part
                        at += 1
                else:
                    yield from buffer.expect(part)
            elif part is Slot.NAME:
                name = yield from buffer.take_while(_NAME)
                if slots.setdefault(part, self._known(name)) != name:
                    raise Malformed
            else:
                slots[part] = yield from buffer.take_while(_ID if part is Slot.ID else _NUMBER)
                if not slots[part]:
                    raise Malformed
        id_head = self._form.id_head
        if id_head and Slot.NUMBER in slots:
            return slots[Slot.NAME], "".join(
                part if isinstance(part, str) else slots[part] for part in id_head
            )
        return slots[Slot.NAME], slots.get(Slot.ID)

    # ---- … {…}
    def _named(self, buffer: TextBuffer) -> Reading[None]:
        name, id_ = yield from self._head(buffer)
        yield from buffer.spaces()
        if not (yield from buffer.ahead("{")):
            raise Malformed
        self._output.begin(name, id_)
        yield from buffer.json_value(self._output.more)

    # ---- … each argument separately
    def _one_by_one(self, buffer: TextBuffer) -> Reading[None]:
        name, id_ = yield from self._head(buffer)
        arguments, read = self._arguments(name), self._with_tags
        if (bracket := {Style.PYTHON: "(", Style.QUOTED: "{"}.get(self._form.style)) is not None:
            read = self._with_brackets
            yield from buffer.one_of((bracket,))
        self._output.begin(name, id_)
        keys: list[str] = []
        yield from read(buffer, arguments, keys)
        self._output.more("}" if keys else "{}")

    def _arguments(self, name: str) -> TaggedArguments:
        try:
            return TaggedArguments(self._form, self._tools[name])
        except InvalidRequestError:  # the grammar does not enforce such a schema
            return TaggedArguments(self._form, only_types(self._form, self._tools[name]))

    def _argument(self, key: str, keys: list[str]) -> str:
        """Add ``key`` to ``keys``; return the JSON text before its value."""
        keys.append(key)
        return f"{'{' if len(keys) == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: "

    def _value(self, key: str, value: Any, keys: list[str]) -> None:
        self._output.more(self._argument(key, keys) + json.dumps(value, ensure_ascii=False))

    # ---- key=value, … or key:value, …
    def _with_brackets(
        self, buffer: TextBuffer, arguments: TaggedArguments, keys: list[str]
    ) -> Reading[None]:
        is_python = self._form.style is Style.PYTHON
        quote, end = self._form.quote, ")" if is_python else "}"
        yield from buffer.spaces()
        while not (yield from buffer.skip(end)):
            if is_python:
                key = yield from buffer.take_while(KEY)
                yield from buffer.expect("=")
                yield from buffer.spaces()
            else:
                key = yield from quoted_key(buffer, quote)
            if not key:
                raise Malformed
            is_string = (yield from buffer.some()) and buffer.next_is("\"'" if is_python else quote[0])
            if arguments.is_text(key) and is_string:
                self._output.more(f'{self._argument(key, keys)}"')
                if is_python:
                    yield from python_value(buffer, self._show)
                else:
                    yield from quoted_value(buffer, quote, self._show)
                self._output.more('"')
            else:
                value = yield from python_value(buffer) if is_python else quoted_value(buffer, quote)
                self._value(key, arguments.typed(arguments.schema(key), value), keys)
            yield from next_item(buffer, end)

    def _show(self, text: str) -> None:
        """Output a part of a string, escaped as JSON."""
        self._output.more(json.dumps(text, ensure_ascii=False)[1:-1])

    # ---- <key>value</key> …
    def _with_tags(self, buffer: TextBuffer, arguments: TaggedArguments, keys: list[str]) -> Reading[None]:
        form = self._form
        key_start = form.key_start.strip()
        yield from buffer.spaces()
        while not (form.style is Style.NESTED and (yield from buffer.ahead(form.call_end.strip()))) and (
            yield from buffer.skip(key_start)
        ):
            if form.style is Style.NESTED:
                yield from self._nested(buffer, arguments, keys)
            else:
                yield from self._tagged(buffer, arguments, keys)
            yield from buffer.spaces()
        n = buffer.n
        if (
            buffer.ended
            and form.call_end.strip()
            and n < len(key_start)
            and key_start.startswith(buffer.rest)
        ):
            raise Malformed  # another argument might have followed

    def _nested(self, buffer: TextBuffer, arguments: TaggedArguments, keys: list[str]) -> Reading[None]:
        form = self._form
        key = yield from nested_key(form, buffer)
        if arguments.is_text(key):
            yield from self._text(buffer, key, arguments, keys)
        else:
            value = yield from nested_value(form, buffer)
            try:
                argument = arguments.shaped(arguments.schema(key), value)
            except ValueError:
                raise Malformed from None
            self._value(key, argument, keys)
        yield from buffer.expect(form.value_end + key + form.value_close)

    def _tagged(self, buffer: TextBuffer, arguments: TaggedArguments, keys: list[str]) -> Reading[None]:
        form = self._form
        ends = tuple(dict.fromkeys(end.strip() for _, end in form.key_ends)) or (form.key_end.strip(),)
        first, space, rest = ends[0].partition("\n")
        parts: list[str] = []
        if len(ends) == 1 and space and first.endswith(">"):  # models omit the separator of two tags
            marker = yield from buffer.until((first,), parts.append)
            yield from buffer.expect(f"\n{rest}")
            end: str | None = ends[0]
        else:
            end = marker = yield from buffer.until(ends, parts.append)
        if marker is None:
            raise Malformed
        key = "".join(parts)
        # The types that the text after the key stands for; empty if the text does not depend on the type.
        kinds = {kind for kind, other in form.key_ends if other.strip() == end}
        if arguments.is_text(key) or (kinds == {"string"} and arguments.may_be_text(key)):
            yield from self._text(buffer, key, arguments, keys)
        else:
            texts: list[str] = []
            yield from self._up_to_end(buffer, arguments, keys, texts.append)
            if arguments.is_json(key):
                strings = _Strings()
                strings.feed("".join(texts))
                while strings.is_open:  # the apparent end is part of a string in the value
                    texts.append(buffer.take(1))
                    n = len(texts)
                    yield from self._up_to_end(buffer, arguments, keys, texts.append)
                    strings.feed("".join(texts[n - 1 :]))
            try:
                value = arguments.value(key, "".join(texts), is_text=False if kinds else None)
            except ValueError:
                raise Malformed from None
            self._value(key, value, keys)
        yield from buffer.skip(form.value_end.strip())

    def _text(
        self, buffer: TextBuffer, key: str, arguments: TaggedArguments, keys: list[str]
    ) -> Reading[None]:
        """Read a string up to its end and output it as JSON as it arrives.

        Like ``TaggedArguments.value``, drops a newline that belongs to the markers.
        """
        form = self._form
        begins, ends = form.key_end.endswith("\n"), form.value_end.startswith("\n")
        held = ""  # a newline that may be the last one
        self._output.more(f'{self._argument(key, keys)}"')

        def show(text: str) -> None:
            nonlocal begins, held
            if text and begins:
                text, begins = text.removeprefix("\n"), False
            if text:
                text = held + text
                held = "\n" if ends and text.endswith("\n") else ""
                self._show(text[: len(text) - len(held)])

        if form.cdata and (yield from buffer.skip(CDATA)):
            if (yield from buffer.until((CDATA_END,), self._show, shows_partial=False)) is None:
                raise Malformed
            yield from buffer.spaces()
            if not (yield from buffer.ahead(form.value_end.strip())):
                raise Malformed
        elif form.style is Style.NESTED:
            end = form.value_end + key + form.value_close
            if (yield from buffer.until((end,), show, shows_partial=False, takes_marker=False)) is None:
                raise Malformed
        else:
            yield from self._up_to_end(buffer, arguments, keys, show)
        self._output.more('"')

    def _up_to_end(
        self,
        buffer: TextBuffer,
        arguments: TaggedArguments,
        keys: Collection[str],
        show: Callable[[str], None],
    ) -> Reading[None]:
        """Read a value up to its end marker, which is not consumed.

        With ``lenient``, if the marker is missing, the next argument or the call's end ends the value.
        """
        form = self._form
        markers = [form.value_end.strip()]
        if self._lenient and "\n" in form.value_end:
            end = (form.key_ends and form.key_ends[0][1]) or form.key_end
            others = [key for key in arguments.keys if key not in keys]
            markers += [f"\n{form.key_start}{key}{end}".rstrip() for key in others]
            markers += [f"\n{form.call_end}".rstrip()] * bool(form.call_end.strip())
        if (yield from buffer.until(tuple(markers), show, shows_partial=False, takes_marker=False)) is None:
            raise Malformed

    def _known(self, name: object) -> str:
        if not isinstance(name, str) or name not in self._tools:
            raise Malformed
        return name


class _Strings:
    """Tells whether the text of an object or an array, in JSON or Python syntax, ends inside a string."""

    def __init__(self) -> None:
        self.is_open = False
        self._quote = ""
        self._begun = self._escaped = False

    def feed(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip()
            if text[:1] not in ("{", "["):
                return
            self._begun = True
        for character in text:
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                if character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
        self.is_open = bool(self._quote)


def _string(buffer: TextBuffer) -> Reading[str]:
    value = yield from buffer.json_value()
    if not isinstance(value, str):
        raise Malformed
    return value


def _unquoted(value: Any) -> dict[str, Any]:
    """Return a JSON object, or the JSON object whose text ``value`` is. Raises Malformed for other values."""
    try:
        value = decoded_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return value


_FENCE = "```"
_LANGUAGE = re.compile(r"[\w+-]*")


class PlainCall(NamedTuple):
    """A call: its name, and the JSON text of its arguments."""

    name: str
    arguments: str


def plain_calls(buffer: TextBuffer, tools: Collection[str], parallel: bool) -> Reading[list[PlainCall]]:
    """Read a whole answer that consists of calls of ``tools``; only one call, unless ``parallel``.

    Raises Malformed as soon as the answer cannot consist of calls.
    """
    names = {json.dumps(name): name for name in tools}
    yield from buffer.spaces()
    if (yield from buffer.skip(_FENCE)):
        yield from buffer.take_while(_LANGUAGE)
        calls = yield from _calls(buffer, names, parallel)
        if buffer.rest and not (yield from buffer.skip(_FENCE)):
            raise Malformed  # the closing fence may be missing only at the end of the answer
        yield from buffer.spaces()
    else:
        calls = yield from _calls(buffer, names, parallel)
    if (yield from buffer.some()):
        raise Malformed
    return calls


def _calls(buffer: TextBuffer, names: dict[str, str], parallel: bool) -> Reading[list[PlainCall]]:
    """Read calls and the spaces around them: a list of objects, or objects in sequence."""
    yield from buffer.spaces()
    is_marked = yield from buffer.skip("functools")  # written by Phi 4 models
    is_list = yield from buffer.skip("[")
    if is_marked and not is_list:
        raise Malformed
    calls: list[PlainCall] = []
    while True:
        if calls and not parallel:
            raise Malformed
        yield from buffer.spaces()
        calls.append((yield from _call(buffer, names)))
        yield from buffer.spaces()
        if is_list and (yield from buffer.one_of((",", "]"))) == "]":
            yield from buffer.spaces()
            return calls
        if not is_list and not (yield from buffer.ahead("{")):
            return calls


def _call(buffer: TextBuffer, names: dict[str, str]) -> Reading[PlainCall]:
    yield from buffer.one_of(("{",))
    doubled = yield from buffer.skip("{")  # the template of Qwen2.5-Coder shows a call as {{"name": …}}
    call = yield from _call_members(buffer, names, is_inner=False)
    if doubled:
        yield from buffer.one_of(("}",))
    return call


def _call_members(buffer: TextBuffer, names: dict[str, str], is_inner: bool) -> Reading[PlainCall]:
    """Read a call after its brace. ``is_inner``: the object is a member "function", as in OpenAI's API."""
    name = arguments = None
    keys = {'"name"', '"id"', *(json.dumps(key) for key in _ARGUMENTS_KEYS)}
    keys |= {'"type"', '"function"'} if not is_inner else set()
    while True:
        yield from buffer.spaces()
        key = yield from buffer.one_of(keys)
        keys.remove(key)
        yield from buffer.spaces()
        yield from buffer.one_of((":",))
        yield from buffer.spaces()
        if key == '"type"':
            yield from buffer.one_of(('"function"',))
        elif key == '"function"' and (yield from buffer.skip("{")):
            name, arguments = yield from _call_members(buffer, names, is_inner=True)
            keys -= {'"name"', *(json.dumps(name) for name in _ARGUMENTS_KEYS)}
        elif key in ('"name"', '"function"'):
            name = names[(yield from buffer.one_of(names))]
            keys -= {'"name"', '"function"'}
        elif key == '"id"':
            yield from buffer.json_value()  # ignored, because models invent and repeat ids
        else:
            keys -= {json.dumps(name) for name in _ARGUMENTS_KEYS}
            arguments = yield from _arguments(buffer)
        yield from buffer.spaces()
        if (yield from buffer.one_of((",", "}"))) == "}":
            break
    if name is None or arguments is None:
        raise Malformed
    return PlainCall(name, arguments)


def _arguments(buffer: TextBuffer) -> Reading[str]:
    """Read the text of a JSON object, or of a string that contains one."""
    if (yield from buffer.ahead('"')):
        text: str = yield from buffer.json_value()
        _unquoted(text)
        return text
    if not (yield from buffer.ahead("{")):
        raise Malformed
    parts: list[str] = []
    yield from buffer.json_value(parts.append)
    return "".join(parts)


class ChatParser:
    """Parses one answer. Feed it the text as it arrives, with control tokens as text. Use it from one thread at a time.

    The result does not depend on where the text is cut. Control tokens never appear in content, nor do other markers
    where they mark something. Text that begins like a call but is not a call, such as the name of an unknown tool, is
    content. An incomplete call at the end is dropped if the answer was cut off and the format has a marker for calls,
    or with ``required``, because the grammar then allows nothing but calls.

    If reasoning is never closed, a call inside it ends the reasoning. Such a call is returned when the text ends. If
    the reasoning is closed before the text ends, the call was only a draft and stays reasoning.

    With ``stream_calls``, the arguments of a call are returned as they arrive, and an incomplete call stays unfinished.
    Without ``stream_calls``, a call is returned when it is complete. With ``lenient``, an answer that consists of calls
    in plain JSON is read as calls; see ``plain_calls``. Text that may still become such calls is held back.

    ``ended_in_call``: the text ended within a call, and a part of that call was returned.
    """

    def __init__(
        self,
        form: CallFormat | None,
        markers: AnswerMarkers,
        *,
        reasoning_open: bool = False,
        tools: Mapping[str, dict[str, Any]] | None = None,
        stream_calls: bool = False,
        required: bool = False,
        harmony: bool = False,
        lenient: bool = False,
        parallel: bool = True,
        reasoning_format: str = "auto",
        opened: str = "",
        prompted: str = "",
    ) -> None:
        """``tools``: the parameters of each tool that may be called. ``reasoning_open``: the prompt ends in reasoning.

        ``parallel``: plain JSON may hold several calls. ``reasoning_format``: "none" leaves reasoning in the content,
        with its markers; "deepseek-legacy" also returns it separately. ``opened``: the marker of reasoning at the end
        of the prompt. ``prompted``: the start of a call's opening at the end of the prompt.

        ``harmony``: the text is in the format of gpt-oss; ``form`` is ignored.
        """
        self._buffer = TextBuffer()
        self._output = AnswerOutput(self._buffer, stream_calls, markers.control, reasoning_format)
        self._output.opened = opened
        self._markers = markers
        self._reasoning_open = reasoning_open
        self._tools = dict(tools or {})
        self._lenient = lenient
        self._calls = None
        if form is not None and tools:
            self._calls = CallReader(form, self._tools, self._output, lenient)
        self._form = form
        self._prompted = prompted
        self._harmony = HarmonyReader(self._buffer, self._output, tools or {}) if harmony else None
        self._reading = self._answer()
        self._plain_tools = self._tools if lenient else {}
        self._parallel = parallel
        self._required = required
        self._finished = self._cut_off = False
        next(self._reading)

    @property
    def ended_in_call(self) -> bool:
        """True if the text ended within a call of which a part was returned."""
        return self._output.ended_in_call

    def feed(self, text: str) -> ChatPiece:
        """Parse the next text; return the output that later text cannot change. Raises ValueError after ``finish``."""
        if self._finished:
            raise ValueError("the parser is finished; use a new one for another answer")
        if text:
            self._buffer.feed(text)
            next(self._reading)
        return self._output.piece()

    def finish(self, cut_off: bool = False) -> ChatPiece:
        """End the text; return the output that was held back. A second call returns an empty piece.

        ``cut_off``: the model was stopped before it had finished.
        """
        if not self._finished:
            # Without a marker, an incomplete call may be JSON that the user asked for.
            marked = self._harmony is not None or (self._form is not None and bool(self._form.trigger))
            self._output.drops_incomplete = cut_off and marked
            self._cut_off = self._buffer.cut_off = cut_off
            self._finished = self._buffer.ended = True
            next(self._reading, None)
        piece = self._output.piece()
        return replace(piece, content="") if self._required else piece

    def _answer(self) -> Reading[None]:
        yield
        if self._harmony is not None:
            yield from self._harmony.answer(self._reasoning_open)
            self._output.finish()
            return
        thought = yield from self._read_reasoning()
        text_end = yield from self._text_start()
        if text_end is None and not thought and self._prompted and self._calls is not None:
            yield from self._section(self._calls, "", self._calls.opening[len(self._prompted) :])
        if self._plain_tools and self._form is not None and (yield from self._plain_calls(self._form)):
            pass
        elif self._calls is not None and self._form is not None and not self._form.trigger:
            yield from self._bare_calls(self._calls, self._form)
        else:
            yield from self._content_and_calls(text_end or "")
        self._output.finish()

    # ---- reasoning
    def _read_reasoning(self) -> Reading[bool]:
        """Read reasoning at the start of the answer, including repeated end markers.

        Returns whether there was any reasoning.
        """
        buffer, output, markers = self._buffer, self._output, self._markers.reasoning
        if markers is None:
            return False
        has_reasoning = self._reasoning_open
        if self._reasoning_open:
            before = yield from buffer.spaces()
            if (yield from buffer.skip(markers.start)):  # some models write the marker again
                before = ""
            yield from self._reasoning_text(markers, before)
        while True:
            before = yield from buffer.spaces()
            if (yield from buffer.skip(markers.start)):
                output.mark(before + markers.start)
                yield from self._reasoning_text(markers)
            elif not (yield from buffer.skip(markers.end)):
                output.content("" if has_reasoning else before)
                return has_reasoning
            has_reasoning = True

    def _reasoning_text(self, markers: ReasoningMarkers, before: str = "") -> Reading[None]:
        """Read reasoning after its start marker, up to its end or calls that end it, and the spaces after the end."""
        buffer, output = self._buffer, self._output
        output.thought()
        form = self._form if self._calls is not None else None
        trigger = form.trigger if form is not None else ""
        text_starts = tuple(filter(self._markers.has_control, self._markers.text_starts))
        openings = {trigger: form.opening[len(trigger) :]} if form is not None and trigger else {}
        if self._calls is not None:
            inner = self._calls.openings.items()
            openings |= {marker: rest for marker, rest in inner if self._markers.has_control(marker)}
        stops = (markers.end, *text_starts, *openings)
        output.mark(before + (yield from buffer.spaces()))
        while True:
            stop = yield from buffer.until(stops, output.reasoning)
            if form is None or stop not in openings:
                break
            if (yield from self._calls_in_reasoning(form, markers.end, stop, openings)):
                return
        after = yield from buffer.spaces()
        if stop == markers.end:
            output.mark(stop + after)

    def _calls_in_reasoning(
        self, form: CallFormat, end: str, trigger: str, openings: Mapping[str, str]
    ) -> Reading[bool]:
        """Read calls after a trigger in reasoning; return whether the calls or the end marker ended the reasoning.

        If the result is False, the trigger was text. Calls before the end marker are drafts and become reasoning.
        """
        buffer, output = self._buffer, self._output
        raw = ""
        parts: list[str | HeldCalls] = []
        marker: str | None = trigger
        while marker is not None and marker in openings:
            held = HeldCalls(buffer)
            buffer.record()
            trigger, is_whole = marker, marker == form.trigger
            section = CallReader(form, self._tools, held, False).section(buffer, openings[marker], is_whole)
            is_call = yield from self._read_before(end, section)
            text = buffer.recorded()
            if not is_call:
                buffer.unread(text)
                if not parts:
                    output.reasoning(trigger)
                    return False
                text = ""
            raw += trigger + text
            parts.append(held if is_call else trigger)
            between: list[str] = []
            marker = yield from buffer.until((end, *openings), between.append)
            parts.append("".join(between))
            raw += "".join(between)
        rest = parts.pop()
        if marker == end or (self._cut_off and str(rest).strip()):
            output.reasoning(raw)
            output.mark((marker or "") + (yield from buffer.spaces()))
            return True
        buffer.unread(str(rest))
        for part in parts:
            if isinstance(part, str):
                output.content(part)
                continue
            for name, id_, arguments in part.calls:
                output.begin(name, id_)
                output.more(arguments)
                output.end()
        return True

    def _read_before(self, end: str, reading: Reading[None]) -> Reading[bool]:
        """Run ``reading``; return whether it reads a call before the marker ``end``. The buffer records the text."""
        try:
            while next(reading, "done") is None:
                if end in self._buffer.recorded_so_far() + self._buffer.rest:
                    return False
                yield
        except Malformed:
            return False
        return end not in self._buffer.recorded_so_far()

    # ---- text and calls
    def _text_start(self) -> Reading[str | None]:
        """Consume the marker before the text; return None if there is none.

        Otherwise, returns the marker that must follow the text; empty if that marker has a control token.
        """
        markers = self._markers
        if not markers.text_starts:
            return None
        before = yield from self._buffer.spaces()
        for start in markers.text_starts:
            if (yield from self._buffer.skip(start)):
                self._output.end_text()
                yield from self._buffer.spaces()
                return "" if markers.has_control(markers.text_end) else markers.text_end
        self._output.content(before)
        return None

    def _plain_calls(self, form: CallFormat) -> Reading[bool]:
        """Read an answer that consists of calls as plain JSON; otherwise consume nothing and return False."""
        buffer, output = self._buffer, self._output
        buffer.record()
        try:
            yield from buffer.spaces()
            # Text that begins as the template's own format does is read in that format, piece by piece.
            for marker in (form.trigger,) if form.trigger else (form.opening[:1] or "{", *PYTHON_TAGS):
                if (yield from buffer.ahead(marker)):
                    raise Malformed
            calls = yield from plain_calls(buffer, self._plain_tools, self._parallel)
        except Malformed:
            buffer.unread(buffer.recorded())
            return False
        for call in calls:
            output.begin(call.name, None)
            # Without a grammar, a model may repeat the schema as the arguments of a tool without parameters.
            output.more("{}" if takes_nothing(self._plain_tools[call.name]) else call.arguments)
            output.end()
        buffer.recorded()
        return True

    def _content_and_calls(self, text_end: str = "") -> Reading[None]:
        """Read text, calls after a trigger, and reasoning after a marker that is a control token."""
        buffer, output, markers = self._buffer, self._output, self._markers
        calls, form = self._calls, self._form
        openings = calls.openings if calls is not None else {}
        reasoning = markers.reasoning
        thinks = reasoning.start if reasoning is not None and markers.has_control(reasoning.start) else ""
        others = (m for m in (*markers.text_starts, markers.text_end) if markers.has_control(m))
        # If prompts begin a call, text may follow calls. It has the same beginning, then a marker of text.
        begun = form.prompted if form is not None else ""
        again = tuple(f"{begun}{start}" for start in markers.text_starts) if begun else ()
        stops = (*openings, *again, thinks, text_end, markers.turn_end, *others, *markers.control)
        stops = tuple(dict.fromkeys(filter(None, stops)))
        while True:
            stop = yield from buffer.until(stops, output.content)
            if stop is None:
                return
            if stop in openings and calls is not None and form is not None:
                if form.trigger:
                    yield from self._section(calls, stop, openings[stop], stop == form.trigger)
                else:
                    yield from self._bare_call_in_text(calls, stop)
            elif stop == thinks and reasoning is not None:
                output.mark(stop)
                yield from self._reasoning_text(reasoning)
            elif stop in (text_end, markers.text_end, *again):
                output.end_text()
            elif stop == markers.turn_end and not markers.has_control(stop):
                before = yield from buffer.spaces()
                if buffer.rest:  # the text only mentions the marker
                    output.content(stop + before)

    def _bare_call_in_text(self, calls: CallReader, first: str) -> Reading[None]:
        """Read possible calls after text, separated by semicolons. No grammar limits them."""
        buffer, output = self._buffer, self._output
        buffer.unread(first)
        while (yield from self._section(calls, "", calls.opening, False)):
            before = yield from self._between_bare()
            if not (yield from buffer.ahead(first)):
                output.content(before)
                return

    def _between_bare(self) -> Reading[str]:
        """Consume and return spaces and, after a call, the semicolon that Llama models may write."""
        buffer = self._buffer
        before = yield from buffer.spaces()
        if self._output.n_calls and self._lenient and (yield from buffer.skip(";")):
            before += ";" + (yield from buffer.spaces())
        return before

    def _bare_calls(self, calls: CallReader, form: CallFormat) -> Reading[None]:
        """Read either calls or content. After a call, only calls may follow; with ``lenient``, text as well."""
        buffer = self._buffer
        first = form.opening[:1] or "{"
        while True:
            before = yield from self._between_bare()
            for tag in PYTHON_TAGS:
                if (yield from buffer.skip(tag)):
                    before += tag
            if not (yield from buffer.ahead(first)):
                break
            if not (yield from self._section(calls, before, form.opening)):
                before = ""
                break
        if self._output.n_calls:
            before = _WITHOUT_TAGS.sub("", before)
        self._output.content(self._output.without_control(before))
        yield from self._content_and_calls()

    def _section(
        self, calls: CallReader, start: str, opening: str, is_constrained: bool = True
    ) -> Reading[bool]:
        """Read calls; return False if the text is not a call and became content.

        ``start``: the text consumed already. If ``is_constrained`` is False, each call is returned when it is complete.
        """
        self._buffer.record(start)
        try:
            with nullcontext() if is_constrained else self._output.whole_calls():
                yield from calls.section(self._buffer, opening, is_constrained)
        except Malformed:
            self._output.give_back()
            return False
        self._buffer.recorded()
        return True

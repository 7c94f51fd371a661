"""Parses generated text into content, reasoning and tool calls while it arrives.

Calls are read in the format that probing the template found. Some models, Qwen2.5-Coder among them, write calls as
plain JSON although their template shows markers. The whole answer is then an object with a name and arguments, or a
list of such objects, perhaps in a Markdown fence. Anything else is text. No grammar limits these calls, so their
arguments need not match the schema; only a tool without parameters gets none, as from a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from llamapipe.chat._answer_grammar import PYTHON_TAG, TaggedArguments
from llamapipe.chat._call_format import CallFormat, ReasoningMarkers, Style
from llamapipe.chat._harmony import HarmonyReader
from llamapipe.chat._reader import (
    AnswerOutput,
    Malformed,
    Reading,
    TextBuffer,
    ahead,
    expect,
    json_value,
    one_of,
    skip,
    some,
    spaces,
    take_while,
    until,
)
from llamapipe.chat.results import ChatPiece
from llamapipe.structured.schema import takes_nothing

_NAME = re.compile(r"[\w.\-]*")
_ID = re.compile(r"[A-Za-z0-9]*")
# Models trained on several formats mix up these two names of a call's arguments.
_ARGUMENTS_KEYS = ("arguments", "parameters")


class CallReader:
    """Reads one section of calls. The generators raise Malformed if the text is not a call of a known tool."""

    def __init__(self, form: CallFormat, tools: Mapping[str, dict[str, Any]], output: AnswerOutput) -> None:
        self._form = form
        self._tools = tools
        self._output = output
        self._roles = {member.key: member.role for member in form.members}
        for key in _ARGUMENTS_KEYS:
            self._roles.setdefault(key, "arguments")

    def section(self, buffer: TextBuffer, opening: str) -> Reading[None]:
        """Reads what follows the trigger: the rest of the opening, calls, and the end of their section."""
        form = self._form
        yield from expect(buffer, opening)
        while True:
            yield from self._call(buffer)
            if form.call_end.strip():
                yield from self._end(buffer)
            self._output.end()
            if not form.section_start:
                return
            yield from spaces(buffer)
            section_end = form.section_end.strip()
            if buffer.ended and not buffer.rest:
                return
            if section_end and (yield from skip(buffer, section_end)):
                return
            following = (form.separator + form.call_start).strip()
            if following and not section_end and not (yield from ahead(buffer, following)):
                return
            yield from expect(buffer, form.separator)
            yield from expect(buffer, form.call_start)

    def _call(self, buffer: TextBuffer) -> Reading[None]:
        if self._form.style is Style.JSON:
            yield from self._object(buffer)
        elif self._form.style is Style.NAMED:
            yield from self._named(buffer)
        else:
            yield from self._tagged(buffer)

    def _end(self, buffer: TextBuffer) -> Reading[None]:
        """Reads the end of a call. After JSON, at the end of the text, it may be missing: some models omit it there."""
        yield from spaces(buffer)
        marker = self._form.call_end.strip()
        while (cut_off := buffer.rest != marker and marker.startswith(buffer.rest)) and not buffer.ended:
            yield
        if cut_off and self._form.style is not Style.TAGGED:
            buffer.take(len(buffer.rest))
        else:
            yield from expect(buffer, marker)

    # ---- {"name": …, "arguments": …}
    def _object(self, buffer: TextBuffer) -> Reading[None]:
        name: str | None = None
        id_: str | None = None
        arguments: str | None = None
        begun = False
        yield from expect(buffer, "{")
        yield from spaces(buffer)
        while not (yield from skip(buffer, "}")):
            key = yield from _string(buffer)
            yield from expect(buffer, ":")
            yield from spaces(buffer)
            role = self._roles.get(key, "")
            if role == "arguments" and arguments is None:
                if name is not None and (yield from ahead(buffer, "{")):
                    begun = True
                    self._output.begin(name, id_)
                    yield from json_value(buffer, self._output.more)
                    arguments = ""
                else:
                    arguments = yield from _held_object(buffer)
            else:
                value = yield from json_value(buffer)
                if role == "name":
                    name = self._known(value)
                elif role == "id" and isinstance(value, (str, int)):
                    id_ = str(value)
            yield from spaces(buffer)
            if not (yield from skip(buffer, ",")) and not (yield from ahead(buffer, "}")):
                raise Malformed
            yield from spaces(buffer)
        if name is None:
            raise Malformed
        if not begun:
            self._output.begin(name, id_)
            self._output.more("{}" if arguments is None else arguments)

    # ---- NAME … {…}
    def _named(self, buffer: TextBuffer) -> Reading[None]:
        form = self._form
        name = self._known((yield from take_while(buffer, _NAME)))
        id_ = None
        if form.id_start and (yield from skip(buffer, form.id_start)):
            id_ = yield from take_while(buffer, _ID)
        yield from expect(buffer, form.after_name)
        yield from spaces(buffer)
        if not (yield from ahead(buffer, "{")):
            raise Malformed
        self._output.begin(name, id_)
        yield from json_value(buffer, self._output.more)

    # ---- NAME … <key>value</key> …
    def _tagged(self, buffer: TextBuffer) -> Reading[None]:
        form = self._form
        name = self._known((yield from take_while(buffer, _NAME)))
        yield from expect(buffer, form.after_name)
        arguments = TaggedArguments(form, self._tools[name])
        self._output.begin(name, None)
        separator = "{"
        yield from spaces(buffer)
        while (yield from skip(buffer, form.key_start)):
            key = yield from _until(buffer, form.key_end.strip())
            start = f"{separator}{json.dumps(key)}: "
            if arguments.is_text(key):
                self._output.more(f'{start}"')
                yield from self._text(buffer)
                self._output.more('"')
            else:
                text = yield from _until(buffer, form.value_end.strip())
                try:
                    value = arguments.value(key, text)
                except ValueError:
                    raise Malformed from None
                self._output.more(start + json.dumps(value, ensure_ascii=False))
            separator = ", "
            yield from spaces(buffer)
        if buffer.ended and form.call_end.strip() and form.key_start.startswith(buffer.rest):
            raise Malformed  # another argument might have followed
        self._output.more("{}" if separator == "{" else "}")

    def _text(self, buffer: TextBuffer) -> Reading[None]:
        """Reads a string up to its end, as ``TaggedArguments.value`` does, and passes it on in JSON as it comes."""
        begins, ends = self._form.key_end.endswith("\n"), self._form.value_end.startswith("\n")
        held = ""  # a line's end that may be the last

        def show(text: str) -> None:
            nonlocal begins, held
            if text and begins:
                text, begins = text.removeprefix("\n"), False
            if text:
                text = held + text
                held = "\n" if ends and text.endswith("\n") else ""
                self._output.more(json.dumps(text[: len(text) - len(held)], ensure_ascii=False)[1:-1])

        if (yield from until(buffer, (self._form.value_end.strip(),), show, shows_partial=False)) is None:
            raise Malformed

    def _known(self, name: object) -> str:
        if not isinstance(name, str) or name not in self._tools:
            raise Malformed
        return name


def _string(buffer: TextBuffer) -> Reading[str]:
    value = yield from json_value(buffer)
    if not isinstance(value, str):
        raise Malformed
    return value


def _held_object(buffer: TextBuffer) -> Reading[str]:
    """A JSON object, or a string that holds the text of one."""
    value = yield from json_value(buffer)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return json.dumps(value, ensure_ascii=False)


def _until(buffer: TextBuffer, marker: str) -> Reading[str]:
    parts: list[str] = []
    if (yield from until(buffer, (marker,), parts.append)) is None:
        raise Malformed
    return "".join(parts)


_FENCE = "```"
_LANGUAGE = re.compile(r"[\w+-]*")
_ARGUMENTS = ("arguments", "parameters")  # models trained on several formats mix up these names


class PlainCall(NamedTuple):
    """A call: its name, and the JSON text of its arguments."""

    name: str
    arguments: str


def plain_calls(buffer: TextBuffer, tools: Collection[str], parallel: bool) -> Reading[list[PlainCall]]:
    """Reads a whole answer that consists of calls of ``tools``; one call, unless ``parallel``.

    Raises Malformed as soon as the answer cannot consist of calls.
    """
    names = {json.dumps(name): name for name in tools}
    yield from spaces(buffer)
    if (yield from skip(buffer, _FENCE)):
        yield from take_while(buffer, _LANGUAGE)
        calls = yield from _calls(buffer, names, parallel)
        if buffer.rest and not (yield from skip(buffer, _FENCE)):
            raise Malformed  # only at the end of the answer may it be missing
        yield from spaces(buffer)
    else:
        calls = yield from _calls(buffer, names, parallel)
    if (yield from some(buffer)):
        raise Malformed
    return calls


def _calls(buffer: TextBuffer, names: dict[str, str], parallel: bool) -> Reading[list[PlainCall]]:
    """Reads calls and the spaces around them: a list, or objects one after the other."""
    yield from spaces(buffer)
    is_list = yield from skip(buffer, "[")
    calls: list[PlainCall] = []
    while True:
        if calls and not parallel:
            raise Malformed
        yield from spaces(buffer)
        calls.append((yield from _call(buffer, names)))
        yield from spaces(buffer)
        if is_list and (yield from one_of(buffer, (",", "]"))) == "]":
            yield from spaces(buffer)
            return calls
        if not is_list and not (yield from ahead(buffer, "{")):
            return calls


def _call(buffer: TextBuffer, names: dict[str, str]) -> Reading[PlainCall]:
    name = arguments = None
    keys = {'"name"', '"id"', *(json.dumps(key) for key in _ARGUMENTS)}
    yield from one_of(buffer, ("{",))
    doubled = yield from skip(buffer, "{")  # the template of Qwen2.5-Coder shows a call as {{"name": …}}
    while True:
        yield from spaces(buffer)
        key = yield from one_of(buffer, keys)
        keys.remove(key)
        yield from spaces(buffer)
        yield from one_of(buffer, (":",))
        yield from spaces(buffer)
        if key == '"name"':
            name = names[(yield from one_of(buffer, names))]
        elif key == '"id"':
            yield from json_value(buffer)  # models invent it, and repeat it
        else:
            keys -= {json.dumps(name) for name in _ARGUMENTS}
            arguments = yield from _arguments(buffer)
        yield from spaces(buffer)
        if (yield from one_of(buffer, (",", "}"))) == "}":
            break
    if doubled:
        yield from one_of(buffer, ("}",))
    if name is None or arguments is None:
        raise Malformed
    return PlainCall(name, arguments)


def _arguments(buffer: TextBuffer) -> Reading[str]:
    """The text of a JSON object, or of a string that holds one."""
    if (yield from ahead(buffer, '"')):
        text: str = yield from json_value(buffer)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise Malformed from None
        if not isinstance(value, dict):
            raise Malformed
        return text
    if not (yield from ahead(buffer, "{")):
        raise Malformed
    parts: list[str] = []
    yield from json_value(buffer, parts.append)
    return "".join(parts)


class ChatParser:
    """Parses one answer. Feed it the text as it arrives, with control tokens as text. For one thread at a time.

    The result does not depend on where the text is cut. Markers never appear in content. Text that begins like a call
    but is not one, such as the name of an unknown tool, is content. An incomplete call at the end is dropped if the
    answer was cut off and a marker began the call, or with ``required``, where the grammar allows nothing but calls.

    With ``stream_calls`` the arguments of a call are returned while they arrive, and an incomplete call stays
    unfinished. Without it, a call is returned when it is complete. With ``lenient`` an answer that consists of calls as
    plain JSON is read as these; see ``plain_calls``. Text that may still become such calls is held back.

    ``ended_in_call``: the text ended within a call of which a part was returned.
    """

    def __init__(
        self,
        form: CallFormat | None,
        reasoning: ReasoningMarkers | None,
        *,
        reasoning_open: bool = False,
        tools: Mapping[str, dict[str, Any]] | None = None,
        stream_calls: bool = False,
        required: bool = False,
        harmony: bool = False,
        lenient: bool = False,
        parallel: bool = True,
    ) -> None:
        """``tools``: the parameters of each tool that may be called. ``reasoning_open``: the prompt ends in reasoning.

        ``parallel``: plain JSON may be several calls.

        ``harmony``: the text is in the format of gpt-oss; ``form`` and ``reasoning`` are not used then.
        """
        self._buffer = TextBuffer()
        self._output = AnswerOutput(self._buffer, stream_calls)
        self._reasoning = reasoning
        self._reasoning_open = reasoning_open
        self._calls = CallReader(form, tools, self._output) if form is not None and tools else None
        self._form = form
        self._harmony = HarmonyReader(self._buffer, self._output, tools or {}) if harmony else None
        self._reading = self._answer()
        self._plain_tools = dict(tools or {}) if lenient else {}
        self._parallel = parallel
        self._required = required
        self._finished = False
        next(self._reading)

    @property
    def ended_in_call(self) -> bool:
        """See the class."""
        return self._output.ended_in_call

    def feed(self, text: str) -> ChatPiece:
        """Parses the next text; returns the parts that later text cannot change. Raises ValueError after ``finish``."""
        if self._finished:
            raise ValueError("the parser is finished; use a new one for another answer")
        if text:
            self._buffer.feed(text)
            next(self._reading)
        return self._output.piece()

    def finish(self, cut_off: bool = False) -> ChatPiece:
        """Ends the text; returns the parts that were held back. A second call returns nothing.

        ``cut_off``: the model had more to say.
        """
        if not self._finished:
            # Without a marker, such text may be JSON that the user asked for.
            marked = self._harmony is not None or (self._form is not None and bool(self._form.trigger))
            self._output.drops_incomplete = cut_off and marked
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
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._plain_tools and self._form is not None and (yield from self._plain_calls(self._form)):
            pass
        elif self._calls is None or self._form is None:
            yield from until(self._buffer, (), self._output.content)
        elif self._form.trigger:
            yield from self._content_and_calls(self._calls, self._form)
        else:
            yield from self._bare_calls(self._calls)
        self._output.finish()

    def _read_reasoning(self, markers: ReasoningMarkers) -> Reading[None]:
        buffer, output = self._buffer, self._output
        if not self._reasoning_open:
            before = yield from spaces(buffer)
            if not (yield from skip(buffer, markers.start)):
                output.content(before)
                return
        elif (yield from ahead(buffer, markers.start)):  # some models write the marker again
            yield from skip(buffer, markers.start)
        yield from spaces(buffer)
        yield from until(buffer, (markers.end,), output.reasoning)
        yield from spaces(buffer)

    def _plain_calls(self, form: CallFormat) -> Reading[bool]:
        """Reads an answer that consists of calls as plain JSON; otherwise consumes nothing and returns False."""
        buffer, output = self._buffer, self._output
        buffer.record()
        try:
            yield from spaces(buffer)
            # What the template's own format begins with is read as such, piece by piece.
            for marker in (form.trigger,) if form.trigger else ("{", PYTHON_TAG):
                if (yield from ahead(buffer, marker)):
                    raise Malformed
            calls = yield from plain_calls(buffer, self._plain_tools, self._parallel)
        except Malformed:
            buffer.unread(buffer.recorded())
            return False
        for call in calls:
            output.begin(call.name, None)
            # A model that no grammar limits may repeat the schema where there is nothing to be said.
            output.more("{}" if takes_nothing(self._plain_tools[call.name]) else call.arguments)
            output.end()
        buffer.recorded()
        return True

    def _content_and_calls(self, calls: CallReader, form: CallFormat) -> Reading[None]:
        buffer, trigger = self._buffer, form.trigger
        rest = form.opening[len(trigger) :]
        while True:
            found = yield from until(buffer, (trigger,), self._output.content)
            if found is None:
                return
            yield from self._section(calls, found, rest)

    def _bare_calls(self, calls: CallReader) -> Reading[None]:
        """The whole text is a call or content. After a call only another one may follow."""
        buffer = self._buffer
        while True:
            before = yield from spaces(buffer)
            if (yield from skip(buffer, PYTHON_TAG)):
                before += PYTHON_TAG
            if not (yield from ahead(buffer, "{")):
                break
            if not (yield from self._section(calls, before, "")):
                before = ""
                break
        self._output.content(before)
        yield from until(buffer, (), self._output.content)

    def _section(self, calls: CallReader, start: str, opening: str) -> Reading[bool]:
        """Reads calls. ``start``: the text consumed already. False if there is no call: the text is then content."""
        self._buffer.record(start)
        try:
            yield from calls.section(self._buffer, opening)
        except Malformed:
            self._output.give_back()
            return False
        self._buffer.recorded()
        return True

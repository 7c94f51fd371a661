"""Reads calls in the formats that probing finds: the text of a call, from its trigger to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llamapipe.chat.calls.answer_output import AnswerOutput
from llamapipe.chat.calls.call_format import CallFormat, Style
from llamapipe.chat.calls.reader import (
    Malformed,
    Reading,
    TextBuffer,
    ahead,
    expect,
    json_value,
    skip,
    spaces,
    take_while,
    until,
)
from llamapipe.chat.calls.tagged import TaggedArguments

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
            text = yield from _until(buffer, form.value_end.strip())
            try:
                value = arguments.value(key, text)
            except ValueError:
                raise Malformed from None
            self._output.more(f"{separator}{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
            separator = ", "
            yield from spaces(buffer)
        if buffer.ended and form.call_end.strip() and form.key_start.startswith(buffer.rest):
            raise Malformed  # another argument might have followed
        self._output.more("{}" if separator == "{" else "}")

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

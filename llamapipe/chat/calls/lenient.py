"""Reads calls that a model writes as plain JSON, without the markers of its template.

Some models, Qwen2.5-Coder among them, do so although their template shows markers. The whole answer is then an object
with a name and arguments, or a list of such objects, perhaps in a Markdown fence. Anything else is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

from llamapipe.chat.calls.reader import (
    Malformed,
    Reading,
    TextBuffer,
    ahead,
    json_value,
    one_of,
    skip,
    some,
    spaces,
    take_while,
)

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

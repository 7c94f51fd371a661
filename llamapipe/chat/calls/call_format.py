"""How a template writes tool calls and reasoning: markers, and the text between them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

# A tag such as <tool_call> or <|python_tag|>, a marker such as [TOOL_CALLS], or one character.
_SEGMENT = re.compile(r"<[^<>\s](?:[^<>\n]*[^<>\s])?>|\[/?[A-Z][A-Z_]+\]|.", re.DOTALL)


class Style(Enum):
    """The form of the text between a call's start and its end."""

    JSON = auto()  # one object that holds name and arguments
    NAMED = auto()  # the name, then the arguments as a JSON object
    TAGGED = auto()  # the name, then every argument between markers of its own


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
        texts = {key: one if isinstance(one, str) else _json(one) for key, one in arguments.items()}
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

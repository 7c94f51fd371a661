"""The parts of a chat answer: text, reasoning and tool calls, complete or in pieces."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    - ``id``: nine letters and digits, or the model's own id if its format has ids.
    - ``arguments``: the decoded JSON object. It matches the tool's schema if the answer was constrained.
    - ``arguments_text``: the arguments as the model wrote them: JSON, if the call is complete.
    - ``is_complete``: False if the answer ended within the call, for instance at ``max_tokens``. ``arguments`` then
      holds the complete members.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    arguments_text: str = field(default="", compare=False, repr=False)
    is_complete: bool = True

    def __post_init__(self) -> None:
        if not self.arguments_text and self.is_complete:
            object.__setattr__(self, "arguments_text", self.arguments_json)

    @property
    def arguments_json(self) -> str:
        """``arguments`` as JSON text."""
        return json.dumps(self.arguments, ensure_ascii=False)

    @classmethod
    def of(cls, id_: str, name: str, text: str) -> ToolCall:
        """Make a call from the text of its arguments. If the text is not a JSON object, the call is incomplete."""
        value = _object(text)
        if value is not None:
            return cls(id_, name, value, text)
        return cls(id_, name, _complete_members(text), text, is_complete=False)


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call in a stream.

    - ``index``: the call's position in the answer, from 0.
    - ``id`` and ``name``: in the first delta of a call only, else None.
    - ``arguments``: the next piece of the arguments' JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ChatPiece:
    """The content that a piece of generated text adds to the answer. Falsy if it adds nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class ChatMessage:
    """Joins the pieces of one answer. Use it from one thread at a time.

    If the stream ended within a call, the last call is incomplete.
    """

    def __init__(self, pieces: Iterable[ChatPiece] = ()) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        for piece in pieces:
            self.add(piece)

    def __repr__(self) -> str:
        return f"<ChatMessage content={self.content!r} n_calls={len(self._calls)}>"

    def add(self, piece: ChatPiece) -> None:
        """Append the next piece."""
        self._content.append(piece.content)
        self._reasoning.append(piece.reasoning)
        for delta in piece.tool_calls:
            if delta.index == len(self._calls):
                self._calls.append(_Call(delta.id or new_call_id(), delta.name or ""))
            self._calls[delta.index].arguments.append(delta.arguments)

    @property
    def content(self) -> str:
        """The answer's text."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The text of the reasoning; empty if there was none."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in the order in which they began."""
        return tuple(ToolCall.of(call.id, call.name, "".join(call.arguments)) for call in self._calls)


def new_call_id() -> str:
    """Return a random id of nine letters and digits. Mistral's templates demand this form; others accept it."""
    import secrets

    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def decoded_json(text: str) -> Any:
    """Return the value of JSON text. A number beyond the range of floats, such as 1e400, becomes the equal integer.

    Raises ValueError also for NaN and Infinity, which Python's parser accepts but JSON does not have, and for integers
    of more digits than Python converts. Raises RecursionError for deep values.
    """
    return json.loads(text, parse_float=_number, parse_constant=_no_constant)


def _number(text: str) -> float | int:
    value = float(text)
    if math.isfinite(value):
        return value
    from decimal import Decimal, InvalidOperation

    try:
        exact = Decimal(text)  # json would write infinity as Infinity, and msgspec as null
    except InvalidOperation:  # the exponent is beyond Decimal's
        raise ValueError(f"{text[:20]} is too large") from None
    if exact.adjusted() >= _MAX_DIGITS:
        raise ValueError(f"{text[:20]} is too large")
    return int(exact)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_MAX_DIGITS = 4300  # Python's limit for integers


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = decoded_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _complete_members(text: str) -> dict[str, Any]:
    """Return the members of an incomplete JSON object that later text cannot change."""
    depth, end = 0, 0
    for match in _TOKEN.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if match[0] == "," and depth == 1:
            end = match.start()
    if text.rstrip()[-1:] in ('"', "}", "]"):  # a number at the end may have had more digits
        whole = _object(text + "}")
        if whole is not None:
            return whole
    return _object(text[:end] + "}") or {}


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[][{},]', re.DOTALL)

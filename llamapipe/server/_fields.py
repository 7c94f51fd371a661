"""Declares what the server does with each field of a request: each request type is the table of its fields.

A field is honoured unless its annotation says otherwise::

    class ChatRequest(...):
        temperature: float | None = None                         # honoured
        store: Annotated[bool | None, Unused(False)] = None      # accepted, and named in x-llamapipe-unused
        echo: Annotated[bool | None, Only(False)] = None         # refused with another value

Null is accepted everywhere and means the same as leaving the field out. A field that the type does not have is refused,
unless its value is null or the type is ``Lenient``. ``docs/reference/server.md`` has the same tables; a test compares
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from llamapipe._messages import did_you_mean, listed
from llamapipe.server.errors import ApiError


@dataclass(frozen=True, init=False)  # compared by value, because each request type creates its own marks
class Unused:
    """The field does not affect the answer. Its values in ``neutral`` mean the same as leaving it out.

    Any other value is accepted, and the header ``x-llamapipe-unused`` names the field; with ``--strict`` it is refused.
    """

    neutral: tuple[Any, ...]

    def __init__(self, *neutral: Any) -> None:
        object.__setattr__(self, "neutral", neutral)


@dataclass(frozen=True, init=False)
class Only:
    """The field is accepted only with the values in ``neutral``, which ask for what the server does anyway.

    Any other value is refused. ``instead``: the advice for the client; by default, to leave the field out. ``details``:
    for clients that can do without the field; see ``ApiError``.
    """

    neutral: tuple[Any, ...]
    instead: str
    details: Mapping[str, Any] | None

    def __init__(self, *neutral: Any, instead: str = "", details: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "neutral", neutral)
        object.__setattr__(self, "instead", instead)
        object.__setattr__(self, "details", details)


Fate = Unused | Only | None  # None: the field is honoured


@cache
def fates(kind: type[msgspec.Struct]) -> dict[str, Fate]:
    """Return the fate of each field of a request type, by its JSON name, in the order of declaration."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.encode_name: _fate(hints[field.name]) for field in msgspec.structs.fields(kind)}


def _fate(hint: Any) -> Fate:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, (Unused, Only))), None)


@cache
def inner_types(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the fields of a request type whose value is an object with declared fields."""
    hints = get_type_hints(kind)
    types = {}
    for field in msgspec.structs.fields(kind):
        for part in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                types[field.encode_name] = part
    return types


def unused_fields(request: msgspec.Struct) -> tuple[str, ...]:
    """Return the fields of a request that have no effect here. Raises ApiError 400 for a field with a refused value."""
    return tuple(_find_unused(request, ""))


@cache
def _plan(
    kind: type[msgspec.Struct],
) -> tuple[list[tuple[str, Unused | Only]], Callable[[Any], Any], list[str]]:
    """Return a type's fields with marks, a getter for their values, and the fields that hold objects."""
    marked = [(name, fate) for name, fate in fates(kind).items() if fate is not None]
    names = [name for name, _ in marked]
    # The first name is repeated, because attrgetter returns no tuple for a single name.
    read = attrgetter(*names, names[0]) if names else lambda _: ()
    return marked, read, list(inner_types(kind))


def _find_unused(request: msgspec.Struct, place: str) -> Iterator[str]:
    marked, read, inner = _plan(type(request))
    for (name, fate), value in zip(marked, read(request), strict=False):
        if value is None or any(
            value == neutral and type(value) is type(neutral) for neutral in fate.neutral
        ):
            continue
        if isinstance(fate, Only):
            field = f"{place}{name}"
            raise ApiError(400, f"{field} {_refusal(value, fate)}", field, details=fate.details)
        yield f"{place}{name}"
    for name in inner:
        value = getattr(request, name)
        if isinstance(value, msgspec.Struct):
            yield from _find_unused(value, f"{place}{name}.")


_MOST_SHOWN = 60  # characters of a refused value


def _refusal(value: object, fate: Only) -> str:
    shown = msgspec.json.encode(value).decode()
    if len(shown) > _MOST_SHOWN:
        shown = shown[:_MOST_SHOWN] + "…"
    # 1 and 1.0 are one value to a reader.
    values = [neutral for neutral in fate.neutral if not isinstance(neutral, float) or neutral % 1]
    allowed = " or ".join(msgspec.json.encode(neutral).decode() for neutral in values or fate.neutral)
    if not allowed:
        return f"is not supported: {fate.instead or 'leave it out'}"
    return f"is {shown}; leave it out, or set it to {allowed}{fate.instead and f': {fate.instead}'}"


class Lenient(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of request types whose API's own server also accepts bodies that do not fit the type."""

    @classmethod
    def accept_fields(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the accepted fields, converted to this class's types, and the names of the fields without effect."""
        raise NotImplementedError


def fit_to_type(value: Any, kind: Any, place: str = "") -> tuple[Any, tuple[str, ...]]:
    """Return a decoded body in a form that may fit its type, and the names of its fields without effect.

    Call it only for a body that does not fit its type as it is. Null fields are removed from objects that have a type
    here; free JSON is not changed.
    """
    if not isinstance(value, dict) or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return value, ()
    members = {name: member for name, member in value.items() if member is not None}
    without_effect: list[str] = []
    if issubclass(kind, Lenient):
        members, names = kind.accept_fields(members)
        without_effect += (f"{place}{name[:_MOST_SHOWN]}" for name in names)
    for name, inner in inner_types(kind).items():
        if name in members:
            members[name], names_there = fit_to_type(members[name], inner, f"{place}{name}.")
            without_effect += names_there
    return members, tuple(without_effect)


# ---- bodies of another shape
_UNKNOWN_FIELD = re.compile(r"contains unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_PLACE = re.compile(r" - at `\$\.?([^`]*)`")


def mismatch_error(message: str, kind: Any) -> ApiError:
    """Return the error for msgspec's ``message`` about a body that should be a ``kind``. It names the field."""
    place = _PLACE.search(message)
    path = place.group(1) if place else ""
    text = _PLACE.sub("", message)
    for pattern, what in ((_UNKNOWN_FIELD, "unknown"), (_MISSING_FIELD, "missing")):
        match = pattern.search(message)
        if match:
            field = f"{path}.{match.group(1)}" if path else match.group(1)
            inner = _at(kind, path.split(".") if path else ())
            hint = _hint(match.group(1), inner) if what == "unknown" and inner is not None else ""
            return ApiError(400, f"{what} field: {field}{hint}", field, f"{what}_field")
    if text.startswith("Invalid enum value") and (values := _values(kind, path)):
        text = f"{text}; it may be {listed(values)}"
    return ApiError(400, f"{path}: {text}" if path else text, path or None, "invalid_value")


def _at(kind: Any, places: Sequence[str]) -> type[msgspec.Struct] | None:
    """Return the type of the object at a path of members; None if it has no declared fields."""
    for place in places:
        kind = (
            inner_types(kind).get(place)
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
            else None
        )
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _values(kind: Any, path: str) -> list[Any]:
    """Return the values that a field may have; an empty list if its type is not a ``Literal``."""
    *places, name = path.split(".")
    owner = _at(kind, places)
    field = (
        None
        if owner is None
        else next((f for f in msgspec.structs.fields(owner) if f.encode_name == name), None)
    )
    if owner is None or field is None:
        return []
    hint = get_type_hints(owner)[field.name]
    return [
        value for part in (hint, *get_args(hint)) if get_origin(part) is Literal for value in get_args(part)
    ]


def _hint(field: str, kind: Any) -> str:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    if field == "think" and "chat_template_kwargs" not in known:
        return "; only chats have reasoning"
    return did_you_mean(field, known, "fields")

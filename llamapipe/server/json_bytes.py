"""Encodes values as JSON, server-sent events, or lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from llamapipe.chat.halves import whole_values

_encoder = msgspec.json.Encoder()


def encode_json(value: object) -> bytes:
    """Encode a value as JSON. Texts may contain half of a surrogate pair, as a model's JSON may have."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(whole_values(msgspec.to_builtins(value)))


def event(value: object, name: str | None = None) -> bytes:
    """Encode a value as a server-sent event. ``name``: the event's name, for APIs that name their events."""
    data = b"data: " + encode_json(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def typed_event(value: Mapping[str, Any]) -> bytes:
    """Encode a value as an event, named by its field ``type``."""
    return event(value, str(value["type"]))


def line(value: object) -> bytes:
    """Encode a value as a line of a stream of JSON."""
    return encode_json(value) + b"\n"

"""The error for a body that does not match the type of its route."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from llamapipe.arguments import did_you_mean
from llamapipe.server.errors import ApiError
from llamapipe.server.wire.other_servers import field_hint

_UNKNOWN_FIELD = re.compile(r"contains unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `([^`]*)`")
_PLACE = re.compile(r" - at `\$\.?([^`]*)`")


def mismatch(message: str, kind: Any) -> ApiError:
    """The answer for msgspec's ``message`` about a body that should be a ``kind``. It names the field."""
    place = _PLACE.search(message)
    path = place.group(1) if place else ""
    text = _PLACE.sub("", message)
    for pattern, what in ((_UNKNOWN_FIELD, "unknown"), (_MISSING_FIELD, "missing")):
        found = pattern.search(message)
        if found:
            field = f"{path}.{found.group(1)}" if path else found.group(1)
            hint = _hint(field, kind) if what == "unknown" and not path else ""
            return ApiError(400, f"{what} field: {field}{hint}", field, f"{what}_field")
    return ApiError(400, f"{path}: {text}" if path else text, path or None, "invalid_value")


def _hint(field: str, kind: Any) -> str:
    known = [one.encode_name for one in msgspec.structs.fields(kind)]
    hint = field_hint(field, known)
    return did_you_mean(field, known) if hint is None else hint

"""Replaces lone surrogates with U+FFFD. Use it wherever text comes from JSON or is written as JSON.

A program that cuts an emoji between its two UTF-16 units leaves a lone surrogate. JSON can escape a lone surrogate and
Python can hold it in a str, but UTF-8 cannot encode it. So no tokenizer and no response accepts it.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any

# A pair of escapes stays as it is. After an even number of backslashes, which are text, an escape is real.
_ESCAPES = (
    r"(?<!\\)((?:\\\\)*)(?:(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_IN_TEXT = re.compile(_ESCAPES)
_IN_BYTES = re.compile(_ESCAPES.encode() + rb"|\xed[\xa0-\xbf][\x80-\xbf]")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def whole(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates. A pair of surrogates becomes its character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def whole_values(value: Any) -> Any:
    """Return a JSON value with ``whole`` applied to all its texts, including the keys of objects."""
    if isinstance(value, str):
        return value if value.isascii() else whole(value)
    if isinstance(value, Mapping):
        return {whole_values(key): whole_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole_values(inner) for inner in value]
    return value


def whole_json(text: str) -> str:
    """Return JSON text with U+FFFD for escaped lone surrogates."""
    return _IN_TEXT.sub(lambda match: match[0] if match[2] else match[1] + _UNKNOWN, text)


def whole_json_bytes(body: bytes) -> bytes:
    """Return the bytes of JSON with U+FFFD for lone surrogates, as ``whole_json`` does for text.

    The bytes may also encode a lone surrogate as three bytes, or begin with a byte order mark, which programs on
    Windows write.
    """
    unknown = _UNKNOWN.encode()
    data = _IN_BYTES.sub(lambda match: match[0] if match[2] else (match[1] or b"") + unknown, body)
    return data.lstrip(BOM_UTF8)  # all marks, so that a second call changes nothing

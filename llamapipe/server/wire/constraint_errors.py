"""Errors of the engine about constraints, with the field of the request that holds the constraint.

The engine knows ``SamplingParams`` only. A request may name its JSON schema otherwise, and the engine writes the schema
and the tools of a chat into one Lark grammar before it compiles them.
"""

from __future__ import annotations

import re

from llamapipe.engine.params import CONSTRAINTS, SamplingParams
from llamapipe.errors import InvalidRequestError
from llamapipe.server.errors import ApiError

_FIRST_WORD = re.compile(r"\w+")


def with_field(error: InvalidRequestError, field: str) -> ApiError | InvalidRequestError:
    """The error with the field it is about; unchanged if that is not known. ``field``: what holds the constraint."""
    text = str(error)
    found = _FIRST_WORD.match(text)
    word = "" if found is None else found[0]
    if word in CONSTRAINTS and word != field:
        what = "the JSON schema" if word == "json_schema" else "the grammar"
        return ApiError(400, f"{field}: {what}{text[len(word) :]}", field.partition(":")[0])
    if word == field or word in SamplingParams.__dataclass_fields__:
        return ApiError(400, text, word)
    return ApiError(400, text, "tools") if word in ("tool", "tools") else error


def constraint_of(params: SamplingParams) -> str | None:
    """The name of the constraint in ``params``, if there is one."""
    return next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)

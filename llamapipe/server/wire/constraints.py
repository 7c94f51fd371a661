"""Reads the format that an answer must match, under all the names that requests use for it.

Errors about it name the field that the request has.

llamapipe's own names are those of ``SamplingParams``. OpenAI's API has ``response_format``, vLLM ``structured_outputs``
and the older ``guided_json`` and its like, SGLang ``ebnf``. A request may give one of them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from llamapipe.errors import InvalidRequestError
from llamapipe.params import CONSTRAINTS, SamplingParams
from llamapipe.server.errors import ApiError
from llamapipe.server.fields import Only, Unused

_FIRST_WORD = re.compile(r"\w+")
_COMPACT = 'json_whitespace: "flexible" allows spaces between the parts of JSON'
_TAGS = "give tools, whose calls are written in the model's format, or a grammar"


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's name of the format of the answer's text; ``schema`` is llama-server's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None

    def answer_schema(self) -> Any:
        """The JSON schema that the answer must match, None for any text. Raises ApiError 400."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return self.schema or {"type": "object"}
        schema = (self.json_schema or {}).get("schema", self.schema)
        if schema is None:
            raise ApiError(
                400, "response_format: json_schema needs a schema", "response_format.json_schema.schema"
            )
        return schema


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's name of the format of the answer's text."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Any, Only(instead=_TAGS)] = None
    disable_fallback: Annotated[bool | None, Only(False, True)] = None
    disable_any_whitespace: Annotated[bool | None, Only(False, True)] = None
    disable_additional_properties: Annotated[
        bool | None, Only(False, instead="put additionalProperties: false into the schema")
    ] = None
    whitespace_pattern: Annotated[str | None, Only(instead=_COMPACT)] = None


class Constrained(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that hold a format of the answer; at most one of them may be given."""

    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None
    choice: list[str] | None = None
    json_whitespace: Literal["compact", "flexible"] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's names, and SGLang's.
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: Annotated[str | None, Unused()] = None
    guided_whitespace_pattern: Annotated[str | None, Only(instead=_COMPACT)] = None
    structural_tag: Annotated[Any, Only(instead=_TAGS)] = None
    ebnf: str | None = None

    def constraint(self) -> Constraint | None:
        """The format that the answer must match. Raises ApiError 400 if two are given."""
        found: list[Constraint] = []
        for field, kind in _KINDS.items():
            value = getattr(self, field)
            if value is not None and value is not False:
                found.append(_constraint(field, kind, value))
        if self.response_format is not None:
            schema = self.response_format.answer_schema()
            if schema is not None:
                found.insert(0, _constraint("response_format", "json_schema", schema))
        for field, kind in _STRUCTURED.items():
            value = getattr(self.structured_outputs, field, None)
            if value is not None and value is not False:
                found.append(_constraint(f"structured_outputs.{field}", kind, value))
        if len(found) > 1:
            first, other = (constraint.field for constraint in found[:2])
            raise ApiError(400, f"{first} and {other} are both given; give one of them", other)
        return found[0] if found else None


class Constraint(NamedTuple):
    """A format. ``field``: of the request; ``name``, ``value``: a field of ``SamplingParams``."""

    field: str
    name: str
    value: Any


# What each field holds. "any grammar" may be Lark's or GBNF; an object without a schema is "object".
_KINDS = {
    **{name: name for name in ("json_schema", "regex", "grammar", "lark", "choice")},
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "any grammar",
    "guided_json_object": "object",
    "ebnf": "grammar",
}
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "any grammar",
    "json_object": "object",
}


def _constraint(field: str, kind: str, value: Any) -> Constraint:
    if kind == "object":
        return Constraint(field, "json_schema", {"type": "object"})
    if kind == "any grammar":
        return Constraint(field, "grammar" if "::=" in value else "lark", value)
    if kind == "json_schema" and not isinstance(value, (dict, bool, str)):
        raise ApiError(400, f"{field}: the schema must be a JSON object or a boolean", field)
    if kind == "choice" and (not value or not all(value)):
        raise ApiError(400, f"{field} must hold at least one text, and no empty one", field)
    return Constraint(field, kind, value)


# ---- errors
def with_field(error: InvalidRequestError, field: str) -> ApiError | InvalidRequestError:
    """The error with the field it is about; unchanged if that is not known. ``field``: what holds the constraint.

    The engine knows ``SamplingParams`` only. A request may name its JSON schema otherwise, and the engine writes the
    schema and the tools of a chat into one Lark grammar before it compiles them.
    """
    text = str(error)
    found = _FIRST_WORD.match(text)
    word = "" if found is None else found[0]
    if word in CONSTRAINTS and word != field:
        what = {"json_schema": "the JSON schema", "regex": "the regex"}.get(word, "the grammar")
        return ApiError(400, f"{field}: {what}{text[len(word) :]}", field.partition(":")[0])
    if word == field or word in SamplingParams.__dataclass_fields__:
        return ApiError(400, text, word)
    return ApiError(400, text, "tools") if word in ("tool", "tools") else error

"""Checks of what a chat request holds as free JSON: tools, schemas and arguments of the template.

The engine checks the same for callers in Python, with a TypeError. A client gets an error that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llamapipe.server.errors import ApiError

_RESERVED = ("self", "messages", "tools", "add_generation_prompt")  # parameters of Model.render_chat


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises ApiError 400 for a tool whose name or parameters have another type."""
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ApiError(
                400,
                f'tools[{i}] must have the form {{"type": "function", "function": {{"name": ...}}}}',
                "tools",
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str):
            raise ApiError(400, f"tools[{i}]: a tool's name must be text", "tools")
        if parameters is not None and not isinstance(parameters, (dict, bool)):
            raise ApiError(400, f"tools[{i}]: the parameters of {name!r} must be a JSON schema", "tools")


def check_schema(schema: object, field: str) -> None:
    """Raises ApiError 400 if the schema of the answer, in ``field``, is no schema."""
    if schema is not None and not isinstance(schema, (dict, bool)):
        raise ApiError(400, f"{field}: the schema must be a JSON object or a boolean", field)


def check_template_args(names: Iterable[str]) -> None:
    """Raises ApiError 400 for an argument of the template that is a field of the request."""
    for name in names:
        if name in _RESERVED:
            raise ApiError(
                400,
                f"chat_template_kwargs may not hold {name!r}: the request and the template define it",
                "chat_template_kwargs",
            )

"""Tools that a model may call: checked definitions, from Python functions or JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamapipe.arguments import did_you_mean, listed, quoted
from llamapipe.chat.function_schema import described, named, parameters_schema
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import schema_text

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # Anthropic's API allows 128 characters, OpenAI's 64
_CHOICES = ("auto", "none", "required")
_TOOL_KEYS = frozenset({"type", "function"})
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    - ``name``: 1 to 128 letters, digits, ``_``, ``-`` and ``.``.
    - ``parameters``: the JSON schema of its arguments, which are an object.
    - ``strict``: the schema must be followed exactly. Otherwise, where the model may also answer with text, a schema
      that no grammar can express costs the tool this guarantee, and a warning says so: its arguments are then any JSON
      object.

    Raises InvalidRequestError for other names and for schemas of something else than objects, TypeError for other
    types.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a tool's name must be a str, not {type(self.name).__name__}")
        if not _NAME.fullmatch(self.name):
            raise InvalidRequestError(
                f"{quoted(self.name)} is not a valid tool name: use 1 to 128 letters, digits, '_', '-' and '.'"
            )
        if self.name in _CHOICES:
            raise InvalidRequestError(
                f"a tool must not be called {quoted(self.name)}: tool_choice uses that word"
            )
        if not isinstance(self.description, str):
            raise TypeError(
                f"tool {quoted(self.name)}: description must be a str, not {type(self.description).__name__}"
            )
        if not isinstance(self.strict, bool):
            raise TypeError(
                f"tool {quoted(self.name)}: strict must be a bool, not {type(self.strict).__name__}"
            )
        object.__setattr__(self, "parameters", _parameters(self.name, self.parameters))

    def as_openai(self) -> dict[str, Any]:
        """The definition as templates and OpenAI's API expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


ToolDefinition = Callable[..., Any] | Mapping[str, Any] | Tool


def check_tools(tools: Iterable[ToolDefinition] | None) -> tuple[Tool, ...]:
    """The tools as ``Tool`` objects: Python functions, ``{"type": "function", "function": {…}}``, or ``Tool``.

    A function's schema comes from its signature and docstring; see ``function_schema``.

    Raises InvalidRequestError for duplicate names, unknown keys and bad schemas, TypeError for other types.
    """
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping, Tool)) or not isinstance(tools, Iterable):
        raise TypeError(f"tools must be a list of functions, dicts or Tool, not {type(tools).__name__}")
    found: dict[str, Tool] = {}
    for i, one in enumerate(tools):
        tool = _tool(i, one)
        if tool.name in found:
            raise InvalidRequestError(f"tools[{i}]: there is another tool called {quoted(tool.name)}")
        found[tool.name] = tool
    return tuple(found.values())


def check_tool_choice(tool_choice: Any, tools: Iterable[Tool]) -> str:
    """``tool_choice`` as "auto", "none", "required", or a tool's name.

    OpenAI's ``{"type": "function", "function": {"name": …}}`` is accepted, and None, which is "auto".

    Raises InvalidRequestError for an unknown name and for "required" without tools, TypeError for other types.
    """
    names = [tool.name for tool in tools]
    if tool_choice is None:
        return "auto"
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool_choice.get("type") != "function" or not isinstance(name, str):
            raise InvalidRequestError(
                'tool_choice must be "auto", "none", "required", a tool\'s name, or {"type": "function", "function": '
                f'{{"name": …}}}}, not {quoted(dict(tool_choice))}'
            )
    elif isinstance(tool_choice, str):
        if tool_choice in _CHOICES:
            if tool_choice == "required" and not names:
                raise InvalidRequestError('tool_choice is "required", but there are no tools')
            return tool_choice
        name = tool_choice
    else:
        raise TypeError(f"tool_choice must be a str or a dict, not {type(tool_choice).__name__}")
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names {quoted(name)}; the tools are {listed(names) or 'none'}"
            f"{did_you_mean(name, [*names, *_CHOICES])}"
        )
    return name


def allowed_tools(tool_choice: Any, tools: tuple[Tool, ...]) -> tuple[Any, tuple[Tool, ...]]:
    """The choice, and the tools that may be called.

    They are fewer than ``tools``, all of which the model sees, if OpenAI's
    ``{"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": […]}}`` is given.

    Raises InvalidRequestError for an unknown name or mode.
    """
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "allowed_tools":
        return tool_choice, tools
    inner = tool_choice.get("allowed_tools")
    mode = inner.get("mode") if isinstance(inner, Mapping) else None
    listed = inner.get("tools") if isinstance(inner, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequestError(
            'tool_choice must have the form {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
            f'"tools": [{{"type": "function", "function": {{"name": …}}}}]}}}}, not {quoted(dict(tool_choice))}'
        )
    by_name = {tool.name: tool for tool in tools}
    names = set()
    for one in listed:
        function = one.get("function") if isinstance(one, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        known = isinstance(name, str) and name in by_name and one.get("type") == "function"
        names.add(name if known else check_tool_choice(one, tools))
    return mode, tuple(tool for tool in tools if tool.name in names)


def _tool(i: int, one: ToolDefinition) -> Tool:
    try:
        if isinstance(one, Tool):
            return one
        if isinstance(one, Mapping):
            return _from_dict(one)
        if callable(one):
            schema = getattr(one, "model_json_schema", None)
            if schema is not None:  # a pydantic model: its fields are the arguments
                return Tool(named(one), described(one), schema())
            return Tool(named(one), described(one), parameters_schema(one))
    except InvalidRequestError as e:
        raise InvalidRequestError(f"tools[{i}]: {e}") from None
    except TypeError as e:
        raise TypeError(f"tools[{i}]: {e}") from None
    raise TypeError(f"tools[{i}] must be a function, a dict or a Tool, not {type(one).__name__}")


def _from_dict(one: Mapping[str, Any]) -> Tool:
    function = one.get("function")
    if one.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidRequestError('a tool must be {"type": "function", "function": {"name": …}}')
    for given, known in ((one, _TOOL_KEYS), (function, _FUNCTION_KEYS)):
        if unknown := given.keys() - known:
            wrong = min(unknown)
            raise InvalidRequestError(f"unknown key {quoted(wrong)} in a tool{did_you_mean(wrong, known)}")
    if "name" not in function:
        raise InvalidRequestError("a tool needs a name")
    description = function.get("description")
    parameters = function.get("parameters")
    return Tool(
        function["name"],
        "" if description is None else description,
        {"type": "object", "properties": {}} if parameters is None else parameters,
        False if function.get("strict") is None else function["strict"],
    )


def _parameters(name: str, parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, Mapping):
        raise TypeError(
            f"tool {quoted(name)}: parameters must be a JSON schema, not {type(parameters).__name__}"
        )
    try:
        schema: dict[str, Any] = json.loads(schema_text(parameters))
    except InvalidRequestError as e:
        raise InvalidRequestError(f"tool {quoted(name)}: {e}") from None
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequestError(
            f"tool {quoted(name)}: the type of parameters is {quoted(schema['type'])}; it must be 'object'"
        )
    if "properties" not in schema and not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        schema.setdefault("properties", {})
    return schema

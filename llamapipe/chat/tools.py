"""The tools that a model may call: checked definitions from JSON schemas or Python functions.

The schema of a function comes from its signature, its annotations and its docstring.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from llamapipe._messages import did_you_mean, listed, quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import schema_text

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ARRAYS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
# Limits of lists and dicts whose items may be classes.
_LIMITS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties"})
# "name: text" in Google's style, "name : type" in numpy's, ":param name: text" in Sphinx's. Numpy allows several names.
_ENTRY = re.compile(
    r"^\s*(?P<field>[:@](?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]+\s+)?)?"
    r"\*{0,2}`{0,2}(?P<names>\w+(?:\s*,\s*\*{0,2}\w+)*)`{0,2}(?P<space>\s*)"
    r"(?:\((?:[^()]|\([^()]*\))*\))?\s*:(?:\s+(?P<text>.*)|)$"
)
_FIELD = re.compile(
    r"^\s*[:@](param|parameter|arg|argument|key|keyword|type|raises?|except|returns?|rtype|yields?|ytype)\b"
)
_SECTION = re.compile(
    r"^\s*((?:other |keyword )?(?:args|arguments|parameters|params)|returns?|yields?|raises|examples?|notes?|see also|"
    r"attributes|references|warnings?|warns|todo)\s*:?\s*$",
    re.IGNORECASE,
)
# A grammar of calls has at most 2**15 characters, and more than 32 for each tool. More tools would never work.
MAX_TOOLS = 1024
_OF_ARGUMENTS = re.compile(r"(arg|param)\w*$")


def named(function: Callable[..., Any]) -> str:
    """Return the name of a function, of a ``functools.partial``'s function, or of a callable object's class."""
    if isinstance(function, functools.partial):
        return named(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def described(function: Callable[..., Any]) -> str:
    """Return the docstring's text before its first section, without lines that describe an argument."""
    if isinstance(function, functools.partial):
        return described(function.func)
    return _documented(function, _names(function))[0]


def _names(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return set()


def parameters_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments.

    An argument without an annotation may be any JSON value; an argument without a default is required. The supported
    annotations are JSON's types, ``Literal``, ``Optional`` and other unions, ``list``, ``set``, ``dict``, ``tuple``,
    enums, ``TypedDict``, dataclasses, pydantic models, and ``Annotated`` with a description or the limits of pydantic's
    ``Field``.

    Raises InvalidRequestError for arguments that cannot be passed by name, and for unsupported annotations.
    """
    name = named(function)
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(_annotated(function), include_extras=True)
    except (ValueError, TypeError, NameError) as e:
        raise InvalidRequestError(f"the signature of {name} cannot be read: {e}") from None
    documented = _documented(function, set(signature.parameters))[1]
    writer = _Writer()
    properties: dict[str, Any] = {}
    required: list[str] = []
    for argument in signature.parameters.values():
        if argument.kind in (argument.POSITIONAL_ONLY, argument.VAR_POSITIONAL):
            raise InvalidRequestError(f"{name}: argument {quoted(argument.name)} cannot be passed by name")
        if argument.kind is argument.VAR_KEYWORD:
            raise InvalidRequestError(f"{name}: **{argument.name} has no schema; list its arguments")
        try:
            schema = writer.schema(hints.get(argument.name, Any))
        except InvalidRequestError as e:
            raise InvalidRequestError(f"{name}: argument {quoted(argument.name)}: {e}") from None
        if argument.name in documented:
            schema.setdefault("description", documented[argument.name])
        if argument.default is inspect.Parameter.empty:
            required.append(argument.name)
        elif isinstance(argument.default, (str, int, float, bool)):
            schema.setdefault("default", argument.default)
        properties[argument.name] = schema
    result: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if writer.definitions:
        result["$defs"] = writer.definitions
    return result


def _annotated(function: Callable[..., Any]) -> Any:
    """Return the object with the annotations: the function, or the method that makes an object callable."""
    if inspect.isroutine(function) or inspect.isclass(function):
        return function.__init__ if inspect.isclass(function) else function
    return getattr(function, "func", None) or type(function).__call__


class _Writer:
    """Converts annotations to schemas. Classes become shared definitions, so that a class may refer to itself."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._classes: dict[str, type] = {}

    def schema(self, kind: Any) -> dict[str, Any]:
        """Return the schema of one annotation. Raises InvalidRequestError if there is none."""
        if kind is Any or kind is inspect.Parameter.empty:
            return {}
        if kind is None:
            return {"type": "null"}
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            return self._annotated(kind, parts[0], parts[1:])
        if isinstance(kind, type) and kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if getattr(origin, "_name", None) in ("Required", "NotRequired"):  # of a TypedDict
            return self.schema(parts[0])
        if origin is typing.Literal:
            return {"enum": list(parts)}
        if origin in (typing.Union, types.UnionType):
            return self._union(parts)
        if (origin or kind) is tuple and parts and parts[-1] is not Ellipsis:
            items = [self.schema(part) for part in parts]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if (origin or kind) in _ARRAYS:
            schema = {"type": "array"}
            return {**schema, "items": self.schema(parts[0])} if parts else schema
        if (origin or kind) in _OBJECTS:
            schema = {"type": "object"}
            if parts and parts[0] is not str:
                raise InvalidRequestError(f"{kind} has keys that are not str, which JSON does not allow")
            return {**schema, "additionalProperties": self.schema(parts[1])} if parts else schema
        if isinstance(kind, type):
            return self._class(kind)
        raise InvalidRequestError(f"no JSON schema for {quoted(kind)}; use another type, or pass a schema")

    def _annotated(self, kind: Any, inner: Any, notes: tuple[Any, ...]) -> dict[str, Any]:
        schema = self.schema(inner)
        if any(map(_is_limit, notes)):
            limited = _pydantic_schema(kind)
            # Pydantic's definitions of classes differ from ours, so take only the limits from a schema with classes.
            schema = (
                schema | {k: limited[k] for k in _LIMITS & limited.keys()} if "$defs" in limited else limited
            )
        texts = [note if isinstance(note, str) else getattr(note, "description", None) for note in notes]
        text = next((text for text in texts if isinstance(text, str)), None)
        return schema if text is None else {**schema, "description": text}

    def _union(self, parts: tuple[Any, ...]) -> dict[str, Any]:
        schemas = [self.schema(part) for part in parts]
        if all(option.keys() == {"type"} for option in schemas):
            return {"type": [option["type"] for option in schemas]}
        return {"anyOf": schemas}

    def _class(self, kind: type) -> dict[str, Any]:
        if issubclass(kind, enum.Enum):
            return {"enum": [member.value for member in kind]}
        pydantic = getattr(kind, "model_json_schema", None)
        is_known = pydantic is not None or dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)
        if not is_known:
            raise InvalidRequestError(
                f"no JSON schema for {kind.__name__}; use another type, or pass a schema"
            )
        name = re.sub(r"\W", "_", kind.__name__)  # the name of a generic class is like "Box[int]"
        if self._classes.setdefault(name, kind) is not kind:
            raise InvalidRequestError(f"two classes are called {name}; rename one")
        if name not in self.definitions:
            self.definitions[name] = {}  # a class may refer to itself
            if pydantic is not None:
                schema = pydantic(ref_template="#/$defs/{model}")
                for nested, definition in schema.pop("$defs", {}).items():
                    if self.definitions.setdefault(nested, definition) != definition:
                        raise InvalidRequestError(f"two classes are called {nested}; rename one")
                if "$ref" in schema:  # a model that refers to itself
                    return dict(schema)
            else:
                schema = self._fields(kind)
            self.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def _fields(self, kind: type) -> dict[str, Any]:
        try:
            hints = typing.get_type_hints(kind, include_extras=True)
        except (NameError, TypeError) as e:
            raise InvalidRequestError(f"the annotations of {kind.__name__} cannot be read: {e}") from None
        if dataclasses.is_dataclass(kind):
            fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
            missing = dataclasses.MISSING
            required = [n for n, f in fields.items() if f.default is missing and f.default_factory is missing]
            hints = {name: hints[name] for name in fields}
        else:
            # Python's ``__required_keys__`` ignores Required in annotations that are strings.
            listed = getattr(kind, "__required_keys__", hints)
            marks = {name: getattr(typing.get_origin(hint), "_name", None) for name, hint in hints.items()}
            required = [
                n for n in hints if marks[n] == "Required" or (n in listed and marks[n] != "NotRequired")
            ]
        documented = _documented(kind, set(hints))[1]
        properties = {}
        for name, hint in hints.items():
            properties[name] = self.schema(hint)
            if name in documented:
                properties[name].setdefault("description", documented[name])
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }


def _is_limit(note: Any) -> bool:
    """Return whether metadata of ``Annotated`` limits values, like ``Field(ge=1)`` and unlike a description."""
    package = type(note).__module__.partition(".")[0]
    return package in ("pydantic", "annotated_types") and bool(getattr(note, "metadata", True))


def _pydantic_schema(kind: Any) -> dict[str, Any]:
    """Return pydantic's schema of an annotation with limits.

    Raises InvalidRequestError if pydantic is not installed or has no schema for the annotation.
    """
    try:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError
        from pydantic_core import SchemaError
    except ImportError:
        raise InvalidRequestError("limits of annotated-types need pydantic: pip install pydantic") from None
    try:
        return dict(TypeAdapter(kind).json_schema())
    except (PydanticUserError, SchemaError) as e:
        raise InvalidRequestError(f"no JSON schema for {quoted(kind)}: {e}") from None


def _documented(thing: Any, names: set[str]) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its first section, and the description of each argument.

    Reads the styles of Google, numpy and Sphinx, and lines such as ``name: text`` without a heading.
    """
    text: list[str] = []
    lines: dict[str, list[str]] = {}
    current: tuple[str, ...] = ()  # the arguments that a following, more indented line describes
    indent = 0  # the indentation of the line that names these arguments
    section: str | None = None
    for line in (inspect.getdoc(thing) or "").splitlines():
        if heading := _SECTION.match(line):
            section, current = heading[1].lower(), ()
            continue
        entry = _ENTRY.match(line)
        at = len(line) - len(line.lstrip())
        is_listed = section is not None and _OF_ARGUMENTS.match(section) is not None
        if entry and entry["field"]:
            section, is_listed = "args", True
        elif _FIELD.match(line):
            section, current = "returns", ()
            continue
        described = tuple(re.split(r"[\s,*]+", entry["names"])) if entry else ()
        is_entry = described and names.issuperset(described) and (is_listed or (section is None and at == 0))
        if entry and is_entry and not (current and at > indent):
            current, indent = described, at
            # numpy's style has the type on this line, and the text on the lines after it
            is_type = (
                is_listed and not entry["field"] and bool(entry["space"]) and "(" not in line.split(":")[0]
            )
            for name in described:
                lines[name] = [] if is_type else [entry["text"] or ""]
        elif current and line.strip() and at > indent:
            for name in current:
                lines[name].append(line.strip())
        elif line.strip() and set(line.strip()) != {"-"}:
            current = ()
            if section is None:
                text.append(line)
        elif section is None:
            text.append(line)
    described_by_name = {name: " ".join(filter(None, parts)).strip() for name, parts in lines.items()}
    return "\n".join(text).strip(), {name: about for name, about in described_by_name.items() if about}


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # Anthropic's API allows 128 characters, OpenAI's 64
_CHOICES = ("auto", "none", "required")
_TOOL_KEYS = frozenset({"type", "function"})
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    - ``name``: 1 to 128 letters, digits, ``_``, ``-`` and ``.``.
    - ``parameters``: the JSON schema of the arguments, which are an object.
    - ``strict``: the schema must be followed exactly. If ``strict`` is False, no grammar can express the schema, and
      the model may also answer with text, the arguments are any JSON object, and a warning says so.

    Raises InvalidRequestError for invalid names and for schemas that do not describe an object, TypeError for other
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
        for member, value, kind in (("description", self.description, str), ("strict", self.strict, bool)):
            if not isinstance(value, kind):
                raise TypeError(
                    f"tool {quoted(self.name)}: {member} must be a {kind.__name__}, not {type(value).__name__}"
                )
        object.__setattr__(self, "parameters", _parameters(self.name, self.parameters))

    def as_openai(self) -> dict[str, Any]:
        """Return the definition as templates and OpenAI's API expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


ToolDefinition: TypeAlias = Callable[..., object] | Mapping[str, object] | Tool


def check_tools(tools: Iterable[ToolDefinition] | None) -> tuple[Tool, ...]:
    """Return the tools as ``Tool`` objects.

    Each tool is a Python function, a pydantic model, ``{"type": "function", "function": {…}}``, or a ``Tool``. A
    function's schema comes from its signature and docstring; see ``parameters_schema``.

    Raises InvalidRequestError for more than ``MAX_TOOLS`` tools, duplicate names, unknown keys and invalid schemas,
    TypeError for other types.
    """
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping, Tool)) or not isinstance(tools, Iterable):
        raise TypeError(f"tools must be a list of functions, dicts or Tool, not {type(tools).__name__}")
    definitions = tools if isinstance(tools, Sequence) else list(islice(tools, MAX_TOOLS + 1))
    check_n_tools(len(definitions))
    by_name: dict[str, Tool] = {}
    for i, definition in enumerate(definitions):
        tool = _tool(i, definition)
        if tool.name in by_name:
            raise InvalidRequestError(f"tools[{i}]: there is another tool called {quoted(tool.name)}")
        by_name[tool.name] = tool
    return tuple(by_name.values())


def check_n_tools(n: int) -> None:
    """Raise InvalidRequestError for more tools than a grammar can hold. Call this before reading the tools."""
    if n > MAX_TOOLS:
        raise InvalidRequestError(
            f"there are {n} tools; the limit is {MAX_TOOLS}: give those that this conversation needs"
        )


def check_tool_choice(tool_choice: Any, tools: Iterable[Tool]) -> str:
    """Return ``tool_choice`` as "auto", "none", "required", or a tool's name.

    OpenAI's ``{"type": "function", "function": {"name": …}}`` is also accepted, and None means "auto".

    Raises InvalidRequestError for an unknown name and for "required" without tools, TypeError for other types.
    """
    names = [tool.name for tool in tools]
    if tool_choice is None:
        return "auto"
    if isinstance(tool_choice, Mapping):
        name = _named_function(tool_choice)
        if name is None:
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
            f"{did_you_mean(name, [*names, *(_CHOICES if name is tool_choice else ())], 'tool choice')}"
        )
    return name


def _named_function(choice: Any) -> str | None:
    """Return the name in OpenAI's ``{"type": "function", "function": {"name": …}}``; None for anything else."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and choice.get("type") == "function" else None


def allowed_tools(tool_choice: Any, tools: tuple[Tool, ...]) -> tuple[Any, tuple[Tool, ...]]:
    """Return the choice of a tool without its list of allowed tools, and the tools that may be called.

    OpenAI's ``{"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": […]}}`` limits the
    tools that may be called; the model still sees all ``tools``. Any other choice allows all of them.

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
    known = {tool.name for tool in tools}
    names = set()
    for entry in listed:
        name = _named_function(entry)
        names.add(name if name in known else check_tool_choice(entry, tools))
    return mode, tuple(tool for tool in tools if tool.name in names)


def _tool(i: int, definition: ToolDefinition) -> Tool:
    try:
        if isinstance(definition, Tool):
            return definition
        if isinstance(definition, Mapping):
            return _from_dict(definition)
        if callable(definition):
            # The fields of a pydantic model are the arguments.
            model_schema = getattr(definition, "model_json_schema", None)
            schema = parameters_schema(definition) if model_schema is None else model_schema()
            return Tool(named(definition), described(definition), schema)
    except InvalidRequestError as e:
        raise InvalidRequestError(f"tools[{i}]: {e}") from None
    except TypeError as e:
        raise TypeError(f"tools[{i}]: {e}") from None
    raise TypeError(f"tools[{i}] must be a function, a dict or a Tool, not {type(definition).__name__}")


def _from_dict(definition: Mapping[str, Any]) -> Tool:
    function = definition.get("function")
    if definition.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidRequestError('a tool must be {"type": "function", "function": {"name": …}}')
    for mapping, known in ((definition, _TOOL_KEYS), (function, _FUNCTION_KEYS)):
        if unknown := mapping.keys() - known:
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
    if schema.get("type") is None:
        schema["type"] = "object"
    if schema["type"] != "object":
        raise InvalidRequestError(
            f"tool {quoted(name)}: the type of parameters is {quoted(schema['type'])}; it must be 'object'"
        )
    if "properties" not in schema and not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        schema.setdefault("properties", {})
    return schema

"""JSON schemas of Python functions: from the signature, its annotations, and the docstring."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from llamapipe.arguments import quoted
from llamapipe.errors import InvalidRequestError

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ARRAYS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
# "name: text" of Google's style, "name : type" of numpy's, ":param name: text" of Sphinx's. Numpy's may have two names.
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
_OF_ARGUMENTS = re.compile(r"(arg|param)\w*$")


def named(function: Callable[..., Any]) -> str:
    """The name of a function, of the function in a ``functools.partial``, or of a callable object's class."""
    if isinstance(function, functools.partial):
        return named(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def described(function: Callable[..., Any]) -> str:
    """The docstring up to its list of arguments, without lines that describe one."""
    if isinstance(function, functools.partial):
        return described(function.func)
    return _documented(function, _names(function))[0]


def _names(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return set()


def parameters_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments.

    An argument without an annotation may be any JSON value; one without a default is required. Supported are the
    types of JSON, ``Literal``, ``Optional`` and other unions, ``list``, ``dict``, ``tuple``, enums, ``TypedDict``,
    dataclasses, pydantic models, and ``Annotated`` with a description.

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
    """The object with the annotations: the function, or the method that makes an object callable."""
    if inspect.isroutine(function) or inspect.isclass(function):
        return function.__init__ if inspect.isclass(function) else function
    return getattr(function, "func", None) or type(function).__call__


class _Writer:
    """Turns annotations into schemas. Classes become shared definitions, so that they may refer to themselves."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._classes: dict[str, type] = {}

    def schema(self, kind: Any) -> dict[str, Any]:
        """The schema of one annotation."""
        if kind is Any or kind is inspect.Parameter.empty:
            return {}
        if kind is None:
            return {"type": "null"}
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            schema = self.schema(parts[0])
            texts = [
                text
                for one in parts[1:]
                if isinstance(text := one if isinstance(one, str) else getattr(one, "description", None), str)
            ]
            return {**schema, "description": texts[0]} if texts else schema
        if isinstance(kind, type) and kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if getattr(origin, "_name", None) in ("Required", "NotRequired"):  # of a TypedDict
            return self.schema(parts[0])
        if origin is typing.Literal:
            return {"enum": list(parts)}
        if origin in (typing.Union, types.UnionType):
            return self._union(parts)
        if (origin or kind) is tuple and parts and parts[-1] is not Ellipsis:
            items = [self.schema(one) for one in parts]
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

    def _union(self, parts: tuple[Any, ...]) -> dict[str, Any]:
        schemas = [self.schema(one) for one in parts]
        if all(one.keys() == {"type"} for one in schemas):
            return {"type": [one["type"] for one in schemas]}
        return {"anyOf": schemas}

    def _class(self, kind: type) -> dict[str, Any]:
        if issubclass(kind, enum.Enum):
            return {"enum": [one.value for one in kind]}
        pydantic = getattr(kind, "model_json_schema", None)
        is_known = pydantic is not None or dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)
        if not is_known:
            raise InvalidRequestError(
                f"no JSON schema for {kind.__name__}; use another type, or pass a schema"
            )
        name = re.sub(r"\W", "_", kind.__name__)  # of a generic class: "Box[int]"
        if self._classes.setdefault(name, kind) is not kind:
            raise InvalidRequestError(f"two classes are called {name}; rename one")
        if name not in self.definitions:
            self.definitions[name] = {}  # a class may refer to itself
            if pydantic is not None:
                schema = pydantic(ref_template="#/$defs/{model}")
                for nested, one in schema.pop("$defs", {}).items():
                    if self.definitions.setdefault(nested, one) != one:
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
            listed = getattr(
                kind, "__required_keys__", hints
            )  # ignores Required in annotations that are strings
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


def _documented(thing: Any, names: set[str]) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its lists, and the description of each argument.

    In Google's, numpy's or Sphinx's style, or in lines such as ``name: text`` without a heading.
    """
    text: list[str] = []
    found: dict[str, list[str]] = {}
    current: tuple[str, ...] = ()  # the arguments that an indented line also describes
    indent = 0  # of the line that named them
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
            # numpy's style has the type here, and the text in the lines that follow
            is_type = (
                is_listed and not entry["field"] and bool(entry["space"]) and "(" not in line.split(":")[0]
            )
            for name in described:
                found[name] = [] if is_type else [entry["text"] or ""]
        elif current and line.strip() and at > indent:
            for name in current:
                found[name].append(line.strip())
        elif line.strip() and set(line.strip()) != {"-"}:
            current = ()
            if section is None:
                text.append(line)
        elif section is None:
            text.append(line)
    described_by_name = {name: " ".join(filter(None, parts)).strip() for name, parts in found.items()}
    return "\n".join(text).strip(), {name: one for name, one in described_by_name.items() if one}

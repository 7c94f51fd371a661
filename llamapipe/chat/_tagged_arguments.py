"""The arguments of one tool: their schemas, and their values from the text between markers.

Some templates write each argument of a call separately, as in ``<parameter=city>Paris</parameter>``. Arguments may come
in any order. A string is written as it is, and any other value as JSON. If a schema allows strings and another type, a
text that looks like the other type is read as that type: ``42`` is a number where numbers are allowed, ``{"a": 1}`` an
object. Python's spelling, which many templates show to the model, is read as well: ``None``, ``True``, ``{'a': 1}``.
``_argument_grammar.py`` writes the grammar of such arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Set
from fractions import Fraction
from typing import Any

from llamapipe._messages import quoted
from llamapipe.chat._argument_values import python_value
from llamapipe.chat._call_format import CDATA, CDATA_END, CallFormat, Style
from llamapipe.chat._reader import Malformed, TextBuffer
from llamapipe.chat.results import decoded_json
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import (
    identity,
    json_type,
    pointer_to,
    ref_stands_alone,
    resolved,
    with_nulls,
)

_DEEP = 40  # levels of a value that are compared with its schema
_SHARED = ("$defs", "definitions")
NOTES = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
     "readOnly", "writeOnly", "strict", "contentEncoding", "contentMediaType", "contentSchema", "discriminator",
     "example", "externalDocs", "nullable", "xml"}
)  # fmt: skip
OF_OBJECT = NOTES | {"type", "properties", "required", "additionalProperties"}
_JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_ANY_TYPE = frozenset({"string", "any", "null"})
# Keywords beside ``properties`` that may name further members.
_WITH_NAMES = frozenset("allOf anyOf oneOf if patternProperties dependentSchemas dependencies".split())
_MOST_KNOWN = 1000  # schemas whose alternatives are kept
_MOST_TRIES = 1000  # of alternatives for the members of the values of one answer
_MOST_STEPS = 20  # references, and an ``allOf`` of one schema, from a schema to what it says
_MOST_COMPARED = 500  # values of two lists
_MOST_ALTERNATIVES = 2000  # of a schema, nested ones included
_MOST_LEVELS = 50  # of alternatives inside alternatives
# Keywords of which two schemas have one that means both, and how to find it.
_BOTH: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"), max),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"), min),
    "required": lambda first, second: [*dict.fromkeys((*first, *second))],
    "uniqueItems": lambda first, second: first or second,
}
# Keywords that depend on each other: if both schemas have one of a group, one schema cannot say what both say.
_GROUPS = (
    {"properties", "additionalProperties", "patternProperties", "unevaluatedProperties"},
    {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains"},
    {"if", "then", "else"},
)
_OF_OTHERS = {
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "array": frozenset("items prefixItems minItems maxItems uniqueItems".split()),
    "object": frozenset("properties required additionalProperties".split()),
}
_OF_STRING = NOTES | set("type enum const minLength maxLength pattern format anyOf oneOf".split())

_OF_TYPED = _OF_STRING.union(*_OF_OTHERS.values())


class TaggedArguments:
    """The arguments of one tool: their schemas, and their values from text."""

    def __init__(self, form: CallFormat, parameters: dict[str, Any]) -> None:
        """Check the schemas. Raises InvalidRequestError for parameters that cannot be written separately."""
        self.form = form
        self._root = parameters = with_nulls(parameters)
        self._n_tries = 0
        # By the schema's id(); with the schema, so that no other object gets the same id.
        self._targets: dict[int, tuple[Any, dict[str, Any]]] = {}
        # By the id() of the schema and of the value, while one value is compared.
        self._fitting: dict[tuple[int, int], tuple[Any, bool]] = {}
        self._options: dict[int, tuple[Any, list[dict[str, Any]]]] = {}
        self._known_types: dict[int, tuple[Any, set[str]]] = {}
        whole = self.resolved(parameters)
        wrong = [key for key in whole if key not in OF_OBJECT]
        if wrong:
            raise InvalidRequestError(
                f"parameters use {quoted(wrong[0])} at the top level, which this model's calls cannot express: they "
                "write each argument separately. List the arguments in 'properties'"
            )
        properties = whole.get("properties", {})
        if not isinstance(properties, dict):
            raise InvalidRequestError("parameters: 'properties' must be an object")
        others = whole.get("additionalProperties")
        is_open = others is not False and (not properties or others is not None)
        required = dict.fromkeys(whole.get("required", ()))
        properties = {**dict.fromkeys(required, True if others is None else others), **properties}
        self.required = set(required)
        self.properties: dict[str, dict[str, Any]] = self.members(properties, self.required)
        for name, member in self.properties.items():
            self._check(name, member)
        self.keys = tuple(self.properties)
        self.hidden = tuple(properties)  # names that no other argument may have
        self.open_schema = self.resolved(others) if isinstance(others, dict) else {}
        self._check("additionalProperties", self.open_schema)
        self.is_open = is_open and bool(self.alternatives(self.open_schema))

    def members(self, properties: dict[str, Any], required: set[str]) -> dict[str, dict[str, Any]]:
        """Return the schemas of an object's members, without those that allow nothing.

        Raises InvalidRequestError if a required member is one of these.
        """
        schemas = {
            name: None if member is False else self.resolved(member) for name, member in properties.items()
        }
        for name, member in schemas.items():
            if name in required and (member is None or not self.alternatives(member)):
                raise InvalidRequestError(
                    f"argument {quoted(name)} is required, but no value satisfies its schema"
                )
        return {
            name: member
            for name, member in schemas.items()
            if member is not None and self.alternatives(member)
        }

    def _check(self, name: str, schema: dict[str, Any]) -> None:
        """Raise InvalidRequestError for a schema that the text of an argument cannot express or enforce."""
        form = self.form
        self.check_name(name)
        if form.style is Style.PYTHON or "string" not in self.types(schema):
            return
        for option in self.alternatives(schema):
            # Where strings are restricted, a text cannot also be tried as a value of another type.
            is_typed = "type" in option and not option.keys() & {
                "minLength",
                "maxLength",
                "pattern",
                "format",
            }
            wrong = [key for key in option if key not in (_OF_TYPED if is_typed else _OF_STRING)]
            if (
                wrong
                and "string" in self.types(option)
                and ("type" in option or len(option.keys() - NOTES) > 0)
            ):
                raise InvalidRequestError(
                    f"argument {quoted(name)}: {quoted(wrong[0])} cannot be enforced for a string in this model's "
                    f"calls, at {pointer_to('#/properties', name)}"
                )

    def check_name(self, name: str) -> None:
        """Raise InvalidRequestError if calls cannot contain an argument or a member of this name."""
        form = self.form
        if form.style is Style.PYTHON:
            is_wrong = not re.fullmatch(r"[\w\-$.]+", name)
        elif form.style is Style.QUOTED:
            is_wrong = name != name.strip() or not name or any(c in name for c in (*":{},\n", form.quote))
            is_wrong = is_wrong or name[0] == '"'  # a model may write JSON's quotes around a name
        else:
            ends = {end.strip() for end in (form.key_end, *dict(form.key_ends).values()) if end.strip()}
            is_wrong = any(end in name for end in ends)
            if form.style is Style.NESTED:
                is_wrong = is_wrong or not name or form.key_start.strip() in name or "\n" in name
        if is_wrong:
            raise InvalidRequestError(f"an argument must not be called {quoted(name)} in this model's calls")

    def resolved(self, schema: Any) -> dict[str, Any]:
        """Return the schema at the end of a chain of local references; an ``allOf`` of one schema is that schema.

        Raises InvalidRequestError for a missing target, a circle, and a value that is no schema or allows nothing.
        """
        if not isinstance(schema, dict) or not schema.keys() & {"$ref", "allOf"}:
            return self._resolved(schema)
        if id(schema) not in self._targets:
            if len(self._targets) > _MOST_KNOWN:
                self._targets.clear()
            self._targets[id(schema)] = schema, self._resolved(schema)
        return self._targets[id(schema)][1]

    def _resolved(self, schema: Any) -> dict[str, Any]:
        for _ in range(_MOST_STEPS):
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                raise InvalidRequestError(
                    f"parameters: {quoted(schema)} allows no value"
                    if schema is False
                    else f"parameters: {quoted(schema)} is not a schema"
                )
            one_of_all = schema.get("allOf")
            if isinstance(one_of_all, list) and len(one_of_all) == 1 and "$ref" not in schema:
                inner = {} if one_of_all[0] is True else one_of_all[0]
                others = {k: v for k, v in schema.items() if k != "allOf"}
                schema = _both(others, inner) if isinstance(inner, dict) else inner
                continue
            target = schema.get("$ref")
            if not isinstance(target, str):
                return schema
            place = resolved(self._root, target)
            definition = None if place is None else {} if place[1] is True else place[1]
            if not isinstance(definition, dict):
                raise InvalidRequestError(f"parameters: there is no schema at the reference {quoted(target)}")
            if ref_stands_alone(self._root):
                schema = definition
            else:
                schema = _both({k: v for k, v in schema.items() if k != "$ref"}, definition)
        raise InvalidRequestError(
            f"parameters: a reference refers to itself, or leads through more than {_MOST_STEPS} others or 'allOf'"
        )

    def with_shared(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of a part of the parameters with the definitions to which it may refer."""
        return {**{key: self._root[key] for key in _SHARED if key in self._root}, **schema}

    # ---- what a schema allows
    def alternatives(
        self, schema: dict[str, Any], around: frozenset[int] = frozenset()
    ) -> list[dict[str, Any]]:
        """Return the schemas of ``anyOf`` or ``oneOf``, including nested ones; without these, the schema itself.

        Each one also has the keywords beside ``anyOf``. Schemas that allow nothing are left out.

        ``around``: the ``id()`` of the lists that hold the schema. Raises InvalidRequestError as ``resolved``, and for
        too many alternatives: with references, a short schema may have millions.
        """
        if around:
            return self._alternatives(schema, around)
        if id(schema) not in self._options:
            if len(self._options) > _MOST_KNOWN:
                self._options.clear()
            self._options[id(schema)] = schema, self._alternatives(schema, around)
        return self._options[id(schema)][1]

    def _alternatives(self, schema: dict[str, Any], around: frozenset[int]) -> list[dict[str, Any]]:
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list):
                if id(options) in around:
                    raise InvalidRequestError("parameters: a reference refers to itself")
                if len(around) == _MOST_LEVELS:
                    raise InvalidRequestError(
                        f"parameters: {quoted(key)} is nested in more than {_MOST_LEVELS} others; write it flat"
                    )
                inside = around | {id(options)}
                beside = {k: v for k, v in schema.items() if k != key and k not in NOTES}
                others: list[dict[str, Any]] = []
                seen: dict[int, dict[str, Any]] = {}  # many options may refer to the same large schema
                for option in options:
                    inner = None if option is False else self.resolved(option)
                    if inner is not None and id(inner) not in seen:
                        seen[id(inner)] = inner
                        others += self.alternatives(_both(inner, beside), inside)
                    if len(others) > _MOST_ALTERNATIVES:
                        raise InvalidRequestError(
                            f"parameters: {quoted(key)} has more than {_MOST_ALTERNATIVES} alternatives, with those "
                            "inside; list fewer"
                        )
                return others
        return [] if _allows_nothing(schema) else [schema]

    def types(self, schema: dict[str, Any]) -> set[str]:
        """Return the JSON types that a schema names or implies; "string", "any" and "null" if every type is allowed."""
        entry = self._known_types.get(id(schema))
        if entry is None:
            if len(self._known_types) > _MOST_KNOWN:
                self._known_types.clear()
            self._known_types[id(schema)] = schema, set(_ANY_TYPE)  # for a schema that contains itself
            entry = self._known_types[id(schema)] = schema, self._types(schema)
        return set(entry[1])

    def _types(self, schema: dict[str, Any]) -> set[str]:
        types: set[str] = set()
        for option in self.alternatives(schema):
            named = option.get("type")
            if named is None and isinstance(option.get("allOf"), list):
                types |= self._types_of_all(option["allOf"])
            elif isinstance(named, str):
                types.add(named)
            elif isinstance(named, list):
                types.update(named)
            elif (chosen := choices(option)) is not None:
                types.update(map(json_type, chosen))
            elif "properties" in option:
                types.add("object")
            elif "items" in option:
                types.add("array")
            else:
                types |= _ANY_TYPE
        return types

    def _types_of_all(self, parts: list[Any]) -> set[str]:
        """Return the types that all schemas of an ``allOf`` allow."""
        common = set(_ANY_TYPE)
        seen: dict[int, dict[str, Any]] = {}
        waiting = [*parts]
        while waiting:
            schema = self.resolved(waiting.pop())
            if id(schema) in seen:
                continue
            if len(seen) > _MOST_LEVELS:
                return set(_ANY_TYPE)
            seen[id(schema)] = schema
            inner = schema.get("allOf")
            if "type" not in schema and isinstance(inner, list):
                waiting += inner
                continue
            types = self.types(schema)
            common = (
                types if "any" in common else common if "any" in types else set(_common([*common], [*types]))
            )
        return common

    # ---- values
    def schema(self, key: str) -> dict[str, Any]:
        """Return the schema of an argument, listed or not."""
        return self.properties.get(key, self.open_schema)

    def is_text(self, key: str) -> bool:
        """Return whether an argument's text is always its value, so that the text can be returned as it arrives."""
        schema = self.schema(key)
        return choices(schema) is None and self.types(schema) == {"string"}

    def may_be_text(self, key: str) -> bool:
        """Return whether an argument may be a string that no ``enum`` or ``const`` restricts."""
        schema = self.schema(key)
        return choices(schema) is None and "string" in self.types(schema)

    def is_json(self, key: str) -> bool:
        """Return whether an argument is never a string, and no ``enum`` or ``const`` restricts it."""
        schema = self.schema(key)
        return choices(schema) is None and "string" not in self.types(schema)

    def value(self, key: str, text: str, is_text: bool | None = None) -> Any:
        """Return the value of an argument from the text between its markers.

        ``is_text``: True if the markers say that the value is a string, False if they say that it is not, else None.
        Raises ValueError for a text that must be JSON or a Python literal and is neither.
        """
        form = self.form
        if form.key_end.endswith("\n"):
            text = text.removeprefix("\n")
        if form.value_end.startswith("\n"):
            text = text.removesuffix("\n")
        inner = text.strip()
        if form.cdata and inner.startswith(CDATA) and inner.endswith(CDATA_END):
            text = inner[len(CDATA) : -len(CDATA_END)]
        return self._read(self.schema(key), text, is_text)

    def _read(self, schema: dict[str, Any], text: str, is_text: bool | None = None) -> Any:
        chosen = choices(schema)
        if chosen is not None:
            for value in chosen:
                if as_text(value) == text:
                    return value
        types = self.types(schema)
        if "string" not in types or (is_text is False and types != {"string"}):
            return _literal(text)
        if "any" in types:
            try:
                return decoded_json(text)
            except (ValueError, RecursionError):
                types = {"string", *_PYTHON}
        inner = text if types == {"string", "null"} else text.strip()
        for kind in types & _LOOKS.keys():
            if re.fullmatch(_LOOKS[kind], inner):
                try:
                    value = _literal(inner)
                except ValueError:
                    continue
                if self._fits(schema, value):
                    return value
        return text

    def _fits(self, schema: dict[str, Any], value: Any, depth: int = 0) -> bool:
        """Return whether a schema that also allows strings allows this value's type, members and size."""
        if depth == 0:
            self._fitting = {}
        key = id(schema), id(value)
        if key not in self._fitting:
            try:
                fits = any(self._fits_option(option, value, depth) for option in self.alternatives(schema))
            except InvalidRequestError:  # a part allows nothing, or cannot be read
                fits = False
            self._fitting[key] = schema, fits
        return self._fitting[key][1]

    def _fits_option(self, schema: dict[str, Any], value: Any, depth: int) -> bool:
        chosen = choices(schema)
        if chosen is not None:
            return any(type(value) is type(choice) and value == choice for choice in chosen)
        types = self.types(schema)
        kind = json_type(value)
        is_integer = kind == "number" and value == value // 1
        if "any" not in types and kind not in types and not (is_integer and "integer" in types):
            return False
        if depth > _DEEP:
            return True
        if kind == "number":
            return _in_range(schema, value)
        if kind == "array":
            if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
                return False
            return all(self._fits(self._item(schema, i), item, depth + 1) for i, item in enumerate(value))
        if kind == "object":
            names = _names(schema)
            is_closed = schema.get("additionalProperties") is False or names
            if not value.keys() >= set(schema.get("required", ())) or (
                is_closed and not value.keys() <= names
            ):
                return False
            return all(
                self._fits(self._member(schema, key), member, depth + 1) for key, member in value.items()
            )
        return True

    def typed(self, schema: dict[str, Any], value: Any) -> Any:
        """Convert a value that was read from a call to the types of its schema.

        Models also put quotes around values other than strings, so a string is converted where none is allowed.
        """
        if self._fits(schema, value):
            return value
        if isinstance(value, str):
            try:
                return value if "string" in self.types(schema) else self._read(schema, value)
            except ValueError:
                return value
        if isinstance(value, dict):
            option = self._object_option(schema, value.keys())
            return {key: self.typed(self._member(option, key), item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.typed(self._item(schema, i), item) for i, item in enumerate(value)]
        return value

    def _object_option(self, schema: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
        """Return the alternative of a schema that fits an object with these members."""
        objects = [option for option in self.alternatives(schema) if "object" in self.types(option)]
        return next((option for option in objects if _names(option).issuperset(keys)), (objects or [{}])[0])

    def _member(self, schema: dict[str, Any], key: str) -> dict[str, Any]:
        others = schema.get("additionalProperties")
        members = schema.get("properties", {})
        return self.resolved(members.get(key, others if isinstance(others, dict) else {}))

    def _item(self, schema: dict[str, Any], index: int) -> dict[str, Any]:
        arrays = [option for option in self.alternatives(schema) if "array" in self.types(option)]
        option = (arrays or [{}])[0]
        first = option.get("prefixItems", [])
        return self.resolved(first[index] if index < len(first) else option.get("items") or {})

    def shaped(self, schema: dict[str, Any], value: Any) -> Any:
        """Convert the text or members of a value in the style NESTED to the value. Raises ValueError as ``value``."""
        options = self.alternatives(schema)
        for option in options:
            for choice in choices(option) or ():
                if self._node(choice) == value:
                    return choice
        if len(options) > 1 and not isinstance(value, str):
            for option in options:
                self._n_tries += 1
                if self._n_tries > _MOST_TRIES:
                    break
                try:
                    result = self._shaped(option, value)
                except ValueError:
                    continue
                if self._fits(option, result):
                    return result
        return self._shaped(schema, value)

    def _shaped(self, schema: dict[str, Any], value: Any) -> Any:
        if isinstance(value, str):
            if not value.strip() and "string" not in self.types(schema):
                empty: dict[str, Any] = {"object": {}, "array": []}
                return next((empty[kind] for kind in empty if kind in self.types(schema)), None)
            return self._read(schema, value)
        keys = {key for key, _ in value}
        option = self._object_option(schema, keys)
        is_array = "array" in self.types(schema) and not _names(option).issuperset(keys)
        if keys == {self.form.item} and (is_array or "any" in self.types(schema)):
            return [self.shaped(self._item(schema, i), item) for i, (_, item) in enumerate(value)]
        return {key: self.shaped(self._member(option, key), item) for key, item in value}

    def _node(self, value: Any) -> Any:
        """Convert a value to its text or its members in the style NESTED."""
        if isinstance(value, dict) and value:
            return [(key, self._node(item)) for key, item in value.items()]
        if isinstance(value, list) and value:
            return [(self.form.item, self._node(item)) for item in value]
        return "" if value in ({}, []) else as_text(value)


def only_types(form: CallFormat, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters that only list the types of the arguments, for a schema that calls cannot follow exactly.

    Without these types, a string such as 12345 would be read as a number. If other keywords may allow further names,
    nothing is listed, because calls can contain only listed names.
    """
    anything: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
    parameters = with_nulls(parameters)
    reader = _Types(form, parameters)
    try:
        whole = reader.resolved(parameters)
        properties = None if whole.keys() & _WITH_NAMES else whole.get("properties")
        for name, member in (properties if isinstance(properties, dict) else {}).items():
            reader.check_name(name)
            anything["properties"][name] = reader.only_types(member)
    except InvalidRequestError:  # a reference or a name that calls cannot contain
        anything["properties"] = {}
    return anything


class _Types(TaggedArguments):
    """Finds the types of arguments in parameters that need not be enforceable."""

    def __init__(self, form: CallFormat, parameters: dict[str, Any]) -> None:
        super().__init__(form, {})
        self._root = parameters

    def only_types(self, member: Any) -> dict[str, Any]:
        try:
            types = self.types(self.resolved(member))
        except (InvalidRequestError, TypeError):  # TypeError: ``type`` lists an array or an object
            return {}
        if not types or not _JSON_TYPES.issuperset(types):  # also None, which some write for "null"
            return {}
        kinds = sorted(types)
        return {"type": kinds[0] if len(kinds) == 1 else kinds}


def _both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return a schema for the values that both schemas allow. The annotations of ``first`` win."""
    if not first or not second:
        return first or second
    both = {**second, **first}
    if any(
        group & first.keys() and group & second.keys()
        for group in _GROUPS
        if not _agree(group, first, second)
    ):
        return {"allOf": [first, second]}
    for key in (first.keys() & second.keys()) - NOTES:
        if _agree({key}, first, second):
            continue
        if key == "type":
            both[key] = _common(_listed(first[key]), _listed(second[key]))
        elif key == "enum" and len(first[key]) + len(second[key]) <= _MOST_COMPARED:
            known = {*map(identity, second[key])}
            both[key] = [value for value in first[key] if identity(value) in known]
        elif key in _BOTH and type(first[key]) is not bool and type(second[key]) is not bool:
            both[key] = _BOTH[key](first[key], second[key])
        else:
            return {"allOf": [first, second]}
    return both


def _agree(keys: Set[str], first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two schemas have equal values of these keywords."""
    return all(
        key in first and key in second and (first[key] is second[key] or _are_equal(first[key], second[key]))
        for key in keys
        if key in first or key in second
    )


def _are_equal(first: Any, second: Any) -> bool:
    return bool(first == second) and identity(first) == identity(second)  # True equals 1 in Python only


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _common(these: list[str], those: list[str]) -> list[str]:
    """Return the types that both lists name. Integers are numbers."""
    common = [name for name in these if name in those or (name == "integer" and "number" in those)]
    return common + ["integer"] * ("integer" in those and "number" in these and "integer" not in common)


def _allows_nothing(schema: dict[str, Any]) -> bool:
    """Return whether a schema without alternatives certainly allows no value."""
    if choices(schema) == [] or schema.get("type") == []:
        return True
    kinds = {"string": "Length", "array": "Items", "object": "Properties"}
    kind = schema.get("type")
    if isinstance(kind, list) and len(kind) == 1:
        kind = kind[0]
    if kind in ("integer", "number"):
        least, most = schema.get("minimum"), schema.get("maximum")
    elif isinstance(kind, str) and kind in kinds:
        least, most = schema.get(f"min{kinds[kind]}"), schema.get(f"max{kinds[kind]}")
    else:
        return False
    return isinstance(least, (int, float)) and isinstance(most, (int, float)) and least > most


def _in_range(schema: dict[str, Any], value: float) -> bool:
    """Return whether a number is within a schema's bounds and a multiple of its ``multipleOf``."""
    step = schema.get("multipleOf")
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        # Exactly: 0.3 is a multiple of 0.1. Nothing is a multiple of 0.
        and (step is None or (step != 0 and Fraction(str(value)) % Fraction(str(step)) == 0))
    )


def _names(schema: dict[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, dict) else set()


def _literal(text: str) -> Any:
    """Read a value from JSON, or from a Python literal, which some templates show. Raises ValueError for other text."""
    try:
        return decoded_json(text)
    except RecursionError:
        raise ValueError from None
    except ValueError as e:
        buffer = TextBuffer()
        buffer.feed(text.strip())
        buffer.ended = True
        reading = python_value(buffer)
        try:
            next(reading)
        except StopIteration as stop:
            if not buffer.n:
                return stop.value
        except Malformed:
            pass
        raise e


# Where a schema also allows strings, a text that matches one of these patterns is read as a value of that type.
_INTEGER = "-?(0|[1-9][0-9]*)"
_LOOKS = {
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]+)?([eE][+\-]?[0-9]+)?",
    "boolean": "(true|false|True|False)",
    "null": "(null|None)",
    "object": r"\{(?s:.*)\}",
    "array": r"\[(?s:.*)\]",
}
# Types whose literals differ between Python and JSON.
_PYTHON = ("boolean", "null", "object", "array")


def choices(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of ``const`` or ``enum`` that the type, bounds and lengths beside it allow.

    Returns None if there is neither, and for a schema with alternatives, which may each list some.
    """
    values = schema.get("enum")
    if any(isinstance(schema.get(key), list) for key in ("anyOf", "oneOf")):
        return None
    if "const" in schema:
        is_other = isinstance(values, list) and identity(schema["const"]) not in map(identity, values)
        values = [] if is_other else [schema["const"]]
    if not isinstance(values, list):
        return None
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else None
    return [value for value in values if (names is None or _is_of(value, names)) and _has_size(schema, value)]


def listed(schema: dict[str, Any]) -> list[Any] | None:
    """Return ``choices``. Raises InvalidRequestError if other keywords may exclude some of them."""
    values = choices(schema)
    if values is None:
        return None
    wrong: list[str] = [key for key in ("not", "allOf", "if") if key in schema]
    if "pattern" in schema and any(isinstance(value, str) for value in values):
        wrong.append("pattern")
    if any(isinstance(value, (dict, list)) for value in values):
        wrong += [key for group in _GROUPS for key in group if key in schema]
    if wrong:
        raise InvalidRequestError(
            f"parameters: {quoted(wrong[0])} cannot be combined with 'enum' or 'const' in this model's calls; list "
            "only the values that it allows"
        )
    return values


def of_kind(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the schema of the values of one type, without the keywords for other types."""
    kind = "number" if kind == "integer" else kind
    others = {keyword for other, group in _OF_OTHERS.items() if other != kind for keyword in group}
    if kind != "string":
        others |= {"minLength", "maxLength", "pattern", "format"}
    return {key: value for key, value in schema.items() if key not in others}


def _has_size(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a listed value has the length or the size that the schema allows."""
    if isinstance(value, str):
        return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    bounds = {
        key: bound for key, bound in schema.items() if not isinstance(bound, bool)
    }  # draft 4 has booleans
    return not is_number or _in_range(bounds, value)


def _is_of(value: Any, names: set[str]) -> bool:
    kind = json_type(value)
    return kind in names or (kind == "number" and "integer" in names and value == int(value))


def as_text(value: Any, ensure_ascii: bool = True) -> str:
    """Return a string as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=ensure_ascii)

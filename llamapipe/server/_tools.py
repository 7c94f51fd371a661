"""The tools of a request: the functions that the model sees, and the names by which the client knows their calls.

Chat completions and the Responses API define tools in different forms: ``{"type": "function", "function": {…}}`` and
``{"type": "function", …}``. Both can hold the same tools:

- a function is passed to the model unchanged;
- a custom tool takes free text, or text that follows a grammar. The model sees a function with one parameter,
  ``input``;
- a namespace holds functions and custom tools. The model sees them by their own name, or by ``namespace__name`` where
  two tools share one. A call is answered with the name and the namespace;
- a hosted tool, such as ``web_search``, can be run only by OpenAI's service or an editor's client. The model does not
  see it, and the header ``x-llamapipe-unused`` names it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llamapipe._messages import did_you_mean, listed, quoted
from llamapipe.chat.tools import check_n_tools
from llamapipe.errors import InvalidRequestError
from llamapipe.server.errors import ApiError, as_sent, wrong
from llamapipe.structured.regular import MOST_CHARACTERS, regular

_HOSTED = ("web_search", "web_search_preview", "file_search", "computer", "computer_use", "computer_use_preview",
           "code_interpreter", "image_generation", "mcp", "local_shell", "shell", "apply_patch", "tool_search",
           "programmatic_tool_calling")  # fmt: skip
_KINDS = ("function", "custom", "namespace", *_HOSTED)
_KEYS = {
    "function": {"name", "description", "parameters", "strict"},
    "custom": {"name", "description", "format"},
}
# The type of each field of a function, and the words for the type in messages.
_TYPES: dict[str, tuple[type, str]] = {
    "name": (str, "text"),
    "description": (str, "text"),
    "parameters": (dict, "a JSON schema, which is an object"),
    "strict": (bool, "true or false"),
}
_BESIDE = "in this API, name and parameters are at the same level as type"
_UNUSED_KEYS = ("output_schema", "defer_loading", "allowed_callers", "async", "cache_control")
_INPUT_BEGUN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_ESCAPED_END = re.compile(r"(?<!\\)(?:\\\\)*\\\$\Z")
_LONGEST_ESCAPE = 6  # characters, such as \u00e9
_MOST_CHARACTERS = 64  # characters of a tool's name
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class ClientName(NamedTuple):
    """The name by which a client knows a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class Tools(NamedTuple):
    """The tools of a request.

    ``functions``, ``tool_choice``: for the engine; ``functions`` is None if there are none. ``names``: the client's
    name of each function. ``unused``: hosted tools and options without effect, for the header. ``grammars``: for each
    custom tool's function, the request's field that holds its grammar.
    """

    functions: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any]
    names: dict[str, ClientName]
    unused: tuple[str, ...]
    grammars: dict[str, str]

    def client_name(self, name: str) -> ClientName:
        """Return the client's name of the tool that the model calls ``name``."""
        return self.names.get(name) or ClientName(name)


def tools_of(definitions: Sequence[Mapping[str, Any]] | None, tool_choice: Any, is_flat: bool) -> Tools:
    """Return the tools and the choice among them. Raises ApiError 400.

    ``is_flat``: the tools have the form of the Responses API.
    """
    check_number(definitions)
    listed: list[tuple[ClientName, dict[str, Any], str | None]] = []
    unused: list[str] = []
    for place, namespace, tool in _all(definitions or ()):
        kind = tool.get("type")
        if kind in ("function", "custom"):
            listed.append(_function(place, namespace, tool, is_flat or namespace is not None, unused))
        elif isinstance(kind, str) and (name := _hosted_name(kind)):
            unused.append(name)
        else:
            hint = did_you_mean(kind, _KINDS) if isinstance(kind, str) else ""
            what = "no type" if kind is None else f"the type {quoted(kind)}"
            raise ApiError(
                400,
                f"{place} has {what}; it may be function, custom or namespace{hint}",
                "tools",
            )
    n_called = Counter(known.name for known, _, _ in listed)
    names: dict[str, ClientName] = {}
    grammars: dict[str, str] = {}
    functions = []
    for known, function, grammar in listed:
        name = known.name if n_called[known.name] == 1 else qualify(known.name, known.namespace)
        if name in names:
            raise ApiError(400, f"tools: there are two tools called {quoted(name)}", "tools")
        names[name] = known
        if grammar is not None:
            grammars[name] = grammar
        functions.append({"type": "function", "function": {**function, "name": name}})
    left_out = tuple(f"tools.{name}" for name in dict.fromkeys(unused))
    whole = Tools(functions or None, "auto", names, left_out, grammars)
    return whole._replace(tool_choice=_choice(tool_choice, whole, is_flat))


def check_number(tools: Sequence[Any] | None) -> None:
    """Raise ApiError 400 for more tools than a grammar can hold, including tools in namespaces."""
    n = len(tools or ())
    for tool in tools or ():
        inner = tool.get("tools") if isinstance(tool, Mapping) else None
        n += len(inner) if isinstance(inner, list) else 0
    try:
        check_n_tools(n)
    except InvalidRequestError as e:
        raise ApiError(400, str(e), "tools") from None


def qualify(name: str, namespace: str | None) -> str:
    """Return ``namespace__name``, shortened to 64 characters, for a tool whose name another tool also has."""
    if namespace is None:
        return name
    full = f"{namespace}__{name}"
    if len(full) <= _MOST_CHARACTERS:
        return full
    return f"{full[: _MOST_CHARACTERS - 9]}_{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def _all(
    tools: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yield the field, namespace and definition of each tool. A namespace's first tool gets its description."""
    for i, tool in enumerate(tools):
        if tool.get("type") != "namespace":
            yield f"tools.{i}", None, tool
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(inner, list):
            raise ApiError(400, f"tools.{i}: a namespace needs a name and a list of tools", f"tools.{i}")
        about = tool.get("description")
        for j, member in enumerate(inner):
            if not isinstance(member, Mapping):
                raise ApiError(400, f"tools.{i}.tools.{j} must be an object", f"tools.{i}.tools.{j}")
            changed = {}
            if j == 0 and isinstance(about, str) and about:
                changed["description"] = f"{member.get('description') or ''}\n\n{name}: {about}".strip()
            yield f"tools.{i}.tools.{j}", name, {**member, **changed}


def _hosted_name(kind: str) -> str | None:
    """Return the name of a hosted tool with type ``kind``, without the date that some types end with.

    Returns None for any other type.
    """
    base = kind.rstrip("0123456789_")
    return base if base in _HOSTED else None


def _function(
    place: str, namespace: str | None, tool: Mapping[str, Any], is_flat: bool, unused: list[str]
) -> tuple[ClientName, dict[str, Any], str | None]:
    """Return the client's name of a function or a custom tool, and a function for the model.

    Also returns the request's field that holds the grammar of a custom tool's input, or None.
    """
    kind = str(tool["type"])
    inner = tool if is_flat else tool.get(kind)
    if not isinstance(inner, Mapping):
        raise ApiError(
            400, f'{place} must have the form {{"type": "{kind}", "{kind}": {{"name": ...}}}}', "tools"
        )
    own = {"type"} if inner is tool else {"type", kind}
    for fields, known in ((tool, own | _KEYS[kind] if inner is tool else own), (inner, _KEYS[kind] | own)):
        for key in fields.keys() - known:
            if fields[key] is None or fields[key] is False:
                continue
            if key not in _UNUSED_KEYS:
                hint = f"; {_BESIDE}" if is_flat and key == kind else did_you_mean(key, known, "tool")
                raise ApiError(400, f"{place}: unknown key {quoted(key)}{hint}", "tools")
            unused.append(key)
    _check_types(place if inner is tool else f"{place}.{kind}", inner)
    name, about = inner["name"], inner.get("description")
    if kind == "custom":
        grammar = _grammar(
            f"{place}.format" if inner is tool else f"{place}.custom.format", inner.get("format")
        )
        custom: dict[str, Any] = {"description": about or "", "parameters": _INPUT}
        if grammar is None:
            return ClientName(name, namespace, True), custom, None
        custom["description"] = f"{about or ''}\n\nThe input follows this grammar:\n{grammar.text}".strip()
        text = {"type": "string", "pattern": f"^(?:{grammar.regex})$"}
        custom |= {"parameters": {**_INPUT, "properties": {"input": text}}, "strict": True}
        return ClientName(name, namespace, True), custom, grammar.field
    function = {key: inner[key] for key in ("description", "parameters") if inner.get(key) is not None}
    if inner.get("strict") is True:
        function["strict"] = True
    return ClientName(name, namespace), function, None


def check_functions(tools: Sequence[Any] | None) -> None:
    """Raise ApiError 400, which names the field, for tools in OpenAI's form whose fields have wrong types."""
    for i, tool in enumerate(tools or ()):
        inner = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping):
            raise ApiError(400, f"tools.{i}.function must be an object", f"tools.{i}.function")
        _check_types(f"tools.{i}.function", inner)


def _check_types(place: str, function: Mapping[str, Any]) -> None:
    for key, (kind, needed) in _TYPES.items():
        value = function.get(key)
        if not isinstance(value, kind) and (value is not None or key == "name"):
            raise ApiError(400, f"{place}.{key} must be {needed}, not {as_sent(value)}", f"{place}.{key}")


class _Grammar(NamedTuple):
    """The grammar of a custom tool's input. ``field``: the request's field. ``regex``: a regex for the same texts."""

    field: str
    text: str
    regex: str


def _grammar(place: str, format_: Any) -> _Grammar | None:
    """Return the grammar in the ``format`` of a custom tool, whose form differs between the APIs.

    Returns None if any text is allowed. Raises ApiError 400, which names the field.
    """
    if format_ is None:
        return None
    if not isinstance(format_, Mapping):
        raise ApiError(400, f"{place} must be an object", place)
    kind = format_.get("type")
    if kind not in ("text", "grammar"):
        raise ApiError(
            400, f"{place}.type is {as_sent(kind)}; it may be 'text' or 'grammar'", f"{place}.type"
        )
    extra = format_.keys() - ({"type"} if kind == "text" else {"type", "grammar", "syntax", "definition"})
    if extra:
        raise wrong(place, min(extra), f"unknown key {quoted(min(extra))}")
    if kind == "text":
        return None
    inner = format_.get("grammar", format_)
    if inner is not format_:
        place += ".grammar"
    if not isinstance(inner, Mapping):
        raise ApiError(400, f"{place} must be an object", place)
    syntax, definition = inner.get("syntax"), inner.get("definition")
    if syntax not in ("lark", "regex"):
        raise ApiError(
            400, f"{place}.syntax is {quoted(syntax)}; it may be 'lark' or 'regex'", f"{place}.syntax"
        )
    field = f"{place}.definition"
    if not isinstance(definition, str) or not definition:
        raise ApiError(400, f"{field} must be the text of a grammar", field)
    if syntax == "regex":
        if len(definition) > MOST_CHARACTERS:
            raise ApiError(
                400, f"{field} has {len(definition)} characters; the limit is {MOST_CHARACTERS}", field
            )
        regex = definition.removeprefix("^")  # the grammar describes the whole input anyway
        return _Grammar(field, definition, regex if _ESCAPED_END.search(regex) else regex.removesuffix("$"))
    try:
        return _Grammar(field, definition, regular(definition))
    except InvalidRequestError as e:
        raise ApiError(400, f"{field}: {e}", field) from None


# ---- the choice
def _choice(chosen: Any, tools: Tools, is_flat: bool) -> str | dict[str, Any]:
    """Return the engine's ``tool_choice``. Raises ApiError 400."""
    if chosen is None:
        return "auto" if tools.functions else "none"
    if chosen == "any" and chosen not in tools.names:  # Mistral's word
        chosen = "required"
    if isinstance(chosen, str):
        if chosen not in ("auto", "none", "required") and not (chosen in tools.names and not is_flat):
            raise ApiError(
                400,
                f"tool_choice is {quoted(chosen)}; it may be 'auto', 'none', 'required' or an object that names a tool",
                "tool_choice",
            )
        if chosen == "auto" and not tools.functions:
            return "none"
        choice: str | dict[str, Any] = chosen
    elif isinstance(chosen, Mapping):
        choice = _named_choice(chosen, tools, is_flat)
    else:
        raise ApiError(400, "tool_choice must be text or an object", "tool_choice")
    if choice != "none" and not tools.functions:
        left_out = f"; {', '.join(tools.unused)} cannot be run here" if tools.unused else ""
        raise ApiError(400, f"tool_choice asks for a call, but there are no tools{left_out}", "tool_choice")
    return choice


def _named_choice(tool_choice: Mapping[str, Any], tools: Tools, is_flat: bool) -> str | dict[str, Any]:
    kind = tool_choice.get("type")
    if kind in ("auto", "none", "required", "any"):  # other servers' form
        return "required" if kind == "any" else str(kind)
    if kind == "allowed_tools":
        inner = tool_choice if is_flat else tool_choice.get("allowed_tools")
        mode = inner.get("mode") if isinstance(inner, Mapping) else None
        if mode not in ("auto", "required"):
            raise ApiError(
                400,
                f"tool_choice: mode is {as_sent(mode)}; it may be 'auto' or 'required'",
                "tool_choice.mode",
            )
        listed = inner.get("tools") if isinstance(inner, Mapping) else None
        if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
            raise ApiError(400, "tool_choice: tools must be a list of tools", "tool_choice.tools")
        named = _by_name(tools)
        allowed: dict[str, None] = {}
        for i, entry in enumerate(listed):
            if _hosted_name(str(entry.get("type"))) is None:
                place = f"tool_choice.tools.{i}" if is_flat else f"tool_choice.allowed_tools.tools.{i}"
                allowed |= dict.fromkeys(_choose(entry, tools, named, is_flat, place))
        if not allowed:
            if mode == "auto":
                return "none"
            raise ApiError(400, "tool_choice asks for a call, but allows no tool", "tool_choice.tools")
        functions = [{"type": "function", "function": {"name": name}} for name in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
    if isinstance(kind, str) and _hosted_name(kind):
        raise ApiError(
            400, f"tool_choice asks for the tool {quoted(kind)}, which cannot be run here", "tool_choice.type"
        )
    if kind not in ("function", "custom"):
        raise ApiError(
            400,
            f"tool_choice has the type {as_sent(kind)}; it may be 'function', 'custom' or 'allowed_tools'",
            "tool_choice.type",
        )
    return _choose(tool_choice, tools, _by_name(tools), is_flat)[0]


_Named = Mapping[tuple[bool, str], list[str]]


def _by_name(tools: Tools) -> _Named:
    """Return the names of the functions, by tool name (False) and by namespace (True)."""
    named: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for flat, known in tools.names.items():
        named[False, known.name].append(flat)
        if known.namespace is not None:
            named[True, known.namespace].append(flat)
    return dict(named)


def _choose(
    tool_choice: Mapping[str, Any], tools: Tools, named: _Named, is_flat: bool, place: str = "tool_choice"
) -> list[str]:
    """Return the functions that an object of the choice names: several for a namespace. Raises ApiError 400."""
    kind = tool_choice.get("type")
    inner = tool_choice if is_flat else tool_choice.get(str(kind))
    name = inner.get("name") if isinstance(inner, Mapping) else None
    space = inner.get("namespace") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        shown = kind if kind in ("custom", "namespace") else "function"
        form = '"name": …' if is_flat else f'"{shown}": {{"name": …}}'
        raise ApiError(
            400,
            f'{place} must have the form {{"type": "{shown}", {form}}} in this API',
            f"{place}.name" if is_flat else f"{place}.{shown}.name",
        )
    is_namespace = kind == "namespace"
    functions = named.get((is_namespace, name), [])
    if not is_namespace and space is not None:
        functions = [flat for flat in functions if tools.names[flat].namespace == space]
    if not functions:
        names = [known.name for known in tools.names.values()]
        raise ApiError(
            400,
            f"tool_choice names {quoted(name)}; the tools are {listed(names) or 'none'}"
            f"{did_you_mean(name, names)}",
            "tool_choice",
        )
    return functions


# ---- calls
def custom_input(arguments: str) -> str:
    """Return the input of a custom tool, from the arguments that the model wrote.

    If the arguments are cut off, returns the beginning of the input.
    """
    try:
        text = json.loads(arguments)["input"]
    except ValueError:
        return _input_start(arguments)
    except (KeyError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments


def _input_start(arguments: str) -> str:
    begun = _INPUT_BEGUN.match(arguments)
    if begun is None:
        return ""
    rest = arguments[begun.end() :]
    for n in range(min(len(rest), _LONGEST_ESCAPE) + 1):  # the cut may be inside an escape
        try:
            return str(json.loads(f'"{rest[: len(rest) - n]}"'))
        except ValueError:
            continue
    return ""


def custom_arguments(text: str) -> str:
    """Return the arguments that the model would write for a custom tool's input."""
    return json.dumps({"input": text}, ensure_ascii=False)

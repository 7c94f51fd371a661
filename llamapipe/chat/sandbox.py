"""The Jinja environment of chat templates: a template is a program that came with the weights, so it runs in a sandbox.

A template cannot read attributes that begin with an underscore, change the caller's values (jinja2's immutable
sandbox) or include files. Its iterations, characters and time are limited; see ``limits``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NoReturn, TypeAlias, cast

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llamapipe.chat.limits import check_arguments, current

# Slow for long texts, and of no use in a prompt.
_REMOVED_FILTERS = ("urlize", "wordwrap", "striptags", "xmlattr", "pprint")
_CHECKED_FILTERS = frozenset({"center", "indent", "batch", "slice", "truncate", "round", "tojson"})
_PADS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_SORTING = frozenset(
    {"sort", "groupby", "dictsort", "unique", "min", "max"}
)  # these make lower-case copies of texts
# These look at each item in Python, or make an object of each character or word.
_VISITING = _SORTING | {
    *(
        "batch",
        "items",
        "join",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
    ),
    *("sum", "title", "urlencode", "wordcount"),
}
# Filters and methods whose text may be longer than the given one, and by how much.
_GROWING = {"escape": 5, "e": 5, "forceescape": 5} | dict.fromkeys(
    ("upper", "lower", "capitalize", "casefold", "swapcase", "title"), 3
)
_SPLITTING = frozenset({"split", "rsplit", "splitlines"})
# Methods that make huge values from small ones, or bytes, which are not counted.
_FORBIDDEN = frozenset({"encode", "to_bytes", "from_bytes", "maketrans", "translate", "fromkeys"})
Test: TypeAlias = "Callable[..., Any]"


class FixedList(list[Any]):
    """A list of the caller, which a template cannot change. It can change the lists that it creates."""


class _Generation(Extension):
    """``{% generation %}`` marks the model's own text, for training; here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates whose loops, calls and operators are counted. Any thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # the optimizer evaluates constants while compiling, where nothing is counted
            finalize=_shown,
        )
        del self.globals["lipsum"]
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "safe": str}
        self.filters = {name: _counted_filter(name, one) for name, one in self.filters.items()}
        self.tests = {name: _counted_test(cast("Test", one)) for name, one in self.tests.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "range": _range}

    def compiled(self, source: str) -> Template:
        """Compiles a template. Raises the exceptions of jinja2 and of Python's compiler."""
        tree = self.parse(source)
        _Counting(self).visit(tree)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        if type(obj) is list and attr in ("append", "pop"):
            return True
        if attr in _FORBIDDEN and isinstance(obj, (str, int, dict, type)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator that could make a huge value."""
        current().check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """A call from a template."""
        limits = current()
        limits.check_time()
        method = getattr(function, "__wrapped__", function)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _PADS:
                widths = [abs(n) for n in (*arguments, *keywords.values()) if isinstance(n, int)]
                limits.use(sum(widths) * max(1, owner.count("\t")))
            elif name == "replace":
                limits.check_replace(owner, *(*arguments, None, None)[:2])
            elif name in _GROWING:
                limits.may_use(_GROWING[name] * len(owner))
            elif name in _SPLITTING:
                given = (*arguments, None, None)
                limits.check_split(
                    owner, name, keywords.get("sep", given[0]), keywords.get("maxsplit", given[1])
                )
            elif name == "join" and arguments:
                limits.visit(arguments[0])
                values = list(arguments[0])
                limits.check_join(owner, values)
                arguments = (values,)
            elif name in ("format", "format_map"):
                limits.check_format(owner, (*arguments, *keywords.values()))
        elif isinstance(owner, list) and name == "append":
            limits.use_deep(*arguments)
        result = super().call(context, function, *arguments, **keywords)
        limits.use_made(result)
        return result

    # ---- called by the nodes that _Counting adds
    def count_iteration(self, n_characters: int) -> None:
        """Counts one run of a loop's or a macro's body, and the literal text in it."""
        limits = current()
        limits.iterate()
        limits.use(n_characters)

    def count_literal(self, value: Any) -> Any:
        """Counts a list, tuple or dict literal of the template."""
        current().use_deep(value)
        return value

    def count_slice(self, value: Any) -> Any:
        """Counts a part of a value, which is a copy."""
        current().use_made(value)
        return value

    def count_compared(self, value: Any) -> Any:
        """Checks the time before a comparison."""
        current().check_time()
        return value

    def count_concat(self, *values: Any) -> str:
        """The operator ``~``."""
        current().use_text(*values)
        return "".join(map(str, values))


class _Counting(NodeTransformer):
    """Adds calls of the sandbox's counters to a parsed template."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def _call(self, name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
        function = nodes.EnvironmentAttribute(name)
        call = nodes.Call(function, arguments, [], None, None)
        call.set_lineno(lineno, override=False)
        call.set_environment(self._sandbox)
        return call

    def _with_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        n = sum(
            len(data.data)
            for child in node.body
            for data in (
                [child] if isinstance(child, nodes.TemplateData) else child.find_all(nodes.TemplateData)
            )
        )
        call = self._call("count_iteration", [nodes.Const(n, lineno=node.lineno)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno, environment=self._sandbox))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = _with_body  # noqa: N815

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        return self._call("count_literal", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _literal  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Counts slices."""
        self.generic_visit(node)
        return self._call("count_slice", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Checks the time before comparisons."""
        self.generic_visit(node)
        node.expr = self._call("count_compared", [node.expr], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Replaces the operator ``~``."""
        self.generic_visit(node)
        return self._call("count_concat", node.nodes, node.lineno)


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the value that is filtered

    @wraps(function)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        limits = current()
        limits.check_time()
        value, others = arguments[place], arguments[place + 1 :]
        if name in _CHECKED_FILTERS:
            check_arguments((*others, *keywords.values()))
        if name in _VISITING:
            limits.visit(value)
        if name in _GROWING and isinstance(value, str):
            limits.may_use(_GROWING[name] * len(value))
        if name == "indent" and isinstance(value, str):
            limits.check_split(value, "splitlines", None, None)
            width = others[0] if others else keywords.get("width", 4)
            limits.use(value.count("\n") * (len(width) if isinstance(width, str) else int(width)))
        elif name == "replace":
            old, new = (
                (*others, keywords.get("old"), keywords.get("new"))[:2]
                if len(others) != 1
                else (others[0], keywords.get("new"))
            )
            limits.check_replace(str(value), old, new)
        elif name == "join":
            values = list(value)
            separator = others[0] if others else keywords.get("d", "")
            limits.check_join(str(separator), values)
            arguments = (*arguments[:place], values, *others)
        elif name == "format":
            limits.check_format(str(value), (*others, *keywords.values()))
        elif name == "sum":
            check_start = others[1] if len(others) > 1 else keywords.get("start", 0)
            if not isinstance(check_start, (int, float)):
                raise TemplateError("sum: start must be a number")
        elif name == "string":
            limits.use_text(value)
        elif name == "tojson":
            limits.check_json(value, others[1] if len(others) > 1 else keywords.get("indent"))
        elif name in ("int", "float"):
            limits.check_number(value)
        elif name in _SORTING:
            if not isinstance(value, (str, Mapping)):
                value = list(value)
                arguments = (*arguments[:place], value, *others)
            limits.use_deep(value)
        result = function(*arguments, **keywords)
        limits.use_made(result)
        return _counted_items(result) if hasattr(result, "__next__") else result

    return counted


def _counted_items(items: Iterator[Any]) -> Iterator[Any]:
    """Counts the items of a lazy filter, such as ``map``, as they are read."""
    for item in items:
        current().iterate()
        yield item


def _counted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        current().check_time()
        return function(*arguments, **keywords)

    return counted


@pass_context
def _shown(context: Context, value: Any) -> Any:
    """Counts a value before it is written into the text."""
    current().use_text(value)
    return value


def _range(*arguments: int) -> range:
    numbers = range(*arguments)
    current().iterate(len(numbers))
    return numbers


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form[:100])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes plain JSON; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: Any) -> list[Any]:
    """The items of a lazy filter, such as ``map``."""
    if not hasattr(value, "__next__"):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    items = list(value)
    current().use_deep(items)
    return items


sandbox = Sandbox()

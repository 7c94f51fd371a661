"""The sandbox for chat templates. A template is a program that comes with the weights, so it is not trusted.

In jinja2's immutable sandbox, a template cannot read attributes that begin with an underscore, change the caller's
values or include files. But it may loop forever, or double a text until memory is full. So the sandbox counts every
loop, call, filter and operator that creates a value, in iterations, characters and time. It measures values before
Python copies them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from time import thread_time
from typing import Any, NoReturn, TypeAlias, cast

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError

MAX_ITERATIONS = 1_000_000
MAX_SIZE = 2**26
MAX_SECONDS = 5.0  # of processor time, because other work on the machine must not change a prompt
_MAX_ARGUMENT = 10_000  # for widths, precisions and numbers of columns
_MAX_BITS = 4096  # of an integer
_MAX_DIGITS = 1000  # characters of a text that is converted to a number
_MAX_INDENT = 100
_SCAN = 32  # weight of each character of a format string, which is scanned several times
_ITEM = 8  # weight of a list's item, in characters
_SCALAR = 32  # most characters of a float, True, None and other scalars; an int may have more
_REPR = 10  # most characters that Python writes for one character of a text inside a container
_JSON = 6  # most characters that JSON has for one character of a text
_LINE_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_VIEWS = frozenset(map(type, (dict[str, str]().keys(), dict[str, str]().values(), dict[str, str]().items())))
_CHECK_EVERY = 2**16  # values between two checks of the time
_FIELD_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{[^{]")  # widths that are too large or come from a value
_NUMBER = re.compile(r"\d+")


class LimitError(SecurityError):
    """A rendering exceeded a limit."""


class Limits:
    """The counts of one rendering, used by one thread. Methods that count raise LimitError above a limit.

    ``within``: the limits of an outer rendering, whose time the inner rendering shares.
    """

    def __init__(self, within: Limits | None = None) -> None:
        self._n_iterations = 0
        self._size = 0
        self._end: float = thread_time() + MAX_SECONDS if within is None else within._end

    def iterate(self, n: int = 1) -> None:
        """Count ``n`` iterations of loops or calls of macros, and check the time."""
        self._n_iterations += n
        if self._n_iterations > MAX_ITERATIONS:
            raise LimitError(f"the template made more than {MAX_ITERATIONS} iterations")
        self.check_time()

    def check_time(self) -> None:
        """Raise LimitError if the rendering has taken too long."""
        if thread_time() > self._end:
            raise LimitError(f"the template ran for more than {MAX_SECONDS:g} seconds")

    def use(self, size: int) -> None:
        """Count ``size`` characters or items of values that the template creates, and check the time."""
        self._size += size
        if self._size > MAX_SIZE:
            raise LimitError(f"the template made more than {MAX_SIZE} characters")
        self.check_time()

    def may_use(self, size: int) -> None:
        """Raise LimitError if a value of this size would be over the limit.

        The actual value may be smaller, so it is not counted.
        """
        if self._size + size > MAX_SIZE:
            raise LimitError(f"the template made more than {MAX_SIZE} characters")

    def visit(self, value: Any) -> None:
        """Count the items of a value, or the characters of a text, as iterations, because each becomes an object.

        Lazy values are not counted here, but as they are read.
        """
        if isinstance(value, (str, bytes, list, tuple, Mapping, Set, range)) or type(value) in _VIEWS:
            self.iterate(len(value))

    def use_text(self, *values: Any) -> None:
        """Count the text of these values. For one character inside a container, Python writes up to ten."""
        for value in values:
            before = self._size
            self.use_deep(value)
            if not isinstance(value, str):
                self.use(_SCALAR)
                if isinstance(value, int):
                    self.use(value.bit_length() // 3)
                elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
                    self.may_use(_REPR * (self._size - before))

    def use_deep(self, *values: Any) -> None:
        """Count all characters and items in nested values; a value that occurs twice counts twice."""
        n = n_seen = 0
        stack = list(values)
        while stack:
            value = stack.pop()
            n_seen += 1
            if n_seen % _CHECK_EVERY == 0:
                self.check_time()
            n += len(value) if isinstance(value, (str, bytes)) else 1
            if isinstance(value, Mapping):
                stack.extend(chain(value.keys(), value.values()))
            elif isinstance(value, (list, tuple, set, frozenset)):
                stack.extend(value)
            if self._size + n + len(stack) > MAX_SIZE:
                break
        self.use(n + len(stack))

    def use_made(self, value: Any) -> None:
        """Count a value that a call returned."""
        if isinstance(value, dict):  # in dict(a=x, b=x), x counts twice, because the dict's text repeats it
            self.use_deep(value)
            return
        if isinstance(value, int):
            _check_bits(value.bit_length())
        self.use(len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 1)

    # ---- operators and methods, before they run
    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Count the result of an operator."""
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                self.use(_size_of(left) + _size_of(right))
        elif operator == "*":
            for value, n in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(n, int):
                    self.use(_size_of(value) * max(n, 0))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            self.check_format(left, (right,))
        for value in (left, right):
            if isinstance(value, (bytes, bytearray)):
                raise LimitError("templates cannot compute with bytes")

    def check_format(self, form: str, values: Iterable[Any]) -> None:
        """Count the text that a format string creates. Each of its fields may show each value."""
        self.may_use(_SCAN * len(form))
        if _FIELD_WIDTH.search(form):
            raise LimitError(f"the format {quoted(form)} has a field that may be too wide")
        self.use(sum(map(int, _NUMBER.findall(form))))
        n_fields = form.count("%") + form.count("{")
        before = self._size
        self.use_text(*values)
        self.use(len(form) + n_fields * (self._size - before + _MAX_ARGUMENT // 100))

    def check_replace(self, text: str, old: Any, new: Any) -> None:
        """Count the text that results from a replacement."""
        if isinstance(old, str) and isinstance(new, str):
            self.use(len(text) + text.count(old) * len(new))

    def check_json(self, value: Any, indent: Any) -> None:
        """Count the JSON text of a value, including the indentation of its lines."""
        before = self._size
        self.use_deep(value)
        self.may_use(_JSON * (self._size - before))
        if indent is None:
            return
        if isinstance(indent, bool) or not isinstance(indent, int) or not 0 <= indent <= _MAX_INDENT:
            raise LimitError(f"tojson: indent must be a number from 0 to {_MAX_INDENT}")
        depth, level = 0, [value]
        while level:
            depth += 1
            inner: list[Any] = []
            for part in level:
                if isinstance(part, Mapping):
                    inner.extend(part.values())
                elif isinstance(part, (list, tuple)):
                    inner.extend(part)
            self.use(len(inner) * indent * depth)
            level = inner

    def check_number(self, value: Any) -> None:
        """Refuse to convert a long text to a number, because the time grows with the square of the length."""
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            raise LimitError(f"a number of {len(value)} characters; the limit is {_MAX_DIGITS}")

    def check_join(self, separator: str, values: list[Any]) -> None:
        """Count the text that results from joining values."""
        self.use(len(separator) * len(values))
        self.use_text(*values)

    def check_split(self, text: str, name: str, separator: Any, most: Any) -> None:
        """Count the parts into which a method splits a text."""
        if name == "splitlines":
            n = sum(map(text.count, _LINE_BREAKS))
        elif isinstance(separator, str) and separator:
            n = text.count(separator)
        else:
            n = len(text.split(None, MAX_ITERATIONS))
        self.iterate(min(n, most) if isinstance(most, int) and most >= 0 else n)


def _size_of(value: Any) -> int:
    return len(value) if isinstance(value, str) else _ITEM * len(value)


def check_arguments(arguments: Iterable[Any]) -> None:
    """Refuse widths and counts that are larger than any template needs. Raises LimitError."""
    for value in arguments:
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise LimitError(f"the argument {value} is over the limit of {_MAX_ARGUMENT}")


def _check_bits(n: int) -> None:
    if n > _MAX_BITS:
        raise LimitError(f"a number of {n} bits; the limit is {_MAX_BITS}")


_current: ContextVar[Limits | None] = ContextVar("limits", default=None)


def current() -> Limits:
    """Return the limits of this context's current rendering; new limits outside a rendering."""
    return _current.get() or Limits()


@contextmanager
def new_limits() -> Iterator[Limits]:
    """Start the counts of one rendering. Renderings inside the block share its time."""
    limits = Limits(_current.get())
    token = _current.set(limits)
    try:
        yield limits
    finally:
        _current.reset(token)


@contextmanager
def limited() -> Iterator[None]:
    """Limit several renderings to the time of one. Raises InvalidRequestError at the end if they took longer."""
    with new_limits() as limits:
        yield
        try:
            limits.check_time()
        except LimitError as e:
            raise InvalidRequestError(f"the chat template was stopped: {e}") from None


# Filters that are slow for long texts and useless in a prompt.
_REMOVED_FILTERS = ("urlize", "wordwrap", "striptags", "xmlattr", "pprint")
_CHECKED_FILTERS = frozenset({"center", "indent", "batch", "slice", "truncate", "round", "tojson"})
_PADS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
# Additional iterations for each value that a filter sorts, for making its key and comparing it.
_PER_SORTED = 3
# Filters that make lower-case copies of texts.
_SORTING = frozenset({"sort", "groupby", "dictsort", "unique", "min", "max"})
# Filters that read each item in Python, or make an object of each character or word.
_VISITING = _SORTING.union(
    "batch items join list map reject rejectattr reverse select selectattr slice sum title urlencode wordcount".split()
)
# Filters and methods whose result may be longer than the given text, and the most characters for one.
_GROWING = {"escape": 5, "e": 5, "forceescape": 5} | dict.fromkeys(
    ("upper", "lower", "capitalize", "casefold", "swapcase", "title"), 3
)
_SPLITTING = frozenset({"split", "rsplit", "splitlines"})
# Methods that create huge values from small ones, or bytes, which are not counted.
_FORBIDDEN = frozenset({"encode", "to_bytes", "from_bytes", "maketrans", "translate", "fromkeys"})
Test: TypeAlias = "Callable[..., Any]"


class FixedList(list[Any]):
    """A caller's list, which a template cannot change. A template can change only the lists that it creates."""


class _Generation(Extension):
    """Renders the content of ``{% generation %}`` without the tags, which mark the model's own text for training."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
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
            optimized=False,  # the optimizer evaluates constants during compilation, where nothing is counted
            finalize=_shown,
        )
        del self.globals["lipsum"]
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "safe": str}
        self.filters = {name: _counted_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _counted_test(cast("Test", test)) for name, test in self.tests.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "range": _range}

    def compiled(self, source: str) -> Template:
        """Compile a template. Raises the exceptions of jinja2 and Python's compiler."""
        tree = self.parse(source)
        _Counting(self).visit(tree)
        return self.from_string(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute."""
        if type(obj) is list and attr in ("append", "pop"):
            return True
        if attr in _FORBIDDEN and isinstance(obj, (str, int, dict, type)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that could create a huge value, after counting the value."""
        current().check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call a function for a template; count its result, and the results of some methods before the call."""
        if getattr(function, "__self__", None) is self:  # a counter, which no template can name
            return function(*arguments)
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
                positional = (*arguments, None, None)
                limits.check_split(
                    owner, name, keywords.get("sep", positional[0]), keywords.get("maxsplit", positional[1])
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
        """Count one run of a loop's or a macro's body, and the ``n_characters`` of literal text in the body."""
        limits = current()
        limits.iterate()
        limits.use(n_characters)

    def count_literal(self, value: Any) -> Any:
        """Count a list, tuple or dict literal of the template; return it."""
        current().use_deep(value)
        return value

    def count_slice(self, value: Any) -> Any:
        """Count a slice of a value, which is a copy; return it."""
        current().use_made(value)
        return value

    def count_compared(self, value: Any) -> Any:
        """Check the time before a comparison; return the value."""
        current().check_time()
        return value

    def count_concat(self, *values: Any) -> str:
        """Apply the operator ``~``, which joins the values' texts."""
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
        """Wrap slices in a call that counts them."""
        self.generic_visit(node)
        return self._call("count_slice", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Add a check of the time before comparisons."""
        self.generic_visit(node)
        node.expr = self._call("count_compared", [node.expr], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Replace the operator ``~`` with a call that counts its result."""
        self.generic_visit(node)
        return self._call("count_concat", node.nodes, node.lineno)


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # the index of the value that is filtered

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
            old = others[0] if others else keywords.get("old")
            limits.check_replace(str(value), old, others[1] if len(others) > 1 else keywords.get("new"))
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
            limits.iterate(_PER_SORTED * len(value))
            limits.use_deep(value)
        result = function(*arguments, **keywords)
        limits.use_made(result)
        return _counted_items(result) if hasattr(result, "__next__") else result

    return counted


def _counted_items(items: Iterator[Any]) -> Iterator[Any]:
    """Count the items of a lazy filter, such as ``map``, as they are read."""
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
    """Count the text of a value before jinja2 writes it; return the value."""
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


class JsonText(str):
    """JSON text in place of a value. ``tojson`` writes the text unchanged. The text may be incomplete."""

    __slots__ = ()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON, which jinja2's own filter would escape for HTML."""
    result = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )
    for text in _json_texts(value):
        result = result.replace(json.dumps(text, ensure_ascii=ensure_ascii), text)
    return result


def _json_texts(value: Any) -> Iterator[JsonText]:
    if isinstance(value, JsonText):
        yield value
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _json_texts(part)


def _as_list(value: Any) -> list[Any]:
    """Return the items of a lazy filter, such as ``map``."""
    if not hasattr(value, "__next__"):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    items = list(value)
    current().use_deep(items)
    return items


sandbox = Sandbox()

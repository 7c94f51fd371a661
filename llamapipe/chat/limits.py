"""Limits of one rendering: iterations, characters and time. Values are measured before Python copies them.

A template is a program that came with the weights. It may loop forever, or double a text until memory is full, so
every loop, call, filter and operator that creates a value is counted here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from time import monotonic
from typing import Any

from jinja2.exceptions import SecurityError

from llamapipe.arguments import quoted

MAX_ITERATIONS = 1_000_000
MAX_SIZE = 2**26
MAX_SECONDS = 5.0
_MAX_ARGUMENT = 10_000  # a width, a precision, a number of columns
_MAX_BITS = 4096
_MAX_DIGITS = 1000  # of a text that is converted to a number
_MAX_INDENT = 100
_SCAN = 32  # of a format's characters, which are looked at several times
_ITEM = 8  # bytes of a list's item, in characters
_SCALAR = 32  # most characters of a number that is no int, of True, None …
_REPR = 10  # most characters that show one of a text inside a container
_JSON = 6  # the same in JSON
_LINE_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_VIEWS = frozenset(map(type, (dict[str, str]().keys(), dict[str, str]().values(), dict[str, str]().items())))
_CHECK_EVERY = 2**16  # values, between two checks of the time
_FIELD_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{[^{]")  # too wide, or taken from a value
_NUMBER = re.compile(r"\d+")


class LimitError(SecurityError):
    """A rendering exceeded a limit."""


class Limits:
    """The counts of one rendering, used by one thread. Methods that count raise LimitError over a limit."""

    def __init__(self) -> None:
        self._n_iterations = 0
        self._size = 0
        self._end = monotonic() + MAX_SECONDS

    def iterate(self, n: int = 1) -> None:
        """Counts iterations of loops and calls of macros, and checks the time."""
        self._n_iterations += n
        if self._n_iterations > MAX_ITERATIONS:
            raise LimitError(f"the template made more than {MAX_ITERATIONS} iterations")
        self.check_time()

    def check_time(self) -> None:
        """Raises LimitError if the rendering has taken too long."""
        if monotonic() > self._end:
            raise LimitError(f"the template ran for more than {MAX_SECONDS:g} seconds")

    def use(self, size: int) -> None:
        """Counts characters and items of values that the template makes."""
        self._size += size
        if self._size > MAX_SIZE:
            raise LimitError(f"the template made more than {MAX_SIZE} characters")
        self.check_time()

    def may_use(self, size: int) -> None:
        """Raises LimitError if a value of this size would be over the limit, without counting it: it may be smaller."""
        if self._size + size > MAX_SIZE:
            raise LimitError(f"the template made more than {MAX_SIZE} characters")

    def visit(self, value: Any) -> None:
        """Counts the items of a value, or the characters of a text, as iterations: each becomes an object of Python.

        Lazy values are counted as they are read.
        """
        if isinstance(value, (str, bytes, list, tuple, Mapping, Set, range)) or type(value) in _VIEWS:
            self.iterate(len(value))

    def use_text(self, *values: Any) -> None:
        """Counts the text that shows these values. Python writes up to ten characters for one inside a container."""
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
        """Counts all characters and items in nested values; a value that occurs twice counts twice."""
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
        """Counts a value that a call returned."""
        if isinstance(value, dict):  # in dict(a=x, b=x), x counts twice: its text repeats it
            self.use_deep(value)
            return
        if isinstance(value, int):
            _check_bits(value.bit_length())
        self.use(len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 1)

    # ---- operators and methods, before they run
    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Counts the result of an operator."""
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
        """Counts the text that a format makes: each of its fields may show each value."""
        self.may_use(_SCAN * len(form))
        if _FIELD_WIDTH.search(form):
            raise LimitError(f"the format {quoted(form)} has a field that may be too wide")
        self.use(sum(map(int, _NUMBER.findall(form))))
        n_fields = form.count("%") + form.count("{")
        before = self._size
        self.use_text(*values)
        self.use(len(form) + n_fields * (self._size - before + _MAX_ARGUMENT // 100))

    def check_replace(self, text: str, old: Any, new: Any) -> None:
        """Counts the text that a replacement makes."""
        if isinstance(old, str) and isinstance(new, str):
            self.use(len(text) + text.count(old) * len(new))

    def check_json(self, value: Any, indent: Any) -> None:
        """Counts the JSON of a value, whose lines are indented by the depth."""
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
        """Refuses to convert a long text to a number: the time grows with the square of its length."""
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            raise LimitError(f"a number of {len(value)} characters; the limit is {_MAX_DIGITS}")

    def check_join(self, separator: str, values: list[Any]) -> None:
        """Counts a joined text."""
        self.use(len(separator) * len(values))
        self.use_text(*values)

    def check_split(self, text: str, name: str, separator: Any, most: Any) -> None:
        """Counts the parts into which a method splits a text."""
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
    """Refuses widths and counts that no template needs. Raises LimitError."""
    for value in arguments:
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise LimitError(f"the argument {value} is over the limit of {_MAX_ARGUMENT}")


def _check_bits(n: int) -> None:
    if n > _MAX_BITS:
        raise LimitError(f"a number of {n} bits; the limit is {_MAX_BITS}")


_current: ContextVar[Limits | None] = ContextVar("limits", default=None)


def current() -> Limits:
    """The limits of the rendering that runs on this thread; new ones outside a rendering."""
    return _current.get() or Limits()


@contextmanager
def new_limits() -> Iterator[Limits]:
    """Starts counting for one rendering."""
    limits = Limits()
    token = _current.set(limits)
    try:
        yield limits
    finally:
        _current.reset(token)

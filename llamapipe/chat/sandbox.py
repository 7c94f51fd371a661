"""The Jinja environment of chat templates: a template is a program that came with the weights, so it runs in a sandbox.

Besides what Jinja's immutable sandbox forbids, a template cannot loop or grow without bound: ``range`` gives at most
``MAX_ITERATIONS`` numbers in one rendering, and no text gets longer than ``MAX_CHARACTERS``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_ITERATIONS = 1_000_000
MAX_CHARACTERS = 2**26
_PADS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training; here it is only what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operation that could make a huge value."""
        if operator == "**" and (abs(left) > 10**6 or abs(right) > 64):
            raise SecurityError(f"{left} ** {right} is too large")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("the % operator on text is not supported; use ~ or format")
        if operator == "*":
            for text, n in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(n, int):
                    _check_size(len(text) * n)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """A call from a template."""
        if isinstance(getattr(function, "__self__", None), str):
            name = function.__name__
            if name in _PADS:
                _check_size(max((n for n in arguments if isinstance(n, int)), default=0))
            elif name in ("join", "replace"):
                result = function(*arguments, **keywords)
                _check_size(len(result))
                return result
        return super().call(context, function, *arguments, **keywords)


def _check_size(n: int) -> None:
    if n > MAX_CHARACTERS:
        raise SecurityError(f"a text of {n} characters; the limit is {MAX_CHARACTERS}")


def environment() -> ImmutableSandboxedEnvironment:
    """The environment in which templates are compiled, with the names that they are written for."""
    made = _Sandbox()
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


def limited_range() -> Callable[..., range]:
    """A ``range`` for one rendering, which gives at most ``MAX_ITERATIONS`` numbers in all."""
    left = MAX_ITERATIONS

    def limited(*arguments: int) -> range:
        nonlocal left
        numbers = range(*arguments)
        left -= len(numbers)
        if left < 0:
            raise SecurityError(f"range() gave more than {MAX_ITERATIONS} numbers")
        return numbers

    return limited


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter would write it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

"""Unknown keywords of a call, explained: sampling options belong into ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llamapipe.arguments import checked_call, nearest, quoted
from llamapipe.engine.params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)


def explains_keywords(function: F) -> F:
    """A method whose TypeError for an unknown keyword shows the call that was meant."""
    code = function.__code__
    known = frozenset(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])

    def check(keywords: dict[str, Any]) -> None:
        if not keywords.keys() <= known:
            raise TypeError(_explanation(function.__name__, keywords, known))

    return checked_call(function, check)


def _explanation(name: str, keywords: dict[str, Any], known: frozenset[str]) -> str:
    wrong = [keyword for keyword in keywords if keyword not in known]
    if all(keyword in _SAMPLING for keyword in wrong):
        options = ", ".join(f"{keyword}={quoted(keywords[keyword])}" for keyword in wrong)
        return f"sampling options are fields of SamplingParams: {name}(prompt, lp.SamplingParams({options}))"
    unknown = next(keyword for keyword in wrong if keyword not in _SAMPLING)
    near = nearest(unknown, known | _SAMPLING)
    hint = f"did you mean {near}?" if near else f"it has: {', '.join(sorted(known - {'prompt', 'params'}))}"
    return f"{name}() has no option {quoted(unknown)}; {hint}"

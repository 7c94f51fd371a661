"""Checks of arguments, made before any C call: a failed GGML_ASSERT would end the process.

Every check returns the value in its plain Python type, or raises an error that names the argument, the value and the
limit.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Set
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
_MOST_QUOTED = 100  # characters of a value in a message
_MOST_LISTED = 20
_BOOLS = (bool, np.bool_)  # integers and numbers to Python, and to older numpy


def path_of(path: str | os.PathLike[str]) -> Path:
    """``path`` as a Path, with ``~`` as a shell has it; a file whose name begins with ``~`` stays itself.

    Raises TypeError for other types, ValueError if there is no home folder to take.
    """
    found = Path(os.fsdecode(path))
    if not str(found).startswith("~") or found.exists():
        return found
    try:
        return found.expanduser()
    except RuntimeError as e:
        raise ValueError(f"{found}: {e}; write the whole path") from None


def check_int(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """``value`` as an int within ``[low, high]``.

    Raises TypeError if it is not an integer (bools are rejected), ValueError outside the range.
    """
    if isinstance(value, _BOOLS):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if not low <= n <= high:
        raise ValueError(f"{name} is {shown(n)}; it must be from {low} to {high}")
    return n


def check_float(name: str, value: SupportsFloat, low: float, high: float) -> float:
    """``value`` as a float within ``[low, high]``.

    Raises TypeError if it is not a number (bools and strings are rejected), ValueError outside the range and for NaN.
    """
    if isinstance(value, (*_BOOLS, str, bytes, bytearray)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}") from None
    except OverflowError:  # an int beyond every float
        raise ValueError(
            f"{name} is a number of over 300 digits; it must be from {low:g} to {high:g}"
        ) from None
    if not low <= number <= high:  # also refuses NaN
        raise ValueError(f"{name} is {number}; it must be from {low:g} to {high:g}")
    return number


def check_flag(name: str, value: object) -> bool:
    """``value`` if it is a bool, else TypeError: a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {type(value).__name__}")
    return value


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """``value`` if it is one of ``choices``. Raises TypeError if it is not a str, ValueError for any other str."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    known = list(choices)
    if value not in known:
        hint = did_you_mean(value, known)
        raise ValueError(f"{name} is {quoted(value)}; it must be one of {', '.join(map(repr, known))}{hint}")
    return value


def refuse_table(name: str, value: object) -> None:
    """Raises TypeError for a DataFrame: iterating over one gives the names of its columns."""
    if hasattr(value, "columns") and (hasattr(value, "to_dict") or hasattr(value, "to_pylist")):
        raise TypeError(
            f"{name} is a {type(value).__name__}; give one of its columns as a list, such as table['text'].to_list(), "
            "or its rows as dicts, such as table.to_dict('records'), to llamapipe.batch"
        )


def from_column(name: str, value: Any) -> Any:
    """``value``, but a list of its values if it is a column of a pandas, polars or pyarrow table.

    Raises TypeError for a whole table.
    """
    if not isinstance(value, (str, list, tuple)):
        refuse_table(name, value)
        if hasattr(value, "column_names"):  # rows of a data set, which are read one by one
            return value
        for method in ("to_list", "to_pylist"):
            if callable(convert := getattr(value, method, None)):
                return convert()
    return value


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The same name in another case, else the most similar known name, else the shortest one that begins with ``name``.

    None: there is none.
    """
    from difflib import get_close_matches

    if len(name) > _MOST_QUOTED:
        return None
    names = sorted(known)
    same = [one for one in names if one.lower() == name.lower()]
    close = same or get_close_matches(name, names, 1)
    longer = [one for one in names if len(name) > 2 and one.startswith(name)]
    return close[0] if close else min(longer, key=len, default=None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion to append to a message about an unknown name: the nearest known name, or an empty text."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near}?"


def unknown_attribute(
    owner: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> AttributeError:
    """An AttributeError for a missing attribute, with what to do instead, from ``elsewhere``, or the nearest one."""
    public = [one for one in known if not one.startswith("_")]
    hint = f"; {elsewhere[name]}" if name in elsewhere else did_you_mean(name, public)
    # With a name and no object, Python's traceback adds no suggestion of its own.
    return AttributeError(f"{owner} has no attribute {quoted(name)}{hint}", name=name)


def explains_options(elsewhere: Mapping[str, Iterable[str]] | None = None) -> Callable[[F], F]:
    """A decorator. For an unknown keyword, the TypeError names the nearest option, or the class that has the option.

    ``elsewhere``: the names of other classes' options, by class.
    """

    def decorate(function: F) -> F:
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = frozenset(names) - {"self", "cls"}
        shown = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        def check(keywords: dict[str, Any]) -> None:
            if not keywords.keys() <= known:
                raise TypeError(wrong_option(shown, min(keywords.keys() - known), known, elsewhere or {}))

        return checked_call(function, check)

    return decorate


def checked_call(function: F, check: Callable[[dict[str, Any]], None]) -> F:
    """A function that passes its keywords to ``check`` first; still a coroutine function if it was one."""

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        check(keywords)
        return function(*arguments, **keywords)

    @wraps(function)
    async def acall(*arguments: Any, **keywords: Any) -> Any:
        check(keywords)
        return await function(*arguments, **keywords)

    return cast(F, acall if iscoroutinefunction(function) else call)


def explains_fields(cls: C) -> C:
    """``explains_options`` for the constructor of a dataclass."""
    setattr(cls, "__init__", explains_options()(vars(cls)["__init__"]))  # noqa: B010 - mypy refuses to assign it
    return cls


def wrong_option(name: str, wrong: str, known: Iterable[str], elsewhere: Mapping[str, Iterable[str]]) -> str:
    """The message about an unknown option of a function."""
    for owner, names in elsewhere.items():
        if wrong in names:
            return f"{name}() has no option {quoted(wrong)}: it is an option of {owner}"
    hint = did_you_mean(wrong, known) or f"; it has: {', '.join(sorted(known))}"
    return f"{name}() has no option {quoted(wrong)}{hint}"


def check_tokens(name: str, tokens: Iterable[SupportsIndex], n_vocab: int) -> list[int]:
    """``tokens`` as a list of ints, each a token of the vocabulary.

    Raises TypeError if it is not a sequence of integers (bools are rejected), ValueError for an id outside the
    vocabulary.
    """
    try:
        if isinstance(tokens, (str, bytes, bytearray, Mapping, Set)):
            raise TypeError
        array = getattr(tokens, "tolist", None)  # numpy: Python's own integers at once
        ids: list[Any] = list(tokens) if array is None or getattr(tokens, "ndim", 0) != 1 else array()
    except TypeError:
        raise TypeError(f"{name} must be a sequence of token ids, not {type(tokens).__name__}") from None
    kinds = set(map(type, ids))
    try:
        if not kinds <= {int}:
            ids = [operator.index(_not_bool(item)) for item in ids]
    except TypeError:
        wrong = ", ".join(sorted(kind.__name__ for kind in kinds if kind is not int))
        raise TypeError(f"{name} must be a sequence of token ids (integers), not of {wrong}") from None
    if ids and not (min(ids) >= 0 and max(ids) < n_vocab):
        bad = next(i for i in ids if not 0 <= i < n_vocab)
        raise ValueError(
            f"{name} contains the token id {shown(bad)}; this vocabulary has the ids 0 to {n_vocab - 1}"
        )
    return ids


def shown(n: int) -> str:
    """A number as text for a message; Python refuses to write integers of over 4,300 digits."""
    return str(n) if abs(n) < 10**40 else f"{'-' if n < 0 else ''}a number of {n.bit_length()} bits"


def quoted(value: object) -> str:
    """A value as Python writes it, for a message; cut after about 100 characters."""
    if isinstance(value, int):
        return shown(value) if type(value) is int else repr(value)
    is_text = isinstance(value, (str, bytes, bytearray))
    try:
        text = repr(value[:_MOST_QUOTED] if is_text and len(value) > _MOST_QUOTED else value)  # type: ignore[arg-type, index]
    except (ValueError, RecursionError):  # integers of over 4,300 digits in it; lists in lists
        return f"a {type(value).__name__} that is too large to show"
    if is_text and len(value) > _MOST_QUOTED:  # type: ignore[arg-type]
        return f"{text[:-1]}…{text[-1]}"
    return text if len(text) <= _MOST_QUOTED + 2 else f"{text[:_MOST_QUOTED]}…"


def listed(names: Iterable[object]) -> str:
    """Values for a message, the first 20 of them."""
    texts = [quoted(name) for name in names]
    more = len(texts) - _MOST_LISTED
    return ", ".join(texts[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _not_bool(value: Any) -> Any:
    if isinstance(value, _BOOLS):
        raise TypeError
    return value

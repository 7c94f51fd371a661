"""Argument checks, which run before any C call: a failed GGML_ASSERT would end the process.

Every check returns the value in its plain Python type, or raises an error that names the argument, the value and the
limit.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat, SupportsIndex, TypeVar

import numpy as np

from llamapipe._messages import did_you_mean, quoted, shown
from llamapipe._options import BY_NAME, Option
from llamapipe._sampling_table import Kind

_K = TypeVar("_K")
_V = TypeVar("_V")


class FrozenDict(dict[_K, _V]):
    """A dict that cannot be changed, for fields of frozen dataclasses.

    Copying, pickling, ``dataclasses.asdict`` and writing as JSON work as with any dict, unlike with a mappingproxy.
    """

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping cannot be changed; make a dict of it, and change that")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[_K, _V]], tuple[dict[_K, _V]]]:
        return FrozenDict, (dict(self),)


_BOOLS = (bool, np.bool_)  # Python and older numpy treat bools as integers


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a Path. ``~`` is expanded as in a shell, unless a file has exactly that name.

    Raises TypeError for other types, ValueError if there is no home folder.
    """
    result = Path(os.fsdecode(path))
    if not str(result).startswith("~") or result.exists():
        return result
    try:
        return result.expanduser()
    except RuntimeError as e:
        raise ValueError(f"{result}: {e}; write the whole path") from None


def check_int(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """Return ``value`` as an int within ``[low, high]``.

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
    """Return ``value`` as a float within ``[low, high]``.

    Raises TypeError if it is not a number (bools and strings are rejected), ValueError outside the range and for NaN.
    """
    if isinstance(value, (*_BOOLS, str, bytes, bytearray)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}") from None
    except OverflowError:  # an int that is too large for a float
        raise ValueError(
            f"{name} is a number of over 300 digits; it must be from {low:g} to {high:g}"
        ) from None
    if not low <= number <= high:  # also refuses NaN
        raise ValueError(f"{name} is {number}; it must be from {low:g} to {high:g}")
    return number


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool, else raise TypeError: a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {type(value).__name__}")
    return value


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``. Raises TypeError if it is not a str, ValueError for another str."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    known = list(choices)
    if value not in known:
        hint = did_you_mean(value, known)
        raise ValueError(f"{name} is {quoted(value)}; it must be one of {', '.join(map(repr, known))}{hint}")
    return value


def int_of(name: str, value: SupportsIndex, rows: Mapping[str, Option] = BY_NAME) -> int:
    """Return ``value`` as an int in the range of the option's row. Raises as ``check_int`` does."""
    option = rows[name]
    return check_int(name, value, int(option.low), int(option.high))


def float_of(name: str, value: SupportsFloat) -> float:
    """Return ``value`` as a float in the range of the option's row. Raises as ``check_float`` does."""
    option = BY_NAME[name]
    return check_float(name, value, option.low, option.high)


def choice_of(name: str, value: object, rows: Mapping[str, Option] = BY_NAME) -> str:
    """Return ``value`` if the option's row lists it. Raises as ``check_choice`` does."""
    return check_choice(name, value, rows[name].choices)


def check_option(option: Option, value: Any) -> None:
    """Check a value by the option's row. Raises TypeError, ValueError."""
    if value is None and option.optional:
        return
    if option.kind in (Kind.INT, Kind.SIZE):
        check_int(option.name, value, int(option.low), int(option.high))
    elif option.kind is Kind.FLOAT:
        check_float(option.name, value, option.low, option.high)
    elif option.kind is Kind.FLAG:
        check_flag(option.name, value)
    elif option.choices:
        check_choice(option.name, value, option.choices)


def refuse_table(name: str, value: object) -> None:
    """Raise TypeError for a DataFrame: iterating over one gives the names of its columns."""
    if hasattr(value, "columns") and (hasattr(value, "to_dict") or hasattr(value, "to_pylist")):
        raise TypeError(
            f"{name} is a {type(value).__name__}; give one of its columns as a list, such as table['text'].to_list(), "
            "or its rows as dicts, such as table.to_dict('records'), to llamapipe.run_batch"
        )


def from_column(name: str, value: Any) -> Any:
    """Return ``value``, or a list of its values if it is a column of a pandas, polars or pyarrow table.

    Raises TypeError for a whole table.
    """
    if not isinstance(value, (str, list, tuple)):
        refuse_table(name, value)
        if hasattr(value, "column_names"):  # a data set, whose rows are read one by one
            return value
        for method in ("to_list", "to_pylist"):
            if callable(convert := getattr(value, method, None)):
                return convert()
    return value


def check_tokens(name: str, tokens: Iterable[SupportsIndex], n_vocab: int) -> list[int]:
    """Return ``tokens`` as a list of ints, each a token of the vocabulary.

    Raises TypeError if ``tokens`` is not a sequence of integers (bools are rejected), ValueError for an id outside the
    vocabulary.
    """
    try:
        if isinstance(tokens, (str, bytes, bytearray, Mapping, Set)):
            raise TypeError
        array = getattr(tokens, "tolist", None)  # numpy converts all values to Python integers in one call
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


def _not_bool(value: Any) -> Any:
    if isinstance(value, _BOOLS):
        raise TypeError
    return value

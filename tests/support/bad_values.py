"""Values that must be refused wherever a number, an integer, a flag or token ids are wanted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

NAN, INF = math.nan, math.inf


class Bad(NamedTuple):
    """A value and the kind of error it is answered with."""

    value: Any
    error: type[Exception]

    def __repr__(self) -> str:
        try:
            text = repr(self.value)
        except ValueError:  # Python writes no number of over 4,300 digits out
            text = "huge"
        return f"{type(self.value).__name__} {text}"


def _each(error: type[Exception], *values: Any) -> list[Bad]:
    return [Bad(value, error) for value in values]


NUMBERS = [
    *_each(ValueError, NAN, INF, -INF, 10**400, np.float32("nan")),
    *_each(TypeError, "0.5", b"1", None, True, np.True_, [0.5], 1j, {}),
]
INTEGERS = [
    *_each(ValueError, -(2**31) - 1, -(10**5000), 10**5000, 2**64),
    *_each(TypeError, 1.0, NAN, "1", b"1", None, True, np.True_, [1], 1j, np.float64(1)),
]
FLAGS = _each(TypeError, 0, 1, None, "no", "", 0.0, [])
CHOICES = [*_each(ValueError, "", "x", "F16", "f16 "), *_each(TypeError, None, 1, True, ["f16"], {}, b"f16")]
# With a vocabulary of 512 pieces; what is no sequence at all follows after the sequences.
TOKENS = [
    *_each(ValueError, [-1], [512], [5, 2**31], [2**63], [10**5000], [-(10**5000)]),
    *_each(TypeError, [1, 1.0], [1, NAN], [1, "1"], [1, True], [1, None], [1, [1]], [1, 1j]),
    *_each(ValueError, np.array([512]), np.array([2**63], np.uint64)),
    *_each(TypeError, np.array([1.0]), np.array([True]), np.array(["1"]), np.array(5)),
    *_each(TypeError, 5, None, 1.5, {1, 2}, {1: 2}, True),
]


def names(case: object) -> str | None:
    """``ids=names`` for the lists above."""
    return repr(case) if isinstance(case, Bad) else None

"""Checks of arguments, made before any C call: a failed GGML_ASSERT would end the process."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex


def check_int(name: str, value: SupportsIndex, low: int, high: int) -> int:
    """``value`` as an int within ``[low, high]``.

    Raises TypeError for what is not an integer (bool included), ValueError outside the range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not bool")
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if not low <= n <= high:
        raise ValueError(f"{name} is {n}; it must be from {low} to {high}")
    return n


def check_tokens(name: str, tokens: Iterable[SupportsIndex], n_vocab: int) -> list[int]:
    """``tokens`` as a list of ints, each a token of the vocabulary.

    Raises TypeError when it is no iterable of integers, ValueError for an id outside ``[0, n_vocab)``.
    """
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"{name} must be token ids, not {type(tokens).__name__}")
    try:
        ids = list(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers (token ids)") from None
    if ids and not (min(ids) >= 0 and max(ids) < n_vocab):
        bad = next(i for i in ids if not 0 <= i < n_vocab)
        raise ValueError(
            f"{name} contains the token id {bad}; this vocabulary has the ids 0 to {n_vocab - 1}"
        )
    return ids

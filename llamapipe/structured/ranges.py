"""Writes regular expressions of the numbers within bounds, exact for any count of digits."""

from __future__ import annotations

from fractions import Fraction


def integer_range(low: int | None, high: int | None) -> str:
    """A regular expression of the integers from ``low`` to ``high``, both included; None: without a bound."""
    parts = []
    if low is None or low < 0:
        parts.append(
            f"-(?:{_natural_range(max(1, -high) if high is not None else 1, None if low is None else -low)})"
        )
    if (low is None or low <= 0) and (high is None or high >= 0):
        parts.append("0")
    if high is None or high > 0:
        parts.append(_natural_range(1 if low is None else max(1, low), high))
    return "|".join(parts)


_FRACTION = r"(?:\.[0-9]+)?"


def number_bound(bound: Fraction, keyword: str) -> str:
    """A regular expression of the decimal numbers, without exponents, that one bound allows.

    ``bound`` has finitely many digits. ``keyword``: ``minimum``, ``maximum``, ``exclusiveMinimum`` or
    ``exclusiveMaximum``.
    """
    is_exclusive = keyword.startswith("exclusive")
    is_upper = keyword.endswith("aximum")
    size = abs(bound)
    sign, other = ("-", "") if bound < 0 or (bound == 0 and is_upper) else ("", "-")
    if bound == 0 or (bound > 0) != is_upper:  # away from zero
        zero = [r"-?0(?:\.0+)?"] if bound == 0 and not is_exclusive else []
        return "|".join([f"{sign}(?:{_far_from(size, is_exclusive)})", *zero])
    up_to = _up_to(size, is_exclusive)
    below = [r"-?0(?:\.0+)?"]
    if up_to:
        below.append(f"{sign}(?:{up_to})")
    return "|".join([f"{other}(?:{_far_from(Fraction(0), False)})", *below])


def _digits(size: Fraction) -> tuple[int, str]:
    """The whole part, and the digits after the point."""
    whole, rest = divmod(size, 1)
    digits = ""
    while rest:
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    return int(whole), digits


def _far_from(size: Fraction, is_exclusive: bool) -> str:
    """Numbers of at least ``size``, or of more than it."""
    whole, digits = _digits(size)
    above = r"[0-9]*[1-9][0-9]*" if is_exclusive else "[0-9]*"
    parts = [f"(?:{_natural_range(whole + 1, None)}){_FRACTION}"]
    for i, digit in enumerate(digits):
        if digit != "9":
            parts.append(rf"{whole}\.{digits[:i]}[{int(digit) + 1}-9][0-9]*")
    if digits:
        parts.append(rf"{whole}\.{digits}{above}")
    else:
        parts.append(rf"{whole}\.{above}" if is_exclusive else f"{whole}{_FRACTION}")
    return "|".join(parts)


def _up_to(size: Fraction, is_exclusive: bool) -> str:
    """Numbers from 0 up to ``size``, or below it."""
    whole, digits = _digits(size)
    parts = [] if whole == 0 else [f"(?:{integer_range(0, whole - 1)}){_FRACTION}"]
    if not digits:
        return "|".join([*parts, *([] if is_exclusive else [rf"{whole}(?:\.0+)?"])])
    parts.append(rf"{whole}(?:\.0+)?")
    for i, digit in enumerate(digits):
        if i:
            parts.append(rf"{whole}\.{digits[:i]}0*")
        if digit != "0":
            parts.append(rf"{whole}\.{digits[:i]}[0-{int(digit) - 1}][0-9]*")
    if not is_exclusive:
        parts.append(rf"{whole}\.{digits}0*")
    return "|".join(parts)


def _natural_range(low: int, high: int | None) -> str:
    """The same from ``low``, which is 1 or more."""
    n_low = len(str(low))
    if high is None:
        return f"{_same_length(str(low), '9' * n_low)}|[1-9][0-9]{{{n_low},}}"
    n_high = len(str(high))
    if n_low == n_high:
        return _same_length(str(low), str(high))
    parts = [_same_length(str(low), "9" * n_low)]
    if n_high - n_low > 1:
        parts.append(f"[1-9][0-9]{{{n_low},{n_high - 2}}}")
    return "|".join([*parts, _same_length("1" + "0" * (n_high - 1), str(high))])


def _same_length(low: str, high: str) -> str:
    n = len(low)
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{n}}}"
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    if n == 1:
        return f"[{low}-{high}]"
    parts, first, last = [], int(low[0]), int(high[0])
    if low[1:].strip("0"):
        parts.append(low[0] + _same_length(low[1:], "9" * (n - 1)))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _same_length("0" * (n - 1), high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{n - 1}}}")
    return f"(?:{'|'.join(parts)})"

"""Writes patterns with look-ahead as Lark.

Lark has "and" and "not" for whole terminals, and no look-ahead inside them.
"""

from __future__ import annotations

import re

LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def without_look_around(pattern: str) -> str | None:
    """A pattern with ``(?=`` and ``(?!`` between its top-level parts, in Lark; None if they stand elsewhere."""
    if len(pattern) > _MOST_CHARS:
        return None
    options = [_sequence(option, '""') for option in _split(pattern)]
    return None if None in options else " | ".join(f"({option})" for option in options)


_MOST_CHARS = 2000
_MOST_LARK_CHARS = 50_000  # what follows a group is written once for each of its options
_ATOM = re.compile(
    r"(?P<look>\(\?<?[=!])|(?P<group>\((?:\?:|\?P?<\w+>)?)|"
    r"(?:\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[()])(?:[*+?]|\{[0-9,]+\})?\??",
    re.DOTALL,
)
_ANY = "/(?s:.*)/"


def _close(pattern: str, start: int) -> int:
    """The place of the bracket that closes a group whose content begins at ``start``."""
    depth, at = 1, start
    while depth:
        found = _ATOM.match(pattern, at)
        if found is None:  # a bracket
            depth -= 1
            at += 1
        else:
            depth += found["look"] is not None or found["group"] is not None
            at = found.end()
        if at > len(pattern) or (depth and at == len(pattern)):
            return len(pattern)
    return at - 1


def _split(pattern: str) -> list[str]:
    """The options of a pattern, which ``|`` separates."""
    options, start, at = [], 0, 0
    while at < len(pattern):
        if pattern[at] == "|":
            options.append(pattern[start:at])
            start = at = at + 1
            continue
        found = _ATOM.match(pattern, at)
        if found is None:
            return [pattern]
        at = found.end()
        if found["look"] is not None or found["group"] is not None:
            at = _close(pattern, at) + 1
    return [*options, pattern[start:]]


def _sequence(pattern: str, after: str, is_start: bool = True, is_inner: bool = False) -> str | None:
    """One option of a pattern, and what follows it, in Lark. ``is_inner``: ``after`` is what follows in the pattern."""
    parts: list[tuple[str, str]] = []  # kind and text
    at = 0
    while at < len(pattern):
        found = _ATOM.match(pattern, at)
        if found is None:
            return None
        if found["look"] is None and found["group"] is None:
            parts.append(("text", found[0]))
            at = found.end()
            continue
        end = _close(pattern, found.end())
        inner, at = pattern[found.end() : end], end + 1
        if found["look"] is not None:
            parts.append((found["look"], inner))
        elif LOOK_AROUND.search(inner):
            if pattern[at : at + 1] in ("*", "+", "?", "{"):
                return None
            parts.append(("group", inner))
        else:
            more = re.compile(r"(?:[*+?]|\{[0-9,]+\})?\??").match(pattern, at)
            assert more is not None
            parts.append(("text", pattern[found.start() : more.end()]))
            at = more.end()
    begins = bool(parts) and parts[0] == ("text", "^")
    ends = bool(parts) and parts[-1] == ("text", "$")
    body = parts[begins : len(parts) - ends]
    if ("text", "^") in body or ("text", "$") in body or (begins and not is_start) or (ends and is_inner):
        return None
    tail = after if is_inner or ends else _ANY
    plain = ""
    for kind, text in reversed(body):
        if kind == "text":
            plain = _as_lark(text) + plain
            continue
        tail, plain = (f"/{plain}/ ({tail})" if plain else tail), ""
        options = _split(text)
        if kind == "group" and tail == _ANY and any(option.endswith("$") for option in options):
            # "^a(b|c$)" allows more text after "ab". That is hardly meant (pydantic 2.12 writes such patterns of
            # Decimal), so only texts that end there are generated.
            options, tail = [option.removesuffix("$") for option in options], '""'
        if len(tail) * len(options) > _MOST_LARK_CHARS:
            return None
        if kind == "group":
            inner_options = [_sequence(option, tail, False, True) for option in options]
        elif kind in ("(?=", "(?!"):
            # Inside, "^" is true only where nothing stands before; the text is matched from there on.
            is_first = is_start and (kind, text) == body[0]
            inner_options = [
                None
                if option[:1] == "^" and not is_first
                else _sequence(f"^{option.removeprefix('^')}", '""')
                for option in options
            ]
        else:
            return None
        if None in inner_options:
            return None
        either = " | ".join(f"({option})" for option in inner_options)
        tail = f"({either})" if kind == "group" else f"({tail}) & {'~' if kind == '(?!' else ''}({either})"
        tail = f"({tail})"
    tail = f"/{plain}/ ({tail})" if plain else tail
    return tail if begins or not is_start else f"{_ANY} ({tail})"


def _as_lark(atom: str) -> str:
    """An atom of a pattern for a regular expression between slashes, where classes are those of ASCII."""
    is_class = atom.startswith("[")
    atom = atom.replace("\\d", "0-9" if is_class else "[0-9]")
    atom = atom.replace("\\w", "0-9A-Za-z_" if is_class else "[0-9A-Za-z_]")
    return re.sub(r"(?<!\\)/", r"\\/", atom)

r"""Converts patterns of JSON schemas for llguidance: other dialects, look-ahead, and JSON strings.

Patterns of JSON Schema are in ECMAScript's dialect, patterns of pydantic in Rust's, others in Python's. ``translated``
rewrites all of them in Rust's dialect. It widens ``\w`` to letters beyond ASCII, which Python and Rust also match.

Lark has "and" and "not" for whole terminals, but no look-ahead inside terminals. ``as_lark`` writes patterns with
``(?=`` and ``(?!`` as terms with "and" and "not". The terms match the text itself, or the text as JSON writes it in a
string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

LOOK_AROUND = re.compile(r"\(\?<?[=!]")
# Ranges with all letters, marks, digits and connectors beyond ASCII, and with the characters between these.
_LETTERS = (
    r"\u00AA-\u1FFF\u200C\u200D\u203F\u2040\u2054\u2070-\u2DFF\u2E2F\u3005-\uD7FF\uF900-\uFFFD"
    r"\U00010000-\U0010FFFF"
)
_WORD = f"0-9A-Za-z_{_LETTERS}"
_ASCII_WORD = "0-9A-Za-z_"
# ECMAScript's spaces include U+FEFF but not U+0085, and Rust's include U+0085 but not U+FEFF. The classes here allow
# both characters. ``_WIDE_WITHOUT``: the replacements inside a class that excludes its members.
_WIDE: Final = {r"\w": _WORD, r"\s": r"\s\uFEFF", r"\S": r"\S\x85"}
_WIDE_WITHOUT: Final = {r"\W": f"[^{_WORD}]", r"\s": r"[\s--\x85]", r"\S": r"[\S--\uFEFF]"}
# A class that excludes a quotation mark or a backslash must also exclude U+0000. Otherwise, llguidance (1.9.1) allows
# both characters, if the class has all control characters.
_QUOTES: Final = (ord('"'), ord("\\"))
_PUNCTUATION: Final = re.compile(
    r"\\p\{(?:(?:gc|General_Category)=)?(?:Po?|(?:Other_)?Punctuation|Punct)\}|\[:(?:punct|graph|print):\]",
    re.IGNORECASE,
)
_CONTROLS: Final = re.compile(
    r"\\p\{(?:(?:gc|General_Category)=)?(?:Cc?|Control|Cntrl|Other)\}|\[:cntrl:\]", re.IGNORECASE
)
_ESCAPE = r"\\(?:u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|c[A-Za-z]|.)"
_TIMES = r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})?[?+]?"
_PAIR = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
# The text after an inner class in Rust's dialect: an operator, or further classes and the end of the outer class.
_REST_OF_OUTER = re.compile(r"--|&&|~~|(?:\[(?:\\.|[^\[\]\\])*\])*\]", re.DOTALL)
_MEMBER = re.compile(rf"{_ESCAPE}|\[:\^?[a-z]+:\]|.", re.DOTALL)


# ---- other dialects
def translated(pattern: str) -> str:
    r"""Return the pattern in Rust's dialect.

    The result matches the same texts as in ECMAScript, and more texts if the pattern has ``\w``. With look-around, a
    wider ``\w`` may match fewer texts. ``as_lark`` then decides where to widen ``\w``.
    """
    plain = _without_look_at_one(pattern)
    if LOOK_AROUND.search(plain) is None:
        pattern = plain
    is_wide = LOOK_AROUND.search(pattern) is None
    pattern = _PAIR.sub(_joined, pattern)
    written, at = "", 0
    while at < len(pattern):
        escape = re.compile(_ESCAPE, re.DOTALL).match(pattern, at)
        if escape is not None:
            wide = _WIDE.get(escape[0]) if is_wide else None
            if is_wide and _CONTROLS.fullmatch(escape[0]):
                written += _without_nul(escape[0])
            elif is_wide and escape[0].startswith(r"\P") and _PUNCTUATION.fullmatch(escape[0]):
                written += rf"[^\p{escape[0][2:]}\x00]"
            else:
                written += _escape(pattern, escape) if wide is None else f"[{wide}]"
            at = escape.end()
        elif pattern.startswith("[^]", at):
            written += r"[\s\S]"
            at += 3
        elif pattern[at] == "[":
            end = _end_of_class(pattern, at)
            written += _class(pattern[at:end], is_wide)
            at = end
        elif pattern[at] == "{" and not re.compile(r"\{[0-9]*,?[0-9]*\}").match(pattern, at):
            written += r"\{"
            at += 1
        else:
            written += pattern[at]
            at += 1
    return written


# A character or a class with the same meaning in all dialects, and without characters that JSON escapes.
_SIMPLE = r"(?:[\w@#%&~:;,/<>=-]|\\[.$^*+?()|{}\[\]/-]|\[(?:[\w@#%:;,.$*+?()|{}/<>= -]|\\[.$*+?()|{}/-])+\])"
_LOOK_AT_ONE = re.compile(
    r"(?P<other>\\(?:u\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|c[A-Za-z]|[^dDwWsS]))|"
    rf"(?:\(\?(?P<before>[=!])(?P<first>{_SIMPLE})\))?"
    r"(?P<one>\[[^\[\]\\&~]+\]|\\[dDwWsS]|\w)(?P<times>\{[0-9]+(?:,[0-9]*)?\}|\+)?(?![*+?{])"
    rf"(?:\(\?<(?P<after>[=!])(?P<last>{_SIMPLE})\))?|\[(?:\\.|[^\]\\])*\]?",
    re.DOTALL,
)


def _without_look_at_one(pattern: str) -> str:
    """Replace look-around at one character, as in patterns for host names, with a smaller class for this character."""

    def smaller(symbol: str, sign: str | None, other: str) -> str:
        if sign is None:
            return symbol
        return f"[{symbol}{'&&' if sign == '=' else '--'}{other if other[0] == '[' else f'[{other}]'}]"

    def plain(match: re.Match[str]) -> str:
        symbol, before, after = match["one"], match["before"], match["after"]
        if before is None and after is None:
            return match[0]
        numbers = re.findall("[0-9]+", match["times"] or "1")
        least = 1 if match["times"] == "+" else int(numbers[0])
        is_open = match["times"] == "+" or (match["times"] or "")[-2:-1] == ","
        most = None if is_open else int(numbers[-1])
        if least == 0 or (most is not None and most < least):
            return match[0]
        first = smaller(symbol, before, match["first"])
        last = smaller(symbol, after, match["last"])
        if before is None or after is None:
            rest = f"{symbol}{{{least - 1},{'' if most is None else most - 1}}}"
            return first + rest if after is None else rest + last
        rest = f"{symbol}{{{max(0, least - 2)},{'' if most is None else max(0, most - 2)}}}"
        both = f"{first}{rest}{last}" if most != 1 else ""
        only = smaller(first, after, match["last"]) if least == 1 else ""
        return f"(?:{'|'.join(filter(None, (only, both)))})"

    return pattern if "(?i" in pattern else _LOOK_AT_ONE.sub(plain, pattern)


def _joined(pair: re.Match[str]) -> str:
    high, low = (int(half, 16) for half in pair.groups())
    return f"\\u{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:X}}}"


def _escape(pattern: str, escape: re.Match[str]) -> str:
    text = escape[0]
    if text[:2] == r"\c" and len(text) == 3:
        return f"\\x{ord(text[2]) % 32:02X}"
    if text == r"\0" and not pattern[escape.end() : escape.end() + 1].isdecimal():
        return r"\x00"
    return text[1] if text in (r"\<", r"\>") else text


def _end_of_class(pattern: str, start: int) -> int:
    """Return the index after the end of a class, as in ECMAScript and Python, where classes cannot be nested.

    For a class that is nested in Rust's way, returns the index after its opening bracket.
    """
    at = start + 1 + pattern.startswith("^", start + 1)
    at += pattern.startswith("]", at)
    has_bracket = False
    while at < len(pattern) and pattern[at] != "]":
        match = _MEMBER.match(pattern, at)
        assert match is not None
        has_bracket |= match[0] == "["
        at = match.end()
    # Rust nests classes: after the end of an inner class, the rest of the outer class follows.
    if has_bracket and _REST_OF_OUTER.match(pattern, at + 1):
        return min(start + 1, len(pattern))
    return min(at + 1, len(pattern))


def _class(text: str, is_wide: bool) -> str:
    if text == "[":
        return text
    head = "[^" if text.startswith("[^") else "["
    written, at = head, len(head)
    is_first = True
    excludes = False
    member = ""
    low: int | None = None  # the code point of a character that may begin a range
    begin = 0  # where that character is in ``written``
    in_range = False
    while at < len(text) - 1:
        match = _MEMBER.match(text, at)
        assert match is not None
        member = match[0]
        at = match.end()
        wide = (_WIDE if head == "[" else _WIDE_WITHOUT).get(member) if is_wide else None
        excludes |= (
            is_wide
            and head == "[^"
            and (
                _code(member) in _QUOTES
                or (member[1:2] != "P" and _PUNCTUATION.fullmatch(member) is not None)
            )
        )
        high, begins_range = _code(member), member == "-" and low is not None and not in_range
        if in_range and low is not None and high is not None:
            if is_wide and head == "[" and low == 0 and 0x1F <= high < max(_QUOTES):
                written = f"{written[:begin]}\\x01-"
            excludes |= is_wide and head == "[^" and any(low <= quote <= high for quote in _QUOTES)
        ends_at_hyphen = member == "-" and in_range and low is not None and low <= ord("-")
        begin = begin if begins_range else len(written)
        low, in_range = (low, True) if begins_range else (None if in_range else high, False)
        if wide is not None:
            member = wide
        elif is_wide and _CONTROLS.fullmatch(member):
            member = _without_nul(member)
        elif ends_at_hyphen:
            member = r"\-"  # two hyphens are an operator in Rust
        elif member == r"\b":
            member = r"\x08"
        elif member[0] == "\\":
            member = _escape(text, match)
        elif (
            member == "["
            or (member == "]" and is_first)
            or (member in "&~" and text[at : at + 1] == member)
            or (member in "&~" and written.endswith(f"\\{member}"))  # the second of two equal characters
        ):
            member = f"\\{member}"
        written += member
        is_first = False
    if excludes:
        if member == "-":  # a hyphen at the end is literal, so keep it so
            written = written[:-1] + r"\-"
        written += r"\x00"
    return written + "]"


def _without_nul(member: str) -> str:
    """Return a class of control characters without U+0000, as a member of a class."""
    return rf"[{f'[{member}]' if member[0] == '[' else member}--\x00]"


def _code(member: str) -> int | None:
    """Return the code point of a member of a class; None unless the member is one character."""
    if len(member) == 1 or member == r"\0":
        return ord(member) if len(member) == 1 else 0
    if member[:2] in (r"\x", r"\u"):
        return int(member[2:].strip("{}"), 16) if len(member) > 2 else None
    return ord(member[1]) if len(member) == 2 and not member[1].isalnum() else None


# ---- look-ahead
_MOST_CHARS = 2000  # of a pattern
_MOST_LARK_CHARS = 50_000  # of a group, because each of its options repeats the text after it
_ATOM = re.compile(
    r"(?P<look>\(\?<?[=!])|(?P<group>\((?:\?:|\?P?<\w+>)?)|"
    rf"(?P<one>{_ESCAPE}|\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]|[^\\\[()])(?P<times>{_TIMES})",
    re.DOTALL,
)
# A character of a JSON string, as JSON writes it.
CHARACTER = r"(?:[^\x22\\\x00-\x1F]|\\(?:[\x22\\bfnrt]|u00[01][0-9a-fA-F]))"
_SHORT: Final = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': r"\x22", "\\": r"\\"}
_ESCAPED: Final = ['"', "\\", *map(chr, range(32))]


def as_lark(pattern: str, is_json: bool = False) -> str | None:
    """Return a Lark term for the texts that contain a match; None for a pattern that Lark cannot express.

    Look-ahead may be outside repetitions, and at each character of the last repetition, as in ``^((?!x).)*$``.
    Look-behind may be at the end. ``is_json``: the text is the inside of a JSON string, with escapes but without the
    quotation marks.
    """
    if len(pattern) > _MOST_CHARS:
        return None
    writer = _Writer(is_json)
    options = [
        writer.sequence(_without_look_behind(option), '""', is_first=option.startswith("^"))
        for option in _split(pattern)
    ]
    return None if None in options else " | ".join(f"({option})" for option in options)


def length_as_lark(least: int, most: int | None) -> str:
    """Return a Lark term for strings of ``least`` to ``most`` characters, as JSON writes them."""
    return f"/{CHARACTER}{{{least},{'' if most is None else most}}}/"


def _close(pattern: str, start: int) -> int:
    """Return the index of the bracket that closes the group whose content begins at ``start``."""
    depth, at = 1, start
    while depth:
        atom = _ATOM.match(pattern, at)
        if atom is None:  # a bracket
            depth -= 1
            at += 1
        else:
            depth += atom["look"] is not None or atom["group"] is not None
            at = atom.end()
        if at > len(pattern) or (depth and at == len(pattern)):
            return len(pattern)
    return at - 1


def _split(pattern: str) -> list[str]:
    """Return the options of a pattern, separated by ``|``."""
    options, start, at = [], 0, 0
    while at < len(pattern):
        if pattern[at] == "|":
            options.append(pattern[start:at])
            start = at = at + 1
            continue
        atom = _ATOM.match(pattern, at)
        if atom is None:
            return [pattern]
        at = atom.end()
        if atom["look"] is not None or atom["group"] is not None:
            at = _close(pattern, at) + 1
    return [*options, pattern[start:]]


def _without_look_behind(option: str) -> str:
    """Rewrite look-behind at the end of an option as look-ahead at its beginning."""
    match = re.fullmatch(r"\^(.*)\(\?<([=!])([^()^$]*)\)\$", option, re.DOTALL)
    if match is None or match[3].endswith("\\"):
        return option
    last = "|".join(rf"[\s\S]*{alternative}$" for alternative in _split(match[3]))
    return f"^(?{match[2]}{last}){match[1]}$"


def _tempered(inner: str, times: str) -> tuple[str, str] | None:
    """Move look-ahead at each character of a final repetition to before the repetition.

    For ``((?!x).)*``, the look-ahead becomes ``(?!.*x)`` and the repetition ``.*``. Returns the content of the
    look-ahead and the repetition; None if this is not possible.
    """
    if not inner.startswith("(?!") or re.fullmatch(r"[*+]|\{[0-9,]+\}", times) is None:
        return None
    end = _close(inner, 3)
    denied, atom = inner[3:end], _ATOM.fullmatch(inner, end + 1)
    if atom is None or atom["one"] in (None, "^", "$", "|") or atom["times"] or LOOK_AROUND.search(denied):
        return None
    # Nothing follows the last character, so options that may match there cannot be moved.
    group = re.match(r"\((?:\?:)?", denied)
    if group is not None and _close(denied, group.end()) == len(denied) - 1:
        denied = denied[group.end() : -1]
    options = _split(denied)
    if any(_MAY_BE_EMPTY.fullmatch(option) or option.endswith("$") for option in options):
        return None
    return "|".join(f"{atom['one']}*{option}" for option in options), f"{atom['one']}{times}"


_MAY_BE_EMPTY = re.compile(r"(?:\[.*\]|\\?.)(?:[*?]|\{0).*|[(^$].*|", re.DOTALL)  # or begins with an anchor


_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")  # the last character is the anchor "$"


def _is_anchor(atom: str) -> bool:
    """Return whether an atom of a pattern, perhaps with a quantifier, is "^" or "$"."""
    return atom[0] in "^$"


class _Writer:
    def __init__(self, is_json: bool) -> None:
        self._is_json = is_json
        self._any = f"/{CHARACTER}*/" if is_json else "/(?s:.*)/"

    def sequence(
        self,
        pattern: str,
        after: str,
        is_start: bool = True,
        is_inner: bool = False,
        is_wide: bool = True,
        is_first: bool = False,
        is_look: bool = False,
    ) -> str | None:
        r"""Return the Lark term for one option of a pattern and the text after it; None if Lark cannot express it.

        ``is_inner``: ``after`` is the rest of the pattern. ``is_start``: without "^", the match may begin later.
        ``is_first``: the match begins at the start of the text, where "^" is true. ``is_wide``: more matches here mean
        more matches in total, so ``\w`` may be wider. ``is_look``: the pattern is the inside of a look-ahead.
        """
        parts: list[tuple[str, str]] = []  # kind and text
        at = 0
        while at < len(pattern):
            atom = _ATOM.match(pattern, at)
            if atom is None:
                return None
            if atom["look"] is None and atom["group"] is None:
                parts.append(("text", atom[0]))
                at = atom.end()
                continue
            end = _close(pattern, atom.end())
            inner, at = pattern[atom.end() : end], end + 1
            if atom["look"] is not None:
                parts.append((atom["look"], inner))
                continue
            more = re.compile(_TIMES).match(pattern, at)
            assert more is not None
            if LOOK_AROUND.search(inner) or any(_is_anchor(atom[0]) for atom in _ATOM.finditer(inner)):
                at = more.end()
                if not more[0]:
                    parts.append(("group", inner))
                elif more[0] in ("?", "??"):
                    parts.append(("group", f"{inner}|"))
                elif pattern[at:] == "$" and not is_inner and (tempered := _tempered(inner, more[0])):
                    parts += [("(?!", tempered[0]), ("text", tempered[1])]
                else:
                    return None
            else:
                parts.append(("text", pattern[atom.start() : more.end()]))
                at = more.end()
        begins = bool(parts) and parts[0] == ("text", "^")
        ends = bool(parts) and parts[-1] == ("text", "$")
        body = parts[begins : len(parts) - ends]
        misplaced = (begins and not is_start and not is_first) or (ends and is_inner)
        if misplaced or any(kind == "text" and _is_anchor(text) for kind, text in body):
            return None
        n_first = -1
        if is_first:
            n_first = next((i for i, (kind, _) in enumerate(body) if kind[:2] != "(?"), len(body))
        tail = after if is_inner or ends else self._any
        plain = ""
        for i, (kind, text) in reversed([*enumerate(body)]):
            if kind == "text":
                plain = "".join(self._atoms(text, is_wide)) + plain
                continue
            tail, plain = (f"/{plain}/ ({tail})" if plain else tail), ""
            options = _split(text)
            tails = [tail] * len(options)
            if kind == "group" and tail == self._any and any(map(_ENDS.search, options)):
                # "^a((?=b)b|c$)" allows more text after "ab". Pydantic 2.12 writes such patterns for Decimal, hardly
                # on purpose. So allow only texts that end there.
                is_pydantic = not is_look and LOOK_AROUND.search(text) is not None
                tails = ['""' if is_pydantic or _ENDS.search(option) else tail for option in options]
                options = [option[:-1] if _ENDS.search(option) else option for option in options]
            if len(tail) * len(options) > _MOST_LARK_CHARS:
                return None
            if kind == "group":
                inner_options = [
                    self.sequence(option, follows, False, True, is_wide, i <= n_first, is_look)
                    for option, follows in zip(options, tails, strict=True)
                ]
            elif kind in ("(?=", "(?!"):
                # Inside, "^" is true only at the start of the text. The look-ahead matches the text from here on.
                inner_options = [
                    None
                    if option[:1] == "^" and i > n_first
                    else self.sequence(
                        f"^{option.removeprefix('^')}",
                        '""',
                        is_wide=is_wide == (kind == "(?="),
                        is_first=i <= n_first,
                        is_look=True,
                    )
                    for option in options
                ]
            else:
                return None
            if None in inner_options:
                return None
            either = f"({' | '.join(f'({option})' for option in inner_options)})"
            if kind != "group":
                either = f"({tail}) & {'~' if kind == '(?!' else ''}{either}"
            tail = f"({either})"
        tail = f"/{plain}/ ({tail})" if plain else tail
        return tail if begins or not is_start else f"{self._any} ({tail})"

    def _atoms(self, text: str, is_wide: bool) -> Iterator[str]:
        """Yield the parts of a pattern without look-around, escaped for a regular expression between slashes."""
        at = 0
        while at < len(text):
            atom = _ATOM.match(text, at)
            if atom is None or atom["one"] is None:  # a bracket, perhaps with a quantifier of its group
                times = re.compile(_TIMES).match(text, at + 1)
                end = atom.end() if atom is not None else at + 1 if times is None else times.end()
                yield text[at:end]
                at = end
                continue
            symbol = atom["one"]
            if symbol not in ("|", "^", "$"):
                single = _single(symbol, is_wide)
                symbol = _in_json(single, symbol) if self._is_json else single
            yield re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", symbol, flags=re.DOTALL)
            yield atom["times"]
            at = atom.end()


def _single(atom: str, is_wide: bool) -> str:
    r"""Return an atom with its classes limited to ASCII, except ``\w`` if ``is_wide``."""
    word = _WORD if is_wide else _ASCII_WORD
    if atom[0] != "[":
        classes = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": f"[{word}]", r"\W": f"[^{_ASCII_WORD}]"}
        return classes.get(atom, atom)
    inside = {r"\d": "0-9", r"\w": word, r"\W": f"[^{_ASCII_WORD}]"}
    if atom.startswith("[^"):
        inside = {r"\d": "0-9", r"\w": _ASCII_WORD, r"\W": f"[^{word}]"}
    return re.sub(r"\\.", lambda match: inside.get(match[0], match[0]), atom)


@lru_cache(1000)
def _in_json(written: str, atom: str) -> str:
    """Return an atom for one character as a JSON string writes it. ``written``: the result of ``_single``."""
    special = [character for character in _ESCAPED if _matches(atom, character)]
    if not special:
        return written
    escapes = "|".join(_SHORT.get(character) or f"u00{ord(character):02x}" for character in special)
    if len(special) == len(_ESCAPED):
        escapes = r"[\x22\\bfnrt]|u00[01][0-9a-fA-F]"
    if atom in _ESCAPED or (atom[0] == "\\" and atom[1] not in "DWSspP"):
        return rf"(?:\\(?:{escapes}))"
    plain = r"[^\n]" if atom == "." else written
    return rf"(?:[{plain}&&[^\x22\\\x00-\x1F]]|\\(?:{escapes}))"


def _matches(atom: str, character: str) -> bool:
    if atom[:2] in (r"\p", r"\P"):
        return atom[1] == "P" or atom[3:4] not in ("L", "N", "M")
    if atom[0] == "[" and re.search(r"\[\^?.*(?<!\\)\[|--|&&|~~|\|\|", atom[1:], re.DOTALL):
        return True  # Python does not read it as Rust does
    try:
        return re.fullmatch(atom, character) is not None
    except re.error:
        return True

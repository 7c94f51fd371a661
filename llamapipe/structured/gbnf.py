"""Checks a GBNF grammar before llama.cpp reads it.

It refuses grammars that would crash llama.cpp's parser, make it loop forever, or be silently misread. The text is read
into rules as in llama.cpp, but without recursion, and every error names its line and column. Limits are checked while
reading, so that a short text cannot expand into a large grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.vocab import Vocab

TERMINAL = -1
Alternative = list[int]  # ids of rules, and TERMINAL


@dataclass
class Rules:
    """The rules of a grammar, with ``alternatives[i]`` of rule ``i``. Repetitions and brackets are unnamed rules."""

    names: dict[str, int] = field(default_factory=dict)
    alternatives: dict[int, list[Alternative]] = field(default_factory=dict)
    first_used: dict[str, int] = field(default_factory=dict)  # offset of the first use of each name
    tokens: list[tuple[int, int | str]] = field(default_factory=list)  # offset; the id, or the text in <...>
    n_symbols: int = 0

    def symbol(self, name: str, at: int) -> int:
        """Return the id of a named rule, which is created on its first use."""
        if name not in self.names:
            self.names[name] = self.new()
            self.first_used[name] = at
        return self.names[name]

    def new(self) -> int:
        """Return the id of a new rule without a name."""
        self.n_symbols += 1
        return self.n_symbols - 1


MAX_DEPTH = 100  # nested brackets; llama.cpp recurses, and a stack of 512 KiB overflows below 2,000
MAX_TIMES = 2000  # in {m,n}; llama.cpp's own limit, beyond which it silently repeats without end
MAX_ELEMENTS = 100_000  # after expansion: "..."{2000} multiplies its text
MAX_TOKEN_CHARS = 256  # in <token>, which llama.cpp tokenizes
_NAME, _DIGITS = re.compile("[a-zA-Z0-9-]*"), re.compile("[0-9]*")
_SPACE, _SPACE_OR_NEWLINE = (re.compile(rf"(?:[{spaces}]|#[^\r\n\0]*)*") for spaces in (r" \t", r" \t\r\n"))
_SIMPLE_ESCAPES = {"t": 9, "r": 13, "n": 10, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


@dataclass
class _Open:
    """A rule or bracket that is being read."""

    rule: int
    at: int
    n_symbols_before: int
    alternatives: list[Alternative] = field(default_factory=list)
    sequence: Alternative = field(default_factory=list)
    last: int = 0  # index of the last symbol in the sequence
    weight: int = 1  # product of nested repetitions, as llama.cpp counts it

    def begin(self) -> None:
        self.last, self.weight = len(self.sequence), 1

    def alternative(self) -> None:
        self.alternatives.append(self.sequence)
        self.sequence = []
        self.begin()


class GbnfReader:
    """Reads one text; call ``read`` once."""

    def __init__(self, text: str) -> None:
        self._text = text + "\0"  # ends every loop, like the end of a C string
        self._at = 0
        self._n_elements = 0
        self._rules = Rules()

    def error(self, what: str, at: int | None = None) -> InvalidRequestError:
        """Return an error with the line and column of ``at`` (default: the current place)."""
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        # A grammar of another kind, which programs that come from vLLM or guidance have.
        hint = "" if "::=" in self._text else "; a grammar of Lark is given as lark, not as grammar"
        return InvalidRequestError(f"grammar: {what} at line {line} column {column}{hint}")

    def read(self) -> Rules:
        """Return the rules of the text.

        Raises InvalidRequestError, with line and column, if llama.cpp must not get the text.
        """
        self._space(True)
        while self._text[self._at] != "\0":
            self._rule()
        return self._rules

    # ---- rules
    def _rule(self) -> None:
        at = self._at
        name = self._name()
        self._space(False)
        if not self._text.startswith("::=", self._at):
            raise self.error("expected ::=")
        self._at += 3
        self._space(True)
        rule = self._rules.symbol(name, at)
        if rule in self._rules.alternatives:
            raise self.error(f"the rule {quoted(name)} is defined twice", at)
        self._rules.alternatives[rule] = []
        self._alternatives(_Open(rule, at, self._rules.n_symbols))
        if self._text[self._at] not in "\r\n\0":
            raise self.error("expected a new line or the end")
        self._space(True)

    def _alternatives(self, outer: _Open) -> None:
        stack = [outer]
        while True:
            top = stack[-1]
            char = self._text[self._at]
            if char == "|":
                self._skip(True)
                top.alternative()
            elif char == "(":
                if len(stack) > MAX_DEPTH:
                    raise self.error(f"more than {MAX_DEPTH} brackets are open")
                before, at = self._rules.n_symbols, self._at
                stack.append(_Open(self._rules.new(), at, before))
                self._skip(True)
            elif char == ")" and len(stack) > 1:
                stack.pop()
                top.alternative()
                self._rules.alternatives[top.rule] = top.alternatives
                outer = stack[-1]
                outer.begin()
                outer.weight = max(1, self._rules.n_symbols - top.n_symbols_before)
                self._push(outer, top.rule)
                self._skip(len(stack) > 1)
            elif not self._symbol(top, len(stack) > 1):
                if len(stack) > 1:
                    raise self.error("expected )")
                top.alternative()
                self._rules.alternatives[top.rule] = top.alternatives
                return

    def _push(self, top: _Open, item: int, n_elements: int = 1) -> None:
        self._n_elements += n_elements
        if self._n_elements > MAX_ELEMENTS:
            raise self.error(f"the grammar has more than {MAX_ELEMENTS} elements")
        top.sequence.append(item)

    # ---- symbols
    def _symbol(self, top: _Open, nested: bool) -> bool:
        """Read one symbol or repetition; return False if neither begins here."""
        char = self._text[self._at]
        if char == '"':
            self._literal(top)
        elif char == "[":
            self._characters(top)
        elif char in "<!":
            self._token(top)
        elif char == "-" or (char.isascii() and char.isalnum()):
            at = self._at
            top.begin()
            self._push(top, self._rules.symbol(self._name(), at))
        elif char == ".":
            self._at += 1
            top.begin()
            self._push(top, TERMINAL)
        elif char in "*+?{":
            self._repetition(top, nested)
        else:
            return False
        self._space(nested)
        return True

    def _literal(self, top: _Open) -> None:
        begin = self._at
        self._at += 1
        top.begin()
        while self._text[self._at] != '"':
            at = self._at
            if self._character(begin) == 0:
                raise self.error("llama.cpp does not support NUL characters in literals", at)
            self._push(top, TERMINAL)
        self._at += 1

    def _characters(self, top: _Open) -> None:
        begin = self._at
        self._at += 2 if self._text[self._at + 1] == "^" else 1
        top.begin()
        n = 0
        while self._text[self._at] != "]":
            at = self._at
            low = self._character(begin)
            n += 1
            if self._text[self._at] == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                n += 1
                if self._character(begin) < low:
                    raise self.error("the range is empty, its end comes before its beginning", at)
        self._at += 1
        if n:
            self._push(top, TERMINAL, n)

    def _character(self, begin: int) -> int:
        char = self._text[self._at]
        if char == "\0":
            raise self.error("the quote or bracket is never closed", begin)
        if char != "\\":
            self._at += 1
            return ord(char)
        letter = self._text[self._at + 1]
        if letter in _SIMPLE_ESCAPES:
            self._at += 2
            return _SIMPLE_ESCAPES[letter]
        n_digits = _HEX_ESCAPES.get(letter)
        if n_digits is None:
            raise self.error("unknown escape")
        digits = self._text[self._at + 2 : self._at + 2 + n_digits]
        if not re.fullmatch(f"[0-9a-fA-F]{{{n_digits}}}", digits):
            raise self.error(f"expected {n_digits} hexadecimal digits")
        if int(digits, 16) > 0x10FFFF:
            raise self.error("there is no such character")
        self._at += 2 + n_digits
        return int(digits, 16)

    def _token(self, top: _Open) -> None:
        at = self._at
        begin = at + (self._text[at] == "!")
        if self._text[begin] != "<":
            raise self.error("expected <")
        end = self._text.find(">", begin, begin + MAX_TOKEN_CHARS)
        if end < 0:
            raise self.error(f"no > within {MAX_TOKEN_CHARS} characters")
        inner = self._text[begin + 1 : end]
        if inner.startswith("["):
            if not re.fullmatch(r"\[[0-9]{1,10}\]", inner):
                raise self.error("expected a token id between <[ and ]>")
            self._rules.tokens.append((at, int(inner[1:-1])))
        else:
            self._rules.tokens.append((at, f"<{inner}>"))
        self._at = end + 1
        top.begin()
        self._push(top, TERMINAL)

    # ---- repetitions
    def _repetition(self, top: _Open, nested: bool) -> None:
        at, char = self._at, self._text[self._at]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char, (0, None))
        self._at += 1
        if char == "{":
            least, most = self._times(at, nested)
        repeated = top.sequence[top.last :]
        if not repeated:
            raise self.error(f"nothing before {char} to repeat", at)
        n_rules = most or least or 1
        if top.weight * n_rules > MAX_TIMES:
            raise self.error(f"nested repetitions multiply to more than {MAX_TIMES}", at)
        n_optional = 1 if most is None else most - least
        self._n_elements += len(repeated) * (max(least - 1, 0) + n_optional)
        if self._n_elements > MAX_ELEMENTS:
            raise self.error(f"the grammar has more than {MAX_ELEMENTS} elements", at)
        top.sequence[top.last :] = repeated * least
        tail: list[int] = []
        for _ in range(n_optional):
            rule = self._rules.new()
            self._rules.alternatives[rule] = [repeated + ([rule] if most is None else tail), []]
            tail = [rule]
        top.sequence += tail
        top.weight *= n_rules

    def _times(self, at: int, nested: bool) -> tuple[int, int | None]:
        self._space(nested)
        least = most = self._number(at)
        bounded = True
        self._space(nested)
        if self._text[self._at] == ",":
            self._skip(nested)
            bounded = self._text[self._at] != "}"
            most = self._number(at) if bounded else least
            self._space(nested)
        if self._text[self._at] != "}":
            raise self.error("expected }")
        self._at += 1
        if most < least:
            raise self.error(f"the repetition {{{least},{most}}} has a maximum below its minimum", at)
        return least, most if bounded else None

    def _number(self, at: int) -> int:
        digits = self._take(_DIGITS)
        if not digits:
            raise self.error("expected a number")
        if len(digits) > 9 or int(digits) > MAX_TIMES:
            raise self.error(f"more than {MAX_TIMES} repetitions", at)
        return int(digits)

    # ---- characters
    def _name(self) -> str:
        name = self._take(_NAME)
        if not name:
            raise self.error("expected the name of a rule")
        return name

    def _skip(self, newline: bool) -> None:
        self._at += 1
        self._space(newline)

    def _space(self, newline: bool) -> None:
        self._take(_SPACE_OR_NEWLINE if newline else _SPACE)

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Consume what ``pattern``, which may be nothing, matches here."""
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match[0]


MAX_BYTES = 2**18
# Ways to reach a first character. llama.cpp keeps a stack for each and compares every stack with all others.
MAX_STACKS = 5000
MAX_CHAIN = 1000  # rules that begin with each other; llama.cpp recurses through them


def check_gbnf(text: str, vocab: Vocab | None = None) -> None:
    r"""Refuse a GBNF text that llama.cpp's parser cannot handle safely. Any thread, pure Python.

    llama.cpp crashes on deep brackets and long chains of rules (stack overflow). It never returns from ``{3,1}``, from
    left recursion after rules that may be empty, or from rules whose alternatives double with each level. It reads
    ``{1,3000}`` as ``{1,}`` and keeps the last of two rules with the same name. All of these are errors here. With
    ``vocab``, ``<[id]>`` and ``<text>`` must be tokens of that vocabulary.

    A grammar that passes can still take very long to run: llama.cpp tries every way to match a token, and eight
    ``[ \t]*`` in a row have too many ways for a token of many spaces.

    Raises InvalidRequestError with line and column, TypeError if ``text`` is not a str.
    """
    if not isinstance(text, str):
        raise TypeError(f"grammar must be a str, not {type(text).__name__}")
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as e:
        raise InvalidRequestError(f"grammar: a lone surrogate at {e.start}") from None
    if n_bytes > MAX_BYTES:
        raise InvalidRequestError(f"grammar: the text has {n_bytes} bytes; the limit is {MAX_BYTES}")
    reader = GbnfReader(text)
    if "\0" in text:
        raise reader.error("a NUL character", text.index("\0"))
    rules = reader.read()
    for name, rule in rules.names.items():
        if rule not in rules.alternatives:
            raise reader.error(f"the rule {quoted(name)} is not defined", rules.first_used[name])
    if "root" not in rules.names:
        raise InvalidRequestError("grammar: the rule 'root' is not defined; it is where the text begins")
    if vocab is not None:
        _check_tokens(rules, reader, vocab)
    _check_beginnings(rules)


def _check_tokens(rules: Rules, reader: GbnfReader, vocab: Vocab) -> None:
    for at, token in rules.tokens:
        if isinstance(token, str):
            if len(vocab.tokenize(token, add_special=False, parse_special=True)) != 1:
                raise reader.error(f"{token} is not one token of this vocabulary", at)
        elif token >= vocab.n_vocab:
            raise reader.error(f"token {token}; this vocabulary has the ids 0 to {vocab.n_vocab - 1}", at)


def _check_beginnings(rules: Rules) -> None:
    """Refuse left recursion, long chains of rules, and too many ways to begin."""
    empty = _nullable(rules)
    edges = {
        rule: [edge for alternative in alternatives for edge in _first(alternative, empty)]
        for rule, alternatives in rules.alternatives.items()
    }
    direct = {rule for rule, alternatives in rules.alternatives.items() if [] in alternatives}
    names = {rule: name for name, rule in rules.names.items()}
    n_stacks: dict[int, int] = {}
    chain: dict[int, int] = {}
    for group in _components({rule: [to for to, _ in out] for rule, out in edges.items()}):
        members = set(group)
        inner = [(rule, to, last) for rule in group for to, last in edges[rule] if to in members]
        # A rule that ends with itself, after rules that may be empty, is not left recursion. llama.cpp refuses some of
        # these nevertheless: it regards only rules with a direct empty alternative as empty.
        grows = any(not last for _, _, last in inner)
        if grows or (inner and _cycle_for_llama(rules, members, direct)):
            known = ", ".join(sorted(names[rule] for rule in group if rule in names))
            raise InvalidRequestError(
                f"grammar: left recursion: {known or 'a repetition of what may be empty'} can begin with itself; "
                "let it begin with something that is never empty"
            )
        ways = sum(len(rules.alternatives[rule]) for rule in group)
        ways += sum(n_stacks[to] for rule in group for to, _ in edges[rule] if to not in members)
        length = len(group) + max(
            (chain[to] for r in group for to, _ in edges[r] if to not in members), default=0
        )
        for rule in group:
            n_stacks[rule], chain[rule] = ways, length
        if ways > MAX_STACKS or length > MAX_CHAIN:
            what = (
                f"{MAX_STACKS} ways to begin"
                if ways > MAX_STACKS
                else f"{MAX_CHAIN} rules that begin with one another"
            )
            named = next((names[rule] for rule in group if rule in names), None)
            where = f"the rule {quoted(named)}" if named else "a repetition or bracket"
            raise InvalidRequestError(f"grammar: {where} has more than {what}")


def _nullable(rules: Rules) -> set[int]:
    """Return the rules that may be empty, directly or through other rules."""
    users: dict[int, list[tuple[int, int]]] = {}
    missing: dict[tuple[int, int], int] = {}
    waiting: list[int] = []
    for rule, alternatives in rules.alternatives.items():
        for i, alternative in enumerate(alternatives):
            if TERMINAL in alternative:
                continue
            missing[rule, i] = len(alternative)
            if not alternative:
                waiting.append(rule)
            for to in alternative:
                users.setdefault(to, []).append((rule, i))
    empty: set[int] = set()
    while waiting:
        rule = waiting.pop()
        if rule in empty:
            continue
        empty.add(rule)
        for user in users.get(rule, ()):
            missing[user] -= 1
            if missing[user] == 0:
                waiting.append(user[0])
    return empty


def _first(alternative: Alternative, empty: set[int]) -> Iterator[tuple[int, bool]]:
    """Yield the rules with which an alternative can begin, and whether the rule is its last symbol."""
    for i, to in enumerate(alternative):
        if to == TERMINAL:
            return
        yield to, i == len(alternative) - 1
        if to not in empty:
            return


def _cycle_for_llama(rules: Rules, members: set[int], direct: set[int]) -> bool:
    """Return whether llama.cpp's own search finds a cycle here.

    That search skips only rules that have an empty alternative.
    """
    edges = {
        rule: [
            to
            for alternative in rules.alternatives[rule]
            for to, _ in _first(alternative, direct)
            if to in members
        ]
        for rule in members
    }
    return any(len(group) > 1 or group[0] in edges[group[0]] for group in _components(edges))


def _components(edges: dict[int, list[int]]) -> Iterator[list[int]]:
    """Yield the strongly connected components, each after all that it leads to (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    held: list[int] = []
    on_hold: set[int] = set()
    for start, out in edges.items():
        if start in index:
            continue
        work = [(start, iter(out))]
        index[start] = low[start] = len(index)
        held.append(start)
        on_hold.add(start)
        while work:
            node, targets = work[-1]
            for to in targets:
                if to not in index:
                    index[to] = low[to] = len(index)
                    held.append(to)
                    on_hold.add(to)
                    work.append((to, iter(edges[to])))
                    break
                if to in on_hold:
                    low[node] = min(low[node], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = [held.pop()]
                    while group[-1] != node:
                        group.append(held.pop())
                    on_hold.difference_update(group)
                    yield group

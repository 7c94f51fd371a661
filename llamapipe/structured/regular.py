"""Writes a Lark grammar as one regular expression, for custom tools.

The text of a custom tool is inside a JSON string. There, llguidance enforces a ``pattern``, but not a grammar. A
grammar without recursion has an equivalent regular expression: ``regular`` replaces the name of each rule with the
rule's body. It refuses other grammars and gives the reason.

A lexer takes the longest match for each terminal. The regular expression allows the same texts, and a few more if two
terminals share characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from llamapipe._messages import did_you_mean, quoted
from llamapipe.errors import InvalidRequestError

MOST_CHARACTERS = 2**15  # of a grammar, as for all Lark grammars
_MOST_WRITTEN = 2**16  # characters of the regular expression, which repeats a rule's body at each use
_MOST_REPEATS = 10_000
# Terminals of Lark's library that grammars import from ``common``.
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\f]+|(?://|\#)[^\n]*)
    | (?P<newline>(?:\r?\n[ \t]*)+)
    | (?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/[imslux]*)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<directive>%[a-z]+)
    | (?P<name>[?!]?_*[A-Za-z][A-Za-z0-9_]*)
    | (?P<number>[0-9]+)
    | (?P<op>\.\.|->|[:|()?*+~\[\]{},.])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class _Ref(NamedTuple):
    """A reference to a rule or terminal by its name."""

    name: str


class _Lexeme(NamedTuple):
    """A text or a regular expression, written as a regular expression."""

    regex: str


class _Repeat(NamedTuple):
    node: _Node
    suffix: str


class _Group(NamedTuple):
    """A sequence of nodes; with ``bar``, alternatives."""

    nodes: tuple[_Node, ...]
    bar: str = ""


_Node: TypeAlias = "_Ref | _Lexeme | _Repeat | _Group"


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def regular(lark: str) -> str:
    """Return a regular expression for the texts that a Lark grammar allows.

    Raises InvalidRequestError if the grammar is invalid, recursive, or too long; the message names the line of a syntax
    error.
    """
    if len(lark) > MOST_CHARACTERS:
        raise InvalidRequestError(f"the grammar has {len(lark)} characters; the limit is {MOST_CHARACTERS}")
    try:
        return _Writer(_Parser(lark)).write()
    except RecursionError:
        raise InvalidRequestError("the grammar is nested too deeply") from None


def _escaped(text: str) -> str:
    return _ESCAPE.sub(r"\\\g<0>", text).replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


class _Parser:
    """Parses the rules of a grammar. ``ignored``: the optional texts between the grammar's lexemes."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, _Node] = {}
        self.ignored: list[_Node] = []
        self._tokens = [*_tokens(text), _Token("end", "", text.count("\n") + 1)]
        self._at = 0
        while self._next.kind != "end":
            if self._next.kind == "newline":
                self._take()
            elif self._next.kind == "directive":
                self._directive()
            else:
                self._rule()

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _takes(self, text: str) -> bool:
        """Consume an operator if it is the next token; return whether it was."""
        is_next = self._next.kind == "op" and self._next.text == text
        self._at += is_next
        return is_next

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise self._wrong(f"{quoted(text)} is missing")

    def _wrong(self, message: str) -> InvalidRequestError:
        token = self._next
        before = "the end" if token.kind in ("end", "newline") else quoted(token.text)
        return InvalidRequestError(f"line {token.line}: {message}, before {before}")

    def _name(self) -> str:
        if self._next.kind != "name":
            raise self._wrong("a name is missing")
        return self._take().text.lstrip("?!")

    # ---- statements
    def _directive(self) -> None:
        what = self._take().text
        if what == "%ignore":
            self.ignored.append(self._alternatives())
        elif what == "%import":
            self._import()
        else:
            raise self._wrong(f"{what} is not supported here")
        self._end_of_line()

    def _import(self) -> None:
        if self._name() != "common":
            raise self._wrong("only terminals of 'common' can be imported")
        self._takes(".")
        if self._takes("("):
            names = [self._name()]
            while self._takes(","):
                names.append(self._name())
            self._expect(")")
            alias = None
        else:
            names = [self._name()]
            alias = self._name() if self._takes("->") else None
        for name in names:
            if name not in COMMON:
                raise self._wrong(f"there is no common.{name}{did_you_mean(name, COMMON)}")
            self._define(alias or name, _Lexeme(COMMON[name]))

    def _rule(self) -> None:
        name = self._name()
        if self._takes("."):  # a priority, which does not change the allowed texts
            self._takes("-") or self._take()
        if self._next.text in ("[", "{"):
            raise self._wrong(f"the rule {quoted(name)} has attributes, which are not supported here")
        self._expect(":")
        self._define(name, self._alternatives())
        self._end_of_line()

    def _define(self, name: str, node: _Node) -> None:
        if name in self.rules:
            raise self._wrong(f"there are two rules {quoted(name)}")
        self.rules[name] = node

    def _end_of_line(self) -> None:
        if self._next.kind not in ("newline", "end"):
            raise self._wrong("the rule should end")

    # ---- expressions
    def _alternatives(self) -> _Node:
        nodes = [self._sequence()]
        while self._follows_bar():
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else _Group(tuple(nodes), "|")

    def _follows_bar(self) -> bool:
        """Consume a bar, which may be on the next line; return whether there was one."""
        if self._next.kind == "newline" and self._tokens[self._at + 1].text == "|":
            self._take()
        return self._takes("|")

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while True:
            token = self._next
            if token.kind in ("string", "regex", "name") or token.text in ("(", "["):
                nodes.append(self._repeated(self._atom()))
            elif token.kind == "newline" and self._in_group:
                self._take()
            else:
                break
        if self._takes("->"):
            self._name()
        return nodes[0] if len(nodes) == 1 else _Group(tuple(nodes))

    _in_group = 0  # number of open brackets, within which a newline is a space

    def _atom(self) -> _Node:
        token = self._take()
        if token.kind == "name":
            return _Ref(token.text.lstrip("?!"))
        if token.kind == "regex":
            return _Lexeme(_regex(token.text))
        if token.kind == "string":
            if self._takes(".."):
                return _Lexeme(self._range(token))
            return _Lexeme(_string(token))
        self._in_group += 1
        inner = self._alternatives()
        while self._next.kind == "newline":
            self._take()
        self._in_group -= 1
        self._expect(")" if token.text == "(" else "]")
        return inner if token.text == "(" else _Repeat(inner, "?")

    def _range(self, first: _Token) -> str:
        last = self._take()
        ends = [_text(end) if end.kind == "string" else "" for end in (first, last)]
        if len(ends[0]) != 1 or len(ends[1]) != 1 or ends[0] > ends[1]:
            raise self._wrong("a range goes from one character to a later one")
        return f"[{_escaped(ends[0])}-{_escaped(ends[1])}]"

    def _repeated(self, node: _Node) -> _Node:
        while True:
            for sign in "?*+":
                if self._takes(sign):
                    node = _Repeat(node, sign)
                    break
            else:
                if self._takes("~"):
                    least = self._number()
                    most: int | None = self._number() if self._takes("..") else least
                elif self._takes("{"):
                    least = 0 if self._next.text == "," else self._number()
                    most = least
                    if self._takes(","):
                        most = None if self._next.text == "}" else self._number()
                    self._expect("}")
                else:
                    return node
                if most is not None and most < least:
                    raise self._wrong(f"{least} to {most} repetitions are none")
                node = _Repeat(node, f"{{{least},{'' if most is None else most}}}")

    def _number(self) -> int:
        if self._next.kind != "number" or len(self._next.text) > len(str(_MOST_REPEATS)):
            raise self._wrong(f"a number up to {_MOST_REPEATS} is missing")
        return int(self._take().text)


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            shown = quoted(text[at : at + 20].partition("\n")[0])
            raise InvalidRequestError(f"line {line}: {shown} is not supported here")
        kind = str(match.lastgroup)
        if kind != "space":
            yield _Token(kind, match[0], line)
        line += match[0].count("\n")
        at = match.end()


def _regex(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    flags = "".join(sorted(set(flags) & set("imsx")))
    return f"(?{flags}:{body})"


def _text(token: _Token) -> str:
    inner = token.text.removesuffix("i")
    try:
        return str(json.loads(inner))
    except ValueError:
        raise InvalidRequestError(f"line {token.line}: {quoted(inner)} has an unknown escape") from None


def _string(token: _Token) -> str:
    escaped = _escaped(_text(token))
    return f"(?i:{escaped})" if token.text.endswith("i") else f"(?:{escaped})"


class _Writer:
    """Replaces the names of rules with their bodies."""

    def __init__(self, grammar: _Parser) -> None:
        self._rules = grammar.rules
        self._done: dict[tuple[str, str], str] = {}
        self._open: list[str] = []
        self._between = ""
        ignored = [self._written(node, "") for node in grammar.ignored]
        self._between = f"(?:{'|'.join(ignored)})*" if ignored else ""

    def write(self) -> str:
        if "start" not in self._rules:
            raise InvalidRequestError("the grammar has no rule 'start'")
        return self._between + self._written(_Ref("start"), self._between)

    def _written(self, node: _Node, after: str) -> str:
        """Return a part of a rule as a regular expression. ``after``: the optional text after each lexeme."""
        if isinstance(node, _Ref):
            return self._rule(node.name, after)
        if isinstance(node, _Lexeme):
            return node.regex + after
        if isinstance(node, _Repeat):
            return f"(?:{self._written(node.node, after)}){node.suffix}"
        parts: list[str] = []
        n = 0
        for inner in node.nodes:
            parts.append(self._written(inner, after))
            n += len(parts[-1])
            if n > _MOST_WRITTEN:
                raise InvalidRequestError(
                    f"as a regular expression, which a call needs, the grammar has more than {_MOST_WRITTEN} characters"
                )
        return f"(?:{'|'.join(parts)})" if node.bar else "".join(parts)

    def _rule(self, name: str, after: str) -> str:
        if name not in self._rules:
            raise InvalidRequestError(f"there is no rule {quoted(name)}{did_you_mean(name, self._rules)}")
        if name in self._open:
            raise InvalidRequestError(
                f"the rule {quoted(name)} refers to itself, which cannot be followed inside of a call: write it with "
                "'*' or '+'"
            )
        if (name, after) not in self._done:
            self._open.append(name)
            # A terminal is one lexeme, even if it consists of other terminals.
            is_terminal = name.lstrip("_")[:1].isupper()
            inner = self._written(self._rules[name], "" if is_terminal else after)
            self._open.pop()
            self._done[name, after] = f"(?:{inner}){after if is_terminal else ''}"
        return self._done[name, after]

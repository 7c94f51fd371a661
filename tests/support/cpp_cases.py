"""Reads the cases of llama.cpp's ``tests/test-chat.cpp``: a template, options, a model's text, the expected message.

Open this file if a new version of llama.cpp writes its cases in a way that is not read any more. The reader evaluates
the few kinds of statements and expressions of which the cases consist, and passes over everything else.
``read_cases`` fails if that loses a case.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#[^\n]*)
      | (?P<raw>R"(?P<delimiter>[^()\s\\]{0,16})\((?P<inside>.*?)\)(?P=delimiter)")
      | (?P<text>"(?:[^"\\\n]|\\.)*")
      | (?P<name>[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)
      | (?P<number>\d[\w.]*)
      | (?P<mark>->|\+=|==|!=|&&|\|\||<<|.)""",
    re.DOTALL | re.VERBOSE | re.MULTILINE,
)
_FUNCTIONS = ("test_lfm2_parser", "test_template_output_peg_parsers")
_DEFAULT_USER = {"role": "user", "content": "Hey there!"}


class Token(NamedTuple):
    """``kind``: "text" (decoded), "name", "number" or "mark"."""

    kind: str
    text: str
    line: int


@dataclass
class PeerCase:
    """One case. ``expect``: ``content``, ``reasoning`` and ``calls``, each a name, arguments as text, and an id."""

    template: str
    line: int
    text: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=lambda: [dict(_DEFAULT_USER)])
    template_args: dict[str, Any] = field(default_factory=dict)
    tool_choice: str = "auto"
    parallel: bool = False
    schema: str = ""
    separates_reasoning: bool = False
    continues: str = ""  # "content" or "reasoning" of the last message
    is_partial: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    any_content: bool = False  # it is not compared

    @property
    def key(self) -> str:
        """Identifies the case, also where lines were inserted before it."""
        parts = [
            repr(getattr(self, one.name)) for one in fields(self) if one.name not in ("line", "any_content")
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def read_cases(source: str) -> list[PeerCase]:
    """Every case of the file. Raises ValueError if the file has more ends of cases than were read."""
    reader = _Reader(_tokens(source))
    reader.run()
    return reader.cases


def _tokens(source: str) -> list[Token]:
    found: list[Token] = []
    line = 1
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or ""
        text = match.group()
        if match["raw"] is not None:
            found.append(Token("text", match["inside"], line))
        elif match["text"] is not None:
            found.append(Token("text", _unescaped(text), line))
        elif match["space"] is None:
            found.append(Token(kind, text, line))
        line += text.count("\n")
    return found


def _unescaped(literal: str) -> str:
    """The value of a string literal of C++: its escapes name bytes of UTF-8."""
    simple = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", '"': '"', "\\": "\\", "'": "'", "a": "\a"}

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "x":
            return chr(int(code[1:], 16))
        if code[0] in "uU":
            return chr(int(code[1:], 16)).encode().decode("latin-1")
        return simple[code]

    text = literal[1:-1].encode().decode("latin-1")
    text = re.sub(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", one, text)
    return text.encode("latin-1").decode()


class _Unread(Exception):  # noqa: N818  (a statement of another kind)
    """The text is none of the statements or expressions of cases."""


@dataclass
class _Message:
    role: str = ""
    content: Any = ""
    content_parts: list[Any] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)
    reasoning_content: str = ""
    tool_name: str = ""
    tool_call_id: str = ""

    def as_openai(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.content_parts:
            made["content"] = [{"type": "text", "text": text} for _, text in self.content_parts]
        if self.reasoning_content:
            made["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            made["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments, id_ in map(_call, self.tool_calls)
            ]
        if self.tool_name:
            made["name"] = self.tool_name
        if self.tool_call_id:
            made["tool_call_id"] = self.tool_call_id
        return made


def _call(value: Any) -> tuple[str, str, str]:
    name, arguments, id_ = [*value, "", "", ""][:3]
    return name or "", arguments or "", id_ or ""


def _message(values: list[Any]) -> _Message:
    return _Message(*values)


def _simple(
    content: str, reasoning: str = "", name: str = "", arguments: str = "", id_: str = ""
) -> _Message:
    calls = [(name, arguments, id_)] if name or id_ else []
    return _Message("assistant", content, tool_calls=calls, reasoning_content=reasoning)


def _several(reasoning: str, content: str, calls: list[Any]) -> _Message:
    return _Message("assistant", content, tool_calls=list(calls), reasoning_content=reasoning)


@dataclass
class _Tester:
    template: str


@dataclass
class _Json:
    value: Any

    def dump(self) -> str:
        return json.dumps(self.value)


def _json(value: Any) -> _Json:
    pairs = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    return _Json(dict(value) if pairs else value)


_BUILT_IN: dict[str, Callable[..., Any]] = {
    "simple_assist_msg": _simple,
    "message_with_tool_calls": lambda name, arguments: _simple("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, why: _simple("", why, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": _several,
    "message_with_content_and_tool_call": lambda text, name, arguments: _simple(text, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda why, name, arguments: _simple("", why, name, arguments),
    "std::string": lambda text: text,
    "json": _json,
}


class _Case:
    """A case that is being built. Its methods are those of the file."""

    def __init__(self, reader: _Reader, template: str, text: str, line: int) -> None:
        self._reader = reader
        self.case = PeerCase(template, line, text)
        self.case.template_args["enable_thinking"] = True

    def call(self, name: str, values: list[Any]) -> Any:
        case = self.case
        value: Any = values[0] if values else True
        if name == "run":
            self._reader.cases.append(case)
            return None
        if name == "reasoning_format":
            case.separates_reasoning = value != "COMMON_REASONING_FORMAT_NONE"
        elif name == "enable_thinking":
            case.template_args["enable_thinking"] = value
        elif name == "chat_template_kwargs":
            case.template_args.update({key: json.loads(text) for key, text in value})
        elif name == "tools":
            case.tools = [_tool(one) for one in value]
        elif name == "parallel_tool_calls":
            case.parallel = value
        elif name == "json_schema":
            case.schema = value
        elif name == "tool_choice":
            case.tool_choice = value.removeprefix("COMMON_CHAT_TOOL_CHOICE_").lower()
        elif name == "continue_final_message":
            case.continues = value.removeprefix("COMMON_CHAT_CONTINUATION_").lower()
        elif name == "messages":
            case.messages = [one.as_openai() for one in value]
        elif name == "is_partial":
            case.is_partial = value
        elif name == "expect":
            case.content, case.reasoning = value.content, value.reasoning_content
            case.calls = [_call(one) for one in value.tool_calls]
        elif name == "expect_content":
            case.content = value
        elif name == "expect_reasoning":
            case.reasoning = value
        elif name == "expect_tool_calls":
            case.calls = [_call(one) for one in value]
        elif name not in ("add_generation_prompt", "expect_reconstruction", "expect_rules"):
            raise ValueError(
                f"line {case.line}: a case has the option {name}, which this reader does not know"
            )
        return self


def _tool(values: list[Any]) -> dict[str, Any]:
    name, description, parameters = values
    function = {"name": name, "description": description, "parameters": json.loads(parameters)}
    return {"type": "function", "function": function}


class _Reader:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._names: dict[str, Any] = {}
        self.cases: list[PeerCase] = []

    def run(self) -> None:
        """Reads the definitions at the top level, and then the functions of cases."""
        bodies: dict[str, tuple[str, int]] = {}
        while self._at < len(self._tokens):
            begin = self._at
            if self._is("name", "static") and (found := self._function()):
                bodies[found[0]] = found[1:]
                self._at = begin
                self._skip_statement()
            else:
                self._statement()
        for name in _FUNCTIONS:  # the first is called by the second
            parameter, at = bodies[name]
            self._names[name] = (parameter, at)
        before, self._at = len(self.cases), bodies[_FUNCTIONS[-1]][1]
        self._block()
        n_ends = self._n_ends(bodies[_FUNCTIONS[-1]][1], self._at)
        if len(self.cases) - before < n_ends:
            raise ValueError(f"{len(self.cases) - before} cases were read of at least {n_ends}")

    def _n_ends(self, begin: int, end: int) -> int:
        """How often ``.run(`` is written."""
        texts = [token.text for token in self._tokens[begin:end] if token.kind != "text"]
        return sum(texts[i : i + 3] == [".", "run", "("] for i in range(len(texts)))

    def _function(self) -> tuple[str, str, int] | None:
        """The name, the first parameter and the place of the body if a function of cases begins here."""
        for i in range(self._at, min(self._at + 4, len(self._tokens) - 1)):
            if self._tokens[i].text in _FUNCTIONS and self._tokens[i + 1].text == "(":
                close = next(j for j in range(i, len(self._tokens)) if self._tokens[j].text == ")")
                first = [t.text for t in self._tokens[i + 2 : close] if t.kind == "name"]
                names = [n for n in first if n not in ("const", "bool", "std::string")]
                return self._tokens[i].text, names[0] if names else "", close + 1
        return None

    # ---- tokens
    def _is(self, kind: str, text: str) -> bool:
        if self._at >= len(self._tokens):
            return False
        token = self._tokens[self._at]
        return token.kind == kind and token.text == text

    def _skip(self, mark: str) -> bool:
        found = self._is("mark", mark)
        self._at += found
        return found

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise _Unread

    # ---- statements
    def _block(self) -> None:
        self._expect("{")
        while not self._skip("}"):
            self._statement()

    def _statement(self) -> None:
        begin = self._at
        if self._is("mark", "{"):
            self._block()
            return
        if self._is("name", "for"):
            try:
                self._loop()
                return
            except _Unread:
                self._at = begin
        try:
            self._simple_statement()
        except _Unread:
            self._at = begin
            self._skip_statement()

    def _loop(self) -> None:
        self._at += 1
        self._expect("(")
        name = ""
        while not self._skip(":"):
            if self._tokens[self._at].text in (";", ")", "{"):
                raise _Unread
            name = self._tokens[self._at].text
            self._at += 1
        values = self._expression()
        self._expect(")")
        body = self._at
        for value in values:
            self._at = body
            self._names[name] = value
            self._block()

    def _simple_statement(self) -> None:
        """A definition, an assignment to a member, or an expression."""
        line = [self._tokens[i] for i in range(self._at, min(self._at + 12, len(self._tokens)))]
        words = 0
        while words < len(line) and (line[words].kind == "name" or line[words].text in ("*", "&", "<", ">")):
            words += 1
        after = line[words].text if words < len(line) else ""
        kind = line[words - 2].text if words > 1 else ""
        if words == 1 and after == "." and line[2].kind == "name" and line[3].text == "=":
            target = self._names.get(line[0].text)
            self._at += 4
            value = self._expression()
            self._expect(";")
            if not isinstance(target, _Message):
                raise _Unread
            setattr(target, line[2].text, value)
        elif words > 1 and after in ("=", "{", ";"):
            name = line[words - 1].text
            self._at += words
            self._skip("=")
            value = _Message() if after == ";" else self._expression()
            if isinstance(value, list) and kind == "common_chat_msg":
                value = _message(value)
            self._expect(";")
            self._names[name] = value
        elif words == 1:
            self._expression()
            self._expect(";")
        else:
            raise _Unread

    def _skip_statement(self) -> None:
        """Passes over one statement: up to a semicolon or a closed block."""
        depth = 0
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token.kind != "mark":
                continue
            if token.text in "({[":
                depth += 1
            elif token.text in ")}]":
                depth -= 1
                if (
                    depth <= 0
                    and token.text == "}"
                    and not self._is("mark", ";")
                    and not self._is("mark", ")")
                ):
                    return
            elif token.text == ";" and depth == 0:
                return

    # ---- expressions
    def _expression(self) -> Any:
        value = self._chain()
        while self._skip("+"):
            value = value + self._chain()
        return value

    def _chain(self) -> Any:
        value = self._primary()
        while self._skip("."):
            name = self._tokens[self._at].text
            self._at += 1
            line = self._tokens[self._at].line
            self._expect("(")
            values = list(self._list(")"))
            if isinstance(value, _Tester) and name == "test":
                value = _Case(self, value.template, values[0], line)
            elif isinstance(value, _Case):
                value = value.call(name, values)
            elif isinstance(value, _Json) and name == "dump":
                value = value.dump()
            else:
                raise _Unread
        return value

    def _primary(self) -> Any:
        if self._at >= len(self._tokens):
            raise _Unread
        token = self._tokens[self._at]
        self._at += 1
        if token.kind == "text":
            text = token.text
            while self._at < len(self._tokens) and self._tokens[self._at].kind == "text":
                text += self._tokens[self._at].text
                self._at += 1
            return text
        if token.kind == "number":
            return int(token.text) if token.text.isdigit() else float(token.text)
        if token.text == "{":
            return list(self._list("}"))
        if token.kind != "name":
            raise _Unread
        if token.text in ("true", "false"):
            return token.text == "true"
        if self._is("mark", "("):
            return self._called(token.text)
        if token.text in self._names:
            return self._names[token.text]
        if token.text.isupper():  # a constant
            return token.text
        raise _Unread

    def _called(self, name: str) -> Any:
        self._expect("(")
        if name == "peg_tester":
            values = list(self._list(")"))
            return _Tester(values[0].rpartition("/")[2].removesuffix(".jinja"))
        values = list(self._list(")"))
        if name in _BUILT_IN:
            return _BUILT_IN[name](*values)
        found = self._names.get(name)
        if not isinstance(found, tuple):
            raise _Unread
        back = self._at
        parameter, self._at = found
        self._names[parameter] = values[0]
        self._block()
        self._at = back
        return None

    def _list(self, close: str) -> Iterator[Any]:
        while not self._skip(close):
            # An element that is not understood, such as a flag, is None.
            begin = self._at
            try:
                value = self._expression()
            except _Unread:
                self._at = begin
                value = None
                if self._tokens[self._at].kind != "name":
                    raise
                self._at += 1
            yield value
            if not self._skip(",") and not self._is("mark", close):
                raise _Unread

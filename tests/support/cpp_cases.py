"""Reads the cases of llama.cpp's ``tests/test-chat.cpp``: a template, options, a model's text, the expected message.

Open this file if a new version of llama.cpp writes its cases in a way that is not read any more. The statements of
which cases consist are expressions of Python too, once their lists have brackets: they are evaluated with the names
below, and every other statement is passed over. ``read_cases`` fails if that loses a case.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#[^\n]*)
      | (?P<raw>R"(?P<delimiter>[^()\s\\]{0,16})\((?P<inside>.*?)\)(?P=delimiter)")
      | (?P<text>"(?:[^"\\\n]|\\.)*")
      | [A-Za-z_]\w*(?:::[A-Za-z_]\w*)* | \d[\w.]* | ->|\+=|==|!=|&&|\|\||<<|.""",
    re.DOTALL | re.VERBOSE | re.MULTILINE,
)
_UNICODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_AS_PYTHON = {"true": "True", "false": "False", "{": "[", "}": "]"}
_FUNCTIONS = ("test_lfm2_parser", "test_template_output_peg_parsers")  # the second calls the first
_DEFAULT_USER = {"role": "user", "content": "Hey there!"}


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
        names = [of.name for of in fields(self) if of.name not in ("line", "any_content")]
        return hashlib.sha256("\0".join(repr(getattr(self, name)) for name in names).encode()).hexdigest()[:8]


def read_cases(source: str) -> list[PeerCase]:
    """Every case of the file. Raises ValueError if the file has more ends of cases than were read."""
    return _Reader(source).cases


# ---- what the names of the file mean
@dataclass
class _Message:
    role: str = ""
    content: Any = ""
    content_parts: Sequence[Any] = ()
    tool_calls: Sequence[Any] = ()
    reasoning_content: str = ""
    tool_name: str = ""
    tool_call_id: str = ""

    def as_openai(self) -> dict[str, Any]:
        parts = [{"type": "text", "text": text} for _, text in self.content_parts]
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments, id_ in _calls(self.tool_calls)
        ]
        optional = {"reasoning_content": self.reasoning_content, "tool_calls": calls}
        optional |= {"name": self.tool_name, "tool_call_id": self.tool_call_id}
        said = {"role": self.role, "content": parts or self.content}
        return said | {name: value for name, value in optional.items() if value}


def _calls(values: Sequence[Any]) -> list[tuple[str, str, str]]:
    """Each call's name, arguments and id; ``{}`` and what was left out are empty texts."""
    padded = ([text or "" for text in (*value, "", "")] for value in values)
    return [(name, arguments, id_) for name, arguments, id_, *_ in padded]


def _assistant(content: str, reasoning: str = "", *call: str) -> _Message:
    return _several(reasoning, content, [call] if any(call) else [])


def _several(reasoning: str, content: str, calls: Sequence[Any]) -> _Message:
    return _Message("assistant", content, tool_calls=calls, reasoning_content=reasoning)


def _tool(name: str, description: str, parameters: str) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": json.loads(parameters)}
    return {"type": "function", "function": function}


class _Json(NamedTuple):
    value: list[Any]

    def dump(self) -> str:
        pairs = all(isinstance(item, list) and len(item) == 2 for item in self.value)
        return json.dumps(dict(self.value) if pairs else self.value)


_MEANINGS: dict[str, Callable[..., Any]] = {
    "simple_assist_msg": _assistant,
    "message_with_tool_calls": partial(_assistant, "", ""),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, why: _assistant(
        "", why, name, arguments
    ),
    "message_with_reasoning_content_and_multiple_tool_calls": _several,
    "message_with_content_and_tool_call": lambda text, *call: _assistant(text, "", *call),
    "message_with_reasoning_and_tool_call": partial(_assistant, ""),
    "std::string": str,
    "json": _Json,
}
# The options of a case: the field, and its value.
_OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "reasoning_format": ("separates_reasoning", lambda value: value != "COMMON_REASONING_FORMAT_NONE"),
    "tools": ("tools", lambda values: [_tool(*value) for value in values]),
    "parallel_tool_calls": ("parallel", bool),
    "json_schema": ("schema", str),
    "tool_choice": ("tool_choice", lambda value: value.removeprefix("COMMON_CHAT_TOOL_CHOICE_").lower()),
    "continue_final_message": (
        "continues",
        lambda value: value.removeprefix("COMMON_CHAT_CONTINUATION_").lower(),
    ),
    "messages": ("messages", lambda values: [value.as_openai() for value in values]),
    "is_partial": ("is_partial", bool),
    "expect_content": ("content", str),
    "expect_reasoning": ("reasoning", str),
    "expect_tool_calls": ("calls", _calls),
}
_UNUSED = ("add_generation_prompt", "expect_reconstruction", "expect_rules")


class _Case:
    """A case that is being built, with the methods of the file's ``peg_test_builder``."""

    def __init__(self, cases: list[PeerCase], template: str, line: int, text: str) -> None:
        self._cases = cases
        self._case = PeerCase(template, line, text, template_args={"enable_thinking": True})

    def __getattr__(self, name: str) -> Any:
        return partial(self._set, name)

    def _set(self, name: str, value: Any = True) -> _Case:
        case = self._case
        if name == "run":
            self._cases.append(case)
        elif name == "enable_thinking":
            case.template_args["enable_thinking"] = value
        elif name == "chat_template_kwargs":
            case.template_args.update({key: json.loads(text) for key, text in value})
        elif name == "expect":
            case.content, case.reasoning = value.content, value.reasoning_content
            case.calls = _calls(value.tool_calls)
        elif name in _OPTIONS:
            attribute, converted = _OPTIONS[name]
            setattr(case, attribute, converted(value))
        elif name not in _UNUSED:
            raise ValueError(
                f"line {case.line}: a case has the option {name}, which this reader does not know"
            )
        return self


class _Tester:
    def __init__(self, cases: list[PeerCase], path: str, *_: object) -> None:
        self.test = partial(_Case, cases, path.rpartition("/")[2].removesuffix(".jinja"))


class _Names(dict[str, Any]):
    """Those that are defined; constants are their names, and what else is not known is None."""

    def __missing__(self, name: str) -> str | None:
        return name if name.isupper() else None


# ---- statements
class _Token(NamedTuple):
    """``text``: a name, a number, a mark, or a string as Python writes it."""

    text: str
    line: int


def _tokens(source: str) -> list[_Token]:
    tokens: list[_Token] = []
    line = 1
    for match in _TOKEN.finditer(source):
        if match["raw"] is not None:
            tokens.append(_Token(repr(match["inside"]), line))
        elif match["text"] is not None:
            tokens.append(_Token(repr(_unescaped(match["text"][1:-1])), line))
        elif match["space"] is None:
            tokens.append(_Token(match.group().replace("::", "__"), line))
        line += match.group().count("\n")
    return tokens


def _unescaped(text: str) -> str:
    """The value of a string literal of C++, whose escapes name bytes of UTF-8."""
    text = _UNICODE.sub(lambda m: chr(int(m[1] or m[2], 16)) if m[1] or m[2] else m[0], text)
    return text.encode().decode("unicode_escape").encode("latin-1").decode()


class _Reader:
    """Reads the definitions at the top level, and then the cases of the last of ``_FUNCTIONS``."""

    def __init__(self, source: str) -> None:
        self._tokens = _tokens(source)
        self._texts = [token.text for token in self._tokens]
        self._bodies: dict[str, tuple[int, int]] = {}
        self.cases: list[PeerCase] = []
        self._names = _Names({name.replace("::", "__"): means for name, means in _MEANINGS.items()})
        self._names["peg_tester"] = partial(_Tester, self.cases)
        self._run(0, len(self._texts))
        self._run(*self._bodies[_FUNCTIONS[-1]])
        written = [i for body in self._bodies.values() for i in range(*body) if self._is_end(i)]
        n_read = len({case.line for case in self.cases})  # those of a loop have one line
        if n_read < len(written):
            raise ValueError(f"{n_read} cases were read of {len(written)}")

    def _is_end(self, at: int) -> bool:
        return self._texts[at : at + 3] == [".", "run", "("]

    def _run(self, at: int, end: int, **names: Any) -> None:
        """Reads the statements from one token to another, with these values of names."""
        self._names.update(names)
        while at < end:
            begin, at = at, self._end(at)
            with suppress(AttributeError, SyntaxError, TypeError):  # no part of a case
                self._statement(begin, at)

    def _end(self, at: int) -> int:
        """The end of the statement that begins there: after a semicolon or a closed block."""
        depth = 0
        for i in range(at, len(self._texts)):
            text = self._texts[i]
            depth += (text in ("(", "{", "[")) - (text in (")", "}", "]"))
            is_block = text == "}" and self._texts[i + 1 : i + 2] not in ([";"], [")"])
            if depth <= 0 and (is_block or text == ";"):
                return i + 1
        return len(self._texts)

    def _statement(self, at: int, end: int) -> None:
        """A block, a loop, a function of cases, a definition, an assignment to a member, or an expression."""
        texts = self._texts[at:end]
        blocks = [at + i for i in range(1, len(texts)) if texts[i - 1 : i + 1] == [")", "{"]]
        n_words = next(i for i, text in enumerate(texts) if text not in "*&<>" and not text.isidentifier())
        after = texts[n_words]
        if after == "{" and n_words == 0:
            self._run(at + 1, end - 1)
        elif texts[0] == "for" and ":" in texts:
            colon = texts.index(":")
            for value in self._value(at + colon + 1, blocks[0] - 1):
                self._run(blocks[0] + 1, end - 1, **{texts[colon - 1]: value})
        elif after == "(" and n_words == 3 and texts[2] in _FUNCTIONS:
            parameter = texts[min(texts.index(","), texts.index(")")) - 1]
            body = self._bodies[texts[2]] = blocks[0] + 1, end - 1
            self._names[texts[2]] = lambda value, *_: self._run(*body, **{parameter: value})
        elif after == "." and texts[3] == "=":
            setattr(self._names[texts[0]], texts[2], self._value(at + 4, end - 1))
        elif n_words > 1 and after in ("=", "{", ";") and texts[0] != "using":
            value = [] if after == ";" else self._value(at + n_words + (after == "="), end - 1)
            is_message = texts[n_words - 2] == "common_chat_msg" and isinstance(value, list)
            self._names[texts[n_words - 1]] = _Message(*value) if is_message else value
        else:
            self._value(at, end - 1)

    def _value(self, begin: int, end: int) -> Any:
        """The value of an expression. ``test`` is told its line."""
        words = [_AS_PYTHON.get(text, text) for text in self._texts[begin:end]]
        for i in range(1, len(words)):
            if words[i - 1] == "test":
                words[i] = f"({self._tokens[begin + i].line},"
        return eval(" ".join(words), {"__builtins__": {}}, self._names)

"""The check of GBNF: what it lets through llama.cpp reads; what llama.cpp does not survive it refuses."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.gguf_models import find_source
from support.run_script import LIMIT_S, environment

import llamapipe as lp
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.gbnf import MAX_BYTES, MAX_CHAIN, MAX_DEPTH, MAX_STACKS, check_gbnf

WORKER = Path(__file__).parents[1] / "support" / "gbnf_worker.py"


def nested(n: int) -> str:
    return "root ::= " + "(" * n + '"a"' + ")" * n


def chain(n: int) -> str:
    """``n`` rules that begin with one another; the last one does not."""
    names = ["root", *(f"a{i}" for i in range(1, n))]
    return "\n".join(f"{name} ::= {after}" for name, after in zip(names, [*names[1:], '"x"'], strict=True))


def doubling(n: int) -> str:
    rules = "\n".join(f'a{i} ::= a{i + 1} "x" | a{i + 1} "y"' for i in range(n))
    return f'root ::= a0\n{rules}\na{n} ::= "z"'


GOOD = {
    "literal": 'root ::= "a"',
    "characters": 'root ::= [a-z_0-9] [^"\\\\\\]\\-] . "\\x41\\u00e9\\U0001F600\\t\\r\\n\\"\\\\"',
    "repetitions": 'root ::= "a"* "b"+ "c"? ("d" | "e"){2} "f"{1,3} "g"{2,} "h"{0} "i"{0,}',
    "lines": '# text\r\n  root  ::=\n  a |\n  b # more\n\na ::= ( "x"\n| "y" )\r\nb::="z"',
    "empty": 'root ::= "" | [] | a\na ::= ',
    "recursion": 'root ::= "(" root ")" | "x" tail\ntail ::= "y" tail | ""',
    "empty repeated": 'root ::= ("a"?)* "b" (("c"?)+)*',
    "tokens": "root ::= <|user|> !<[5]> <[6]>",
    "depth": nested(MAX_DEPTH - 1),
    "long chain": chain(MAX_CHAIN - 1),
    "many words": "root ::= " + " | ".join(f'"w{i}"' for i in range(MAX_STACKS)),
    "name": "root ::= -a-1\n-a-1 ::= [ü日-本]",
}

REFUSED = {
    "brackets": (nested(20_000), f"more than {MAX_DEPTH} brackets are open at line 1"),
    "open brackets": ("root ::= " + "(" * 100_000, "brackets are open"),
    "chain": (chain(9_000), f"more than {MAX_CHAIN} rules that begin with one another"),
    "doubling": (doubling(30), f"more than {MAX_STACKS} ways to begin"),
    "backwards": ('root ::= "a"{3,1}', "a maximum below its minimum at line 1 column 13"),
    "too often": ('root ::= "a"{1,2001}', "more than 2000 repetitions at line 1 column 13"),
    "far too often": ('root ::= "a"{99999999999999999999}', "more than 2000 repetitions"),
    "multiplied": ('root ::= ("a"{50} | "b"{0,50}){50}', "multiply to more than 2000"),
    "large": ('root ::= "' + "a" * 1000 + '"{1500}', "more than 100000 elements"),
    "left": ('root ::= root "a" | "b"', "left recursion: root can begin"),
    "left by a detour": ('root ::= "b" | x\nx ::= root "a"', "left recursion: root, x can begin"),
    "left behind empty": ('root ::= b root "a" | "x"\nb ::= c\nc ::= "" | "y"', "left recursion: root"),
    "left for llama.cpp": ('root ::= x*\nx ::= "a" | ""', "left recursion"),
    "itself": ("root ::= root", "left recursion"),
    "undefined": ('root ::=\n  foo', "the rule 'foo' is not defined at line 2 column 3"),
    "no root": ('a ::= "x"', "'root' is not defined"),
    "nothing": ("", "'root' is not defined"),
    "twice": ('root ::= "a"\nroot ::= "b"', "'root' is defined twice at line 2 column 1"),
    "quote": ('root ::=\n "abc', "the quote or bracket is never closed at line 2 column 2"),
    "class": ("root ::= [abc", "is never closed"),
    "dash": ("root ::= [a-", "is never closed"),
    "escape": ('root ::= "a\\q"', "unknown escape at line 1 column 12"),
    "digits": ('root ::= "\\x4g"', "expected 2 hexadecimal digits"),
    "character": ('root ::= "\\UFFFFFFFF"', "no such character"),
    "range": ("root ::= [z-a]", "the range is empty"),
    "NUL": ('root ::= "\0"', "NUL character at line 1 column 11"),
    "written NUL": ('root ::= "a\\x00"', "does not support NUL characters in literals at line 1 column 12"),
    "surrogate": ('root ::= "\ud800"', "lone surrogate at 10"),
    "bytes": ("#" * (MAX_BYTES + 1), f"the limit is {MAX_BYTES}"),
    "nothing to repeat": ("root ::= * ", r"nothing before \* to repeat"),
    "nothing repeated": ('root ::= ""+', r"nothing before \+ to repeat"),
    "number": ('root ::= "a"{x}', "expected a number"),
    "brace": ('root ::= "a"{1;', "expected }"),
    "closing": ('root ::= "a" )', "expected a new line or the end at line 1 column 14"),
    "not closed": ('root ::= ("a"\nb ::= "c"', r"expected \) at line 2 column 3"),
    "sign": ('root = "a"', "expected ::= at line 1 column 6"),
    "no name": ('::= "a"', "expected the name of a rule"),
    "Lark": ('?start: "a"', "expected the name of a rule at line 1 column 1; a grammar of Lark is given as lark"),
    "token id": ("root ::= <[99999]>", "token 99999; this vocabulary has the ids 0 to 2399"),
    "long token id": ("root ::= <[99999999999999999999]>", "expected a token id"),
    "token": ("root ::= <|nobody|>", "is not one token of this vocabulary at line 1 column 10"),
    "long token": ("root ::= <" + "a" * 100_000 + ">", "no > within 256 characters"),
    "no token": ('root ::= !"a"', "expected <"),
}  # fmt: skip


def llama_reads(texts: dict[str, str], folder: Path, n_tokens: int) -> dict[str, str]:
    """What llama.cpp's own parser says of texts, in a process that may end or be ended over it."""
    for i, text in enumerate(texts.values()):
        (folder / f"{i:05}").write_text(text, encoding="utf-8", newline="")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), str(n_tokens)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, f"exit code {done.returncode} after:\n{done.stdout}\n{done.stderr[-2000:]}"
    said = dict(line.split() for line in done.stdout.splitlines())
    return {name: said[f"{i:05}"] for i, name in enumerate(texts)}


def test_what_passes_llama_reads(demo: lp.Model, tmp_path: Path) -> None:
    for text in GOOD.values():
        check_gbnf(text, demo.vocab)
    assert set(llama_reads(GOOD, tmp_path, 3).values()) == {"read"}


def test_llamas_own_examples_pass() -> None:
    try:
        paths = sorted(find_source().glob("grammars/*.gbnf"))
    except FileNotFoundError:
        pytest.skip("needs the llama.cpp source tree")
    for path in paths:
        check_gbnf(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_a_place(demo: lp.Model, name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_gbnf(text, demo.vocab)
    assert str(caught.value).startswith("grammar: ")


def test_bytes_are_refused() -> None:
    with pytest.raises(TypeError, match="grammar must be a str, not bytes"):
        check_gbnf(b'root ::= "a"')  # type: ignore[arg-type]


class GrammarMaker:
    """Random rules; many begin with one another, are empty, or repeat what is empty."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = ["root", *(f"r{i}" for i in range(self._random.randint(1, 6)))]

    def text(self) -> str:
        return "\n".join(f"{name} ::= {self._alternatives(2)}" for name in self._names)

    def _alternatives(self, depth: int) -> str:
        return " | ".join(
            " ".join(self._symbol(depth) for _ in range(self._random.randint(0, 3)))
            for _ in range(self._random.randint(1, 3))
        )

    def _symbol(self, depth: int) -> str:
        kind = self._random.random()
        if kind < 0.25:
            symbol = self._random.choice(self._names)
        elif kind < 0.75 or depth == 0:
            symbol = self._random.choice(('"a"', '"bc"', "[a-c]", ".", "[^x]"))
        else:
            symbol = f"({self._alternatives(depth - 1)})"
        if self._random.random() < 0.3:
            symbol += self._random.choice(("*", "+", "?", "{0,2}", "{2}", "{1,}", "{0}", "{3,1}"))
        return symbol


def test_random_grammars_that_pass_are_read(tmp_path: Path) -> None:
    """Read, not followed: how long llama.cpp takes over an ambiguous grammar's tokens is not checked."""
    passed: dict[str, str] = {}
    for seed in range(3000):
        text = GrammarMaker(seed).text()
        try:
            check_gbnf(text)
        except InvalidRequestError:
            continue
        passed[str(seed)] = text
    assert len(passed) > 150
    said = llama_reads(passed, tmp_path, 0)
    assert [seed for seed in passed if said[seed] != "read"] == []

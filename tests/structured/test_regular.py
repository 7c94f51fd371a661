"""Lark grammars as regular expressions: the same texts as llguidance's own reading of the grammar, or a refusal."""

from __future__ import annotations

import json
import random
import re

import pytest
from support.chat_templates import ByteVocabulary

from llamapipe.errors import InvalidRequestError
from llamapipe.structured.regular import COMMON, regular

PATCH = """
// What an editor's patch is.
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | remove
add: "*** Add File: " name LF ("+" /(.*)/ LF)+ -> added
remove: "*** Delete File: " name LF
?name: /[a-z\\/]+/
%import common.LF
"""
SUM = """
start: value
     | value (SP? "+" SP? value)+
value: INT | "(" INT ")" | HEX
SP: " "
HEX: "0x"i ("0".."9" | "a".."f"){1,4}
%import common (INT)
"""
LIST = """
start: WORD ("," WORD)~1..3 [";"]
%ignore / +/
%import common.LETTER -> L
WORD: L+ "\\u00e9"?
"""
CASES = {
    PATCH: (
        [
            "*** Begin Patch\n*** Add File: a/b\n+x\n+\n*** End Patch",
            "*** Begin Patch\n*** Delete File: a\n*** End Patch\n",
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n*** End Patch", "a"],
    ),
    SUM: (["1", "(12) + 3", "0Xff+1"], ["", "1 +", "1  + 2", "(1", "0x"]),
    LIST: (["a,b", "a , bé ,c;", " a,b ;"], ["a", "a,b,c,d,e", "a;b", "é,a"]),
    'start: "a.b" /[.]/ "\\n\\"" "x"?': (['a.b.\n"', 'a.b.\n"x'], ["axb.\n\"", "a.b."]),
    'start: ("a" | "b" | )+ "c"': (["c", "abac"], ["", "ab"]),
}  # fmt: skip


def takes(grammar: str, text: str) -> bool:
    """Whether llguidance takes a text as a whole."""
    return ByteVocabulary(()).accepted(grammar, text) == (text, True)


@pytest.mark.parametrize("lark", CASES)
def test_the_texts_of_a_grammar(lark: str) -> None:
    allowed, others = CASES[lark]
    regex = re.compile(regular(lark))
    assert all(regex.fullmatch(text) for text in allowed)
    assert not any(regex.fullmatch(text) for text in others)


@pytest.mark.parametrize("name", COMMON)
def test_terminals_of_the_library(name: str) -> None:
    assert re.compile(regular(f"start: X\n%import common.{name} -> X")).pattern


@pytest.mark.parametrize(
    ("lark", "message"),
    [
        ("", "no rule 'start'"),
        ("a: /x/", "no rule 'start'"),
        ("start: b", "no rule 'b'"),
        ('start: (', "line 1: ')' is missing"),
        ('start: "a', "line 1: '\"a' is not supported"),
        ("start: /a", "line 1"),
        ('start: "a" start?', "'start' refers to itself"),
        ('start: a\na: "(" b ")"\nb: a | "x"', "'a' refers to itself"),
        ('start: "a"\nstart: "b"', "two rules 'start'"),
        ("start: %json {}", "the rule should end"),
        ("start: <tool>", "'<tool>' is not supported"),
        ('start[lazy]: "a"', "attributes"),
        ("start: A & B\nA: /a/\nB: /b/", "line 1"),
        ("%import common.WSS\nstart: WSS", "did you mean WS"),
        ("%declare A\nstart: A", "%declare is not supported"),
        ("%import python.NAME\nstart: NAME", "only terminals of 'common'"),
        ('start: "a"~3..2', "are none"),
        ('start: "a"{99999999}', "a number up to"),
        ('start: "b".."a"', "a range"),
        ('start: "\\q"', "unknown escape"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(30)) + 'a30: "x"', "characters"),
        ('start: "' + "a" * 40000 + '"', "the limit is 32768"),
    ],
)  # fmt: skip
def test_what_has_no_regular_expression(lark: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        regular(lark)


@pytest.mark.parametrize("lark", CASES)
def test_the_same_texts_as_of_the_grammar(lark: str) -> None:
    """Random texts near the allowed ones, within a JSON string, as llguidance follows the expression in a call."""
    rng = random.Random(1)
    schema = {"type": "string", "pattern": f"^(?:{regular(lark)})$"}
    n_taken = 0
    for _ in range(40):
        text = list(rng.choice(CASES[lark][0]))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randrange(2)] = rng.choice(["", "a", " ", "1", "\n", "+", '"'])
        changed = "".join(text)
        taken = takes(lark, changed)
        n_taken += taken
        followed = takes(f"start: %json {json.dumps(schema)}", json.dumps(changed, ensure_ascii=False))
        # What is ignored may also stand at the beginning, as in Lark itself.
        assert followed == taken or (followed and "%ignore" in lark and changed.startswith(" ")), changed
    assert 0 < n_taken < 40


def test_a_priority_and_lines_within_brackets() -> None:
    assert re.fullmatch(regular('start: (\n  a\n  | "b"\n)+\na.2: "a"'), "aba")

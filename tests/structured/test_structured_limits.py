"""Grammars made to hang or to end the process, and many grammars at once."""

from __future__ import annotations

import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.guided import allowed_ids
from support.run_script import run_script

import llamapipe as lp
from llamapipe.structured import compile as grammars
from llamapipe.structured.compile import compile_guide


def doubled(n: int) -> dict[str, object]:
    """Two schemas of objects that may be equal; there are ``2**n`` ways from each to its last part."""
    parts: dict[str, object] = {
        "A": {"const": 2**60},
        f"A{n}": {"type": "object"},
        f"B{n}": {"type": "object"},
    }
    for kind in "AB":
        for i in range(n):
            more = {"$ref": f"#/$defs/{kind}{i + 1}"}
            parts[f"{kind}{i}"] = {
                "type": "object",
                "required": ["a", "b"],
                "properties": {"a": more, "b": more, "c": {"$ref": "#/$defs/A"}},
            }
    return {"oneOf": [{"$ref": "#/$defs/A0"}, {"$ref": "#/$defs/B0"}], "$defs": parts}


# Each takes under two seconds, compiled and followed for fifty tokens, or is refused; see docs/structured.md.
HOSTILE: list[dict[str, object]] = [
    {"regex": "((((a{100}){100}){100}){100}){100}"},
    {"regex": "(a|b)*a(a|b){200}"},
    {"regex": "((a*)*)*" * 100},
    {"regex": "(" * 30_000 + ")" * 30_000},
    {"regex": "[\\p{L}]{5000}\\w{1000}x"},
    {"lark": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000},
    {"lark": 'start: ("a" "b"){1000000}'},
    {"lark": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'},
    {"lark": 'start: start start start | /a+/ | start start | ""'},
    {"lark": "start: T\nT: /(a{97})*/ & /a(a{89})*/ & /aa(a{83})*/ & /aaa(a{79})*/"},
    {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}},
    {"json_schema": {"type": "string", "pattern": "(a|b)*c", "minLength": 10**5, "maxLength": 10**6}},
    {"json_schema": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}},
    {"json_schema": {"type": "object", "patternProperties": {f"^a{i}x": {} for i in range(2000)}}},
    {"json_schema": {"allOf": [{"anyOf": [{"required": [f"{a}{i}"]} for a in "ab"]} for i in range(24)]}},
    {"json_schema": '{"items":' * 300 + f'{{"const":{2**60}}}' + "}" * 300},
    {"json_schema": {"anyOf": [{"type": "integer", "minimum": 10**399 + i} for i in range(280)]}},
    {"json_schema": {"oneOf": [{"const": 2**60 + i} for i in range(5000)]}},
    {"json_schema": doubled(60)},
    {"json_schema": {"pattern": "^" + "(?:a|(?=b)b)" * 160 + "$"}},
    {"json_schema": {"pattern": "^" + "(" * 900 + "(?=a)" + ")" * 900}},
    {"json_schema": {"pattern": "(?=" + "[" * 100_000}},
    {"json_schema": {"propertyNames": {"pattern": "(a+)+$"}, "properties": {"a" * 50 + "b": {}}}},
    {"json_schema": {"type": "array", "uniqueItems": True, "items": {"enum": list(range(63))}}},
    {"json_schema": {"enum": [[2**60 + i] for i in range(6000)]}},
    {
        "json_schema": {
            "oneOf": [{"properties": {f"p{j}": {"minimum": i} for j in range(20)}} for i in range(150)]
        }
    },
    {"json_schema": {"oneOf": [{"required": [f"a{i}"]} for i in range(60)]}},
    {"json_schema": {"dependentRequired": {f"a{i}": [f"a{i * 7 % 60}", f"b{i}"] for i in range(60)}}},
    {"json_schema": {"allOf": [{"not": {"required": [f"a{i}", f"b{i}"]}} for i in range(300)]}},
    {"json_schema": {"type": "string", "not": {"enum": ["a" * i for i in range(89)]}}},
    {"json_schema": {"properties": {f"p{i}": {} for i in range(100)}, "minProperties": 10}},
    {
        "json_schema": {
            "oneOf": [{"properties": {"a": {"$ref": "#"}}}, {"items": {"$ref": "#"}}, {"not": {"$ref": "#"}}]
        }
    },
    {"json_schema": {"not": doubled(60)["oneOf"][0], "$defs": doubled(60)["$defs"]}},  # type: ignore[index]
    {"json_schema": '{"not":{"required":["a"],"properties":{"a":' * 90 + "true" + "}}}" * 90},
    {
        "json_schema": {
            "items": [{"$ref": f"#/x/{i}"} for i in range(2000)],
            "x": [{"not": {"type": "null"}}] * 2000,
        }
    },
    {"choice": ["a" * i + "b" for i in range(1, 500)]},
    {"json_schema": '{"items":' * 10_000 + "true" + "}" * 10_000},
]


def test_preparing_a_vocabulary_ends_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: Exception) -> None:
        def read(*_: object) -> None:
            raise error

        monkeypatch.setattr(grammars, "GrammarTokenizer", read)

    with lp.Model(lp.demo_model_path(), vocab_only=True) as model:
        fail(ImportError("no llguidance"))
        grammars.prepare_vocabulary(model.vocab)
        assert not caplog.records
        fail(ValueError("two equal tokens"))
        grammars.prepare_vocabulary(model.vocab)
    assert ["two equal tokens" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_hostile_grammars_end_nothing(tmp_path: Path) -> None:
    program = """
import json, logging, pathlib, resource, time
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
import numpy as np
import llamapipe as lp
from llamapipe.structured.compile import compile_guide

logging.getLogger("llamapipe").setLevel(logging.ERROR)
with lp.Model.demo() as model:
    for given in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        began = time.monotonic()
        try:
            with compile_guide(model, **given).new() as guide:
                for _ in range(50):
                    if guide.finished:
                        break
                    guide.accept_any()
        except (lp.errors.InvalidRequestError, lp.errors.DecodeError) as e:
            assert len(str(e)) < 3000, len(str(e))
        took = time.monotonic() - began
        assert took < 30, (took, str(given)[:100])  # far above what it takes, below what a hang would
    say("survived")
"""
    texts = tmp_path / "hostile.json"
    texts.write_text(json.dumps(HOSTILE))
    assert run_script(program, texts) == "survived\n"


def test_many_grammars_at_once(demo: lp.Model) -> None:
    """Threads follow different grammars of one vocabulary at the same time; every text is one of its own grammar."""
    patterns = ["[a-f]{2,6}", "(yes|no), [0-9]{1,3}", "x(yz)*x", "[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?"]

    def follow(seed: int) -> None:
        rng = random.Random(seed)
        pattern = patterns[seed % len(patterns)]
        written = b""
        with compile_guide(demo, regex=pattern).new() as guide:
            for n in range(1000):
                guide.prepare()
                if guide.finished or (n > 20 and guide.may_end):
                    break
                allowed = [t for t in allowed_ids(guide, demo.n_vocab) if not demo.vocab.is_eog(t)]
                token = rng.choice(allowed)
                guide.accept(token)
                written += demo.piece(token)
            assert guide.may_end
        assert re.fullmatch(pattern, written.decode()), (pattern, written)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(follow, range(80)))

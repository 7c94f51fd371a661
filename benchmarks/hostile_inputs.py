"""Inputs that take long, or must be refused: what ``bench_isolation.py`` submits beside other requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import llamapipe as lp

Attack = Callable[[lp.Engine], object]
_PROMPT = list(range(300, 320))
_SLEEP_S = 0.05


def hostile_inputs(n_vocab: int) -> dict[str, Attack]:
    """Each input by its name. Calling one submits it and waits for the answer or the error."""
    attacks: dict[str, Attack] = {}
    for kind, texts in (
        ("json_schema", _schemas()),
        ("regex", _REGEXES),
        ("lark", _LARKS),
        ("grammar", _GBNF),
    ):
        for name, text in texts.items():
            attacks[f"{kind}: {name}"] = _with(**{kind: text, "max_tokens": 200})
    for name, options in _options(n_vocab).items():
        attacks[name] = _with(**options)
    for name, make in _prompts(n_vocab).items():
        attacks[name] = _with_prompt(make)
    attacks["score: 2,000 continuations"] = lambda engine: engine.score(
        "A story", [f" of {i} words and more" for i in range(2000)]
    )
    attacks["score: one of a whole context"] = lambda engine: engine.score(
        [300], [300 + i % 500 for i in range(engine.n_ctx - 2)]
    )
    attacks["list of 20,000 prompts"] = lambda engine: engine.generate(
        [[300 + i % 500] for i in range(20_000)], lp.SamplingParams(max_tokens=1), timeout=2
    )
    attacks["chat: 5,000 messages"] = lambda engine: engine.chat(
        [{"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(5001)]
    )
    attacks["chat: a message of 5 MB"] = lambda engine: engine.chat(
        [{"role": "user", "content": "word " * 10**6}]
    )
    return attacks


def _with(**options: Any) -> Attack:
    """Generates with these options; they are built anew for each request, and no two seeds are the same."""

    def attack(engine: lp.Engine) -> object:
        params = lp.SamplingParams(**{"max_tokens": 100, **options})
        return engine.generate(_PROMPT, params)

    return attack


def _with_prompt(make: Callable[[], Any]) -> Attack:
    prompts: list[Any] = []

    def attack(engine: lp.Engine) -> object:
        if not prompts:  # the first call only makes it
            prompts.append(make())
            return None
        return engine.generate(prompts[0], lp.SamplingParams(max_tokens=8))

    attack.is_lazy = True  # type: ignore[attr-defined]
    return attack


def _schemas() -> dict[str, Any]:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {
            "type": "object",
            "properties": {"a": deep, "b": {"type": "array", "items": deep}},
            "required": ["a"],
        }
        if len(str(deep)) > 50_000:
            break
    return {
        "enum of 3,000": {"enum": [f"word {i} {'x' * (i % 30)}" for i in range(3000)]},
        "400 required properties": {
            "type": "object",
            "properties": {f"key_{i}": {"type": "string"} for i in range(400)},
            "required": [f"key_{i}" for i in range(400)],
        },
        "deeply nested": deep,
        "alternatives of patterns": {
            "anyOf": [
                {"type": "object", "properties": {"k": {"type": "string", "pattern": f"^(a|b|ab)*{i}$"}}}
                for i in range(20)
            ]
        },
        "long strings": {"type": "array", "items": {"type": "string", "maxLength": 5000}, "minItems": 200},
        "one that cannot be compiled": {"allOf": [{"type": "string"}, {"type": "no such"}] * 200},
    }


_REGEXES = {
    "1,000 alternatives": "|".join(f"{i * 7919}{chr(97 + i % 26) * (i % 20)}" for i in range(1000)),
    "a counted suffix": r".*a.{18}",
    "nested counts": r"((((a{1,10}){1,10} ?){1,10})b?){1,5}",
    "ambiguous words": r"(.|a|b|[a-z]{1,50}|\w+\s?){1,200}",
    "letters of all scripts": r"(\p{L}{1,40}\s){1,100}",
    "not closed": "(" * 5000,
}
_LARKS = {
    "ambiguous sums": 'start: e\ne: e e | e e e | "a" | "b" | " " | /[a-z ]+/',
    "ambiguous lexemes": "start: a\na: x | a x | x a\nx: /[a-z ]+/ | /[a-m ]+/ | /[b-z ]+/ | x x",
    "empty loops": 'start: e+\ne: e e | e e e | "" | "a" | "aa" | "ab" | "b"',
    "300 alternatives": "start: (" + " | ".join(f'"word{i}" ' for i in range(300)) + ")+",
    "a list without end": 'start: item (", " item)*\nitem: /[a-z]+( [a-z]+)*/',
}
_GBNF = {
    "spaces eight times": "root ::= " + "[ \\t]* " * 8 + "root2\nroot2 ::= [a-z ]+",
    "ambiguous letters": 'root ::= ("a" | "b" | "ab" | "ba" | [a-z] | [a-z ] [a-z])+',
    "2,000 words": 'root ::= w (" " w)*\nw ::= ' + " | ".join(f'"w{i}"' for i in range(2000)),
    "nested optionals": "root ::= " + "([a-z]+ [ ]? " * 12 + ")?" * 12,
    "left recursion": 'root ::= root "a" | "b"',
}


def _sleeping(row: np.ndarray[Any, Any]) -> None:
    time.sleep(_SLEEP_S)


def _computing(row: np.ndarray[Any, Any]) -> None:
    end = time.perf_counter() + _SLEEP_S
    while time.perf_counter() < end:
        pass


def _raising(row: np.ndarray[Any, Any]) -> None:
    raise RuntimeError("a processor that fails")


def _options(n_vocab: int) -> dict[str, dict[str, Any]]:
    return {
        "a processor that sleeps 50 ms": {"logits_processors": (_sleeping,)},
        "a processor that computes 50 ms": {"logits_processors": (_computing,)},
        "a processor that raises": {"logits_processors": (_raising,)},
        "10,000 stop strings": {"stop": [f"stop {i}" for i in range(10_000)]},
        "a stop string of 1 MB": {"stop": "ab" * 500_000},
        "1,000 stop strings of 1,000 characters": {"stop": ["a" * 1000 + str(i) for i in range(1000)]},
        "biases for all tokens": {"logit_bias": {i: i / n_vocab for i in range(min(n_vocab, 30_000))}},
        "all tokens allowed": {"allowed_token_ids": list(range(n_vocab))},
        "10,000 bad words": {"bad_words": [f"bad {i}" for i in range(10_000)]},
        "1,000 DRY breakers": {
            "dry_multiplier": 1.0,
            "dry_sequence_breakers": [f"b{i}" for i in range(1000)],
        },
        "n=64": {"n": 64, "max_tokens": 20},
        "log-probabilities of 1,000 tokens": {"logprobs": 1000},
        "penalties over everything": {"repeat_penalty": 1.1, "repeat_last_n": -1, "dry_multiplier": 1.0},
    }


def _prompts(n_vocab: int) -> dict[str, Callable[[], Any]]:
    return {
        "a text of 10 MB": lambda: "word and " * 1_111_111,
        "10 MB of spaces": lambda: " " * 10**7,
        "10 MB without a space": lambda: "a" * 10**7,
        "2,500,000 emoji": lambda: "\N{GRINNING FACE}" * 2_500_000,
        "10,000,000 token ids": lambda: [300] * 10**7,
        "10,000,000 token ids in an array": lambda: np.full(10**7, 300),
        "1,000,000 objects": lambda: np.full(10**6, 300, object),
        "a bad id after 1,000,000": lambda: [300] * 10**6 + [-1],
        "a prompt as long as the context": lambda: [300 + i % 500 for i in range(2000)],
    }

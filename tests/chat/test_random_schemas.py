"""Whatever a grammar of forced calls allows is a call whose arguments are valid: random walks over its tokens."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.chat_families import FAMILIES
from support.chat_templates import ByteVocabulary, parse_answer, renderer
from support.random_schemas import SchemaMaker

import llamapipe as lp
from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.results import ChatMessage
from llamapipe.chat.tools import Tool
from llamapipe.structured._guide import Guide
from llamapipe.structured.compile import compile_guide


def parameters(seed: int) -> dict[str, Any]:
    """An object of one to three random values."""
    picked = random.Random(seed)
    maker = SchemaMaker(seed)
    names = picked.sample(["city", "when", "n_days", "a", "x-y"], picked.randint(1, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for name in names:
        schema["properties"][name] = maker.schema(2)
        schema.setdefault("$defs", {}).update(schema["properties"][name].pop("$defs", {}))
    schema["required"] = picked.sample(names, picked.randint(0, len(names)))
    return schema


def walk(guide: Guide, model: lp.Model, seed: int) -> str:
    """The text of random tokens that the guide allows."""
    picked = np.random.default_rng(seed)
    pieces: list[bytes] = []
    while not guide.finished:
        allowed = np.flatnonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little"))
        ends = [t for t in allowed if model.vocab.is_eog(int(t))]
        token = int(picked.choice(ends if ends and picked.random() < 0.5 else allowed))
        guide.accept(token)
        if token in ends:
            break
        pieces.append(model.piece(token))
        assert len(pieces) < 5000, b"".join(pieces[:200])
    return b"".join(pieces).decode()


# Families with a format of their own; those with control tokens need a vocabulary that has them.
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("Hermes", 200),
        ("Llama", 40),
        ("Mistral list", 40),
        ("DeepSeek V3", 40),
        ("Qwen3-Coder", 200),
        ("GLM", 40),
    ],
)
def test_random_calls_of_random_schemas_are_valid(tiny: lp.Model, name: str, n: int) -> None:
    family = FAMILIES[name]
    form = ChatFormat.of(renderer(family.template), lambda text: None)
    tail = family.tail + "".join(family.think or ())
    for seed in range(n):
        schema = parameters(seed)
        tools = (Tool("first_tool", "", schema), Tool("second", "", parameters(seed + 1000)))
        choice = ("required", "first_tool", "second")[seed % 3]
        grammar = form.grammar(tools, choice, seed % 2 == 0, prompt_tail=tail)
        assert grammar is not None
        with compile_guide(tiny, lark=grammar).new() as guide:
            text = walk(guide, tiny, seed)
        check(form, tools, choice, tail, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_calls_with_control_tokens(name: str) -> None:
    family = FAMILIES[name]
    vocabulary = ByteVocabulary(family.specials)
    form = ChatFormat.of(renderer(family.template), vocabulary.special_id)
    # The prompt of gpt-oss cannot close the reasoning, of which there may be any number of messages.
    closed = f"{form.reasoning.start}{form.reasoning.end}" if form.reasoning else ""
    tail = family.tail if name == "gpt-oss" else family.tail + closed
    for seed in range(10):
        tools = (Tool("first_tool", "", parameters(seed)), Tool("second", "", parameters(seed + 1000)))
        grammar = form.grammar(tools, "required", True, prompt_tail=tail)
        assert grammar is not None
        if name == "gpt-oss":
            grammar = grammar.replace(")* (", ")? (", 1)
        check(form, tools, "required", tail, vocabulary.walk(grammar, seed))


def check(form: ChatFormat, tools: tuple[Tool, ...], choice: str, tail: str, text: str) -> None:
    """The text is nothing but valid calls, also if they are read while they arrive."""
    answer = parse_answer(form.parser(tools, choice, prompt_tail=tail), text)
    assert answer.content == "" and answer.tool_calls, text
    for call in answer.tool_calls:
        assert choice in ("required", call.name)
        jsonschema.validate(call.arguments, {tool.name: tool.parameters for tool in tools}[call.name])
    parser = form.parser(tools, choice, prompt_tail=tail, stream_calls=True)
    streamed = ChatMessage([*map(parser.feed, text), parser.finish()])
    assert all(call.is_complete for call in streamed.tool_calls) and streamed.content == ""
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    assert [(call.name, call.arguments) for call in streamed.tool_calls] == calls

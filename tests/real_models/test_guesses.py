"""Guessed tokens change no text of a real model."""

from __future__ import annotations

from typing import Any

import pytest
from support.eager_gate import EagerGate
from support.real_weights import needs_all, real_model

import llamapipe as lp
from llamapipe.native.load import native

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "colour": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "colour"],
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8},
    "predicted": {"temperature": 0, "prediction": f"{STORY} They went home."},
    "penalties": {"repeat_penalty": 1.1, "frequency_penalty": 0.3},
    "dry": {"dry_multiplier": 0.8},
    "mirostat": {"mirostat": 2},
    "schema": {"json_schema": SCHEMA},
    "GBNF": {"grammar": 'root ::= ([a-zA-Z ,]+ ".")+'},
    "logprobs": {"logprobs": 2},
    "stop": {"temperature": 0.8, "stop": ["park", ".\n"]},
}


def told(engine: lp.Engine, n: int, n_tokens: int, **more: Any) -> list[tuple[list[int], str]]:
    """Answers to requests of all kinds, some of which repeat what they were given."""
    ways = list(WAYS.values())
    prompts = [f"{STORY} {STORY[: 20 + 7 * (i % 11)]}" for i in range(n)]
    params = [lp.SamplingParams(**ways[i % len(ways)], **more, seed=i, max_tokens=n_tokens) for i in range(n)]
    return [
        (completion.token_ids, completion.finish_reason) for completion in engine.generate(prompts, params)
    ]


@needs_all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "draft", "n", "n_tokens"), [("smollm2", None, 500, 40), ("qwen-1.5b", "qwen-0.5b", 60, 30)]
)
def test_texts_are_those_without_guesses(
    name: str, draft: str | None, n: int, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native().lib.lp_kernels_attend():
        pytest.skip("rows depend on one another without llamapipe's kernels")
    monkeypatch.setattr("llamapipe._engine.assembly.Gate", EagerGate)
    path = None if draft is None else real_model(draft)
    with (
        lp.Model(real_model(name)) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=8, batch_invariant=True, draft=path) as engine,
    ):
        expected = told(engine, n, n_tokens, speculate="off")
        assert engine.stats().n_drafted == 0
        assert told(engine, n, n_tokens) == expected
        stats = engine.stats()
        assert stats.n_accepted > n

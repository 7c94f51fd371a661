"""Texts with long runs of one kind of character, which end a process whose tokenizer recurses on its stack."""

from __future__ import annotations

import pytest
from support.gguf_models import find_source

from llamapipe.llama import Model

RUNS = {"deepseek-llm": "a", "falcon": "!", "gpt-neox": "7", "llama-bpe": "a"}


@pytest.mark.parametrize("name", RUNS)
def test_a_long_run_of_one_character_is_tokenized(name: str) -> None:
    with Model(find_source() / "models" / f"ggml-vocab-{name}.gguf", vocab_only=True) as model:
        text = RUNS[name] * 100_000
        ids = model.tokenize(text, add_special=False)
        assert b"".join(map(model.piece, ids)).decode() == text

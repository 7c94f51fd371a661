"""The bundled adapter: it turns the model's stories into letters, and is small."""

from __future__ import annotations

import math

import llamapipe as lp

LETTER = "Dear Ben, Today we sailed past a quiet beach. The captain gave me a map, and I found the way."
STORY = "Once upon a time, there was a clever dog named Nora. One day, Nora was walking to the village"


def test_the_adapter_writes_letters_and_the_model_stories() -> None:
    path = lp.demo_model_path().with_name("letters.gguf")
    assert path.stat().st_size < 200_000
    with (
        lp.Model.demo() as model,
        lp.Engine(model, n_ctx=256, n_threads=1) as engine,
        model.load_adapter(path) as letters,
    ):
        assert (letters.name, letters.rank, letters.n_pairs) == ("letters", 4, 28)
        losses = {
            (text, adapter is None): math.log(engine.perplexity(text, adapter=adapter))
            for text in (LETTER, STORY)
            for adapter in (None, letters)
        }
        assert losses[LETTER, False] < 2 < 6 < losses[LETTER, True]
        assert losses[STORY, True] < 1 and losses[STORY, True] < losses[STORY, False]
        params = lp.SamplingParams(max_tokens=24, temperature=0, adapter=letters)
        assert engine.generate("Dear Mia,", params).text.startswith(
            (" Today", " This morning", " Last night")
        )

"""A real model fills in a function as an editor asks for it."""

from __future__ import annotations

import pytest
from support.real_weights import real_model
from support.served import http_client

import llamapipe as lp

BEFORE = '"""Parity."""\n\n\ndef is_even(n: int) -> bool:\n    """Whether n is even."""\n'
AFTER = '\n\n\ndef is_odd(n: int) -> bool:\n    """Whether n is odd."""\n    return n % 2 == 1\n'
EXTRA = [{"filename": "limits.py", "text": "LIMIT = 10\n", "time": [1, 2]}]


@pytest.mark.timeout(600)
def test_a_function_is_completed() -> None:
    with lp.Model(real_model("qwen-0.5b")) as model, lp.Engine(model, n_ctx=1024, n_seq_max=2) as engine:
        params = lp.SamplingParams(max_tokens=24, temperature=0, stop="\n")
        assert engine.infill(BEFORE + "    ret", AFTER, params).text == "urn n % 2 == 0"
        body = {
            "input_prefix": BEFORE,
            "input_suffix": AFTER,
            "input_extra": EXTRA,
            "prompt": "    return",
            "n_predict": 24,
            "top_k": 1,  # a random draw would be another text at times
            "top_p": 0.9,
            "samplers": ["top_k", "top_p", "infill"],
            "seed": 1,
            "response_fields": ["content", "timings/prompt_n", "tokens_cached", "truncated"],
        }
        named = engine.model.tokenize_fim(
            BEFORE, AFTER, extra=[("limits.py", "LIMIT = 10\n")], filename="parity.py"
        )
        text = model.vocab.detokenize(named, unparse_special=True)
        with http_client(engine, timeout=300) as client:
            vim = client.post("/infill", json=body).json()
            assert vim["content"].startswith(" n % 2 == 0")
            # Continue writes the model's control tokens as text.
            prompt = f"<|fim_prefix|>{BEFORE}    return<|fim_suffix|>{AFTER}<|fim_middle|>"
            asked = {"prompt": prompt, "n_predict": 24, "temperature": 0, "stop": ["\n"]}
            assert client.post("/completion", json=asked).json()["content"].strip() == "n % 2 == 0"
            openai = {"prompt": BEFORE + "    return", "suffix": AFTER, "temperature": 0, "max_tokens": 24}
            text_of = client.post("/v1/completions", json=openai).json()["choices"][0]["text"]
            assert text_of.strip().startswith("n % 2 == 0")
            mistral = client.post("/v1/fim/completions", json=openai).json()["choices"][0]["message"][
                "content"
            ]
            assert mistral == text_of
    assert text.startswith(
        "<|repo_name|>myproject\n<|file_sep|>limits.py\nLIMIT = 10\n<|file_sep|>parity.py\n<|fim_prefix|>"
    )

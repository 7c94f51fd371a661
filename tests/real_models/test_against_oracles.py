"""Real weights: token ids of the ``tokenizers`` package; scores and embeddings of a forward pass in numpy."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.numpy_model import Floats, embedding, logprobs
from support.real_weights import real_model, write_minilm
from tokenizers import Tokenizer

import llamapipe as lp

HERE = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "It's 12345 words,\n\n  'LL   été\tहिन्दी 中文字符!!",
    "한국어 русский العربية עברית ไทย ελληνικά 日本語",
    "😀👨\u200d👩\u200d👧 e\u0301\u0323 \ufb01 \u2126 ½ x² \u2003wide\u3000space",
)


def texts(n: int) -> Iterator[str]:
    """Lines of the documentation and the code, of other scripts, and random pieces of both."""
    lines = [
        line
        for path in (
            HERE / "README.md",
            HERE / "design" / "architecture.md",
            HERE / "llamapipe" / "engine.py",
        )
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    rng = random.Random(3)
    yield from SCRIPTS
    everything = "\n".join((*lines, *SCRIPTS))
    for _ in range(n):
        at = rng.randrange(len(everything))
        yield rng.choice(lines)
        yield everything[at : at + rng.randrange(1, 300)]


@pytest.mark.parametrize("name", ["smollm2", "qwen-0.5b"])
def test_token_ids_are_those_of_tokenizers(name: str, tmp_path: Path) -> None:
    """With the file that ``save_tokenizer`` writes, which other programs read."""
    with lp.Model(real_model(name), vocab_only=True) as model:
        theirs = Tokenizer.from_file(str(model.save_tokenizer(tmp_path) / "tokenizer.json"))
        for text in texts(220):
            ours = model.tokenize(text, add_special=False)
            assert theirs.encode(text, add_special_tokens=False).ids == list(ours), text
            assert model.detokenize(ours) == text


# A quantized model computes with activations of 8 bits, numpy with those of 32.
@pytest.mark.parametrize(
    ("name", "n_tokens"),
    [("smollm2", 200), ("qwen-0.5b", 300), pytest.param("gemma3", 700, id="gemma3-window")],
)
def test_log_probabilities_are_those_of_numpy(name: str, n_tokens: int) -> None:
    path = real_model(name)
    with lp.Model(path) as model, lp.Engine(model, n_ctx=1024, n_seq_max=2) as engine:
        tokens = model.tokenize((HERE / "design" / "architecture.md").read_text(encoding="utf-8"))[:n_tokens]
        scored = np.array(engine.score_tokens(tokens).logprobs[-(n_tokens - 1) :], np.float64)
        # The same token by token, from the cache.
        steps = engine.generate(tokens[:40], lp.SamplingParams(max_tokens=8, temperature=0, logprobs=1))
    expected = logprobs(path, tokens)
    chosen = expected[np.arange(n_tokens - 1), tokens[1:]]
    assert np.abs(scored - chosen).mean() < 0.12
    # Activations are quantized: the mean of 199 tokens was off by 0.014.
    assert np.exp(-scored.mean()) == pytest.approx(np.exp(-chosen.mean()), rel=0.02)
    assert steps.logprobs is not None
    told = [token.id for token in steps.logprobs]
    expected = logprobs(path, [*tokens[:40], *told])[39:-1]
    assert np.abs(expected[range(8), told] - [token.logprob for token in steps.logprobs]).max() < 0.3


@lru_cache(maxsize=1)
def unscaled_logprobs(path: Path, tokens: tuple[int, ...]) -> Floats:
    return logprobs(path, tokens)


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_scaled_positions_are_those_of_numpy(scaling: Literal["linear", "yarn"]) -> None:
    path, scale, n_trained = real_model("smollm2"), 0.25, 512
    options: dict[str, Any] = {"yarn_orig_ctx": n_trained} if scaling == "yarn" else {}
    with lp.Model(path) as model:
        tokens = model.tokenize((HERE / "design" / "architecture.md").read_text(encoding="utf-8"))[:200]
        with lp.Engine(model, 512, 1, rope_scaling=scaling, rope_freq_scale=scale, **options) as engine:
            scored = np.array(engine.score_tokens(tokens).logprobs[-199:], np.float64)
            steps = engine.generate(tokens[:40], lp.SamplingParams(max_tokens=8, temperature=0, logprobs=1))
    expected = logprobs(path, tokens, scaling, scale, n_trained)
    chosen = expected[np.arange(199), tokens[1:]]
    unscaled = unscaled_logprobs(path, tuple(tokens))[np.arange(199), tokens[1:]]
    assert np.abs(scored - chosen).mean() < 0.12 < np.abs(scored - unscaled).mean() / 2
    assert steps.logprobs is not None
    told = [token.id for token in steps.logprobs]
    expected = logprobs(path, [*tokens[:40], *told], scaling, scale, n_trained)[39:-1]
    assert np.abs(expected[range(8), told] - [token.logprob for token in steps.logprobs]).max() < 0.3


def test_minilm_against_tokenizers_and_numpy(tmp_path: Path) -> None:
    path = write_minilm(tmp_path / "minilm.gguf")
    described = json.loads(real_model("minilm-tokenizer").read_text(encoding="utf-8"))
    theirs = Tokenizer.from_str(json.dumps({**described, "truncation": None, "padding": None}))
    with lp.Model(path) as model, lp.Embedder(model) as embedder:
        some = [text[:600] for text in texts(40)]
        for text in some:
            assert list(model.tokenize(text)) == theirs.encode(text).ids, text
        long = " ".join(some)
        ids = model.tokenize(long)[:512]
        prompts: list[Sequence[int]] = [*(model.tokenize(text) for text in some[:30]), ids]
        for tokens, vector in zip(prompts, embedder.embed(prompts), strict=True):
            assert float(vector @ embedding(path, tokens)) > 0.99999


def test_minilm_finds_what_is_meant(tmp_path: Path) -> None:
    question = "How do I give back the memory of a model?"
    passages = [
        "Call close() on the model, or use it in a with statement, to free it.",
        "The fox ran across the snow and into the wood.",
        "Sampling parameters have a temperature and a seed.",
        "Bread is baked from flour, water, salt and yeast.",
    ]
    with lp.Model(write_minilm(tmp_path / "minilm.gguf")) as model, lp.Embedder(model) as embedder:
        vectors = embedder.embed([question, *passages])
        assert int(np.argmax(vectors[1:] @ vectors[0])) == 0

"""Extreme logits, vocabularies and contexts: a right answer, or a clear error for that request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from support.gguf_models import Shape, make_model

import llamapipe as lp
from llamapipe.errors import DecodeError, InvalidRequestError

Row = npt.NDArray[np.float32]
INF = np.inf
GREEDY = lp.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[lp.Engine]:
    with lp.Model.demo() as model, lp.Engine(model, n_ctx=64, n_seq_max=4, n_threads=1) as small_engine:
        yield small_engine


def fill(value: float, where: Any = slice(None), other: float | None = None) -> Callable[[Row], None]:
    """Sets a row to ``value``, or only ``where``; the rest to ``other``, if given."""

    def change(row: Row) -> None:
        if other is not None:
            row.fill(other)
        row[where] = value

    return change


ROWS = {
    "all equal": fill(1),
    "all zero": fill(0),
    "all as large as can be": fill(3.4e38),
    "subnormal": fill(1e-45),
    "one infinite": fill(INF, 5),
    "one not a number": fill(np.nan, 5),
    "one finite": fill(-1e30, 7, -INF),
    "far apart": fill(3.4e38, slice(None, None, 2), -3.4e38),
}
LOST = {"all infinite": fill(INF), "all impossible": fill(-INF), "no numbers": fill(np.nan)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1e-6},
    {"temperature": 1e6},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"typical_p": 0.01},
    {"top_n_sigma": 0.001},
    {"mirostat": 1},
    {"mirostat": 2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dynatemp_range": 100.0},
    {"logprobs": 3},
    {"repeat_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"adaptive_target": 0.5},
    {"dry_multiplier": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", ROWS.values(), ids=list(ROWS))
def test_extreme_logits_choose_an_allowed_token(
    engine: lp.Engine, change: Callable[[Row], None], options: dict[str, Any]
) -> None:
    allowed = np.zeros(engine.model.n_vocab, np.float32)
    change(allowed)
    params = lp.SamplingParams(max_tokens=3, seed=1, ignore_eos=True, logits_processors=[change], **options)
    result = engine.generate([300, 301], params)
    assert len(result.token_ids) == 3
    for token in result.token_ids:
        assert 0 <= token < engine.model.n_vocab
        assert allowed[token] > -INF


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", LOST.values(), ids=list(LOST))
def test_rows_without_a_finite_logit(
    engine: lp.Engine, change: Callable[[Row], None], options: dict[str, Any]
) -> None:
    expected = engine.generate([300, 301], GREEDY).token_ids
    params = lp.SamplingParams(max_tokens=3, seed=1, logits_processors=[change], **options)
    results = engine.generate([[300, 301]] * 3, [GREEDY, params, GREEDY], on_error="return")
    assert isinstance(results[1], DecodeError)
    assert "no logit of this request's row is finite" in str(results[1])
    for other in (results[0], results[2]):
        assert isinstance(other, lp.Completion)
        assert list(other.token_ids) == list(expected)


def vocabulary(path: Path, n: int) -> Path:
    """A file with a vocabulary of ``n`` words."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(n - 3))][:n]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(n)])
    writer.add_token_types([2, 3, 3, *([1] * n)][:n])
    writer.add_bos_token_id(min(1, n - 1))
    writer.add_eos_token_id(min(2, n - 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("n", [1, 2, 3, 300_000])
def test_sizes_of_a_vocabulary(tmp_path: Path, n: int) -> None:
    shape = Shape(layers=1, width=32, heads=2, heads_kv=2, ffn=32, context=64)
    path = make_model(tmp_path / "m.gguf", shape=shape, vocab=str(vocabulary(tmp_path / "v.gguf", n)))
    with lp.Engine(path, n_ctx=32, n_seq_max=2) as engine:
        assert engine.model.n_vocab == n
        if n < 3:
            with pytest.raises(InvalidRequestError, match=f"logprobs is 3; this vocabulary has {n} tokens"):
                engine.generate([0], lp.SamplingParams(logprobs=3))
        for options in OPTIONS:
            if options.get("logprobs", 0) > n:
                continue
            params = lp.SamplingParams(max_tokens=4, ignore_eos=n > 3, seed=1, **options)
            (result,) = engine.generate([[0, n - 1]], params, on_error="return")
            if n <= 3 and isinstance(result, DecodeError):
                continue  # a vocabulary of three words may have nothing to say but its end
            assert isinstance(result, lp.Completion), result
            assert all(0 <= token < n for token in result.token_ids)
        score = engine.score([0], [n - 1])
        assert np.isfinite(score.logprobs).all()
        if n == 1:
            assert abs(score.logprobs[0]) < 1e-5


def test_contexts_of_a_few_tokens() -> None:
    with lp.Model.demo() as model:
        for n_ctx in (1, 2, 3):
            with lp.Engine(model, n_ctx=n_ctx, n_seq_max=2) as engine:
                for n_prompt in range(1, 5):
                    if n_prompt >= n_ctx:
                        with pytest.raises(InvalidRequestError, match="one must stay free"):
                            engine.generate([300] * n_prompt, GREEDY)
                    else:
                        completion = engine.generate([300] * n_prompt, GREEDY)
                        assert len(completion.token_ids) == min(3, n_ctx - n_prompt)
                assert engine.score([300], [301]).logprobs.shape == (1,)

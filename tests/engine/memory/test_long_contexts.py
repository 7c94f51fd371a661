"""Scaled positions: what is refused, what is kept apart. ``tests/real_models`` compares them with an oracle."""

from __future__ import annotations

import logging
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from support.gguf_document import STRING, Document, Tensor
from support.gguf_models import recurrent_model

import llamapipe as lp

PROMPT = "Once upon a time there was a dog. " * 6
YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_freq_scale": 0.25}


@pytest.fixture(scope="module")
def model() -> Any:
    with lp.Model(lp.demo_model_path()) as model:
        yield model


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rope_scaling": "yarn"}, "rope_freq_scale, such as 0.25 for four times the context"),
        (
            {"rope_scaling": "linear", "rope_freq_scale": 1},
            "neither rope_freq_scale nor the file sets a factor",
        ),
        ({"rope_scaling": "none", "rope_freq_scale": 0.5}, "rope_scaling is 'none'; give 'yarn' or 'linear'"),
        ({"yarn_orig_ctx": 256}, "yarn_orig_ctx is given, and rope_scaling is 'linear'"),
        (
            {"rope_freq_scale": 0.5, "tuning": lp.EngineTuning(yarn_beta_fast=16)},
            "yarn_beta_fast is given, and rope_scaling is 'linear'; it needs rope_scaling='yarn'",
        ),
        ({**YARN, "rope_freq_scale": 0.001, "yarn_orig_ctx": 2**26}, "for contexts of 6.71e+10 tokens"),
        ({"rope_scaling": "ntk"}, "rope_scaling"),
        ({"rope_freq_scale": 0}, "from 0.001 to 1000"),
        ({"rope_freq_scale": float("nan")}, "from 0.001 to 1000"),
        ({"rope_freq_base": -1.0}, "rope_freq_base is -1.0"),
        ({"rope_freq_base": float("inf")}, "rope_freq_base is inf"),
        ({"yarn_orig_ctx": 0}, "yarn_orig_ctx is 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(model: lp.Model, options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        lp.Engine(model, n_ctx=128, **options)


@pytest.mark.parametrize("value", ["0.5", True, b"1"])
def test_factors_are_numbers(model: lp.Model, value: Any) -> None:
    with pytest.raises(TypeError, match="rope_freq_scale must be a number"):
        lp.Engine(model, n_ctx=128, rope_freq_scale=value)


@pytest.mark.parametrize("options", [YARN, {"rope_freq_scale": 0.5}, {"rope_freq_base": 500_000.0}])
def test_cells_are_of_their_positions(model: lp.Model, options: dict[str, Any]) -> None:
    """Prefixes are reused as ever; a snapshot of other positions is refused."""
    params = lp.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
    with lp.Engine(model, n_ctx=256, n_seq_max=2) as plain, lp.Engine(model, 256, 2, **options) as scaled:
        done = scaled.generate(PROMPT, params)
        again = scaled.generate(PROMPT, params)
        assert again.n_cached_tokens > 0 and again.token_ids == done.token_ids
        assert done.logprobs != plain.generate(PROMPT, params).logprobs
        with scaled.start(PROMPT, params) as running:
            snapshot = running.snapshot()
        with pytest.raises(ValueError, match="rope options"):
            plain.restore(snapshot)
        with lp.Engine(model, 256, 2, **options) as same:
            assert [token.id for token in same.restore(snapshot, params)] == done.token_ids


def test_snapshots_of_other_factors_are_refused(tmp_path: Path) -> None:
    """llama.cpp chooses between two sets of factors by the length of the context."""
    document = Document.read(lp.demo_model_path())
    document.put("llama.rope.scaling.original_context_length", 4, 512)
    document.put("llama.rope.scaling.type", STRING, b"longrope")
    for name, factor in ((b"rope_factors_long.weight", 4.0), (b"rope_factors_short.weight", 1.0)):
        document.tensors.append(Tensor(name, [32], 0, struct.pack("<32f", *[factor] * 32)))
    path = tmp_path / "long.gguf"
    document.write(path)
    params = lp.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with lp.Model(path) as model, lp.Engine(model, 512, 1) as short, lp.Engine(model, 768, 1) as long:
        assert short.generate(PROMPT, params).text != long.generate(PROMPT, params).text
        with short.start(PROMPT, params) as running:
            snapshot = running.snapshot()
        with pytest.raises(ValueError, match="rope options"):
            long.restore(snapshot)
        with lp.Engine(model, 256, 1) as same:
            same.restore(snapshot).close()


def test_a_scaled_context_is_not_warned_of(caplog: pytest.LogCaptureFixture, model: lp.Model) -> None:
    n_ctx = model.n_ctx_train * 4
    with caplog.at_level(logging.WARNING, "llamapipe"), lp.Engine(model, n_ctx=n_ctx, n_seq_max=1, **YARN):
        assert not caplog.records
    with caplog.at_level(logging.WARNING, "llamapipe"), lp.Engine(model, n_ctx=n_ctx, n_seq_max=1):
        assert "docs/guides/long-contexts.md" in caplog.text


def test_models_without_rotations_say_so(tmp_path: Path) -> None:
    recurrent_model(tmp_path / "mamba.gguf")
    with (
        lp.Model(tmp_path / "mamba.gguf") as model,
        pytest.raises(ValueError, match="has no rotary positions"),
    ):
        lp.Engine(model, n_ctx=128, rope_freq_base=1e6)

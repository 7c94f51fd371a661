"""LoRAs of quantized models, of experts and of other architectures: logits are those of the merged model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from support.adapters import dequantized, logits, make_adapter, matrices_of, merged
from support.every_architecture import fill, grow
from support.gguf_models import PRESETS, make_model

import llamapipe as lp
from llamapipe.errors import ModelLoadError

SHAPE = PRESETS["tiny"].shape


def of_file(path: Path) -> np.ndarray:
    with lp.Model(path) as model:
        return logits(model)


@pytest.mark.parametrize("kernels", ["auto", "ggml"])
@pytest.mark.parametrize("type_name", ["f16", "q8_0", "q4_k_m"])
def test_an_adapter_is_as_exact_as_the_weights(
    tmp_path: Path, type_name: str, kernels: Literal["auto", "ggml"]
) -> None:
    """What an adapter adds is computed exactly: the error is that of the model without it."""
    shape = replace(SHAPE, width=256, ffn=256)
    path = make_model(tmp_path / "model.gguf", shape=shape, type_name=type_name)
    file = make_adapter(tmp_path / "a.gguf", path, rank=8)
    exact = dequantized(tmp_path / "f32.gguf", path)
    exact_base = of_file(exact)
    expected = of_file(merged(tmp_path / "merged.gguf", exact, [(file, 1.0)]))
    with lp.Model(path, kernels=kernels) as model:
        model.load_adapter(file, "a")
        error_of_base = np.abs(logits(model) - exact_base).max()
        error = np.abs(logits(model, model.adapters.choose("a")) - expected).max()
    assert np.abs(expected - exact_base).max() > 20 * error_of_base
    assert error < max(2 * error_of_base, 1e-4)  # some processors multiply F16 without any error


def test_experts_have_adapters(tmp_path: Path) -> None:
    shape = replace(SHAPE, experts=4, experts_used=2)
    path = make_model(tmp_path / "moe.gguf", shape=shape, type_name="f32")
    matrices = r"blk\.\d+\.(?:attn_(?:q|k|v|output)|ffn_(?:gate|up|down)_exps)\.weight"
    file = make_adapter(tmp_path / "a.gguf", path, matrices=matrices)
    expected = of_file(merged(tmp_path / "merged.gguf", path, [(file, 1.0)]))
    with lp.Model(path) as model:
        assert model.load_adapter(file, "a").n_pairs == 7 * shape.layers
        values = logits(model, model.adapters.choose("a"))
        assert np.abs(values - logits(model)).max() > 0.1
    np.testing.assert_allclose(values, expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("architecture", "n_ignored"),
    [("qwen2", 0), ("qwen3", 0), ("gemma2", 0), ("gemma3", 0), ("granite", 0), ("olmo2", 0), ("phi2", 0), ("glm4", 0),
     ("starcoder2", 0), ("gpt-oss", 3), ("mamba", 2), ("minicpm3", 4)],
)  # fmt: skip
def test_adapters_of_any_matrix_work_or_are_refused(
    tmp_path: Path, architecture: str, n_ignored: int
) -> None:
    """Each kind of matrix alone: llama.cpp would ignore a pair whose product its graph does without adapters."""
    path = tmp_path / "model.gguf"
    grow(path, architecture)
    fill(path)
    file = tmp_path / "a.gguf"
    with lp.Model(path) as model:
        base = logits(model)
        n_refused = 0
        for matrices in matrices_of(path):
            make_adapter(file, path, matrices=matrices)
            expected = of_file(merged(tmp_path / "merged.gguf", path, [(file, 1.0)]))
            with suppress(ModelLoadError):
                model.load_adapter(file, "a")
            if not model.adapters.loaded():
                with pytest.raises(ModelLoadError, match=r"to which llama\.cpp applies no adapter"):
                    model.load_adapter(file, "a")
                n_refused += 1
                continue
            values = logits(model, model.adapters.choose("a"))
            model.adapters.loaded()[0].close()
            changed = np.abs(expected - base).max()
            assert changed > 1e-3, matrices
            assert np.abs(values - expected).max() <= 1e-3 * max(1, changed), matrices
        assert n_refused == n_ignored

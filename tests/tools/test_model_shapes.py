"""The presets of architectures: each tiny model has every kind of layer, and every layer and token matters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_models import ARCHITECTURES, TOOLS, make_model, tiny_architecture

import llamapipe as lp
from llamapipe.llama import Context, DecodeBatch, Model

N = 60


def last_rows(context: Context, texts: list[list[int]]) -> list[np.ndarray]:
    """The logits after each text."""
    rows = []
    for i, text in enumerate(texts):
        context.decode(
            DecodeBatch(text, range(len(text)), [i] * len(text), [False] * (len(text) - 1) + [True])
        )
        rows.append(np.array(context.logits(len(text) - 1)))
    return rows


def alike(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_next_token_depends_on_all_that_came_before(name: str, tmp_path: Path) -> None:
    """A cache that kept a wrong state would go unnoticed with a model that only looks at its last tokens."""
    path = tiny_architecture(tmp_path / "m.gguf", name)
    assert path.stat().st_size < 8e6
    rng = np.random.default_rng(1)
    text = rng.integers(300, 500, N).tolist()
    begins_otherwise = rng.integers(300, 500, N // 2).tolist() + text[N // 2 :]
    with Model(path) as model, Context(model, n_ctx=256, n_seq_max=3) as context:
        row, same, other = last_rows(context, [text, text, begins_otherwise])
    assert np.isfinite(row).all()
    assert 1.5 < row.std() < 6
    assert alike(row, same) > 0.9999
    assert alike(row, other) < 0.97, "the beginning has no effect"


@pytest.mark.parametrize("name", ["gemma3-270m", "qwen3.5-0.8b", "rwkv7-0.4b", "glm-4.7-flash"])
def test_a_model_of_each_shape_generates(name: str, tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path / "m.gguf", name, type_name="q8_0")
    with lp.Model(path) as model, lp.Engine(model, n_ctx=256, n_seq_max=2) as engine:
        params = lp.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        answers = {
            tuple(engine.generate(prompt, params).token_ids) for prompt in ("The cat", "A dog that was")
        }
    assert len(answers) == 2
    assert all(len(set(answer)) > 3 for answer in answers), "it repeats one token"


def test_optional_tensors_that_published_models_lack(tmp_path: Path) -> None:
    """llama.cpp names a `cls` for Qwen 3.5, which would make it a reranker."""
    path = tiny_architecture(tmp_path / "m.gguf", "qwen3.5-0.8b")
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert "token_embd.weight" in names
    assert not [name for name in names if name.startswith(("cls", "output.weight", "dense_"))]


def test_experts_are_mxfp4_and_all_there(tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path / "m.gguf", "gpt-oss-20b", type_name="mxfp4_moe")
    experts = [tensor for tensor in gguf.GGUFReader(path).tensors if "_exps.weight" in tensor.name]
    assert {tensor.tensor_type for tensor in experts} == {gguf.GGMLQuantizationType.MXFP4}
    assert {int(tensor.shape[-1]) for tensor in experts} == {8}


def test_layers_are_cut(tmp_path: Path) -> None:
    gemma = ARCHITECTURES["gemma4-e2b"]
    whole = gemma.metadata()
    assert whole["attention.shared_kv_layers"] == 20
    assert whole["feed_forward_length"].count(6144) == 15
    assert len(gemma.cut(20).metadata()["attention.sliding_window_pattern"]) == 20
    with pytest.raises(ValueError, match="layers is 9, a gemma4 of these sizes must have at least 10"):
        gemma.cut(9)
    path = make_model(tmp_path / "m.gguf", shape=ARCHITECTURES["lfm2-1.2b"].shrunk().cut(9))
    with Model(path) as model:
        assert model.n_layer == 9


def test_what_llama_cpp_refuses_is_told(tmp_path: Path) -> None:
    gemma = ARCHITECTURES["gemma4-e2b"].shrunk()
    broken = replace(gemma, sizes=gemma.sizes | {"attention.key_length_swa": 48})
    with pytest.raises(
        ValueError, match=r"llama\.cpp cannot make a gemma4 of these sizes: .*n_embd_head_k == n_embd_head_v"
    ):
        make_model(tmp_path / "m.gguf", shape=broken)
    assert not (tmp_path / "m.gguf").exists()


def test_command_line(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOLS / "make_model.py"), *words, str(tmp_path / "m.gguf")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    process = run("--shape", "mamba2-1.3b", "--tiny", "--layers", "3", "--vocab", "builtin-spm")
    assert process.returncode == 0, process.stderr
    with Model(tmp_path / "m.gguf") as model:
        assert (model.n_layer, model.is_recurrent) == (3, True)
    refused = run("--shape", "mamba2-1.3b", "--tiny", "--width", "64")
    assert refused.returncode == 1
    assert "width cannot be set, layers and context can" in refused.stderr

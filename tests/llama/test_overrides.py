"""Changes of a file while it is loaded: values of its metadata, and the devices of its tensors."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.backends import BACKEND, ON_DEVICE
from support.gguf_models import tiny_architecture

import llamapipe as lp
from llamapipe.errors import BackendError, InvalidRequestError, ModelLoadError
from llamapipe.llama import _overrides

PROMPT = "Once upon a time there was a dog. " * 4
GREEDY = lp.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
DEMO = lp.demo_model_path()


def logprobs(**options: Any) -> list[float]:
    with lp.Model(DEMO, **options) as model, lp.Engine(model, n_ctx=256, n_seq_max=1) as engine:
        done = engine.generate(PROMPT, GREEDY)
    assert done.logprobs is not None
    return [token.logprob for token in done.logprobs]


# ---- metadata
def test_values_are_changed() -> None:
    overrides: dict[str, Any] = {
        "llama.context_length": 100,
        "llama.rope.freq_base": 5000,
        "general.name": "Other",
        "x.is": True,
    }
    with lp.Model(DEMO, kv_overrides=overrides) as model, lp.Model(DEMO) as plain:
        assert model.n_ctx_train == 100
        assert (model.metadata["general.name"], model.metadata["x.is"]) == ("Other", "true")
        assert model.file_metadata["llama.rope.freq_base"] == 5000.0
        assert model.fingerprint != plain.fingerprint
        with lp.Engine(model, 128) as engine, engine.start("a", GREEDY) as running:
            snapshot = running.snapshot()
        with lp.Engine(plain, 128) as engine, pytest.raises(InvalidRequestError, match="from another model"):
            engine.restore(snapshot)


def test_a_changed_value_is_what_is_computed_with() -> None:
    own = logprobs()
    assert logprobs(kv_overrides={"llama.rope.freq_base": 10000}) == own
    assert logprobs(kv_overrides={"llama.rope.freq_base": 100}) != own


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"llama.context_length": "many"},
            "kv_overrides has 'many' for llama.context_length, which is of type u32",
        ),
        ({"llama.context_length": -1}, "has -1 for llama.context_length, which is of type u32"),
        ({"llama.context_length": True}, "has True for llama.context_length"),
        ({"llama.context_length": 2.0}, "has 2.0 for llama.context_length"),
        ({"general.name": 5}, "has 5 for general.name, which is of type string"),
        ({"tokenizer.ggml.tokens": "a"}, "has 'a' for tokenizer.ggml.tokens, which is of type array"),
        ({"llama.block_count": 5}, "blk.4"),
        ({"llama.attention.head_count": 0}, "attn_q"),
        ({"llama.embedding_length": 2**31}, "embedding_length"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
    ],
)
def test_the_changed_file_is_checked(overrides: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        lp.Model(DEMO, kv_overrides=overrides)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        ("a=b", TypeError, "must be a mapping"),
        ({1: 2}, TypeError, "keys of type str"),
        ({"a": None}, TypeError, "must be a bool, int, float or str"),
        ({"a": [1]}, TypeError, "must be a bool, int, float or str"),
        ({"a" * 128: 1}, ValueError, "128 bytes"),
        ({"a": "é" * 64}, ValueError, "128 bytes"),
        ({"a\0b": 1}, ValueError, "none that is 0"),
        ({"a": "\ud800"}, ValueError, "lone surrogate"),
        ({"": 1}, ValueError, "it has no name"),
        ({"a": 2**63}, ValueError, "it must be from -2"),
        ({"a": float("nan")}, ValueError, "is nan; it must be finite"),
        ({"general.architecture": "qwen2"}, ValueError, "cannot be changed"),
        ({"split.count": 2}, ValueError, "cannot be changed"),
        ({"tokenizer.chat_template": "x"}, ValueError, "give chat_template"),
    ],
)
def test_what_llama_cpp_cannot_take_is_refused(overrides: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        lp.Model(DEMO, kv_overrides=overrides)


def test_random_changes_end_nothing() -> None:
    """A changed value is loaded, or refused as it would be in the file; what is loaded computes."""
    rng = random.Random(7)
    with lp.Model(DEMO, vocab_only=True) as model:
        keys = [key for key in model.metadata if not key.startswith("general.")]
    values = [0, 1, 3, 64, 2400, 2**31, 2**32 - 1, -1, 2**62, 0.0, 1e-30, 1e30, True, "", "llama", "none"]
    n_loaded = 0
    for _ in range(150):
        overrides: dict[str, Any] = {
            rng.choice(keys): rng.choice(values) for _ in range(rng.choice([1, 1, 2]))
        }
        try:
            model = lp.Model(DEMO, kv_overrides=overrides, kernels=rng.choice(["auto", "ggml"]))
        except (ModelLoadError, ValueError):
            continue
        with model, lp.Engine(model, n_ctx=64, n_seq_max=1) as engine:
            engine.generate([5, 6, 7], lp.SamplingParams(max_tokens=2))
            n_loaded += 1
    assert n_loaded > 5


# ---- tensors
@pytest.mark.parametrize(
    ("placement", "error", "says"),
    [
        ({"ffn_upp": "CPU"}, ValueError, "is in the name of no tensor"),
        ({"ffn_(": "CPU"}, ValueError, "not a regular expression"),
        ({"ffn_up": "GPU7"}, BackendError, "the model may use: "),
        ({"ffn_up": 5}, TypeError, "names or Device objects, not int"),
        ({5: "CPU"}, TypeError, "patterns of type str, not int"),
        ("exps=CPU", TypeError, "must be a mapping"),
    ],
)
def test_wrong_placements_are_refused(placement: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        lp.Model(DEMO, tensor_placement=placement)


def test_experts_of_a_model_without_some() -> None:
    with pytest.raises(ValueError, match=r"n_cpu_moe is given, and demo\.gguf has no experts"):
        lp.Model(DEMO, n_cpu_moe=2)


def test_the_first_pattern_counts_and_experts_are_counted(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tiny_architecture(tmp_path / "moe.gguf", "gpt-oss-20b")
    with caplog.at_level(logging.INFO, "llamapipe"), lp.Model(path, n_cpu_moe=1) as model:
        n = sum(name.startswith("blk.0.") and "_exps" in name for name in model.tensors)
        assert n and f"moe.gguf: {n} tensors on CPU" in caplog.text


def test_a_cache_of_experts_without_a_device_or_experts(tmp_path: Path) -> None:
    tuning = lp.EngineTuning(moe_cache_size=2**20)
    path = tiny_architecture(tmp_path / "moe.gguf", "gpt-oss-20b")
    with lp.Model(path, n_cpu_moe=9, devices=["CPU"]) as model:
        assert model.n_cpu_expert_layers > 2
        with pytest.raises(ValueError, match=r"moe_cache_size is given, but no GPU computes the model"):
            lp.Engine(model, tuning=tuning)


@pytest.mark.device
@pytest.mark.skipif(not ON_DEVICE, reason='needs a device beside the CPU: `nox -s "tests(vulkan)"`')
def test_a_cache_of_experts_changes_no_text(tmp_path: Path) -> None:
    """Fewer experts than a layer has are in it, so they change all the time."""
    path = tiny_architecture(tmp_path / "moe.gguf", "gpt-oss-20b")
    prompts = [[5 + i, 6, 7 + i] for i in range(4)]
    params = lp.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def texts(moe_cache_size: int | None) -> list[list[int]]:
        tuning = lp.EngineTuning(moe_cache_size=moe_cache_size)
        with lp.Engine(model, n_ctx=256, n_seq_max=4, tuning=tuning) as engine:
            return [done.token_ids for done in engine.generate(prompts, params)]

    with (
        lp.Model(path) as model,
        pytest.raises(ValueError, match="no layer keeps all of its experts on the CPU"),
    ):
        texts(2**20)
    with lp.Model(path, n_cpu_moe=9) as model:
        assert texts(None) == texts(200_000) == texts(2**30)
        with pytest.raises(BackendError, match="too small to hold the experts of one token"):
            texts(1000)


def test_names_are_taken_literally() -> None:
    """llama.cpp searches for the patterns: each must match its tensors and no other."""
    import re

    from llamapipe.native.load import native

    with lp.Model(DEMO) as model:
        names = list(model.tensors)
    placed = {name: lp.devices()[-1] for name in names if "attn_q" in name or name == "token_embd.weight"}
    entries, texts = _overrides.native_placement(native().ffi, native().lib, placed)
    patterns = [native().ffi.string(text).decode() for text in texts]
    assert len(entries) == len(patterns) + 1 == 3
    assert {name for name in names if any(re.search(p, name) for p in patterns)} == set(placed)


@pytest.mark.device
@pytest.mark.skipif(not ON_DEVICE, reason='needs a device beside the CPU: `nox -s "tests(vulkan)"`')
@pytest.mark.parametrize("pattern", [r"blk\.[01]\.", "ffn_", "attn_k|attn_v", "token_embd"])
def test_parts_on_the_cpu_give_the_same(pattern: str) -> None:
    own, mixed = logprobs(), logprobs(tensor_placement={pattern: "CPU"})
    assert max(abs(a - b) for a, b in zip(own, mixed, strict=True)) < 0.05
    assert BACKEND != "cpu"


@pytest.mark.device
@pytest.mark.skipif(not ON_DEVICE, reason='needs a device beside the CPU: `nox -s "tests(vulkan)"`')
def test_parts_of_a_model_on_the_cpu_may_lie_on_the_device() -> None:
    device = next(device.name for device in lp.devices() if device.type != "cpu")
    own = logprobs(n_gpu_layers=0)
    mixed = logprobs(n_gpu_layers=0, tensor_placement={"ffn_": device})
    assert max(abs(a - b) for a, b in zip(own, mixed, strict=True)) < 0.05

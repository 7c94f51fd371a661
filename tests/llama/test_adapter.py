"""LoRAs: what a model with one computes, what is refused before llama.cpp reads it, and how long it lives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.adapters import logits, make_adapter, merged, new_writer, rows, write_pairs
from support.gguf_document import ARRAY, STRING, Document
from support.gguf_models import finish, tiny_model

import llamapipe as lp
from llamapipe.errors import EngineClosedError, InvalidRequestError, ModelLoadError
from llamapipe.llama.adapter import part_of
from llamapipe.llama.context import Context


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("adapters") / "tiny.gguf", type_name="f32")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[lp.Model]:
    with lp.Model(path) as model:
        yield model


@pytest.mark.parametrize("kernels", ["auto", "ggml"])
@pytest.mark.parametrize("scale", [1.0, -0.5, 2.0])
def test_logits_are_those_of_the_merged_model(
    tmp_path: Path, path: Path, scale: float, kernels: Literal["auto", "ggml"]
) -> None:
    file = make_adapter(tmp_path / "a.gguf", path, rank=4)
    with lp.Model(merged(tmp_path / "merged.gguf", path, [(file, scale)]), kernels=kernels) as whole:
        expected = logits(whole)
    with lp.Model(path, kernels=kernels) as model:
        base = logits(model)
        model.load_adapter(file, "a")
        values = logits(model, model.adapters.choose({"a": scale}))
    assert np.abs(values - base).max() > 0.1
    np.testing.assert_allclose(values, expected, rtol=0, atol=2e-4)


def test_adapters_add_up(tmp_path: Path, path: Path) -> None:
    files = [make_adapter(tmp_path / f"{i}.gguf", path, seed=i, rank=i, alpha=None) for i in (2, 7)]
    with lp.Model(merged(tmp_path / "merged.gguf", path, [(files[0], 0.7), (files[1], -1.2)])) as whole:
        expected = logits(whole)
    with lp.Model(path) as model:
        first, second = (model.load_adapter(file) for file in files)
        values = logits(model, model.adapters.choose({first: 0.7, second: -1.2}))
    np.testing.assert_allclose(values, expected, rtol=0, atol=2e-4)


def test_a_context_changes_its_adapters_and_back(tmp_path: Path, path: Path) -> None:
    with lp.Model(path) as model:
        base = logits(model)
        for i in range(2):
            model.load_adapter(make_adapter(tmp_path / f"{i}.gguf", path, seed=i), f"{i}")
        sets = [None, *(model.adapters.choose(f"{i}") for i in range(2))]
        alone = [logits(model, choice) for choice in sets]
        with Context(model, n_ctx=64, type_k="f32", type_v="f32", n_threads=1) as context:
            for i in (1, 0, 2, 1, 2, 0, 0):
                context.set_adapters(sets[i])
                np.testing.assert_array_equal(rows(context), alone[i])
    np.testing.assert_array_equal(base, alone[0])


def test_what_an_adapter_says_of_itself(tmp_path: Path, path: Path, model: lp.Model) -> None:
    file = make_adapter(tmp_path / "a.gguf", path, rank=3, alpha=6.0, name="stories")
    with model.load_adapter(file) as adapter:
        assert (adapter.name, adapter.rank, adapter.alpha, adapter.n_pairs) == ("stories", 3, 6.0, 14)
        assert adapter.path == file and adapter.size_bytes == file.stat().st_size and adapter.model is model
        assert repr(adapter) == "<Adapter 'stories' rank=3 n_pairs=14>"
        with pytest.raises(ValueError, match="already has an adapter 'stories'"):
            model.load_adapter(file)
        assert [model.load_adapter(file, "b"), adapter] == model.adapters.loaded()[::-1]
    assert adapter.closed and "closed" in repr(adapter)
    adapter.close()
    assert [loaded.name for loaded in model.adapters.loaded()] == ["b"]
    model.adapters.loaded()[0].close()


def test_without_a_name_the_file_names_it(tmp_path: Path, path: Path, model: lp.Model) -> None:
    with model.load_adapter(make_adapter(tmp_path / "sql-r4.gguf", path)) as adapter:
        assert adapter.name == "sql-r4"


def test_the_memory_lives_as_long_as_somebody_computes_with_it(tmp_path: Path, path: Path) -> None:
    with lp.Model(path) as model:
        adapter = model.load_adapter(make_adapter(tmp_path / "a.gguf", path), "a")
        expected = logits(model, model.adapters.choose("a"))
        with Context(model, n_ctx=64, type_k="f32", type_v="f32", n_threads=1) as context:
            context.set_adapters(model.adapters.choose("a"))
            adapter.close()
            gc.collect()
            np.testing.assert_array_equal(rows(context), expected)
            context.set_adapters(None)
        with pytest.raises(InvalidRequestError, match="'a' is closed"):
            model.adapters.choose(adapter)
        with pytest.raises(InvalidRequestError, match="no adapter 'a'; loaded are: none"):
            model.adapters.choose("a")


def test_a_model_closes_its_adapters(tmp_path: Path, path: Path) -> None:
    model = lp.Model(path)
    adapter = model.load_adapter(make_adapter(tmp_path / "a.gguf", path))
    kept = model.adapters.choose(adapter)
    model.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        part_of(adapter)
    del kept
    with pytest.raises(EngineClosedError):
        model.load_adapter(adapter.path)


def pair(n_rows: int = 64, n_columns: int = 64, rank: int = 4, other: int | None = None) -> list[np.ndarray]:
    return [
        np.ones((rank, n_columns), np.float32),
        np.ones((n_rows, rank if other is None else other), np.float32),
    ]


def named(name: str, *halves: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{name}.lora_{letter}": half for letter, half in zip("ab", halves, strict=False)}


Q, K = "blk.0.attn_q.weight", "blk.1.attn_k.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "it has no tensors"),
        (named(Q, pair()[0]), f"{Q}.lora_b is missing"),
        (named("blk.2.attn_q.weight", *pair()), "'blk.2.attn_q.weight', and this model has no such tensor"),
        (named(Q, *pair(n_rows=32)), f"{Q}.lora_b is 4 × 32, and 4 × 64 fits this model's {Q}, which is 64 × 64"),
        (named(Q, *pair(n_columns=128)), f"{Q}.lora_a is 128 × 4, and 64 × 4 fits"),
        (named(Q, *pair(other=5)), f"{Q}.lora_a is 64 × 4, and 64 × 5 fits"),
        (named(K, *pair()), f"{K}.lora_b is 4 × 64, and 4 × 32 fits"),
        (named("token_embd.weight", *pair()), "also this model's output matrix"),
        (named("output_norm.weight", *pair()), "a vector of this model and not a matrix"),
        ({**named(Q, *pair()), "blk.0.attn_norm.weight": np.ones(64, np.float32)}, "norm 'blk.0.attn_norm.weight'"),
        ({"blk.0.attn_q.weight": pair()[0]}, "not half of a pair"),
        ({f"{Q}.lora_a": pair()[0].astype(np.int32), f"{Q}.lora_b": pair()[1]}, "I32"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    tmp_path: Path, model: lp.Model, tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        model.load_adapter(write_pairs(tmp_path / "a.gguf", "llama", tensors))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "add", "message"),
    [
        ("adapter.lora.alpha", lambda w: w.add_uint32("adapter.lora.alpha", 8), "alpha must be f32, it is u32"),
        ("adapter.lora.alpha", lambda w: w.add_float32("adapter.lora.alpha", float("nan")), "alpha is nan"),
        ("adapter.type", lambda w: w.add_uint32("adapter.type", 1), "adapter.type must be a string"),
        ("adapter.type", lambda w: w.add_string("adapter.type", "ia3"), "adapter.type is 'ia3'"),
        ("general.type", lambda w: w.add_string("general.type", "model"), "it is a model"),
        ("general.architecture", lambda w: w.add_string("general.architecture", "qwen2"),
            "architecture 'qwen2', and this model's is 'llama'"),
    ],
)  # fmt: skip
def test_keys_of_other_types_or_values(
    tmp_path: Path, model: lp.Model, key: str, add: object, message: str
) -> None:
    writer = new_writer(tmp_path / "a.gguf", "llama")
    writer.kv_data[0].pop(key, None)
    add(writer)  # type: ignore[operator]
    for name, values in named(Q, *pair()).items():
        writer.add_tensor(name, values)
    finish(writer)
    with pytest.raises(ModelLoadError) as caught:
        model.load_adapter(tmp_path / "a.gguf")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((ARRAY, [5, 6], 5), "invocation_tokens must be an array of u32, it is one of i32"),
        ((ARRAY, [b"<tool>"], STRING), "must be an array of u32, it is one of string"),
        ((4, 5), "must be an array of u32, it is u32"),
        ((ARRAY, [], 4), "is empty, so nothing would activate the adapter"),
        ((ARRAY, [5, 100_000], 4), "has the token 100000, and this model's vocabulary has"),
        ((ARRAY, [2**32 - 1], 4), "has the token 4294967295"),
    ],
)
def test_invocation_tokens_that_are_refused(
    tmp_path: Path, path: Path, model: lp.Model, value: tuple[Any, ...], message: str
) -> None:
    file = make_adapter(tmp_path / "a.gguf", path)
    document = Document.read(file)
    document.put("adapter.alora.invocation_tokens", *value)
    document.write(file)
    with pytest.raises(ModelLoadError) as caught:
        model.load_adapter(file)
    assert message in str(caught.value)


def test_invocation_tokens(tmp_path: Path, path: Path, model: lp.Model) -> None:
    plain = make_adapter(tmp_path / "plain.gguf", path, seed=2)
    with (
        model.load_adapter(make_adapter(tmp_path / "a.gguf", path, invocation=[7, 8])) as a,
        model.load_adapter(make_adapter(tmp_path / "b.gguf", path, invocation=[9], seed=3)) as b,
        model.load_adapter(plain) as c,
    ):
        assert (a.invocation_tokens, b.invocation_tokens, c.invocation_tokens) == ((7, 8), (9,), ())
        with pytest.raises(InvalidRequestError, match="several activated LoRAs"):
            model.adapters.choose({a: 1.0, b: 0.5})
        both, alone = model.adapters.choose({a: 1.0, c: 0.5}), model.adapters.choose({a: 1.0, b: 0.0})
        assert both is not None and alone is not None
        assert both.invocation == alone.invocation == (7, 8)
        assert both.before == model.adapters.choose({c: 0.5}) and alone.before is None


def test_other_files_are_refused_with_a_fix(tmp_path: Path, path: Path, model: lp.Model) -> None:
    for file, message in ((path, "it is a model"), (tmp_path / "no.gguf", "does not exist")):
        with pytest.raises(ModelLoadError, match=message):
            model.load_adapter(file)
    with pytest.raises(ModelLoadError, match="it is a LoRA adapter"):
        lp.Model(make_adapter(tmp_path / "a.gguf", path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"PEFT; convert it with llama.cpp's convert_lora_to_gguf\.py"):
        model.load_adapter(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes((200).to_bytes(8, "little") + b'{"base_model' + bytes(60))
    with pytest.raises(
        ModelLoadError, match=r"safetensors file; convert it with .* convert_lora_to_gguf\.py"
    ):
        model.load_adapter(weights)
    whole = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-40])
    with pytest.raises(ModelLoadError, match="truncated"):
        model.load_adapter(tmp_path / "cut.gguf")


def test_wrong_names_are_refused(model: lp.Model) -> None:
    for name, error in ((3, TypeError), ("", ValueError), ("x" * 300, ValueError)):
        with pytest.raises(error, match="name of an adapter"):
            model.load_adapter("a.gguf", name)  # type: ignore[arg-type]

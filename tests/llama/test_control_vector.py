"""Control vectors: what a model with one computes, what is refused, and that they go with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.adapters import TOKENS, logits, make_adapter, make_control_vector, merged, rows, steered
from support.gguf_models import PRESETS, finish, make_model, recurrent_model

import llamapipe as lp
from llamapipe.errors import InvalidRequestError, ModelLoadError
from llamapipe.llama.adapter import part_of
from llamapipe.llama.context import Context
from llamapipe.native.load import native

N_EMBD = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = replace(PRESETS["tiny"].shape, layers=5)
    return make_model(tmp_path_factory.mktemp("vectors") / "tiny.gguf", shape=shape, type_name="f32")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[lp.Model]:
    with lp.Model(path) as model:
        yield model


def close(values: np.ndarray, expected: np.ndarray) -> None:
    has_kernels = native().lib.lp_kernels_attend()
    error = 2e-4 if has_kernels else 1e-3  # ggml's attention rounds more
    np.testing.assert_allclose(values, expected, rtol=0, atol=error)


def test_logits_are_those_of_a_model_that_adds_them_itself(tmp_path: Path, path: Path) -> None:
    first = make_control_vector(tmp_path / "calm.gguf", N_EMBD, range(1, 5), seed=1)
    second = make_control_vector(tmp_path / "glad.gguf", N_EMBD, [2, 3], seed=2)
    used = [(first, 0.7), (second, -1.5)]
    with lp.Model(steered(tmp_path / "one.gguf", path, used[:1])) as single:
        expected = logits(single)
    with lp.Model(steered(tmp_path / "both.gguf", path, used)) as both:
        expected_both = logits(both)
    with lp.Model(path) as model:
        base = logits(model)
        for file in (first, second):
            model.load_control_vector(file)
        assert np.abs(expected - base).max() > 0.1 and np.abs(expected_both - expected).max() > 0.1
        close(logits(model, model.adapters.choose({"calm": 0.7})), expected)
        close(logits(model, model.adapters.choose({"calm": 0.7, "glad": -1.5})), expected_both)


def test_layers_limit_what_is_changed(tmp_path: Path, path: Path, model: lp.Model) -> None:
    file = make_control_vector(tmp_path / "a.gguf", N_EMBD, range(1, 5))
    part = make_control_vector(tmp_path / "b.gguf", N_EMBD, range(1, 5))
    document = [t for t in gguf.GGUFReader(str(part)).tensors if t.name in ("direction.2", "direction.3")]
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "controlvector")
    for tensor in document:
        writer.add_tensor(tensor.name, tensor.data.copy())
    finish(writer)
    with lp.Model(steered(tmp_path / "steered.gguf", path, [(tmp_path / "c.gguf", 1.0)])) as whole:
        expected = logits(whole)
    with (
        model.load_control_vector(file, layers=(2, 3)) as vector,
        model.load_control_vector(tmp_path / "c.gguf", name="same") as same,
    ):
        assert vector.layers == same.layers == (2, 3)
        close(logits(model, model.adapters.choose(vector)), expected)
        assert model.adapters.choose(vector) == model.adapters.choose(same)


def test_with_an_adapter_and_back(tmp_path: Path, path: Path) -> None:
    vector = make_control_vector(tmp_path / "v.gguf", N_EMBD, range(1, 5))
    lora = make_adapter(tmp_path / "l.gguf", path)
    whole = steered(tmp_path / "both.gguf", merged(tmp_path / "m.gguf", path, [(lora, 1.0)]), [(vector, 0.5)])
    with lp.Model(whole) as both:
        expected = logits(both)
    with lp.Model(path) as model:
        base = logits(model)
        model.load_adapter(lora)
        model.load_control_vector(vector)
        choices: list[Any] = [{"v": 0.5, "l": 1}, "v", "l", {"v": -1}]
        sets = [None, *map(model.adapters.choose, choices)]
        alone = [logits(model, choice) for choice in sets]
        close(alone[1], expected)
        with Context(model, n_ctx=64, type_k="f32", type_v="f32", n_threads=1) as context:
            for i in (1, 0, 2, 3, 4, 2, 0, 3, 1, 4, 0):
                context.set_adapters(sets[i])
                np.testing.assert_array_equal(rows(context), alone[i])
    np.testing.assert_array_equal(base, alone[0])


def test_requests_choose_them(tmp_path: Path, path: Path) -> None:
    file = make_control_vector(tmp_path / "calm.gguf", N_EMBD, range(1, 5), strength=2.0)
    prompt = TOKENS * 3

    def engine_of(model: lp.Model) -> lp.Engine:
        return lp.Engine(model, n_ctx=64, n_threads=1, type_k="f32", type_v="f32")

    def text(engine: lp.Engine, adapter: Any, n_cached: int = 0) -> tuple[int, ...]:
        params = lp.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, adapter=adapter)
        completion = engine.generate(prompt, params)
        assert completion.n_cached_tokens == n_cached
        return tuple(completion.token_ids)

    with lp.Model(steered(tmp_path / "s.gguf", path, [(file, 1.0)])) as whole, engine_of(whole) as engine:
        expected = text(engine, None)
    with lp.Model(path) as model, engine_of(model) as engine:
        base = text(engine, None)
        vector = model.load_control_vector(file)
        assert engine.adapters == (vector,)
        n_cached = len(prompt) - 1
        assert text(engine, "calm") == expected != base
        assert text(engine, vector, n_cached) == text(engine, {"calm": 1}, n_cached) == expected
        assert text(engine, None, n_cached) == base
        assert text(engine, {vector: 0.5}) != expected
        vector.close()
        with pytest.raises(InvalidRequestError, match="'calm' is closed"):
            text(engine, vector)


def test_what_it_says_of_itself(tmp_path: Path, path: Path) -> None:
    file = make_control_vector(tmp_path / "calm.gguf", N_EMBD, [2, 4])
    with lp.Model(path) as model:
        vector = model.load_control_vector(file)
        assert (vector.name, vector.layers, vector.path, vector.size_bytes) == (
            "calm",
            (2, 4),
            file,
            file.stat().st_size,
        )
        assert repr(vector) == "<ControlVector 'calm' layers=2-4>"
        with pytest.raises(ValueError, match="already has an adapter 'calm'"):
            model.load_control_vector(file)
        with pytest.raises(ValueError, match="already has an adapter 'calm'"):
            model.load_adapter(make_adapter(tmp_path / "l.gguf", path), "calm")
    assert not vector.closed
    with pytest.raises(InvalidRequestError, match="closed"):
        part_of(vector)  # its model is closed
    vector.close()
    assert vector.closed and "closed" in repr(vector)


F32 = np.ones(N_EMBD, np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "it has no tensors"),
        ({"direction.0": F32}, "'direction.0' is not a direction"),
        ({"direction.01": F32}, "'direction.01' is not a direction"),
        ({"blk.1.attn_q.weight": F32}, "is not a direction"),
        ({"direction.5": F32}, "a direction for layer 5, and this model's last layer is 4"),
        ({"direction.1": F32[:32]}, "is 32, and 64 numbers fit this model"),
        ({"direction.1": np.ones((2, N_EMBD), np.float32)}, "is 64 × 2, and 64 numbers fit"),
        ({"direction.1": np.ones((2, N_EMBD), np.float16)}, "F16"),
        ({"direction.1": np.float32("nan") * F32}, "numbers that are not finite"),
        ({"direction.1": 0 * F32}, "it would change nothing"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    tmp_path: Path, model: lp.Model, tensors: dict[str, np.ndarray], message: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    with pytest.raises(ModelLoadError) as caught:
        model.load_control_vector(tmp_path / "v.gguf")
    assert message in str(caught.value)


def test_other_files_and_models(tmp_path: Path, path: Path, model: lp.Model) -> None:
    for file in (path, make_adapter(tmp_path / "l.gguf", path)):
        with pytest.raises(ModelLoadError, match=r"not a control vector \(general.architecture is 'llama'\)"):
            model.load_control_vector(file)
    whole = make_control_vector(tmp_path / "v.gguf", N_EMBD, [1, 2])
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ModelLoadError, match="truncated"):
        model.load_control_vector(tmp_path / "cut.gguf")
    with pytest.raises(ModelLoadError, match="would change nothing"):
        model.load_control_vector(whole, layers=(3, 4))


@pytest.mark.parametrize(
    ("layers", "error"),
    [((0, 2), ValueError), ((1, 5), ValueError), ((3, 2), ValueError), (3, TypeError), ((1, 2, 3), TypeError),
     ((1.0, 2), TypeError)],
)  # fmt: skip
def test_wrong_layers_are_refused(
    tmp_path: Path, model: lp.Model, layers: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="layers"):
        model.load_control_vector(tmp_path / "v.gguf", layers=layers)  # type: ignore[arg-type]


def test_a_recurrent_model(tmp_path: Path) -> None:
    file = recurrent_model(tmp_path / "mamba.gguf")
    with lp.Model(file) as model:
        model.load_control_vector(make_control_vector(tmp_path / "v.gguf", model.n_embd, [1]))
        assert np.abs(logits(model, model.adapters.choose("v")) - logits(model)).max() > 0.01

"""Rows with different LoRAs in one step: each is what it is alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.adapters import make_adapter, matrices_of
from support.every_architecture import fill, grow
from support.gguf_models import tiny_model

import llamapipe as lp
from llamapipe.gguf.adapter import ROWS_ARE_TOKENS
from llamapipe.llama.adapter import AdapterSet, carries
from llamapipe.llama.context import Context

pytestmark = pytest.mark.native

TOKENS = [1, 40, 77, 103, 55, 61, 92, 38, 99, 120, 47]
ATTENTION_ONLY = r"blk\.\d+\.attn_(?:q|k|v|output)\.weight"
FFN_ONLY = r"blk\.\d+\.ffn_(?:gate|up|down)\.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("rows") / "tiny.gguf", type_name="f32")


@pytest.fixture(scope="module")
def files(path: Path) -> dict[str, Path]:
    """Of different ranks, types, scales and matrices; the first one changes all that others change."""
    kinds: dict[str, dict[str, Any]] = {
        "a": {"rank": 4},
        "b": {"rank": 16, "alpha": None},
        "c": {"rank": 3, "type_name": "F16"},
        "ffn": {"rank": 9, "matrices": FFN_ONLY},
        "attn": {"rank": 2, "matrices": ATTENTION_ONLY},
    }
    return {
        name: make_adapter(path.with_name(f"{name}.gguf"), path, seed=i, **kind)
        for i, (name, kind) in enumerate(kinds.items())
    }


@pytest.fixture(scope="module")
def model(path: Path, files: dict[str, Path]) -> Iterator[lp.Model]:
    with lp.Model(path) as model:
        for name, file in files.items():
            model.load_adapter(file, name)
        yield model


def context_of(model: lp.Model, n_threads: int = 2) -> Context:
    """With cells as exact as the weights, and products whose rows do not depend on each other."""
    if not model.attends:
        pytest.skip("only llamapipe's kernels compute rows with different LoRAs")
    return Context(
        model,
        n_ctx=64,
        n_seq_max=8,
        type_k="f32",
        type_v="f32",
        n_threads=n_threads,
        n_outputs_max=96,
        batch_invariant=True,
    )


def compute(
    context: Context, parts: Sequence[tuple[int, Sequence[int]]], last_only: bool = False
) -> list[npt.NDArray[Any]]:
    """The rows of each sequence, all in one step."""
    tokens = [t for _, part in parts for t in part]
    positions = [i for _, part in parts for i in range(len(part))]
    seq_ids = [seq_id for seq_id, part in parts for _ in part]
    outputs = [int(not last_only or i == len(part) - 1) for _, part in parts for i in range(len(part))]
    context.clear()
    context.decode(lp.DecodeBatch(tokens, positions, seq_ids, outputs))
    computed, at = [], 0
    for _, part in parts:
        computed.append(np.array([context.logits(at + i) for i in range(len(part)) if outputs[at + i]]))
        at += len(part)
    return computed


def choose(model: lp.Model, choice: Any) -> AdapterSet | None:
    return model.adapters.choose(choice)


CHOICES = ("a", None, "b", {"a": -0.7}, "c", "ffn", {"b": 2.5}, None)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("n", [1, len(TOKENS)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_rows_are_those_of_each_alone(model: lp.Model, n: int, last_only: bool, n_threads: int) -> None:
    parts = [(i, [33 + i, *TOKENS[: n - 1]]) for i in range(8)]
    with context_of(model, n_threads=n_threads) as context:
        alone = []
        for part, choice in zip(parts, CHOICES, strict=True):
            context.set_adapters(choose(model, choice))
            alone += compute(context, [part], last_only)
        context.set_adapters(choose(model, "a"), carries=True)
        for i, choice in enumerate(CHOICES):
            context.assign_adapters(i, choose(model, choice))
        computed = compute(context, parts, last_only)
    for i in range(8):
        np.testing.assert_array_equal(computed[i], alone[i], err_msg=str((i, CHOICES[i])))
    assert len({rows.tobytes() for rows in alone}) == 8


SEVERAL = ({"a": 0.5, "b": 1.0}, "a", {"ffn": 1.5, "a": -0.5, "c": 0.7}, None, {"ffn": 1.0, "b": -2.0}, "ffn")


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("n", [1, len(TOKENS)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_rows_with_several_loras(model: lp.Model, n: int, last_only: bool, n_threads: int) -> None:
    """The sum of all is rounded once, where llama.cpp adds one after the other."""
    parts = [(i, [33 + i, *TOKENS[: n - 1]]) for i in range(len(SEVERAL))]
    with context_of(model, n_threads=n_threads) as context:
        theirs, alone = [], []
        for part, choice in zip(parts, SEVERAL, strict=True):
            context.set_adapters(choose(model, choice))
            theirs += compute(context, [part], last_only)
        # The carrier may be a set with several, of which one changes all matrices.
        context.set_adapters(choose(model, SEVERAL[2]), carries=True)
        for part, choice in zip(parts, SEVERAL, strict=True):
            context.assign_adapters(part[0], choose(model, choice))
            alone += compute(context, [part], last_only)
        computed = compute(context, parts, last_only)
        context.assign_adapters(0, None)
        context.assign_adapters(2, choose(model, "b"))
        changed = compute(context, parts, last_only)
        context.set_adapters(None)
        base = compute(context, parts[:1], last_only)[0]
    for i, choice in enumerate(SEVERAL):
        np.testing.assert_array_equal(computed[i], alone[i], err_msg=str(choice))
        np.testing.assert_allclose(computed[i], theirs[i], rtol=0, atol=2e-5 * np.abs(theirs[i]).max())
    np.testing.assert_array_equal(changed[0], base)
    np.testing.assert_array_equal(changed[1], alone[1])
    assert len({rows.tobytes() for rows in computed}) == len(SEVERAL)


@pytest.mark.parametrize(
    ("carrier", "adapters", "expected"),
    [
        ("a", "a", True),
        ("a", None, True),
        (None, "a", False),
        ("a", {"ffn": 1.0, "b": 2.0}, True),
        ({"ffn": 1.0, "b": 2.0}, {"a": 1.0, "c": 3.0}, True),
        ("ffn", {"ffn": 1.0, "b": 2.0}, False),
        ("attn", "ffn", False),
        ("a", {"attn": 1.0, "ffn": 1.0}, False),  # none of the two changes all
        ("a", {"a": 1.0, "attn": 1.0, "ffn": 1.0}, True),
    ],
)
def test_what_carries_what(model: lp.Model, carrier: Any, adapters: Any, expected: bool) -> None:
    assert carries(choose(model, carrier), choose(model, adapters)) is expected


@pytest.mark.parametrize("architecture", sorted(ROWS_ARE_TOKENS))
def test_rows_of_other_architectures_are_those_of_each_alone(tmp_path: Path, architecture: str) -> None:
    """In their graphs each row of a product with an adapter is an entry of the batch, or an output."""
    path = tmp_path / "model.gguf"
    grow(path, architecture)
    fill(path)
    with lp.Model(path) as model:
        for i, rank in enumerate((4, 9)):
            matrices = "|".join(name for name in matrices_of(path) if not name.endswith("bias"))
            file = make_adapter(tmp_path / f"{i}.gguf", path, rank=rank, seed=i, matrices=matrices)
            model.load_adapter(file, str(i))
        choices = ("0", "1", None, {"1": -0.7})
        for last_only in (False, True):
            parts = [(i, [33 + i, *TOKENS[:6]]) for i in range(4)]
            with context_of(model) as context:
                alone = []
                for part, choice in zip(parts, choices, strict=True):
                    context.set_adapters(choose(model, choice))
                    alone += compute(context, [part], last_only)
                context.set_adapters(choose(model, "0"), carries=True)
                for i, choice in enumerate(choices):
                    context.assign_adapters(i, choose(model, choice))
                computed = compute(context, parts, last_only)
            for row, expected in zip(computed, alone, strict=True):
                np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4 * np.abs(expected).max())

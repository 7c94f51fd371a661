"""The model maker of benchmarks and tests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from k_quants import quantize
from support.gguf_document import Document
from support.gguf_models import PRESETS, TOOLS, find_source, make_model, tiny_model

from llamapipe.gguf.check import check_gguf
from llamapipe.llama import Context, DecodeBatch, Model

TINY = PRESETS["tiny"].shape


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "make_model.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("vocab", ["builtin-spm", "builtin-bpe"])
def test_logits_are_sane(tmp_path: Path, type_name: str, vocab: str) -> None:
    path = tiny_model(tmp_path / "tiny.gguf", vocab, type_name)
    assert path.stat().st_size < 500_000
    with Model(path) as model, Context(model, n_ctx=256) as context:
        ids = model.tokenize("Once upon a time, the cat said: été 😀")
        assert ids[0] == model.bos
        assert model.detokenize(ids).strip() == "Once upon a time, the cat said: été 😀"
        n = len(ids)
        context.decode(DecodeBatch(ids, range(n), [0] * n, [True] * n))
        rows = np.stack([context.logits(i) for i in range(n)])
    assert np.isfinite(rows).all()
    assert 0.5 < rows.std() < 2
    # Not a parrot: were the layers weak, a tied output would always repeat the last token.
    assert sum(int(row.argmax()) == token for row, token in zip(rows, ids, strict=True)) < n / 3


def test_q4_k_m_is_close_to_the_weights_it_packs(tmp_path: Path) -> None:
    """What llama.cpp computes from the packed weights is nearly what it computes from the exact ones."""
    shape = replace(TINY, width=256, ffn=256, layers=9)  # in more than one layer out of three of each kind
    rows = {}
    for type_name in ("f32", "q4_k_m", "q8_0"):
        path = make_model(tmp_path / f"{type_name}.gguf", shape=shape, type_name=type_name, seed=3)
        with Model(path) as model, Context(model, n_ctx=256) as context:
            ids = model.tokenize("Once upon a time")
            context.decode(DecodeBatch(ids, range(len(ids)), [0] * len(ids), [True] * len(ids)))
            rows[type_name] = np.stack([context.logits(i) for i in range(len(ids))])
    exact = rows.pop("f32").ravel()
    alike = {name: float(np.corrcoef(exact, row.ravel())[0, 1]) for name, row in rows.items()}
    assert alike["q8_0"] > 0.998
    assert 0.9 < alike["q4_k_m"] < alike["q8_0"]
    sizes = {gguf.GGMLQuantizationType.Q4_K: 0, gguf.GGMLQuantizationType.Q6_K: 0}
    for tensor in gguf.GGUFReader(tmp_path / "q4_k_m.gguf").tensors:
        if tensor.tensor_type in sizes:
            sizes[tensor.tensor_type] += 1
    # Of nine layers, 0, 3 and 6 to 8 have six bits in two matrices each; so has the embedding.
    assert sizes == {gguf.GGMLQuantizationType.Q4_K: 9 * 7 - 10, gguf.GGMLQuantizationType.Q6_K: 11}


@given(
    st.sampled_from(["Q4_K", "Q6_K"]),
    st.integers(0, 2**32 - 1),
    st.floats(-20, 30),
    st.floats(-3, 3),
    st.integers(1, 3),
)
def test_k_quants_unpack_to_what_was_packed(
    name: str, seed: int, magnitude: float, offset: float, n_blocks: int
) -> None:
    """gguf's own unpacking is the oracle: no value is further off than the steps of its part of 32 or 16 allow."""
    qtype = gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(seed)
    exact = (rng.standard_normal((2, 256 * n_blocks)) + offset) * 2.0 ** (magnitude / 2)
    exact[0, :256] *= rng.random() < 0.5  # perhaps a block of zeros
    exact = exact.astype(np.float32)
    back = gguf.quants.dequantize(quantize(exact, qtype), qtype)
    assert back.shape == exact.shape
    size = 32 if name == "Q4_K" else 16
    parts = np.abs(exact).reshape(-1, 256 // size, size).max(axis=2, keepdims=True)
    # A step of a part, and of the parts' scales, which the block's largest decides.
    widest = parts.max(axis=1, keepdims=True)
    steps = 15 if name == "Q4_K" else 31
    allowed = 2 * parts / steps * 0.55 + widest / 63 * 2.1 + 1e-5
    assert (np.abs(back - exact).reshape(parts.shape[0], -1, size) <= allowed).all()


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        make_model(
            tmp_path / f"{name}.gguf", shape=TINY, type_name="q8_0", vocab="builtin-spm", seed=seed
        ).read_bytes()
        for name, seed in (("one", 7), ("two", 7), ("other", 8))
    )
    assert first == again
    assert len(other) == len(first)
    assert other != first


@pytest.mark.parametrize(
    ("preset", "size", "layers", "width"),
    [("15m", "16.3 MB", 8, 256), ("15m-heads-of-48", "16.9 MB", 6, 288)],
)
def test_presets_of_15m_weights(preset: str, size: str, layers: int, width: int, tmp_path: Path) -> None:
    done = run("--preset", preset, "--type", "q8_0", "--source", str(find_source()), str(tmp_path / "m.gguf"))
    assert done.returncode == 0, done.stderr
    assert size in done.stdout
    info = check_gguf(tmp_path / "m.gguf")
    assert (info.n_layer, info.n_embd, info.n_vocab, info.n_ctx_train) == (layers, width, 32000, 2048)
    with Model(tmp_path / "m.gguf") as model:
        assert 14.5e6 < model.n_params < 15.4e6


def test_vocabulary_of_the_pinned_tree_is_copied(tmp_path: Path) -> None:
    source = find_source() / "models" / "ggml-vocab-phi-3.gguf"
    by_name = Document.read(make_model(tmp_path / "m.gguf", shape=TINY, vocab="phi-3"))
    by_path = Document.read(make_model(tmp_path / "p.gguf", shape=TINY, vocab=str(source)))
    original = Document.read(source)

    def tokenizer(document: object) -> dict[bytes, object]:
        return {e.key: e for e in document.entries if e.key.startswith(b"tokenizer.")}  # type: ignore[attr-defined]

    assert tokenizer(by_name) == tokenizer(original) == tokenizer(by_path)
    assert len(tokenizer(by_name)) >= 10


def test_sizes_can_be_set(tmp_path: Path) -> None:
    args = (
        "--preset",
        "tiny",
        "--layers",
        "3",
        "--width",
        "96",
        "--heads",
        "6",
        "--heads-kv",
        "3",
        "--ffn",
        "160",
    )
    done = run(*args, "--context", "300", "--type", "f16", str(tmp_path / "m.gguf"))
    assert done.returncode == 0, done.stderr
    with Model(tmp_path / "m.gguf") as model:
        assert (model.n_layer, model.n_embd, model.n_ctx_train) == (3, 96, 300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5, "heads_kv": 5}, "width 64 must be an even multiple of heads 5"),
        ({"heads": 64, "heads_kv": 1}, "width 64 must be an even multiple of heads 64"),
        ({"heads_kv": 3}, "heads 4 must be a multiple of heads_kv 3"),
        ({"ffn": 100}, "ffn 100 must be multiples of 32"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_impossible_sizes(tmp_path: Path, change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(tmp_path / "m.gguf", shape=replace(TINY, **change), type_name="q8_0")
    assert not (tmp_path / "m.gguf").exists()


def test_rows_of_whole_blocks(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="q4_k_m packs 256 values: width 64 and ffn 128 must be multiples of 256"
    ):
        make_model(tmp_path / "m.gguf", shape=TINY, type_name="q4_k_m")


def test_wrong_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="type 'q9' is unknown, use one of f32, f16, q8_0, q4_k_m"):
        make_model(tmp_path / "m.gguf", type_name="q9")
    with pytest.raises(FileNotFoundError, match="vocabulary 'klingon' is neither a file nor in the"):
        make_model(tmp_path / "m.gguf", vocab="klingon")
    done = run("--source", str(tmp_path), str(tmp_path / "m.gguf"))
    assert done.returncode == 1
    assert done.stderr.startswith("make_model: ")
    assert "is not a llama.cpp source tree" in done.stderr
    assert "Traceback" not in done.stderr

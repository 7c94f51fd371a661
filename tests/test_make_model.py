"""The model maker of benchmarks and tests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_document import unpack
from gguf_models import PRESETS, TOOLS, find_source, make_model, tiny_model

from llamapipe.llama import Batch, Context, Model
from llamapipe.llama.gguf_check import check_gguf

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
        context.decode(Batch(ids, range(n), [0] * n, [True] * n))
        rows = np.stack([context.logits(i) for i in range(n)])
    assert np.isfinite(rows).all()
    assert 0.5 < rows.std() < 2
    # Not a parrot: were the layers weak, a tied output would always repeat the last token.
    assert sum(int(row.argmax()) == token for row, token in zip(rows, ids, strict=True)) < n / 3


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    one, two, other = (
        make_model(
            tmp_path / f"{name}.gguf", shape=TINY, type_name="q8_0", vocab="builtin-spm", seed=seed
        ).read_bytes()
        for name, seed in (("one", 7), ("two", 7), ("other", 8))
    )
    assert one == two
    assert len(other) == len(one)
    assert other != one


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
    made, _ = unpack(make_model(tmp_path / "m.gguf", shape=TINY, vocab="phi-3").read_bytes())
    by_path, _ = unpack(make_model(tmp_path / "p.gguf", shape=TINY, vocab=str(source)).read_bytes())
    original, _ = unpack(source.read_bytes())

    def tokenizer(document: object) -> dict[bytes, object]:
        return {e.key: e for e in document.entries if e.key.startswith(b"tokenizer.")}  # type: ignore[attr-defined]

    assert tokenizer(made) == tokenizer(original) == tokenizer(by_path)
    assert len(tokenizer(made)) >= 10


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


def test_wrong_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="type 'q9' is unknown, use one of f32, f16, q8_0"):
        make_model(tmp_path / "m.gguf", type_name="q9")
    with pytest.raises(FileNotFoundError, match="vocabulary 'klingon' is neither a file nor in the"):
        make_model(tmp_path / "m.gguf", vocab="klingon")
    done = run("--source", str(tmp_path), str(tmp_path / "m.gguf"))
    assert done.returncode == 1
    assert done.stderr.startswith("make_model: ")
    assert "is not a llama.cpp source tree" in done.stderr
    assert "Traceback" not in done.stderr

"""The size of KV cells and states, computed from the metadata, is the size that llama.cpp allocates."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from support.gguf_models import ARCHITECTURES, hybrid_model, sliding_window_model, tiny_architecture
from support.mtp_models import mtp_model

import llamapipe as lp
from llamapipe.errors import BackendError
from llamapipe.gguf.draft_file import MTP_ARCHITECTURES
from llamapipe.llama import Context, kv_memory
from llamapipe.llama.kv_memory import (
    MemorySizes,
    check_kv_memory,
    draft_cell_bytes,
    kv_bytes,
    memory_sizes,
    model_sizes,
)
from llamapipe.native.load import drain_log, native

_LOGGED = re.compile(r"(?:KV|RS) buffer size = +([\d.]+) MiB")


@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("f32", "f16"), ("q8_0", "q8_0")])
def test_the_size_is_the_one_llama_cpp_logs(
    demo: lp.Model, caplog: pytest.LogCaptureFixture, type_k: str, type_v: str
) -> None:
    drain_log(native())
    with (
        caplog.at_level(logging.DEBUG, "llamapipe.native"),
        Context(demo, n_ctx=1024, n_seq_max=2, type_k=type_k, type_v=type_v, flash_attn="on") as context,
    ):
        drain_log(native())
        logged = sum(float(size) for size in _LOGGED.findall(caplog.text))
        computed = kv_bytes(demo, context.n_cells, type_k, type_v)
    assert computed is not None
    assert computed / 2**20 == pytest.approx(logged, abs=0.02)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_windows_compressed_keys_and_states(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_architecture(tmp_path / "m.gguf", name)
    drain_log(native())
    with (
        caplog.at_level(logging.DEBUG, "llamapipe.native"),
        lp.Model(path) as model,
        Context(model, n_ctx=4096, n_seq_max=3, flash_attn="on") as context,
    ):
        drain_log(native())
        logged = sum(float(size) for size in _LOGGED.findall(caplog.text))
        sizes = model_sizes(model, "f16", "f16")
        assert sizes is not None
        total = sizes.total(context.n_cells, 3, n_rs_seq=context.n_states)
        assert total / 2**20 == pytest.approx(logged, rel=0.01, abs=0.011)
        assert bool(sizes.window) == (model.n_swa > 0)
        assert bool(sizes.state) == model.is_recurrent
        assert sizes.n_window == model.n_swa


def test_layers_that_draft_have_no_cells(tmp_path: Path) -> None:
    """They have no states either: an MTP layer's are in another context."""
    path = mtp_model(tmp_path / "mtp.gguf", None)
    with (
        lp.Model(path) as model,
        lp.Model(tiny_architecture(tmp_path / "m.gguf", "qwen3.5-0.8b")) as without,
    ):
        sizes = model_sizes(model, "f16", "f16")
        assert sizes == model_sizes(without, "f16", "f16")
        assert sizes == memory_sizes(model.metadata, model.n_layer + 1, model.n_embd, "f16", "f16")


@pytest.mark.parametrize(
    ("architecture", "n_mtp"), [*((name, 1) for name in MTP_ARCHITECTURES), ("mimo2", 2), ("step35", 3)]
)
def test_cells_of_layers_that_draft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, n_mtp: int
) -> None:
    path = mtp_model(tmp_path / "mtp.gguf", None, n_mtp, architecture=architecture)
    drain_log(native())
    with lp.Model(path, load_mtp=True) as model, Context(model, n_ctx=1024) as context:
        drain_log(native())
        with (
            caplog.at_level(logging.DEBUG, "llamapipe.native"),
            Context(model, n_ctx=4096, n_seq_max=2, flash_attn="on", drafts_for=context) as drafting,
        ):
            drain_log(native())
            logged = sum(float(size) for size in _LOGGED.findall(caplog.text))
            of_cell = draft_cell_bytes(model.file_metadata, model.n_layer + n_mtp, model.n_embd)
            assert drafting.n_cells * of_cell / 2**20 == pytest.approx(logged, abs=0.02)
        without = {key: value for key, value in model.file_metadata.items() if "nextn" not in key}
        assert draft_cell_bytes(without, model.n_layer + n_mtp, model.n_embd) == 0


def test_the_parts_of_a_published_model() -> None:
    """Gemma 3 270M with 8 × 8192 cells: llama-server logs 192 + 120 MiB, and 192 + 67.5 with ``-kvu``."""
    model = ARCHITECTURES["gemma3-270m"]
    metadata = {f"gemma3.{key}": value for key, value in model.metadata().items()}
    sizes = memory_sizes(metadata | {"general.architecture": "gemma3"}, 18, 640, "f16", "f16")
    assert sizes == MemorySizes(full=3 * 1024, window=15 * 1024, n_window=512, state=0)
    n_cells = 8 * 8192
    assert sizes.total(n_cells, 8) == n_cells * 18 * 1024
    assert sizes.n_window_cells(n_cells, 8, 512, unified=False) == 8 * 1024
    assert sizes.n_window_cells(n_cells, 8, 512, unified=True) == 9 * 512
    assert sizes.total(n_cells, 8, swa_full=False) == (192 + 120) * 2**20
    assert sizes.total(n_cells, 8, swa_full=False, unified=True) == (192 + 67.5) * 2**20


def test_small_models(tmp_path: Path) -> None:
    with lp.Model(sliding_window_model(tmp_path / "w.gguf")) as model:
        assert model_sizes(model, "f16", "f16") == MemorySizes(1 * 64, 5 * 64, 16, 0)
        assert kv_bytes(model, 10, "f16", "f16") == 10 * 6 * 64
    with lp.Model(hybrid_model(tmp_path / "h.gguf")) as model:
        assert model_sizes(model, "f16", "f16") == MemorySizes(64, 0, 0, 2 * 2 * 32 * 4)
        assert kv_bytes(model, 10, "f16", "f16") is None, "states are not cells"


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "memory_limit", lambda: 2**30)
    with lp.Model(sliding_window_model(tmp_path / "w.gguf")) as model:
        check_kv_memory(model, 2_000_000, 1, "f16", "f16", swa_full=True)
        with pytest.raises(BackendError, match=r"a context of 3000000 cells needs at least 1\.2 GiB"):
            check_kv_memory(model, 3_000_000, 1, "f16", "f16", swa_full=True)
    with lp.Model(hybrid_model(tmp_path / "h.gguf")) as model:
        check_kv_memory(model, 1000, 1, "f16", "f16", swa_full=True)
        with pytest.raises(BackendError, match=r"needs at least 1\.0 GiB"):
            check_kv_memory(model, 1000, 2_200_000, "f16", "f16", swa_full=True)


def test_a_context_counts_only_the_last_window_without_swa_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lp.Model(sliding_window_model(tmp_path / "w.gguf")) as model:
        sizes = model_sizes(model, "f16", "f16")
        assert sizes is not None
        all_cells = 40 * 65536 + sizes.total(65536, 1)
        monkeypatch.setattr(kv_memory, "memory_limit", lambda: all_cells - 1)
        with pytest.raises(BackendError, match=r"a context of 65536 cells needs .*, or swa_full=False$"):
            Context(model, n_ctx=65536)
        Context(model, n_ctx=65536, swa_full=False).close()


def test_a_context_counts_the_states_of_all_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lp.Model(hybrid_model(tmp_path / "h.gguf")) as model:
        sizes = model_sizes(model, "f16", "f16")
        assert sizes is not None and sizes.state > 0
        cells = 16 * 64 * (40 + 64)
        monkeypatch.setattr(kv_memory, "memory_limit", lambda: cells + 15 * sizes.state)
        with pytest.raises(BackendError, match="a context of 1024 cells needs"):
            Context(model, n_ctx=64, n_seq_max=16)
        Context(model, n_ctx=68, n_seq_max=15).close()


def test_arrays_that_are_too_short_give_no_size() -> None:
    metadata = {"general.architecture": "lfm2", "lfm2.attention.head_count": 2}
    metadata |= {"lfm2.attention.head_count_kv": [0, 1], "lfm2.shortconv.l_cache": 3}
    assert memory_sizes(metadata, 2, 32, "f16", "f16") == MemorySizes(64, 0, 0, 2 * 32 * 4)
    assert memory_sizes(metadata, 3, 32, "f16", "f16") is None


def test_caches_of_other_kinds_have_no_size() -> None:
    assert memory_sizes({"general.architecture": "deepseek4"}, 3, 32, "f16", "f16") is None

"""How much memory a model takes, estimated from its file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.assistant_models import assistant, assistant_target
from support.dflash_models import dflash_draft
from support.eagle3_models import eagle3_draft, eagle3_target
from support.gguf_models import tiny_model
from support.mtp_models import mtp_model

import llamapipe as lp
from llamapipe.fleet.model_memory import Need, need_of
from llamapipe.gguf.check import check_gguf, tensor_bytes
from llamapipe.llama.kv_memory import kv_bytes, memory_sizes

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "cache_bytes": 2**22}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "a.gguf")


def of_layer(bytes_of: dict[str, int], i: int) -> int:
    return sum(n for name, n in bytes_of.items() if name.startswith(f"blk.{i}."))


def test_layers_move_from_the_system_to_gpus(file: Path) -> None:
    """The output first, then the last layers with their cells; the input stays."""
    info = check_gguf(file)

    def need(**more: Any) -> Need:
        return need_of(info, False, {**OPTIONS, **more}, has_gpus=True)

    n_layer, bytes_of = info.n_layer, {t.name: tensor_bytes(t) for t in info.tensors}
    needs = [need(n_gpu_layers=n) for n in range(n_layer + 2)]
    without = need_of(info, False, OPTIONS)
    assert needs[0] == without and without.gpu_bytes == 0
    steps = 4 * info.n_vocab * 256
    output = bytes_of["output_norm.weight"] + bytes_of.get("output.weight", bytes_of["token_embd.weight"])
    assert needs[1].gpu_bytes == output + steps
    cell = n_layer * (needs[2].gpu_bytes - needs[1].gpu_bytes - of_layer(bytes_of, n_layer - 1))
    with lp.Model(file) as model:
        assert cell == kv_bytes(model, OPTIONS["n_ctx"] * OPTIONS["n_seq_max"], "f16", "f16")
    for n, (before, after) in enumerate(pairwise(needs[1:])):
        moved = of_layer(bytes_of, n_layer - 1 - n) + cell // n_layer
        assert after.gpu_bytes - before.gpu_bytes == before.n_bytes - after.n_bytes == moved
    assert need() == need(n_gpu_layers=-1) == need(n_gpu_layers=10**6) == needs[-1]
    assert need(rpc=("host:1",)) == without


def test_a_draft_model_is_where_the_model_is(file: Path) -> None:
    info = check_gguf(file)
    for n, share in ((-1, 1), (0, 0)):
        alone, both = (
            need_of(info, False, {**OPTIONS, "n_gpu_layers": n, **more}, True)
            for more in ({}, {"draft": str(file)})
        )
        assert both.n_bytes > alone.n_bytes
        assert both.gpu_bytes == (1 + share) * alone.gpu_bytes


def test_layers_that_draft_have_cells_and_states(tmp_path: Path) -> None:
    """The KV cells of the MTP layer (2 heads of 32 keys and values), its model's states, and two more of each slot."""
    file = mtp_model(tmp_path / "m.gguf", 0.0)
    info = check_gguf(file)
    none, auto, mtp = (
        need_of(info, False, OPTIONS | {"draft": draft}).n_bytes for draft in (None, "auto", "mtp")
    )
    n_cells, width = 2 * 256, info.n_embd
    assert auto - none == n_cells * 2 * (2 * 32) * 2 + 2 * 2 * 256 * 4 * width
    sizes = memory_sizes(info.metadata, info.n_layer, info.n_embd, "f16", "f16")
    assert sizes is not None
    assert mtp - auto == 2 * 2 * sizes.state > 0


@pytest.mark.parametrize("write", [eagle3_draft, dflash_draft])
def test_a_draft_takes_states_of_its_model(tmp_path: Path, write: Callable[[Path, Path], Path]) -> None:
    model = eagle3_target(tmp_path / "m.gguf")
    draft = write(tmp_path / "d.gguf", model)
    info, of_draft = check_gguf(model), check_gguf(draft)
    none, both = (need_of(info, False, OPTIONS | {"draft": value}).n_bytes for value in (None, str(draft)))
    alone = need_of(of_draft, False, OPTIONS | {"cache_bytes": 0}).n_bytes
    assert both - none == alone + 2 * 2 * 256 * 4 * 3 * info.n_embd


def test_an_assistant_has_no_cells(tmp_path: Path) -> None:
    model = assistant_target(tmp_path / "m.gguf")
    draft = assistant(tmp_path / "d.gguf", model)
    info, of_draft = check_gguf(model), check_gguf(draft)
    none, both = (need_of(info, False, OPTIONS | {"draft": path}).n_bytes for path in (None, str(draft)))
    alone = need_of(of_draft, False, OPTIONS | {"cache_bytes": 0}).n_bytes
    assert alone < of_draft.size_bytes + 4 * of_draft.n_vocab * 1024
    assert both - none == alone + 2 * 2 * 32 * 4 * info.n_embd

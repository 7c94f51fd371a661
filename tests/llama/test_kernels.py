"""Models whose weights are packed for llamapipe's kernels: what they compute and take, and what loads leave behind."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
from support.gguf_models import model_for_kernels

import llamapipe as lp
from llamapipe.errors import ModelLoadError
from llamapipe.native.load import native

Type = gguf.GGMLQuantizationType
Kernels = Literal["auto", "ggml"]
MIB = 2**20
pytestmark = pytest.mark.native
GREEDY = lp.SamplingParams(max_tokens=12, temperature=0)
PROMPT = list(range(40, 80))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which this processor has kernels for all matrices."""
    return model_for_kernels(tmp_path_factory.mktemp("models") / "model.gguf")


@pytest.fixture(scope="module")
def packed(path: Path) -> Iterator[lp.Model]:
    with lp.Model(path) as model:
        yield model


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[lp.Model]:
    with lp.Model(path, kernels="ggml") as model:
        yield model


def test_attention_is_computed_where_there_are_kernels(demo: lp.Model) -> None:
    assert demo.attends == native().lib.lp_kernels_attend()


def product_bytes(path: Path) -> list[int]:
    """The sizes of a file's tensors that products use. A head that is tied to the table of embeddings is one."""
    sizes = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(path).tensors if len(t.shape) == 2}
    table = sizes.pop("token_embd.weight")
    sizes.setdefault("output.weight", table)
    return list(sizes.values())


def log_probabilities(model: lp.Model, n_ubatch: int = 64) -> np.ndarray:
    with lp.Engine(model, n_ctx=128, n_seq_max=1, tuning=lp.EngineTuning(n_ubatch=n_ubatch)) as engine:
        return np.array(engine.score_tokens([PROMPT])[0].logprobs)


def resident(path: Path) -> tuple[int, int]:
    """Bytes of this process that are anonymous, and those that are pages of a file."""
    if "san.so" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer keeps freed memory")
    anonymous = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert anonymous is not None
    mapped = 0
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            mapped += int(line.split()[1]) * 1024
    return int(anonymous[1]) * 1024, mapped


def test_all_matrices_are_packed_into_little_more_than_they_take_in_the_file(packed: lp.Model) -> None:
    sizes = product_bytes(packed.path)
    assert packed.kernels != "ggml" and packed.n_packed_tensors == len(sizes)
    assert sum(sizes) <= packed.packed_bytes <= 1.03 * sum(sizes)


def test_ggmls_kernels_pack_no_weights(plain: lp.Model) -> None:
    assert (plain.kernels, plain.n_packed_tensors, plain.packed_bytes) == ("ggml", 0, 0)


def test_packed_and_plain_weights_compute_the_same_but_for_rounding(
    packed: lp.Model, plain: lp.Model
) -> None:
    """With random weights, ggml's own results differ as much between batches of other sizes."""
    differences = log_probabilities(packed) - log_probabilities(plain)
    assert np.abs(differences).max() < 0.3 and np.abs(differences).mean() < 0.05


def test_results_do_not_depend_on_the_size_of_batches(packed: lp.Model) -> None:
    np.testing.assert_allclose(log_probabilities(packed, 2), log_probabilities(packed, 64), rtol=0, atol=1e-5)


def test_loads_at_the_same_time_get_what_they_ask_for(path: Path) -> None:
    def load(kernels: Kernels) -> tuple[str, int]:
        with lp.Model(path, kernels=kernels) as model:
            return model.kernels, model.n_packed_tensors

    wanted: list[Kernels] = ["auto", "ggml"] * 4
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(load, wanted))
    n = len(product_bytes(path))
    assert [("ggml", 0) if kernels == "ggml" else (results[0][0], n) for kernels in wanted] == results


def test_a_load_within_a_load_gets_what_it_asks_for(path: Path) -> None:
    inner: list[tuple[str, int]] = []

    def progress(fraction: float) -> None:
        if not inner:
            with lp.Model(path, kernels="ggml") as model:
                inner.append((model.kernels, model.n_packed_tensors))

    with lp.Model(path, progress=progress) as model:
        assert model.n_packed_tensors == len(product_bytes(path))
    assert inner == [("ggml", 0)]


@pytest.fixture
def own_path(path: Path, tmp_path: Path) -> Path:
    """A copy that nobody else has mapped."""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    return copy


@pytest.mark.parametrize("use_mmap", [True, False])
def test_memory_of_a_load_and_after_it(own_path: Path, use_mmap: bool) -> None:
    """Packed weights are anonymous memory, the pages they were read from are let go of, and closing frees all."""
    n_others = own_path.stat().st_size - sum(product_bytes(own_path))
    lp.Model(own_path, use_mmap=use_mmap).close()  # what the first load of a process leaves
    before, _ = resident(own_path)
    with lp.Model(own_path, use_mmap=use_mmap) as model:
        anonymous, mapped = resident(own_path)
        assert anonymous - before > 0.95 * model.packed_bytes
        assert mapped < n_others + MIB
    after, mapped = resident(own_path)
    assert mapped == 0 and after - before < 4 * MIB


def test_a_load_that_fails_leaves_nothing_behind(own_path: Path) -> None:
    def progress(fraction: float) -> None:
        if fraction > 0.5:
            raise ValueError("stop")

    def fail() -> tuple[int, int]:
        with pytest.raises(ValueError, match="stop"):
            lp.Model(own_path, progress=progress)
        return resident(own_path)

    before, _ = fail()  # the first one also fills what the process keeps
    after, mapped = [fail() for _ in range(3)][-1]
    assert mapped == 0 and after - before < 4 * MIB
    with lp.Model(own_path, kernels="ggml") as model:
        assert model.n_packed_tensors == 0


def test_a_file_that_is_cut_while_it_is_packed_is_refused(own_path: Path) -> None:
    """The other threads that pack read missing pages, too."""
    n_bytes = own_path.stat().st_size

    def progress(fraction: float) -> None:
        os.truncate(own_path, n_bytes // 2)

    with pytest.raises(ModelLoadError, match=r"truncated|bytes"):
        lp.Model(own_path, progress=progress)


def test_a_snapshot_of_one_kernel_is_continued_by_another(packed: lp.Model, plain: lp.Model) -> None:
    """Cells are the same but for rounding, so the file's fingerprint tells what a snapshot fits."""
    with lp.Engine(packed, n_ctx=128, n_seq_max=1) as engine:
        generation = engine.start(PROMPT, GREEDY)
        first = list(islice((token.id for token in generation), 4))
        snapshot = generation.snapshot()
        generation.cancel()
    with lp.Engine(plain, n_ctx=128, n_seq_max=1) as engine:
        restored = engine.restore(snapshot, lp.SamplingParams(max_tokens=12, temperature=0, logprobs=1))
        rest = list(islice(restored, 4))
        restored.cancel()
        expected = engine.score(PROMPT + first, [token.id for token in rest])
    assert [token.logprob for token in rest] == pytest.approx(expected.logprobs.tolist(), abs=0.05)


def test_an_engine_says_which_kernels_compute(packed: lp.Model, plain: lp.Model) -> None:
    for model, expected in (
        (packed, rf" kernels={packed.kernels} packed=\d+MiB "),
        (plain, " kernels=ggml '"),
    ):
        with lp.Engine(model, n_ctx=128, n_seq_max=1) as engine:
            assert re.search(expected, repr(engine))


def test_a_vocabulary_alone_has_nothing_to_pack(path: Path) -> None:
    with lp.Model(path, vocab_only=True) as model:
        assert (model.kernels, model.packed_bytes) == ("ggml", 0)


def test_a_model_that_does_not_fit_into_memory_is_not_packed(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mapped file needs none: the system drops its pages."""
    n_free = path.stat().st_size - 1
    monkeypatch.setattr("llamapipe.llama.model.free_memory", lambda: n_free)
    with lp.Model(path) as model:
        assert model.n_packed_tensors == 0
    assert "not packed for llamapipe's kernels" in caplog.text
    n_free += 1
    with lp.Model(path) as model:
        assert model.n_packed_tensors > 0

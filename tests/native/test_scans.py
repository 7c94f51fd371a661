"""Scans of logits rows: against NumPy in float64, and with the same bits on every processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.chains import Chain
from support.sampler_definitions import Uniform, vocab_model

from llamapipe.llama import Model
from llamapipe.native.load import missing_features
from llamapipe.pipeline.output import Candidates

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from native_build.sources import find_source  # noqa: E402
from native_build.toolchain import find_compilers  # noqa: E402

Rows = npt.NDArray[np.float32]
SIZES = (1, 15, 16, 17, 255, 256, 257, 4095, 4097, 32_000, 248_320)


def rows_of(n: int, spread: float, n_rows: int = 3) -> Rows:
    return (np.random.default_rng(n).standard_normal((n_rows, n)) * spread).astype(np.float32)


def check(rows: Rows, k: int = 40) -> Candidates:
    """Compares what candidates say of rows with all of the rows."""
    candidates = Candidates(rows, k)
    for row, ids, logits, log_sum_exp in zip(
        rows, candidates.ids, candidates.logits, candidates.log_sum_exp, strict=True
    ):
        finite = np.flatnonzero(np.isfinite(row))
        order = finite[np.lexsort((finite, -row[finite]))][:k]
        assert ids[: len(order)].tolist() == order.tolist()
        assert np.array_equal(logits[: len(order)], row[order])
        assert set(ids[len(order) :]) <= {-1}
        exact = np.logaddexp.reduce(row[finite].astype(np.float64))
        assert abs(log_sum_exp - exact) < 5e-7
    return candidates


@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 4.0, 30.0])
@pytest.mark.parametrize("n", SIZES)
def test_candidates_of_rows_of_any_size(n: int, spread: float) -> None:
    rows = rows_of(n, spread)
    rows[1, n // 2] += 20  # the usual shape: one that is much more probable
    rows[2] -= 1000
    candidates = check(rows)
    for i in range(len(rows)):
        alone = Candidates(rows[i : i + 1])
        assert alone.log_sum_exp[0] == candidates.log_sum_exp[i]
        assert alone.ids.tolist() == candidates.ids[i : i + 1].tolist()


@pytest.mark.parametrize("n_different", [1, 2, 39, 128, 1000])
@pytest.mark.parametrize("k", [1, 40, 500, 3000])
def test_rows_of_few_different_values(n_different: int, k: int) -> None:
    """Thousands equal the last candidate; the lowest ids of them stay."""
    values = rows_of(n_different, 3.0)
    check(np.ascontiguousarray(np.resize(values, (3, 50_000))), k)
    shuffled = np.random.default_rng(k).permuted(np.resize(values, (3, 50_000)), axis=1)
    check(np.ascontiguousarray(shuffled), k)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", SIZES[1:])
def test_only_finite_logits_count(n: int, bad: float) -> None:
    rows = rows_of(n, 3.0)
    rows[0, :: n - 1] = bad
    rows[1, 1::2] = bad
    rows[2, : n - 1] = bad
    check(rows)


def test_the_depth_at_which_a_logit_no_longer_counts() -> None:
    """Around the smallest exponential of float32, which many equal logits may still add up to."""
    for depth in (80.0, 86.5, 87.5, 88.0, 100.0, 1e4, 3e38):
        row = np.full((1, 32_000), -depth, np.float32)
        row[0, 5] = 0
        assert abs(Candidates(row).log_sum_exp[0]) < 1e-30
    flat = np.full((1, 32_000), -3e38, np.float32)
    check(flat)


@pytest.mark.parametrize("p", [0.2, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.001, 0.5, 2.0])
def test_nearly_flat_rows_are_drawn_by_definition(tmp_path: Path, spread: float, p: float) -> None:
    """The nucleus has thousands of tokens, which are sorted in another way than a few."""
    n = 30_000
    row = rows_of(n, spread, 1)[0]
    row[::3] = np.round(row[::3] * 8) / 8  # ties, and zeros of both signs
    order = np.lexsort((np.arange(n), -row))
    weights = np.exp(row[order].astype(np.float64))
    n_kept = int((np.cumsum(weights) < p * weights.sum()).sum()) + 1
    assert n_kept > 2048 or spread == 2.0
    edges = np.cumsum(weights[:n_kept] / weights[:n_kept].sum())
    places = np.argsort(order)
    uniform = Uniform(1)
    with (
        Model(vocab_model(tmp_path / "v.gguf", n), vocab_only=True) as model,
        Chain(model.vocab, 1).add_top_p(p) as chain,
    ):
        for _ in range(50):
            place, u = places[chain.sample(row)], uniform()
            assert place < n_kept + 2
            assert abs(np.searchsorted(edges, u) - place) <= 2  # rounding: a token has a share of 1 / 30,000


LEVELS = {
    "x86-64": (),
    "x86-64-v3": ("avx2", "fma", "bmi2"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}


@pytest.mark.native
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="levels of x86")
def test_levels_find_the_same(tmp_path: Path) -> None:
    """Those with FMA to the last bit; without it, sums are rounded in another way."""
    source = find_source(None, print).path
    folders = [ROOT / "llamapipe/native/src", source / "include", source / "ggml/include"]
    sources = [Path(__file__).with_name("scan_levels.cpp"), ROOT / "llamapipe/native/src/scan.cpp"]
    # A sanitizer's flags are the environment's.
    flags = ["-std=c++17", "-O2", "-DLP_ONE_LEVEL", *os.environ.get("CXXFLAGS", "").split()]
    results: dict[str, list[str]] = {}
    for level, features in LEVELS.items():
        if missing_features(list(features)):
            continue
        built = tmp_path / level
        includes = [f"-I{folder}" for folder in folders]
        subprocess.run(
            [*find_compilers().cxx, *flags, f"-march={level}", *includes, *sources, "-o", built], check=True
        )
        done = subprocess.run([built], capture_output=True, text=True, check=True)
        results[level] = done.stdout.splitlines()
    plain, *others = results.values()
    assert len(plain) == 2 * 12 * 4 * 4
    for lines in others:
        assert lines == others[0]
        assert [line for line in lines if line.startswith("order")] == [
            line for line in plain if line.startswith("order")
        ]
        for line, other in zip(lines, plain, strict=True):
            if line.startswith("sums"):
                a, b = (float.fromhex(text.split()[1]) for text in (line, other))
                assert a == b or abs(a - b) < 5e-7

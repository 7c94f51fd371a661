"""Attention of our kernels is that of float64, and a row's result depends on nothing but its query and its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import numpy as np
import pytest
from support.inside import lib_for_tests

from llamapipe.native.load import last_error, native

Type = gguf.GGMLQuantizationType
F32, F16 = Type.F32, Type.F16

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def kernels() -> None:
    if not native().lib.lp_kernels_attend():
        pytest.skip("this processor has no kernels")


def random(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def causal(n_rows: int, n_cells: int) -> np.ndarray:
    """Rows at the end of the cells, each seeing those up to its own."""
    return np.where(np.arange(n_cells) > np.arange(n_cells - n_rows, n_cells)[:, None], -np.inf, 0)


@dataclass
class Attention:
    """Queries (streams, heads, rows, dims), keys and values (streams, kv heads, cells, dims), masks (streams, rows,
    cells)."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    masks: np.ndarray | None = None
    sinks: np.ndarray | None = None
    kind: Type = F16
    max_bias: float = 0
    softcap: float = 0
    n_threads: int = 2
    n_spared: int | None = None  # cells that were not read again for other streams; None: not looked for
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = 1 / np.sqrt(self.queries.shape[-1])

    def compute(self, is_ours: bool = True) -> np.ndarray:
        """(streams, rows, heads, dims)."""
        ffi, lib = native().ffi, lib_for_tests()
        n_streams, n_heads, n_rows, n_dims = self.queries.shape
        _, n_kv_heads, n_cells, n_value_dims = self.values.shape
        out = np.full((n_streams, n_rows, n_heads, n_value_dims), np.nan, np.float32)
        queries, keys, values = (
            np.ascontiguousarray(self.queries, np.float32),
            _stored(self.keys.swapaxes(1, 2), self.kind),  # a cache has the heads of a cell side by side
            _stored(self.values.swapaxes(1, 2), self.kind),
        )
        masks = None if self.masks is None else np.ascontiguousarray(self.masks, np.float16)
        sinks = None if self.sinks is None else np.ascontiguousarray(self.sinks, np.float32)
        fields = {
            "n_streams": n_streams,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "n_rows": n_rows,
            "n_cells": n_cells,
            "n_dims": n_dims,
            "n_value_dims": n_value_dims,
            "type": int(self.kind),
            "queries": ffi.cast("float *", queries.ctypes.data),
            "keys": ffi.cast("void *", keys.ctypes.data),
            "values": ffi.cast("void *", values.ctypes.data),
            "masks": ffi.NULL if masks is None else ffi.cast("uint16_t *", masks.ctypes.data),
            "sinks": ffi.NULL if sinks is None else ffi.cast("float *", sinks.ctypes.data),
            "scale": self.scale,
            "max_bias": self.max_bias,
            "softcap": self.softcap,
            "is_ours": is_ours,
            "n_spared": ffi.NULL if self.n_spared is None else (n_spared := ffi.new("int64_t *")),
            "n_threads": self.n_threads,
            "n_times": 2,
        }
        if lib.lp_attention_compute(ffi.new("lp_attention *", fields), ffi.cast("float *", out.ctypes.data)):
            raise RuntimeError(last_error(native()))
        if self.n_spared is not None:
            self.n_spared = n_spared[0] // fields["n_times"]
        return out

    def exact(self) -> np.ndarray:
        """The same in float64."""
        n_heads = self.queries.shape[1]
        group = n_heads // self.keys.shape[1]
        keys = np.repeat(_loaded(self.keys, self.kind), group, axis=1)
        values = np.repeat(_loaded(self.values, self.kind), group, axis=1)
        scores = np.einsum("shrd,shcd->shrc", self.queries.astype(np.float64), keys) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.masks is not None:
            scores = scores + _slopes(n_heads, self.max_bias)[:, None, None] * self.masks[:, None]
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total += np.exp(self.sinks[:, None, None] - top)
        return np.asarray(np.einsum("shrc,shcd->srhd", weights / total, values))

    def check(self) -> None:
        """Compares with float64: the error is that of 32-bit floats, and not above that of ggml's loops."""
        exact = self.exact()
        size = np.sqrt(np.mean(exact**2))
        error, theirs = (np.sqrt(np.mean((self.compute(ours) - exact) ** 2)) / size for ours in (True, False))
        assert error < 2e-6
        assert error <= theirs * 1.1


def _slopes(n_heads: int, max_bias: float) -> np.ndarray:
    """Of ALiBi (Press et al. 2022), for any number of heads."""
    if not max_bias:
        return np.ones(n_heads)
    half = 2 ** int(np.log2(n_heads))
    first = 2.0 ** (-max_bias / half * np.arange(1, half + 1))
    rest = 2.0 ** (-max_bias / 2 / half * np.arange(1, 2 * (n_heads - half), 2))
    return np.concatenate([first, rest])


def _stored(values: np.ndarray, kind: Type) -> np.ndarray:
    if kind in (F32, F16):
        return np.ascontiguousarray(values, np.float32 if kind == F32 else np.float16)
    return np.ascontiguousarray(gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind))


def _loaded(values: np.ndarray, kind: Type) -> np.ndarray:
    stored = _stored(values, kind)
    return (stored if kind in (F32, F16) else gguf.quants.dequantize(stored, kind)).astype(np.float64)


def some(
    n_rows: int, n_cells: int = 300, heads: tuple[int, int] = (4, 2), n_dims: int = 64, **options: Any
) -> Attention:
    """Causal attention of two streams, the second of which sees fewer cells."""
    n_heads, n_kv_heads = heads
    masks = np.stack([causal(n_rows, n_cells)] * 2)
    masks[1, :, : n_cells // 3] = -np.inf
    return Attention(
        random(2, n_heads, n_rows, n_dims, seed=2),
        random(2, n_kv_heads, n_cells, n_dims, seed=3),
        random(2, n_kv_heads, n_cells, n_dims, seed=4),
        **{"masks": masks, **options},
    )


@pytest.mark.parametrize("n_rows", [1, 2, 7, 33, 100])
def test_any_number_of_rows_is_exact(n_rows: int) -> None:
    some(n_rows).check()


@pytest.mark.parametrize("n_cells", [1, 8, 31, 33, 64, 65, 4100])
def test_any_number_of_cells_is_exact(n_cells: int) -> None:
    some(1, n_cells).check()


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (14, 2), (12, 12), (64, 1)])
def test_any_heads_are_exact(heads: tuple[int, int]) -> None:
    some(5, heads=heads).check()


@pytest.mark.parametrize("n_dims", [8, 40, 80, 128, 256])
def test_any_dimensions_are_exact(n_dims: int) -> None:
    some(9, n_dims=n_dims).check()


def test_values_of_other_dimensions_than_keys() -> None:
    replace(some(9), values=random(2, 2, 300, 24)).check()


@pytest.mark.parametrize("kind", [F32, F16, Type.BF16, Type.Q8_0, Type.Q4_0], ids=lambda kind: kind.name)
def test_formats_of_the_cache(kind: Type) -> None:
    some(9, kind=kind).check()


@pytest.mark.parametrize(
    "options",
    [{"masks": None}, {"softcap": 5.0}, {"sinks": np.array([-1.0, 0.0, 3.0, -np.inf])}],
    ids=lambda options: next(iter(options)),
)
def test_all_options_are_exact(options: dict[str, Any]) -> None:
    some(9, **options).check()


@pytest.mark.parametrize("n_heads", [4, 6])
def test_biases_by_distance(n_heads: int) -> None:
    attention = some(9, heads=(n_heads, 2), max_bias=8.0)
    assert attention.masks is not None
    distances = np.arange(300) - np.arange(291, 300)[:, None]
    attention.masks = np.where(np.isinf(attention.masks), -np.inf, distances)
    attention.check()


def test_a_row_that_sees_no_cell_is_zero() -> None:
    attention = some(3)
    assert attention.masks is not None
    attention.masks[0, 1] = -np.inf
    result = attention.compute()
    assert not result[0, 1].any()
    assert result[0, 0].all()


@pytest.mark.parametrize("heads", [(14, 2), (4, 4)])
@pytest.mark.parametrize("n_cells", [90, 1000])
def test_a_row_depends_only_on_its_query_and_its_cells(heads: tuple[int, int], n_cells: int) -> None:
    """Not on other rows, threads, streams, or where in the cache its cells are, as long as their order stays."""
    attention = some(70, n_cells, heads)
    together = attention.compute()
    for n_threads in (1, 3, 8):
        np.testing.assert_array_equal(replace(attention, n_threads=n_threads).compute(), together)
    assert attention.masks is not None
    for row in (0, 13, 69):
        alone = replace(
            attention, queries=attention.queries[:, :, row : row + 1], masks=attention.masks[:, row : row + 1]
        )
        np.testing.assert_array_equal(alone.compute()[:, 0], together[:, row])
        assert alone.masks is not None
        one_stream = replace(
            alone,
            queries=alone.queries[:1],
            keys=alone.keys[:1],
            values=alone.values[:1],
            masks=alone.masks[:1],
        )
        np.testing.assert_array_equal(one_stream.compute()[0, 0], together[0, row])
    # The cells of someone else between them, as in a unified cache.
    places = np.sort(np.random.default_rng(5).choice(2 * n_cells, n_cells, replace=False))
    apart = replace(attention)
    for name in ("keys", "values"):
        wide = random(2, heads[1], 2 * n_cells, 64, seed=9)
        wide[:, :, places] = getattr(attention, name)
        setattr(apart, name, wide)
    masks = np.full((2, 70, 2 * n_cells), -np.inf)
    masks[:, :, places] = attention.masks
    apart.masks = masks
    np.testing.assert_array_equal(apart.compute(), together)


@pytest.mark.parametrize("n_shared", [0, 40, 250])
@pytest.mark.parametrize("order", [range(6), (0, 3, 1, 4, 2, 5)], ids=["side by side", "in turns"])
def test_sequences_in_one_range_of_cells(n_shared: int, order: Sequence[int]) -> None:
    """Two rows of each of three sequences, which share some cells, have the same bits together and alone."""
    attention = some(6, 600)
    masks = np.full((2, 6, 600), -np.inf)
    masks[:, :, :n_shared] = 0
    for row in range(6):
        masks[:, row, n_shared + row // 2 : n_shared + 300 + row % 2 * 3 : 3] = 0
    attention.masks = masks
    combined = replace(
        attention,
        queries=attention.queries[:1, :, list(order)],
        keys=attention.keys[:1],
        values=attention.values[:1],
        masks=masks[:1, list(order)],
    )
    combined.check()
    together = combined.compute()
    assert combined.masks is not None
    for i in range(6):
        alone = replace(
            combined, queries=combined.queries[:, :, i : i + 1], masks=combined.masks[:, i : i + 1]
        )
        np.testing.assert_array_equal(alone.compute()[:, 0], together[:, i])


# Of five streams: how many first cells each has in common with the one before, or with another (the second number).
FAMILIES = {
    "none": [(0, 0)] * 5,
    "all": [(0, 0), (250, 0), (250, 0), (250, 0), (250, 0)],
    "two families in turns": [(0, 0), (40, 0), (250, 0), (250, 1), (250, 2)],
    "a whole one": [(0, 0), (300, 0), (31, 0), (300, 2), (290, 3)],
}
N_SPARED = {"none": 0, "all": 1000, "two families in turns": 750, "a whole one": 840}


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("kind", [F16, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [(14, 2), (4, 4), (1, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_streams_with_the_same_cells(family: str, heads: tuple[int, int], kind: Type, n_rows: int) -> None:
    """Cells that streams have in common are read once, and the bits are those of each stream alone."""
    n_heads, n_kv_heads = heads
    n_cells, lengths = 320, [300, 310, 270, 320, 300]
    keys, values = (random(5, n_kv_heads, n_cells, 64, seed=seed) for seed in (3, 4))
    masks = np.full((5, n_rows, n_cells), -np.inf)
    for i, (n, other) in enumerate(FAMILIES[family]):
        for of in (keys, values):
            of[i, :, :n] = of[other, :, :n]
        for row in range(n_rows):
            masks[i, row, : lengths[i] - n_rows + 1 + row] = 0
    queries = random(5, n_heads, n_rows, 64, seed=2)
    attention = Attention(queries, keys, values, masks, kind=kind)
    attention.check()
    alone = attention.compute()
    for n_threads in (1, 2, 3):
        together = replace(attention, n_spared=0, n_threads=n_threads)
        np.testing.assert_array_equal(together.compute(), alone)
        if n_threads == 1:  # else there may be no tile for several
            assert bool(together.n_spared) == (family != "none")
        if heads == (4, 4) and n_rows == n_threads == 1:
            assert together.n_spared == N_SPARED[family]


def test_cells_that_some_rows_do_not_see() -> None:
    """A window that one stream has left, and a stream without cells."""
    keys, values = (np.repeat(random(1, 2, 300, 64, seed=seed), 4, axis=0) for seed in (3, 4))
    masks = np.full((4, 1, 300), -np.inf)
    masks[0, 0, :300] = masks[1, 0, 50:290] = masks[3, 0, :200] = 0
    attention = Attention(random(4, 4, 1, 64, seed=2), keys, values, masks)
    np.testing.assert_array_equal(replace(attention, n_spared=0).compute(), attention.compute())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["queries", "keys", "values"])
def test_what_is_not_finite_stays_in_the_rows_that_see_it(part: str, value: float) -> None:
    attention = some(20)
    expected = attention.compute()
    array = getattr(attention, part).copy()
    # Row 7 of the first stream; the last cell but ten, which rows from 9 on see.
    array[(0, 1, 7, 5) if part == "queries" else (0, 0, 289, 5)] = value
    result = replace(attention, **{part: array}).compute()
    np.testing.assert_array_equal(result[1], expected[1])
    if part == "queries":
        np.testing.assert_array_equal(np.delete(result[0], 7, axis=0), np.delete(expected[0], 7, axis=0))
        assert not np.isfinite(result[0, 7, 1]).any()
    else:
        np.testing.assert_array_equal(result[0, :9], expected[0, :9])
        np.testing.assert_array_equal(result[0, :, 2:], expected[0, :, 2:])  # heads of other keys

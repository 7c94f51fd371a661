"""The states and convolutions of linear layers are those of float64, and a token's result depends on nothing but the
state before it and its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.inside import lib_for_tests

from llamapipe.native.load import last_error, native

pytestmark = pytest.mark.native

KINDS = {"delta net": 0, "scan": 1, "wkv7": 2}


@pytest.fixture(autouse=True)
def kernels() -> None:
    if not native().lib.lp_kernels_attend():
        pytest.skip("this processor has no kernels")


@dataclass
class Linear:
    """States (cells, heads, rows, columns) and the inputs of `lp_linear`, whose axes begin with (sequences, tokens)."""

    kind: str
    states: np.ndarray
    ids: Sequence[int]
    inputs: list[np.ndarray]
    n_groups: int = 1
    n_kept: int = 1
    n_seqs: int = 2
    first: int = 0
    n_threads: int = 2
    after: np.ndarray = field(init=False)

    def compute(self, is_ours: bool = True) -> np.ndarray:
        """(sequences, tokens, heads, rows); the states are in `after`."""
        n_states, n_heads, n_rows, n_columns = self.states.shape
        n_tokens = self.inputs[0].shape[1]
        self.after = np.ascontiguousarray(self.states, np.float32).copy()
        out = np.full((self.n_seqs, n_tokens, n_heads, n_rows), np.nan, np.float32)
        shape = {
            "kind": KINDS[self.kind],
            "n_heads": n_heads,
            "n_groups": self.n_groups,
            "n_rows": n_rows,
            "n_columns": n_columns,
            "n_states": n_states,
            "n_kept": self.n_kept,
            "first": self.first,
        }
        ids = np.array(self.ids, np.int32)
        call(shape, self.inputs, out, is_ours, self.n_threads, states=self.after, ids=ids)
        return out

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """The same in float64: results, and states as in `after`."""
        inputs = [x.astype(np.float64) for x in self.inputs]
        n_tokens, n_heads, n_rows = inputs[0].shape[1], *self.states.shape[1:3]
        after = self.states.astype(np.float64)
        kept = after.reshape(self.n_kept, -1, *after.shape[1:])
        out = np.empty((self.n_seqs, n_tokens, n_heads, n_rows))
        others = [after[i].copy() for i in self.ids[self.n_seqs :]]
        sources = [after[i].copy() for i in self.ids[: self.n_seqs]]
        for i, other in enumerate(others):
            after[self.first + self.n_seqs + i] = other
        for seq, source in enumerate(sources):
            state = source
            for t in range(n_tokens):
                state, out[seq, t] = step(self.kind, state, [x[seq, t] if x.ndim > 1 else x for x in inputs])
                if n_tokens - 1 - t < self.n_kept:
                    kept[n_tokens - 1 - t, self.first + seq] = state
        return out, after

    def check(self) -> None:
        """Compares with float64, and with ggml's errors."""
        exact, states = self.exact()
        computed = self.compute()
        error, state_error = _error(computed, exact), _error(self.after, states)
        assert max(error, state_error) < 3e-6
        if self.kind == "wkv7" and self.states.shape[-1] % 64:
            return  # ggml's loop for RWKV writes beyond such heads
        theirs = self.compute(is_ours=False)
        assert error <= _error(theirs, exact) * 1.2 + 1e-8
        assert state_error <= _error(self.after, states) * 1.2 + 1e-8


def step(kind: str, state: np.ndarray, x: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The state (heads, rows, columns) after a token, and its result."""
    n_heads, _, n_columns = state.shape
    if kind == "delta net":
        q, k, v, gate, beta = x
        # Heads take queries and keys in turns.
        q, k = (np.tile(y, (n_heads // len(y), 1)) for y in (q, k))
        state = state * np.exp(gate)[:, None, None]
        change = (v - np.einsum("hrc,hc->hr", state, k)) * beta[:, None]
        state = state + np.einsum("hr,hc->hrc", change, k)
        return state, np.einsum("hrc,hc->hr", state, q) / np.sqrt(n_columns)
    if kind == "scan":
        v, dt, a, b, c = x
        # Neighbouring heads share a group's.
        b, c = (np.repeat(y, n_heads // len(y), axis=0) for y in (b, c))
        dt = np.log1p(np.exp(dt))
        state = state * np.exp(dt * a)[:, None, None] + np.einsum("hr,hc->hrc", v * dt[:, None], b)
        return state, np.einsum("hrc,hc->hr", state, c)
    r, w, k, v, a, b = x
    of = np.einsum("hrc,hc->hr", state, a)
    state = state * w[:, None] + np.einsum("hr,hc->hrc", v, k) + np.einsum("hr,hc->hrc", of, b)
    return state, np.einsum("hrc,hc->hr", state, r)


def call(
    shape: dict[str, int],
    inputs: list[np.ndarray],
    out: np.ndarray,
    is_ours: bool,
    n_threads: int,
    states: np.ndarray | None = None,
    ids: np.ndarray | None = None,
) -> None:
    """`lp_linear_compute`."""
    ffi, lib = native().ffi, lib_for_tests()
    arrays = [np.ascontiguousarray(x, np.float32) for x in inputs]
    fields: dict[str, Any] = {
        **shape,
        "n_seqs": out.shape[0],
        "n_tokens": out.shape[1],
        "inputs": [ffi.cast("float *", x.ctypes.data) for x in arrays],
        "states": ffi.NULL if states is None else ffi.cast("float *", states.ctypes.data),
        "ids": ffi.NULL if ids is None else ffi.cast("int32_t *", ids.ctypes.data),
        "n_ids": 0 if ids is None else len(ids),
        "is_ours": is_ours,
        "n_threads": n_threads,
        "n_times": 1,
    }
    if lib.lp_linear_compute(ffi.new("lp_linear *", fields), ffi.cast("float *", out.ctypes.data)):
        raise RuntimeError(last_error(native()))


def _error(computed: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((computed - exact) ** 2)) / np.sqrt(np.mean(exact**2)))


def some(
    kind: str,
    n_tokens: int = 9,
    n_seqs: int = 2,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    **options: Any,
) -> Linear:
    """States of a few more cells than sequences, and inputs as models have them: keys of length 1, and decays below
    1."""
    draw = np.random.default_rng(3)
    n_heads, n_groups = heads
    n_rows, n_columns = dims
    seqs = (n_seqs, n_tokens)

    def normal(*shape: int) -> np.ndarray:
        values: np.ndarray = draw.standard_normal(shape, np.float32)
        return values

    def unit(*shape: int) -> np.ndarray:
        values = normal(*shape)
        unit_values: np.ndarray = values / np.linalg.norm(values, axis=-1, keepdims=True)
        return unit_values

    inputs = {
        "delta net": lambda: [
            unit(*seqs, n_groups, n_columns),
            unit(*seqs, n_groups, n_columns),
            normal(*seqs, n_heads, n_rows),
            -np.exp(normal(*seqs, n_heads) - 2),
            1 / (1 + np.exp(normal(*seqs, n_heads))),
        ],
        "scan": lambda: [
            normal(*seqs, n_heads, n_rows),
            normal(*seqs, n_heads),
            -np.exp(normal(n_heads) - 1),
            normal(*seqs, n_groups, n_columns),
            normal(*seqs, n_groups, n_columns),
        ],
        "wkv7": lambda: [
            normal(*seqs, n_heads, n_columns),
            np.exp(-np.exp(normal(*seqs, n_heads, n_columns) - 2)),
            unit(*seqs, n_heads, n_columns),
            normal(*seqs, n_heads, n_rows),
            unit(*seqs, n_heads, n_columns),
            -unit(*seqs, n_heads, n_columns) / 2,
        ],
    }[kind]()
    n_kept = options.get("n_kept", 1)
    return Linear(
        kind,
        normal(n_kept * (n_seqs + 3), n_heads, n_rows, n_columns),
        **{"ids": range(n_seqs), "inputs": inputs, "n_groups": n_groups, "n_seqs": n_seqs, **options},
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each operation with a state."""
    return str(request.param)


@pytest.mark.parametrize("n_tokens", [1, 2, 63, 64, 65, 200])
def test_any_number_of_tokens_is_exact(kind: str, n_tokens: int) -> None:
    some(kind, n_tokens).check()


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 3), (16, 16), (32, 16)])
def test_any_heads_are_exact(kind: str, heads: tuple[int, int]) -> None:
    some(kind, heads=heads).check()


@pytest.mark.parametrize("n_dims", [16, 48, 128])
def test_any_dimensions_are_exact(kind: str, n_dims: int) -> None:
    some(kind, dims=(n_dims, n_dims)).check()


@pytest.mark.parametrize("dims", [(64, 128), (16, 48), (80, 16), (64, 24), (24, 64)])
def test_a_scan_whose_states_are_not_square(dims: tuple[int, int]) -> None:
    """Also of dimensions that are left to ggml."""
    some("scan", dims=dims).check()


@pytest.mark.parametrize(
    ("ids", "first"),
    [
        ((2, 3, 4), 2),
        ((0, 1, 2), 2),
        ((2, 0, 1), 0),
        ((1, 1, 1), 1),
        ((3, 2, 1), 1),
        ((5, 4, 3), 0),
        ((0, 1, 2, 4, 3), 0),
        ((1, 4, 0, 2, 3), 0),
        ((0, 1, 2, 1, 0), 0),
    ],
    ids=[
        "in place",
        "others'",
        "in a circle",
        "one",
        "exchanged",
        "apart",
        "two more",
        "two more in a circle",
        "two copies",
    ],
)
def test_where_states_are_read_and_written(kind: str, ids: tuple[int, ...], first: int) -> None:
    for n_tokens in (1, 5):
        some(kind, n_tokens, n_seqs=3, ids=ids, first=first).check()


@pytest.mark.parametrize("kind", ["delta net", "scan"])
@pytest.mark.parametrize("ids", [(0, 1), (1, 0), (5, 6), (6, 5), (10, 1)])
def test_earlier_states_are_kept(kind: str, ids: tuple[int, ...]) -> None:
    """Those of the last tokens are kept, each in its own part of the cells; sequences go on from any of them."""
    for n_tokens in (1, 2, 3, 70):
        some(kind, n_tokens, n_kept=3, ids=ids).check()


def test_a_token_depends_only_on_the_state_before_it(kind: str) -> None:
    """Not on how a prompt is cut, on other sequences, on threads, or on where states are."""
    together = some(kind, 70)
    expected = together.compute()
    for n_threads in (1, 3, 8):
        np.testing.assert_array_equal(replace(together, n_threads=n_threads).compute(), expected)
    for cuts in ((0, 70), (0, 1, 2, 70), (0, 33, 69, 70)):
        states = together.states
        for begin, end in pairwise(cuts):
            part = replace(
                together,
                states=states,
                inputs=[x[:, begin:end] if x.ndim > 1 else x for x in together.inputs],
            )
            np.testing.assert_array_equal(part.compute(), expected[:, begin:end])
            states = part.after
        np.testing.assert_array_equal(states, together.after)
    alone = replace(
        together,
        ids=[1],
        first=4,
        n_seqs=1,
        inputs=[x[1:2] if x.ndim > 1 else x for x in together.inputs],
    )
    np.testing.assert_array_equal(alone.compute()[0], expected[1])
    np.testing.assert_array_equal(alone.after[4], together.after[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_sequence_and_head(kind: str, value: float) -> None:
    linear = some(kind, 20, heads=(4, 4))
    expected = linear.compute()
    states = linear.after
    spoiled = [x.copy() for x in linear.inputs]
    values = {"delta net": 2, "scan": 0, "wkv7": 3}[kind]
    spoiled[values][1, 7, 2, 5] = value
    other = replace(linear, inputs=spoiled)
    computed = other.compute()
    touched = np.zeros(expected.shape, bool)
    touched[1, 7:, 2, 5] = True
    np.testing.assert_array_equal(computed[~touched], expected[~touched])
    assert not np.isfinite(computed[touched]).any()
    assert not np.isfinite(other.after[1, 2, 5]).any()
    np.testing.assert_array_equal(np.delete(other.after, 1, axis=0), np.delete(states, 1, axis=0))


def test_gates_that_forget_everything() -> None:
    linear = some("delta net")
    linear.inputs[3][:, 4] = -200.0
    linear.check()
    linear.inputs[3][:, 4] = -np.inf
    linear.check()


# ---- convolutions
def convolve(
    old: np.ndarray, tokens: np.ndarray, weights: np.ndarray, is_ours: bool = True, n_threads: int = 2
) -> np.ndarray:
    """(sequences, tokens, channels), of inputs (sequences, channels, width - 1), (sequences, tokens, channels) and
    weights (channels, width)."""
    n_channels, width = weights.shape
    out = np.full(tokens.shape, np.nan, np.float32)
    shape = {"kind": 3, "n_heads": 1, "n_rows": n_channels, "n_columns": width}
    call(shape, [old, tokens, weights], out, is_ours, n_threads)
    return out


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("n_channels", [1, 17, 96])
@pytest.mark.parametrize("n_tokens", [1, 5, 16, 100])
def test_convolutions_are_exact(width: int, n_channels: int, n_tokens: int) -> None:
    draw = np.random.default_rng(4)
    old, tokens, weights = (
        draw.standard_normal(shape, np.float32)
        for shape in ((3, n_channels, width - 1), (3, n_tokens, n_channels), (n_channels, width))
    )
    convolved = convolve(old, tokens, weights)
    all_tokens = np.concatenate([old.swapaxes(1, 2), tokens], axis=1).astype(np.float64)
    exact = sum(all_tokens[:, i : i + n_tokens] * weights[:, i] for i in range(width))
    np.testing.assert_allclose(convolved, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(convolve(old, tokens, weights, is_ours=False), convolved, rtol=1e-5, atol=1e-6)
    for n_threads in (1, 3, 8):
        np.testing.assert_array_equal(convolve(old, tokens, weights, n_threads=n_threads), convolved)
    single = convolve(old[1:2], tokens[1:2, :1], weights)
    np.testing.assert_array_equal(single[0, 0], convolved[1, 0])

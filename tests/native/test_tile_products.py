"""Products of many rows with AMX: nearer to those of float64 than the integer kernels', and the same in any company."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from support.kernel_types import NUMBERS, kernel_types
from support.products import N_COLUMNS, Product, put_not_finite, random
from support.tiles import needs_tiles

from llamapipe.native.load import native

LEAST = 64  # rows that tiles multiply: kLeastTileRows
pytestmark = [pytest.mark.native, needs_tiles]
kinds = pytest.mark.parametrize("kind", kernel_types())


def error(y: np.ndarray, exact: np.ndarray) -> float:
    """The root of the mean square, relative to that of the exact result."""
    return float(np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)))


def check(product: Product) -> None:
    """Tiles are used, and have a smaller error."""
    product.varies = False
    integers, exact = product.compute(), product.exact()
    product.varies = True
    tiles = product.compute()
    assert error(tiles, integers) > 1e-4, "tiles are not used"
    assert error(tiles, exact) < error(integers, exact) < 0.02


@kinds
@pytest.mark.parametrize("n", [64, 65, 97, 256, 300, 513])
def test_any_number_of_rows(kind: str, n: int) -> None:
    check(Product(kind, random(1, 96, N_COLUMNS), random(1, n, N_COLUMNS, seed=n)))


@kinds
@pytest.mark.parametrize("n_rows", [16, 48, 1008, 1009, 1023])
def test_any_number_of_rows_of_weights(kind: str, n_rows: int) -> None:
    check(Product(kind, random(1, n_rows, N_COLUMNS), random(1, 70, N_COLUMNS)))


@kinds
@pytest.mark.parametrize("n_columns", [32, 192, 224, 256, 384, 768, 2816])
def test_any_number_of_blocks(kind: str, n_columns: int) -> None:
    if not native().lib.lp_kernels_have(NUMBERS[kind], n_columns, 144):
        pytest.skip("no whole number of the type's blocks")
    check(Product(kind, random(1, 144, n_columns), random(1, 70, n_columns)))


@kinds
def test_a_row_does_not_depend_on_other_rows_or_threads(kind: str) -> None:
    product = Product(kind, random(1, 1009, N_COLUMNS), random(1, 300, N_COLUMNS), varies=True)
    together = product.compute()
    for n_threads in (1, 3):
        np.testing.assert_array_equal(product.compute(n_threads=n_threads), together)
    x = product.x
    for i, n in ((0, 64), (1, 65), (3, 80), (5, 256), (30, 270)):
        product.x = x[:, i : i + n]
        np.testing.assert_array_equal(product.compute()[0], together[0, i : i + n])


def test_tiles_are_used_only_where_results_may_vary_with_the_number_of_rows() -> None:
    product = Product("Q4_K", random(1, 96, N_COLUMNS), random(1, LEAST, N_COLUMNS))
    integers = product.compute()
    product.varies = True
    assert (product.compute() != integers).any()
    product.x = product.x[:, : LEAST - 1]
    np.testing.assert_array_equal(product.compute(), integers[:, : LEAST - 1])


def test_several_matrices_are_multiplied_as_before() -> None:
    products = [
        Product("Q4_K", random(2, 96, N_COLUMNS), random(2, 64, N_COLUMNS)),
        Product("Q4_K", random(2, 96, N_COLUMNS), random(64, 1, N_COLUMNS), np.arange(64)[:, None] % 2),
    ]
    for product in products:
        integers = product.compute()
        product.varies = True
        np.testing.assert_array_equal(product.compute(), integers)


@pytest.mark.parametrize("view", [(0, 32), (16, 48), (48, 48)])
def test_a_view_of_whole_panels(view: tuple[int, int]) -> None:
    check(Product("Q4_K", random(1, 96, N_COLUMNS), random(1, 70, N_COLUMNS), view=view))


@kinds
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_no_other(kind: str, value: float) -> None:
    product = Product(kind, random(1, 64, N_COLUMNS), random(1, 65, N_COLUMNS), varies=True)
    expected = product.compute()
    product.x[0, 4, 100] = value
    result = product.compute()
    assert not np.isfinite(result[0, 4]).any()
    np.testing.assert_array_equal(np.delete(result, 4, axis=1), np.delete(expected, 4, axis=1))


@kinds
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_spoils_only_its_row(kind: str, value: float) -> None:
    if kind in ("NVFP4", "MXFP4"):
        pytest.skip("its scales are finite")
    product = Product(kind, random(1, 64, N_COLUMNS), random(1, 65, N_COLUMNS), varies=True)
    expected = product.compute()
    put_not_finite(product, 21, value)
    result = product.compute()
    assert not np.isfinite(result[..., 21]).any()
    np.testing.assert_array_equal(np.delete(result, 21, axis=2), np.delete(expected, 21, axis=2))


@kinds
def test_rows_of_zeros_give_zeros(kind: str) -> None:
    product = Product(kind, random(1, 64, N_COLUMNS), np.zeros((1, 64, N_COLUMNS), np.float32), varies=True)
    assert not product.compute().any()


def test_tiles_of_ggml_are_as_they_were() -> None:
    """ggml configures tiles once for each thread, here the only one."""
    theirs, ours = (
        Product("Q4_0", random(1, 128, N_COLUMNS), random(1, 64, N_COLUMNS), n_threads=1) for _ in range(2)
    )
    theirs.form, theirs.gap, ours.varies = native().lib.LP_WEIGHTS_OF_GGML, 0, True
    before = theirs.compute()
    ours.compute()
    np.testing.assert_array_equal(theirs.compute(), before)


def test_tiles_of_ggml_are_as_they_were_after_a_fault() -> None:
    module = native()
    theirs = Product("Q4_0", random(1, 128, N_COLUMNS), random(1, 64, N_COLUMNS), n_threads=1)
    theirs.form, theirs.gap = module.lib.LP_WEIGHTS_OF_GGML, 0
    before = theirs.compute()
    assert module.lib.lp_cause_fault(module.lib.LP_CAUSE_NULL) != module.ffi.NULL
    np.testing.assert_array_equal(theirs.compute(), before)


def test_contexts_use_them_where_that_is_asked_for_and_results_may_vary() -> None:
    program = (
        "import sys\n"
        "import llamapipe as lp\n"
        "from llamapipe.llama.batch import DecodeBatch\n"
        "from llamapipe.llama.context import Context\n"
        "with lp.Model(lp.demo_model_path()) as model:\n"
        "    with Context(model, n_ctx=64, batch_invariant=bool(sys.argv[1])) as context:\n"
        "        context.decode(DecodeBatch(range(100, 164), range(64), [0] * 64, [1] * 64))\n"
        "        print(context.logits(63)[:32].tobytes().hex())\n"
    )

    def logits(wanted: str, batch_invariant: bool = False) -> str:
        variables = {"LLAMAPIPE_AMX": wanted, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program, "x" if batch_invariant else ""],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables},
        )
        return done.stdout

    integers = logits("")
    assert logits("1") != integers
    assert logits("1", batch_invariant=True) == integers

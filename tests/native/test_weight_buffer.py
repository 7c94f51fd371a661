"""Products by our kernels, of packed weights and of floats, on ggml's threads, are those that ggml computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.kernel_types import NUMBERS, kernel_types
from support.products import FLOATS, N_COLUMNS, Product, put_not_finite, random

from llamapipe.native.load import native

TYPES = kernel_types()
PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"

pytestmark = pytest.mark.native


@pytest.fixture(params=TYPES)
def kind(request: pytest.FixtureRequest) -> str:
    """A type that this processor has a kernel for."""
    name: str = request.param
    return name


@pytest.mark.skipif(not TYPES, reason="this processor has no kernels")
def test_the_page_names_every_type() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    named = text.partition("- weights in ")[2].partition(";")[0].replace(" or ", ", ").split(", ")
    assert sorted(named) == sorted([*TYPES, *FLOATS]), (
        f"{PAGE}: the weights of batch_invariant; the types are the rows of llamapipe/native/kernels/panels.hpp"
    )


@pytest.mark.parametrize("n", [1, 2, 3, 8, 17, 300])
def test_rows_of_one_matrix(kind: str, n: int) -> None:
    Product(kind, random(1, 96, N_COLUMNS), random(1, n, N_COLUMNS, seed=n)).check()


@pytest.mark.parametrize("n_rows", [16, 47, 48, 80, 1008, 1009, 1023])
def test_any_number_of_rows_of_weights(kind: str, n_rows: int) -> None:
    Product(kind, random(1, n_rows, N_COLUMNS), random(1, 5, N_COLUMNS)).check()


@pytest.mark.parametrize("n_rows", [32, 144])
@pytest.mark.parametrize("n_columns", [32, 192, 224, 256, 384, 768, 2816])
def test_any_number_of_blocks(kind: str, n_columns: int, n_rows: int) -> None:
    if not native().lib.lp_kernels_have(NUMBERS[kind], n_columns, n_rows):
        pytest.skip("no whole number of the type's blocks")
    Product(kind, random(1, n_rows, n_columns), random(1, 3, n_columns)).check()


@pytest.mark.parametrize("n_rows", [48, 1009])
def test_matrices_are_repeated(kind: str, n_rows: int) -> None:
    Product(kind, random(2, n_rows, N_COLUMNS), random(6, 3, N_COLUMNS)).check()


@pytest.mark.parametrize("has_own_rows", [False, True])
@pytest.mark.parametrize("n_rows", [64, 1001])
def test_experts_multiply_the_rows_of_their_tokens(kind: str, n_rows: int, has_own_rows: bool) -> None:
    """Of eight experts two are used by no token, and one by all. ``has_own_rows``: each has a row."""
    ids = [[0, 1], [0, 5], [0, 3], [4, 0], [0, 7], [0, 1]]
    x = random(len(ids), 2 if has_own_rows else 1, N_COLUMNS)
    Product(kind, random(8, n_rows, N_COLUMNS), x, np.array(ids)).check()


def test_a_row_does_not_depend_on_other_rows_or_threads(kind: str) -> None:
    product = Product(kind, random(1, 1009, N_COLUMNS), random(1, 37, N_COLUMNS))
    together = product.compute()
    for n_threads in (1, 3):
        np.testing.assert_array_equal(product.compute(n_threads=n_threads), together)
    x = product.x
    for i, n in ((0, 1), (8, 1), (36, 1), (3, 2), (3, 4), (3, 5), (3, 7), (3, 8), (3, 9), (3, 17)):
        product.x = x[:, i : i + n]
        np.testing.assert_array_equal(product.compute()[0], together[0, i : i + n])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_no_other(kind: str, value: float) -> None:
    product = Product(kind, random(1, 64, N_COLUMNS), random(1, 9, N_COLUMNS))
    expected = product.compute()
    product.x[0, 4, 100] = value
    result = product.compute()
    assert not np.isfinite(result[0, 4]).any()
    np.testing.assert_array_equal(np.delete(result, 4, axis=1), np.delete(expected, 4, axis=1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_spoils_only_its_row(kind: str, value: float) -> None:
    if kind in ("NVFP4", "MXFP4"):
        pytest.skip("its scales are finite")
    product = Product(kind, random(1, 64, N_COLUMNS), random(1, 9, N_COLUMNS))
    expected = product.compute()
    put_not_finite(product, 21, value)
    result = product.compute()
    assert not np.isfinite(result[..., 21]).any()
    np.testing.assert_array_equal(np.delete(result, 21, axis=2), np.delete(expected, 21, axis=2))


def test_rows_of_zeros_give_zeros(kind: str) -> None:
    assert (
        not Product(kind, random(1, 64, N_COLUMNS), np.zeros((1, 2, N_COLUMNS), np.float32)).compute().any()
    )


@pytest.mark.parametrize("view", [(0, 32), (16, 48), (48, 48), (0, 96)])
def test_a_view_of_whole_panels(kind: str, view: tuple[int, int]) -> None:
    Product(kind, random(2, 96, N_COLUMNS), random(2, 3, N_COLUMNS), view=view).check()


def test_a_view_that_is_not_made_of_panels_is_refused(kind: str) -> None:
    for view in ((8, 16), (0, 24)):
        with pytest.raises(RuntimeError, match="refuses"):
            Product(kind, random(1, 96, N_COLUMNS), random(1, 3, N_COLUMNS), view=view).compute()


def test_weights_without_a_kernel_are_not_packed() -> None:
    if not TYPES:
        pytest.skip("this processor has no kernels")
    assert not native().lib.lp_kernels_have(NUMBERS["Q4_K"], N_COLUMNS, 17)  # nearly half would be padding
    for shape in ((1, 17, N_COLUMNS),):
        with pytest.raises(RuntimeError, match="only whole weights can be packed"):
            Product("Q4_K", random(*shape), random(1, 1, shape[-1])).compute()


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("n_columns", [8, 67, 1024])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 100])
def test_activations_stay_floats(kind: str, n_columns: int, n: int) -> None:
    """Activations stay 32-bit floats, so the error is smaller than that of ggml, which rounds them as weights are."""
    product = Product(kind, random(2, 93, n_columns), random(4, n, n_columns, seed=n))
    exact = product.exact()
    np.testing.assert_allclose(product.compute(), exact, rtol=0, atol=2e-6 * np.sqrt(n_columns) * 3)
    errors = [np.abs(product.compute(is_ours) - exact).mean() for is_ours in (True, False)]
    assert errors[0] <= errors[1] * 1.5 + 1e-9


@pytest.mark.parametrize("kind", FLOATS)
def test_a_row_of_floats_does_not_depend_on_other_rows_or_threads(kind: str) -> None:
    product = Product(kind, random(1, 203, 1001), random(1, 37, 1001))
    together = product.compute()
    for n_threads in (1, 3):
        np.testing.assert_array_equal(product.compute(n_threads=n_threads), together)
    x = product.x
    for i in (0, 8, 36):
        product.x = x[:, i : i + 1]
        np.testing.assert_array_equal(product.compute()[0, 0], together[0, i])

"""Products by our kernels, of packed weights and of floats, on ggml's threads, are those that ggml computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.inside import lib_for_tests
from support.kernel_types import NUMBERS, kernel_types

from llamapipe.gguf.check import TYPES as BLOCKS_OF
from llamapipe.native.load import last_error, native

# Where the blocks of these types, whose weights may be any bytes, have their scales as 16-bit floats.
# ggml quantizes the others.
SCALES = {
    "Q3_K": (108,), "Q2_K": (80, 82), "TQ1_0": (52,), "TQ2_0": (64,),
    **dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"), (0,)),
    "IQ1_M": (), "NVFP4": (),
}  # fmt: skip
# And where those have them that ggml quantizes. NVFP4 and MXFP4 have other scales, none of which is infinite.
SCALES_OF_OTHERS = {
    **dict.fromkeys(("Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q6_K": (208,),
}  # fmt: skip
TYPES = kernel_types()
BLOCKS = {name: block for name, *block in BLOCKS_OF.values()}  # columns, bytes
FLOATS = ["F32", "F16", "BF16"]  # multiplied as they are in the file
N_COLUMNS = 512
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


@dataclass
class Product:
    """Weights (matrices, rows, columns) and activations (tokens or matrices, rows, columns)."""

    kind: str
    weights: np.ndarray
    x: np.ndarray
    ids: np.ndarray | None = None
    view: tuple[int, int] = (0, 0)
    n_threads: int = 2
    quantized: Any = field(init=False)
    plain: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Quantizes the weights, or draws blocks; ``plain`` has what they are worth then."""
        if self.kind in SCALES:
            blocks = random_blocks(self.kind, self.weights.size, seed=self.weights.size)
            self.set_blocks(blocks)
            return
        ffi, lib = native().ffi, lib_for_tests()
        n_matrices, n_rows, n_columns = self.weights.shape
        self.quantized = ffi.new("char[]", self.weights.nbytes)
        values = np.ascontiguousarray(self.weights, np.float32)
        n = lib.lp_quantize(
            NUMBERS[self.kind], n_matrices * n_rows, n_columns, _floats(values), self.quantized
        )
        assert n > 0, f"ggml does not quantize {self.kind}: add it to SCALES"
        self.plain = values.copy()
        if self.kind == "F32":
            return
        assert lib.lp_dequantize(NUMBERS[self.kind], values.size, self.quantized, _floats(self.plain)) == 0

    def set_blocks(self, blocks: np.ndarray) -> None:
        """Takes blocks in a file's form, (n, bytes), whose values numpy finds."""
        self.quantized = native().ffi.new("char[]", blocks.tobytes())
        self.plain = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[self.kind]).reshape(
            self.weights.shape
        )

    def compute(self, is_ours: bool = True, n_threads: int | None = None) -> np.ndarray:
        """What ggml computes, (tokens or matrices, rows of activations, rows of weights)."""
        ffi, lib = native().ffi, lib_for_tests()
        n_matrices, n_rows, n_columns = self.weights.shape
        nx2, nx1, _ = self.x.shape
        apart = np.full((nx2, nx1, n_columns + 32), np.nan, np.float32)
        apart[..., :n_columns] = self.x
        n_out = self.view[1] or n_rows
        out = np.full((nx2, nx1 if self.ids is None else self.ids.shape[1], n_out), np.nan, np.float32)
        keep = [_floats(apart), ffi.NULL]
        if self.ids is not None:
            self.ids = np.ascontiguousarray(self.ids, np.int32)
            keep[1] = ffi.cast("int32_t *", self.ids.ctypes.data)
        given = {
            "type": NUMBERS[self.kind],
            "n_columns": n_columns,
            "n_rows": n_rows,
            "n_matrices": n_matrices,
            "weights": self.quantized,
            "form": lib.LP_WEIGHTS_PACKED if is_ours and self.kind not in FLOATS else lib.LP_WEIGHTS_OF_FILES,
            "is_ours": is_ours,
            "first_view_row": self.view[0],
            "n_view_rows": self.view[1],
            "x_stride": n_columns + 32,
            "nx1": nx1,
            "nx2": nx2,
            "x": keep[0],
            "n_used": 0 if self.ids is None else self.ids.shape[1],
            "ids": keep[1],
            "n_threads": n_threads or self.n_threads,
            "n_times": 2,
        }
        if lib.lp_product_compute(ffi.new("lp_product *", given), _floats(out)) != 0:
            raise RuntimeError(last_error(native()))
        return out

    def exact(self) -> np.ndarray:
        """The same in float64, with activations that are not quantized."""
        first, n = self.view[0], self.view[1] or self.weights.shape[1]
        w, x = self.plain[:, first : first + n].astype(np.float64), self.x.astype(np.float64)
        if self.ids is not None:
            picked = x[:, np.arange(self.ids.shape[1]) % x.shape[1]]
            return np.asarray(np.einsum("tuc,turc->tur", picked, w[self.ids]))
        return np.asarray(np.einsum("bnc,brc->bnr", x, np.repeat(w, len(x) // len(w), axis=0)))

    def check(self) -> np.ndarray:
        """Compares with ggml's own product and with the exact one; returns ours."""
        ours, theirs, exact = self.compute(), self.compute(is_ours=False), self.exact()
        size = np.sqrt(np.mean(exact**2))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * size)
        error, own = (np.sqrt(np.mean((y - exact) ** 2)) / size for y in (ours, theirs))
        assert error <= own * 1.001 < 0.02
        return ours


def random_blocks(kind: str, n_weights: int, seed: int = 1) -> np.ndarray:
    """Blocks of random bytes, whose scales are small numbers of both signs."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(seed)
    blocks = np.frombuffer(draw.bytes(n_weights // block * n_bytes), np.uint8).reshape(-1, n_bytes).copy()
    put_scales(kind, blocks, draw.normal(size=len(blocks)) / 50)
    return blocks


def put_scales(kind: str, blocks: np.ndarray, values: np.ndarray | float) -> None:
    """Sets the scales of the blocks, and their scales of minima."""
    halves = np.broadcast_to(values, len(blocks)).astype(np.float16)
    for at in (SCALES | SCALES_OF_OTHERS)[kind]:
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    if kind == "IQ1_M":  # in the upper halves of every second byte of the scales of blocks
        for i in range(4):
            nibble = (halves.view(np.uint16) >> 4 * i & 15).astype(np.uint8)
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | nibble << 4


def _floats(array: np.ndarray) -> Any:
    return native().ffi.cast("float *", array.ctypes.data)


def random(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


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


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("n_rows", [64, 1001])
def test_experts(kind: str, n_rows: int, each: bool) -> None:
    """Of eight experts two are used by no token, and one by all. With ``each``, every expert has its own row."""
    ids = [[0, 1], [0, 5], [0, 3], [4, 0], [0, 7], [0, 1]]
    x = random(len(ids), 2 if each else 1, N_COLUMNS)
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
    found = product.compute()
    assert not np.isfinite(found[0, 4]).any()
    np.testing.assert_array_equal(np.delete(found, 4, axis=1), np.delete(expected, 4, axis=1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_spoils_only_its_row(kind: str, value: float) -> None:
    if kind in ("NVFP4", "MXFP4"):
        pytest.skip("its scales are finite")
    product = Product(kind, random(1, 64, N_COLUMNS), random(1, 9, N_COLUMNS))
    expected = product.compute()
    block, n_bytes = BLOCKS[kind]
    ffi, n = native().ffi, product.weights.size // block * n_bytes
    blocks = np.frombuffer(ffi.buffer(product.quantized, n), np.uint8).reshape(-1, n_bytes).copy()
    first = 21 * N_COLUMNS // block
    put_scales(kind, blocks[first : first + 1], value)
    product.quantized = ffi.new("char[]", blocks.tobytes())
    found = product.compute()
    assert not np.isfinite(found[..., 21]).any()
    np.testing.assert_array_equal(np.delete(found, 21, axis=2), np.delete(expected, 21, axis=2))


def test_zeros(kind: str) -> None:
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
def test_floats(kind: str, n_columns: int, n: int) -> None:
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

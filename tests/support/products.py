"""Products of matrices in a graph of ggml's CPU backend, by our kernels or by ggml's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np

from llamapipe.gguf.check import TYPES
from llamapipe.native.load import last_error, native

from .inside import lib_for_tests
from .kernel_types import NUMBERS

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
BLOCKS = {name: block for name, *block in TYPES.values()}  # columns, bytes
FLOATS = ["F32", "F16", "BF16"]  # multiplied as they are in the file
N_COLUMNS = 512


@dataclass
class Product:
    """Weights (matrices, rows, columns) and activations (tokens or matrices, rows, columns)."""

    kind: str
    weights: np.ndarray
    x: np.ndarray
    ids: np.ndarray | None = None
    view: tuple[int, int] = (0, 0)
    n_threads: int = 2
    varies: bool = False  # results may depend on the number of rows
    form: Any = None  # of weights; by default packed ones, if they are ours
    gap: int = 32  # numbers between rows of activations
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
        apart = np.full((nx2, nx1, n_columns + self.gap), np.nan, np.float32)
        apart[..., :n_columns] = self.x
        n_out = self.view[1] or n_rows
        out = np.full((nx2, nx1 if self.ids is None else self.ids.shape[1], n_out), np.nan, np.float32)
        keep = [_floats(apart), ffi.NULL]
        if self.ids is not None:
            self.ids = np.ascontiguousarray(self.ids, np.int32)
            keep[1] = ffi.cast("int32_t *", self.ids.ctypes.data)
        form = lib.LP_WEIGHTS_PACKED if is_ours and self.kind not in FLOATS else lib.LP_WEIGHTS_OF_FILES
        fields = {
            "type": NUMBERS[self.kind],
            "n_columns": n_columns,
            "n_rows": n_rows,
            "n_matrices": n_matrices,
            "weights": self.quantized,
            "form": form if self.form is None else self.form,
            "is_ours": is_ours,
            "varies": self.varies,
            "first_view_row": self.view[0],
            "n_view_rows": self.view[1],
            "x_stride": n_columns + self.gap,
            "nx1": nx1,
            "nx2": nx2,
            "x": keep[0],
            "n_used": 0 if self.ids is None else self.ids.shape[1],
            "ids": keep[1],
            "n_threads": n_threads or self.n_threads,
            "n_times": 2,
        }
        if lib.lp_product_compute(ffi.new("lp_product *", fields), _floats(out)) != 0:
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


def put_not_finite(product: Product, row: int, value: float) -> None:
    """Sets scales of a row of weights."""
    block, n_bytes = BLOCKS[product.kind]
    ffi, n = native().ffi, product.weights.size // block * n_bytes
    blocks = np.frombuffer(ffi.buffer(product.quantized, n), np.uint8).reshape(-1, n_bytes).copy()
    first = row * product.weights.shape[-1] // block
    put_scales(product.kind, blocks[first : first + 1], value)
    product.quantized = ffi.new("char[]", blocks.tobytes())


def _floats(array: np.ndarray) -> Any:
    return native().ffi.cast("float *", array.ctypes.data)


def random(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)

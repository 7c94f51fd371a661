"""Checks the tensor list of a GGUF file before llama.cpp uses it.

Tensors must follow each other without gaps, lie inside the file, and have types that llama.cpp's kernels can read.
"""

from __future__ import annotations

import math
import re
from typing import Final

from llamapipe.gguf.reader import Damage, Head, Tensor

# ggml's tensor types: name, values in a block, bytes of a block (ggml.h, ggml-common.h).
_TYPES: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
_REMOVED: Final = frozenset({4, 5, 31, 32, 33, 36, 37, 38})

# llama.cpp asserts that mapped tensors lie at multiples of this (TENSOR_ALIGNMENT in ggml-impl.h).
_ALIGNMENT: Final = 32
_F32: Final = 0
# Types that no kernel accepts as weights: intermediate formats, integers and doubles.
_NOT_WEIGHTS: Final = frozenset({9, 15, 24, 25, 26, 27, 28})
# Tables of ids; these may be integers.
_TABLES: Final = re.compile(r"\bd2t\b|tid2eid|_ordering")
# Kernels add, multiply or read these element by element as F32 only, whatever their rank. So they do with all vectors.
_F32_ONLY: Final = re.compile(
    r"norm\d?\.weight$|rope_f|\.(?:bias|scale)$|\.ssm_[ad]$|\.ssm_conv1d|\.shortconv\.conv|\.time_mix_(?:first|lerp|decay\.)"
)


def check_tensors(head: Head) -> None:
    """Check the shapes, types and places of all tensors. Raises Damage."""
    size = len(head.buffer)
    expected = end = 0
    truncated = None
    for tensor in head.tensors:
        n_bytes = _n_bytes(tensor)
        if n_bytes is None:
            return  # a type newer than this check: llama.cpp knows it or reports it
        if tensor.offset != expected:
            raise Damage(f"tensor {tensor.name!r} is at offset {tensor.offset}, but {expected} comes next")
        start = head.data_start + expected
        if start % _ALIGNMENT:
            raise Damage(
                f"tensor {tensor.name!r} is at byte {start}, which is not a multiple of {_ALIGNMENT}"
            )
        end = start + n_bytes
        if end > size and truncated is None:
            truncated = tensor.name
        expected += -(-n_bytes // head.alignment) * head.alignment
    if truncated is not None:
        raise Damage(
            f"the data of {truncated!r} is missing: the file ends at byte {size} but should have {end}:"
            " it is truncated, download or convert it again"
        )


def type_name(tensor: Tensor) -> str:
    """The name of a tensor's type, such as ``Q4_K``; its number if it is newer than this check."""
    return _TYPES[tensor.kind][0] if tensor.kind in _TYPES else str(tensor.kind)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a checked tensor's data; 0 if its type is newer than this check."""
    return _n_bytes(tensor) or 0


def _n_bytes(tensor: Tensor) -> int | None:
    """Bytes of the tensor's data; None for an unknown type."""
    shape = " × ".join(map(str, tensor.dims))
    n_values = math.prod(tensor.dims)
    if not 0 < n_values < 1 << 63:
        raise Damage(f"tensor {tensor.name!r} has the impossible shape {shape}")
    if tensor.kind in _REMOVED:
        raise Damage(
            f"tensor {tensor.name!r} has the type {tensor.kind}, which llama.cpp removed; quantize again"
        )
    known = _TYPES.get(tensor.kind)
    if known is None:
        return None
    name, block, block_bytes = known
    if tensor.dims[0] % block:
        raise Damage(
            f"tensor {tensor.name!r} ({shape}) has rows of {tensor.dims[0]}, not a multiple of {name}'s {block}"
        )
    if not _TABLES.search(tensor.name):
        if tensor.kind in _NOT_WEIGHTS:
            raise Damage(f"tensor {tensor.name!r} has the type {name}, which is not one of weights")
        if tensor.kind != _F32 and (len(tensor.dims) == 1 or _F32_ONLY.search(tensor.name)):
            raise Damage(
                f"tensor {tensor.name!r} has the type {name}, llama.cpp reads such tensors as F32 only"
            )
    return n_values // block * block_bytes

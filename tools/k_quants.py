"""Packs weights as Q4_K and Q6_K; gguf's Python package can only unpack these two.

The layouts are ggml's (``block_q4_K`` and ``block_q6_K`` in ggml-common.h): 256 values per block, with scales that are
quantised too. The scales come from the extremes of each part. llama-quantize searches for better ones, so these weights
are a little less exact, but they have the same size and use the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt

BLOCK = 256
_ROWS = 2048  # converted at a time, because several arrays of that size are alive at once

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def quantize(tensor: Floats, qtype: gguf.GGMLQuantizationType) -> Bytes:
    """The packed rows of a matrix, uint8 ``(rows, bytes)``.

    ``tensor``: float32 ``(rows, cols)``, cols a multiple of 256. ``qtype``: Q4_K or Q6_K; gguf packs other types.
    """
    pack = _PACK.get(qtype)
    if pack is None:
        packed: Bytes = gguf.quants.quantize(tensor, qtype)
        return packed
    parts = [
        pack(tensor[at : at + _ROWS].reshape(-1, BLOCK)).reshape(len(tensor[at : at + _ROWS]), -1)
        for at in range(0, len(tensor), _ROWS)
    ]
    return np.concatenate(parts)


def _pack_q4(blocks: Floats) -> Bytes:
    """``x = d * scale * q - d_min * low`` in eight parts of 32: scale and low have six bits, q has four."""
    parts = blocks.reshape(-1, 8, 32)
    low = np.maximum(-parts.min(axis=2), 0)
    step = (parts.max(axis=2) + low) / 15
    d, scale = _in_steps(step, 63)
    d_min, low_q = _in_steps(low, 63)
    unit = (d.astype(np.float32)[:, None] * scale)[..., None]
    zero = (d_min.astype(np.float32)[:, None] * low_q)[..., None]
    q = np.clip(np.rint(_ratio(parts + zero, unit)), 0, 15).astype(np.uint8)
    # The last four parts' numbers have their low halves in bytes 8 to 11 and their high bits above the first four's.
    scales = np.concatenate(
        [
            scale[:, :4] | (scale[:, 4:] >> 4) << 6,
            low_q[:, :4] | (low_q[:, 4:] >> 4) << 6,
            (scale[:, 4:] & 15) | (low_q[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([_bytes(d), _bytes(d_min), scales, nibbles], axis=1)


def _pack_q6(blocks: Floats) -> Bytes:
    """``x = d * scale * (q - 32)`` in sixteen parts of 16: scale is an int8, q has six bits."""
    parts = blocks.reshape(-1, 16, 16)
    d, scale = _in_steps(np.abs(parts).max(axis=2) / 31, 127)
    unit = (d.astype(np.float32)[:, None] * scale)[..., None]
    q = np.clip(np.rint(_ratio(parts, unit)) + 32, 0, 63).astype(np.uint8)
    # Each half of the block: four rows of 32 values; a byte has nibbles of two rows, another two bits of all four.
    first, second, third, fourth = np.moveaxis(q.reshape(-1, 2, 4, 32), 2, 0)
    low = np.concatenate([first & 15 | (third & 15) << 4, second & 15 | (fourth & 15) << 4], axis=2)
    high = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | fourth >> 4 << 6
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scale, _bytes(d)], axis=1)


def _in_steps(values: Floats, n_steps: int) -> tuple[npt.NDArray[np.float16], Bytes]:
    """The values of a block as a step size and the number of steps per value."""
    step = (values.max(axis=1) / n_steps).astype(np.float16)
    counts = np.rint(_ratio(values, step.astype(np.float32)[:, None]))
    return step, np.clip(counts, 0, n_steps).astype(np.uint8)


def _ratio(values: Floats, units: Floats) -> Floats:
    """``values / units``, and zero where the unit is zero."""
    quotient: Floats = np.divide(
        values, units, out=np.zeros(values.shape, np.float32), where=np.broadcast_to(units != 0, values.shape)
    )
    return quotient


def _bytes(halves: npt.NDArray[np.float16]) -> Bytes:
    return halves.astype("<f2")[:, None].view(np.uint8)


_PACK: dict[gguf.GGMLQuantizationType, Callable[[Floats], Bytes]] = {
    gguf.GGMLQuantizationType.Q4_K: _pack_q4,
    gguf.GGMLQuantizationType.Q6_K: _pack_q6,
}

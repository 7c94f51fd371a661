"""The input of one decode: tokens with their positions, sequences and output flags.

A batch checks its arrays once and never changes, so native code reads exactly the values that were checked.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from llamapipe.arguments import check_flag, check_int

_INT32_MAX = 2**31 - 1


class DecodeBatch:
    """An immutable batch of tokens for ``Context.decode`` and ``Pipeline.submit``.

    ``tokens``, ``positions`` and ``seq_ids`` are integers, ``outputs`` booleans, all ``(n_tokens,)``. ``outputs`` marks
    the entries whose logits are wanted. The arrays are copied to read-only int32 (``outputs``: int8). Plain data
    without native memory; any thread.

    Raises TypeError if an argument is not a one-dimensional sequence of integers (booleans for ``outputs``),
    ValueError for unequal lengths, values outside int32 or an empty batch.
    """

    __slots__ = ("outputs", "positions", "seq_ids", "tokens")

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    seq_ids: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int8]

    def __init__(
        self, tokens: npt.ArrayLike, positions: npt.ArrayLike, seq_ids: npt.ArrayLike, outputs: npt.ArrayLike
    ) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": _integers("tokens", tokens),
            "positions": _integers("positions", positions),
            "seq_ids": _integers("seq_ids", seq_ids),
            "outputs": _flags("outputs", outputs),
        }
        n = len(arrays["tokens"])
        for name, array in arrays.items():
            if len(array) != n:
                raise ValueError(
                    f"{name} has {len(array)} entries and tokens has {n}; the lengths must be equal"
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if n == 0:
            raise ValueError("a batch needs at least one token")

    @classmethod
    def of_tokens(
        cls, tokens: Sequence[int], first_position: int = 0, seq_id: int = 0, all_outputs: bool = False
    ) -> DecodeBatch:
        """Make a batch of one sequence's tokens, at positions from ``first_position``.

        ``all_outputs``: all tokens are outputs; otherwise only the last one is. Raises as ``DecodeBatch`` does.
        """
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sized):
            raise TypeError(f"tokens must be a sequence of token ids, not {type(tokens).__name__}")
        n = len(tokens)
        first_position = check_int("first_position", first_position, 0, _INT32_MAX)
        seq_id = check_int("seq_id", seq_id, 0, _INT32_MAX)
        check_flag("all_outputs", all_outputs)
        outputs = np.full(n, all_outputs, dtype=np.int8)
        outputs[-1:] = 1
        return cls(tokens, np.arange(first_position, first_position + n), np.full(n, seq_id), outputs)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is immutable; create another one to change {name}")

    def __reduce__(self) -> Any:
        return DecodeBatch, (self.tokens, self.positions, self.seq_ids, self.outputs)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"<DecodeBatch n_tokens={len(self)} n_outputs={int(self.outputs.astype(bool).sum())}>"

    @property
    def rows(self) -> list[int]:
        """The indices of the output entries in the batch, ascending."""
        return [int(i) for i in np.flatnonzero(self.outputs)]


def check_batch(batch: DecodeBatch, n_batch: int, **limits: int) -> None:
    """Raise ValueError for more than ``n_batch`` tokens, or for a value outside ``[0, limit)`` in an array.

    ``limits``: by the name of the array, such as ``tokens=n_vocab``.
    """
    n = len(batch)
    if n > n_batch:
        raise ValueError(f"the batch has {n} tokens; n_batch is {n_batch}: cut it or use a larger n_batch")
    for name, limit in limits.items():
        values = getattr(batch, name)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} holds {low if low < 0 else high}; it must be from 0 to {limit - 1}")


def _array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        raise TypeError(f"{name} must be a one-dimensional sequence of integers") from None
    if array.ndim != 1:
        raise TypeError(
            f"{name} must be a one-dimensional sequence of integers, not {type(values).__name__} "
            f"of shape {array.shape}"
        )
    return array


def _integers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int32]:
    array = _array(name, values)
    if array.dtype.kind == "O" and all(type(value) is int for value in array):
        raise ValueError(f"{name} holds values outside int32")  # some are even outside int64
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {array.dtype}")
    if array.size and not (array.min() >= -_INT32_MAX - 1 and array.max() <= _INT32_MAX):
        raise ValueError(f"{name} holds values outside int32")
    return np.array(array, dtype=np.int32)


def _flags(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int8]:
    array = _array(name, values)
    if array.size and array.dtype.kind not in "biu":
        raise TypeError(f"{name} must hold booleans, not {array.dtype}")
    flags: npt.NDArray[np.int8] = (array != 0).astype(np.int8)
    return flags

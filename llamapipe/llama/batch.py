"""What one decode gets: tokens with positions, sequences and output flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class Batch:
    """A batch of tokens for ``Context.decode``.

    ``tokens``, ``positions`` and ``seq_ids`` are integers of equal length ``(n_tokens,)``, ``outputs`` booleans:
    entries whose logits are wanted. Arrays are copied to int32 and int8. Plain data: any thread, no native memory.

    Raises TypeError for what is not one-dimensional integers, ValueError for unequal lengths or an empty batch.
    """

    __slots__ = ("outputs", "positions", "seq_ids", "tokens")

    def __init__(self, tokens: Any, positions: Any, seq_ids: Any, outputs: Any) -> None:
        self.tokens = _array("tokens", tokens, np.int32)
        self.positions = _array("positions", positions, np.int32)
        self.seq_ids = _array("seq_ids", seq_ids, np.int32)
        self.outputs = _array("outputs", outputs, np.int8)
        n = len(self.tokens)
        for name in ("positions", "seq_ids", "outputs"):
            if len(getattr(self, name)) != n:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries and tokens {n}; they must be as many"
                )
        if n == 0:
            raise ValueError("a batch needs at least one token")

    @classmethod
    def of_tokens(
        cls, tokens: Sequence[int], first_position: int = 0, seq_id: int = 0, all_outputs: bool = False
    ) -> Batch:
        """A run of tokens of one sequence from ``first_position`` on; the last one, or all, are outputs."""
        n = len(tokens)
        outputs = np.full(n, all_outputs, dtype=np.int8)
        outputs[-1:] = 1
        return cls(tokens, np.arange(first_position, first_position + n), np.full(n, seq_id), outputs)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"<Batch n_tokens={len(self)} n_outputs={int(self.outputs.astype(bool).sum())}>"

    @property
    def rows(self) -> list[int]:
        """Indices of the output entries, ascending."""
        return [int(i) for i in np.flatnonzero(self.outputs)]


def _array(name: str, values: Any, dtype: type[np.signedinteger[Any]]) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise TypeError(
            f"{name} must be a one-dimensional sequence of integers, not {array.dtype} of shape {array.shape}"
        )
    if dtype is np.int8:
        flags: npt.NDArray[Any] = (array != 0).astype(np.int8)
        return flags
    if array.size and not (array.min() >= -(2**31) and array.max() < 2**31):
        raise ValueError(f"{name} holds values outside int32")
    return np.ascontiguousarray(array, dtype=dtype)

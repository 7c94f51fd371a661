"""llama.cpp's positions of tokens, where those differ from their places in the sequence.

Open this file to change how images with a height and a width (M-RoPE, as of Qwen-VL) are counted.

Everything else counts tokens: a prompt with an image of 4 × 6 rows has 24 tokens for it. In such a model all 24 rows
are at one position, and what follows continues max(4, 6) positions further on. The executor asks here whenever it
names a position to llama.cpp. No operation may divide an image: llama.cpp removes cells by their position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Grid(NamedTuple):
    """The ``n`` tokens of an image from ``begin`` on, which take ``n_positions`` positions."""

    begin: int
    n: int
    n_positions: int


class Positions:
    """The images with a grid that the cells of each slot belong to. The thread that launches."""

    def __init__(self) -> None:
        self._grids: dict[int, list[Grid]] = {}  # by slot, in order; no empty lists

    def __repr__(self) -> str:
        return f"<Positions {self._grids}>"

    def __bool__(self) -> bool:
        """Whether any position differs from its token's place."""
        return bool(self._grids)

    def add(self, slot: int, grid: Grid) -> None:
        """The slot computes rows of an image, perhaps not the first ones."""
        grids = self._grids.setdefault(slot, [])
        if not grids or grids[-1].begin < grid.begin:
            grids.append(grid)

    def at(self, slot: int, i: int) -> int:
        """The position of token ``i``: for each row of an image that of its first one."""
        return _position(self._grids.get(slot, ()), i)

    def divides(self, slot: int, n: int) -> bool:
        """Whether the first ``n`` tokens end within an image."""
        return any(grid.begin < n < grid.begin + grid.n for grid in self._grids.get(slot, ()))

    def end(self, slot: int, n: int) -> int:
        """The position after those of the first ``n`` tokens, which divide no image."""
        return end_position(self._grids.get(slot, ()), n)

    def n_tokens(self, slot: int, end: int) -> int:
        """The number of tokens whose positions are before ``end``."""
        n_less = 0
        for grid in self._grids.get(slot, ()):
            if end <= grid.begin - n_less:
                break
            if end <= grid.begin - n_less + grid.n_positions:
                return grid.begin + grid.n
            n_less += grid.n - grid.n_positions
        return end + n_less

    def grids(self, slot: int, n: int | None = None) -> list[Grid]:
        """The images among the first ``n`` tokens, or all."""
        return [grid for grid in self._grids.get(slot, ()) if n is None or grid.begin < n]

    def set(self, slot: int, grids: Iterable[Grid]) -> None:
        """The slot has other cells, with these images."""
        if found := list(grids):
            self._grids[slot] = found
        else:
            self._grids.pop(slot, None)


def _position(grids: Sequence[Grid], i: int) -> int:
    n_less = 0
    for grid in grids:
        if i < grid.begin:
            break
        if i < grid.begin + grid.n:
            return grid.begin - n_less
        n_less += grid.n - grid.n_positions
    return i - n_less


def end_position(grids: Sequence[Grid], n: int) -> int:
    """The position after those of the first ``n`` tokens of a sequence with these images."""
    return _position(grids, n - 1) + 1 if n > 0 else 0

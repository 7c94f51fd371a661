"""llama.cpp's positions of tokens, where they differ from places in the sequence.

Open this file to change how images with a height and a width (M-RoPE, as in Qwen-VL) are counted.

The principle: all other code counts tokens. An image of 4 × 6 rows is 24 tokens of a prompt. In a model with M-RoPE all
24 rows have one position, and the next token is max(4, 6) positions later. The executor keeps the images of each
sequence, in order, and calls these functions to convert places to positions and back. No operation may divide an image,
because llama.cpp removes cells by their position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Grid(NamedTuple):
    """The ``n`` tokens of an image from ``begin`` onward, which take ``n_positions`` positions."""

    begin: int
    n: int
    n_positions: int


Grids = Sequence[Grid]


def position_of(grids: Grids, i: int) -> int:
    """Return the position of token ``i``; all rows of an image have the position of its first row."""
    n_less = 0
    for grid in grids:
        if i < grid.begin:
            break
        if i < grid.begin + grid.n:
            return grid.begin - n_less
        n_less += grid.n - grid.n_positions
    return i - n_less


def end_position(grids: Grids, n: int) -> int:
    """Return the position after the first ``n`` tokens."""
    return position_of(grids, n - 1) + 1 if n > 0 else 0


def n_tokens_before(grids: Grids, end: int) -> int:
    """Return the number of tokens whose positions are before ``end``."""
    n_less = 0
    for grid in grids:
        if end <= grid.begin - n_less:
            break
        if end <= grid.begin - n_less + grid.n_positions:
            return grid.begin + grid.n
        n_less += grid.n - grid.n_positions
    return end + n_less


def grids_before(grids: Grids, n: int) -> Grids | None:
    """Return the images among the first ``n`` tokens; None if the ``n`` tokens end within an image."""
    images = [grid for grid in grids if grid.begin < n]
    return None if images and images[-1].begin + images[-1].n > n else images

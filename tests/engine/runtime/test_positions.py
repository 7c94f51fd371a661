"""The positions of images with a height and a width, beside a list that has one for each token."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from llamapipe._engine.runtime.positions import Grid, end_position, grids_before, n_tokens_before, position_of


class Sequence(NamedTuple):
    """A sequence: the number of tokens before each image, its height and its width; and the tokens at the end."""

    images: list[tuple[int, int, int]]
    n_after: int

    def grids(self) -> list[Grid]:
        grids, n = [], 0
        for n_before, height, width in self.images:
            n += n_before
            grids.append(Grid(n, height * width, max(height, width)))
            n += height * width
        return grids

    def positions(self) -> list[int]:
        positions: list[int] = []
        at = 0
        for n_before, height, width in self.images:
            positions += [at + i for i in range(n_before)] + [at + n_before] * (height * width)
            at += n_before + max(height, width)
        return positions + [at + i for i in range(self.n_after)]


SIDES = st.integers(1, 5)
IMAGES = st.lists(st.tuples(st.integers(0, 4), SIDES, SIDES), max_size=4)
SEQUENCES = st.builds(Sequence, IMAGES, st.integers(0, 5))


@given(SEQUENCES)
def test_each_token_has_its_position(sequence: Sequence) -> None:
    grids, expected = sequence.grids(), sequence.positions()
    assert [position_of(grids, i) for i in range(len(expected))] == expected
    assert [position_of((), i) for i in range(5)] == [0, 1, 2, 3, 4]
    inside = {n for grid in grids for n in range(grid.begin + 1, grid.begin + grid.n)}
    for n in range(len(expected) + 1):
        kept = grids_before(grids, n)
        assert (kept is None) is (n in inside)
        if kept is not None:
            end = end_position(kept, n)
            assert end == (expected[n - 1] + 1 if n else 0)
            assert n_tokens_before(kept, end) == n_tokens_before(grids, end) == n
            assert [position_of(kept, i) for i in range(n)] == expected[:n]

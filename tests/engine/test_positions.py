"""The positions of images with a height and a width, beside a list that has one for each token."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from llamapipe._engine.positions import Grid, Positions, end_position


class Sequence(NamedTuple):
    """A sequence: the number of tokens before each image, its height and its width; and the tokens at the end."""

    images: list[tuple[int, int, int]]
    n_after: int

    def grids(self) -> list[Grid]:
        found, n = [], 0
        for n_before, height, width in self.images:
            n += n_before
            found.append(Grid(n, height * width, max(height, width)))
            n += height * width
        return found

    def positions(self) -> list[int]:
        found: list[int] = []
        at = 0
        for n_before, height, width in self.images:
            found += [at + i for i in range(n_before)] + [at + n_before] * (height * width)
            at += n_before + max(height, width)
        return found + [at + i for i in range(self.n_after)]


SIDES = st.integers(1, 5)
IMAGES = st.lists(st.tuples(st.integers(0, 4), SIDES, SIDES), max_size=4)
SEQUENCES = st.builds(Sequence, IMAGES, st.integers(0, 5))


@given(SEQUENCES)
def test_each_token_has_its_position(sequence: Sequence) -> None:
    made = Positions()
    made.set(1, sequence.grids())
    expected = sequence.positions()
    assert [made.at(1, i) for i in range(len(expected))] == expected
    assert [made.at(0, i) for i in range(5)] == [0, 1, 2, 3, 4]
    assert bool(made) is bool(sequence.images)
    inside = {n for grid in sequence.grids() for n in range(grid.begin + 1, grid.begin + grid.n)}
    for n in range(len(expected) + 1):
        assert made.divides(1, n) is (n in inside)
        if n not in inside:
            end = made.end(1, n)
            assert end == end_position(made.grids(1, n), n) == (expected[n - 1] + 1 if n else 0)
            assert made.n_tokens(1, end) == n
            kept = Positions()
            kept.set(1, made.grids(1, n))
            assert [kept.at(1, i) for i in range(n)] == expected[:n]


@given(SEQUENCES, st.data())
def test_images_are_added_in_parts(sequence: Sequence, data: st.DataObject) -> None:
    made = Positions()
    for grid in sequence.grids():
        for _ in range(data.draw(st.integers(1, 3))):
            made.add(2, grid)
    assert made.grids(2) == sequence.grids()
    made.set(2, ())
    assert not made and made.at(2, 7) == 7

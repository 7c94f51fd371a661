"""The events of a prefix tree, whenever they are taken, give the blocks that the tree holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule
from support.kv_subscriber import Index

from llamapipe._engine.policy.prefix_tree import ObservedTree
from llamapipe.kv_events import Block, BlockTracker, Cleared, Event, Removed, Stored, apply, chains

SIZE = 3
TOKENS = st.lists(st.integers(0, 1), max_size=14)


class Cells:
    """A holder whose first ``n`` tokens are computed."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.tokens: list[int] = []


class Trees(RuleBasedStateMachine):
    """Holders come, are computed, grow and go."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.tracker = BlockTracker(SIZE)
        self.tree: ObservedTree[Cells] = ObservedTree(self.tracker)
        self.all: list[Cells] = []
        self.index = Index()
        self.base: dict[int, Block] = {}

    @rule(target=holders, tokens=TOKENS, n=st.integers(0, 14))
    def insert(self, tokens: list[int], n: int) -> Cells:
        cells = Cells(min(n, len(tokens)))
        cells.tokens = tokens
        self.tree.insert(cells, tokens)
        self.all.append(cells)
        return cells

    @rule(cells=holders, n=st.integers(0, 14))
    def compute(self, cells: Cells, n: int) -> None:
        cells.n = min(cells.n + n, len(cells.tokens))

    @rule(cells=holders, more=TOKENS)
    def extend(self, cells: Cells, more: list[int]) -> None:
        n = len(cells.tokens)
        cells.tokens = cells.tokens + more
        self.tree.extend(cells, cells.tokens, n)

    @rule(cells=holders, n=st.integers(0, 14))
    def truncate(self, cells: Cells, n: int) -> None:
        self.tree.remove(cells)
        cells.tokens = cells.tokens[:n]
        cells.n = min(cells.n, n)
        self.tree.insert(cells, cells.tokens)

    @rule(cells=consumes(holders))
    def remove(self, cells: Cells) -> None:
        self.tree.remove(cells)
        self.tree.remove(cells)
        self.all.remove(cells)

    @rule()
    def take(self) -> None:
        events = self.tracker.take()
        for event in events:
            self.index.apply(array(event))
        apply(self.base, events, SIZE)
        expected = {tuple(cells.tokens[:end]) for cells in self.all for end in range(SIZE, cells.n + 1, SIZE)}
        assert self.index.prefixes == expected
        assert self.tracker.take() == []
        again = Index()  # as a replay tells it to a subscriber that comes late
        for event in chains(self.base.items()):
            again.apply(array(event))
        assert again.blocks == self.index.blocks

    def teardown(self) -> None:
        self.take()


def array(event: Event) -> list[object]:
    if isinstance(event, Stored):
        return ["BlockStored", event.hashes, event.parent, event.tokens, SIZE]
    if isinstance(event, Removed):
        return ["BlockRemoved", event.hashes]
    assert isinstance(event, Cleared)
    return ["AllBlocksCleared"]


Trees.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestTrees = Trees.TestCase


def test_what_comes_back_is_not_told() -> None:
    tracker = BlockTracker(SIZE)
    tree: ObservedTree[Cells] = ObservedTree(tracker)
    first, second = Cells(9), Cells(12)
    tree.insert(first, list(range(9)))
    (stored,) = tracker.take()
    assert isinstance(stored, Stored) and len(stored.hashes) == 3 and stored.parent is None
    tree.remove(first)
    tree.insert(second, list(range(12)))
    (more,) = tracker.take()
    assert isinstance(more, Stored)
    assert more == Stored(more.hashes, stored.hashes[-1], [9, 10, 11])
    tree.remove(second)
    assert tracker.take() == [Removed([*more.hashes, *reversed(stored.hashes)])]

"""The radix tree against a list of token lists."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from llamapipe._engine.policy.prefix_tree import PrefixTree, n_common

TOKENS = st.lists(st.integers(0, 2), max_size=12)
KEYS = st.sampled_from([None, ("a", None), "b"])


def n_shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Trees(RuleBasedStateMachine):
    """Holders come and go; what the tree finds is what a look at all of them finds."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixTree[int] = PrefixTree()
        self.tokens: dict[int, list[int]] = {}
        self.keys: dict[int, object] = {}
        self.n_made = 0

    @rule(target=holders, tokens=TOKENS, key=KEYS)
    def insert(self, tokens: list[int], key: object) -> int:
        self.n_made += 1
        self.tree.insert(self.n_made, tokens, key)
        self.tokens[self.n_made] = tokens
        self.keys[self.n_made] = key
        return self.n_made

    @rule(holder=consumes(holders))
    def remove(self, holder: int) -> None:
        self.tree.remove(holder)
        self.tree.remove(holder)  # which does nothing
        del self.tokens[holder]

    @rule(holder=holders, more=TOKENS)
    def extend(self, holder: int, more: list[int]) -> None:
        n = len(self.tokens[holder])
        self.tokens[holder] = self.tokens[holder] + more
        self.tree.extend(holder, self.tokens[holder], n)

    @rule(tokens=TOKENS, limit=st.integers(0, 12), key=KEYS)
    def find(self, tokens: list[int], limit: int, key: object) -> None:
        limit = min(limit, len(tokens))
        matches = list(self.tree.find(tokens, limit, key))
        best = max(
            (n_shared(tokens[:limit], t) for i, t in self.tokens.items() if self.keys[i] == key), default=0
        )
        assert all(self.keys[holder] == key for _, holder in matches)
        assert (matches[0][0] if matches else 0) == best
        assert [n for n, _ in matches] == sorted((n for n, _ in matches), reverse=True)
        for n, holder in matches:
            assert n_shared(tokens[:limit], self.tokens[holder]) >= n

    @rule(holder=holders)
    def sharing(self, holder: int) -> None:
        tokens = self.tokens[holder]
        shared = {
            h: n_shared(tokens, t)
            for h, t in self.tokens.items()
            if h != holder and self.keys[h] == self.keys[holder]
        }
        n, others = self.tree.sharing(holder, len(tokens))
        assert n == max(shared.values(), default=0)
        assert set(others) <= {h for h, m in shared.items() if m == n} and len(set(others)) == len(others)
        assert bool(others) == (n > 0)

    @invariant()
    def is_sound(self) -> None:
        self.tree.check_integrity()
        assert len(self.tree) == len(self.tokens)


Trees.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTrees = Trees.TestCase


def test_nothing_is_left_of_many() -> None:
    chance = random.Random(1)
    tree: PrefixTree[int] = PrefixTree()
    shared = [chance.randrange(1000) for _ in range(200)]
    texts = {
        i: shared[: chance.randrange(201)] + [chance.randrange(1000) for _ in range(50)] for i in range(500)
    }
    for i, tokens in texts.items():
        tree.insert(i, tokens)
    tree.check_integrity()
    assert all(next(iter(tree.find(tokens, len(tokens)))) == (len(tokens), i) for i, tokens in texts.items())
    for i in chance.sample(sorted(texts), len(texts)):
        tree.remove(i)
        tree.check_integrity()
    assert len(tree) == 0 and list(tree.find(shared, 200)) == [] and not tree._roots


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [
        ([], [], 0),
        ([1], [1], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 3], 1),
        ([4], [5], 0),
        (range(99), range(50), 50),
    ],
)
def test_n_common_counts_the_equal_tokens_at_the_start(a: Sequence[int], b: Sequence[int], n: int) -> None:
    assert n_common(list(a), list(b)) == n
    assert n_common([7, *a], list(b), 1) == n

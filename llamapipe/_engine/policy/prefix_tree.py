"""A radix tree over token ids, which finds the holders that share the longest prefix with a prompt.

Open this file to change how prefixes are found, or what an observer of the cache learns.

The principle: the tree knows keys and tokens, nothing else. A node is a run of tokens, and each holder has a node at
which its tokens end. Holders share tokens only under the same key: everything that the cells depend on besides their
tokens is in the key, or is a negative number among the tokens. The time of a lookup depends on the length of the
prompt, not on the number of holders.

``kv.py`` puts sequences of cells into the tree and decides what to do with a match. Pure policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

H = TypeVar("H", bound=Hashable)
_MAX_LOOKED_AT = 8  # holders of a node that a search returns; all of them share the same tokens


class _Node(Generic[H]):
    """A run of tokens that its holders share after the tokens of its parent."""

    __slots__ = ("children", "ends", "holders", "parent", "tokens")

    def __init__(self, tokens: list[int], parent: _Node[H] | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.ends: list[H] = []  # those of its holders whose tokens end here
        self.children: dict[int, _Node[H]] = {}
        self.holders: dict[H, None] = {}  # whose tokens include all of this node's, the newest last


class _Root(_Node[H]):
    """The node above all tokens of one key."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        super().__init__([], None)
        self.key = key


class PrefixTree(Generic[H]):
    """A radix tree over token ids, which finds holders that share a prefix with a prompt.

    A holder is anything that has a sequence of tokens; here, KV cells. Holders of different keys share nothing: a key
    names what the cells depend on besides their tokens, and who may use them. The time of lookups and insertions
    depends on the number of tokens, not on the number of holders.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Root[H]] = {}
        self._ends: dict[H, _Node[H]] = {}  # the node where a holder's tokens end

    def __repr__(self) -> str:
        return f"<PrefixTree n_holders={len(self._ends)}>"

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, holder: H) -> bool:
        return holder in self._ends

    def insert(self, holder: H, tokens: Sequence[int], key: Hashable = None) -> None:
        """Add a holder with its tokens under a key. The holder must not be in the tree yet."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = _Root(key)
        root.holders[holder] = None
        self._insert_below(root, holder, tokens, 0)

    def extend(self, holder: H, tokens: Sequence[int], n: int) -> None:
        """Extend a holder to these tokens, of which the tree already has the first ``n``."""
        end = self._ends[holder]
        end.ends.remove(holder)
        self._insert_below(end, holder, tokens, n)
        if end.parent is not None and len(end.children) == 1:
            _merge(end)

    def _insert_below(self, node: _Node[H], holder: H, tokens: Sequence[int], i: int) -> None:
        n = len(tokens)
        while i < n:
            child = node.children.get(tokens[i])
            if child is None:
                child = _Node(list(tokens[i:]), node)
                node.children[tokens[i]] = child
                i = n
            else:
                k = n_common(tokens, child.tokens, i)
                if k < len(child.tokens):
                    child = _split(child, k)
                i += k
            child.holders[holder] = None
            node = child
        self._ends[holder] = node
        node.ends.append(holder)

    def remove(self, holder: H) -> None:
        """Remove a holder; do nothing if it is not in the tree."""
        node = self._ends.pop(holder, None)
        if node is not None:
            node.ends.remove(holder)
        while node is not None:
            parent = node.parent
            del node.holders[holder]
            if parent is None:
                if not node.holders:
                    assert isinstance(node, _Root)
                    del self._roots[node.key]
            elif not node.holders:
                del parent.children[node.tokens[0]]
            elif len(node.children) == 1:
                _merge(node)
            node = parent

    def find(self, tokens: Sequence[int], limit: int, key: Hashable = None) -> Iterator[tuple[int, H]]:
        """Yield a key's holders with the number of prompt tokens that each shares, at most ``limit``; longest first.

        Among holders that share equally many, yields the newest few. A holder may be yielded again with fewer tokens.
        """
        for n, node, _ in reversed(self._path(tokens, limit, key)):
            for holder in islice(reversed(node.holders), _MAX_LOOKED_AT):
                yield n, holder

    def prefixes(self, tokens: Sequence[int], limit: int, key: Hashable = None) -> Iterator[tuple[int, H]]:
        """Yield ``(length, holder)`` where all of a holder's tokens are a prefix of the prompt; longest first.

        ``limit``: the maximum length. Among holders with the same tokens, yields the newest.
        """
        for n, node, is_whole in reversed(self._path(tokens, limit, key)):
            if is_whole and node.ends:
                yield n, node.ends[-1]

    def _path(self, tokens: Sequence[int], limit: int, key: Hashable) -> list[tuple[int, _Node[H], bool]]:
        """Return ``(n, node, is_whole)`` along a prompt: ``n`` tokens match so far, with the whole node or a part."""
        path: list[tuple[int, _Node[H], bool]] = []
        node: _Node[H] | None = self._roots.get(key)
        i = 0
        while node is not None and i < limit:
            child = node.children.get(tokens[i])
            if child is None:
                break
            k = min(n_common(tokens, child.tokens, i), limit - i)
            i += k
            path.append((i, child, k == len(child.tokens)))
            if k < len(child.tokens):
                break
            node = child
        return path

    def sharing(self, holder: H, n: int) -> tuple[int, list[H]]:
        """Return how many of a holder's ``n`` tokens it shares with any other, and the newest few that share them."""
        node: _Node[H] | None = self._ends[holder]
        while node is not None and node.parent is not None and len(node.holders) == 1:
            n -= len(node.tokens)
            node = node.parent
        if node is None or node.parent is None:
            return 0, []
        holders = islice(reversed(node.holders), _MAX_LOOKED_AT + 1)
        return n, [other for other in holders if other != holder]

    def key_of(self, holder: H) -> Hashable:
        """Return the key of a holder in the tree."""
        node = self._ends[holder]
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, _Root)
        return node.key

    def tokens_of(self, holder: H) -> list[int]:
        """Return the tokens of a holder in the tree."""
        parts = []
        node: _Node[H] | None = self._ends[holder]
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    def check_integrity(self) -> None:
        """Raise AssertionError if nodes and holders disagree."""
        stack: list[_Node[H]] = list(self._roots.values())
        assert sum(len(root.holders) for root in stack) == len(self._ends)
        assert all(root.holders and root.key == key for key, root in self._roots.items())
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                assert child.parent is node and child.tokens[0] == first, child.tokens
                assert child.holders, "a node without holders"
                assert child.holders.keys() <= node.holders.keys()
                assert all(self._ends[holder] is child for holder in child.ends), child.ends
                assert len(child.children) != 1 or len(child.holders) > len(
                    next(iter(child.children.values())).holders
                ), "a node that could be one with its child"
                stack.append(child)
        for holder, node in self._ends.items():
            assert holder in node.holders and node.ends.count(holder) == 1, holder


class TreeObserver(Protocol):
    """Observes the changes in a tree."""

    def on_insert(self, holder: Any, tokens: Sequence[int]) -> None:
        """Record that a holder was added with these tokens."""

    def on_extend(self, holder: Any, tokens: Sequence[int]) -> None:
        """Record that a holder has grown to these tokens, which begin with its earlier ones."""

    def on_remove(self, holder: Any) -> None:
        """Record that a holder was removed."""


class ObservedTree(PrefixTree[H]):
    """A tree that notifies an observer of changes among the holders without a key."""

    def __init__(self, observer: TreeObserver) -> None:
        super().__init__()
        self._observer = observer
        self._told: set[H] = set()

    def insert(self, holder: H, tokens: Sequence[int], key: Hashable = None) -> None:
        super().insert(holder, tokens, key)
        if key is None:
            self._told.add(holder)
            self._observer.on_insert(holder, _before_marks(tokens))

    def extend(self, holder: H, tokens: Sequence[int], n: int) -> None:
        super().extend(holder, tokens, n)
        if holder in self._told:
            self._observer.on_extend(holder, _before_marks(tokens))

    def remove(self, holder: H) -> None:
        super().remove(holder)
        if holder in self._told:
            self._told.remove(holder)
            self._observer.on_remove(holder)


def n_common(tokens: Sequence[int], others: Sequence[int], begin: int = 0) -> int:
    """Return the length of the longest common prefix of ``tokens[begin:]`` and ``others``."""
    n = min(len(tokens) - begin, len(others))
    if tokens[begin : begin + n] == others[:n]:
        return n
    low = 0  # the first `low` are equal, the first `n` are not
    while n - low > 1:
        middle = (low + n) // 2
        if tokens[begin + low : begin + middle] == others[low:middle]:
            low = middle
        else:
            n = middle
    return low


def _before_marks(tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens before the first one that stands for an image, a sound or other adapters.

    Such tokens are negative numbers, which mean nothing to an observer.
    """
    return next((tokens[:i] for i, token in enumerate(tokens) if token < 0), tokens)


def _split(node: _Node[H], k: int) -> _Node[H]:
    """Split a node after its first ``k`` tokens. Return the new node, which has these ``k``."""
    parent = node.parent
    assert parent is not None
    upper = _Node[H](node.tokens[:k], parent)
    upper.holders = dict(node.holders)
    parent.children[upper.tokens[0]] = upper
    node.tokens = node.tokens[k:]
    node.parent = upper
    upper.children[node.tokens[0]] = node
    return upper


def _merge(node: _Node[H]) -> None:
    """Merge a node with its only child if no holder ends between them."""
    (child,) = node.children.values()
    if len(child.holders) != len(node.holders):
        return
    assert node.parent is not None
    child.tokens = node.tokens + child.tokens
    child.parent = node.parent
    node.parent.children[child.tokens[0]] = child

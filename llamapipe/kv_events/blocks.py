"""Which blocks of tokens a prefix tree holds, and the events that tell its changes. Pure policy.

A block is ``block_size`` tokens together with all tokens before them. Its hash is of the block's tokens and of the hash
of the block before it, so equal prefixes have equal hashes, in every process. A block is stored while at least one
holder in the tree begins with it and has computed it.

Changes are collected, and ``take`` returns their net effect: a block that was removed and stored again since the last
call is not mentioned. So nothing is lost if ``take`` is called late, and what waits is no more than the cache holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple, Protocol


class Holder(Protocol):
    """What is in the tree. ``n``: its first tokens that are computed; it changes between calls."""

    @property
    def n(self) -> int:
        """Computed tokens."""

    def __hash__(self) -> int: ...


class Block(NamedTuple):
    """A block that is stored. ``depth``: blocks before it; ``parent``: the hash of the last of these."""

    depth: int
    parent: int | None
    tokens: tuple[int, ...]


class Stored(NamedTuple):
    """Consecutive blocks are in the cache now. ``parent``: the hash of the block before them."""

    hashes: list[int]
    parent: int | None
    tokens: list[int]


class Removed(NamedTuple):
    """Blocks are in the cache no longer."""

    hashes: list[int]


class Cleared(NamedTuple):
    """No block is in the cache."""


Event = Stored | Removed | Cleared


class BlockTracker:
    """The blocks of one prefix tree, which calls ``inserted``, ``extended`` and ``removed``. One thread."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pack = Struct(f"<Q{block_size}i").pack
        self._held: dict[Holder, list[int]] = {}  # the hashes of each holder's computed blocks
        self._growing: dict[Holder, tuple[Sequence[int], int]] = {}  # tokens in the tree, not all computed
        self._n_holders: dict[int, int] = {}  # by hash
        self._new: dict[int, Block] = {}  # stored and not told
        self._gone: dict[int, int] = {}  # told and removed since, with the depth

    def __repr__(self) -> str:
        return f"<BlockTracker n={len(self._n_holders)} n_new={len(self._new)} n_gone={len(self._gone)}>"

    # ---- what the tree tells
    def inserted(self, holder: Holder, tokens: Sequence[int]) -> None:
        """A holder is in the tree with these tokens."""
        self._growing[holder] = tokens, len(tokens)

    def extended(self, holder: Holder, tokens: Sequence[int]) -> None:
        """A holder has these tokens now, which begin with those that it had."""
        self._growing[holder] = tokens, len(tokens)

    def removed(self, holder: Holder) -> None:
        """A holder is not in the tree."""
        self._growing.pop(holder, None)
        for depth, block in enumerate(self._held.pop(holder, ())):
            n = self._n_holders[block] = self._n_holders[block] - 1
            if not n:
                del self._n_holders[block]
                if self._new.pop(block, None) is None:
                    self._gone[block] = depth

    # ---- events
    def take(self) -> list[Event]:
        """The changes since the last call: what was removed, then what was stored, parents first."""
        self._grow()
        events: list[Event] = []
        if self._gone:
            events.append(Removed(sorted(self._gone, key=self._gone.__getitem__, reverse=True)))
            self._gone.clear()
        if self._new:
            by_depth = sorted(self._new.items(), key=lambda item: item[1].depth)
            events += chains(by_depth)
            self._new.clear()
        return events

    def _grow(self) -> None:
        """Hashes the blocks that were computed since the last call."""
        size = self.block_size
        for holder, (tokens, n_tokens) in list(self._growing.items()):
            n = min(holder.n, n_tokens) // size
            held = self._held.setdefault(holder, [])
            for depth in range(len(held), n):
                self._hold(held, depth, tokens[depth * size : (depth + 1) * size])
            if n == n_tokens // size:
                del self._growing[holder]

    def _hold(self, held: list[int], depth: int, tokens: Sequence[int]) -> None:
        parent = held[-1] if held else None
        digest = blake2b(self._pack(parent or 0, *tokens), digest_size=8).digest()
        block = int.from_bytes(digest, "little")
        held.append(block)
        n = self._n_holders.get(block, 0)
        self._n_holders[block] = n + 1
        if not n and self._gone.pop(block, None) is None:
            self._new[block] = Block(depth, parent, tuple(tokens))


def chains(blocks: Iterable[tuple[int, Block]]) -> list[Stored]:
    """As few events as store these blocks. Parents must come before their children."""
    events: list[Stored] = []
    by_end: dict[int | None, Stored] = {}
    for key, block in blocks:
        event = None if block.parent is None else by_end.pop(block.parent, None)
        if event is None:
            event = Stored([], block.parent, [])
            events.append(event)
        event.hashes.append(key)
        event.tokens.extend(block.tokens)
        by_end[key] = event
    return events

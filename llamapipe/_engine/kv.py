"""Which KV cells hold which tokens, and what to change in them.

Open this file to change what is reused, saved or evicted.

The principle: cells belong to tokens, not to requests. A sequence of cells (``Cells``) is *live* in the slot of a
request, *parked* in the slot of one that has ended, or *saved* in host memory. A prefix tree knows the tokens of all
of them, by ``cache_key``, and where the adapters of a sequence change. A request that begins with the same tokens
starts with these cells: in place, with a copy, or restored from host memory. When a parked slot is needed, its cells
are saved if nothing else holds their tokens, else dropped; the least recently used first.

This file only decides. What it decides is an ordered list, ``KvCache.memory_ops``, which the executor performs before
the next step. An operation may turn out to be impossible: a recurrent memory cannot go back, host memory may be
missing. The executor then leaves the sequence empty and says so (``CellChanges``), and its tokens are computed again.
So a wrong guess costs time and never changes a text.

From top to bottom: the operations, the budget of host memory, the prefix tree, and the cache that puts them together.
Pure policy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from llamapipe._engine.request import MEDIA_FROM, Request, State


class Remove(NamedTuple):
    """Remove the cells of a sequence from ``position`` on."""

    slot: int
    position: int


class Discard(NamedTuple):
    """The same for cells of guesses: the last step has computed all of them, in one ubatch."""

    slot: int
    position: int


class Copy(NamedTuple):
    """Copy the first ``n`` cells of a sequence to another one, which is empty."""

    source: int
    slot: int
    n: int


class Save(NamedTuple):
    """Copy the cells of a sequence to host memory, as ``key``, if they take at most ``max_bytes``."""

    slot: int
    key: int
    max_bytes: int


class Restore(NamedTuple):
    """Copy the first ``n`` saved cells to a sequence, which is empty."""

    key: int
    slot: int
    n: int


class Forget(NamedTuple):
    """Free saved cells."""

    key: int


class Shift(NamedTuple):
    """Remove the cells of a sequence at the positions from ``begin`` to before ``end``, and move those after them."""

    slot: int
    begin: int
    end: int


class Unused(NamedTuple):
    """Cells of ``tokens`` that no request uses, in a slot, or saved under a key; the other of the two is -1."""

    slot: int
    key: int
    tokens: list[int]
    cache_key: Hashable


class UseAdapters(NamedTuple):
    """Compute with another set of adapters from the next step on; None: with the model alone.

    ``carries``: the set is a carrier. No slot has adapters then, until ``AssignAdapters`` gives it some.
    """

    adapters: Hashable
    carries: bool = False


class AssignAdapters(NamedTuple):
    """Compute a slot with these adapters from the next step on, which has a carrier; None: with the model alone."""

    slot: int
    adapters: Hashable


class CellChanges(NamedTuple):
    """What became of memory operations.

    ``lost``: sequences that have no cells now, because an operation on them was not possible. ``saved``: the keys of
    sequences that were to be saved, with their bytes; None: not saved.
    """

    lost: set[int]
    saved: list[tuple[int, int | None]]


MemoryOp = Shift | Remove | Discard | Copy | Save | Restore | Forget | UseAdapters | AssignAdapters


class StoreEntry(Protocol):
    """An entry. ``n_bytes``: what it takes. ``pinned``: it is kept until it is unpinned."""

    n_bytes: int
    pinned: bool


class HostStore:
    """Saved sequences by key. ``budget``: bytes for all of them, the pinned ones included."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.n_bytes = 0
        self._entries: OrderedDict[int, StoreEntry] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        return f"<HostStore n={len(self)} n_bytes={self.n_bytes}/{self.budget}>"

    def __len__(self) -> int:
        return len(self._entries)

    def make_room(self, n_bytes: int) -> list[int] | None:
        """The keys of entries to drop, so that ``n_bytes`` more fit; None if that is impossible."""
        missing = self.n_bytes + n_bytes - self.budget
        if missing <= 0:
            return []
        keys = []
        for key, entry in self._entries.items():
            if not entry.pinned:
                keys.append(key)
                missing -= entry.n_bytes
                if missing <= 0:
                    return keys
        return None

    def __iter__(self) -> Iterator[int]:
        """The keys, the least recently used first."""
        return iter(self._entries)

    def add(self, key: int, entry: StoreEntry) -> None:
        """Adds an entry, as the one used last."""
        self._entries[key] = entry
        self.n_bytes += entry.n_bytes

    def resize(self, key: int, n_bytes: int) -> None:
        """Corrects the size of an entry."""
        entry = self._entries[key]
        self.n_bytes += n_bytes - entry.n_bytes
        entry.n_bytes = n_bytes

    def use(self, key: int) -> None:
        """Notes that an entry was used."""
        self._entries.move_to_end(key)

    def drop(self, key: int) -> None:
        """Removes an entry."""
        self.n_bytes -= self._entries.pop(key).n_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError if the bytes are miscounted."""
        assert self.n_bytes == sum(entry.n_bytes for entry in self._entries.values())
        assert self.n_bytes <= self.budget or not self._entries


H = TypeVar("H", bound=Hashable)
_MAX_LOOKED_AT = 8  # holders of one node; all of them share the same tokens


class _Node(Generic[H]):
    """Tokens that its holders share after those of its parent."""

    __slots__ = ("children", "holders", "parent", "tokens")

    def __init__(self, tokens: list[int], parent: _Node[H] | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Node[H]] = {}
        self.holders: dict[H, None] = {}  # whose tokens lead to this node's end or further, the newest last


class _Root(_Node[H]):
    """The node above all tokens of one key."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        super().__init__([], None)
        self.key = key


class PrefixTree(Generic[H]):
    """A radix tree over token ids: which holders begin with the tokens of a prompt, and how many they share.

    A holder is anything that has a sequence of tokens; here, KV cells. Holders of different keys share nothing: a key
    is whatever besides the tokens made the cells, or may see them. Lookups and insertions take time in the number of
    tokens, whatever the number of holders.
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
        """Adds a holder, which must not be in the tree, with its tokens, among those of a key."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = _Root(key)
        root.holders[holder] = None
        self._insert_below(root, holder, tokens, 0)

    def extend(self, holder: H, tokens: Sequence[int], n: int) -> None:
        """Adds the tokens after the first ``n``, with which the holder is in the tree."""
        end = self._ends[holder]
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
                k = _n_shared(tokens, i, child.tokens)
                if k < len(child.tokens):
                    child = _split(child, k)
                i += k
            child.holders[holder] = None
            node = child
        self._ends[holder] = node

    def remove(self, holder: H) -> None:
        """Removes a holder; does nothing if it is not in the tree."""
        node = self._ends.pop(holder, None)
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
        """Holders of a key that share tokens with a prompt, and how many, at most ``limit``; the most first.

        Of holders that share equally many, the newest few.
        """
        path: list[tuple[int, _Node[H]]] = []
        node: _Node[H] | None = self._roots.get(key)
        i = 0
        while node is not None and i < limit:
            child = node.children.get(tokens[i])
            if child is None:
                break
            k = min(_n_shared(tokens, i, child.tokens), limit - i)
            i += k
            path.append((i, child))
            if k < len(child.tokens):
                break
            node = child
        for n, node in reversed(path):
            for holder in islice(reversed(node.holders), _MAX_LOOKED_AT):
                yield n, holder

    def sharing(self, holder: H, n: int) -> tuple[int, list[H]]:
        """How many of a holder's ``n`` tokens another one begins with, and the newest few that do."""
        node: _Node[H] | None = self._ends[holder]
        while node is not None and node.parent is not None and len(node.holders) == 1:
            n -= len(node.tokens)
            node = node.parent
        if node is None or node.parent is None:
            return 0, []
        found = islice(reversed(node.holders), _MAX_LOOKED_AT + 1)
        return n, [other for other in found if other != holder]

    def key_of(self, holder: H) -> Hashable:
        """The key with which a holder is in the tree."""
        node = self._ends[holder]
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, _Root)
        return node.key

    def tokens_of(self, holder: H) -> list[int]:
        """The tokens with which a holder is in the tree."""
        parts = []
        node: _Node[H] | None = self._ends[holder]
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    def check_integrity(self) -> None:
        """Raises AssertionError if nodes and holders disagree."""
        stack: list[_Node[H]] = list(self._roots.values())
        assert sum(len(root.holders) for root in stack) == len(self._ends)
        assert all(root.holders and root.key == key for key, root in self._roots.items())
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                assert child.parent is node and child.tokens[0] == first, child.tokens
                assert child.holders, "a node without holders"
                assert child.holders.keys() <= node.holders.keys()
                assert len(child.children) != 1 or len(child.holders) > len(
                    next(iter(child.children.values())).holders
                ), "a node that could be one with its child"
                stack.append(child)
        for holder, node in self._ends.items():
            assert holder in node.holders, holder


class TreeObserver(Protocol):
    """Is told what changes in a tree."""

    def inserted(self, holder: Any, tokens: Sequence[int]) -> None:
        """A holder is in the tree with these tokens."""

    def extended(self, holder: Any, tokens: Sequence[int]) -> None:
        """A holder has these tokens now, which begin with those that it had."""

    def removed(self, holder: Any) -> None:
        """A holder is not in the tree."""


class ObservedTree(PrefixTree[H]):
    """A tree that tells an observer of the changes among the holders without a key."""

    def __init__(self, observer: TreeObserver) -> None:
        super().__init__()
        self._observer = observer
        self._told: set[H] = set()

    def insert(self, holder: H, tokens: Sequence[int], key: Hashable = None) -> None:
        """Adds a holder, which must not be in the tree, with its tokens, among those of a key."""
        super().insert(holder, tokens, key)
        if key is None:
            self._told.add(holder)
            self._observer.inserted(holder, _before_marks(tokens))

    def extend(self, holder: H, tokens: Sequence[int], n: int) -> None:
        """Adds the tokens after the first ``n``, with which the holder is in the tree."""
        super().extend(holder, tokens, n)
        if holder in self._told:
            self._observer.extended(holder, _before_marks(tokens))

    def remove(self, holder: H) -> None:
        """Removes a holder; does nothing if it is not in the tree."""
        super().remove(holder)
        if holder in self._told:
            self._told.remove(holder)
            self._observer.removed(holder)


def _before_marks(tokens: Sequence[int]) -> Sequence[int]:
    """The tokens before the first that stands for an image, a sound or other adapters: others know no such numbers."""
    return next((tokens[:i] for i, token in enumerate(tokens) if token < 0), tokens)


def _n_shared(tokens: Sequence[int], begin: int, edge: list[int]) -> int:
    """How many tokens of an edge the tokens from ``begin`` on share."""
    n = min(len(tokens) - begin, len(edge))
    if tokens[begin : begin + n] == edge[:n]:
        return n
    low, high = 0, n - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[begin + low : begin + middle] == edge[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(node: _Node[H], k: int) -> _Node[H]:
    """Splits a node after its first ``k`` tokens. Returns the new node, which has these."""
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
    """Makes a node one with its only child if no holder ends between them."""
    (child,) = node.children.values()
    if len(child.holders) != len(node.holders):
        return
    assert node.parent is not None
    child.tokens = node.tokens + child.tokens
    child.parent = node.parent
    node.parent.children[child.tokens[0]] = child


MIN_FOLLOW = 16  # tokens that a request must gain to wait for another one
_OVERHEAD_BYTES = 1024  # of a saved sequence
MIN_PREFIX = 16  # tokens; sharing fewer gains nothing
_MAX_PARKED_UNIFIED = 512  # cells; with unified KV every step also reads parked cells
_META_BYTES = 16  # position and sequence of a saved cell


class Cells:
    """The cells of one sequence: in a slot, or saved in host memory.

    ``request``: the one that uses them now. ``key``: of saved ones. ``pinned``: saved, and not to be dropped.
    ``n_exact``: see Request; once the request has left. ``n_known``: the tokens that the tree knows, also those that
    are not computed yet.
    """

    __slots__ = ("key", "n_bytes", "n_exact", "n_known", "pinned", "request", "slot")

    def __init__(self, slot: int, request: Request | None, n: int) -> None:
        self.slot = slot
        self.request = request
        self.key = -1
        self.n_bytes = 0
        self.n_exact = 0
        self.pinned = False
        self.n_known = n

    def __repr__(self) -> str:
        where = f"slot={self.slot}" if self.slot >= 0 else f"key={self.key}"
        return f"<Cells {where} n={self.n}{' running' if self.request is not None else ''}>"

    @property
    def n(self) -> int:
        """The cells whose tokens the tree knows."""
        return self.n_known if self.request is None else min(self.n_known, self.request.n_past)


class PrefixMatch(NamedTuple):
    """A prefix for a request: ``n`` cells of ``cells``, or ``n`` cells that ``leader`` is about to compute.

    ``n_exact``: see Request.
    """

    n: int = 0
    n_exact: int = 0
    cells: Cells | None = None
    leader: Request | None = None


_NO_MATCH = PrefixMatch()


class ContextShape(Protocol):
    """What the cache of a context depends on."""

    @property
    def n_seq_max(self) -> int:
        """Sequences."""

    @property
    def n_cells(self) -> int:
        """KV cells of all of them."""

    @property
    def n_batch(self) -> int:
        """Most tokens of a decode."""

    @property
    def n_ubatch(self) -> int:
        """Most tokens that are computed at a time."""

    @property
    def kv_unified(self) -> bool:
        """Whether the sequences share the cells."""


class KvCache:
    """The slots ``0 .. n_slots - 1``, the sequences in host memory, and what is to be changed in them.

    ``enabled``: keep cells after their request has ended. ``whole_only``: cells can be reused only all together: the
    memory has a state that cannot go back. ``host_bytes``: budget of host memory. ``cell_bytes``: of a saved cell.
    ``max_parked``: parked cells in all; None: any number. ``min_prefix``: shorter prefixes are computed;
    ``min_save``: sequences with fewer tokens that no other one has are dropped
    instead of saved.
    ``exact_multiple``: reuse only multiples of this many cells that no other tokens were computed with, so that the
    other tokens are computed in the same batches as without the cache. None: any number of cells.

    ``observer``: is told which sequences come, grow and go.

    ``free``: the slots without a request. ``parked``: the parked cells by slot, least recently used first.
    ``memory_ops``: changes to be made before the next step, in this order. Only the cache changes these three; the
    scheduler adds the removal of padding, and changes of adapters, to the last.
    """

    def __init__(
        self,
        n_slots: int,
        enabled: bool = True,
        whole_only: bool = False,
        host_bytes: int = 0,
        cell_bytes: float = 0,
        max_parked: int | None = None,
        min_prefix: int = 1,
        min_save: int = 32,
        exact_multiple: int | None = None,
        observer: TreeObserver | None = None,
    ) -> None:
        self.n_slots = n_slots
        self.enabled = enabled
        self.memory_ops: list[MemoryOp] = []
        self.n_hit_tokens = self.n_saved = self.n_restored = 0
        self._whole_only = whole_only
        self._cell_bytes = cell_bytes
        self._max_parked = max_parked
        self._min_prefix = min_prefix
        self._min_save = min_save
        self.exact_multiple = exact_multiple
        self.free = set(range(n_slots))
        self.parked: OrderedDict[int, Cells] = OrderedDict()
        self._n_parked_cells = 0
        self._saved: dict[int, Cells] = {}
        self._store = HostStore(host_bytes)
        self._tree: PrefixTree[Cells] = PrefixTree() if observer is None else ObservedTree(observer)
        self._keys = count()
        self._fixed_bytes = _OVERHEAD_BYTES  # of a saved sequence, whatever its length

    @classmethod
    def for_context(
        cls,
        context: ContextShape,
        mode: bool | str,
        host_bytes: int,
        kv_bytes: int,
        whole_only: bool,
        observer: TreeObserver | None = None,
    ) -> KvCache:
        """The cache of a context, with the sharing that it supports. ``mode``: True, ``"exact"`` or False.

        ``kv_bytes``: size of the context's cells, 0 if it is not known. For the others see KvCache. Raises ValueError
        for options that do not go together.
        """
        if mode == "exact" and context.n_batch % context.n_ubatch:
            raise ValueError(
                f"n_batch is {context.n_batch} and n_ubatch {context.n_ubatch}; prefix_cache='exact' needs an n_batch "
                "that is a multiple of n_ubatch"
            )
        if mode == "exact" and context.kv_unified:
            raise ValueError(
                "prefix_cache='exact' needs a KV cache for each request, because rounding depends on where cells are: "
                "leave n_cells and kv_unified out"
            )
        return cls(
            context.n_seq_max,
            bool(mode),
            whole_only=whole_only,
            host_bytes=host_bytes if mode else 0,
            cell_bytes=kv_bytes / context.n_cells + _META_BYTES,
            max_parked=_MAX_PARKED_UNIFIED if context.kv_unified else None,
            min_prefix=MIN_PREFIX,
            exact_multiple=context.n_ubatch if mode == "exact" else None,
            observer=observer,
        )

    def __repr__(self) -> str:
        n_taken = self.n_slots - len(self.free)
        return f"<KvCache {n_taken}/{self.n_slots} taken parked={len(self.parked)} {self._store!r}>"

    # ---- state
    @property
    def n_parked_cells(self) -> int:
        """Cells of sequences without a request."""
        return self._n_parked_cells

    @property
    def n_host_bytes(self) -> int:
        """Host memory that saved sequences take."""
        return self._store.n_bytes

    @property
    def host_budget(self) -> int:
        """The most host memory for saved sequences."""
        return self._store.budget

    def n_bytes_of(self, n: int) -> int:
        """About how many bytes ``n`` saved cells take."""
        return int(n * self._cell_bytes) + self._fixed_bytes

    def n_saved_cells(self, key: int) -> int:
        """The number of cells that are saved under a key; 0 if they were dropped."""
        return self._saved[key].n if key in self._saved else 0

    def has(self, cells: Cells) -> bool:
        """Whether saved cells are still there."""
        return cells.key in self._saved

    def take_memory_ops(self) -> list[MemoryOp]:
        """Removes and returns ``memory_ops``."""
        ops, self.memory_ops = self.memory_ops, []
        return ops

    # ---- prefixes
    def find(self, request: Request) -> PrefixMatch:
        """The longest prefix of a request's tokens that is in cells, or will be soon."""
        limit = len(request.tokens) - 1  # all but those whose rows it needs
        if request.logprob_targets is not None:
            limit = min(limit, request.logprob_targets.wanted_from)
        if not self.enabled or not request.uses_cache or limit < self._min_prefix:
            return _NO_MATCH
        best, n_best, best_rank = None, 0, 0
        leader, n_pending = None, 0
        for n, cells in self._tree.find(request.cell_keys(), limit, request.spec.cache_key):
            if n < n_best or (n == n_best and best_rank == 2):
                break
            user = cells.request
            ready = self._n_ready(cells, n, request)
            if self._whole_only and (user.n_past if user is not None else cells.n) != ready:
                ready = 0
            rank = 2 if user is None and cells.slot >= 0 else 1 if cells.slot >= 0 else 0
            if ready >= self._min_prefix and (ready, rank) > (n_best, best_rank):
                best, n_best, best_rank = cells, ready, rank
            if (
                user is not None
                and user.state is State.RUNNING  # a paused one waits for its caller
                and cells.n < n
                and n > n_pending
                and not (self._whole_only or self.exact_multiple)
            ):
                leader, n_pending = user, n
        n_exact = request.n_exact if best is request.saved_cells else n_best
        if leader is not None and n_pending - n_best >= MIN_FOLLOW:
            return PrefixMatch(n_pending, n_exact, best, leader)
        return PrefixMatch(n_best, n_exact, best)

    def _n_ready(self, cells: Cells, n: int, request: Request) -> int:
        """How many of the first ``n`` cells a request may start with."""
        n = request.prefix_end(min(n, cells.n))
        if self.exact_multiple is None or cells is request.saved_cells:
            return n
        n_exact = cells.n_exact if cells.request is None else cells.request.n_exact
        n = min(n, n_exact) // self.exact_multiple * self.exact_multiple
        return n if request.prefix_end(n) == n else 0

    def computed_alone(self, request: Request, n: int) -> None:
        """Notes that a step computed a request's last ``n`` cells and nothing else."""
        if self.exact_multiple is not None and request.n_exact == request.n_past - n:
            request.n_exact += n // self.exact_multiple * self.exact_multiple

    def learn(self, request: Request) -> None:
        """The tree learns all tokens in the cells of a request with a slot, also the generated ones."""
        cells, n = request.cells, request.n_past
        if cells is not None and cells in self._tree and cells.n_known < n:
            self._tree.extend(cells, request.cell_keys()[:n], cells.n_known)
            cells.n_known = n

    # ---- slots
    def place(self, request: Request, found: PrefixMatch) -> None:
        """Gives a request a free slot that has the found prefix."""
        source, n = found.cells, found.n
        if source is not None and source not in self._tree:  # it was dropped since
            source, n = None, 0
        slot = self._choose(source)
        self.free.remove(slot)
        request.slot = slot
        if source is not None and source.slot == slot:
            if source.n - n >= self._min_save:
                self._evict(slot, n)
            else:
                self._unpark(slot)
                self._tree.remove(source)
                self.memory_ops.append(Remove(slot, n))
        else:
            if slot in self.parked:
                self._evict(slot, keeps=source)
            if source is None:
                n = 0
            elif source.slot >= 0:
                self.memory_ops.append(Copy(source.slot, slot, n))
            else:
                self._load(source, slot, n)
        request.n_past = n
        request.n_exact = min(found.n_exact, n)
        self.n_hit_tokens += n
        # The tree learns all of its tokens, also those that are not computed yet.
        cells = request.cells = Cells(slot, request, len(request.tokens))
        if self.enabled and request.uses_cache:
            self._tree.insert(cells, request.cell_keys(), request.spec.cache_key)

    def _choose(self, source: Cells | None) -> int:
        """A free slot next to a taken one, between two if there is one: gaps between running requests cost time."""
        free = self.free
        if len(free) == 1:  # most often, while requests wait for slots
            return next(iter(free))
        taken = sorted(set(range(self.n_slots)) - free)
        near = free
        if taken:
            near = free & {neighbour for slot in taken for neighbour in (slot - 1, slot + 1)}
            near = near.intersection(range(taken[0], taken[-1])) or near
        if source is not None and source.slot in near and source.request is None:
            return source.slot
        empty = near - self.parked.keys()
        return min(empty) if empty else next(slot for slot in self.parked if slot in near)

    def move(self, request: Request, slot: int) -> None:
        """Moves a running request and its cells to a free slot. What is parked there is saved or dropped."""
        assert request.cells is not None
        self.free.remove(slot)
        if slot in self.parked:
            self._evict(slot)
        self.memory_ops += [Copy(request.slot, slot, request.n_past), Remove(request.slot, 0)]
        self.free.add(request.slot)
        request.slot = request.cells.slot = slot

    def leave(self, request: Request) -> None:
        """Takes a request's slot and parks its cells, or saves them if it keeps them, or clears them if of no use."""
        slot = request.slot
        self._park(request)
        if request.spec.keeps_cells and slot in self.parked:
            self._evict(slot, pinned_by=request)
        if self._max_parked is not None:
            self.evict(self._max_parked)

    def _park(self, request: Request) -> None:
        cells, slot, n = request.cells, request.slot, request.n_past
        assert cells is not None
        self.free.add(slot)
        request.cells, request.slot = None, -1
        if not self.enabled or not request.uses_cache or request.error is not None or n == 0:
            self._tree.remove(cells)
            self.memory_ops.append(Remove(slot, 0))
            return
        cells.request = None
        cells.n_exact = request.n_exact
        n_known, cells.n_known = cells.n_known, n
        keys = request.cell_keys()[:n]
        if n_known <= n:
            self._tree.extend(cells, keys, n_known)
        else:
            self._tree.remove(cells)
            self._tree.insert(cells, keys, request.spec.cache_key)
        self.memory_ops.append(Remove(slot, n))  # a step in flight may have added a cell
        self.parked[slot] = cells
        self._n_parked_cells += n

    def touch(self, cells: Cells | None) -> None:
        """Notes that cells are about to be used."""
        if cells is not None and cells.slot in self.parked:
            self.parked.move_to_end(cells.slot)

    def truncate(self, request: Request, n: int, of_last_step: bool = False) -> None:
        """A request's tokens from ``n`` on were changed; its cells from there on are removed.

        ``of_last_step``: that has computed all of these cells, in one ubatch.
        """
        cells, kept = request.cells, request.saved_cells
        if kept is not None and kept.n > n:
            self.unpin(request)  # they are of another sequence now
        if cells is None:
            return
        if n < request.n_past:
            self.memory_ops.append((Discard if of_last_step else Remove)(request.slot, n))
            request.n_past = n
            request.n_exact = min(request.n_exact, n)
        if cells.n_known > n and cells in self._tree:
            self._tree.remove(cells)
            cells.n_known = n
            self._tree.insert(cells, request.cell_keys()[:n], request.spec.cache_key)

    def shift(self, request: Request, begin: int, end: int) -> None:
        """A request's tokens from ``begin`` to ``end`` were dropped; the cells after them move there."""
        assert request.cells is not None
        self._tree.remove(request.cells)  # what these cells hold depends on tokens that are gone
        request.uses_cache = False
        self.memory_ops.append(Shift(request.slot, begin, end))
        request.n_past -= end - begin

    def lost(self, slot: int, request: Request | None) -> None:
        """A slot has lost its cells. Its request, if it has one, computes them again."""
        cells = None if request is None else request.cells
        if slot in self.parked:
            self._tree.remove(self._unpark(slot))
        elif request is not None and cells is not None and cells in self._tree:
            self._tree.remove(cells)
            self._tree.insert(cells, request.cell_keys()[: cells.n_known], request.spec.cache_key)

    def evict(self, n_cells: int) -> None:
        """Frees slots, the least recently used first, until at most ``n_cells`` are parked."""
        while self.parked and self._n_parked_cells > n_cells:
            self._evict(next(iter(self.parked)))

    def preempt(self, request: Request) -> None:
        """Takes a request's slot. Its cells are saved and pinned, if the budget allows that."""
        slot, n = request.slot, request.n_past
        self._park(request)
        if slot in self.parked:
            self._evict(slot, pinned_by=request if n >= self._min_save else None)

    def restore(self, request: Request, n: int, n_bytes: int) -> int | None:
        """The key for a request's first ``n`` cells, which come from elsewhere and are pinned. None: no room."""
        if not request.uses_cache:
            return None
        return self.take_in(request.cell_keys()[:n], request.spec.cache_key, n_bytes, request)

    def take_in(
        self, tokens: Sequence[int], cache_key: Hashable, n_bytes: int, pinned_by: Request | None = None
    ) -> int | None:
        """The key for the cells of tokens, which come from elsewhere. None: no room."""
        dropped = self._store.make_room(n_bytes) if self.enabled else None
        if dropped is None:
            return None
        for key in dropped:
            self._forget(key)
        cells = Cells(-1, None, len(tokens))
        self._tree.insert(cells, tokens, cache_key)
        return self._keep(cells, n_bytes, pinned_by)

    def unused(self) -> list[Unused]:
        """The cells that no request uses and no others begin with, the least recently used first.

        No more than host memory may hold; then the others are left out. So are those with images and sounds: which rows
        their tokens stand for depends on the projector, too.
        """
        if self.exact_multiple is not None:  # what was computed alone is not known elsewhere
            return []
        found: list[Unused] = []
        chosen: set[Cells] = set()
        room = self._store.budget
        saved = [self._saved[key] for key in self._store]
        for cells in (*reversed(self.parked.values()), *reversed(saved)):
            n_shared, others = self._tree.sharing(cells, cells.n)
            known = any(other in chosen and min(other.n, n_shared) >= cells.n for other in others)
            n_bytes = self.n_bytes_of(cells.n)
            if cells.n >= self._min_save and not known and n_bytes <= room:
                tokens = self._tree.tokens_of(cells)[: cells.n]
                if any(MEDIA_FROM <= token < 0 for token in tokens):
                    continue
                room -= n_bytes
                chosen.add(cells)
                found.append(Unused(cells.slot, cells.key, tokens, self._tree.key_of(cells)))
        return found[::-1]

    def reset(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Drops the cells that no request uses, and is not kept for, of the keys that are wanted."""
        for slot, cells in list(self.parked.items()):
            if is_wanted(self._tree.key_of(cells)):
                self._tree.remove(self._unpark(slot))
                self.memory_ops.append(Remove(slot, 0))
        for key, cells in list(self._saved.items()):
            if not cells.pinned and is_wanted(self._tree.key_of(cells)):
                self._forget(key)

    def unpin(self, request: Request) -> None:
        """A preempted request continues or has ended: its saved cells are like all others."""
        cells, request.saved_cells = request.saved_cells, None
        if cells is not None:
            cells.pinned = False

    def _unpark(self, slot: int) -> Cells:
        cells = self.parked.pop(slot)
        self._n_parked_cells -= cells.n
        return cells

    def _evict(
        self, slot: int, n_keep: int = 0, pinned_by: Request | None = None, keeps: Cells | None = None
    ) -> None:
        """Saves or drops parked cells. The slot keeps the first ``n_keep``. ``keeps``: not to be dropped for them."""
        cells = self._unpark(slot)
        if pinned_by is not None or self._is_worth_saving(cells):
            was_pinned = keeps is not None and keeps.pinned
            if keeps is not None:
                keeps.pinned = True
            self._save(cells, pinned_by)
            if keeps is not None:
                keeps.pinned = was_pinned
        else:
            self._tree.remove(cells)
        self.memory_ops.append(Remove(slot, n_keep))

    # ---- host memory
    def _is_worth_saving(self, cells: Cells) -> bool:
        if cells.n < self._min_save:
            return False
        n_shared, others = self._tree.sharing(cells, cells.n)
        return cells.n - max((min(other.n, n_shared) for other in others), default=0) >= self._min_save

    def _save(self, cells: Cells, pinned_by: Request | None) -> None:
        n_bytes = self.n_bytes_of(cells.n)
        dropped = self._store.make_room(n_bytes)
        if dropped is None:
            self._tree.remove(cells)
            return
        for key in dropped:
            self._forget(key)
        slot, cells.slot = cells.slot, -1
        room = self._store.budget - self._store.n_bytes
        self.memory_ops.append(Save(slot, self._keep(cells, n_bytes, pinned_by), room))
        self.n_saved += 1

    def _keep(self, cells: Cells, n_bytes: int, pinned_by: Request | None) -> int:
        key = cells.key = next(self._keys)
        cells.n_bytes = n_bytes
        if pinned_by is not None:
            cells.pinned = True
            pinned_by.saved_cells = cells
        self._saved[key] = cells
        self._store.add(key, cells)
        return key

    def _load(self, source: Cells, slot: int, n: int) -> None:
        self.memory_ops.append(Restore(source.key, slot, n))
        self.n_restored += 1
        self._store.use(source.key)
        if n == source.n and not source.pinned:
            self._forget(source.key)  # the slot has all of it now

    def _forget(self, key: int) -> None:
        self._tree.remove(self._saved.pop(key))
        self._store.drop(key)
        self.memory_ops.append(Forget(key))

    def saved(self, key: int, n_bytes: int | None) -> None:
        """The size of a sequence that was saved; None: it could not be saved."""
        if key not in self._saved:
            return
        if n_bytes is not None:
            n = self._saved[key].n
            self._fixed_bytes = max(self._fixed_bytes, n_bytes - int(n * self._cell_bytes))
            self._store.resize(key, n_bytes)
            return
        cells = self._saved.pop(key)
        self._tree.remove(cells)
        self._store.drop(key)

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, cells and tree disagree. For tests and debugging."""
        assert self.parked.keys() <= self.free, (self.parked, self.free)
        assert self._n_parked_cells == sum(cells.n for cells in self.parked.values())
        for slot, cells in self.parked.items():
            assert cells.slot == slot and cells.request is None and cells.n > 0 and cells in self._tree, cells
        for key, cells in self._saved.items():
            assert cells.key == key and cells.slot == -1 and cells in self._tree, cells
        assert len(self._saved) == len(self._store)
        self._store.check_integrity()
        self._tree.check_integrity()

"""Tracks which KV cells hold which tokens, and decides how the cells change.

Open this file to change which cells are reused, saved or evicted.

The principle: cells belong to tokens, not to requests. A sequence of cells (``Cells``) is *live* in the slot of a
request, *parked* in the slot of one that has ended, or *saved* in host memory. The prefix tree (``prefix_tree.py``)
knows the tokens of all sequences, by ``cache_key``, and where the adapters of a sequence change. A request that begins
with the same tokens starts with these cells: in place, with a copy, or restored from host memory. When a parked slot is
needed, its cells are saved if nothing else holds their tokens, and dropped otherwise. The least recently used slot is
taken first. The cells of a conversation that is known to continue soon are evicted last (``KvCache.hold``).

Some memories consist of more than cells. A recurrent or hybrid model also has a *state*, which belongs to the end of a
sequence and cannot go back. So a sequence can be continued only where its cells end, or where a state was saved. States
are saved at the places where prompts are likely to diverge (``KvCache._choose_places``), and a prompt's steps end
there. States and cells are evicted separately: if a state is lost, its cells can still be used with another state. A
model with sliding windows keeps all cells in a slot, but a copy has only the last window. So a sequence goes back in
its slot, and copies need states (the cells of the window) to go back.

This file only decides. The result is an ordered list, ``KvCache.memory_ops``, which the executor performs before the
next step. An operation may be impossible: a recurrent memory cannot go back, or host memory is missing. The executor
then leaves the sequence empty and reports it (``CellChanges``), and its tokens are computed again. So a wrong decision
costs time and never changes a text.

``HostStore`` is the budget of host memory, ``KvCache`` the cache. ``core.py`` has the operations. Pure policy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from llamapipe._engine.policy.core import (
    MEDIA_FROM,
    UNLIMITED,
    Cells,
    Copy,
    Discard,
    Forget,
    GoBack,
    MemoryOp,
    Remove,
    Request,
    Restore,
    Save,
    SaveState,
    Shift,
    State,
    Unused,
)
from llamapipe._engine.policy.prefix_tree import ObservedTree, PrefixTree, TreeObserver


def has_media(keys: Sequence[int]) -> bool:
    """Return whether some keys of cells belong to images or sounds, whose rows depend on the projector."""
    return any(MEDIA_FROM <= key < 0 for key in keys)


class HostStore:
    """Saved sequences or states by key. ``budget``: maximum bytes of all entries, including pinned ones."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.n_bytes = 0
        self._entries: OrderedDict[int, Cells | SavedState] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        return f"<HostStore n={len(self)} n_bytes={self.n_bytes}/{self.budget}>"

    def __len__(self) -> int:
        return len(self._entries)

    def make_room(self, n_bytes: int) -> list[int] | None:
        """Return the keys of the entries to drop so that ``n_bytes`` more fit; None if that is impossible."""
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
        """Iterate over the keys, the least recently used first."""
        return iter(self._entries)

    def add(self, key: int, entry: Cells | SavedState) -> None:
        """Add an entry as the most recently used one."""
        self._entries[key] = entry
        self.n_bytes += entry.n_bytes

    def resize(self, key: int, n_bytes: int) -> None:
        """Correct the size of an entry."""
        entry = self._entries[key]
        self.n_bytes += n_bytes - entry.n_bytes
        entry.n_bytes = n_bytes

    def use(self, key: int) -> None:
        self._entries.move_to_end(key)

    def give_up(self, key: int) -> None:
        """Record that an entry is no longer useful, so it is evicted first."""
        self._entries.move_to_end(key, last=False)

    def drop(self, key: int) -> None:
        self.n_bytes -= self._entries.pop(key).n_bytes

    def check_integrity(self) -> None:
        assert self.n_bytes == sum(entry.n_bytes for entry in self._entries.values())
        assert self.n_bytes <= self.budget or not self._entries


class SavedState:
    """The state of a memory that cannot go back, after the first ``n`` tokens of a sequence.

    ``n_exact``: see Request.
    """

    __slots__ = ("key", "n", "n_bytes", "n_exact", "n_offered", "pinned")

    def __init__(self, key: int, n: int, n_exact: int, n_bytes: int) -> None:
        self.key = key
        self.n = n
        self.n_exact = n_exact
        self.n_bytes = n_bytes
        self.n_offered = 0
        self.pinned = False

    def __repr__(self) -> str:
        return f"<SavedState key={self.key} n={self.n}>"


MIN_FOLLOW = 16  # minimum tokens that a request must gain to wait for another request's prefix
# Tokens from the last state to the end of a prompt: a template may render the start of an answer differently later.
_BEFORE_END = 4
_LEAST_BETWEEN = 16  # tokens between two states; computing fewer again costs no more than an extra step
# The states of a long prompt are this many tokens apart, or a multiple; a step of most prompts ends there anyway.
_INTERVAL = 512
_STATE_SHARE = 0.5  # the share of states in the budget of host memory
_PROMPT_SHARE = 0.25  # the share of one prompt's states at intervals in the budget of states
_OVERHEAD_BYTES = 1024  # of a saved sequence, besides its cells, until it is measured
MIN_PREFIX = 16  # tokens; sharing fewer gains nothing


class PrefixMatch(NamedTuple):
    """A prefix for a request: ``n`` cells of ``cells``, or ``n`` cells that ``leader`` is about to compute.

    ``n_exact``: see Request. ``state``: the state that the request needs besides the cells. ``needs_slot``: a saved
    copy lacks some of the cells, and so does a copy in another slot unless the slots share cells. ``n_known``: how many
    of the request's first tokens some other sequence has. ``marks``: the saved states of the request's prefixes.
    """

    n: int = 0
    n_exact: int = 0
    cells: Cells | None = None
    leader: Request | None = None
    state: SavedState | None = None
    needs_slot: bool = False
    n_known: int = 0
    marks: Sequence[SavedState] = ()


_NO_MATCH = PrefixMatch()


class KvCache:
    """The slots ``0 .. n_slots - 1``, the sequences in host memory, and the changes to make in them.

    ``enabled``: keep cells after their request has ended. ``has_states``: the memory has a state that cannot go back.
    ``has_cells``: the memory has cells. ``window``: the number of tokens that layers with a sliding window attend to;
    saved cells lack older tokens, and so do copies unless ``shares_cells`` (unified KV); 0: there are no such layers.
    ``host_bytes``: the budget of host memory. ``cell_bytes``: the bytes of a saved cell. ``max_parked``: the maximum
    number of parked cells in total; None: any number. ``min_prefix``: shorter prefixes are computed again.
    ``min_save``: a sequence is dropped, not saved, if fewer of its tokens are in no other sequence.
    ``exact_multiple``: reuse only cells that were computed without other requests' tokens, and only multiples of this
    number, so that the other tokens are computed in the same batches as without the cache. None: any number of cells.
    ``spills``: the executor learns which cells and states were evicted from host memory, so that it can keep them
    elsewhere. ``observer``: is notified when sequences are added, grow and are removed.

    ``free``: the slots without a request. ``parked``: the parked cells by slot, least recently used first.
    ``memory_ops``: changes to make before the next step, in order. Only the cache changes these three, except that the
    scheduler adds the removal of padding and changes of adapters to ``memory_ops``.
    """

    def __init__(
        self,
        n_slots: int,
        enabled: bool = True,
        has_states: bool = False,
        has_cells: bool = True,
        window: int = 0,
        shares_cells: bool = False,
        host_bytes: int = 0,
        cell_bytes: float = 0,
        max_parked: int | None = None,
        min_prefix: int = 1,
        min_save: int = 32,
        exact_multiple: int | None = None,
        observer: TreeObserver | None = None,
        spills: bool = False,
    ) -> None:
        self.n_slots = n_slots
        self.enabled = enabled
        self.memory_ops: list[MemoryOp] = []
        self.n_hit_tokens = self.n_saved = self.n_restored = 0
        self._has_states = has_states
        self._has_cells = has_cells
        self._window = window
        self._shares_cells = shares_cells
        self._cell_bytes = cell_bytes
        self._max_parked = max_parked
        self._min_prefix = min_prefix
        self._min_save = min_save
        self.exact_multiple = exact_multiple
        self._spills = spills and exact_multiple is None
        self.free = set(range(n_slots))
        self.parked: OrderedDict[int, Cells] = OrderedDict()
        self._n_parked_cells = 0
        self._held: dict[Hashable, Cells] = {}
        self._saved: dict[int, Cells] = {}
        state_bytes = int(_STATE_SHARE * host_bytes) if has_states or (window and not exact_multiple) else 0
        self._store = HostStore(host_bytes - state_bytes)
        self._states = HostStore(state_bytes)
        self._states_by_key: dict[int, SavedState] = {}
        self._state_tree: PrefixTree[SavedState] = PrefixTree()
        self._state_bytes = 0  # size of the last state, as an estimate of the next one's
        is_complete = not has_states and (not window or shares_cells)
        # Whether other requests may begin with the cells of a running request.
        self.shares_running = exact_multiple is None and (is_complete or state_bytes > 0)
        self._tree: PrefixTree[Cells] = PrefixTree() if observer is None else ObservedTree(observer)
        self._keys = count()
        self._fixed_bytes = _OVERHEAD_BYTES  # of a saved sequence, whatever its length

    def __repr__(self) -> str:
        n_taken = self.n_slots - len(self.free)
        return f"<KvCache {n_taken}/{self.n_slots} taken parked={len(self.parked)} {self._store!r}>"

    # ---- state
    @property
    def n_parked_cells(self) -> int:
        """The number of cells of sequences without a request."""
        return self._n_parked_cells

    @property
    def n_host_bytes(self) -> int:
        """Host memory that saved sequences and states take."""
        return self._store.n_bytes + self._states.n_bytes

    @property
    def host_budget(self) -> int:
        """The maximum host memory for saved sequences and states."""
        return self._store.budget + self._states.budget

    def n_bytes_of(self, n: int) -> int:
        """Return the approximate size in bytes of ``n`` saved cells."""
        return int(n * self._cell_bytes) + self._fixed_bytes

    def n_saved_cells(self, key: int) -> int:
        """Return the number of cells that are saved under a key; 0 if they were dropped."""
        return self._saved[key].n if key in self._saved else 0

    def has(self, cells: Cells) -> bool:
        """Return whether saved cells are still there."""
        return cells.key in self._saved

    def take_memory_ops(self) -> list[MemoryOp]:
        ops, self.memory_ops = self.memory_ops, []
        return ops

    # ---- prefixes
    def find(self, request: Request) -> PrefixMatch:
        """Return the longest prefix of a request's tokens that is in cells, or will be soon."""
        limit = len(request.tokens) - 1  # the request needs the rows of its other tokens
        if request.logprob_targets is not None:
            limit = min(limit, request.logprob_targets.wanted_from)
        if not self.enabled or not request.uses_cache or limit < self._min_prefix:
            return _NO_MATCH
        keys, cache_key = request.cell_keys(), request.spec.cache_key
        marks = self._marks(request, keys, limit) if self._states_by_key else ()
        best, n_best, best_rank = None, 0, 0
        state: SavedState | None = None
        leader, n_pending, n_known, needs_slot = None, 0, 0, False
        for n, cells in self._tree.find(keys, limit, cache_key):
            if not n_known:  # the tree yields the longest match first
                n_known = n
            if n < n_best or (n == n_best and best_rank == 2):
                break
            user = cells.request
            ready, mark, is_bound = self._ready(cells, n, request, marks)
            rank = 2 if user is None and cells.slot >= 0 else 1 if cells.slot >= 0 else 0
            if ready >= self._min_prefix and (ready, rank) > (n_best, best_rank):
                best, n_best, best_rank, state, needs_slot = cells, ready, rank, mark, is_bound
            if (
                user is not None
                and user.state is State.RUNNING  # a paused one waits for its caller
                and cells.n < n
                and n > n_pending
                and self.shares_running
            ):
                leader, n_pending = user, n
        if not self._has_cells and marks and marks[0].n > max(n_best, self._min_prefix - 1):
            best, n_best, state, needs_slot = None, marks[0].n, marks[0], False
        n_exact = request.n_exact if best is request.saved_cells else n_best
        if leader is not None and n_pending - n_best >= MIN_FOLLOW:
            return PrefixMatch(n_pending, n_exact, best, leader)
        return PrefixMatch(n_best, n_exact, best, None, state, needs_slot, n_known, marks)

    def _marks(self, request: Request, keys: Sequence[int], limit: int) -> list[SavedState]:
        """Return the saved states of a request's prefixes, the longest prefix first."""
        prefixes = self._state_tree.prefixes(keys, limit, request.spec.cache_key)
        return [
            mark
            for n, mark in prefixes
            if self._n_exact_of(request.prefix_end(n), request, mark.n_exact) == n
        ]

    def _ready(
        self, cells: Cells, n: int, request: Request, marks: Sequence[SavedState]
    ) -> tuple[int, SavedState | None, bool]:
        """Return how many of the ``n`` tokens shared with these cells a request may start with.

        Also return the state that the request needs, and whether it needs the slot of the cells.
        """
        n, needs_slot = min(n, cells.n), False
        if not self._has_states and not self._window:
            return self._n_ready(cells, n, request), None, False
        mark = next((mark for mark in marks if mark.n <= n), None)
        end = cells.n if cells.request is None else cells.request.n_past
        if self._has_states:
            n = n if n == end and not cells.is_stale else 0
        elif (n != end or self.exact_multiple) and (end > self._window or cells.floor):
            needs_slot = True
            is_there = cells.slot >= 0 and (self._shares_cells or cells.request is None)
            # A copied window lies in other cells, so its rows are rounded differently.
            floor = UNLIMITED if self.exact_multiple and cells.floor else cells.floor
            n = n if is_there and n >= floor else 0
        n = self._n_ready(cells, n, request)
        if self._has_states and n != end:
            n = 0
        if mark is not None and mark.n > n:
            return mark.n, mark, False
        return n, None, needs_slot

    def _n_ready(self, cells: Cells, n: int, request: Request) -> int:
        """Return how many of the first ``n`` cells a request may start with, ignoring states."""
        n = request.prefix_end(n)
        if cells is request.saved_cells:
            return n
        return self._n_exact_of(n, request, cells.n_exact if cells.request is None else cells.request.n_exact)

    def _n_exact_of(self, n: int, request: Request, n_exact: int) -> int:
        """Return how many of ``n`` cells a request may start with; the first ``n_exact`` were computed alone."""
        if self.exact_multiple is None:
            return n
        n = min(n, n_exact) // self.exact_multiple * self.exact_multiple
        return n if request.prefix_end(n) == n else 0

    # ---- states
    def _choose_places(self, request: Request, n: int, match: PrefixMatch) -> list[int]:
        """Choose the places after ``n`` tokens, in order, where steps of a request end so that its state is saved.

        A state costs memory, and makes a step smaller than it could be. So states are saved where other prompts are
        likely to diverge from this one: where prompts have diverged before, where the caller says so (at the starts of
        messages), shortly before the end (for an equal prompt, or an answer that a template renders differently), and
        at intervals in a long prompt, where most steps end anyway. Windows can go back without states; with windows, a
        state serves copies and snapshots of a running sequence.
        """
        end = len(request.tokens)
        if end - n < _LEAST_BETWEEN or not self.enabled or (self._shares_cells and not self._has_states):
            return []
        wanted = {match.n_known}
        last_one = end - _BEFORE_END
        if self.exact_multiple is not None:
            wanted = {match.n_known - match.n_known % self.exact_multiple}
            last_one -= last_one % self.exact_multiple
        most = max(int(_PROMPT_SHARE * self._states.budget) // max(self._state_bytes, 1), 1)
        interval = -(-end // (most * _INTERVAL)) * _INTERVAL
        wanted |= {*range(interval, end, interval)}
        goes_back = self._has_states or (request.spec.resumable and end > self._window > 0)
        if goes_back and not request.n_total:
            wanted |= {*request.spec.places}
            if request.max_tokens:
                wanted.add(last_one)
            if request.logprob_targets is not None:
                wanted.add(request.logprob_targets.n_shared)
        chosen: list[int] = []
        saved = {mark.n for mark in match.marks}
        for place in sorted(map(request.prefix_end, wanted)):
            if self.exact_multiple is not None and place % self.exact_multiple:
                continue
            n_between = place - n
            is_far = n_between >= _LEAST_BETWEEN or (place == last_one and n_between > _BEFORE_END)
            if place < end and is_far and place not in saved:
                chosen.append(place)
                n = place
        return chosen

    def place_for_follower(self, leader: Request, n: int) -> int:
        """Return where a request that shares ``n`` tokens with ``leader`` may start. The leader saves a state there.

        If a planned place is near, this returns that place.
        """
        if not self._states.budget or (self._shares_cells and not self._has_states):
            return n
        n = leader.prefix_end(n)
        planned = [place for place in leader.places if n - 2 * _BEFORE_END <= place <= n]
        if planned:
            return planned[-1]
        if n > leader.n_past:
            leader.places = sorted({*leader.places, n})
        return n

    def save_reached_state(self, request: Request) -> None:
        """Save the state of a request whose cells have reached one of its places."""
        while request.places and request.places[0] <= request.n_past:
            place = request.places.pop(0)
            if place == request.n_past and request.slot >= 0 and request.uses_cache:
                keys = request.cell_keys()[:place]
                self._save_state(request.slot, keys, request.spec.cache_key, request.n_exact)

    def _save_state(self, slot: int, keys: Sequence[int], cache_key: Hashable, n_exact: int) -> None:
        key = self._add_state(keys, cache_key, n_exact, self._state_bytes)
        if key is not None:
            room = self._states.budget - self._states.n_bytes + self._state_bytes
            self.memory_ops.append(SaveState(slot, len(keys), key, room))

    def _add_state(self, keys: Sequence[int], cache_key: Hashable, n_exact: int, n_bytes: int) -> int | None:
        """Return the key for a state of these tokens; None if it is already saved, or there is no room."""
        n = len(keys)
        n_have, have = next(self._state_tree.prefixes(keys, n, cache_key), (0, None))
        if have is not None and n_have == n:
            if have.n_exact >= n_exact or self.exact_multiple is None:
                self._states.use(have.key)
                return None
            self._forget_state(have.key)
        dropped = self._states.make_room(n_bytes)
        if dropped is None:
            return None
        for key in dropped:
            self._forget_state(key, spills=not self._has_cells)
        key = next(self._keys)
        state = self._states_by_key[key] = SavedState(key, n, n_exact, n_bytes)
        self._state_tree.insert(state, keys, cache_key)
        self._states.add(key, state)
        self._state_bytes = n_bytes
        return key

    def _forget_state(self, key: int, spills: bool = False) -> None:
        state, evicted = self._states_by_key.pop(key), None
        if spills and self._spills:
            tokens = self._state_tree.tokens_of(state)
            evicted = Unused(-1, -1, tokens, self._state_tree.key_of(state), [(state.n, key)])
        self._state_tree.remove(state)
        self._states.drop(key)
        self.memory_ops.append(Forget(key, evicted))

    def note_computed_alone(self, request: Request, n: int) -> None:
        """Record that a step computed a request's last ``n`` cells and nothing else."""
        if self.exact_multiple is not None and request.n_exact == request.n_past - n:
            request.n_exact += n // self.exact_multiple * self.exact_multiple

    def learn(self, request: Request) -> None:
        """Add to the tree all tokens in the cells of a request with a slot, including the generated ones."""
        cells, n = request.cells, request.n_past
        if cells is not None and cells in self._tree and cells.n_known < n:
            self._tree.extend(cells, request.cell_keys()[:n], cells.n_known)
            cells.n_known = n

    # ---- slots
    def place(self, request: Request, match: PrefixMatch) -> None:
        """Give a request a free slot and fill it with the prefix that ``find`` returned."""
        source, n, state = match.cells, match.n, match.state
        # The cells or the state may have been dropped since ``find``.
        if (
            (source is not None and source not in self._tree)
            or (state is not None and state.key not in self._states_by_key)
            or (match.needs_slot and source is not None and source.slot < 0)
        ):
            source, n, state = None, 0, None
        stays = match.needs_slot and not self._shares_cells
        slot = source.slot if stays and source is not None else self._choose(source)
        self.free.remove(slot)
        request.slot = slot
        if state is not None:
            self._states.use(state.key)
            state.pinned = True  # until the operation that loads it is in the list
        key = -1 if state is None else state.key
        floor = 0
        if source is not None and source.slot == slot:
            floor = source.floor if state is None else n
            n_after = source.n - n
            if n_after >= self._min_save:
                self._evict(slot, n, state=key)
            else:
                self._unpark(slot)
                self._tree.remove(source)
                self.memory_ops.append(Remove(slot, n, key))
            if n_after and n > self._window > 0 and not self._shares_cells:
                # Prompts that diverge here from the slot's earlier tokens can no longer go back in it.
                self._save_state(slot, request.cell_keys()[:n], request.spec.cache_key, match.n_exact)
        else:
            if slot in self.parked:
                self._evict(slot, keeps=source)
            if source is None:
                n = 0 if state is None else n
                if state is not None:
                    self.memory_ops.append(Remove(slot, n, key))
                floor = n
            elif source.slot >= 0:
                self.memory_ops.append(Copy(source.slot, slot, n, key))
                floor = source.floor if self._shares_cells and state is None else n
            else:
                self._load(source, slot, n, key)
                floor = n
        if state is not None:
            state.pinned = False
        request.n_past = n
        request.n_exact = min(match.n_exact, n)
        if self._states.budget and request.uses_cache:
            request.places = self._choose_places(request, n, match)
        self.n_hit_tokens += n
        # The tree learns all tokens of the request, including those not computed yet.
        cells = request.cells = Cells(slot, request, len(request.tokens))
        cells.floor = self._floor(floor)
        if self.enabled and request.uses_cache:
            self._tree.insert(cells, request.cell_keys(), request.spec.cache_key)

    def _floor(self, n: int) -> int:
        """Return how far a sequence can go back if its window has only the cells before ``n``."""
        return n if n > self._window > 0 else 0

    def _choose(self, source: Cells | None) -> int:
        """Choose a free slot next to a used slot, if possible between two: gaps between running requests cost time."""
        free = self.free
        if self._held:
            free = {slot for slot in free if slot not in self.parked or not self.parked[slot].is_held} or free
        if len(free) == 1:  # the usual case while requests wait for slots
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

    @staticmethod
    def is_rotated(request: Request) -> bool:
        """Return whether a step has rotated the keys of a running request since its last shift.

        Until then a copy of its cells, here or in host memory, would have new positions and old keys.
        """
        return request.cells is not None and request.n_past > request.cells.n_shifted

    def move(self, request: Request, slot: int) -> None:
        """Move a running request that ``is_rotated``, and its cells, to a free slot.

        Cells parked there are saved or dropped.
        """
        assert request.cells is not None and self.is_rotated(request), request
        self.free.remove(slot)
        if slot in self.parked:
            self._evict(slot)
        self.memory_ops += [Copy(request.slot, slot, request.n_past), Remove(request.slot, 0)]
        self.free.add(request.slot)
        request.slot = request.cells.slot = slot
        if not self._shares_cells:
            request.cells.floor = self._floor(request.n_past)

    def leave(self, request: Request) -> None:
        """Release the request's slot. Its cells stay parked, are saved if pinned, or are cleared if useless."""
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
        cells.places = [*request.spec.places, request.n_prompt - _BEFORE_END] if self._window else ()
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
        """Record that these cells are about to be used; does nothing for None."""
        if cells is not None and cells.slot in self.parked:
            self.parked.move_to_end(cells.slot)

    def truncate(self, request: Request, n: int, of_last_step: bool = False) -> None:
        """Remove a request's cells from ``n`` onward, because its tokens from ``n`` onward were changed.

        ``of_last_step``: the last step computed all of these cells in one ubatch.
        """
        cells, kept = request.cells, request.saved_cells
        if kept is not None and kept.n > n:
            self.unpin(request)  # the request's tokens now differ from those of the saved cells
        if cells is None:
            return
        if n < request.n_past:
            self._go_back(request, cells, n, of_last_step)
        if cells.n_known > min(n, request.n_past) and cells in self._tree:
            self._tree.remove(cells)
            cells.n_known = min(cells.n_known, n)
            self._tree.insert(cells, request.cell_keys()[: cells.n_known], request.spec.cache_key)

    def _go_back(self, request: Request, cells: Cells, n: int, of_last_step: bool) -> None:
        """Remove a request's cells from ``n`` onward, or from the last earlier place where it can be continued."""
        if of_last_step and request.n_certain >= 0:
            n = request.n_certain
            self.memory_ops.append(GoBack(request.slot, n))
        elif of_last_step:
            self.memory_ops.append(Discard(request.slot, n))
        else:
            state = None
            if self._has_states or n < cells.floor:
                marks = self._marks(request, request.cell_keys()[:n], n) if request.uses_cache else []
                state = marks[0] if marks else None
                n = 0 if state is None else state.n
                cells.floor = self._floor(n)
            if state is not None:
                self._states.use(state.key)
            self.memory_ops.append(Remove(request.slot, n, -1 if state is None else state.key))
        request.n_past = n
        request.n_exact = min(request.n_exact, n)
        request.places = [place for place in request.places if place > n]

    def shift(self, request: Request, begin: int, end: int) -> None:
        """Close the gap that tokens ``begin`` to ``end``, which were dropped, have left: move the cells after it there.

        From then on only ``move`` copies the request's cells. No other request finds them, and ``leave`` and
        ``preempt`` drop them.
        """
        assert request.cells is not None
        self._tree.remove(request.cells)  # these cells depend on tokens that are gone
        request.uses_cache = False
        self.memory_ops.append(Shift(request.slot, begin, end))
        request.n_past -= end - begin
        if request.cells.floor > begin:
            request.cells.floor = max(request.cells.floor - (end - begin), begin + self._window)
        request.places.clear()
        request.cells.n_shifted = request.n_past

    def note_lost(self, slot: int, request: Request | None) -> None:
        """Record that a slot has lost its cells. Its request, if it has one, computes them again."""
        cells = None if request is None else request.cells
        if slot in self.parked:
            self._tree.remove(self._unpark(slot))
        elif request is not None and cells is not None and cells in self._tree:
            cells.floor = 0
            self._tree.remove(cells)
            self._tree.insert(cells, request.cell_keys()[: cells.n_known], request.spec.cache_key)

    def mark_stale(self, slot: int) -> None:
        """Record that the state of a parked sequence is not the state at its end.

        With other states, its cells can still be continued.
        """
        if slot in self.parked:
            self.parked[slot].is_stale = True

    def evict(self, n_cells: int) -> None:
        """Free slots, the least recently used first, until at most ``n_cells`` are parked."""
        while self.parked and self._n_parked_cells > n_cells:
            slots = iter(self.parked)
            if self._held:
                slots = iter(sorted(self.parked, key=lambda slot: self.parked[slot].is_held))
            self._evict(next(slots))

    def preempt(self, request: Request) -> None:
        """Take a request's slot. Its cells are saved and pinned if there are enough and the budget allows it."""
        slot, n = request.slot, request.n_past
        self._park(request)
        if slot in self.parked:
            self._evict(slot, pinned_by=request if n >= self._min_save else None)

    def take_in(
        self,
        tokens: Sequence[int],
        cache_key: Hashable,
        n_bytes: int,
        pinned_by: Request | None,
        is_stale: bool,
    ) -> int | None:
        """Add saved cells from elsewhere, such as the disk. Return their key; None if there is no room.

        ``n_bytes``: their size. ``is_stale``: see Cells.
        """
        dropped = self._store.make_room(n_bytes) if self.enabled else None
        if dropped is None:
            return None
        for key in dropped:
            self._forget(key, spills=True)
        cells = Cells(-1, None, len(tokens))
        cells.is_stale = is_stale
        self._tree.insert(cells, tokens, cache_key)
        return self._keep(cells, n_bytes, pinned_by)

    def take_in_state(self, tokens: Sequence[int], cache_key: Hashable, n_bytes: int) -> int | None:
        """Add a state from elsewhere. Return its key; None if it is already saved, or there is no room."""
        if not self.enabled:
            return None
        return self._add_state(tokens, cache_key, 0, n_bytes)

    def states_of(self, tokens: Sequence[int], cache_key: Hashable) -> list[tuple[int, int]]:
        """Return pairs (number of tokens, key) of the saved states of prefixes of ``tokens``, the shortest first."""
        prefixes = self._state_tree.prefixes(tokens, len(tokens), cache_key)
        return [(n, state.key) for n, state in prefixes][::-1]

    def save_parked_windows(self) -> None:
        """Move parked sequences to host memory if a copy of them would lack cells of windows.

        In their slots these sequences can go back to their places. Elsewhere they need the states that this saves.
        """
        if self._window and not self.exact_multiple:
            for slot, cells in list(self.parked.items()):
                if cells.places and self.n_bytes_of(cells.n) <= self._store.budget:
                    self._evict(slot)

    def holder(self, tokens: Sequence[int], cache_key: Hashable) -> Unused | None:
        """Return the unused cells, or the state, with the most of these tokens; None if none has more than half."""
        if (cells := self._unused_cells(tokens, cache_key)) is not None:
            return self._describe(cells)
        if not self._has_cells:
            for n, state in self._state_tree.prefixes(tokens, len(tokens), cache_key):
                if 2 * n <= len(tokens):
                    break
                return Unused(-1, -1, [*tokens[:n]], cache_key, [(n, state.key)])
        return None

    def _unused_cells(self, tokens: Sequence[int], cache_key: Hashable) -> Cells | None:
        for n, cells in self._tree.find(tokens, len(tokens), cache_key):
            if cells.request is None and 2 * n > len(tokens):
                return cells
        return None

    # ---- hints about later requests
    def hold(self, name: Hashable, tokens: Sequence[int], cache_key: Hashable) -> None:
        """Evict the unused cells of these tokens after all others, until ``release``.

        This is a hint: the cells are still evicted when no others are left. In host memory they count as just used.
        """
        self.release(name, is_done=False)
        cells = self._unused_cells(tokens, cache_key)
        if cells is not None:
            self._held[name] = cells
            cells.is_held = True
            if cells.slot < 0:
                self._store.use(cells.key)

    def release(self, name: Hashable, is_done: bool) -> None:
        """End ``hold``. ``is_done``: nobody will continue the conversation, so its cells are evicted first."""
        cells = self._held.pop(name, None)
        if cells is None:
            return
        cells.is_held = any(cells is other for other in self._held.values())
        is_done = is_done and not cells.is_held
        if is_done and self.parked.get(cells.slot) is cells:
            self.parked.move_to_end(cells.slot, last=False)
        elif is_done and self._saved.get(cells.key) is cells:
            self._store.give_up(cells.key)

    def offer_unused(self, again: bool) -> Iterator[Unused]:
        """Yield unused cells that no other sequence begins with, and their states, the most recently used first.

        Each sequence is offered once, and once more when it has grown; ``again``: offer all of them. Sequences with
        images or sounds are never offered. The cache must not change during the iteration.
        """
        if self.exact_multiple is not None:  # the receiver would not know which cells were computed alone
            return
        offered: set[Cells] = set()
        for cells in (
            *reversed(self.parked.values()),
            *(self._saved[key] for key in reversed(list(self._store))),
        ):
            if cells.n_offered == cells.n and not again:
                offered.add(cells)
                continue
            cells.n_offered = cells.n
            if cells.n < self._min_save or self.n_bytes_of(cells.n) > self._store.budget:
                continue
            n_shared, others = self._tree.sharing(cells, cells.n)
            if not any(other in offered and min(other.n, n_shared) >= cells.n for other in others):
                offered.add(cells)
                unused = self._describe(cells)
                if not has_media(unused.tokens):
                    yield unused
        # Without cells, a state is all that its tokens need.
        for key in () if self._has_cells else reversed(list(self._states)):
            state = self._states_by_key[key]
            tokens = self._state_tree.tokens_of(state)
            if (again or not state.n_offered) and not has_media(tokens):
                yield Unused(-1, -1, tokens, self._state_tree.key_of(state), [(state.n, key)])
            state.n_offered = state.n

    def drop(self, unused: Unused) -> None:
        """Drop cells that no request uses, and the states of prefixes that no other sequence has."""
        if unused.slot >= 0:
            self._tree.remove(self._unpark(unused.slot))
            self.memory_ops.append(Remove(unused.slot, 0))
        elif unused.key >= 0:
            self._forget(unused.key)
        for n, key in unused.states:
            if key in self._states_by_key and not self._tree_has(unused, n):
                self._forget_state(key)

    def _tree_has(self, unused: Unused, n: int) -> bool:
        return next(self._tree.find(unused.tokens, n, unused.cache_key), (0, None))[0] >= n

    def reset(self, is_wanted: Callable[[Hashable], bool]) -> None:
        """Drop the cells of the selected keys that no request uses and that are not pinned."""
        for slot, cells in list(self.parked.items()):
            if is_wanted(self._tree.key_of(cells)):
                self._tree.remove(self._unpark(slot))
                self.memory_ops.append(Remove(slot, 0))
        for key, cells in list(self._saved.items()):
            if not cells.pinned and is_wanted(self._tree.key_of(cells)):
                self._forget(key)
        for key, state in list(self._states_by_key.items()):
            if is_wanted(self._state_tree.key_of(state)):
                self._forget_state(key)

    def unpin(self, request: Request) -> None:
        """Unpin the saved cells of a preempted request that continues or has ended."""
        cells, request.saved_cells = request.saved_cells, None
        if cells is not None:
            cells.pinned = False

    def _unpark(self, slot: int) -> Cells:
        cells = self.parked.pop(slot)
        self._n_parked_cells -= cells.n
        return cells

    def _evict(
        self,
        slot: int,
        n_keep: int = 0,
        pinned_by: Request | None = None,
        keeps: Cells | None = None,
        state: int = -1,
    ) -> None:
        """Save or drop the parked cells of a slot. It keeps the first ``n_keep``, with the state of key ``state``.

        ``pinned_by``: the request that the saved cells are pinned for. ``keeps``: saved cells not to drop for room.
        """
        cells = self._unpark(slot)
        if pinned_by is not None or self._is_worth_saving(cells):
            was_pinned = keeps is not None and keeps.pinned
            if keeps is not None:
                keeps.pinned = True
            self._save(cells, pinned_by)
            if keeps is not None:
                keeps.pinned = was_pinned
            if cells.places and cells.key in self._saved:
                self._save_windows(slot, cells, n_keep)
        else:
            self._tree.remove(cells)
        self.memory_ops.append(Remove(slot, n_keep, state))

    def _save_windows(self, slot: int, cells: Cells, n_keep: int) -> None:
        """Save states at places of a sequence whose slot is needed, so that its saved copy can go back there.

        The slot itself can still go back to each place, so saving the states needs no extra step.
        """
        keys, cache_key = self._tree.tokens_of(cells), self._tree.key_of(cells)
        for place in sorted(cells.places, reverse=True):
            if max(n_keep, cells.floor, self._window) < place < cells.n and not any(
                token < 0 for token in keys[place - 1 : place + 1]
            ):
                self.memory_ops.append(Remove(slot, place))
                self._save_state(slot, keys[:place], cache_key, 0)

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
            self._forget(key, spills=True)
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

    def _load(self, source: Cells, slot: int, n: int, state: int) -> None:
        self.memory_ops.append(Restore(source.key, slot, n, state))
        self.n_restored += 1
        self._store.use(source.key)
        if n == source.n and not source.pinned:
            self._forget(source.key)  # the slot now has all of its cells

    def _forget(self, key: int, spills: bool = False) -> None:
        cells, evicted = self._saved.pop(key), None
        if spills and self._spills and self._is_worth_saving(cells):
            evicted = self._describe(cells)
        self._tree.remove(cells)
        self._store.drop(key)
        self.memory_ops.append(Forget(key, evicted))

    def _describe(self, cells: Cells) -> Unused:
        tokens, cache_key = self._tree.tokens_of(cells)[: cells.n], self._tree.key_of(cells)
        states = self.states_of(tokens, cache_key)
        return Unused(cells.slot, cells.key, tokens, cache_key, states, cells.is_stale)

    def note_saved(self, key: int, n_bytes: int | None) -> None:
        """Record the size in bytes of a saved sequence or state; None: it could not be saved."""
        state = self._states_by_key.get(key)
        if state is not None:
            if n_bytes is None:
                del self._states_by_key[key]
                self._state_tree.remove(state)
                self._states.drop(key)
            else:
                self._state_bytes = n_bytes
                self._states.resize(key, n_bytes)
                # Several states may have been saved before their size was known.
                for too_many in self._states.make_room(0) or ():
                    self._forget_state(too_many)
            return
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
        """Raise AssertionError if slots, cells and tree disagree. For tests and debugging."""
        assert self.parked.keys() <= self.free, (self.parked, self.free)
        assert self._n_parked_cells == sum(cells.n for cells in self.parked.values())
        for slot, cells in self.parked.items():
            assert cells.slot == slot and cells.request is None and cells.n > 0 and cells in self._tree, cells
        for key, cells in self._saved.items():
            assert cells.key == key and cells.slot == -1 and cells in self._tree, cells
        assert len(self._saved) == len(self._store)
        assert self._states_by_key.keys() == set(self._states)
        assert all(state.key == key for key, state in self._states_by_key.items())
        assert all(state in self._state_tree for state in self._states_by_key.values())
        self._states.check_integrity()
        self._state_tree.check_integrity()
        self._store.check_integrity()
        self._tree.check_integrity()

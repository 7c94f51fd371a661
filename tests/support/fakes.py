"""An executor in pure Python that checks what it is given, with a model whose tokens anyone can predict."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from llamapipe._engine.policy.core import (
    AssignAdapters,
    CellChanges,
    Copy,
    Discard,
    Forget,
    GoBack,
    Keep,
    MediaRows,
    MemoryOp,
    Remove,
    Restore,
    Save,
    SaveState,
    Shift,
    UseAdapters,
)
from llamapipe._engine.policy.scoring import TokenScore
from llamapipe.errors import ContextFullError, EngineClosedError, NoToken
from support.control import Launch

N_VOCAB = 101


class Switch(NamedTuple):
    """The adapters of a text change at a position, as those of an activated LoRA do."""

    before: int | None
    begin: int
    after: int | None


Adapters = int | Switch | None


def next_token(tokens: Sequence[int], n_vocab: int = N_VOCAB, adapters: Adapters = None) -> int:
    """What the fake model continues `tokens` with: a hash of all of them, so a wrong or missing one shows."""
    if isinstance(adapters, Switch):
        before, begin, after = adapters
        tokens = [cell(token, before if i < begin else after) for i, token in enumerate(tokens)]
    elif adapters:
        tokens = [cell(token, adapters) for token in tokens]
    return crc32(struct.pack(f"<{len(tokens)}i", *tokens)) % n_vocab


def cell(token: int, adapters: int | None) -> int:
    """What the cell of a token holds, computed with these adapters, which are a number here."""
    return token + 1000 * (adapters or 0)


def continuation(
    tokens: Sequence[int],
    max_tokens: int,
    stop: Container[int] = (),
    n_ctx: int = 2**31,
    n_vocab: int = N_VOCAB,
    adapters: Adapters = None,
    n_keep: int | None = None,
) -> tuple[list[int], str]:
    """What a request generates when it is alone, and why it ends: ``stop`` or ``length``.

    ``n_keep``: a full sequence keeps so many tokens and the newer half of the others; None: it ends.
    """
    whole, generated = list(tokens), list[int]()
    while len(generated) < max_tokens and len(whole) < n_ctx:
        token = next_token(whole, n_vocab, adapters)
        if token in stop:
            return generated, "stop"
        whole.append(token)
        generated.append(token)
        if len(whole) == n_ctx and n_keep is not None:
            n_dropped = (n_ctx - n_keep) // 2
            del whole[n_keep : n_keep + n_dropped]
            if isinstance(adapters, Switch) and adapters.begin > n_keep:
                adapters = adapters._replace(begin=max(adapters.begin - n_dropped, n_keep))
    return generated, "length"


def score_of(said: int, target: int, n_top: int, n_vocab: int = N_VOCAB) -> TokenScore:
    """What the fake model's row that says a token says of another one."""
    top = [((said + i) % n_vocab, -float(i)) for i in range(n_top)]
    return TokenScore(-float((target - said) % n_vocab), target == said, top)


class FakeSampler:
    """A sampler that records the tokens it draws. Using it after ``close`` is an AssertionError."""

    finished = is_busy = is_forced = False
    n_draws = 0
    error: Exception | None = None

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.n_resets = 0
        self.closed = False

    def draw(self, token: int) -> int:
        """The token of a row; -1 goes through without being accepted."""
        assert not self.closed, "a closed sampler was used"
        if token >= 0:
            self.accepted.append(token)
        return token

    def guess(self, n: int) -> tuple[Sequence[int], float]:
        return (), 0.0

    def expect(self, tokens: Sequence[int]) -> int:
        assert not self.closed and tokens
        return len(tokens)

    def accept(self, tokens: Iterable[int]) -> None:
        assert not self.closed, "a closed sampler was used"
        self.accepted += tokens

    def reset(self) -> None:
        assert not self.closed, "a closed sampler was used"
        self.accepted.clear()
        self.n_resets += 1

    def logprobs(self, i: int = 0) -> tuple[float, Sequence[tuple[int, float]]]:
        raise AssertionError("no test asks a fake sampler for log-probabilities")

    def close(self) -> None:
        assert not self.closed, "a sampler was closed twice"
        self.closed = True


class FakeSaved:
    """The cells of a sequence in host memory, or only its state. ``begin``: the first cell that windows have."""

    def __init__(self, cells: list[int], begin: int = 0, only_state: bool = False) -> None:
        self.cells = cells
        self.begin = begin
        self.only_state = only_state
        self.n_bytes = 10 if only_state else len(cells)
        self.closed = False

    def to_bytes(self) -> bytes:
        return array("i", self.cells).tobytes()

    def view(self) -> memoryview:
        return memoryview(self.to_bytes())

    def close(self) -> None:
        assert not self.closed, "saved cells were freed twice"
        self.closed = True


class FakeContext:
    """An Executor over lists of tokens: ``n_seq_max`` sequences of ``n_ctx`` cells each, ``n_cells`` in all.

    What a real context would compute wrongly or end the process for is an AssertionError here: gaps in positions,
    sequences that do not exist, too many tokens, rows of entries that are no outputs, copies of cells that were shifted
    and whose keys no step has rotated yet.

    ``failures``: what the launch of that number (from 0) raises instead; a ContextFullError leaves everything as it
    was, any other error leaves half of the batch in the cells, as llama.cpp may. ``sample_failures``: the same for
    ``sample``. ``broken``: tokens after which no logit is finite. ``recurrent``: a sequence has a state, which can go
    back to a saved one, or before wrong guesses of the last step, once: at most ``n_states``. ``has_cells``: it has
    cells, too. ``window``: layers see so many tokens: copies have only these (but with ``n_cells``), and guesses of a
    step have one length. ``before_launch``: called with the number of each launch, on the thread that launches.
    """

    overlaps = late_errors = False
    depth = 1
    n_guessing = 0
    n_score_rows = 32

    def __init__(
        self,
        n_seq_max: int = 4,
        n_ctx: int = 64,
        n_cells: int | None = None,
        n_batch: int = 32,
        n_vocab: int = N_VOCAB,
        failures: Mapping[int, Exception] | None = None,
        sample_failures: Mapping[int, Exception] | None = None,
        broken: Container[int] = (),
        recurrent: bool = False,
        n_states: int = 0,
        has_cells: bool = True,
        window: int = 0,
        before_launch: Callable[[int], object] = lambda n: None,
    ) -> None:
        self.n_seq_max, self.n_ctx, self.n_batch, self.n_vocab = n_seq_max, n_ctx, n_batch, n_vocab
        self.n_cells = n_ctx * n_seq_max if n_cells is None else n_cells
        self.failures = dict(failures or {})
        self.sample_failures = dict(sample_failures or {})
        self.broken = broken
        self.recurrent = recurrent
        self.n_states = n_states
        self.has_cells = has_cells
        self.window = window
        self.shares_cells = n_cells is not None
        self.before_launch = before_launch
        self.sequences: list[list[int]] = [[] for _ in range(n_seq_max)]  # the tokens in each one's cells
        self.begins = [0] * n_seq_max  # the first cell of each sequence that windows have
        self.seen: list[list[int]] = [[] for _ in range(n_seq_max)]  # the tokens in each one's state
        self.saved: list[FakeSaved] = []  # all that there ever were
        self.kept: dict[int, FakeSaved] = {}  # those that are there, by key
        self.refuses_saves = False
        self.before_guesses: dict[int, list[int]] = {}  # the tokens in copied states, by sequence
        self.adapters: Any = None  # a number; cells that were computed with one are others
        self.assigned: dict[int, Any] | None = None  # by slot, if ``adapters`` is a carrier
        self.n_changes = 0
        self._unrotated: set[int] = set()  # sequences that were shifted since the last launch
        self._gone_back: set[int] = (
            set()
        )  # recurrent sequences without guesses, until they are computed again
        self.launches: list[Launch] = []  # those that succeeded
        self.n_launches = 0  # all
        self.n_samples = 0
        self.n_parks = 0
        self.closed = False
        self._wake: Callable[[], object] = lambda: None  # wakes the callers that wait for a launch
        self._rows: dict[int, int] = {}  # of the last launch: output entry to what the model says
        self._asked: tuple[Sequence[int], Sequence[Any]] = ((), ())  # of the last sample
        self._sampled: list[int] | None = None  # from the last launch
        self._owner: int | None = None

    def __repr__(self) -> str:
        return f"<FakeContext {self.n_used}/{self.n_cells} cells in {[len(s) for s in self.sequences]}>"

    @property
    def n_used(self) -> int:
        """Cells in use."""
        return sum(map(len, self.sequences))

    def change_cells(self, ops: Sequence[MemoryOp]) -> CellChanges:
        lost: set[int] = set()
        stale: set[int] = set()
        sizes: list[tuple[int, int | None]] = []
        for op in ops:
            done = True
            match op:
                case Remove(slot, position, state):
                    done = self._remove(slot, position, state=state)
                case Discard(slot, position):
                    last = self.launches[-2:]  # with micro-batches another step follows at once
                    assert any(
                        (slot, position) in set(zip(launch.seq_ids, launch.positions, strict=True))
                        for launch in last
                    )
                    done = self._remove(slot, position, is_guess=True)
                case Keep(slot, n):
                    assert slot in lost or len(self.sequences[slot]) == n, f"no state of {n} cells of {slot}"
                    self.before_guesses[slot] = self.sequences[slot].copy()
                    continue
                case GoBack(slot, n):
                    done = self._go_back(slot, n)
                case Shift(slot, begin, end):
                    done = slot not in lost and self._shift(slot, begin, end)
                case Copy(source, slot, n, state):
                    done = source not in lost and self._copy(source, slot, n, state)
                case Restore(key, slot, n, state):
                    done = key in self.kept and self._load(self.kept[key], slot, n, state)
                case Save(slot, key, max_bytes):
                    saved = None if slot in lost else self.save(slot, max_bytes)
                    self._note_saved(key, saved, sizes)
                    continue
                case SaveState(slot, n, key, max_bytes):
                    is_there = slot not in lost and len(self.sequences[slot]) == n
                    self._note_saved(key, self.save(slot, max_bytes, True) if is_there else None, sizes)
                    continue
                case UseAdapters(adapters, carries):
                    self._claim()
                    self.adapters = adapters
                    self.assigned = {} if carries else None
                    self.n_changes += 1
                    continue
                case AssignAdapters(slot, adapters):
                    assert self.assigned is not None, "the steps have no carrier"
                    self.assigned[slot] = adapters
                    continue
                case Forget(key, _):
                    if key in self.kept:
                        self.kept.pop(key).close()
                    continue
            stale.discard(slot)
            if not done and isinstance(op, Remove) and op.state < 0 and self.sequences[slot]:
                stale.add(slot)
            elif not done:
                lost.add(slot)
            elif isinstance(op, (Copy, Restore)) or (isinstance(op, Remove) and op.state >= 0):
                lost.discard(slot)
        return CellChanges(lost, sizes, stale)

    def _note_saved(self, key: int, saved: FakeSaved | None, sizes: list[tuple[int, int | None]]) -> None:
        sizes.append((key, None if saved is None else saved.n_bytes))
        if saved is not None:
            self.kept[key] = saved

    def _remove(self, seq_id: int, position: int, is_guess: bool = False, state: int = -1) -> bool:
        """Forgets a sequence's cells from ``position`` on; a recurrent one all of them in most cases, False then."""
        self._claim()
        assert 0 <= seq_id < self.n_seq_max, f"there is no sequence {seq_id}"
        assert position >= 0, f"there is no position {position}"
        cells = self.sequences[seq_id]
        if position == 0:
            self._unrotated.discard(seq_id)
        if is_guess and self.recurrent and position < len(cells):
            if not self.n_states or seq_id in self._gone_back:
                return self._has_parts(seq_id, 0, -1)
            assert len(cells) - position <= self.n_states, f"{len(cells) - position} wrong guesses"
            self._gone_back.add(seq_id)
            del self.seen[seq_id][position:]
        elif not is_guess or position == 0:
            return self._has_parts(seq_id, position, state)
        del cells[position:]
        return True

    def _go_back(self, seq_id: int, n: int) -> bool:
        """Lets a sequence return to the copy of its state."""
        self._claim()
        copy = self.before_guesses[seq_id]
        assert len(copy) == n < len(self.sequences[seq_id]), f"{n} of {self.sequences[seq_id]} from {copy}"
        assert copy == self.sequences[seq_id][:n], f"the copy is of other tokens: {copy}"
        del self.sequences[seq_id][n:]
        self.seen[seq_id] = copy.copy()
        return True

    def _has_parts(self, seq_id: int, n: int, state: int, is_copy: bool = False) -> bool:
        """Shortens a sequence to its first ``n`` cells, with a saved state; False and empty if parts are missing."""
        cells = self.sequences[seq_id]
        mark = self.kept.get(state)
        done = state < 0 or mark is not None
        if mark is not None:
            assert mark.only_state and not mark.closed, f"{state} is no state"
            if not self.has_cells:
                cells[:] = mark.cells
            done = len(mark.cells) == n <= len(cells)
            self.seen[seq_id] = mark.cells.copy()
            self.begins[seq_id] = mark.begin
        elif self.recurrent and 0 < n < len(cells):
            if self.has_cells and not is_copy:
                return False  # they are as they were
            done = False
        if self.window and self.begins[seq_id] > max(n - self.window + 1, 0):
            done = n == 0
        if not done or n == 0:
            cells.clear()
            self.seen[seq_id].clear()
            self.begins[seq_id] = 0
        del cells[n:]
        return done

    def _copy(self, source: int, seq_id: int, n: int, state: int = -1) -> bool:
        """Gives an empty sequence the first `n` cells of another."""
        self._claim()
        assert source != seq_id and not self.sequences[seq_id], f"sequence {seq_id} is not empty"
        assert 0 < n <= len(self.sequences[source]), f"{n} cells of {len(self.sequences[source])}"
        assert source not in self._unrotated, f"sequence {source} is copied before its keys are rotated"
        self.sequences[seq_id] = self.sequences[source].copy()
        self.seen[seq_id] = self.seen[source].copy()
        self.begins[seq_id] = self.begins[source] if self.shares_cells else self._window_begin(source)
        return self._has_parts(seq_id, n, state, is_copy=True)

    def _window_begin(self, seq_id: int) -> int:
        """The first cell that a copy of a sequence has for windows."""
        if not self.window:
            return 0
        return max(self.begins[seq_id], len(self.sequences[seq_id]) - self.window, 0)

    def _shift(self, seq_id: int, begin: int, end: int) -> bool:
        """Drops cells from the middle of a sequence. The next launch rotates the keys of those after them."""
        self._claim()
        cells = self.sequences[seq_id]
        assert 0 <= begin < end <= len(cells), f"{begin} to {end} of {len(cells)} cells"
        del cells[begin:end]
        if self.begins[seq_id] > begin:
            self.begins[seq_id] = max(self.begins[seq_id] - (end - begin), begin)
        self._unrotated.add(seq_id)
        return True

    def save(self, seq_id: int, max_bytes: int, only_state: bool = False) -> FakeSaved | None:
        """A copy of a sequence's cells, a byte each, or of its state, ten bytes."""
        self._claim()
        cells = self.sequences[seq_id]
        assert cells, f"sequence {seq_id} is empty"
        assert seq_id not in self._unrotated, f"sequence {seq_id} is saved before its keys are rotated"
        saved = FakeSaved(cells.copy(), self._window_begin(seq_id), only_state)
        if saved.n_bytes > max_bytes or self.refuses_saves:
            return None
        self.saved.append(saved)
        return saved

    def read_cells(self, seq_id: int) -> bytes | None:
        saved = self.copy_cells(seq_id)
        if saved is None:
            return None
        saved.close()
        return saved.to_bytes()

    def copy_cells(self, seq_id: int) -> FakeSaved | None:
        return self.save(seq_id, 2**62)

    def read_saved(self, key: int) -> bytes | None:
        return self.kept[key].to_bytes() if key in self.kept else None

    def copy_saved(self, key: int) -> FakeSaved | None:
        return self.copy_to_native(self.kept[key].to_bytes()) if key in self.kept else None

    def copy_to_native(self, state: bytes | bytearray | memoryview) -> FakeSaved:
        cells = array("i", bytes(state)).tolist()
        self.saved.append(FakeSaved(cells, max(len(cells) - self.window, 0) if self.window else 0))
        return self.saved[-1]

    def keep_saved(self, key: int, cells: object) -> None:
        assert isinstance(cells, FakeSaved)
        self.kept[key] = cells

    def offer_evicted(self, take: object) -> None:
        assert callable(take)

    def _load(self, saved: FakeSaved, seq_id: int, n: int, state: int = -1) -> bool:
        """Gives an empty sequence the first `n` saved cells."""
        self._claim()
        assert not saved.closed and not self.sequences[seq_id], f"sequence {seq_id} is not empty"
        assert 0 < n <= len(saved.cells), f"{n} cells of {len(saved.cells)}"
        assert not saved.only_state
        if self.n_used + n > self.n_cells:
            return False
        self.sequences[seq_id] = saved.cells.copy()
        self.seen[seq_id] = saved.cells.copy()
        self.begins[seq_id] = saved.begin
        return self._has_parts(seq_id, n, state, is_copy=True)

    def sequence_end(self, seq_id: int) -> int:
        """How many cells a sequence has."""
        self._claim()
        return len(self.sequences[seq_id])

    def launch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        outputs: Sequence[int],
        rows: Sequence[int] = (),
        samplers: Sequence[Any] = (),
        targets: Mapping[int, Sequence[int]] | None = None,
        n_top: int = 0,
        media: Sequence[MediaRows] = (),
        is_causal: bool = True,
    ) -> int:
        """Stores a batch and computes its output rows; its number."""
        self._claim()
        self._wake()
        n = self.n_launches
        self.n_launches += 1
        self._rows = {}
        self._sampled = None
        self.before_launch(n)
        batch = Launch(list(tokens), list(positions), list(seq_ids), list(outputs))
        self._check(batch)
        failure = self.failures.get(n)
        if isinstance(failure, ContextFullError):
            raise failure
        if failure is not None:
            self._store(batch, len(tokens) // 2)
            raise failure
        if self.n_used + len(tokens) > self.n_cells:
            raise ContextFullError(f"{len(tokens)} tokens and {self.n_used} of {self.n_cells} cells in use")
        self._rows = self._store(batch, len(tokens))
        self.launches.append(batch)
        return n

    def launch_repeat(self) -> int:
        """The last batch with what was sampled from it, one position further."""
        rows, _ = self._asked
        last = self.launches[-1]
        assert self._sampled is not None and list(rows) == list(range(len(last.tokens))), (
            "not all was sampled"
        )
        return self.launch(self._sampled, [p + 1 for p in last.positions], last.seq_ids, last.outputs)

    def sample_repeat(self, step: int) -> list[int]:
        """What the model says to the requests of `sample`."""
        return self.sample(step, *self._asked)

    def launching(self) -> int:
        """A launch is over at once."""
        return -1

    def abort(self, step: int) -> None:
        """A launch is over at once."""

    def wake_at_launch(self, wakes: Any) -> None:
        """All at once: a launch takes no time."""
        self._wake = wakes.now

    def yield_cores(self) -> None:
        self._claim()

    def park_threads(self) -> None:
        """Its compute threads would sleep now."""
        self.n_parks += 1

    def compute_s(self) -> float:
        """Nobody measures this one."""
        return 0.0

    def stats(self) -> dict[str, Any]:
        """Nobody measures this one."""
        return {}

    def sample(
        self, step: int, rows: Sequence[int], samplers: Sequence[Any], guessed: Sequence[int] = ()
    ) -> list[int]:
        """What the model says after each of the output entries, through its sampler (None: as it is)."""
        self._claim()
        assert step == self.n_launches - 1, f"step {step} is sampled after {self.n_launches} launches"
        n = self.n_samples
        self.n_samples += 1
        if n in self.sample_failures:
            raise self.sample_failures[n]
        assert len(rows) == len(samplers)
        assert self._rows.keys() >= set(rows), f"{rows} are not all outputs of the last batch: {self._rows}"
        said = [self._rows[row] for row in rows]
        self._asked = (rows, samplers)
        self._sampled = self._draw_all(said, samplers, guessed)
        return self._sampled.copy()

    def _draw_all(self, said: Sequence[int], samplers: Sequence[Any], guessed: Sequence[int]) -> list[int]:
        """A token from each row, but none after a wrong guess."""
        drawn: list[int] = []
        self.n_guessing = 0
        for i, (token, sampler) in enumerate(zip(said, samplers, strict=True)):
            if i and guessed and guessed[i - 1] >= 0 and drawn[-1] != guessed[i - 1]:
                assert sampler is samplers[i - 1], "the rows of a sampler are not together"
                drawn.append(NoToken.NOT_DRAWN)
            else:
                drawn.append(token if sampler is None else self._draw(token, sampler))
            self.n_guessing += sampler is not None
        return drawn

    def _draw(self, token: int, sampler: Any) -> int:
        return int(sampler.draw(token))

    def take_drawn(self) -> list[tuple[Any, int, int]]:
        """All tokens are drawn at once."""
        return []

    def await_end_state(self, sampler: Any) -> None:
        raise AssertionError("a fake sampler is never busy")

    def notify_drawn(self, notify: Callable[[], object]) -> None:
        """Nothing is drawn later."""

    def add_spare_thread(self) -> None:
        """Nothing is drawn later."""

    def score(self, step: int, rows: Sequence[int], targets: Sequence[int], n_top: int) -> list[TokenScore]:
        """The token the model says is certain, the others are less so the further they are from it."""
        self._claim()
        assert step == self.n_launches - 1, f"step {step} is scored after {self.n_launches} launches"
        assert self._rows.keys() >= set(rows), f"{rows} are not all outputs of the last batch: {self._rows}"
        assert len(rows) == len(targets)
        return [
            score_of(self._rows[row], target, n_top, self.n_vocab)
            for row, target in zip(rows, targets, strict=True)
        ]

    def close(self) -> None:
        """Nothing can be done with it any more."""
        self.closed = True
        while self.kept:
            self.kept.popitem()[1].close()

    def _claim(self) -> None:
        if self.closed:
            raise EngineClosedError("the context is closed; create another")
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        if self._owner != me:
            raise RuntimeError("this context belongs to another thread")

    def _check(self, batch: Launch) -> None:
        n = len(batch.tokens)
        assert 0 < n <= self.n_batch, f"{n} tokens in a batch; n_batch is {self.n_batch}"
        assert n == len(batch.positions) == len(batch.seq_ids) == len(batch.outputs), batch
        assert set(batch.outputs) <= {0, 1} and sum(batch.outputs) <= self.n_seq_max + self.n_score_rows, (
            batch
        )
        if self.window and all(batch.outputs):
            guessed = {batch.seq_ids.count(seq_id) for seq_id in batch.seq_ids} - {1}
            assert len(guessed) <= 1, f"guesses of several lengths beside a window: {batch}"
        lengths = [len(s) for s in self.sequences]
        for token, position, seq_id in zip(batch.tokens, batch.positions, batch.seq_ids, strict=True):
            assert 0 <= token < self.n_vocab, f"there is no token {token}"
            assert 0 <= seq_id < self.n_seq_max, f"there is no sequence {seq_id}"
            assert position == lengths[seq_id], (
                f"position {position} of sequence {seq_id}, which has {lengths[seq_id]} cells: {batch}"
            )
            assert position < self.n_ctx, f"position {position} and n_ctx {self.n_ctx}"
            lengths[seq_id] += 1

    def _store(self, batch: Launch, n: int) -> dict[int, int]:
        rows = {}
        self._unrotated.clear()
        self._gone_back.difference_update(batch.seq_ids)
        for i in range(n):
            cells = self.sequences[batch.seq_ids[i]]
            seq_id = batch.seq_ids[i]
            adapters = self.adapters if self.assigned is None else self.assigned.get(seq_id)
            if self.recurrent:
                assert self.seen[seq_id] == cells, f"the state of sequence {seq_id} is of other tokens"
            if self.window:
                needed = max(len(cells) - self.window + 1, 0)
                assert self.begins[seq_id] <= needed, f"sequence {seq_id} lacks cells of its window"
            cells.append(cell(batch.tokens[i], adapters))
            if self.recurrent:
                self.seen[seq_id].append(cells[-1])
            if batch.outputs[i]:
                rows[i] = -1 if batch.tokens[i] in self.broken else next_token(cells, self.n_vocab)
        return rows

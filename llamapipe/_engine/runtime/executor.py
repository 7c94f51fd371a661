"""The executor: defines what the engine loop needs from a context, and provides it with llama.cpp.

Open this file to change how a batch, a KV operation or a draw reaches native code.

The principle: the loop knows only the protocol ``Executor``. A fake executor in the tests and the real one,
``StepExecutor``, pass the same contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from llamapipe._engine.policy.core import (
    AssignAdapters,
    CellChanges,
    Copy,
    Discard,
    GoBack,
    Keep,
    MediaRows,
    MemoryOp,
    Remove,
    Restore,
    Save,
    SaveState,
    Shift,
    Unused,
    UseAdapters,
)
from llamapipe._engine.policy.scoring import TokenScore
from llamapipe._engine.policy.speculation import MOST_COPIES
from llamapipe._engine.runtime.background_draws import BackgroundDraws
from llamapipe._engine.runtime.background_sampler import BackgroundSampler
from llamapipe._engine.runtime.compute_threads import ThreadTuner
from llamapipe._engine.runtime.positions import (
    Grid,
    Grids,
    end_position,
    grids_before,
    n_tokens_before,
    position_of,
)
from llamapipe._engine.runtime.state_layout import Bytes, Saved
from llamapipe._engine.runtime.wakers import LaunchWakeList
from llamapipe.errors import DecodeError, NoToken
from llamapipe.llama.adapter import AdapterSet, assign_adapters, set_adapters
from llamapipe.llama.native_pipeline import NativePipeline, SavedCells
from llamapipe.llama.sampler import SamplerChain
from llamapipe.native.load import last_error
from llamapipe.work.threads import FairThreads

if TYPE_CHECKING:
    import numpy.typing as npt

AnySampler = SamplerChain | BackgroundSampler
_MORE_THREADS = 8  # spare threads for samplers, if some threads hang
_ANY_SIZE = 2**62
_is_native, _handle = attrgetter("is_native"), attrgetter("handle")


class Executor(Protocol):
    """The engine loop's interface to a context. An executor accepts only samplers that were made for its kind.

    ``overlaps``: a launch returns before its step is computed, so there is time for other work before ``sample``.
    ``late_errors``: ``sample`` raises the errors of a launch. ``depth``: maximum number of steps launched but not
    sampled. ``n_guessing``: how many rows of the last ``sample`` have samplers that can guess the next tokens.
    """

    overlaps: bool
    late_errors: bool
    depth: int
    n_guessing: int

    def change_cells(self, ops: Sequence[MemoryOp]) -> CellChanges:
        """Perform these operations in order, after the steps launched before. Keep saved cells by their keys.

        An impossible operation leaves its sequence empty. Return the outcome.
        """

    def read_cells(self, seq_id: int) -> bytes | None:
        """Return a copy of a sequence's cells; None on failure. Waits for earlier steps."""

    def copy_cells(self, seq_id: int) -> Saved | None:
        """Copy as ``read_cells`` does, into native memory that the caller frees."""

    def read_saved(self, key: int) -> bytes | None:
        """Return a copy of saved cells; None if they were not saved."""

    def copy_saved(self, key: int) -> Saved | None:
        """Copy as ``read_saved`` does, into native memory that the caller frees."""

    def copy_to_native(self, state: Bytes) -> Saved | None:
        """Copy a state's bytes into native memory; return None if no memory is left."""

    def keep_saved(self, key: int, cells: Saved) -> None:
        """Keep cells from elsewhere under ``key``. Loading refuses cells that do not fit this context."""

    def offer_evicted(self, take: Callable[[Unused, Saved], bool]) -> None:
        """From now on, call ``take`` with cells that are evicted from host memory. If it returns True, it owns them."""

    def sequence_end(self, seq_id: int) -> int:
        """Return the position after a sequence's last cell. Waits for earlier steps."""

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
        """Start computing a batch and return the step's number.

        ``positions``: places in the sequences, which the executor translates where llama.cpp's positions differ.
        ``media``: runs of entries that are rows, not tokens; the caller keeps the rows until the step is done.
        ``is_causal``: see ``BatchPlan``.

        The caller may announce its later questions, so that the device can compute the answers: the ``samplers`` of
        ``rows``, and the tokens to score in output entries (``targets``) with the ``n_top`` most probable tokens.

        Raises ContextFullError (nothing changed) or DecodeError, here or in ``sample``.
        """

    def launch_repeat(self) -> int:
        """Launch the last batch again, every entry one position further and with the token sampled from it.

        Call it only after a ``sample`` of all its entries in order. Returns and raises as ``launch`` does.
        """

    def sample(
        self, step_id: int, rows: Sequence[int], samplers: Sequence[Any], guessed: Sequence[int] = ()
    ) -> list[int]:
        """Draw and accept a token for each output entry of a step; a NoToken where none can be drawn.

        ``guessed``: for each row the guessed token whose row follows it, or -1; empty: no row is a guess's. Consecutive
        rows of one sampler are drawn from until a token differs; the rows after that get ``NoToken.NOT_DRAWN``.

        ``NoToken.LATER`` means that the sampler takes long; ``take_drawn`` will return its token.
        """

    def take_drawn(self) -> list[tuple[Any, int, int]]:
        """Return the samplers that drew late, after their step was sampled, with the draws' numbers and the tokens."""

    def await_end_state(self, sampler: Any) -> None:
        """Add this sampler with ``NoToken.SETTLED`` to the results of ``take_drawn`` once its end state is known."""

    def notify_drawn(self, notify: Callable[[], object]) -> None:
        """Set the function that is called, in any thread, when ``take_drawn`` has something to return."""

    def add_spare_thread(self) -> None:
        """Start another thread for draws if some hang. The loop calls this now and then while draws are outstanding."""

    def sample_repeat(self, step_id: int) -> list[int]:
        """Return the result of ``sample`` with the rows and samplers of the last call."""

    def score(
        self, step_id: int, rows: Sequence[int], targets: Sequence[int], n_top: int
    ) -> list[TokenScore]:
        """Score tokens in the rows of a step's output entries, each with the ``n_top`` most probable tokens.

        An entry may be repeated to score several tokens. Raises as ``sample`` does.
        """

    def wake_at_launch(self, wakes: LaunchWakeList) -> None:
        """Make each launch wake the callers in this list; threads are woken one by one while it computes.

        A launch does not hold the GIL, so a woken thread can start working immediately.
        """

    def park_threads(self) -> None:
        """Park the compute threads, because nothing is launched until a command arrives."""

    def yield_cores(self) -> None:
        """Leave the cores to other engines, because nothing is launched until a caller asks for it."""

    def compute_s(self) -> float:
        """Return the seconds of computing that the device has reported."""

    def stats(self) -> dict[str, Any]:
        """Return counters for EngineStats. Any thread."""

    def launching(self) -> int:
        """Return the number of the step that a call of ``launch`` is computing. Any thread."""

    def abort(self, step_id: int) -> None:
        """End a step early if it is still being computed and the backend can abort it. Any thread."""

    def close(self) -> None:
        """Free the context."""


class StepExecutor:
    """An Executor over a pipeline. Like the context, it belongs to the thread that uses it first.

    ``Executor`` describes its methods.
    """

    def __init__(self, pipeline: NativePipeline, tuner: ThreadTuner | None = None) -> None:
        context = pipeline.context
        self.tuner = tuner
        self.pipeline = pipeline
        self.overlaps = pipeline.threaded or pipeline.mode in ("events", "sync")
        self.late_errors = pipeline.threaded
        self.depth = pipeline.depth
        self._context = context
        self._native = pipeline.native
        new, n = self._native.ffi.new, context.n_batch
        self._tokens, self._positions, self._seq_ids = (new("int32_t[]", n) for _ in range(3))
        self._outputs = new("int8_t[]", n)
        self._rows, self._sampled = (new("int32_t[]", context.n_seq_max) for _ in range(2))
        self._asked: tuple[Sequence[int], Sequence[AnySampler]] = ((), ())
        self._guessed: Any = self._native.ffi.NULL
        self._asked_guessed: Sequence[int] = ()
        self._all_native = True
        self._samplers = new("lp_sampler *[]", context.n_seq_max)
        self._in_graph = context.graph_sampling
        self._n = self._n_rows = 0  # entries of the last launch, rows of the last sample
        self.n_guessing = 0
        self._handle = pipeline.handle  # for native calls
        self._wakes: LaunchWakeList | None = None
        # Requests that have lent their slots draw, too, hence twice the number of slots.
        self.threads = FairThreads(2 * context.n_seq_max + _MORE_THREADS)
        self._background = BackgroundDraws(self.threads)
        self._launched_s = 0.0
        self._n_vocab = context.model.n_vocab
        # Whether a sequence may lack parts, so that some operations on it are impossible.
        self._is_checked = context.model.n_swa > 0 or context.model.is_recurrent
        self._keeps_stale = context.needs_states and not context.model.has_only_states
        self._adapters: AdapterSet | None = None
        self._assigned: dict[int, AdapterSet | None] = {}  # by slot
        self._saved: dict[int, SavedCells] = {}  # by the KV cache's keys
        self._kept: dict[
            int, tuple[int, SavedCells]
        ] = {}  # the states before guesses, with their places, by sequence
        self._take: Callable[[Unused, Saved], bool] = lambda *_: False
        # By sequence, and by key: the images that take fewer positions than tokens. No entry means no such images.
        self._grids: dict[int, Grids] = {}
        self._grids_of_saved: dict[int, Grids] = {}

    def change_cells(self, ops: Sequence[MemoryOp]) -> CellChanges:
        self._context.claim()
        lost: set[int] = set()
        stale: set[int] = set()
        saved: list[tuple[int, int | None]] = []
        for op in ops:
            if isinstance(op, Remove):
                succeeded = self._remove(op.slot, op.position, op.state)
            elif isinstance(op, Discard):
                succeeded = self._discard(op.slot, op.position)
            elif isinstance(op, Keep):
                if op.slot not in lost:
                    self._keep(op.slot, op.n)
                continue
            elif isinstance(op, GoBack):
                succeeded = self._go_back(op.slot, op.n)
            elif isinstance(op, Copy):
                succeeded = op.source not in lost and self._copy(op.source, op.slot, op.n, op.state)
            elif isinstance(op, Restore):
                succeeded = self._load(op.key, op.slot, op.n, op.state)
            elif isinstance(op, Shift):
                succeeded = op.slot not in lost and self._shift(op.slot, op.begin, op.end)
            elif isinstance(op, (Save, SaveState)):
                saved.append((op.key, None if op.slot in lost else self._save(op)))
                continue
            elif isinstance(op, UseAdapters):
                assert op.adapters is None or isinstance(op.adapters, AdapterSet)
                entry = self._native.lib.lp_set_adapters
                set_adapters(self._native, entry, self._handle, op.adapters, op.carries)
                self._adapters = op.adapters  # keeps them alive while steps compute with them
                self._assigned.clear()
                continue
            elif isinstance(op, AssignAdapters):
                assert op.adapters is None or isinstance(op.adapters, AdapterSet)
                entry = self._native.lib.lp_assign_adapters
                assign_adapters(self._native, entry, self._handle, op.slot, op.adapters)
                self._assigned[op.slot] = op.adapters  # keeps them alive while a step may compute the slot
                continue
            else:
                self._grids_of_saved.pop(op.key, None)
                forgotten = self._saved.pop(op.key, None)
                is_taken = (
                    forgotten is not None and op.evicted is not None and self._take(op.evicted, forgotten)
                )
                if forgotten is not None and not is_taken:
                    forgotten.close()
                continue
            stale.discard(op.slot)
            if not succeeded and isinstance(op, Remove) and op.state < 0 and self._keeps_stale:
                stale.add(op.slot)
            elif not succeeded:
                lost.add(op.slot)
            elif isinstance(op, (Copy, Restore)) or (isinstance(op, Remove) and op.state >= 0):
                lost.discard(op.slot)
        return CellChanges(lost, saved, stale)

    def _save(self, op: Save | SaveState) -> int | None:
        """Copy a sequence or its state to host memory. Return the number of bytes; None if it was not copied."""
        only_state = isinstance(op, SaveState)
        if isinstance(op, SaveState) and self.sequence_end(op.slot) != op.n:
            return None
        copy = SavedCells.of(self.pipeline, op.slot, op.max_bytes, only_state)
        if copy is None:
            return None
        self._saved[op.key] = copy
        if grids := self._grids.get(op.slot):
            self._grids_of_saved[op.key] = grids
        return copy.n_bytes

    def _keep(self, seq_id: int, n: int) -> None:
        """Copy a sequence's state, into the memory of an older copy if there is one: touching new pages is slow."""
        _, copy = self._kept.pop(seq_id, (0, None))
        if copy is None and len(self._kept) == MOST_COPIES:
            _, copy = self._kept.pop(next(iter(self._kept)))
        if copy is None:
            copy = SavedCells.of(self.pipeline, seq_id, _ANY_SIZE, True)
        elif not copy.replace_by_state(self.pipeline, seq_id):
            copy.close()
            return
        if copy is not None:
            self._kept[seq_id] = n, copy

    def _go_back(self, seq_id: int, n: int) -> bool:
        """Load the copy of a sequence's state after ``n`` tokens. Without one, empty the sequence and return False."""
        place, copy = self._kept.get(seq_id, (-1, None))
        if copy is None or place != n:
            self._clear(seq_id)
            return False
        null, grids = self._native.ffi.NULL, self._grids.get(seq_id, ())
        status: int = self._native.lib.lp_load(
            self._handle, seq_id, end_position(grids, n), null, copy.handle
        )
        if status < 0:
            raise RuntimeError(f"loading sequence {seq_id} failed: {last_error(self._native)}")
        if not status:
            self._set_grids(seq_id, ())
        return status > 0

    def _remove(self, seq_id: int, position: int, state: int) -> bool:
        """Remove cells from ``position`` onward, with the saved ``state`` or -1. If impossible, return False."""
        if state < 0 and (not self._is_checked or position == 0):
            return self._discard(seq_id, position)
        kept = self._grids_of_saved.get(state, ()) if state >= 0 else self._grids.get(seq_id, ())
        is_loaded = self._load_parts(seq_id, position, None, state, grids_before(kept, position))
        if not is_loaded and not (state < 0 and self._keeps_stale):
            self._clear(seq_id)
        return is_loaded

    def _discard(self, seq_id: int, position: int) -> bool:
        """Remove cells without a check: cells of the last step's guesses, or any cells of a memory without states."""
        lib, begin = self._native.lib, position
        kept: Grids | None = ()
        if grids := self._grids.get(seq_id):
            kept, begin = grids_before(grids, position), position_of(grids, position)
        if kept is not None:
            removed = lib.lp_memory(self._handle, lib.LP_REMOVE, seq_id, 0, begin, -1, 0)
            if removed > 0:
                if grids:
                    self._set_grids(seq_id, kept)
                return True
            if removed < 0:
                raise DecodeError(f"removing from sequence {seq_id} failed ({last_error(self._native)})")
        self._clear(seq_id)
        return False

    def _load_parts(
        self, seq_id: int, n: int, cells: SavedCells | None, state: int, grids: Grids | None
    ) -> bool:
        """Give a sequence its first ``n`` cells, or the first of ``cells``, and a saved state (-1: none)."""
        null, saved = self._native.ffi.NULL, self._saved.get(state)
        if grids is None or (state >= 0 and saved is None):
            if cells is not None:
                self._clear(seq_id)
            return False
        status = self._native.lib.lp_load(
            self._handle,
            seq_id,
            end_position(grids, n),
            null if cells is None else cells.handle,
            null if saved is None else saved.handle,
        )
        if status < 0:
            raise RuntimeError(f"loading sequence {seq_id} failed: {last_error(self._native)}")
        if status or cells is not None:
            self._set_grids(seq_id, grids if status else ())
        return bool(status > 0)

    def _clear(self, seq_id: int) -> None:
        lib = self._native.lib
        if lib.lp_memory(self._handle, lib.LP_REMOVE, seq_id, 0, 0, -1, 0) < 0:
            raise RuntimeError(f"clearing sequence {seq_id} failed: {last_error(self._native)}")
        self._set_grids(seq_id, ())

    def _set_grids(self, seq_id: int, grids: Grids) -> None:
        if grids:
            self._grids[seq_id] = grids
        else:
            self._grids.pop(seq_id, None)

    def _shift(self, seq_id: int, begin: int, end: int) -> bool:
        """Remove positions ``[begin, end)`` and close the gap. The next step rotates the keys of later positions."""
        lib = self._native.lib
        removed = lib.lp_memory(self._handle, lib.LP_REMOVE, seq_id, 0, begin, end, 0)
        if removed > 0 and lib.lp_memory(self._handle, lib.LP_SHIFT, seq_id, 0, end, -1, begin - end) > 0:
            return True
        self._clear(seq_id)
        return False

    def _copy(self, source: int, seq_id: int, n: int, state: int) -> bool:
        lib, saved = self._native.lib, self._saved.get(state)
        grids = grids_before(self._grids.get(source, ()), n)
        if grids is None or (state >= 0 and saved is None):
            self._clear(seq_id)
            return False
        end = end_position(grids, n)
        if self._context.kv_unified and not self._context.needs_states and saved is None:
            status = lib.lp_memory(self._handle, lib.LP_COPY, source, seq_id, 0, end, 0)
            if status > 0 and self._is_checked and not self._load_parts(seq_id, n, None, -1, grids):
                self._clear(seq_id)
                return False
        else:  # llama.cpp's copy between streams copies a whole stream and drops the graphs
            part = self._native.ffi.NULL if saved is None else saved.handle
            status = lib.lp_copy(self._handle, source, seq_id, end, part)
        if status < 0:
            raise DecodeError(f"copying sequence {source} failed ({last_error(self._native)})")
        self._set_grids(seq_id, grids if status else ())
        return bool(status > 0)

    def _load(self, key: int, seq_id: int, n: int, state: int) -> bool:
        cells = self._saved.get(key)
        if cells is None:
            return False
        return self._load_parts(seq_id, n, cells, state, grids_before(self._grids_of_saved.get(key, ()), n))

    def read_cells(self, seq_id: int) -> bytes | None:
        cells = self.copy_cells(seq_id)
        if cells is None:
            return None
        try:
            return cells.to_bytes()
        finally:
            cells.close()

    def copy_cells(self, seq_id: int) -> SavedCells | None:
        self._context.claim()
        return SavedCells.of(self.pipeline, seq_id, _ANY_SIZE)

    def read_saved(self, key: int) -> bytes | None:
        cells = self._saved.get(key)
        return None if cells is None else cells.to_bytes()

    def copy_saved(self, key: int) -> SavedCells | None:
        cells = self._saved.get(key)
        if cells is None:
            return None
        return self.copy_to_native(cells.view())

    def copy_to_native(self, state: Bytes) -> SavedCells | None:
        try:
            return SavedCells.of_bytes(state)
        except MemoryError:
            return None

    def keep_saved(self, key: int, cells: Saved) -> None:
        assert isinstance(cells, SavedCells)
        self._saved[key] = cells

    def offer_evicted(self, take: Callable[[Unused, Saved], bool]) -> None:
        self._take = take

    def sequence_end(self, seq_id: int) -> int:
        self._context.claim()
        end: int = self._native.lib.lp_sequence_end(self._handle, seq_id)
        if end < 0:
            raise RuntimeError(f"a sequence cannot be read: {last_error(self._native)}")
        return n_tokens_before(self._grids.get(seq_id, ()), end)

    def launch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        outputs: Sequence[int],
        rows: Sequence[int] = (),
        samplers: Sequence[AnySampler] = (),
        targets: Mapping[int, Sequence[int]] | None = None,
        n_top: int = 0,
        media: Sequence[MediaRows] = (),
        is_causal: bool = True,
    ) -> int:
        """Start computing a batch of at most ``n_batch`` entries. Return the step's number.

        The graph uses the ``samplers`` of ``rows``, and ``targets`` and ``n_top`` of other output entries, if it
        samples.

        Raises ContextFullError when no cells are left (nothing changed), DecodeError when llama.cpp fails.
        """
        self._context.claim()
        for sampler in samplers:
            if isinstance(sampler, BackgroundSampler):
                sampler.start(self._background.threads)
        self._launched_s = perf_counter()
        n = self._n = len(tokens)
        embeddings = grid = self._native.ffi.NULL
        grids_before_launch = self._grids
        if media:
            self._grids = self._grids.copy()
            embeddings, grid = self._inputs_of(media, positions, seq_ids)
        if self._grids:
            grids = self._grids.get
            positions = [position_of(grids(s, ()), p) for s, p in zip(seq_ids, positions, strict=True)]
        self._tokens[0:n] = tokens
        self._positions[0:n] = positions
        self._seq_ids[0:n] = seq_ids
        self._outputs[0:n] = outputs
        known = wanted = self._native.ffi.NULL
        if self._in_graph and (samplers or targets):
            known, wanted = self._for_graph(outputs, rows, samplers, targets or {})
        if self.tuner is not None and not self.tuner.member.is_computing:
            self.tuner.begin()
        step_id: int = self._native.lib.lp_launch(
            self._handle,
            n,
            self._tokens,
            self._positions,
            self._seq_ids,
            self._outputs,
            known,
            wanted,
            n_top,
            embeddings,
            grid,
            is_causal,
        )
        if step_id < 0:
            self._grids = grids_before_launch  # no sequence has the images of this step
            self._fail(step_id)
        if self.tuner is not None:
            self.tuner.note_launch(n)
        return step_id

    def _inputs_of(
        self, media: Sequence[MediaRows], positions: Sequence[int], seq_ids: Sequence[int]
    ) -> tuple[Any, Any]:
        """Return each entry's row address (NULL for a token), and its position on two axes if an entry has these."""
        ffi, n = self._native.ffi, len(positions)
        addresses, grid = ffi.new("float *[]", n), None
        for first, n_rows, source, begin in media:
            rows = source.rows
            row = ffi.from_buffer("float[]", rows)
            for i in range(n_rows):
                addresses[first + i] = row + (begin + i) * rows.shape[1]
            if source.grid is not None:
                if grid is None:
                    grid = np.full((n, 2), -1, np.int32)
                slot, place = seq_ids[first], positions[first] - begin
                grids = self._grids.get(slot, ())
                if not grids or grids[-1].begin < place:  # else its first rows were in an earlier step
                    self._grids[slot] = grids = [*grids, Grid(place, source.n, source.n_positions)]
                at = position_of(grids, place)
                grid[first : first + n_rows] = source.grid[begin : begin + n_rows] + at
        return addresses, ffi.NULL if grid is None else ffi.from_buffer("int32_t[]", grid)

    def _for_graph(
        self,
        outputs: Sequence[int],
        rows: Sequence[int],
        samplers: Sequence[AnySampler],
        targets: Mapping[int, Sequence[int]],
    ) -> tuple[Any, Any]:
        """Return the sampler (or NULL) and the targets (-1: none or too many) of each output, in batch order."""
        ffi, n_targets = self._native.ffi, self._native.lib.LP_TARGETS
        # A row with several samplers gets one of them. Rows after guessed tokens need later random numbers.
        by_entry = {
            r: s
            for i, (r, s) in enumerate(zip(rows, samplers, strict=True))
            if not i or s is not samplers[i - 1]
        }
        entries = [i for i, output in enumerate(outputs) if output]
        known = [by_entry[i].handle if i in by_entry and by_entry[i].is_native else ffi.NULL for i in entries]
        wanted: list[int] = []
        for i in entries:
            output_targets = list(targets.get(i, ()))
            if len(output_targets) > n_targets:
                output_targets = []
            wanted += output_targets + [-1] * (n_targets - len(output_targets))
        return ffi.new("lp_sampler *[]", known), ffi.new("int32_t[]", wanted)

    def wake_at_launch(self, wakes: LaunchWakeList) -> None:
        self._wakes = wakes  # keeps the list alive: the pipeline has its address
        self._native.lib.lp_wake_at_launch(self._handle, wakes.handle)

    def launch_repeat(self) -> int:
        self._launched_s = perf_counter()
        known = self._samplers if self._in_graph and self._all_native else self._native.ffi.NULL
        if self.tuner is not None and not self.tuner.member.is_computing:
            self.tuner.begin()
        step_id: int = self._native.lib.lp_launch_again(self._handle, self._sampled, known)
        if step_id < 0:
            self._fail(step_id)
        if self.tuner is not None:
            self.tuner.note_launch(self._n)
        return step_id

    def _fail(self, code: int) -> NoReturn:
        raise self.pipeline.error(code, n_tokens=self._n)

    def sample(
        self, step_id: int, rows: Sequence[int], samplers: Sequence[AnySampler], guessed: Sequence[int] = ()
    ) -> list[int]:
        """Draw and accept a token for each output entry of a step; see ``Executor.sample``.

        The step's rows stay until ``depth`` more steps are launched.
        """
        self._context.claim()
        self._asked = (rows, samplers)
        self._asked_guessed = guessed
        self._guessed = self._native.ffi.new("int32_t[]", guessed) if guessed else self._native.ffi.NULL
        self._n_rows = len(rows)
        self._all_native = all(map(_is_native, samplers))
        if self._all_native:
            self._set_rows(rows, samplers)
        return self.sample_repeat(step_id)

    def _set_rows(self, rows: Sequence[int], samplers: Sequence[AnySampler] = ()) -> None:
        """Write the rows and samplers for native code. There may be more rows than slots, because guesses have rows."""
        n = len(rows)
        if n > len(self._rows):
            new = self._native.ffi.new
            self._rows, self._sampled = (new("int32_t[]", n) for _ in range(2))
            self._samplers = new("lp_sampler *[]", n)
        self._rows[0:n] = rows
        self._samplers[0 : len(samplers)] = list(map(_handle, samplers))

    def sample_repeat(self, step_id: int) -> list[int]:
        if not self._all_native:
            return self._sample_in_background(step_id)
        self.n_guessing = 0
        return self._sample_rows(step_id, self._n_rows, self._guessed)

    def _sample_rows(self, step_id: int, n: int, guessed: Any) -> list[int]:
        """Draw and accept tokens for the rows that ``_set_rows`` wrote."""
        native = self._native
        code = native.lib.lp_sample_rows(
            self._handle, step_id, n, self._rows, self._samplers, guessed, self._sampled
        )
        if code < 0:
            self._sampling_failed(code)
        self.n_guessing += code
        return native.ffi.unpack(self._sampled, n)  # type: ignore[no-any-return]

    def _sample_in_background(self, step_id: int) -> list[int]:
        rows, samplers = self._asked
        patience_s = (perf_counter() - self._launched_s) / 2
        self.n_guessing = 0
        drawn = self._background.draw(
            rows,
            samplers,
            partial(self._row, step_id),
            partial(self._sample_native, step_id),
            patience_s,
            self._asked_guessed,
        )
        self.n_guessing += sum(
            isinstance(s, BackgroundSampler) and s.guesses and bool(s.guess(1)[0]) for s in samplers
        )
        self._set_rows(rows)
        self._sampled[0 : len(drawn)] = drawn
        return drawn

    def _sample_native(
        self, step_id: int, rows: Sequence[int], samplers: Sequence[AnySampler], guessed: Sequence[int] = ()
    ) -> list[int]:
        """Draw and accept a token for each of these output entries; a NoToken where none can be drawn."""
        native = self._native
        self._set_rows(rows, samplers)
        expected = native.ffi.new("int32_t[]", guessed) if guessed else native.ffi.NULL
        drawn = self._sample_rows(step_id, len(rows), expected)
        for sampler, token in zip(samplers, drawn, strict=True):
            if token == NoToken.SAMPLER_FAILED:
                sampler.error = DecodeError(f"drawing a token failed: {last_error(native)}")
        return drawn

    def _row(self, step_id: int, entry: int) -> npt.NDArray[np.float32]:
        """Return a copy of the logits of an output entry."""
        native = self._native
        row = native.lib.lp_step_row(self._handle, step_id, entry)
        if row == native.ffi.NULL:
            self._sampling_failed(native.lib.LP_ERROR)
        return np.frombuffer(native.ffi.buffer(row, 4 * self._n_vocab), np.float32).copy()

    def take_drawn(self) -> list[tuple[Any, int, int]]:
        return self._background.take()

    def await_end_state(self, sampler: BackgroundSampler) -> None:
        self._background.await_end_state(sampler)

    def notify_drawn(self, notify: Callable[[], object]) -> None:
        self._background.notify = notify

    def add_spare_thread(self) -> None:
        self.threads.add_spare_thread()

    def score(
        self, step_id: int, rows: Sequence[int], targets: Sequence[int], n_top: int
    ) -> list[TokenScore]:
        self._context.claim()
        native, n = self._native, len(rows)
        new = native.ffi.new
        logprobs, greedy = new("float[]", n), new("int8_t[]", n)
        ids, values = new("int32_t[]", n * n_top), new("float[]", n * n_top)
        code = native.lib.lp_score_rows(
            self._handle, step_id, n, rows, targets, logprobs, greedy, n_top, ids, values
        )
        if code < 0:
            self._sampling_failed(code)
        unpack = native.ffi.unpack
        tops: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        if n_top:
            pairs = list(zip(unpack(ids, n * n_top), unpack(values, n * n_top), strict=True))
            tops = [pairs[i * n_top : (i + 1) * n_top] for i in range(n)]
        return [
            TokenScore(logprob, bool(is_greedy), top)
            for logprob, is_greedy, top in zip(unpack(logprobs, n), unpack(greedy, n), tops, strict=True)
        ]

    def _sampling_failed(self, code: int) -> NoReturn:
        lib = self._native.lib
        if code == lib.LP_ERROR:
            reason = last_error(self._native)
            kind = DecodeError if "bad_alloc" in reason else RuntimeError  # a defect ends the engine
            raise kind(f"sampling failed: {reason}")
        self._fail(code)

    def park_threads(self) -> None:
        """Park the compute threads. Otherwise they spin for some milliseconds while the next caller needs a core."""
        self._context.park_threads()

    def yield_cores(self) -> None:
        if self.tuner is not None:
            self.tuner.yield_cores()

    def compute_s(self) -> float:
        return float(self.pipeline.counters().compute_ns) * 1e-9

    def stats(self) -> dict[str, Any]:
        counters = self.pipeline.counters()
        return {
            "n_waits": counters.n_waits,
            "n_syncs": counters.n_syncs,
            "n_copies": counters.n_copies,
            "n_copied_bytes": counters.n_bytes,
            "n_reused": self.pipeline.n_reused,
            "n_graph_sampled": counters.n_graph,
            "compute_s": counters.compute_ns * 1e-9,
            "wait_s": counters.wait_ns * 1e-9,
            "n_threads": self._context.n_threads,
            "swa_full": self._context.swa_full,
            "n_thread_changes": 0 if self.tuner is None else self.tuner.n_changes,
        }

    def launching(self) -> int:
        step_id: int = self._native.lib.lp_launching(self._handle)
        return step_id

    def abort(self, step_id: int) -> None:
        """On a CPU, end a step that is still being computed within one node of its graph. Any thread."""
        self._native.lib.lp_abort(self._handle, step_id)

    def close(self) -> None:
        """Wait for samplers that still draw. Free the saved cells, the pipeline and the context."""
        self.threads.close()
        while self._saved:
            self._saved.popitem()[1].close()
        while self._kept:
            self._kept.popitem()[1][1].close()
        if self.tuner is not None:
            self.tuner.close()
        self.pipeline.close()
        self._adapters = None

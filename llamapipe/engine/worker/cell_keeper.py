"""Performs the scheduler's changes to KV cells on an executor, and owns the sequences saved in host memory."""

from __future__ import annotations

from llamapipe.engine.scheduler.batch_plan import Copy, Load, Remove, Save
from llamapipe.engine.scheduler.scheduler import Scheduler
from llamapipe.engine.worker.executor import Executor, Saved


class CellKeeper:
    """The cells of one context. The engine thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._saved: dict[int, Saved] = {}  # by the scheduler's keys

    def __repr__(self) -> str:
        return f"<CellKeeper n_saved={len(self._saved)}>"

    def apply(self, executor: Executor) -> bool:
        """Performs all changes that are queued. False if a slot lost its cells, which the scheduler knows then."""
        lost: set[int] = set()
        for op in self._scheduler.take_memory_ops():
            if isinstance(op, Remove):
                done = executor.remove(op.slot, op.position)
            elif isinstance(op, Copy):
                done = op.source not in lost and executor.copy(op.source, op.slot, op.n)
            elif isinstance(op, Load):
                done = op.key in self._saved and executor.load(self._saved[op.key], op.slot, op.n)
            elif isinstance(op, Save):
                self._save(executor, op, op.slot in lost)
                continue
            else:
                self._forget(op.key)
                continue
            if not done:
                lost.add(op.slot)
                self._scheduler.recompute(op.slot)
            elif not isinstance(op, Remove):
                lost.discard(op.slot)
        return not lost

    def _save(self, executor: Executor, op: Save, is_lost: bool) -> None:
        saved = None if is_lost else executor.save(op.slot, op.max_bytes)
        self._scheduler.cache.saved(op.key, None if saved is None else saved.n_bytes)
        if saved is not None:
            self._saved[op.key] = saved

    def _forget(self, key: int) -> None:
        saved = self._saved.pop(key, None)
        if saved is not None:
            saved.close()

    def check_integrity(self, executor: Executor) -> None:
        """Raises AssertionError if a sequence has other cells than the scheduler says. Between steps."""
        self.apply(executor)
        expected = self._scheduler.n_cells_by_slot()
        found = {slot: executor.sequence_end(slot) for slot in expected}
        assert found == expected, f"cells by slot: {found}, expected {expected}"

    def close(self) -> None:
        """Frees the saved sequences."""
        for key in list(self._saved):
            self._forget(key)

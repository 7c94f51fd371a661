"""Performs the scheduler's changes to KV cells on an executor, and owns the sequences saved in host memory."""

from __future__ import annotations

from llamapipe.engine.scheduler.batch_plan import Copy, Load, Remove, Save, Shift
from llamapipe.engine.scheduler.request import Request
from llamapipe.engine.scheduler.scheduler import Scheduler
from llamapipe.engine.worker.executor import Executor, Saved

_ANY_SIZE = 2**62


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
        for op in self._scheduler.cache.take_memory_ops():
            if isinstance(op, Remove):
                done = executor.remove(op.slot, op.position)
            elif isinstance(op, Shift):
                done = op.slot not in lost and executor.shift(op.slot, op.begin, op.end)
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
            elif not isinstance(op, (Remove, Shift)):
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

    def snapshot(self, executor: Executor, request: Request) -> tuple[int, bytes]:
        """How many cells a request has, in a slot or saved, and their bytes. Between steps."""
        self.apply(executor)
        kept = request.saved_cells
        if kept is not None and kept.key in self._saved:
            return kept.n, self._saved[kept.key].to_bytes()
        if request.slot < 0 or request.n_past == 0 or not request.uses_cache:
            return 0, b""
        saved = executor.save(request.slot, _ANY_SIZE)
        if saved is None:
            return 0, b""
        try:
            return request.n_past, saved.to_bytes()
        finally:
            saved.close()

    def restore(self, executor: Executor, request: Request, n: int, state: bytes) -> None:
        """Saves the first ``n`` cells of a request without a slot, if the budget allows that."""
        saved = executor.restore(state)
        key = self._scheduler.cache.restore(request, n, saved.n_bytes)
        if key is None:
            saved.close()
        else:
            self._saved[key] = saved

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

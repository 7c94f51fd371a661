"""Decides which models end to make room for another.

Open it to change that choice, or the error for a model that cannot fit. Pure: models are numbers here, without
processes or time. ``pool`` acts on the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llamapipe._messages import size_text


@dataclass(frozen=True)
class Memory:
    """Bytes of system memory and of the GPUs' own memory."""

    n_bytes: int = 0
    gpu_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.n_bytes or self.gpu_bytes)

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.n_bytes + other.n_bytes, self.gpu_bytes + other.gpu_bytes)

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.n_bytes - other.n_bytes, self.gpu_bytes - other.gpu_bytes)


def total(parts: Iterable[Memory]) -> Memory:
    """Return the sum."""
    return sum(parts, Memory())


class Tenure(NamedTuple):
    """A model that holds memory. ``may_end``: it may end now for another model; see ``PooledModel.patience_s``."""

    memory: Memory
    used_at: float
    may_end: bool


@dataclass(frozen=True)
class Budget:
    """The memory that all models may take together. None: no limit."""

    n_bytes: int | None = None
    gpu_bytes: int | None = None

    def missing(self, memory: Memory) -> Memory:
        """Return the part of ``memory`` that exceeds the budget."""
        over = 0 if self.n_bytes is None else memory.n_bytes - self.n_bytes
        over_of_gpus = 0 if self.gpu_bytes is None else memory.gpu_bytes - self.gpu_bytes
        return Memory(max(over, 0), max(over_of_gpus, 0))

    def fits(self, memory: Memory) -> bool:
        """Return whether ``memory`` is within the budget."""
        return not self.missing(memory)

    def most_bytes(self, pinned: Memory) -> float:
        """Return the maximum bytes of system memory that one model may take beside the pinned models."""
        return math.inf if self.n_bytes is None else self.n_bytes - pinned.n_bytes

    def refusal(self, needed: Memory, pinned: Memory) -> str | None:
        """Return why a model can never be loaded; None if it can.

        ``needed``: the model's memory. ``pinned``: the memory of other models that never end for another model.
        """
        missing = self.missing(needed + pinned)
        if missing.n_bytes:
            return (
                f"it needs {size_text(needed.n_bytes)}, and {size_text(self.n_bytes or 0)} are allowed"
                f"{_pinned_part(pinned.n_bytes)}; raise --memory, or give it a smaller n_ctx or n_seq_max"
            )
        if missing.gpu_bytes:
            return (
                f"its layers on GPUs need {size_text(needed.gpu_bytes)}, and models may take "
                f"{size_text(self.gpu_bytes or 0)} of the memory that GPUs had free{_pinned_part(pinned.gpu_bytes)}; "
                "give it a smaller n_gpu_layers, n_ctx or n_seq_max"
            )
        return None

    def choose(self, needed: Memory, there: Sequence[Tenure]) -> list[int] | None:
        """Choose models to end so that ``needed`` fits beside the rest.

        Returns their indices in ``there``, the least recently used first. Returns None if no choice makes room.
        """
        taken = total(tenure.memory for tenure in there) + needed
        chosen = []
        for i in sorted(range(len(there)), key=lambda i: there[i].used_at):
            missing, held = self.missing(taken), there[i].memory
            helps = (missing.n_bytes and held.n_bytes) or (missing.gpu_bytes and held.gpu_bytes)
            if helps and there[i].may_end:
                chosen.append(i)
                taken -= held
        return chosen if self.fits(taken) else None


def _pinned_part(n_bytes: int) -> str:
    return f", of which pinned models have {size_text(n_bytes)}" if n_bytes else ""

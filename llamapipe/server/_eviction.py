"""Which models end, so that another one has memory. Open it to change that, or what a model that cannot fit is told.

Pure: models are numbers here, without processes or time. ``pool`` acts on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamapipe._messages import size_text


class Tenure(NamedTuple):
    """A model that has memory. ``may_end``: it is loaded and not pinned, and idle if that matters."""

    n_bytes: int
    used_at: float
    may_end: bool
    gpu_bytes: int = 0


def choose(
    needed: int,
    budget: int | None,
    there: Sequence[Tenure],
    gpu_needed: int = 0,
    gpu_budget: int | None = None,
) -> list[int] | None:
    """The places of the models to end, so that ``needed`` bytes fit beside the rest; None: no choice makes room.

    The same for the memory of GPUs. The least recently used first, no more than needed.
    """
    missing = gpu_missing = 0
    if budget is not None:
        missing = sum(tenure.n_bytes for tenure in there) + needed - budget
    if gpu_budget is not None:
        gpu_missing = sum(tenure.gpu_bytes for tenure in there) + gpu_needed - gpu_budget
    chosen = []
    for i in sorted(range(len(there)), key=lambda i: there[i].used_at):
        helps = (missing > 0 and there[i].n_bytes > 0) or (gpu_missing > 0 and there[i].gpu_bytes > 0)
        if helps and there[i].may_end:
            chosen.append(i)
            missing -= there[i].n_bytes
            gpu_missing -= there[i].gpu_bytes
    return chosen if missing <= 0 and gpu_missing <= 0 else None


def refusal(needed: int, budget: int | None, pinned: int) -> str | None:
    """Why a model can never be loaded; None: it can. ``pinned``: bytes of models that are not ended for another."""
    if budget is None or needed + pinned <= budget:
        return None
    return (
        f"it needs {size_text(needed)}, and {size_text(budget)} are allowed{_pinned_part(pinned)}; raise --memory, or "
        "give it a smaller n_ctx or n_seq_max"
    )


def gpu_refusal(needed: int, budget: int | None, pinned: int) -> str | None:
    """The same for the memory of GPUs."""
    if budget is None or needed + pinned <= budget:
        return None
    return (
        f"its layers on GPUs need {size_text(needed)}, and models may take {size_text(budget)} of the memory that GPUs "
        f"had free{_pinned_part(pinned)}; give it a smaller n_gpu_layers, n_ctx or n_seq_max"
    )


def _pinned_part(pinned: int) -> str:
    return f", of which pinned models have {size_text(pinned)}" if pinned else ""

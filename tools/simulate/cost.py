"""How long a step takes: a linear model of what it computes, fitted to the steps of a real engine.

The model is a sum with weights that are not negative. A step has a constant, another one where its plan does not repeat
the one before it, and a time for each output row, each prompt, each copy of cells and each copied cell. llama.cpp cuts
a step into passes. A pass has a constant, a time for its tokens (linear between some numbers of them, because kernels
differ for few and for many rows), and a time for the KV cells that its tokens attend to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamapipe.engine.scheduler.batch_plan import BatchPlan

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of tokens between which a pass is linear
_MOST_TOKENS = 4096  # of a pass
_N_FITS = 8
Rows = npt.NDArray[np.float64]


class Pass(NamedTuple):
    """One ubatch: ``n_tokens`` of each of ``n_seqs`` sequences, which attend to ``n_cells`` KV cells in all."""

    n_seqs: int
    n_tokens: int
    n_cells: int


class Load(NamedTuple):
    """What a step computes. ``repeats``: it has the entries of the step before it, one position further.

    ``n_copies``: copies of sequences to other slots, to host memory and back, with ``n_copied`` cells in all.
    """

    repeats: bool
    passes: tuple[Pass, ...]
    n_outputs: int
    n_prompts: int
    n_copies: int = 0
    n_copied: int = 0

    def repeated(self, n: int = 1) -> Load:
        """The load of the ``n``-th repetition of this step."""
        passes = tuple(Pass(p.n_seqs, 1, p.n_cells + n * p.n_seqs) for p in self.passes)
        return Load(True, passes, self.n_outputs, 0)


def load_of(plan: BatchPlan, n_ubatch: int, n_copies: int = 0, n_copied: int = 0) -> Load:
    """The load of a plan that does not repeat the one before it."""
    i = plan.n_decode + len(plan.padding)
    parts = [(slot, first, 1) for slot, first in zip(plan.seq_ids[:i], plan.positions[:i], strict=True)]
    for _, n in plan.scheduled[plan.n_decode :]:
        parts.append((plan.seq_ids[i], plan.positions[i], n))
        i += n
    n_prompts = len(plan.scheduled) - plan.n_decode
    return Load(False, cut(parts, n_ubatch), len(plan.rows), n_prompts, n_copies, n_copied)


def cut(parts: list[tuple[int, int, int]], n_ubatch: int) -> tuple[Pass, ...]:
    """The passes of a step's parts: slot, first position and number of tokens of each, in the order of the batch.

    As llama.cpp does it for per-sequence KV: equally long pieces of sequences whose ids follow each other.
    """
    passes = []
    while parts:
        last = parts[0][0] - 1
        taken, length = 0, n_ubatch
        for slot, _, n in parts:
            if slot == last + 1 and taken < n_ubatch:
                last, taken, length = slot, taken + 1, min(length, n)
        length = min(length, max(n_ubatch // taken, 1))
        first, n_cells, left = parts[0][0], 0, []
        for slot, position, n in parts:
            if slot != first or slot > last:
                left.append((slot, position, n))
                continue
            first += 1
            n_cells += length * position + length * (length + 1) // 2
            if n > length:
                left.append((slot, position + length, n - length))
        passes.append(Pass(taken, length, n_cells))
        parts = left
    return tuple(passes)


@dataclass(frozen=True)
class StepCost:
    """The weights, in seconds. ``tokens_s``: of each token of a pass up to the first knot, from there to the next ...

    ``cell_s``: of each cell that tokens of a pass with one token a sequence attend to; ``prompt_cell_s``: of others.
    """

    step_s: float
    plan_s: float
    output_s: float
    prompt_s: float
    copy_s: float
    copied_s: float
    pass_s: float
    tokens_s: tuple[float, ...]
    cell_s: float
    prompt_cell_s: float

    def seconds(self, load: Load) -> float:
        """The time of a step."""
        repeats, passes, n_outputs, n_prompts, n_copies, n_copied = load
        time_s = self.step_s + self.output_s * n_outputs
        if not repeats:
            time_s += (
                self.plan_s + self.prompt_s * n_prompts + self.copy_s * n_copies + self.copied_s * n_copied
            )
        table_s = self._passes_s
        for n_seqs, n_tokens, n_cells in passes:
            time_s += table_s[n_seqs * n_tokens]
            time_s += (self.cell_s if n_tokens == 1 else self.prompt_cell_s) * n_cells
        return time_s

    def repeated_s(self, load: Load) -> float:
        """By how much each repetition of a step takes longer than the one before it."""
        return self.cell_s * sum(p.n_seqs for p in load.passes)

    @cached_property
    def _passes_s(self) -> list[float]:
        """The time of a pass by its number of tokens, without cells."""
        hinges = _hinges(np.arange(_MOST_TOKENS + 1))
        return [self.pass_s + float(time_s) for time_s in hinges @ np.array(self.tokens_s)]

    @classmethod
    def fit(cls, loads: Sequence[Load], seconds: Sequence[float]) -> StepCost:
        """The weights with the least squares of errors relative to the fitted time. Raises ValueError for few steps.

        Errors relative to the measured time would favour weights that are too small: a step that took too long counts
        less than one that took too little. So the fit is repeated with the times that the one before it gave.
        """
        columns = _columns(loads)
        if len(loads) < 10 * columns.shape[1]:
            raise ValueError(f"{len(loads)} steps are too few to fit a step's time; record a longer run")
        times = fitted = np.array(seconds)
        for _ in range(_N_FITS):
            weights = _non_negative(columns / fitted[:, None], times / fitted)
            fitted = np.maximum(columns @ weights, 1e-9)
        step, plan, output, prompt, copy, copied, each_pass, *tokens, cell, prompt_cell = map(float, weights)
        return cls(step, plan, output, prompt, copy, copied, each_pass, tuple(tokens), cell, prompt_cell)


def _columns(loads: Iterable[Load]) -> Rows:
    """A row for each step, with what each weight is multiplied by."""
    rows = []
    knots = _hinges(np.arange(_MOST_TOKENS + 1))
    for load in loads:
        row = np.zeros(9 + len(_KNOTS))
        row[:7] = (
            1,
            not load.repeats,
            load.n_outputs,
            load.n_prompts,
            load.n_copies,
            load.n_copied,
            len(load.passes),
        )
        for n_seqs, n_tokens, n_cells in load.passes:
            row[7:-2] += knots[n_seqs * n_tokens]
            row[-2 if n_tokens == 1 else -1] += n_cells
        rows.append(row)
    return np.array(rows).reshape(len(rows), 9 + len(_KNOTS))


def _hinges(n: npt.NDArray[np.generic]) -> Rows:
    """How much of each interval between knots is below ``n``."""
    lower = np.array((0, *_KNOTS[:-1]))
    upper = np.array((*_KNOTS[:-1], np.inf))
    below: Rows = np.clip(n[:, None].astype(np.float64), lower, upper) - lower
    return below


def _non_negative(rows: Rows, wanted: Rows) -> Rows:
    """Least squares with weights that are not negative (the active sets of Lawson and Hanson, 1974)."""
    scale = np.sqrt((rows**2).sum(0))
    scale[scale == 0] = 1
    gram = (rows / scale).T @ (rows / scale)
    target = (rows / scale).T @ wanted
    weights, is_used = np.zeros(len(target)), np.zeros(len(target), bool)
    for _ in range(10 * len(target)):
        gain = np.where(is_used, 0.0, target - gram @ weights)
        if gain.max() <= 1e-9 * np.abs(target).max():
            break
        is_used[gain.argmax()] = True
        while is_used.any():
            best = np.zeros(len(target))
            best[is_used] = np.linalg.lstsq(gram[np.ix_(is_used, is_used)], target[is_used], rcond=None)[0]
            below = is_used & (best <= 0)
            if not below.any():
                weights = best
                break
            # As far towards the best weights as none becomes negative; the first that would is not used.
            part = np.where(below, weights / np.maximum(weights - best, 1e-300), np.inf)
            weights = np.maximum(weights + part.min() * (best - weights), 0.0)
            weights[part.argmin()] = 0.0
            is_used &= weights > 0
    found: Rows = weights / scale
    return found

"""The cost model: predicts the time of a step from what it computes. Fitted to the steps of a real engine.

The model is linear, with weights that are not negative. A step costs a constant, another constant if its plan does
not repeat the one before it, and a time for each output row, each prompt, each copy of cells and each copied cell.
llama.cpp cuts a step into passes, one for each ubatch. A pass costs a constant, a time for its tokens, and a time for
the KV cells that they attend to. The time for tokens is piecewise linear, because kernels differ for few and for many
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamapipe._engine.policy.core import BatchPlan

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of tokens between which the time of a pass is linear
_MOST_TOKENS = 4096  # in a pass
_N_FITS = 8
Rows = npt.NDArray[np.float64]


class TooLittleDataError(ValueError):
    """There is too little data for a result; the message says what to change."""


class Pass(NamedTuple):
    """One ubatch: ``n_tokens`` of each of ``n_seqs`` sequences. They attend to ``n_cells`` KV cells in total."""

    n_seqs: int
    n_tokens: int
    n_cells: int


class Load(NamedTuple):
    """What a step computes. ``repeats``: its entries are those of the previous step, one position further.

    ``n_copies``: copies of sequences to other slots, to host memory and back, with ``n_copied`` cells in total.
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
    """Cuts a step into passes. ``parts``: slot, first position and number of tokens of each, in the order of the batch.

    As llama.cpp does for per-sequence KV: a pass has equally many tokens of sequences with consecutive ids.
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
    """The weights, in seconds.

    ``tokens_s``: for each token of a pass, by the interval between knots that it is in. ``cell_s``: for each attended
    cell in passes with one token per sequence; ``prompt_cell_s``: in other passes.
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
        """How much longer each repetition of a step takes than the one before it."""
        return self.cell_s * sum(p.n_seqs for p in load.passes)

    @cached_property
    def _passes_s(self) -> list[float]:
        """The time of a pass by its number of tokens, without cells."""
        hinges = _hinges(np.arange(_MOST_TOKENS + 1))
        return [self.pass_s + float(time_s) for time_s in hinges @ np.array(self.tokens_s)]

    @classmethod
    def fit(cls, loads: Sequence[Load], seconds: Sequence[float]) -> StepCost:
        """Fits the weights by least squares of errors relative to the fitted time. Raises TooLittleDataError.

        Errors relative to the measured time would favour weights that are too small: an unusually slow step would count
        less than an unusually fast one. So the fit is repeated, each time relative to the previous fit's times.
        """
        columns = _columns(loads)
        if len(loads) < 10 * columns.shape[1]:
            raise TooLittleDataError(
                f"{len(loads)} steps are too few to fit a step's time; record a longer run"
            )
        times = fitted = np.array(seconds)
        for _ in range(_N_FITS):
            weights = _non_negative(columns / fitted[:, None], times / fitted)
            fitted = np.maximum(columns @ weights, 1e-9)
        step, plan, output, prompt, copy, copied, each_pass, *tokens, cell, prompt_cell = map(float, weights)
        return cls(step, plan, output, prompt, copy, copied, each_pass, tuple(tokens), cell, prompt_cell)


def _columns(loads: Iterable[Load]) -> Rows:
    """The matrix of the fit: a row for each step, with the factor of each weight."""
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
    """The length of each interval between knots that lies below ``n``."""
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
            # Move towards the best weights until the first one reaches zero; that one is no longer used.
            part = np.where(below, weights / np.maximum(weights - best, 1e-300), np.inf)
            weights = np.maximum(weights + part.min() * (best - weights), 0.0)
            weights[part.argmin()] = 0.0
            is_used &= weights > 0
    unscaled: Rows = weights / scale
    return unscaled

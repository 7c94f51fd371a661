"""How long a step takes: a linear model of what it computes, fitted to the steps of a real engine.

The model is a sum with non-negative weights: a constant, the requests that decode (piecewise linear, because kernels
differ for few and for many rows), the KV cells that they attend to, the prompt tokens, the cells that those attend to,
and a constant for a step with prompt tokens, which may be a pass of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamapipe.engine.scheduler.batch_plan import BatchPlan

_KNOTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of decoding requests between which the time is linear
_N_OTHER = 4
_MOST_DECODING = 1024
Rows = npt.NDArray[np.float64]


class Load(NamedTuple):
    """What a step computes: decoding requests, KV cells they attend to, prompt tokens, and cells these attend to."""

    n_decode: int
    n_cells: int
    n_prompt: int
    n_prompt_cells: int


def load_of(plan: BatchPlan) -> Load:
    """The load of a plan that does not repeat the one before it."""
    n_padding = len(plan.padding)
    n_decode = plan.n_decode + n_padding
    decoded, prompts = plan.positions[:n_decode], plan.positions[n_decode:]
    return Load(n_decode, sum(decoded) + n_decode, len(prompts), sum(prompts) + len(prompts))


@dataclass(frozen=True)
class StepCost:
    """The weights, in seconds. ``decode``: at each of the knots, the time of decoding requests alone."""

    constant_s: float
    decode_s: tuple[float, ...]
    cell_s: float
    prompt_s: float
    prompt_token_s: float
    prompt_cell_s: float

    def seconds(self, load: Load) -> float:
        """The time of a step."""
        n_decode, n_cells, n_prompt, n_prompt_cells = load
        time_s = self._without_prompts_s[n_decode] + self.cell_s * n_cells
        if n_prompt:
            time_s += self.prompt_s + self.prompt_token_s * n_prompt + self.prompt_cell_s * n_prompt_cells
        return time_s

    @cached_property
    def _without_prompts_s(self) -> list[float]:
        """The time of a step without prompts, by its number of decoding requests."""
        hinges = _hinges(np.arange(_MOST_DECODING + 1))
        return [self.constant_s + float(time_s) for time_s in hinges @ np.array(self.decode_s)]

    def save(self, path: Path) -> None:
        """Writes JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> StepCost:
        """Reads what ``save`` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "decode_s": tuple(fields["decode_s"])})

    @classmethod
    def fit(cls, loads: Sequence[Load], seconds: Sequence[float]) -> StepCost:
        """The weights with the least squares of relative errors. Raises ValueError for too few steps."""
        if len(loads) < 10 * (len(_KNOTS) + _N_OTHER):
            raise ValueError(f"{len(loads)} steps are too few to fit a step's time; record a longer run")
        given = np.array(loads, np.float64)
        has_prompt = (given[:, 2] > 0).astype(np.float64)
        columns = [
            np.ones(len(given)),
            *_hinges(given[:, 0]).T,
            given[:, 1],
            has_prompt,
            given[:, 2],
            given[:, 3],
        ]
        times = np.array(seconds)
        weights = _non_negative(np.stack(columns, 1) / times[:, None], np.ones(len(times)))
        n = len(_KNOTS)
        return cls(weights[0], tuple(weights[1 : n + 1]), *weights[n + 1 :])


def _hinges(n: npt.NDArray[np.generic]) -> Rows:
    """How much of each interval between knots is below ``n``."""
    lower = np.array((0, *_KNOTS[:-1]))
    upper = np.array((*_KNOTS[:-1], np.inf))
    below: Rows = np.clip(n[:, None].astype(np.float64), lower, upper) - lower
    return below


def _non_negative(rows: Rows, wanted: Rows) -> list[float]:
    """Least squares with weights that are not negative: coordinate descent on the normal equations."""
    scale = np.sqrt((rows**2).sum(0))
    scale[scale == 0] = 1
    gram = (rows / scale).T @ (rows / scale)
    target = (rows / scale).T @ wanted
    weights = np.zeros(len(target))
    for _ in range(20_000):
        before = weights.copy()
        for i in range(len(weights)):
            if gram[i, i]:
                weights[i] = max(0.0, weights[i] + (target[i] - gram[i] @ weights) / gram[i, i])
        if np.abs(weights - before).max() < 1e-12:
            break
    return [float(weight) for weight in weights / scale]

"""Decides whether decoding requests are split into two micro-batches whose steps alternate."""

from __future__ import annotations

from time import perf_counter

from llamapipe.engine.worker.executor import Executor

_WINDOW = 32  # steps between two decisions
_LEAST_GAIN = 1.1  # predicted, to try
_KEEP_GAIN = 1.03  # measured, to stay
_LONGEST_PAUSE = 64  # windows before another try after one that did not pay


class MicroBatchSwitch:
    """Splits while that is faster: tried when the formula of the design promises a gain, kept when one is measured.

    With T the time a step computes and b everything else on the way to the next, two alternating cohorts gain
    (T + b) / max(2T, b, T + b/2). A window that brings no more tokens a second than the one before it ends the try,
    and the next one waits longer.
    """

    def __init__(self, executor: Executor) -> None:
        self.n = 1  # micro-batches
        self._executor = executor
        self._able = executor.overlaps and executor.depth > 1
        self._n_steps = self._n_tokens = 0
        self._began = perf_counter()
        self._compute_s = 0.0
        self._before = 0.0  # tokens a second before the try
        self._pause, self._n_paused = 1, 0

    def step(self, n_tokens: int) -> bool:
        """Counts a step that gave ``n_tokens``; True when ``n`` has changed."""
        if not self._able:
            return False
        self._n_steps += 1
        self._n_tokens += n_tokens
        if self._n_steps < _WINDOW:
            return False
        now, compute_s = perf_counter(), self._executor.compute_s()
        wall_s, busy_s = now - self._began, compute_s - self._compute_s
        speed, before = self._n_tokens / wall_s, self.n
        if self._n_tokens >= 2 * _WINDOW:  # two requests a step, or there is nothing to split
            self.n = self._choose(busy_s / _WINDOW, max(wall_s - busy_s, 0.0) / _WINDOW, speed)
        else:
            self.n = 1
        self._n_steps = self._n_tokens = 0
        self._began, self._compute_s = now, compute_s
        return self.n != before

    def _choose(self, compute_s: float, other_s: float, speed: float) -> int:
        if self.n == 1:
            self._n_paused += 1
            if self._n_paused < self._pause or gain(compute_s, other_s) < _LEAST_GAIN:
                return 1
            self._before = speed
            return 2
        if speed >= _KEEP_GAIN * self._before:
            self._before = speed / _KEEP_GAIN  # from now on it need only stay as it is
            self._pause = 1
            return 2
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._n_paused = 0
        return 1


def gain(compute_s: float, other_s: float) -> float:
    """How many times faster two micro-batches are, by the design's formula."""
    slowest = max(2 * compute_s, other_s, compute_s + other_s / 2)
    return (compute_s + other_s) / slowest if slowest > 0 else 1.0

"""Decides whether decoding requests are split into two micro-batches: one is computed while the other is sampled.

Open this file to change when an engine on a device tries this, and when it stops.

The principle: a formula over measured times predicts the gain, a try measures it, and only a measured gain counts. A
try that gains nothing doubles the pause before the next one.
"""

from __future__ import annotations

from time import perf_counter

from llamapipe._engine.runtime.executor import Executor

_WINDOW = 32  # steps between two decisions
_LEAST_GAIN = 1.1  # predicted gain that starts a try
_KEEP_GAIN = 1.03  # measured gain that keeps two micro-batches
_LONGEST_PAUSE = 64  # windows between two tries


class MicroBatchSwitch:
    """Splits requests while that is faster: tries it when the formula predicts a gain, keeps it if a gain is measured.

    Let T be the time to compute a step, and b the time of everything else until the next step is launched. Two
    alternating micro-batches are (T + b) / max(2T, b, T + b/2) times as fast as one. A try fails unless a window of
    steps has 3 % more tokens per second than the window before the try. Each failed try doubles the pause before the
    next.

    ``n``: the current number of micro-batches.
    """

    def __init__(self, executor: Executor) -> None:
        self.n = 1
        self._executor = executor
        self._able = executor.overlaps and executor.depth > 1
        self._n_steps = self._n_tokens = 0
        self._began = perf_counter()
        self._compute_s = 0.0
        self._before = 0.0  # tokens per second before the try
        self._pause, self._n_paused = 1, 0

    def observe_step(self, n_tokens: int) -> bool:
        """Count a step that sampled ``n_tokens``. Return whether ``n`` has changed."""
        if not self._able:
            return False
        self._n_steps += 1
        self._n_tokens += n_tokens
        if self._n_steps < _WINDOW:
            return False
        now, compute_s = perf_counter(), self._executor.compute_s()
        wall_s, busy_s = now - self._began, compute_s - self._compute_s
        speed, before = self._n_tokens / wall_s, self.n
        if self._n_tokens >= 2 * _WINDOW:  # at least two requests per step; one request cannot be split
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
            self._before = speed / _KEEP_GAIN  # from now on the speed only has to stay the same
            self._pause = 1
            return 2
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._n_paused = 0
        return 1


def gain(compute_s: float, other_s: float) -> float:
    """Return the predicted speed of two micro-batches as a multiple of that of one. Arguments: T and b in seconds."""
    slowest = max(2 * compute_s, other_s, compute_s + other_s / 2)
    return (compute_s + other_s) / slowest if slowest > 0 else 1.0

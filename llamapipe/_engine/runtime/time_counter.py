"""A histogram for durations of steps and of waits in the queue.

Open this file to change the bounds of the histograms in ``EngineStats``.
"""

from __future__ import annotations

from bisect import bisect_left

from llamapipe.results import TimeHistogram

# Powers of two in milliseconds, from 0.25 ms to 131 s.
BOUNDS_S = tuple(2.0**i / 1000 for i in range(-2, 18))


class TimeCounter:
    """A histogram of durations in seconds. One thread adds to it; any thread may copy it."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def __repr__(self) -> str:
        return f"<TimeCounter n={sum(self._counts)}>"

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    def copy(self) -> TimeHistogram:
        return TimeHistogram(BOUNDS_S, tuple(self._counts), self._total_s)

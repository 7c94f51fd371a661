"""Decides how many threads compute, from the core time that they got. Pure: no clock, no files, no threads.

llama.cpp's threads wait for each other after every operation by spinning. So if other work takes one of their cores for
a part D of the time, all of them stand still for about that part, and a step with n threads is as fast as 1 - D of what
it would be. With one thread less no thread has to wait. Hence the rule: fewer threads as soon as the run delay
says that others want the cores, more again when cores are idle.
"""

from __future__ import annotations

import math

_TOLERATED = (
    0.6  # of one thread's time, for all n of them: D above 0.6 / n costs more than the n-th thread brings
)
_NOISE = 0.03  # of each thread's time, on a quiet machine
_PATIENCE_S = 0.008  # run delay above the tolerated one: two time slices
_ROUNDING = 0.2  # of a core: idle time that counts as a whole core, to start using it
_HALF = 0.5  # of a core: idle time that counts as a whole core, to keep using it
_SHORT_S = 0.5  # an increase that lasts less was wrong
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 6.4  # before an increase
_N_STEPS = 8  # of a large number of threads: each number has a pool of its own


class RunDelayPolicy:
    """Chooses ``n``, at most ``n_max`` and ``limit``, from run delays and idle cores. Times are in seconds."""

    def __init__(self, n_max: int) -> None:
        self.n_max = self.limit = self.n = n_max
        self._excess_s = 0.0  # run delay above the tolerated one, and the time since it was last zero
        self._delay_s = self._watched_s = 0.0
        self._increased_s = -math.inf
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s = -math.inf

    def __repr__(self) -> str:
        return f"<RunDelayPolicy n={self.n} of {self.n_max} limit={self.limit}>"

    def set_limit(self, n: int) -> None:
        """At most ``n`` threads from now on, at once; more than before only when cores turn out to be idle."""
        self.limit = max(n, 1)
        self._use(min(self.n, self.limit))

    def computed(self, now_s: float, seconds: float, delay_s: float) -> None:
        """``n`` threads have been computing for ``seconds``, and waited for cores for ``delay_s``, all together."""
        if self.n == 1:
            return
        tolerated = max(_TOLERATED / self.n, _NOISE * self.n) * seconds
        self._excess_s = max(self._excess_s + delay_s - tolerated, 0.0)
        if self._excess_s == 0.0:
            self._delay_s = self._watched_s = 0.0
            return
        self._delay_s += delay_s
        self._watched_s += seconds
        if self._excess_s >= _PATIENCE_S:
            self._decrease(now_s, round(self._delay_s / self._watched_s))

    def _decrease(self, now_s: float, n_missing: int) -> None:
        if now_s - self._increased_s < _SHORT_S:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s = now_s + self._pause_s
        self._use(self.n - max(n_missing, 1))

    def free(self, now_s: float, n_cores: float, was_idle: bool = False) -> None:
        """``n_cores`` were idle or ran these threads, since the last change. ``was_idle``: the threads mostly slept."""
        more, fewer = math.floor(n_cores + _ROUNDING), math.floor(n_cores + _HALF)
        if more > self.n:
            if now_s >= self._paused_until_s and self._use(min(more, self.limit)):
                self._increased_s = now_s
        elif was_idle and fewer < self.n:  # while they compute, the run delay knows better
            self._use(fewer)

    def _use(self, n: int) -> bool:
        """Changes ``n`` to the largest number in use that is not above it; whether it did."""
        before, n = self.n, max(n, 1)
        if 1 < n < self.n_max:
            step = -(-self.n_max // _N_STEPS)
            n = max(n // step * step, 1)
        self.n = n
        if n != before:
            self._excess_s = self._delay_s = self._watched_s = 0.0
        return n != before

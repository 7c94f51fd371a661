"""How many threads should compute, decided from step times alone: for systems that tell nothing of their cores. Pure.

A step is compared with the last ones of the same number of tokens. When they take far longer than they once did, one
thread less is tried at once; from time to time, one less or one more is tried in any case. A try lasts a few like steps
and is undone unless they were faster.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_N_LIKE = 8  # steps of one number of tokens to judge by
_N_TRIED = 64  # steps of any kind after which a try is given up
_SLOW = 1.8  # times the usual step time: fewer threads are tried
_FASTER = 0.97  # of the step time before: a try is kept
_FORGET = 1.002  # the usual time of a step rises by this with every one, so that a longer context does not look slow
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0  # between tries


class StepTimePolicy:
    """Chooses ``n``, at most ``n_max`` and ``limit``, from the times of steps. Times are seconds of any clock."""

    def __init__(self, n_max: int) -> None:
        self.n_max = self.limit = self.n = n_max
        self._recent: dict[int, deque[float]] = {}  # by number of tokens, at ``n`` threads
        self._usual_s: dict[tuple[int, int], float] = {}  # by threads and tokens
        self._tried_from: int | None = None  # the number of threads before the try
        self._before_s: dict[int, float] = {}  # by number of tokens, before the try
        self._n_tried = 0
        self._tries_more = True  # what was tried last
        self._was_slow = False  # whether slow steps were the reason
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until_s = -math.inf

    def __repr__(self) -> str:
        return f"<StepTimePolicy n={self.n} of {self.n_max} limit={self.limit}>"

    def set_limit(self, n: int) -> None:
        """At most ``n`` threads from now on, at once; more than before only by tries."""
        self.limit = max(n, 1)
        if self.n > self.limit:
            self._tried_from = None
            self._use(self.limit)

    def stepped(self, now_s: float, n_tokens: int, seconds: float) -> None:
        """A step of ``n_tokens`` took ``seconds`` with ``n`` threads."""
        recent = self._recent.setdefault(n_tokens, deque(maxlen=_N_LIKE))
        recent.append(seconds)
        if self._tried_from is not None:
            self._judge(now_s, n_tokens, recent)
            return
        if len(recent) < _N_LIKE:
            return
        typical_s = _median(recent)
        usual_s = self._usual_s.get((self.n, n_tokens), typical_s)
        self._usual_s[self.n, n_tokens] = min(usual_s * _FORGET, typical_s)
        is_slow = typical_s > _SLOW * usual_s
        if now_s < self._paused_until_s and (self._was_slow or not is_slow):
            return
        self._was_slow = is_slow
        self._tries_more = self.n < self.limit and not (self._tries_more or is_slow)
        if self._tries_more:
            self._try(self.n + 1)
        elif self.n > 1:
            self._try(self.n - 1)

    def _try(self, n: int) -> None:
        self._tried_from, self._n_tried = self.n, 0
        self._before_s = {n_tokens: _median(times) for n_tokens, times in self._recent.items() if times}
        self._use(n)

    def _judge(self, now_s: float, n_tokens: int, recent: deque[float]) -> None:
        self._n_tried += 1
        before_s = self._before_s.get(n_tokens)
        if before_s is not None and len(recent) == _N_LIKE:
            is_better = _median(recent) < _FASTER * before_s
        elif self._n_tried >= _N_TRIED:
            is_better = False
        else:
            return
        n_before, self._tried_from = self._tried_from, None
        if is_better:
            self._pause_s = _FIRST_PAUSE_S
        else:
            self._use(min(n_before or 1, self.limit))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._paused_until_s = now_s + self._pause_s

    def _use(self, n: int) -> None:
        if n != self.n:
            self.n = n
            self._recent.clear()


def _median(values: Iterable[float]) -> float:
    """As ``statistics.median``, whose module takes some milliseconds to import."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

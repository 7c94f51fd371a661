"""Limits the prompt tokens and scores of a step, so that decoding requests do not wait too long for it."""

from __future__ import annotations

import math

from llamapipe.engine.scheduler.request import UNLIMITED

_MULTIPLE = 64  # tokens; llama.cpp's attention on a CPU works in tiles of this size
_MARGIN = 0.9  # of the limit: times vary, and tokens are sampled and delivered as well
_KEPT = 0.9  # weight of the observations so far at the next one
_LEAST_ROWS = 4  # scored tokens that a step may always have
_FIRST_ROWS = 8  # the limit until their cost is known


class PrefillBudget:
    """Learns from the times of steps what prompt tokens cost. The engine thread.

    A prompt token costs ``a + b * position``: all weights once, and attention to the tokens before it. Both are fitted
    by least squares, in which older observations count less. A scored token also costs a row of logits,
    which may take longer than the token. Its cost is what a step takes beyond its other tokens.

    ``max_itl_s``: the longest time between two tokens of a stream, in seconds; None: no limit. A step always has room
    for 64 prompt tokens and 4 scored tokens, so that prompts and scores always progress.
    """

    def __init__(self, max_itl_s: float | None) -> None:
        self.is_on = max_itl_s is not None
        self._limit_s = _MARGIN * (max_itl_s or 0.0)
        self._decode_s: float | None = None  # of a step without prompts
        self._n = self._x = self._y = self._xx = self._xy = (
            0.0  # weighted sums; x: position, y: seconds a token
        )
        self._n_most = _MULTIPLE // 2  # prompt tokens of the largest step so far
        self._row_s: float | None = None  # seconds a scored token
        self._n_most_rows = _FIRST_ROWS // 2

    def __repr__(self) -> str:
        return f"<PrefillBudget {self.n_tokens(0) if self.is_on else 'unlimited'}>"

    def n_tokens(self, position: int) -> int:
        """The most prompt tokens of a step in which requests decode, if they begin at this position."""
        if not self.is_on:
            return UNLIMITED
        if not self._n:
            return _MULTIPLE  # find out what they cost
        variance = self._xx * self._n - self._x * self._x
        slope_s = (self._xy * self._n - self._x * self._y) / variance if variance > 1e-9 * self._xx else 0.0
        slope_s = max(slope_s, 0.0)
        first_s = max((self._y - slope_s * self._x) / self._n, 0.0) + slope_s * position
        left_s = self._limit_s - (self._decode_s or 0.0)
        if left_s <= 0 or first_s <= 0:
            return _MULTIPLE
        # n tokens take n * (first_s + slope_s * n / 2).
        n = left_s / first_s
        if slope_s > 0:
            n = (math.sqrt(first_s * first_s + 2 * slope_s * left_s) - first_s) / slope_s
        n = min(n, 2 * self._n_most)  # further from what was seen, the fit may be wrong
        return max(int(n) // _MULTIPLE, 1) * _MULTIPLE

    def n_rows(self) -> int:
        """The limit on scored tokens in a step with decoding requests."""
        if not self.is_on:
            return UNLIMITED
        left_s = self._limit_s - (self._decode_s or 0.0)
        n = 2 * self._n_most_rows
        if self._row_s:
            n = min(n, int(left_s / self._row_s))
        return max(n, _LEAST_ROWS)

    def observe(self, n_prompt: int, position: float, seconds: float, n_rows: int = 0) -> None:
        """Learns from the time of a step with decoding requests; ``position``: the mean of its ``n_prompt`` tokens.

        ``n_rows``: how many of the prompt tokens were scored.
        """
        if not self.is_on:
            return
        if n_prompt == 0:
            before_s = seconds if self._decode_s is None else self._decode_s
            self._decode_s = before_s + 0.2 * (seconds - before_s)
            return
        prompt_s = max(seconds - (self._decode_s or 0.0), 0.0)
        if n_rows:
            self._observe_rows(n_rows, n_prompt - n_rows, prompt_s)
            if 2 * n_rows >= n_prompt:
                return
            prompt_s = max(prompt_s - n_rows * (self._row_s or 0.0), prompt_s / 2)
        if n_prompt >= _MULTIPLE // 4:  # fewer say little
            self._n_most = max(self._n_most, n_prompt)
            token_s = prompt_s / n_prompt
            self._n = _KEPT * self._n + 1
            self._x = _KEPT * self._x + position
            self._y = _KEPT * self._y + token_s
            self._xx = _KEPT * self._xx + position * position
            self._xy = _KEPT * self._xy + position * token_s

    def _observe_rows(self, n_rows: int, n_others: int, seconds: float) -> None:
        """Learns what scored tokens cost, from a step with ``n_others`` other prompt tokens."""
        if self._row_s is not None and 3 * n_rows < n_others:  # too few to tell more
            self._row_s = min(self._row_s, seconds / n_rows)
            return
        others_s = n_others * self._y / self._n if self._n else 0.0
        row_s = max(seconds - others_s, 0.0) / n_rows
        self._row_s = row_s if self._row_s is None else _KEPT * self._row_s + (1 - _KEPT) * row_s
        self._n_most_rows = max(self._n_most_rows, n_rows)

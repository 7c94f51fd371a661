"""When a worker that ended is started again."""

from __future__ import annotations


class Backoff:
    """Waits twice as long after each short life of a worker. Pure.

    ``first_s``, ``most_s``: the first and the longest delay. ``long_s``: after a worker that served this long the next
    one starts at once. ``n_attempts``: workers in a row that ended before they were ready, until there is no other.
    """

    def __init__(
        self, first_s: float = 0.5, most_s: float = 30.0, long_s: float = 30.0, n_attempts: int = 5
    ) -> None:
        self.first_s = first_s
        self.most_s = most_s
        self.long_s = long_s
        self.n_attempts = n_attempts
        self._n_short = self._n_failed = 0

    def __repr__(self) -> str:
        return f"<Backoff n_short={self._n_short} n_failed={self._n_failed}>"

    def delay_s(self, served_s: float | None) -> float | None:
        """Seconds until the next start, after a worker that served for ``served_s``; None: it was not ready.

        Returns None if there should be no further attempt.
        """
        self._n_failed = self._n_failed + 1 if served_s is None else 0
        if self._n_failed >= self.n_attempts:
            return None
        if served_s is not None and served_s >= self.long_s:
            self._n_short = 0
            return 0.0
        self._n_short += 1
        return float(min(self.first_s * 2 ** (self._n_short - 1), self.most_s))

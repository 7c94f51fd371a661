"""What every side is asked to do."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """``n`` requests at once, each with a prompt of so many tokens and so many to generate, on so many threads."""

    n: int
    n_prompt: int
    n_generate: int
    n_threads: int

    @property
    def n_timed(self) -> int:
        """How often a round does it: short works more often."""
        return max(256 // (self.n * self.n_generate), 1)

    def warms_up(self, seconds: float) -> bool:
        """Whether a round does it once more before, untimed, where it takes so long.

        A side that has just started finds the other sides' weights in the caches.
        """
        return seconds < 2 * self.n_timed

    @property
    def n_ctx(self) -> int:
        """Cells of one request."""
        return -(-(self.n_prompt + self.n_generate + 8) // 256) * 256

    def prompts(self, salt: int) -> list[list[int]]:
        """Of which no two begin alike, whatever the round; ids that every vocabulary here has."""
        return [
            [300 + (31 * (i + 64 * salt) + 7 * j * (i + 1) + j * j) % 1900 for j in range(self.n_prompt)]
            for i in range(self.n)
        ]

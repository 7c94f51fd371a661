"""The errors for exceeding a constraint's limits, of length and of processor time, and the count of that time.

The code that compiles or follows a constraint adds to ``spent_s`` and calls ``error``.
"""

from __future__ import annotations

from llamapipe.errors import ConstraintError, InvalidRequestError


class TooLongError(InvalidRequestError):
    """A grammar or a schema exceeds its length limit."""


class GrammarBudget:
    """The processor time that the constraint of one prompt may take, compilation included.

    ``limit_s``: the limit in seconds; None for no limit. ``spent_s``: the seconds spent so far.
    """

    __slots__ = ("limit_s", "spent_s")

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.spent_s = 0.0

    def error(self) -> ConstraintError | None:
        """Return the error that must end the request; None while time is left."""
        if self.limit_s is None or self.spent_s <= self.limit_s:
            return None
        return ConstraintError(
            f"the request's constraint has taken {self.spent_s:.1f} s of processor time; grammar_timeout is "
            f"{self.limit_s:g} s: simplify the constraint, or raise grammar_timeout"
        )

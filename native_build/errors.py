"""The one exception of the build."""

from __future__ import annotations


class BuildError(Exception):
    """Something that the person who builds has to put right.

    ``problem`` names the thing, ``fix`` is the command (or the setting) that puts it right.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        fix = self.fix.replace("\n", "\n       ")
        return f"error: {self.problem}\n  fix: {fix}"

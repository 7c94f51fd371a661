"""Defines the exception that the build raises."""

from __future__ import annotations


class BuildError(Exception):
    """A problem that the user has to fix.

    ``problem`` describes the problem; ``fix`` is the command or the setting that solves it.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        fix = self.fix.replace("\n", "\n       ")
        return f"error: {self.problem}\n  fix: {fix}"

"""The compute threads of a process: one budget for all engines that are computing.

llama.cpp's threads wait for each other by spinning, so two engines with a thread for each core stop each other. Here
every engine says when it computes, and learns how many threads it may use while the others compute, too.
"""

from __future__ import annotations

import os

from llamapipe.host.cores import usable_cores
from llamapipe.locks import Lock


class CoreBudget:
    """Divides ``n_cores`` among the members that are computing. Any thread."""

    def __init__(self, n_cores: int) -> None:
        self.n_cores = n_cores
        self._lock = Lock()
        self._computing: list[BudgetMember] = []  # in the order in which they began

    def __repr__(self) -> str:
        return f"<CoreBudget n_cores={self.n_cores} n_computing={len(self._computing)}>"

    def member(self, n_fixed: int | None = None) -> BudgetMember:
        """A member that is not computing yet. ``n_fixed``: it uses this number of threads, whatever its share is."""
        return BudgetMember(self, n_fixed)

    def resize(self, n_cores: int) -> None:
        """Divides another number of cores from now on."""
        with self._lock:
            self.n_cores = n_cores
            self._divide()

    def change(self, member: BudgetMember, is_computing: bool) -> None:
        """Counts a member as computing or not, and tells all others their new shares."""
        with self._lock:
            if member.is_computing == is_computing:
                return
            member.is_computing = is_computing
            if is_computing:
                self._computing.append(member)
            else:
                self._computing.remove(member)
                member.n_allowed = self.n_cores
            self._divide()

    def _divide(self) -> None:
        """Fixed members take theirs; the others get equal parts of what is left, at least one thread each."""
        flexible = [member for member in self._computing if member.n_fixed is None]
        left = self.n_cores - sum(member.n_fixed or 0 for member in self._computing)
        for i, member in enumerate(flexible):
            share = -(-left // (len(flexible) - i))  # rounded up: those that began first get what is over
            member.n_allowed = max(share, 1)
            left -= member.n_allowed


class BudgetMember:
    """One engine's part of a budget. ``n_allowed``: threads it may compute with now; read it without a lock."""

    def __init__(self, budget: CoreBudget, n_fixed: int | None) -> None:
        self.n_allowed = budget.n_cores
        self.n_fixed = n_fixed
        self.is_computing = False
        self._budget = budget

    def enter(self) -> None:
        """It computes from now on."""
        self._budget.change(self, True)

    def leave(self) -> None:
        """It waits for work from now on, or is closed."""
        self._budget.change(self, False)


_budget: CoreBudget | None = None
_making = Lock()


def process_budget() -> CoreBudget:
    """The budget of this process: the cores it may use."""
    global _budget
    with _making:
        if _budget is None:
            _budget = CoreBudget(usable_cores())
        return _budget


def limit_cores(n_cores: int) -> None:
    """Lets this process compute on at most ``n_cores`` of the cores it may use, so that others may use the rest.

    Call it before engines are made. It does not concern engines with a number of threads of their own.
    """
    process_budget().resize(max(min(n_cores, usable_cores()), 1))


def _forget_in_child() -> None:
    """The engines of the parent process do not compute here, and its locks may be held by threads that are gone."""
    global _budget, _making
    _budget, _making = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

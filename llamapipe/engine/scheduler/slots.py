"""Which sequences are free: a new request gets the lowest, which keeps the used ones together."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Slots:
    """The seq_ids ``0 .. n - 1``, each free or taken."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._free = list(range(n))
        heapify(self._free)

    def __repr__(self) -> str:
        return f"<Slots {self.n - len(self._free)}/{self.n} taken>"

    @property
    def n_free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def free(self) -> frozenset[int]:
        """The free ones."""
        return frozenset(self._free)

    def take(self) -> int:
        """The lowest free one; IndexError when none is."""
        return heappop(self._free)

    def take_back(self, slot: int) -> None:
        """Takes this one, which has just been freed."""
        self._free.remove(slot)
        heapify(self._free)

    def give(self, slot: int) -> None:
        """Frees a taken one."""
        heappush(self._free, slot)

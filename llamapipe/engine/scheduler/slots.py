"""The free sequences. A new request gets the lowest one, which keeps the used ones close together."""

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
        """The number of free slots."""
        return len(self._free)

    @property
    def free(self) -> frozenset[int]:
        """The free slots."""
        return frozenset(self._free)

    def take(self) -> int:
        """Takes the lowest free slot. Raises IndexError if there is none."""
        return heappop(self._free)

    def take_back(self, slot: int) -> None:
        """Takes this slot, which is free."""
        self._free.remove(slot)
        heapify(self._free)

    def give(self, slot: int) -> None:
        """Frees a taken slot."""
        heappush(self._free, slot)

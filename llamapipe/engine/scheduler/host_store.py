"""Which sequences are saved in host memory: a budget in bytes, and the least recently used first out. Pure policy."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class Saved(Protocol):
    """An entry. ``n_bytes``: what it takes. ``pinned``: it is kept until it is unpinned."""

    n_bytes: int
    pinned: bool


class HostStore:
    """Saved sequences by key. ``budget``: bytes for all of them, the pinned ones included."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.n_bytes = 0
        self._entries: OrderedDict[int, Saved] = OrderedDict()  # least recently used first

    def __repr__(self) -> str:
        return f"<HostStore n={len(self)} n_bytes={self.n_bytes}/{self.budget}>"

    def __len__(self) -> int:
        return len(self._entries)

    def make_room(self, n_bytes: int) -> list[int] | None:
        """The keys of entries to drop, so that ``n_bytes`` more fit; None if that is impossible."""
        missing = self.n_bytes + n_bytes - self.budget
        if missing <= 0:
            return []
        keys = []
        for key, entry in self._entries.items():
            if not entry.pinned:
                keys.append(key)
                missing -= entry.n_bytes
                if missing <= 0:
                    return keys
        return None

    def add(self, key: int, entry: Saved) -> None:
        """Adds an entry, as the one used last."""
        self._entries[key] = entry
        self.n_bytes += entry.n_bytes

    def resize(self, key: int, n_bytes: int) -> None:
        """Corrects the size of an entry."""
        entry = self._entries[key]
        self.n_bytes += n_bytes - entry.n_bytes
        entry.n_bytes = n_bytes

    def use(self, key: int) -> None:
        """Notes that an entry was used."""
        self._entries.move_to_end(key)

    def drop(self, key: int) -> None:
        """Removes an entry."""
        self.n_bytes -= self._entries.pop(key).n_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError if the bytes are miscounted."""
        assert self.n_bytes == sum(entry.n_bytes for entry in self._entries.values())
        assert self.n_bytes <= self.budget or not self._entries

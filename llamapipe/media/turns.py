"""Decides which client's image or sound is prepared next.

Decoding an image and cutting it up takes up to two seconds and some hundreds of megabytes. So two images are prepared
at a time, but only one of each share. A share's image never waits for the images of a single other share. If several
other shares are busy, the image waits for at most one image of each, however many they have.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from threading import Event

from llamapipe.locks import Lock
from llamapipe.wanted import check_wanted

N_MOST = 2
_LOOK_S = 0.05  # seconds between two checks whether a waiting image is still wanted


class Turns:
    """Admits ``N_MOST`` callers at a time, one per share. Waiting shares are admitted in turn. Any thread."""

    def __init__(self) -> None:
        self._lock = Lock()  # protects the attributes below; held for microseconds
        self._waiting: OrderedDict[Hashable, deque[Event]] = OrderedDict()  # shares in the order of turns
        self._inside: dict[Event, Hashable] = {}

    def __repr__(self) -> str:
        n_waiting = sum(map(len, list(self._waiting.values())))
        return f"<Turns n_inside={len(self._inside)} n_waiting={n_waiting}>"

    @contextmanager
    def turn(self, share: Hashable) -> Iterator[None]:
        """Wait for the share's turn; hold the turn during the block. Raises as ``check_wanted`` does."""
        entered = Event()
        try:
            with self._lock:
                self._waiting.setdefault(share, deque()).append(entered)
                self._admit()
            while not entered.wait(_LOOK_S):
                check_wanted()
            yield
        finally:
            with self._lock:
                line = self._waiting.get(share, deque())
                if entered in line:
                    line.remove(entered)
                if self._inside.pop(entered, None) is not None and line:
                    self._waiting.move_to_end(share)
                self._admit()

    def _admit(self) -> None:
        """Admit waiting callers while there is room. The caller holds the lock."""
        for share in list(self._waiting):
            if not self._waiting[share]:
                del self._waiting[share]
            elif len(self._inside) < N_MOST and share not in self._inside.values():
                entered = self._waiting[share].popleft()
                self._inside[entered] = share
                entered.set()

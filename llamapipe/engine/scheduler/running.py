"""The requests that have a slot: they decode, prefill, wait for a token that is drawn later, or are paused."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from llamapipe.engine.scheduler.request import Request

_by_slot = attrgetter("slot")
_by_turn = attrgetter("turn")


class Running:
    """Four lists; each request is in one of them.

    ``n_moves`` counts additions and removals: while it stays the same, the same requests decode and prefill.
    """

    def __init__(self) -> None:
        self.decoding: list[Request] = []  # by slot
        self.prefilling: list[Request] = []  # by turn
        self.drawing: dict[Request, None] = {}  # in no step until their tokens are drawn
        self.paused: OrderedDict[Request, None] = OrderedDict()  # longest paused first
        self.n_moves = 0

    def __repr__(self) -> str:
        return (
            f"<Running prefilling={len(self.prefilling)} decoding={len(self.decoding)} "
            f"drawing={len(self.drawing)} paused={len(self.paused)}>"
        )

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.drawing) + len(self.paused)

    def __iter__(self) -> Iterator[Request]:
        yield from self.decoding
        yield from self.prefilling
        yield from self.drawing
        yield from self.paused

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned."""
        return bool(self.decoding or self.prefilling)

    @property
    def only_scores(self) -> bool:
        """Whether all running requests only score their own tokens."""
        return not self.decoding and all(request.max_tokens == 0 for request in self.prefilling)

    @property
    def n_cells(self) -> int:
        """The cells that these requests hold, or will hold when all of their tokens are computed."""
        running = sum(len(r.tokens) for r in self.decoding) + sum(len(r.tokens) for r in self.prefilling)
        running += sum(len(r.tokens) for r in self.drawing)
        return running + sum(r.n_past for r in self.paused)

    def add(self, request: Request) -> None:
        """Adds a request that has a slot."""
        self.n_moves += 1
        if decodes(request):
            insort(self.decoding, request, key=_by_slot)
        else:
            insort(self.prefilling, request, key=_by_turn)

    def take(self, request: Request) -> None:
        """Removes a running request."""
        self.n_moves += 1
        if request in self.decoding:
            self.decoding.remove(request)
        elif request in self.drawing:
            del self.drawing[request]
        else:
            self.prefilling.remove(request)

    def sort(self) -> None:
        """Moves requests whose prompt is in the KV cache from ``prefilling`` to ``decoding``."""
        for request in [r for r in self.prefilling if decodes(r)]:
            self.prefilling.remove(request)
            self.add(request)

    def recompute(self, request: Request) -> None:
        """A request lost its cells: all of its tokens have to be computed again."""
        request.n_past = request.n_exact = 0
        if request in self.decoding:
            self.decoding.remove(request)
            self.add(request)

    def least(self) -> Request | None:
        """The request to preempt first: the one that paused first, else the newest of the lowest priority.

        None if there is only one.
        """
        if len(self) < 2:
            return None
        return next(iter(self.paused)) if self.paused else self.newest_of_lowest()

    def newest_of_lowest(self) -> Request:
        """The request that arrived last, of those with the lowest priority."""
        return max(self, key=lambda request: (-request.priority, request.arrival))

    def check_integrity(self) -> None:
        """Raises AssertionError if the lists are inconsistent."""
        assert self.decoding == sorted(self.decoding, key=_by_slot)
        for request in self.decoding:
            assert len(request.tokens) - request.n_past == 1, request


def decodes(request: Request) -> bool:
    """Whether only the last token is left to compute."""
    return len(request.tokens) - request.n_past == 1 and request.max_tokens > 0

"""The requests without a slot, and whose turn it is.

Requests of a higher priority come first. Among equals the queue is fair to shares, and within a share to callers
(start-time fair queueing, Goyal et al. 1996): each request starts where the one before it of the same caller ends, in
tokens, but not before the request that was admitted last. So a single request need not wait for the rest of a long
list, and single requests keep the order in which they arrived. The same holds for shares, with the tokens of their
requests that were admitted: a client with a thousand calls delays the call of another one by one request.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush

from llamapipe.engine.scheduler.request import Request, State

_MAX_COUNTED = 256  # tokens that a request may generate, as its cost; few generate all that they may


_Heap = list[tuple[tuple[int, int, int], Request]]


class _Share:
    """The requests of one share. ``end``: where its last admitted request ends. ``n_new``: not admitted yet."""

    __slots__ = ("end", "heap", "n_new", "n_queued")

    def __init__(self) -> None:
        self.heap: _Heap = []  # removed ones stay until they are the first
        self.n_queued = self.n_new = self.end = 0


class Waiting:
    """Three lists; each request is in one of them.

    ``paused``: preempted requests whose token budget is used up. The others may be admitted, or follow a request that
    computes their prefix.
    """

    def __init__(self) -> None:
        self.paused: set[Request] = set()
        self._queued: dict[Request, None] = {}  # those of all heaps that were not removed
        self._shares: dict[Hashable, _Share] = {}  # those with requests that are queued or not admitted yet
        self._next: Request | None = None  # the one to admit first, if that is known
        self._share_now = 0  # where the share starts of which a request was admitted last
        # By leader: the followers, and the cells that each waits for.
        self._followers: dict[Request, dict[Request, int]] = {}
        self._n_followers = 0
        self._ends: dict[object, int] = {}  # by caller: where its last request ends
        self._n_of: dict[object, int] = {}  # by caller: its requests that were not admitted yet
        self._now = 0  # where the request starts that was admitted last

    def __repr__(self) -> str:
        return f"<Waiting queued={len(self._queued)} followers={self._n_followers} paused={len(self.paused)}>"

    def __iter__(self) -> Iterator[Request]:
        yield from self._queued
        yield from self.paused
        for followers in self._followers.values():
            yield from followers

    @property
    def n_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queued) + self._n_followers

    @property
    def n_ready(self) -> int:
        """Requests that could be admitted now; the followers among those that wait could not."""
        return len(self._queued)

    @property
    def has_next(self) -> bool:
        """Whether a request could be admitted."""
        return bool(self._queued)

    def next(self) -> Request:
        """The request to admit first."""
        if self._next is None:
            if len(self._shares) == 1:
                self._next = self._first_in((*self._shares.values(),)[0].heap)[1]
            else:
                self._next = min(map(self._first_of, self._waiting_shares()))[-1]
        return self._next

    def _waiting_shares(self) -> Iterator[_Share]:
        return (share for share in self._shares.values() if share.n_queued)

    def _first_of(self, share: _Share) -> tuple[int, int, tuple[int, int, int], Request]:
        """The first request of a share, after what decides between shares."""
        turn, request = self._first_in(share.heap)
        return turn[0], max(share.end, self._share_now), turn, request

    def _first_in(self, heap: _Heap) -> tuple[tuple[int, int, int], Request]:
        while heap[0][1] not in self._queued:
            heappop(heap)
        return heap[0]

    def add(self, request: Request) -> None:
        """Adds a new request and gives it its turn."""
        caller = request.caller
        start = max(self._now, self._ends.get(caller, 0))
        self._ends[caller] = start + _cost(request)
        (self._shares.get(request.share) or self._new_share(request)).n_new += 1
        self._n_of[caller] = self._n_of.get(caller, 0) + 1
        request.turn = (-request.priority, start, request.arrival)
        if request.n_total < request.token_budget:
            self.add_ready(request)
        else:
            self.paused.add(request)

    def add_ready(self, request: Request) -> None:
        """Adds a request that had a slot, was paused, or followed another one. It keeps its turn."""
        self._queued[request] = self._next = None
        share = self._shares.get(request.share) or self._new_share(request)
        share.n_queued += 1
        heappush(share.heap, (request.turn, request))

    def _new_share(self, request: Request) -> _Share:
        share = self._shares[request.share] = _Share()
        return share

    def _emptied(self, share: _Share, request: Request) -> None:
        share.heap.clear()
        if not share.n_new:
            del self._shares[request.share]

    def remove(self, request: Request) -> None:
        """Removes a request from its list."""
        if request.leader is not None:
            followers = self._followers[request.leader]
            del followers[request]
            if not followers:
                del self._followers[request.leader]
            request.leader = None
            self._n_followers -= 1
        elif request in self._queued:
            del self._queued[request]
            self._next = None
            share = self._shares[request.share]
            share.n_queued -= 1
            if not share.n_queued:
                self._emptied(share, request)
        else:
            self.paused.remove(request)

    def admitted(self, request: Request) -> None:
        """Notes that a request has got a slot, or ended without one. A second call for a request does nothing."""
        self._now = max(self._now, request.turn[1])
        caller, request.caller = request.caller, None
        if caller is None:
            return
        share = self._shares[request.share]
        share.n_new -= 1
        if request.slot >= 0:
            self._share_now = max(share.end, self._share_now)
            share.end = self._share_now + _cost(request)
            self._next = None
        if not share.n_queued:
            self._emptied(share, request)
        self._n_of[caller] -= 1
        if not self._n_of[caller]:
            del self._n_of[caller], self._ends[caller]

    def follow(self, request: Request, leader: Request, n: int) -> None:
        """Has a request wait until ``leader`` has computed its first ``n`` tokens."""
        self._followers.setdefault(leader, {})[request] = n
        request.leader = leader
        self._n_followers += 1

    def release(self, leader: Request) -> None:
        """Makes the followers ready that have waited for these cells; all of them if it computes nothing now."""
        followers = self._followers.get(leader)
        if followers is None:
            return
        computes = leader.slot >= 0 and leader.state is State.RUNNING
        for request in [r for r, n in followers.items() if not computes or leader.n_past >= n]:
            self.remove(request)
            self.add_ready(request)

    def check_integrity(self) -> None:
        """Raises AssertionError if the lists are inconsistent."""
        shares = self._shares.values()
        assert self._queued.keys() <= {request for share in shares for _, request in share.heap}
        assert sum(share.n_queued for share in shares) == len(self._queued)
        assert sum(share.n_new for share in shares) == sum(self._n_of.values())
        assert all(share.n_queued or share.n_new for share in shares)
        assert self._n_followers == sum(map(len, self._followers.values()))
        assert self._ends.keys() == self._n_of.keys()


def _cost(request: Request) -> int:
    """The tokens that a request is expected to compute."""
    return len(request.tokens) + min(request.max_tokens, _MAX_COUNTED)

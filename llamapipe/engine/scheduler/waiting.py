"""The requests without a slot: new, ready to continue, paused, or following a request that computes their prefix."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from llamapipe.engine.scheduler.request import Request

_by_arrival = attrgetter("arrival")


class Waiting:
    """Four lists; each request is in one of them.

    ``ready``: preempted requests and former followers that may continue. ``paused``: preempted requests whose token
    budget is used up.
    """

    def __init__(self) -> None:
        self.paused: set[Request] = set()
        self._new: OrderedDict[Request, None] = OrderedDict()  # in the order of arrival
        self._ready: list[Request] = []  # in the order of arrival
        self._followers: dict[
            Request, dict[Request, int]
        ] = {}  # by leader: the cells that a follower waits for
        self._n_followers = 0

    def __repr__(self) -> str:
        return (
            f"<Waiting new={len(self._new)} ready={len(self._ready)} followers={self._n_followers} "
            f"paused={len(self.paused)}>"
        )

    def __iter__(self) -> Iterator[Request]:
        yield from self._ready
        yield from self._new
        yield from self.paused
        for followers in self._followers.values():
            yield from followers

    @property
    def n_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._new) + len(self._ready) + self._n_followers

    @property
    def has_next(self) -> bool:
        """Whether a request could be admitted."""
        return bool(self._new or self._ready)

    def next(self) -> Request:
        """The request to admit first."""
        return self._ready[0] if self._ready else next(iter(self._new))

    def add(self, request: Request) -> None:
        """Adds a new request."""
        if request.n_total < request.token_budget:
            self._new[request] = None
        else:
            self.paused.add(request)

    def add_ready(self, request: Request) -> None:
        """Adds a request that had a slot or followed another one."""
        insort(self._ready, request, key=_by_arrival)

    def remove(self, request: Request) -> None:
        """Removes a request from its list."""
        if request.leader is not None:
            followers = self._followers[request.leader]
            del followers[request]
            if not followers:
                del self._followers[request.leader]
            request.leader = None
            self._n_followers -= 1
        elif request in self._new:
            del self._new[request]
        elif request in self.paused:
            self.paused.discard(request)
        else:
            self._ready.remove(request)

    def follow(self, request: Request, leader: Request, n: int) -> None:
        """Has a request wait until ``leader`` has computed its first ``n`` tokens."""
        self._followers.setdefault(leader, {})[request] = n
        request.leader = leader
        self._n_followers += 1

    def release(self, leader: Request) -> None:
        """Makes the followers ready that have waited for these cells; all of them if the leader has no slot now."""
        followers = self._followers.get(leader)
        if followers is None:
            return
        for request in [r for r, n in followers.items() if leader.slot < 0 or leader.n_past >= n]:
            self.remove(request)
            self.add_ready(request)

    def has_followers(self, leader: Request) -> bool:
        """Whether requests wait for this one."""
        return leader in self._followers

"""Ordered lists of the waiting and the running requests.

Open this file to change who gets the next slot, or which running request is preempted first.

The principle: every waiting request gets a turn, and turns are fair. Higher priorities come first. Among equal
priorities, ``Waiting`` divides the slots between clients (shares), and within a client between its callers, however
many requests each has. A request keeps its turn when it loses its slot. ``Running`` sorts the requests with a slot by
what the next step can do with them: decode, prefill, or nothing yet.

These lists only order requests. ``scheduler.py`` decides when a request moves from one to the other. Pure policy.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from operator import attrgetter

from llamapipe._engine.policy.core import Request, State
from llamapipe._engine.policy.turns import Claim

_MAX_COUNTED = 256  # the most tokens to generate that count as cost, because few requests reach max_tokens
_Heap = list[tuple[tuple[int, int, int], Request]]


class _Share:
    """The requests of one share. ``end``: where its last admitted request ends, in tokens.

    ``n_new``: the number of requests not admitted yet.
    """

    __slots__ = ("end", "heap", "lent", "n_new", "n_queued")

    def __init__(self) -> None:
        # Removed requests stay in the heaps until they come first.
        self.heap: _Heap = []
        self.lent: _Heap = []  # requests that have lent their slots
        self.n_queued = self.n_new = self.end = 0


class Waiting:
    """The requests without a slot, and the request whose turn it is.

    Requests with a higher priority come first. Among equal priorities the queue is fair to shares, and within a share
    to callers (start-time fair queueing, Goyal et al. 1996): each request starts where the caller's previous request
    ends, in tokens, but not before the request that was admitted last. So a single request need not wait for the rest
    of a long list, and single requests keep their order of arrival. The same holds for shares, with the tokens of their
    admitted requests: a client with a thousand calls delays another client's call by one request.

    A request that has lent its slot, because its token was late, comes before requests of its share that never lent
    theirs. Requests that have lent a slot hold at most ``most_lent`` slots; the share's other requests get the rest.
    Among the former, the request that has lent its slot least often comes first.

    ``queued``: requests that could be admitted now. ``paused``: preempted requests whose token budget is used up.
    ``preparing``: new requests until their images and sounds are encoded, or their prefix is read from disk. All other
    requests follow a request that computes their prefix.
    """

    def __init__(self, running: Iterable[Request] = (), most_lent: int = 1) -> None:
        self._running = running
        self._most_lent = most_lent
        self.paused: set[Request] = set()
        self.preparing: set[Request] = set()
        self.queued: dict[Request, None] = {}  # the requests of all heaps, without removed ones
        # The shares with requests that are queued or not admitted yet.
        self._shares: defaultdict[Hashable, _Share] = defaultdict(_Share)
        self._next: Request | None = None  # the request to admit first, if known
        self._share_now = 0  # the start of the share whose request was admitted last
        # By leader: its followers, and the number of cells that each waits for.
        self._followers: dict[Request, dict[Request, int]] = {}
        self.n_followers = 0
        self._ends: dict[object, int] = {}  # by caller: where its last request ends
        self._n_of: dict[object, int] = {}  # by caller: its requests that were not admitted yet
        self._now = 0  # the start of the request that was admitted last

    def __repr__(self) -> str:
        return f"<Waiting queued={len(self.queued)} followers={self.n_followers} paused={len(self.paused)}>"

    def __iter__(self) -> Iterator[Request]:
        yield from self.queued
        yield from self.paused
        yield from self.preparing
        for followers in self._followers.values():
            yield from followers

    @property
    def n_queued(self) -> int:
        """The number of requests that wait for a slot, without paused ones."""
        return len(self.queued) + self.n_followers + len(self.preparing)

    def next(self) -> Request:
        """Return the request to admit first."""
        if self._next is not None:
            return self._next
        if len(self._shares) == 1:
            request = self._first_in((*self._shares.values(),)[0])[1]
        else:
            request = min(map(self._first_of, self._waiting_shares()))[-1]
        # While both heaps have requests, the choice depends on which requests run.
        share = self._shares[request.spec.share]
        if not (share.heap and share.lent):
            self._next = request
        return request

    def lends_much(self, share: Hashable) -> bool:
        """Return whether a share's requests that have lent their slots hold more than ``most_lent`` slots."""
        return self._n_lent(share) > self._most_lent

    def _n_lent(self, share: Hashable) -> int:
        return sum(request.n_lent > 0 and request.spec.share == share for request in self._running)

    def _waiting_shares(self) -> Iterator[_Share]:
        return (share for share in self._shares.values() if share.n_queued)

    def _first_of(self, share: _Share) -> tuple[int, int, tuple[int, int, int], Request]:
        """Return the first request of a share, preceded by the sort key of the share."""
        turn, request = self._first_in(share)
        return turn[0], max(share.end, self._share_now), turn, request

    def _first_in(self, share: _Share) -> tuple[tuple[int, int, int], Request]:
        while share.heap and (share.heap[0][1] not in self.queued or share.heap[0][1].n_lent):
            heappop(share.heap)
        while share.lent and (
            share.lent[0][1] not in self.queued or share.lent[0][0][1] != share.lent[0][1].n_lent
        ):
            heappop(share.lent)
        if not share.heap or not share.lent:
            return (share.heap or share.lent)[0]
        new, lent = share.heap[0], share.lent[0]
        if new[0][0] != lent[0][0]:  # the priority
            return min(new, lent)
        return lent if self._n_lent(lent[1].spec.share) < self._most_lent else new

    def add(self, request: Request) -> None:
        """Add a new request and give it its turn."""
        caller = request.caller
        start = max(self._now, self._ends.get(caller, 0))
        self._ends[caller] = start + _cost(request)
        self._shares[request.spec.share].n_new += 1
        self._n_of[caller] = self._n_of.get(caller, 0) + 1
        request.turn = (-request.spec.priority, start, request.arrival)
        if not request.is_prepared:
            self.preparing.add(request)
        elif request.n_total < request.token_budget:
            self.add_ready(request)
        else:
            self.paused.add(request)

    def add_ready(self, request: Request) -> None:
        """Add a request that had a slot, was paused, or followed another request. It keeps its turn."""
        self.queued[request] = self._next = None
        share = self._shares[request.spec.share]
        share.n_queued += 1
        if request.n_lent:
            priority, _, arrival = request.turn
            heappush(share.lent, ((priority, request.n_lent, arrival), request))
        else:
            heappush(share.heap, (request.turn, request))

    def remove(self, request: Request) -> None:
        if request.leader is not None:
            followers = self._followers[request.leader]
            del followers[request]
            if not followers:
                del self._followers[request.leader]
            request.leader = None
            self.n_followers -= 1
        elif request in self.queued:
            del self.queued[request]
            self._next = None
            share = self._shares[request.spec.share]
            share.n_queued -= 1
            if not share.n_queued:
                share.heap.clear()
                share.lent.clear()
                if not share.n_new:
                    del self._shares[request.spec.share]
        elif request in self.preparing:
            self.preparing.remove(request)
        else:
            self.paused.remove(request)

    def note_admitted(self, request: Request) -> None:
        """Record that a request has a slot, or ended without one. A second call for a request does nothing."""
        self._now = max(self._now, request.turn[1])
        caller, request.caller = request.caller, None
        if caller is None:
            return
        share = self._shares[request.spec.share]
        share.n_new -= 1
        if request.slot >= 0:
            self._share_now = max(share.end, self._share_now)
            share.end = self._share_now + _cost(request)
            self._next = None
        if not share.n_queued and not share.n_new:
            del self._shares[request.spec.share]
        self._n_of[caller] -= 1
        if not self._n_of[caller]:
            del self._n_of[caller], self._ends[caller]

    def follow(self, request: Request, leader: Request, n: int) -> None:
        """Make a request wait until ``leader`` has computed the first ``n`` tokens of both."""
        self._followers.setdefault(leader, {})[request] = n
        request.leader = leader
        self.n_followers += 1

    def release(self, leader: Request) -> None:
        """Queue the followers whose cells the leader has computed, or all of them if the leader is not running."""
        followers = self._followers.get(leader)
        if followers is None:
            return
        computes = leader.slot >= 0 and leader.state is State.RUNNING
        for request in [r for r, n in followers.items() if not computes or leader.n_past >= n]:
            self.remove(request)
            self.add_ready(request)

    def check_integrity(self) -> None:
        shares = self._shares.values()
        assert self.queued.keys() <= {r for share in shares for _, r in (*share.heap, *share.lent)}
        assert sum(share.n_queued for share in shares) == len(self.queued)
        assert sum(share.n_new for share in shares) == sum(self._n_of.values())
        assert all(share.n_queued or share.n_new for share in shares)
        assert self.n_followers == sum(map(len, self._followers.values()))
        assert self._ends.keys() == self._n_of.keys()


def _cost(request: Request) -> int:
    """Return the number of tokens that a request is expected to compute."""
    return len(request.tokens) + min(request.max_tokens, _MAX_COUNTED)


_by_slot = attrgetter("slot")
_by_turn = attrgetter("turn")


def _claim(requests: Iterable[Request]) -> Claim:
    priority, awaits_first, streams = -(2**31), False, False
    for request in requests:
        priority = max(priority, request.spec.priority)
        streams = streams or request.n_generated > 0
        awaits_first = awaits_first or (request.n_generated == 0 and request.max_tokens > 0)
    return Claim(priority, awaits_first, streams)


# Says whether steps whose carrier is the first set can have requests with the second set. See turns.py.
Carries = Callable[[Hashable, Hashable], bool]


class Running:
    """The requests with a slot, in five lists.

    They prefill, decode, wait for a token that is drawn later, are paused, or are in ``others``. The ``others`` have
    tokens to compute, but with adapters that the current steps cannot have. Steps have the set ``adapters`` and the
    sets that it carries (``turns.py``). An activated LoRA may move a request to ``others`` in the middle of its prompt.

    ``n_moves`` counts additions and removals: while it does not change, the same requests decode and prefill.
    """

    def __init__(self, carries: Carries | None = None) -> None:
        self._carries = carries
        self.decoding: list[Request] = []  # by slot
        self.prefilling: list[Request] = []  # by turn
        self.drawing: dict[Request, None] = {}  # in no step until their tokens are drawn
        self.paused: OrderedDict[Request, None] = OrderedDict()  # longest paused first
        self.adapters: Hashable = None
        self.others: dict[Hashable, dict[Request, None]] = {}  # by their adapters; no empty ones
        self.n_moves = 0

    def __repr__(self) -> str:
        return (
            f"<Running prefilling={len(self.prefilling)} decoding={len(self.decoding)} "
            f"drawing={len(self.drawing)} paused={len(self.paused)} others={sum(map(len, self.others.values()))}>"
        )

    def __len__(self) -> int:
        n = len(self.decoding) + len(self.prefilling) + len(self.drawing) + len(self.paused)
        return n + sum(map(len, self.others.values())) if self.others else n

    def __iter__(self) -> Iterator[Request]:
        yield from self.decoding
        yield from self.prefilling
        yield from self.drawing
        yield from self.paused
        for requests in self.others.values():
            yield from requests

    @property
    def can_compute(self) -> bool:
        """Whether any request has tokens to compute, whatever its adapters."""
        return bool(self.decoding or self.prefilling or self.others)

    @property
    def others_stream(self) -> bool:
        """Whether a request in ``others`` already has a token, so its reader waits for the next one."""
        return any(request.n_generated for requests in self.others.values() for request in requests)

    @property
    def only_scores(self) -> bool:
        """Whether all running requests only score their own tokens."""
        return not self.decoding and all(request.max_tokens == 0 for request in self.prefilling)

    @property
    def n_cells(self) -> int:
        """The number of cells that these requests hold, or will hold when all their tokens are computed."""
        running = sum(len(r.tokens) for r in self.decoding) + sum(len(r.tokens) for r in self.prefilling)
        running += sum(len(r.tokens) for r in self.drawing)
        for requests in self.others.values():
            running += sum(len(r.tokens) for r in requests)
        return running + sum(r.n_past for r in self.paused)

    def add(self, request: Request) -> None:
        """Add a request that has a slot."""
        self.n_moves += 1
        if request.spec.activation is not None:
            request.adapters = request.adapters_at(request.n_past)
        if not self.can_have(request.adapters):
            self.others.setdefault(request.adapters, {})[request] = None
        elif request.n_past == len(request.tokens) - 1 and request.max_tokens:
            # Only the last token is left to compute.
            insort(self.decoding, request, key=_by_slot)
        else:
            insort(self.prefilling, request, key=_by_turn)

    def take(self, request: Request) -> None:
        """Remove a request that has a slot."""
        if request.state is State.PAUSED:
            del self.paused[request]
            return
        self.n_moves += 1
        if request in self.decoding:
            self.decoding.remove(request)
        elif request in self.drawing:
            del self.drawing[request]
        elif not self.can_have(request.adapters):
            requests = self.others[request.adapters]
            del requests[request]
            if not requests:
                del self.others[request.adapters]
        else:
            self.prefilling.remove(request)

    def can_have(self, adapters: Hashable) -> bool:
        """Return whether the current steps can have requests with these adapters."""
        if adapters == self.adapters:
            return True
        return self._carries is not None and self._carries(self.adapters, adapters)

    def use(self, adapters: Hashable) -> None:
        """Change the adapters of the next steps.

        Only requests with these adapters, or with sets that these carry, are in the next steps.
        """
        requests = [*self.decoding, *self.prefilling]
        for others in self.others.values():
            requests += others
        self.decoding, self.prefilling, self.others = [], [], {}
        self.adapters = adapters
        for request in requests:
            self.add(request)

    def carrier(self) -> Hashable:
        """Return a set of adapters that carries every request with tokens to compute, or else the current set."""
        if self._carries is None or not self.others:
            return self.adapters
        sets = {request.adapters for request in (*self.decoding, *self.prefilling)}.union(self.others)
        for adapters in self.others:
            if all(self._carries(adapters, other) for other in sets):
                return adapters
        return self.adapters

    def carrier_of(self, adapters: Hashable) -> Hashable:
        """Return a set that carries these adapters, so that others can join the steps, or else ``adapters``."""
        if self._carries is None or self._carries(adapters, adapters):
            return adapters
        return next((other for other in self.others if self._carries(other, adapters)), adapters)

    def claims(self) -> dict[Hashable, Claim]:
        """Return the claims of all sets of adapters whose requests have tokens to compute."""
        claims = {adapters: _claim(requests) for adapters, requests in self.others.items()}
        if self.decoding or self.prefilling:
            claims[self.adapters] = _claim((*self.decoding, *self.prefilling))
        return claims

    def sort(self) -> None:
        """Put the requests in ``prefilling`` into the right list, after a step that computed prompts."""
        prefilling, self.prefilling = self.prefilling, []
        for request in prefilling:
            self.add(request)

    def recompute(self, request: Request) -> None:
        """Record that a request lost its cells, so all its tokens must be computed again."""
        request.n_past = request.n_exact = 0
        if request.state is State.RUNNING and request not in self.drawing:
            self.take(request)
            self.add(request)

    def least(self) -> Request | None:
        """Return the request to preempt first: the first that paused, else the newest of the lowest priority.

        Returns None if fewer than two requests have slots.
        """
        if len(self) < 2:
            return None
        return next(iter(self.paused)) if self.paused else self.newest_of_lowest()

    def newest_of_lowest(self) -> Request:
        """Return the last-arrived request among those with the lowest priority."""
        return max(self, key=lambda request: (-request.spec.priority, request.arrival))

    def check_integrity(self) -> None:
        assert self.decoding == sorted(self.decoding, key=_by_slot)
        for request in self.decoding:
            assert len(request.tokens) - request.n_past == 1, request
        for request in (*self.decoding, *self.prefilling):
            assert self.can_have(request.adapters), request
            assert request.adapters == request.adapters_at(request.n_past), request
        for adapters, requests in self.others.items():
            assert requests and not self.can_have(adapters), adapters
            for request in requests:
                assert request.adapters == adapters == request.adapters_at(request.n_past), request

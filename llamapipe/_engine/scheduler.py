"""Which requests run, and what becomes of them.

Open this file to change admission, fairness, preemption, or what a sampled token does to a request.

The principle: there is no prefill phase and no decode phase. A request is a list of tokens, and the first ``n_past``
of them are in KV cells. Every step computes some of the others; when a step has computed the last one, it gives the
request its next token. A new prompt, one that was cut, a preempted request, a fork, a text that is scored: they
differ only in how many of their tokens have no cell yet.

What follows from it:

1. A request is in one list: of ``Waiting`` while it has no slot, of ``Running`` while it has one. ``State`` says
   which, and its transitions are in ``request.py``.
2. Requests are admitted by their turns (``Waiting``). One gets a slot if a slot is free and the cells for all of its
   tokens fit. It begins with the longest prefix that ``kv.py`` finds for it.
3. No cells are reserved for tokens that do not exist yet, so cells may run out. Then parked cells go first, after
   them the request that paused first, then the newest one of the lowest priority. A preempted request loses its slot
   and its cells, not its tokens or its turn; the cells are saved in host memory, or computed again. The last request
   that has cells is never preempted, so there is always one that progresses.
4. Only ``commit`` moves ``n_past``. So a plan may be made while another one is in flight: it leaves out the requests
   of that one. A request that leaves a step (it ended, or was preempted) has no ``batch_plan``, and what the step
   says of it is ignored.
5. Nothing here waits, looks at a clock or calls native code. The engine loop calls ``plan`` before a step, ``commit``
   after it, and the other methods between two steps.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from llamapipe._engine.kv import AssignAdapters, CellChanges, Discard, KvCache, Shift, UseAdapters
from llamapipe._engine.planner import BatchBuilder, BatchPlan
from llamapipe._engine.request import UNLIMITED, Request, State
from llamapipe._engine.scoring import LogprobTargets
from llamapipe._engine.speculation import Gate, Guess
from llamapipe._engine.turns import Claim, SetTurns
from llamapipe.errors import NoToken

_MAX_COUNTED = 256  # tokens that a request may generate, as its cost; few generate all that they may


_Heap = list[tuple[tuple[int, int, int], Request]]


class _Share:
    """The requests of one share. ``end``: where its last admitted request ends. ``n_new``: not admitted yet."""

    __slots__ = ("end", "heap", "n_new", "n_queued")

    def __init__(self) -> None:
        self.heap: _Heap = []  # removed ones stay until they are the first
        self.n_queued = self.n_new = self.end = 0


class Waiting:
    """The requests without a slot, in three lists, and whose turn it is.

    Requests of a higher priority come first. Among equals the queue is fair to shares, and within a share to callers
    (start-time fair queueing, Goyal et al. 1996): each request starts where the one before it of the same caller ends,
    in tokens, but not before the request that was admitted last. So a single request need not wait for the rest of a
    long list, and single requests keep the order in which they arrived. The same holds for shares, with the tokens of
    their requests that were admitted: a client with a thousand calls delays the call of another one by one request.

    ``queued``: those that could be admitted now. ``paused``: preempted requests whose token budget is used up.
    ``encoding``: new requests until their images and sounds are encoded. The others follow a request that computes
    their prefix.
    """

    def __init__(self) -> None:
        self.paused: set[Request] = set()
        self.encoding: set[Request] = set()
        self.queued: dict[Request, None] = {}  # those of all heaps that were not removed
        # Those with requests that are queued or not admitted yet.
        self._shares: defaultdict[Hashable, _Share] = defaultdict(_Share)
        self._next: Request | None = None  # the one to admit first, if that is known
        self._share_now = 0  # where the share starts of which a request was admitted last
        # By leader: the followers, and the cells that each waits for.
        self._followers: dict[Request, dict[Request, int]] = {}
        self.n_followers = 0
        self._ends: dict[object, int] = {}  # by caller: where its last request ends
        self._n_of: dict[object, int] = {}  # by caller: its requests that were not admitted yet
        self._now = 0  # where the request starts that was admitted last

    def __repr__(self) -> str:
        return f"<Waiting queued={len(self.queued)} followers={self.n_followers} paused={len(self.paused)}>"

    def __iter__(self) -> Iterator[Request]:
        yield from self.queued
        yield from self.paused
        yield from self.encoding
        for followers in self._followers.values():
            yield from followers

    @property
    def n_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self.queued) + self.n_followers + len(self.encoding)

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
        while heap[0][1] not in self.queued:
            heappop(heap)
        return heap[0]

    def add(self, request: Request) -> None:
        """Adds a new request and gives it its turn."""
        caller = request.caller
        start = max(self._now, self._ends.get(caller, 0))
        self._ends[caller] = start + _cost(request)
        self._shares[request.spec.share].n_new += 1
        self._n_of[caller] = self._n_of.get(caller, 0) + 1
        request.turn = (-request.spec.priority, start, request.arrival)
        if request.spans and not request.is_encoded:
            self.encoding.add(request)
        elif request.n_total < request.token_budget:
            self.add_ready(request)
        else:
            self.paused.add(request)

    def add_ready(self, request: Request) -> None:
        """Adds a request that had a slot, was paused, or followed another one. It keeps its turn."""
        self.queued[request] = self._next = None
        share = self._shares[request.spec.share]
        share.n_queued += 1
        heappush(share.heap, (request.turn, request))

    def remove(self, request: Request) -> None:
        """Removes a request from its list."""
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
                if not share.n_new:
                    del self._shares[request.spec.share]
        elif request in self.encoding:
            self.encoding.remove(request)
        else:
            self.paused.remove(request)

    def admitted(self, request: Request) -> None:
        """Notes that a request has got a slot, or ended without one. A second call for a request does nothing."""
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
        """Lets a request wait until ``leader`` has computed its first ``n`` tokens."""
        self._followers.setdefault(leader, {})[request] = n
        request.leader = leader
        self.n_followers += 1

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
        assert self.queued.keys() <= {request for share in shares for _, request in share.heap}
        assert sum(share.n_queued for share in shares) == len(self.queued)
        assert sum(share.n_new for share in shares) == sum(self._n_of.values())
        assert all(share.n_queued or share.n_new for share in shares)
        assert self.n_followers == sum(map(len, self._followers.values()))
        assert self._ends.keys() == self._n_of.keys()


def _cost(request: Request) -> int:
    """The tokens that a request is expected to compute."""
    return len(request.tokens) + min(request.max_tokens, _MAX_COUNTED)


_by_slot = attrgetter("slot")
_by_turn = attrgetter("turn")


def _claim(requests: Iterable[Request]) -> Claim:
    """What a set with these requests asks for."""
    priority, awaits_first, streams = -(2**31), False, False
    for request in requests:
        priority = max(priority, request.spec.priority)
        streams = streams or request.n_generated > 0
        awaits_first = awaits_first or (request.n_generated == 0 and request.max_tokens > 0)
    return Claim(priority, awaits_first, streams)


# Whether steps with the first set as their carrier can have requests with the second one. See turns.py.
Carries = Callable[[Hashable, Hashable], bool]


class Running:
    """The requests with a slot, in five lists: they prefill, decode, wait for a token drawn later, or are paused.

    Those that would prefill or decode, but with adapters that the steps now cannot have, are in the fifth. The steps
    have ``adapters``, or those that these carry (``turns.py``). An activated LoRA moves a request there in the middle
    of its prompt. ``n_moves`` counts additions and removals: while it stays the same, the same requests decode and
    prefill.
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
        """Whether any request has tokens to compute, with whichever adapters."""
        return bool(self.decoding or self.prefilling or self.others)

    @property
    def others_stream(self) -> bool:
        """Whether a request with other adapters has a token already, so that its reader waits for the next."""
        return any(request.n_generated for requests in self.others.values() for request in requests)

    @property
    def only_scores(self) -> bool:
        """Whether all running requests only score their own tokens."""
        return not self.decoding and all(request.max_tokens == 0 for request in self.prefilling)

    @property
    def n_cells(self) -> int:
        """The cells that these requests hold, or will hold when all of their tokens are computed."""
        running = sum(len(r.tokens) for r in self.decoding) + sum(len(r.tokens) for r in self.prefilling)
        running += sum(len(r.tokens) for r in self.drawing)
        for requests in self.others.values():
            running += sum(len(r.tokens) for r in requests)
        return running + sum(r.n_past for r in self.paused)

    def add(self, request: Request) -> None:
        """Adds a request that has a slot."""
        self.n_moves += 1
        if request.spec.activation is not None:
            request.adapters = request.adapters_at(request.n_past)
        if not self.can_have(request.adapters):
            self.others.setdefault(request.adapters, {})[request] = None
        elif (
            request.n_past == len(request.tokens) - 1 and request.max_tokens
        ):  # only the last token is left to compute
            insort(self.decoding, request, key=_by_slot)
        else:
            insort(self.prefilling, request, key=_by_turn)

    def take(self, request: Request) -> None:
        """Removes a request that has a slot."""
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
        """Whether requests with these adapters can be part of the steps now."""
        if adapters == self.adapters:
            return True
        return self._carries is not None and self._carries(self.adapters, adapters)

    def use(self, adapters: Hashable) -> None:
        """Lets the requests with these adapters, or that they carry, be part of the next steps, and no others."""
        requests = [*self.decoding, *self.prefilling]
        for others in self.others.values():
            requests += others
        self.decoding, self.prefilling, self.others = [], [], {}
        self.adapters = adapters
        for request in requests:
            self.add(request)

    def carrier(self) -> Hashable:
        """What carries all requests that could compute, so that nobody waits; else the adapters now."""
        if self._carries is None or not self.others:
            return self.adapters
        sets = {request.adapters for request in (*self.decoding, *self.prefilling)}.union(self.others)
        for adapters in self.others:
            if all(self._carries(adapters, other) for other in sets):
                return adapters
        return self.adapters

    def carrier_of(self, adapters: Hashable) -> Hashable:
        """What carries requests with these adapters, so that others can be in their steps; else these adapters."""
        if self._carries is None or self._carries(adapters, adapters):
            return adapters
        return next((other for other in self.others if self._carries(other, adapters)), adapters)

    def claims(self) -> dict[Hashable, Claim]:
        """What the sets of adapters ask for whose requests could compute."""
        found = {adapters: _claim(requests) for adapters, requests in self.others.items()}
        if self.decoding or self.prefilling:
            found[self.adapters] = _claim((*self.decoding, *self.prefilling))
        return found

    def sort(self) -> None:
        """Moves requests whose prompt is in the KV cache from ``prefilling`` to ``decoding``."""
        prefilling, self.prefilling = self.prefilling, []
        for request in prefilling:
            self.add(request)

    def recompute(self, request: Request) -> None:
        """A request lost its cells: all of its tokens have to be computed again."""
        request.n_past = request.n_exact = 0
        if request.state is State.RUNNING and request not in self.drawing:
            self.take(request)
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
        return max(self, key=lambda request: (-request.spec.priority, request.arrival))

    def check_integrity(self) -> None:
        """Raises AssertionError if the lists are inconsistent."""
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


MODES = ("stop", "recompute", "shift")


class Overflow:
    """One rule for all requests of a context.

    ``mode``: ``"stop"``: it ends. ``"recompute"``: it keeps its first ``n_keep`` tokens and the newer half of the
    others, which are computed again. ``"shift"``: the same, but the cells of the newer half are moved to their new
    positions. They were computed with the dropped tokens before them, so the result is another one, and no other
    request may use them.
    """

    def __init__(self, mode: str = "stop", n_keep: int = 0) -> None:
        self._mode = mode
        self._n_keep = n_keep

    def __repr__(self) -> str:
        return f"<Overflow {self._mode} n_keep={self._n_keep}>"

    def drop(self, request: Request, cache: KvCache) -> bool:
        """Drops old tokens of a full request, which is then no longer in order among those that run. False: it ends."""
        if self._mode == "stop":
            return False
        n_keep = self._n_keep
        n_keep, end = request.drop_between(n_keep, n_keep + (len(request.tokens) - n_keep) // 2)
        if self._mode == "shift" and request.cells is not None:
            cache.shift(request, n_keep, end)
        else:
            cache.truncate(request, n_keep)
        return True


_LATER = int(NoToken.LATER)  # looked at in every step
# Gaps between decoding requests, added up over steps, before they are closed: new requests may fill them.
_LEAST_GAPS = 8
# A padding token takes as long as moving so many cells, with a model whose tokens are cheap; with others, longer.
_CELLS_PER_GAP = 200


class Scheduler:
    """The requests of one context.

    Sequences of at most ``n_ctx`` positions each and ``n_cells`` in all, in the slots of ``cache``; ``n_batch`` tokens
    in a step, of which llama.cpp computes ``n_ubatch`` at a time. For ``padding_token``, ``n_score_rows``,
    ``prefill_cutoff`` and ``max_itl_s`` see BatchBuilder, for ``overflow`` Overflow, for ``gate`` Gate.

    ``dequeued``: requests that got a slot or ended since ``take_dequeued`` was called; a preempted request is listed
    again. ``awaiting_end``: those with their last token whose samplers do not know yet whether the text is complete.
    ``can_guess``: whether a sampler of the last step can guess what follows. ``drafts``: whether a draft model does.
    """

    def __init__(
        self,
        cache: KvCache,
        n_ctx: int,
        n_cells: int,
        n_batch: int,
        n_ubatch: int,
        padding_token: int | None = None,
        n_score_rows: int = 32,
        prefill_cutoff: int | None = None,
        max_itl_s: float | None = None,
        overflow: Overflow | None = None,
        gate: Gate | None = None,
        carries: Carries | None = None,
    ) -> None:
        if n_cells < n_ctx:
            raise ValueError(
                f"n_cells is {n_cells} and n_ctx {n_ctx}; one request could never use its n_ctx: raise n_cells"
            )
        self.n_ctx = n_ctx
        self.n_cells = n_cells
        self.cache = cache
        self.n_preempted = 0
        self._overflow = Overflow() if overflow is None else overflow
        self.batch_builder = BatchBuilder(
            n_batch, n_ubatch, padding_token, n_score_rows, prefill_cutoff, max_itl_s
        )
        self.gate = Gate() if gate is None else gate
        self.drafts = self.gate.drafter is not None
        self.turns = SetTurns(max_itl_s)
        self.can_guess = False
        self._scarce = n_cells < n_ctx * cache.n_slots
        self._full = False  # a step found no cells: admit no request before one has left
        self._n_arrived = 0
        self._lowest_priority = 0  # of all requests so far
        self._waiting = Waiting()  # without a slot
        self._running = Running(carries)  # in a slot
        self._carries = carries
        self._has_carrier = False  # the adapters of the steps now are a carrier
        self._assigned: dict[int, Hashable] = {}  # by slot: its adapters, if the steps have a carrier
        self.dequeued: list[Request] = []
        self.awaiting_end: list[Request] = []
        self._last: BatchPlan | None = None  # the last plan, if the next step may repeat it
        self._n_moves = 0  # Running.n_moves when it was made
        # Whether gaps between decoding requests cost more than closing them: not where a step reads all weights anyway.
        self._closes_gaps = padding_token is not None and prefill_cutoff is not None
        self._n_gaps = 0  # those of all steps since there were none

    def __repr__(self) -> str:
        return f"<Scheduler {self._waiting!r} {self._running!r} {self.cache!r}>"

    # ---- state
    @property
    def n_queued(self) -> int:
        """Requests that wait for a slot."""
        return self._waiting.n_queued

    @property
    def is_encoding(self) -> bool:
        """Whether requests wait for their images and sounds."""
        return bool(self._waiting.encoding)

    @property
    def n_active(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    @property
    def n_used_cells(self) -> int:
        """The KV cells of requests that have a slot."""
        return sum(request.n_past for request in self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned."""
        return self._running.can_compute or bool(self._waiting.queued)

    @property
    def all_ready(self) -> bool:
        """Whether every unfinished request can continue, so that waiting for a caller would gain nothing."""
        return not self._running.paused and not self._waiting.paused

    @property
    def max_in_flight(self) -> int:
        """How many steps may be in flight. Decoding needs the tokens of the step before, scoring does not."""
        builder = self.batch_builder
        if (
            builder.depth <= builder.n_micro_batches or not self._running.only_scores
        ):  # the cheap question first
            return builder.n_micro_batches
        return builder.depth

    def live(self) -> list[Request]:
        """Every unfinished request."""
        return [*self._running, *self._waiting]

    def take_dequeued(self) -> list[Request]:
        """Removes and returns ``dequeued``."""
        dequeued, self.dequeued = self.dequeued, []
        return dequeued

    def set_depth(self, depth: int) -> None:
        """How many steps of scores may be in flight. Before the first step."""
        self.batch_builder.depth = depth

    def split_decoding(self, n_micro_batches: int) -> None:
        """Splits the decoding requests into so many parts, each a step, from the next step on."""
        self.batch_builder.n_micro_batches = n_micro_batches

    # ---- events
    def add(self, request: Request) -> None:
        """Queues a new request."""
        request.arrival = self._n_arrived
        self._n_arrived += 1
        self._lowest_priority = min(self._lowest_priority, request.spec.priority)
        self._waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Gives a new request the sequence of a resumable one that is not running; it will find its cells."""
        child.tokens = parent.tokens.copy()
        child.dropped = parent.dropped.copy()
        child.n_kept = parent.n_kept
        child.n_prompt = parent.n_prompt
        child.n_generated = parent.n_generated
        child.active_from = parent.active_from
        self.cache.learn(parent)

    def encoded(self, request: Request) -> None:
        """The images and sounds of a request are encoded, so it may get a slot."""
        if request in self._waiting.encoding:
            self._waiting.remove(request)
            self._waiting.add_ready(request)

    def resume(self, request: Request) -> None:
        """Continues a request whose ``token_budget`` was raised or whose tokens changed; otherwise does nothing."""
        if request.finish_reason is not None or request.n_total >= request.token_budget or request.is_drawing:
            return
        if request in self._running.paused:
            del self._running.paused[request]
            request.move(State.RUNNING)
            self._running.add(request)
        elif request in self._waiting.paused:
            self._waiting.remove(request)
            self._waiting.add_ready(request)

    def trim(self, request: Request, n_keep: int) -> None:
        """Keeps the first ``n_keep`` tokens of a resumable request that is not running."""
        del request.tokens[n_keep:]
        if n_keep <= request.n_kept:
            request.dropped.clear()
        request.n_prompt = min(request.n_prompt, len(request.tokens) + len(request.dropped))
        # The last token is computed again: the next one is sampled from its logits.
        self.cache.truncate(request, min(request.n_past, n_keep - 1))
        self._find_activation(request)
        self._reopen(request)

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Appends tokens to a resumable request that is not running."""
        request.tokens.extend(tokens)
        if request.n_total == 0:  # nothing was generated yet: these are part of the prompt
            request.n_prompt = len(request.tokens)
        self._find_activation(request)
        self._reopen(request)

    def _find_activation(self, request: Request) -> None:
        n_same = request.find_activation()
        if n_same < UNLIMITED:
            self.cache.truncate(request, n_same)

    def _reopen(self, request: Request) -> None:
        request.reopen()
        request.n_generated = 0

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request and frees its slot. A resumable request keeps slot and cells, unless it is cancelled."""
        if request.state is State.FINISHED:
            return
        request.finish_reason = reason
        if request.spec.resumable and reason in ("stop", "length"):
            self._pause(request)
            return
        self.dequeued.append(request)
        request.batch_plan = None
        if request.state is State.WAITING:
            self._waiting.remove(request)
            self._waiting.admitted(request)
        else:
            self._running.take(request)
            self.cache.leave(request)
            self._full = False
            if self._waiting.n_followers:
                self._waiting.release(request)
        if request.saved_cells is not None and not request.spec.keeps_cells:
            self.cache.unpin(request)
        request.move(State.FINISHED)

    def stop(self, request: Request, n_after: int = 0) -> None:
        """Ends a request whose text completed a stop string, also if its last token had ended it already.

        ``n_after``: tokens of the sequence after that string, which are dropped.
        """
        if n_after:
            del request.tokens[-n_after:]
            request.n_generated -= n_after
            request.n_total -= n_after
            in_next = request.batch_plan is not None and request.batch_plan.in_flight
            n = min(request.n_past, len(request.tokens))
            self.cache.truncate(request, n, of_last_step=not in_next)
        self.finish(request, "stop")
        request.finish_reason = "stop"
        request.stop_token = None  # after a right guess it may have been drawn with what the string completed

    def cancel(self, request: Request) -> None:
        """Ends a request in any state."""
        self.finish(request, "cancelled")

    def fail(self, request: Request, error: BaseException) -> None:
        """Ends a request with an error."""
        if request.state is not State.FINISHED:
            request.error = error
            self.finish(request, "cancelled")

    def preempt(self, request: Request) -> None:
        """Takes a request's slot and cells. It computes its tokens again when it gets a slot."""
        paused = request.state is State.PAUSED
        self._running.take(request)
        request.batch_plan = None
        self.cache.preempt(request)
        request.n_past = 0
        request.move(State.WAITING)
        self._full = False
        self.dequeued.append(request)
        self._waiting.release(request)
        self.n_preempted += 1
        if paused or request.is_drawing:
            # It waits for `resume` or `drawn`: a slow reader must not keep other requests out of its slot.
            self._waiting.paused.add(request)
        else:
            self._waiting.add_ready(request)

    def lend(self, request: Request, lateness: float) -> bool:
        """Gives the slot of a request whose token is late to one that waits. The request returns with its token.

        It then waits for a slot itself, perhaps for another answer's whole length. So within a share its patience
        doubles with each time: a constraint that takes long for every token would else wait before each of them. Other
        shares need not be that patient. ``lateness``: how long the token has taken, 1 for what is late the first time.

        Returns whether there is such a slot and a request to lend it to.
        """
        waiting = self._waiting
        if len(self.cache.free) >= len(waiting.queued) or request not in self._running.drawing:
            return False
        if waiting.next().spec.share == request.spec.share and lateness < 2 ** min(request.n_lent, 20):
            return False
        request.n_lent += 1
        self.preempt(request)
        return True

    # ---- steps
    @property
    def may_draft(self) -> bool:
        """Whether ``plan`` may take long because a draft model computes."""
        return self.gate.considers_drafts and bool(self._running.decoding) and not self._running.prefilling

    def plan(self) -> BatchPlan | None:
        """The plan of the next step. None if nothing can be computed now."""
        if self._waiting.queued:
            self._admit()
        running = self._running
        if not running.can_compute:
            return None
        if self._scarce:
            self._make_room()
        # Last: what has made room may have been preempted.
        if (running.others or self._has_carrier) and not self._choose_adapters():
            return None
        if self._n_gaps >= _LEAST_GAPS:
            self._close_gaps()
        guesses = self._guesses() if self.can_guess or self.drafts else None
        last, self._last = self._last, None
        if (
            last is not None
            and not guesses
            and self._n_moves == running.n_moves
            and self.batch_builder.n_micro_batches == 1
        ):
            plan = last
            plan.repeats = plan.in_flight = True
        else:
            plan = self.batch_builder.plan(running, self.cache.parked, guesses)
            self._n_moves = running.n_moves
            if self._has_carrier:
                self._assign_adapters(plan)
        if self._closes_gaps and not guesses:
            self._count_gaps(plan)
        return plan if plan.tokens else None  # none: all requests are in steps in flight

    def _choose_adapters(self) -> bool:
        """Changes the adapters if it is the turn of others. False: the steps in flight have to be committed before."""
        running = self._running
        chosen = running.carrier()
        if running.others and chosen == running.adapters:
            chosen = running.carrier_of(self.turns.choose(chosen, running.claims()))
        elif (
            self._has_carrier
            and not running.others
            and self.turns.is_idle(
                any(request.adapters is not None for request in (*running.decoding, *running.prefilling))
            )
        ):
            chosen = None
        if chosen == running.adapters:
            return True
        for request in (*running.decoding, *running.prefilling):
            if request.batch_plan is not None and request.batch_plan.in_flight:
                return False
        running.use(chosen)
        self._last = None
        self.turns.changed()
        self._has_carrier = self._carries is not None and self._carries(chosen, chosen)
        self._assigned.clear()
        self.cache.memory_ops.append(UseAdapters(chosen, self._has_carrier))
        return True

    def _assign_adapters(self, plan: BatchPlan) -> None:
        """Gives the slots of a plan the adapters of their requests, and takes those of ended ones away."""
        for slot in [slot for slot in self._assigned if slot in self.cache.free]:
            if self._assigned.pop(slot) is not None:
                self.cache.memory_ops.append(AssignAdapters(slot, None))
        for request, _ in plan.scheduled:
            if self._assigned.get(request.slot) != request.adapters:
                self._assigned[request.slot] = request.adapters
                self.cache.memory_ops.append(AssignAdapters(request.slot, request.adapters))

    def _guesses(self) -> Mapping[Request, Sequence[int]]:
        """The guessed tokens to compute in the next step."""
        asks_samplers, self.can_guess = self.can_guess, False
        running, gate = self._running, self.gate
        if (
            running.prefilling
            or not gate.n_most
            or (gate.has_window and self.batch_builder.n_micro_batches > 1)
        ):
            return {}
        decoding = self.batch_builder.part(running.decoding)
        n_most = gate.n_longest
        if self._scarce:  # a guess must not cost others their cells
            n_most = min(n_most, (self.n_cells - running.n_cells - self.cache.n_parked_cells) // len(running))
        drafter = gate.next_drafter()
        guesses = []
        for request in decoding:
            # The token after the last right one is drawn as well.
            n = min(
                n_most,
                request.max_tokens - request.n_generated - 1,
                request.token_budget - request.n_total - 1,
                self.n_ctx - len(request.tokens) - 1,
            )
            if n <= 0 or request.sampler is None or not request.spec.speculates:
                continue
            tokens, share = request.sampler.guess(n) if asks_samplers else ((), 0.0)
            for i, token in enumerate(tokens):
                if token in request.stop_tokens:  # nothing follows one
                    tokens = tokens[:i]
                    break
            guess = Guess(request, tokens, share) if tokens else None
            if drafter is not None and request.spec.drafts:
                draft = drafter.guess(request, n)
                if draft is not None and (guess is None or draft.share > share):
                    guess = draft
            if guess is not None:
                guesses.append(guess)
        n = len(decoding)
        if not guesses:
            return {}
        chosen: dict[Request, Sequence[int]] = {}
        for request, tokens in gate.choose(n, guesses, self.batch_builder.n_ubatch - n).items():
            # What a constraint forbids cannot be right.
            n_allowed = 0 if request.sampler is None else request.sampler.expect(tokens)
            if n_allowed:
                chosen[request] = tokens[:n_allowed]
        if gate.has_window and chosen:
            shortest = min(map(len, chosen.values()))
            chosen = {request: tokens[:shortest] for request, tokens in chosen.items()}
        return chosen

    def commit(self, plan: BatchPlan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Records a step: its KV cells, and the token of each of ``plan.requests`` (or a NoToken).

        Returns the requests that are still part of the step, with their tokens.
        """
        plan.in_flight = False
        if plan.n_guessed:
            return self._commit_guesses(plan, sampled)
        for request, n in plan.scheduled:
            if request.batch_plan is plan:
                request.n_past += n
        if self.cache.exact_multiple is not None and len(plan.scheduled) == 1:
            self.cache.computed_alone(*plan.scheduled[0])
        for request, targets, *_ in plan.scored:
            if (
                request.batch_plan is plan
                and request.max_tokens == 0
                and request.n_past == len(request.tokens)
            ):
                self._score_next(request, targets)
        taken: list[tuple[Request, int]] = []
        for request, token in zip(plan.requests, sampled, strict=True):
            if request.batch_plan is plan:
                taken.append((request, token))
                self._add_token(request, token)
        self.cache.memory_ops += plan.padding
        if len(plan.scheduled) > plan.n_decode:
            if self._waiting.n_followers:
                for request, _ in plan.scheduled[plan.n_decode :]:
                    self._waiting.release(request)
            self._running.sort()
        elif (
            plan.n_decode == len(plan.tokens)
            and len(plan.requests) == len(self._running.decoding)
            and not self._running.prefilling
        ):
            self._last = (
                plan  # has all decoding requests: after a change from two micro-batches it may have half
            )
        return [pair for pair in taken if pair[1] != _LATER] if _LATER in sampled else taken

    def _commit_guesses(self, plan: BatchPlan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """``commit`` of a step with guessed tokens: a row that was drawn from is that of a right one."""
        taken: list[tuple[Request, int]] = []
        gate, before = self.gate, None
        n_drawn: dict[Request, int] = {}
        gate.n_drafted += plan.n_guessed
        begin = 0
        for request, n in plan.scheduled:
            request.n_drafted += n - 1
            n_left = sampled[begin : begin + n].count(NoToken.NOT_DRAWN)
            begin += n
            if n_left and request.batch_plan is plan and request.slot >= 0:
                # The cells of wrong ones. Before a request may end here: what leaves its slot then is all of use.
                self.cache.memory_ops.append(Discard(request.slot, request.n_past + n - n_left))
        for i, (request, token) in enumerate(zip(plan.requests, sampled, strict=True)):
            if request.batch_plan is plan and token != NoToken.NOT_DRAWN:
                if request is before and request.sampler is not None:  # the guessed token before it was right
                    gate.n_accepted += 1
                    request.n_accepted += 1
                    gate.n_forced += request.sampler.is_forced
                before = request
                n_drawn[request] = n_drawn.get(request, 0) + 1
                request.n_past += 1
                if token != _LATER:
                    taken.append((request, token))
                # The sampler knows all of the step's tokens: whether one may follow concerns the last one.
                is_last = plan.guessed[i] < 0 or sampled[i + 1] == NoToken.NOT_DRAWN
                self._add_token(request, token, is_last)
        gate.n_steps_saved += min(n_drawn.values(), default=1) - 1
        return taken

    def drawn(self, request: Request, token: int) -> None:
        """Records a token that was drawn after its step (or a NoToken), for a request that ``is_drawing``."""
        request.is_drawing = False
        if token == NoToken.SETTLED:
            self.finish(
                request, "stop" if request.sampler is not None and request.sampler.finished else "length"
            )
        else:
            self._add_token(request, token)
        if request in self._running.drawing and not request.is_drawing:
            self._running.take(request)
            self._running.add(request)
        elif request in self._waiting.paused:  # preempted meanwhile
            self.resume(request)

    def _add_token(self, request: Request, token: int, is_last: bool = True) -> None:
        """Continues a request with a token, or ends it. ``is_last``: of its tokens of the step."""
        if token in request.stop_tokens:
            request.stop_token = token
            self.finish(request, "stop")
            return
        if token < 0:
            self._no_token(request, token)
            return
        sampler = request.sampler
        tokens = request.tokens
        tokens.append(token)
        n_generated = request.n_generated = request.n_generated + 1
        request.n_total += 1
        if sampler is not None and sampler.finished and is_last:
            self.finish(request, "stop")
        elif n_generated >= request.max_tokens or (
            len(tokens) >= self.n_ctx and not self._drop_old_tokens(request)
        ):
            if sampler is not None and sampler.is_busy:  # it knows soon whether the text is complete
                self._draw_later(request)
                self.awaiting_end.append(request)
            else:
                self.finish(request, "length")
        elif request.n_total >= request.token_budget:
            self._pause(request)

    def _no_token(self, request: Request, code: int) -> None:
        if code == NoToken.LATER:
            self._draw_later(request)
        elif code == NoToken.FINISHED:
            if (
                request.spec.resumable
            ):  # the next token after a change is sampled from the logits of the last one
                self.cache.truncate(request, len(request.tokens) - 1)
            self.finish(request, "stop")
        else:
            self.fail(request, request.sampling_error(code))

    def _draw_later(self, request: Request) -> None:
        """Leaves a request out of the steps until ``drawn`` is called."""
        request.is_drawing = True
        if request.state is State.RUNNING and request not in self._running.drawing:
            self._running.take(request)
            self._running.drawing[request] = None

    def _drop_old_tokens(self, request: Request) -> bool:
        if not self._overflow.drop(request, self.cache):
            return False
        if request.state is State.RUNNING:
            self._running.take(request)
            self._running.add(request)
        return True

    def observe(self, plan: BatchPlan, seconds: float) -> None:
        """Learns the time of a step, from its launch to its tokens."""
        only_decodes = plan.n_decode == len(plan.tokens) or plan.n_guessed > 0
        if self.turns.observe(len(plan.tokens), only_decodes, seconds):
            return  # it says little about others
        if plan.n_guessed or ((self.can_guess or self.drafts) and plan.n_decode == len(plan.tokens)):
            self.gate.observe(plan.n_decode, plan.n_guessed, seconds)
        budget = self.batch_builder.budget
        if budget.is_on and (plan.n_decode or self._running.others) and not plan.n_guessed:
            n = len(plan.tokens) - plan.n_decode - len(plan.padding)
            n_rows = sum(len(scored.entries) for scored in plan.scored)
            position = sum(plan.positions[-n:]) / n if n else 0.0
            budget.observe(n, position, seconds, n_rows, decodes=plan.n_decode > 0)

    def _score_next(self, request: Request, targets: LogprobTargets) -> None:
        """Continues with the next text to score after the same context. Ends the request if there is none."""
        following = targets.following()
        if following is None:
            self.finish(request, "stop")
            return
        request.tokens, n_kept = following
        self.cache.truncate(request, n_kept)

    def abort(self, plan: BatchPlan, error: BaseException) -> list[Request]:
        """Ends the requests of a step that failed, and no others. Returns them."""
        requests = self.drop(plan)
        for request in requests:
            self.fail(request, error)
        return requests

    def drop(self, plan: BatchPlan) -> list[Request]:
        """Discards a step that was not computed. Returns the requests that are still part of it."""
        plan.in_flight = False
        self.cache.memory_ops += plan.padding
        return [request for request, _ in plan.scheduled if request.batch_plan is plan]

    def cells_changed(self, changes: CellChanges) -> bool:
        """Notes what became of ``cache.memory_ops``. False if a sequence lost its cells: it is computed again."""
        for key, n_bytes in changes.saved:
            self.cache.saved(key, n_bytes)
        for slot in changes.lost:
            request = next((request for request in self._running if request.slot == slot), None)
            self.cache.lost(slot, request)
            if request is not None:
                self._running.recompute(request)
        return not changes.lost

    def free_cells_after(self, plan: BatchPlan) -> bool:
        """Discards a step that found no cells and frees some. False if only one request has any."""
        self.drop(plan)
        if self.cache.n_parked_cells:
            self.cache.evict(0)
            return True
        none_paused = not self._running.paused
        preempted = self._preempt_least()
        # A request that was running would be admitted again at once, and fail again.
        self._full = preempted is not None and none_paused
        return preempted is not None

    # ---- slots and cells
    def _count_gaps(self, plan: BatchPlan) -> None:
        """Counts what gaps between the slots of decoding requests cost; padded or not."""
        if plan.n_decode and self.batch_builder.n_micro_batches == 1:
            first, last = plan.seq_ids[0], self._running.decoding[-1].slot
            n = last - first + 1 - plan.n_decode
            if n:
                n -= sum(first < request.slot < last for request in self._running.prefilling)
            self._n_gaps = self._n_gaps + n if n else 0

    def _close_gaps(self) -> None:
        """Moves decoding requests to neighbouring slots, when the gaps have cost about as much as that."""
        running, cache = self._running, self.cache
        decoding = running.decoding
        if (
            not decoding
            or running.prefilling
            or any(r.batch_plan is not None and r.batch_plan.in_flight for r in decoding)
            # Cells that are to be shifted are rotated by the next step; a copy would miss that.
            or any(isinstance(op, Shift) for op in cache.memory_ops)
        ):
            return
        # Paused requests keep their slots. Of all n slots that the n requests could have, those which are closest
        # together, then those to which the fewest cells are moved, or saved to make room.
        n_cells = {r.slot: r.n_past for r in decoding}
        slots, n = sorted(cache.free.union(n_cells)), len(decoding)

        def cost(chosen: Sequence[int]) -> tuple[int, int]:
            n_moved = sum(n_cells[slot] for slot in n_cells.keys() - chosen)
            n_saved = sum(cache.parked[slot].n for slot in cache.parked.keys() & chosen)
            return chosen[-1] - chosen[0], n_moved + n_saved

        best = min((slots[begin : begin + n] for begin in range(len(slots) - n + 1)), key=cost)
        if self._n_gaps * _CELLS_PER_GAP < cost(best)[1]:
            return
        self._n_gaps = 0
        targets = [slot for slot in best if slot not in n_cells]
        for request in [r for r in decoding if r.slot not in best]:
            running.take(request)
            cache.move(request, targets.pop())
            running.add(request)

    def _preempt_least(self) -> Request | None:
        """Preempts the request that paused first, else the newest. None if only one has a slot."""
        least = self._running.least()
        if least is not None:
            self.preempt(least)
        return least

    def _admit(self) -> None:
        paused, waiting, cache = self._running.paused, self._waiting, self.cache
        while waiting.queued:
            request = waiting.next()
            if not cache.free:
                if paused:
                    self.preempt(next(iter(paused)))
                elif not self._preempt_below(request):
                    return
                continue  # a follower of the preempted one may be next now
            if self._full or (self._scarce and self._running.n_cells + len(request.tokens) > self.n_cells):
                if paused:
                    self.preempt(next(iter(paused)))
                    continue
                if self._preempt_below(request):
                    continue
                if self._running.can_compute:
                    return
            found = cache.find(request)
            waiting.remove(request)
            if found.leader is not None:
                waiting.follow(request, found.leader, found.n)
                continue
            if found.cells is not None:
                cache.touch(found.cells)
            if self._scarce:
                cache.evict(max(self.n_cells - self._running.n_cells - len(request.tokens), 0))
            if request.saved_cells is not None:
                cache.unpin(request)
            cache.place(request, found)
            waiting.admitted(request)
            if not request.n_total:
                request.n_cached = request.n_past
            self.dequeued.append(request)
            request.move(State.RUNNING)
            self._running.add(request)

    def _preempt_below(self, request: Request) -> bool:
        """Preempts a request of a lower priority than this one. False if there is none."""
        if request.spec.priority <= self._lowest_priority or not len(self._running):
            return False
        least = self._running.newest_of_lowest()
        if least.spec.priority >= request.spec.priority:
            return False
        self.preempt(least)
        return True

    def _make_room(self) -> None:
        room = self.n_cells - self._running.n_cells
        if self.cache.n_parked_cells > max(room, 0):
            self.cache.evict(max(room, 0))
        while self._running.n_cells > self.n_cells and self._preempt_least() is not None:
            pass

    def _pause(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self._running.take(request)
            self._running.paused[request] = None
            request.move(State.PAUSED)
            self._waiting.release(request)

    def n_cells_by_slot(self) -> dict[int, int]:
        """How many cells each slot has, once all memory operations are done and no step is in flight."""
        cells = dict.fromkeys(range(self.cache.n_slots), 0)
        cells |= {slot: parked.n for slot, parked in self.cache.parked.items()}
        return cells | {request.slot: request.n_past for request in self._running}

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, states and lists disagree. For tests and debugging."""
        taken = sorted(request.slot for request in self._running)
        assert len(set(taken)) == len(taken), f"two requests in one slot: {taken}"
        assert self.cache.free.isdisjoint(taken), f"a used slot counts as free: {taken} {self.cache.free}"
        assert len(taken) + len(self.cache.free) == self.cache.n_slots, (
            f"slots are lost: {taken} {self.cache}"
        )
        self.cache.check_integrity()
        self._running.check_integrity()
        self._waiting.check_integrity()
        for request in self._running:
            assert request.state in (State.RUNNING, State.PAUSED), request
            assert request.cells is not None and request.cells.slot == request.slot, request
            assert 0 <= request.n_past <= len(request.tokens) <= self.n_ctx, request
        for request in self._waiting:
            assert request.state is State.WAITING and request.slot == -1 and request.n_past == 0, request

"""Decides what each step computes and records what came of it. Pure policy: no threads, no native code.

One thread calls it. ``plan`` says what the next step feeds, ``commit`` takes the sampled tokens. In a step, requests
that decode come first, then prompts in the order of arrival up to the token budget, cut into chunks: while streams are
decoding a step takes at most ``n_ubatch`` tokens, so that a long prompt does not hold them up.

When slots or cells run out, requests that wait for their reader give way first, then the newest; what is preempted
keeps its tokens and computes them again later.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

from llamapipe.engine.family import Family
from llamapipe.engine.request import Request, State
from llamapipe.engine.slots import Slots
from llamapipe.engine.step_plan import Copy, Remove, StepPlan
from llamapipe.errors import DecodeError

_by_slot = attrgetter("slot")
_by_arrival = attrgetter("arrival")


def undrawn(request: Request, code: int) -> Exception:
    """Why no token could be drawn; see ``Executor.sample``."""
    if code == -2:
        return DecodeError(
            "no token is allowed by what this request asks for; the text ends where it must go on"
        )
    error: Exception | None = getattr(request.sampler, "error", None)
    if code == -3:
        return error or DecodeError("drawing a token failed; see the log llamapipe.native")
    return DecodeError("no logit of this request's row is finite; the model or its weights are damaged")


class Scheduler:
    """The requests of one context and their order.

    ``n_slots`` sequences, at most ``n_ctx`` positions each and ``n_cells`` in all; ``n_batch`` tokens in a step.
    ``filler``: a token to fill gaps between decoding sequences with, None when gaps cost nothing (unified KV).
    ``n_score_rows``: most rows in a step that score a request's own tokens. ``least_copy``: how many of
    a sequence's first cells it pays to copy, None if that is never done.

    ``depth``: how many steps of scores may be under way at once; if several, each has at most ``n_ubatch`` tokens.
    ``cohorts``: how many parts decoding requests are split into, each a step of its own, so that one can be computed
    while another is sampled. A plan may be made while another is under way; its requests are not in it then.
    """

    def __init__(
        self,
        n_slots: int,
        n_ctx: int,
        n_cells: int,
        n_batch: int,
        n_ubatch: int,
        filler: int | None = None,
        n_score_rows: int = 32,
        least_copy: int | None = 1,
    ) -> None:
        if n_cells < n_ctx:
            raise ValueError(
                f"n_cells is {n_cells} and n_ctx {n_ctx}; one request could never use its n_ctx: raise n_cells"
            )
        self.n_ctx = n_ctx
        self.n_cells = n_cells
        self.n_batch = n_batch
        self.n_ubatch = n_ubatch
        self.n_score_rows = n_score_rows
        self._least_copy = least_copy
        self.n_preempted = 0
        self.cohorts = 1
        self.depth = 1
        self._filler = filler
        self._slots = Slots(n_slots)
        self._scarce = n_cells < n_ctx * n_slots
        self._full = False  # a step found no cells: nobody comes in before somebody left
        self._n_arrived = 0
        self._queue: OrderedDict[Request, None] = OrderedDict()  # new, in order of arrival
        self._ready: list[Request] = []  # preempted and allowed to go on, in order of arrival
        self._parked: set[Request] = set()  # preempted while waiting for their reader
        self._decoding: list[Request] = []  # running, by slot
        self._prefilling: list[Request] = []  # running, by arrival
        self._paused: OrderedDict[Request, None] = OrderedDict()  # in a slot, longest paused first
        self._following = 0  # new, and waiting for another to compute their prompt
        self.memory_ops: list[Remove | Copy] = []  # to be done in this order before the next step
        self.dequeued: list[Request] = []  # got a slot or ended; one that was preempted comes again
        self._last: StepPlan | None = None  # committed, and could be planned again
        self._n_moves = self._n_moves_planned = (
            0  # in or out of the running lists: by now, and when _last was made
        )

    def __repr__(self) -> str:
        return (
            f"<Scheduler queued={len(self._queue)} ready={len(self._ready)} parked={len(self._parked)} "
            f"prefilling={len(self._prefilling)} decoding={len(self._decoding)} paused={len(self._paused)}>"
        )

    # ---- what the decoder thread asks
    @property
    def n_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue) + len(self._ready) + self._following

    @property
    def n_active(self) -> int:
        """Requests in a slot."""
        return len(self._decoding) + len(self._prefilling) + len(self._paused)

    @property
    def n_live(self) -> int:
        """Requests that are not finished."""
        return self.n_queued + self.n_active + len(self._parked)

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned."""
        return bool(self._decoding or self._prefilling or self._ready or self._queue)

    @property
    def all_ready(self) -> bool:
        """Whether every unfinished request may go on, so that none is worth waiting for."""
        return not self._paused and not self._parked

    @property
    def n_flights(self) -> int:
        """How many steps may be under way: what decodes needs the last one's tokens, scores do not."""
        return max(self.cohorts, self.depth) if self._only_scores() else self.cohorts

    def _only_scores(self) -> bool:
        """Whether nothing that runs will ever decode."""
        return not self._decoding and all(request.max_tokens == 0 for request in self._prefilling)

    def live(self) -> list[Request]:
        """Every unfinished request."""
        return [*self._decoding, *self._prefilling, *self._paused, *self._ready, *self._parked, *self._queue]

    def take_memory_ops(self) -> list[Remove | Copy]:
        """The ``memory_ops`` so far."""
        ops, self.memory_ops = self.memory_ops, []
        return ops

    def take_dequeued(self) -> list[Request]:
        """Those ``dequeued`` since this was asked last."""
        dequeued, self.dequeued = self.dequeued, []
        return dequeued

    # ---- events
    def add(self, request: Request) -> None:
        """Queues a new request."""
        request.arrival = self._n_arrived
        self._n_arrived += 1
        family = request.family
        if family is not None and not family.arrive(request):
            self._following += 1
        elif request.n_total < request.limit:
            self._queue[request] = None
        else:
            self._parked.add(request)

    def resume(self, request: Request) -> None:
        """Lets a request go on whose ``limit`` was raised or whose tokens were changed; otherwise does nothing."""
        if request.finish_reason is not None or request.n_total >= request.limit:
            return
        if request in self._paused:
            del self._paused[request]
            request.move(State.RUNNING)
            self._run(request)
        elif request in self._parked:
            self._parked.discard(request)
            insort(self._ready, request, key=_by_arrival)

    def trim(self, request: Request, n_keep: int) -> None:
        """Keeps the first ``n_keep`` tokens of a kept request that is not running."""
        del request.tokens[n_keep:]
        request.n_prompt = min(request.n_prompt, n_keep)
        # The last token is computed again: its logits are what the next one is drawn from.
        n_past = min(request.n_past, n_keep - 1)
        if request.slot >= 0 and n_past < request.n_past:
            self.memory_ops.append(Remove(request.slot, n_past))
        request.n_past = n_past
        self._reopen(request)

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Adds tokens to a kept request that is not running."""
        request.tokens.extend(tokens)
        if request.n_total == 0:  # nothing was generated: it is still the prompt
            request.n_prompt = len(request.tokens)
        self._reopen(request)

    def _reopen(self, request: Request) -> None:
        request.finish_reason = None
        request.n_generated = 0

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request: its slot is free at once; a kept one keeps slot and cells, unless cancelled."""
        if request.state is State.FINISHED:
            return
        request.finish_reason = reason
        if request.keep and reason in ("stop", "length"):
            self._pause(request)
            return
        slot = request.slot
        holds_prompt = (
            request.family is not None and request.error is None and request.n_past >= request.n_prompt
        )
        self._leave(request)
        request.move(State.FINISHED)
        if slot >= 0 and holds_prompt:
            self._bequeath(request.family, slot)
        if request.family is not None:
            request.family.leave(request)
            self._follow(request.family)

    def _bequeath(self, family: Family, slot: int) -> None:
        """Gives the cells of a prompt, whose request is finished, to another that has a token behind it to feed."""
        heir = family.take_heir()
        if heir is None:
            return
        if heir in self._ready:
            self._ready.remove(heir)
        else:
            self._following -= 1
        self.memory_ops.pop()  # which would remove all of the cells
        self._slots.take_back(slot)
        heir.slot = slot
        heir.n_past = min(heir.n_prompt, len(heir.tokens) - 1)
        self.memory_ops.append(Remove(slot, heir.n_past))
        self.dequeued.append(heir)
        family.place(heir)
        heir.move(State.RUNNING)
        self._run(heir)

    def _follow(self, family: Family) -> None:
        """Lets those in who wait for a prompt that is computed, or who have to compute it now."""
        for request in family.take_ready():
            self._following -= 1
            insort(self._ready, request, key=_by_arrival)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is."""
        self.finish(request, "cancelled")

    def fail(self, request: Request, error: BaseException) -> None:
        """Ends a request with an error."""
        if request.state is not State.FINISHED:
            request.error = error
            self.finish(request, "cancelled")

    def preempt(self, request: Request) -> None:
        """Takes slot and cells from a request; it computes its tokens again when it gets its turn."""
        paused = request.state is State.PAUSED
        self._leave(request)
        request.n_past = 0
        request.move(State.WAITING)
        self.n_preempted += 1
        if paused:
            # `resume` brings it back: a reader that takes a little now and then must not keep others out.
            self._parked.add(request)
        else:
            insort(self._ready, request, key=_by_arrival)

    # ---- steps
    def plan(self) -> StepPlan | None:
        """What the next step feeds, None when nothing can be done now."""
        if self._queue or self._ready:
            self._admit()
        if not self._decoding and not self._prefilling:
            return None
        if self._scarce:
            self._make_room()
        last, self._last = self._last, None
        if last is not None and self._n_moves == self._n_moves_planned and self.cohorts == 1:
            last.again = last.flying = True
            return last
        plan = StepPlan()
        self._n_moves_planned = self._n_moves
        if self._decoding:
            self._plan_decode(plan)
        if self._prefilling:
            self._plan_prefill(plan)
        if not plan.tokens:
            return None  # all that could be are in steps under way
        for request, _ in plan.fed:
            request.flight = plan
        return plan

    def commit(self, plan: StepPlan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Records a step: the cells it filled and the token drawn for each of ``plan.requests`` (-1: none could be).

        Returns requests with their tokens, without those that ended or lost their slot while the step was under way.
        """
        plan.flying = False
        for request, n in plan.fed:
            if request.flight is plan:
                request.n_past += n
        taken = [(r, token) for r, token in zip(plan.requests, sampled, strict=True) if r.flight is plan]
        for request, _, _ in plan.scored:
            if request.flight is plan and request.max_tokens == 0 and request.n_past == len(request.tokens):
                self._score_on(request)
        if (
            len(plan.fed) > plan.n_decode
        ):  # those who have no slot first: they need their tokens to inherit one
            taken.sort(key=lambda pair: pair[0].slot >= 0)
        for request, token in taken:
            if token in request.stop_tokens:
                self.finish(request, "stop")
                continue
            if token < 0:
                self.fail(request, undrawn(request, token))
                continue
            tokens = request.tokens
            tokens.append(token)
            request.n_generated += 1
            request.n_total += 1
            if getattr(request.sampler, "finished", False):
                self.finish(request, "stop")
            elif request.n_generated >= request.max_tokens or len(tokens) >= self.n_ctx:
                self.finish(request, "length")
            elif request.n_total >= request.limit:
                self._pause(request)
        self.memory_ops += plan.fillers
        if len(plan.fed) > plan.n_decode:
            for request, _ in plan.fed[plan.n_decode :]:
                if request.family is not None and request.family.waiting:
                    self._follow(request.family)
            for request in [r for r in self._prefilling if self._decodes(r)]:
                self._prefilling.remove(request)
                self._run(request)
        elif plan.n_decode == len(plan.tokens) and len(plan.requests) == len(self._decoding):
            self._last = plan  # of all: after a change from two cohorts it may be of half of them
        return taken

    def _score_on(self, request: Request) -> None:
        """Goes on with what is to be scored behind the same context, or ends."""
        following = request.scoring.following()
        if following is None:
            self.finish(request, "stop")
            return
        request.tokens, n_kept = following
        self.memory_ops.append(Remove(request.slot, n_kept))
        request.n_past = n_kept

    def abort(self, plan: StepPlan, error: BaseException) -> list[Request]:
        """Ends the requests of a step that failed, and nobody else's; returns them."""
        requests = self.drop(plan)
        for request in requests:
            self.fail(request, error)
        return requests

    def drop(self, plan: StepPlan) -> list[Request]:
        """Forgets a step that came to nothing; the requests that were in it until now."""
        plan.flying = False
        self.memory_ops += plan.fillers
        return [request for request, _ in plan.fed if request.flight is plan]

    def recompute(self, slot: int) -> None:
        """The memory could not forget a part of this sequence and lost all of it: its tokens are computed again."""
        for request in (*self._decoding, *self._prefilling, *self._paused):
            if request.slot == slot:
                request.n_past = 0
                if request in self._decoding:
                    self._decoding.remove(request)
                    self._run(request)

    def relieve(self, plan: StepPlan) -> Request | None:
        """Drops a step that found no cells and preempts one of several requests; None when only one is left."""
        self.drop(plan)
        nobody_paused = not self._paused
        preempted = self._give_way()
        # One that ran would come back at once, and to the same end.
        self._full = preempted is not None and nobody_paused
        return preempted

    # ---- inside
    def _give_way(self) -> Request | None:
        """Preempts the request that paused first, else the newest; None when only one has a slot."""
        running = [*self._decoding, *self._prefilling, *self._paused]
        if len(running) < 2:
            return None
        newest = next(iter(self._paused)) if self._paused else max(running, key=_by_arrival)
        self.preempt(newest)
        return newest

    def _admit(self) -> None:
        while self._queue or self._ready:
            if not self._slots.n_free:
                if not self._paused:
                    return
                self.preempt(next(iter(self._paused)))
            request = self._ready[0] if self._ready else next(iter(self._queue))
            if self._full or (self._scarce and self._cells_used() + len(request.tokens) > self.n_cells):
                if self._paused:
                    self.preempt(next(iter(self._paused)))
                    continue
                if self._decoding or self._prefilling:
                    return
            if self._ready:
                del self._ready[0]
            else:
                del self._queue[request]
            if request.family is not None and request.family.is_computing():
                request.family.wait(request)  # it comes in when there is something to copy
                self._following += 1
                continue
            self.dequeued.append(request)
            request.slot = self._slots.take()
            if request.family is not None:
                self._copy_prompt(request)
                request.family.place(request)
            request.move(State.RUNNING)
            self._run(request)

    def _copy_prompt(self, request: Request) -> None:
        """Begins with the cells of another's prompt, but with a token left to feed."""
        source, n = request.family.source(), min(request.n_prompt, len(request.tokens) - 1)
        if source is None or request.scoring is not None or self._least_copy is None or n < self._least_copy:
            return
        self.memory_ops.append(Copy(source.slot, request.slot, n))
        request.n_past = n

    def _cells_used(self) -> int:
        """Cells that running requests hold or will hold once their tokens are fed."""
        running = sum(len(r.tokens) for r in self._decoding) + sum(len(r.tokens) for r in self._prefilling)
        return running + sum(r.n_past for r in self._paused)

    def _make_room(self) -> None:
        while self._cells_used() > self.n_cells and self._give_way() is not None:
            pass

    def _run(self, request: Request) -> None:
        self._n_moves += 1
        if self._decodes(request):
            insort(self._decoding, request, key=_by_slot)
        else:
            insort(self._prefilling, request, key=_by_arrival)

    def _decodes(self, request: Request) -> bool:
        """Whether a token is left to feed and another to draw; who leads a family feeds its prompt first."""
        leads = request.n_past == 0 and request.family is not None and request.family.waiting
        return len(request.tokens) - request.n_past == 1 and request.max_tokens > 0 and not leads

    def _pause(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self._stop(request)
            self._paused[request] = None
            request.move(State.PAUSED)

    def _stop(self, request: Request) -> None:
        self._n_moves += 1
        if request in self._decoding:
            self._decoding.remove(request)
        else:
            self._prefilling.remove(request)

    def _leave(self, request: Request) -> None:
        """Takes a request out of wherever it is and frees its slot."""
        if request.state is State.RUNNING:
            self._stop(request)
        elif request.state is State.PAUSED:
            del self._paused[request]
        elif request in self._parked:
            self._parked.discard(request)
        elif request in self._queue:
            del self._queue[request]
        elif request.family is not None and request in request.family.waiting:
            self._following -= 1
        else:
            self._ready.remove(request)
        self.dequeued.append(request)
        request.flight = None
        if request.family is not None:
            request.family.leave(request)
        if request.slot >= 0:
            self.memory_ops.append(Remove(request.slot, 0))
            self._slots.give(request.slot)
            request.slot = -1
            self._full = False

    def _plan_decode(self, plan: StepPlan) -> None:
        decoding, n_flying = self._decoding, 0
        if self.cohorts > 1:
            free = [r for r in decoding if r.flight is None or not r.flight.flying]
            n_flying = len(decoding) - len(free)
            # Halves by slot, so that no gap has to be filled: the lower one first.
            decoding = free[: -(-len(decoding) // self.cohorts)]
            if not decoding:
                return
        n = plan.n_decode = len(decoding)
        plan.tokens = [r.tokens[-1] for r in decoding]
        plan.positions = [r.n_past for r in decoding]
        plan.seq_ids = [r.slot for r in decoding]
        plan.outputs = [1] * n
        plan.rows = list(range(n))
        plan.requests = decoding.copy()
        plan.fed = [(r, 1) for r in decoding]
        # A gap may be a sequence of a step under way.
        if (
            self._filler is not None
            and not n_flying
            and len(decoding) == len(self._decoding)
            and plan.seq_ids[-1] - plan.seq_ids[0] >= n
        ):
            self._fill_gaps(plan, self._filler)

    def _fill_gaps(self, plan: StepPlan, filler: int) -> None:
        """Gives the sequences in the gaps a token each, where that is cheaper than cutting the batch there."""
        feeding = {r.slot for r in self._prefilling}  # have tokens of their own in this step
        held = {r.slot: r.n_past for r in self._paused}
        first, last = plan.seq_ids[0], plan.seq_ids[-1]
        gaps = sorted(set(range(first, last)) - set(plan.seq_ids) - feeding)
        if len(gaps) > len(plan.seq_ids):
            return
        for slot in gaps:
            position = held.get(slot, 0)  # below n_ctx: the last token of a full sequence is never fed
            i = slot - first - sum(1 for f in feeding if first < f < slot)
            plan.tokens.insert(i, filler)
            plan.positions.insert(i, position)
            plan.seq_ids.insert(i, slot)
            plan.outputs.insert(i, 0)
            plan.fillers.append(Remove(slot, position))
        plan.rows = [i for i, output in enumerate(plan.outputs) if output]

    def _plan_prefill(self, plan: StepPlan) -> None:
        budget = self.n_batch - len(plan.tokens)
        if self._decoding:
            budget = min(budget, max(self.n_ubatch - len(plan.tokens), 1))
        elif self.depth > 1 if self._only_scores() else len(self._prefilling) > 1:
            # llama.cpp computes no more at a time. So the next step need not wait for it, nor the first prompt's token
            # for the last prompt.
            budget = min(budget, self.n_ubatch)
        n_rows = self.n_score_rows
        whole, n_before = budget, len(plan.fed)
        for request in self._prefilling:
            if budget <= 0:
                return
            if request.flight is not None and request.flight.flying:
                continue
            first = request.n_past
            n_left = len(request.tokens) - first
            if budget < n_left <= whole and len(plan.fed) > n_before and request.max_tokens != 0:
                return  # the next step has room for all of it; in parts it would take a pass over the weights more
            n = min(n_left, budget)
            scored = range(0)
            if request.scoring is not None:
                n, scored = self._scored(request, n, n_rows)
                if n <= 0:
                    continue
            budget -= n
            n_rows -= len(scored)
            begin = len(plan.tokens)
            plan.tokens += request.tokens[first : first + n]
            plan.positions += range(first, first + n)
            plan.seq_ids += [request.slot] * n
            plan.outputs += [0] * n
            plan.fed.append((request, n))
            if scored:
                entries = range(begin + scored.start - first, begin + scored.stop - first)
                plan.outputs[entries.start : entries.stop] = [1] * len(scored)
                plan.scored.append((request, scored.start, entries))
            if n == n_left and request.max_tokens:
                plan.outputs[-1] = 1
                plan.rows.append(len(plan.tokens) - 1)
                plan.requests.append(request)
                if request.family is not None and len(request.tokens) == request.n_prompt:
                    self._plan_followers(plan, request.family)

    def _plan_followers(self, plan: StepPlan, family: Family) -> None:
        """The others' first tokens are drawn from the row of the prompt, before they have a slot."""
        for request in family.waiting:
            if len(request.tokens) == request.n_prompt:
                plan.rows.append(plan.rows[-1])
                plan.requests.append(request)
                request.flight = plan

    def _scored(self, request: Request, n: int, n_rows: int) -> tuple[int, range]:
        """How many tokens are fed, of ``n``, if they may have so many outputs; and whose rows are wanted."""
        first, scoring = request.n_past, request.scoring
        begin = max(first, scoring.wanted_from)
        end = min(first + n, scoring.wanted_to)
        if end <= begin:
            return n, range(0)
        if end - begin > n_rows:
            end = begin + n_rows
            n = end - first
        return n, range(begin, end)

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, states and lists disagree. For tests and debugging."""
        held = [*self._decoding, *self._prefilling, *self._paused]
        taken = sorted(r.slot for r in held)
        assert len(set(taken)) == len(taken), f"two requests in one slot: {taken}"
        assert self._slots.free.isdisjoint(taken), f"a used slot counts as free: {taken} {self._slots.free}"
        assert len(taken) + self._slots.n_free == self._slots.n, f"slots are lost: {taken} {self._slots.free}"
        assert self._decoding == sorted(self._decoding, key=_by_slot)
        for request in held:
            assert request.state in (State.RUNNING, State.PAUSED), request
            assert 0 <= request.n_past <= len(request.tokens) <= self.n_ctx, request
        for request in (*self._queue, *self._ready, *self._parked):
            assert request.state is State.WAITING and request.slot == -1 and request.n_past == 0, request
        for request in self._decoding:
            assert len(request.tokens) - request.n_past == 1, request

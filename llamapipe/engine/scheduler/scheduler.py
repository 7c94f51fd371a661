"""Decides which requests run in each step, and records the sampled tokens. Pure policy: no threads, no native code.

The engine loop calls ``plan`` for the next step and ``commit`` with its tokens. A plan may be made while another step
is in flight; it leaves out the requests of that step.

When cells run out, parked ones go first (see ``kv_cache``), then paused requests are preempted, then the newest. A
preempted request keeps its tokens. Its cells are saved in host memory, or computed again later.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamapipe.engine.scheduler.batch_builder import BatchBuilder
from llamapipe.engine.scheduler.batch_plan import BatchPlan, Shift
from llamapipe.engine.scheduler.kv_cache import KvCache
from llamapipe.engine.scheduler.logprob_targets import LogprobTargets
from llamapipe.engine.scheduler.overflow import Overflow
from llamapipe.engine.scheduler.request import Request, State
from llamapipe.engine.scheduler.running import Running
from llamapipe.engine.scheduler.waiting import Waiting
from llamapipe.errors import NoToken

_LATER = int(NoToken.LATER)  # looked at in every step
# Gaps between decoding requests, added up over steps, before they are closed: new requests may fill them.
_LEAST_GAPS = 8
# A padding token takes as long as moving so many cells, with a model whose tokens are cheap; with others, longer.
_CELLS_PER_GAP = 200


class Scheduler:
    """The requests of one context.

    Sequences of at most ``n_ctx`` positions each and ``n_cells`` in all, in the slots of ``cache``; ``n_batch`` tokens
    in a step, of which llama.cpp computes ``n_ubatch`` at a time. For ``padding_token``, ``n_score_rows``,
    ``prefill_cutoff`` and ``max_itl_s`` see BatchBuilder, for ``overflow`` Overflow.

    ``batch_builder``: its ``depth`` and ``n_micro_batches`` may be changed between two steps.
    ``dequeued``: requests that got a slot or ended since ``take_dequeued`` was called; a preempted request is listed
    again. ``unsettled``: those with their last token whose samplers do not know yet whether the text is complete.
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
        self._scarce = n_cells < n_ctx * cache.n_slots
        self._full = False  # a step found no cells: admit no request before one has left
        self._n_arrived = 0
        self._lowest_priority = 0  # of all requests so far
        self._waiting = Waiting()  # without a slot
        self._running = Running()  # in a slot
        self.dequeued: list[Request] = []
        self.unsettled: list[Request] = []
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
        return self._running.has_work or self._waiting.has_next

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

    @property
    def has_memory_ops(self) -> bool:
        """Whether KV cells are to be changed before the next step."""
        return bool(self.cache.memory_ops)

    def take_dequeued(self) -> list[Request]:
        """Removes and returns ``dequeued``."""
        dequeued, self.dequeued = self.dequeued, []
        return dequeued

    # ---- events
    def add(self, request: Request) -> None:
        """Queues a new request."""
        request.arrival = self._n_arrived
        self._n_arrived += 1
        self._lowest_priority = min(self._lowest_priority, request.priority)
        self._waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Gives a new request the sequence of a resumable one that is not running; it will find its cells."""
        child.tokens = parent.tokens.copy()
        child.dropped = parent.dropped.copy()
        child.n_kept = parent.n_kept
        child.n_prompt = parent.n_prompt
        child.n_generated = parent.n_generated
        self.cache.learn(parent)

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
        self._reopen(request)

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Appends tokens to a resumable request that is not running."""
        request.tokens.extend(tokens)
        if request.n_total == 0:  # nothing was generated yet: these are part of the prompt
            request.n_prompt = len(request.tokens)
        self._reopen(request)

    def _reopen(self, request: Request) -> None:
        request.finish_reason = None
        request.n_generated = 0

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request and frees its slot. A resumable request keeps slot and cells, unless it is cancelled."""
        if request.state is State.FINISHED:
            return
        request.finish_reason = reason
        if request.resumable and reason in ("stop", "length"):
            self._pause(request)
            return
        self._leave(request)
        request.move(State.FINISHED)

    def stop(self, request: Request) -> None:
        """Ends a request whose text completed a stop string, also if its last token had ended it already."""
        self.finish(request, "stop")
        request.finish_reason = "stop"

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
        self._take(request)
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
        if self.cache.n_free >= waiting.n_ready or request not in self._running.drawing:
            return False
        if waiting.next().share == request.share and lateness < 2 ** min(request.n_lent, 20):
            return False
        request.n_lent += 1
        self.preempt(request)
        return True

    # ---- steps
    def plan(self) -> BatchPlan | None:
        """The plan of the next step. None if nothing can be computed now."""
        if self._waiting.has_next:
            self._admit()
        running = self._running
        if not running.has_work:
            return None
        if self._scarce:
            self._make_room()
        if self._n_gaps >= _LEAST_GAPS:
            self._close_gaps()
        last, self._last = self._last, None
        if last is not None and self._n_moves == running.n_moves and self.batch_builder.n_micro_batches == 1:
            last.repeats = last.in_flight = True
            self._count_gaps(last)
            return last
        self._n_moves = running.n_moves
        plan = self.batch_builder.plan(running, self.cache.parked)
        self._count_gaps(plan)
        return plan if plan.tokens else None  # none: all requests are in steps in flight

    def commit(self, plan: BatchPlan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Records a step: its KV cells, and the token of each of ``plan.requests`` (or a NoToken).

        Returns the requests that are still part of the step, with their tokens.
        """
        plan.in_flight = False
        for request, n in plan.scheduled:
            if request.batch_plan is plan:
                request.n_past += n
        if len(plan.scheduled) == 1:
            self.cache.computed_alone(*plan.scheduled[0])
        taken = [(r, token) for r, token in zip(plan.requests, sampled, strict=True) if r.batch_plan is plan]
        for request, targets, *_ in plan.scored:
            if (
                request.batch_plan is plan
                and request.max_tokens == 0
                and request.n_past == len(request.tokens)
            ):
                self._score_next(request, targets)
        for request, token in taken:
            self._add_token(request, token)
        self.cache.memory_ops += plan.padding
        if len(plan.scheduled) > plan.n_decode:
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

    def _add_token(self, request: Request, token: int) -> None:
        """Continues a request with a token, or ends it."""
        if token in request.stop_tokens:
            request.stop_token = token
            self.finish(request, "stop")
            return
        sampler = request.sampler
        if token < 0:
            self._no_token(request, token)
            return
        tokens = request.tokens
        tokens.append(token)
        request.n_generated += 1
        request.n_total += 1
        if sampler is not None and sampler.finished:
            self.finish(request, "stop")
        elif request.n_generated >= request.max_tokens or (
            len(tokens) >= self.n_ctx and not self._drop_old_tokens(request)
        ):
            if sampler is not None and sampler.is_busy:  # it knows soon whether the text is complete
                self._draw_later(request)
                self.unsettled.append(request)
            else:
                self.finish(request, "length")
        elif request.n_total >= request.token_budget:
            self._pause(request)

    def _no_token(self, request: Request, code: int) -> None:
        if code == NoToken.LATER:
            self._draw_later(request)
        elif code == NoToken.FINISHED:
            if request.resumable:  # the next token after a change is sampled from the logits of the last one
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
        budget = self.batch_builder.budget
        if budget.is_on and plan.n_decode:
            n = len(plan.tokens) - plan.n_decode - len(plan.padding)
            n_rows = sum(len(scored.entries) for scored in plan.scored)
            budget.observe(n, sum(plan.positions[-n:]) / n if n else 0.0, seconds, n_rows)

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

    def recompute(self, slot: int) -> None:
        """Has a sequence computed again: the memory could not remove a part of it and removed all of it."""
        request = next((request for request in self._running if request.slot == slot), None)
        self.cache.lost(slot, request)
        if request is not None:
            self._running.recompute(request)

    def relieve(self, plan: BatchPlan) -> bool:
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
        if self._closes_gaps and plan.n_decode and self.batch_builder.n_micro_batches == 1:
            first, last = plan.seq_ids[0], self._running.decoding[-1].slot
            n = last - first + 1 - plan.n_decode
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
        while waiting.has_next:
            request = waiting.next()
            if not cache.n_free:
                if paused:
                    self.preempt(next(iter(paused)))
                elif not self._preempt_below(request):
                    return
            if self._full or (self._scarce and self._running.n_cells + len(request.tokens) > self.n_cells):
                if paused:
                    self.preempt(next(iter(paused)))
                    continue
                if self._preempt_below(request):
                    continue
                if self._running.has_work:
                    return
            found = cache.find(request)
            waiting.remove(request)
            if found.leader is not None:
                waiting.follow(request, found.leader, found.n)
                continue
            cache.touch(found.cells)
            if self._scarce:
                cache.evict(max(self.n_cells - self._running.n_cells - len(request.tokens), 0))
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
        if request.priority <= self._lowest_priority or not len(self._running):
            return False
        least = self._running.newest_of_lowest()
        if least.priority >= request.priority:
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

    def _leave(self, request: Request) -> None:
        """Removes a request from its list and takes its slot."""
        self.dequeued.append(request)
        request.batch_plan = None
        if request.state is State.WAITING:
            self._waiting.remove(request)
            self._waiting.admitted(request)
        else:
            self._take(request)
            self.cache.leave(request)
            self._full = False
            self._waiting.release(request)
        if not request.keeps_cells:
            self.cache.unpin(request)

    def _take(self, request: Request) -> None:
        """Removes a request with a slot from its list."""
        if request.state is State.RUNNING:
            self._running.take(request)
        else:
            del self._running.paused[request]

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
        assert len(taken) + self.cache.n_free == self.cache.n_slots, f"slots are lost: {taken} {self.cache}"
        self.cache.check_integrity()
        self._running.check_integrity()
        self._waiting.check_integrity()
        for request in self._running:
            assert request.state in (State.RUNNING, State.PAUSED), request
            assert request.cells is not None and request.cells.slot == request.slot, request
            assert 0 <= request.n_past <= len(request.tokens) <= self.n_ctx, request
        for request in self._waiting:
            assert request.state is State.WAITING and request.slot == -1 and request.n_past == 0, request

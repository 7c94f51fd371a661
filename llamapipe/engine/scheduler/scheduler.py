"""Decides who runs in each step and records what came of it. Pure policy: no threads, no native code.

One thread calls it. ``plan`` says what the next step feeds, ``commit`` takes the sampled tokens.

When slots or cells run out, requests that wait for their reader give way first, then the newest; what is preempted
keeps its tokens and computes them again later.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

from llamapipe.engine.scheduler.batch_builder import BatchBuilder
from llamapipe.engine.scheduler.batch_plan import BatchPlan, Copy, Remove
from llamapipe.engine.scheduler.prompt_group import PromptGroup
from llamapipe.engine.scheduler.request import Request, State
from llamapipe.engine.scheduler.running import Running
from llamapipe.engine.scheduler.slots import Slots
from llamapipe.errors import DecodeError

_by_arrival = attrgetter("arrival")


def sampling_error(request: Request, code: int) -> Exception:
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
    ``padding_token``: a token to fill gaps between decoding sequences with, None when gaps cost nothing (unified KV).
    ``n_score_rows``: most rows in a step that score a request's own tokens. ``min_prefix_copy``: how many of
    a sequence's first cells it pays to copy, None if that is never done. ``prefill_cutoff``: see BatchBuilder.

    A plan may be made while another is under way; its requests are not in it then.
    """

    def __init__(
        self,
        n_slots: int,
        n_ctx: int,
        n_cells: int,
        n_batch: int,
        n_ubatch: int,
        padding_token: int | None = None,
        n_score_rows: int = 32,
        min_prefix_copy: int | None = 1,
        prefill_cutoff: int | None = None,
    ) -> None:
        if n_cells < n_ctx:
            raise ValueError(
                f"n_cells is {n_cells} and n_ctx {n_ctx}; one request could never use its n_ctx: raise n_cells"
            )
        self.n_ctx = n_ctx
        self.n_cells = n_cells
        self._min_prefix_copy = min_prefix_copy
        self.n_preempted = 0
        self._batch_builder = BatchBuilder(n_batch, n_ubatch, padding_token, n_score_rows, prefill_cutoff)
        self._slots = Slots(n_slots)
        self._scarce = n_cells < n_ctx * n_slots
        self._full = False  # a step found no cells: nobody comes in before somebody left
        self._n_arrived = 0
        self._queue: OrderedDict[Request, None] = OrderedDict()  # new, in order of arrival
        self._ready: list[Request] = []  # preempted and allowed to go on, in order of arrival
        self._preempted_paused: set[Request] = set()  # preempted while waiting for their reader
        self._running = Running()  # in a slot
        self._n_waiters = 0  # new, and waiting for another to compute their prompt
        self.memory_ops: list[Remove | Copy] = []  # to be done in this order before the next step
        self.dequeued: list[Request] = []  # got a slot or ended; one that was preempted comes again
        self._last: BatchPlan | None = None  # committed, and could be planned again
        self._n_moves = 0  # of those that run, when _last was made

    def __repr__(self) -> str:
        return (
            f"<Scheduler queued={len(self._queue)} ready={len(self._ready)} parked={len(self._preempted_paused)} "
            f"{self._running!r}>"
        )

    # ---- what the engine thread asks
    @property
    def n_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue) + len(self._ready) + self._n_waiters

    @property
    def n_active(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    @property
    def n_live(self) -> int:
        """Requests that are not finished."""
        return self.n_queued + self.n_active + len(self._preempted_paused)

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned."""
        return self._running.has_work or bool(self._ready or self._queue)

    @property
    def all_ready(self) -> bool:
        """Whether every unfinished request may go on, so that none is worth waiting for."""
        return not self._running.paused and not self._preempted_paused

    @property
    def max_in_flight(self) -> int:
        """How many steps may be under way: what decodes needs the last one's tokens, scores do not."""
        builder = self._batch_builder
        if (
            builder.depth <= builder.n_micro_batches or not self._running.only_scores
        ):  # the cheap question first
            return builder.n_micro_batches
        return builder.depth

    @property
    def n_micro_batches(self) -> int:
        """How many parts decoding requests are split into; see BatchBuilder."""
        return self._batch_builder.n_micro_batches

    @n_micro_batches.setter
    def n_micro_batches(self, n: int) -> None:
        self._batch_builder.n_micro_batches = n

    @property
    def depth(self) -> int:
        """How many steps of scores may be under way at once; see BatchBuilder."""
        return self._batch_builder.depth

    @depth.setter
    def depth(self, n: int) -> None:
        self._batch_builder.depth = n

    def live(self) -> list[Request]:
        """Every unfinished request."""
        return [*self._running, *self._ready, *self._preempted_paused, *self._queue]

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
        group = request.prompt_group
        if group is not None and not group.arrive(request):
            self._n_waiters += 1
        elif request.n_total < request.token_budget:
            self._queue[request] = None
        else:
            self._preempted_paused.add(request)

    def resume(self, request: Request) -> None:
        """Continues a request whose ``token_budget`` was raised or whose tokens changed; otherwise does nothing."""
        if request.finish_reason is not None or request.n_total >= request.token_budget:
            return
        if request in self._running.paused:
            del self._running.paused[request]
            request.move(State.RUNNING)
            self._running.add(request)
        elif request in self._preempted_paused:
            self._preempted_paused.discard(request)
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
        if request.resumable and reason in ("stop", "length"):
            self._pause(request)
            return
        slot = request.slot
        holds_prompt = (
            request.prompt_group is not None and request.error is None and request.n_past >= request.n_prompt
        )
        self._leave(request)
        request.move(State.FINISHED)
        if slot >= 0 and holds_prompt:
            self._hand_over_slot(request.prompt_group, slot)
        if request.prompt_group is not None:
            request.prompt_group.leave(request)
            self._release_waiters(request.prompt_group)

    def _hand_over_slot(self, group: PromptGroup, slot: int) -> None:
        """Gives the cells of a prompt, whose request is finished, to another that has a token behind it to feed."""
        successor = group.take_successor()
        if successor is None:
            return
        if successor in self._ready:
            self._ready.remove(successor)
        else:
            self._n_waiters -= 1
        self.memory_ops.pop()  # which would remove all of the cells
        self._slots.take_back(slot)
        successor.slot = slot
        successor.n_past = min(successor.n_prompt, len(successor.tokens) - 1)
        self.memory_ops.append(Remove(slot, successor.n_past))
        self.dequeued.append(successor)
        group.place(successor)
        successor.move(State.RUNNING)
        self._running.add(successor)

    def _release_waiters(self, group: PromptGroup) -> None:
        """Lets those in who wait for a prompt that is computed, or who have to compute it now."""
        for request in group.release_waiters():
            self._n_waiters -= 1
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
            self._preempted_paused.add(request)
        else:
            insort(self._ready, request, key=_by_arrival)

    # ---- steps
    def plan(self) -> BatchPlan | None:
        """What the next step feeds, None when nothing can be done now."""
        if self._queue or self._ready:
            self._admit()
        running = self._running
        if not running.has_work:
            return None
        if self._scarce:
            self._make_room()
        last, self._last = self._last, None
        if last is not None and self._n_moves == running.n_moves and self._batch_builder.n_micro_batches == 1:
            last.repeats = last.in_flight = True
            return last
        self._n_moves = running.n_moves
        plan = self._batch_builder.plan(running)
        return plan if plan.tokens else None  # none: all that could be are in steps under way

    def commit(self, plan: BatchPlan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Records a step: the cells it filled and the token drawn for each of ``plan.requests`` (-1: none could be).

        Returns requests with their tokens, without those that ended or lost their slot while the step was under way.
        """
        plan.in_flight = False
        for request, n in plan.scheduled:
            if request.batch_plan is plan:
                request.n_past += n
        taken = [(r, token) for r, token in zip(plan.requests, sampled, strict=True) if r.batch_plan is plan]
        for request, _, _ in plan.scored:
            if (
                request.batch_plan is plan
                and request.max_tokens == 0
                and request.n_past == len(request.tokens)
            ):
                self._score_on(request)
        if (
            len(plan.scheduled) > plan.n_decode
        ):  # those who have no slot first: they need their tokens to inherit one
            taken.sort(key=lambda pair: pair[0].slot >= 0)
        for request, token in taken:
            if token in request.stop_tokens:
                self.finish(request, "stop")
                continue
            if token < 0:
                self.fail(request, sampling_error(request, token))
                continue
            tokens = request.tokens
            tokens.append(token)
            request.n_generated += 1
            request.n_total += 1
            if getattr(request.sampler, "finished", False):
                self.finish(request, "stop")
            elif request.n_generated >= request.max_tokens or len(tokens) >= self.n_ctx:
                self.finish(request, "length")
            elif request.n_total >= request.token_budget:
                self._pause(request)
        self.memory_ops += plan.padding
        if len(plan.scheduled) > plan.n_decode:
            for request, _ in plan.scheduled[plan.n_decode :]:
                if request.prompt_group is not None and request.prompt_group.waiting:
                    self._release_waiters(request.prompt_group)
            self._running.sort()
        elif (
            plan.n_decode == len(plan.tokens)
            and len(plan.requests) == len(self._running.decoding)
            and not self._running.prefilling
        ):
            self._last = plan  # of all: after a change from two micro-batches it may be of half of them
        return taken

    def _score_on(self, request: Request) -> None:
        """Goes on with what is to be scored behind the same context, or ends."""
        following = request.logprob_targets.following()
        if following is None:
            self.finish(request, "stop")
            return
        request.tokens, n_kept = following
        self.memory_ops.append(Remove(request.slot, n_kept))
        request.n_past = n_kept

    def abort(self, plan: BatchPlan, error: BaseException) -> list[Request]:
        """Ends the requests of a step that failed, and nobody else's; returns them."""
        requests = self.drop(plan)
        for request in requests:
            self.fail(request, error)
        return requests

    def drop(self, plan: BatchPlan) -> list[Request]:
        """Forgets a step that came to nothing; the requests that were in it until now."""
        plan.in_flight = False
        self.memory_ops += plan.padding
        return [request for request, _ in plan.scheduled if request.batch_plan is plan]

    def recompute(self, slot: int) -> None:
        """The memory could not forget a part of this sequence and lost all of it: its tokens are computed again."""
        for request in list(self._running):
            if request.slot == slot:
                self._running.recompute(request)

    def relieve(self, plan: BatchPlan) -> Request | None:
        """Drops a step that found no cells and preempts one of several requests; None when only one is left."""
        self.drop(plan)
        nobody_paused = not self._running.paused
        preempted = self._give_way()
        # One that ran would come back at once, and to the same end.
        self._full = preempted is not None and nobody_paused
        return preempted

    # ---- inside
    def _give_way(self) -> Request | None:
        """Preempts the request that paused first, else the newest; None when only one has a slot."""
        least = self._running.least()
        if least is not None:
            self.preempt(least)
        return least

    def _admit(self) -> None:
        paused = self._running.paused
        while self._queue or self._ready:
            if not self._slots.n_free:
                if not paused:
                    return
                self.preempt(next(iter(paused)))
            request = self._ready[0] if self._ready else next(iter(self._queue))
            if self._full or (self._scarce and self._running.n_cells + len(request.tokens) > self.n_cells):
                if paused:
                    self.preempt(next(iter(paused)))
                    continue
                if self._running.has_work:
                    return
            if self._ready:
                del self._ready[0]
            else:
                del self._queue[request]
            if request.prompt_group is not None and request.prompt_group.is_computing():
                request.prompt_group.wait(request)  # it comes in when there is something to copy
                self._n_waiters += 1
                continue
            self.dequeued.append(request)
            request.slot = self._slots.take()
            if request.prompt_group is not None:
                self._copy_prompt(request)
                request.prompt_group.place(request)
            request.move(State.RUNNING)
            self._running.add(request)

    def _copy_prompt(self, request: Request) -> None:
        """Begins with the cells of another's prompt, but with a token left to feed."""
        source, n = request.prompt_group.source(), min(request.n_prompt, len(request.tokens) - 1)
        if (
            source is None
            or request.logprob_targets is not None
            or self._min_prefix_copy is None
            or n < self._min_prefix_copy
        ):
            return
        self.memory_ops.append(Copy(source.slot, request.slot, n))
        request.n_past = n

    def _make_room(self) -> None:
        while self._running.n_cells > self.n_cells and self._give_way() is not None:
            pass

    def _pause(self, request: Request) -> None:
        if request.state is State.RUNNING:
            self._running.take(request)
            self._running.paused[request] = None
            request.move(State.PAUSED)

    def _leave(self, request: Request) -> None:
        """Takes a request out of wherever it is and frees its slot."""
        if request.state is State.RUNNING:
            self._running.take(request)
        elif request.state is State.PAUSED:
            del self._running.paused[request]
        elif request in self._preempted_paused:
            self._preempted_paused.discard(request)
        elif request in self._queue:
            del self._queue[request]
        elif request.prompt_group is not None and request in request.prompt_group.waiting:
            self._n_waiters -= 1
        else:
            self._ready.remove(request)
        self.dequeued.append(request)
        request.batch_plan = None
        if request.prompt_group is not None:
            request.prompt_group.leave(request)
        if request.slot >= 0:
            self.memory_ops.append(Remove(request.slot, 0))
            self._slots.give(request.slot)
            request.slot = -1
            self._full = False

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, states and lists disagree. For tests and debugging."""
        taken = sorted(request.slot for request in self._running)
        assert len(set(taken)) == len(taken), f"two requests in one slot: {taken}"
        assert self._slots.free.isdisjoint(taken), f"a used slot counts as free: {taken} {self._slots.free}"
        assert len(taken) + self._slots.n_free == self._slots.n, f"slots are lost: {taken} {self._slots.free}"
        self._running.check_integrity()
        for request in self._running:
            assert request.state in (State.RUNNING, State.PAUSED), request
            assert 0 <= request.n_past <= len(request.tokens) <= self.n_ctx, request
        for request in (*self._queue, *self._ready, *self._preempted_paused):
            assert request.state is State.WAITING and request.slot == -1 and request.n_past == 0, request

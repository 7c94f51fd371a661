"""Decides which requests run, and what a sampled token does to a request.

Open this file to change admission, preemption, or the end of a request.

The principle: there is no prefill phase and no decode phase. A request is a list of tokens, and the first ``n_past`` of
them are in KV cells. Every step computes some of the other tokens. When a step has computed the last token, the request
gets its next token. A new prompt, a chunked prompt, a preempted request, a fork and a scored text differ only in how
many of their tokens have no cell yet.

The consequences:

1. A request is always in one list: in ``Waiting`` while it has no slot, in ``Running`` while it has one
   (``queues.py``). Its ``State`` says which; ``core.py`` has the transitions.
2. Requests are admitted in the order of their turns (``Waiting``). A request gets a slot if one is free and the cells
   for all of its tokens fit. It begins with the longest prefix that ``kv.py`` finds for it.
3. No cells are reserved for tokens that do not exist yet, so cells may run out. Then parked cells are evicted first;
   next the request that paused first is preempted, then the newest request of the lowest priority. A preempted request
   loses its slot and its cells, but not its tokens or its turn. Its cells are saved in host memory or computed again.
   The last request that has cells is never preempted, so one request always progresses.
4. Only ``commit`` advances ``n_past``. So a plan may be made while another one is in flight, without the requests of
   that one. A request that leaves a step (because it ended or was preempted) has no ``batch_plan``, and the step's
   result for it is ignored.
5. Nothing here waits, looks at a clock or calls native code. The engine loop calls ``plan`` before a step, ``commit``
   after it, and the other methods between two steps. Pure policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from llamapipe._engine.policy.core import (
    UNLIMITED,
    AssignAdapters,
    BatchPlan,
    CellChanges,
    Discard,
    GoBack,
    Keep,
    Remove,
    Request,
    State,
    UseAdapters,
)
from llamapipe._engine.policy.kv import KvCache
from llamapipe._engine.policy.overflow import Overflow
from llamapipe._engine.policy.planner import BatchBuilder
from llamapipe._engine.policy.queues import Carries, Running, Waiting
from llamapipe._engine.policy.scoring import LogprobTargets
from llamapipe._engine.policy.speculation import MOST_COPIES, Gate, Guess, limit_to_undoable
from llamapipe._engine.policy.turns import SetTurns
from llamapipe.errors import NoToken

_LATER = int(NoToken.LATER)  # a plain int, because every step compares with it
# The sum of gaps between decoding requests over steps, before gaps are closed: new requests may fill them.
_LEAST_GAPS = 8
# A padding token takes at least as long as moving this number of cells, and longer with large models.
_CELLS_PER_GAP = 200


def _likeliest(guesses: Sequence[Guess], n: int) -> list[Guess]:
    """Return the guesses of the ``n`` requests whose guesses are expected to bring the most tokens."""
    worth: dict[Request, float] = {}
    for guess in guesses:
        worth[guess.request] = max(worth.get(guess.request, 0.0), guess.share * len(guess.tokens))
    kept = set(sorted(worth, key=lambda request: -worth[request])[:n])
    return [guess for guess in guesses if guess.request in kept]


class Scheduler:
    """The requests of one context.

    Their sequences have at most ``n_ctx`` positions each and ``n_cells`` in total, in the slots of ``cache``. A step
    has at most ``n_batch`` tokens, of which llama.cpp computes ``n_ubatch`` at a time. BatchBuilder describes
    ``padding_token``, ``n_score_rows``, ``prefill_cutoff`` and ``max_itl_s``; for ``overflow`` see Overflow, for
    ``gate`` Gate, for ``carries`` Running.

    ``dequeued``: requests that got a slot, were preempted or ended since ``take_dequeued`` was called; a request may be
    listed several times. ``awaiting_end``: requests that have their last token, but whose samplers do not know yet
    whether the text is complete. ``n_again``: tokens that were computed again after wrong guesses. ``can_guess``:
    whether a sampler of the last step can guess the next tokens. ``drafts``: whether the engine has a drafter.
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
        self.n_again = 0
        self._scarce = n_cells < n_ctx * cache.n_slots
        self._full = False  # a step found no free cells: admit no request until one has left
        self._n_arrived = 0
        self._lowest_priority = 0  # of all requests so far
        self._running = Running(carries)  # in a slot
        self._waiting = Waiting(self._running, max(cache.n_slots // 2, 1))  # without a slot
        self._carries = carries
        self._has_carrier = False  # whether the adapters of the current steps are a carrier
        self._assigned: dict[int, Hashable] = {}  # by slot: its adapters, while the steps have a carrier
        self.dequeued: list[Request] = []
        self.awaiting_end: list[Request] = []
        self._last: BatchPlan | None = None  # the last plan, if the next step may repeat it
        self._n_moves = 0  # Running.n_moves when that plan was made
        # Whether closing gaps between decoding requests pays: it does not where each step reads all weights anyway.
        self._closes_gaps = padding_token is not None and prefill_cutoff is not None
        self._n_gaps = 0  # the sum of gaps in the steps since the last step without gaps

    def __repr__(self) -> str:
        return f"<Scheduler {self._waiting!r} {self._running!r} {self.cache!r}>"

    # ---- state
    @property
    def n_queued(self) -> int:
        """The number of requests that wait for a slot."""
        return self._waiting.n_queued

    @property
    def is_preparing(self) -> bool:
        """Whether requests wait for their images and sounds, or for a prefix on disk."""
        return bool(self._waiting.preparing)

    @property
    def n_active(self) -> int:
        return len(self._running)

    @property
    def n_used_cells(self) -> int:
        """The number of KV cells of requests that have a slot."""
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
        """The maximum number of steps in flight. Decoding needs the previous step's tokens; scoring does not."""
        builder = self.batch_builder
        # The cheaper test comes first.
        if builder.depth <= builder.n_micro_batches or not self._running.only_scores:
            return builder.n_micro_batches
        return builder.depth

    def live(self) -> list[Request]:
        """Return every unfinished request."""
        return [*self._running, *self._waiting]

    def take_dequeued(self) -> list[Request]:
        dequeued, self.dequeued = self.dequeued, []
        return dequeued

    def set_depth(self, depth: int) -> None:
        """Set how many scoring steps may be in flight. Call it before the first step."""
        self.batch_builder.depth = depth

    def split_decoding(self, n_micro_batches: int) -> None:
        """From the next step on, split the decoding requests into ``n_micro_batches`` parts, each a separate step."""
        self.batch_builder.n_micro_batches = n_micro_batches

    # ---- events
    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival = self._n_arrived
        self._n_arrived += 1
        self._lowest_priority = min(self._lowest_priority, request.spec.priority)
        self._waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Give a new request the sequence of a resumable request that is not running; ``find`` finds its cells."""
        child.tokens = parent.tokens.copy()
        child.dropped = parent.dropped.copy()
        child.n_kept = parent.n_kept
        child.n_prompt = parent.n_prompt
        child.n_generated = parent.n_generated
        child.active_from = parent.active_from
        self.cache.learn(parent)

    def queue_prepared(self, request: Request) -> None:
        """Queue a request for a slot after its images and sounds were encoded or its prefix was read."""
        if request in self._waiting.preparing:
            request.awaits_prefix = False
            self._waiting.remove(request)
            self._waiting.add_ready(request)

    def resume(self, request: Request) -> None:
        """Continue a request whose ``token_budget`` was raised or whose tokens changed; otherwise do nothing."""
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
        """Keep the first ``n_keep`` tokens of a resumable request that is not running."""
        del request.tokens[n_keep:]
        if n_keep <= request.n_kept:
            request.dropped.clear()
        request.n_prompt = min(request.n_prompt, len(request.tokens) + len(request.dropped))
        # The last token is computed again: the next one is sampled from its logits.
        self.cache.truncate(request, min(request.n_past, n_keep - 1))
        self._find_activation(request)
        self._reopen(request)

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Append tokens to a resumable request that is not running."""
        request.tokens.extend(tokens)
        if request.n_total == 0:  # nothing was generated yet, so these tokens are part of the prompt
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
        """End a request and free its slot. A resumable request keeps its slot and cells unless it is cancelled."""
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
            self._waiting.note_admitted(request)
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
        """End a request whose text completed a stop string, even if its last token has already ended it.

        ``n_after``: the number of tokens after the stop string, which are dropped.
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
        request.stop_token = None  # after a right guess, a stop token may follow the string in the same step

    def cancel(self, request: Request) -> None:
        """End a request in any state."""
        self.finish(request, "cancelled")

    def fail(self, request: Request, error: BaseException) -> None:
        if request.state is not State.FINISHED:
            request.error = error
            self.finish(request, "cancelled")

    def preempt(self, request: Request) -> None:
        """Take a request's slot and cells. It computes its tokens again when it gets a slot."""
        paused = request.state is State.PAUSED
        self._running.take(request)
        request.batch_plan = None
        self.cache.preempt(request)
        request.n_past = 0
        request.n_certain = -1
        request.late_s = 0.0
        request.move(State.WAITING)
        self._full = False
        self.dequeued.append(request)
        self._waiting.release(request)
        self.n_preempted += 1
        if paused or request.is_drawing:
            # It waits for `resume` or `accept_drawn`: a slow reader must not keep other requests out of its slot.
            self._waiting.paused.add(request)
        else:
            self._waiting.add_ready(request)

    def lend(self, request: Request, lateness: float) -> bool:
        """Lend the slot of a request whose token is late to a waiting request. Return whether the slot was lent.

        The lender waits for a slot again when it has its token, which may take as long as another answer. So within a
        share, its grace period doubles each time. Otherwise a request with a slow constraint would wait before every
        token. If the waiting request has also been late, the grace period is at most twice that of the waiting request.
        There is no grace period if the waiting request belongs to another share, or if it has never lent its slot while
        requests that did hold more than half of the slots. ``lateness``: how long the lender's tokens have taken, as a
        multiple of the first grace period.
        """
        waiting = self._waiting
        if len(self.cache.free) >= len(waiting.queued) or request not in self._running.drawing:
            return False
        first, share = waiting.next(), request.spec.share
        is_pressed = first.spec.share != share or (not first.n_lent and waiting.lends_much(share))
        n_doubled = min(request.n_lent, first.n_lent + 1 if first.n_lent else 20)
        if not is_pressed and lateness < 2**n_doubled:
            return False
        request.n_lent += 1
        self.preempt(request)
        return True

    # ---- steps
    @property
    def may_draft(self) -> bool:
        """Whether ``plan`` may take long because a draft model has to compute."""
        return self.gate.considers_drafts and bool(self._running.decoding) and not self._running.prefilling

    def plan(self) -> BatchPlan | None:
        """Plan the next step. Return None if nothing can be computed now."""
        if self._waiting.queued:
            self._admit()
        running = self._running
        if not running.can_compute:
            return None
        if self._scarce:
            self._make_room()
        # Adapters are chosen last, because making room may have preempted requests.
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
        return plan if plan.tokens else None  # no tokens: all requests are in steps in flight

    def _choose_adapters(self) -> bool:
        """Change the adapters if it is another set's turn. Return False if steps in flight must be committed first."""
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
        self.turns.note_change()
        self._has_carrier = self._carries is not None and self._carries(chosen, chosen)
        self._assigned.clear()
        self.cache.memory_ops.append(UseAdapters(chosen, self._has_carrier))
        return True

    def _assign_adapters(self, plan: BatchPlan) -> None:
        """Give the slots of a plan the adapters of their requests, and remove those of ended requests."""
        for slot in [slot for slot in self._assigned if slot in self.cache.free]:
            if self._assigned.pop(slot) is not None:
                self.cache.memory_ops.append(AssignAdapters(slot, None))
        for request, _ in plan.scheduled:
            if self._assigned.get(request.slot) != request.adapters:
                self._assigned[request.slot] = request.adapters
                self.cache.memory_ops.append(AssignAdapters(request.slot, request.adapters))

    def _guesses(self) -> Mapping[Request, Sequence[int]]:
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
        if self._scarce:  # guesses must not take the cells of other requests
            n_most = min(n_most, (self.n_cells - running.n_cells - self.cache.n_parked_cells) // len(running))
        drafter = gate.next_drafter()
        guesses = []
        for request in decoding:
            # The token after the last right guess is drawn as well, hence the -1.
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
                if token in request.stop_tokens:  # nothing follows a stop token
                    tokens = tokens[:i]
                    break
            guess = Guess(request, tokens, share) if tokens else None
            if drafter is not None and request.spec.drafts:
                draft = drafter.guess(request, n)
                if draft is not None:
                    guesses.append(draft)
            if guess is not None:
                guesses.append(guess)
        if gate.copies_states and len(guesses) > MOST_COPIES:
            guesses = _likeliest(guesses, MOST_COPIES)
        n = len(decoding)
        if not guesses:
            return {}
        chosen: dict[Request, Sequence[int]] = {}
        for request, tokens in gate.choose(n, guesses, self.batch_builder.n_ubatch - n).items():
            # Guesses that a constraint forbids cannot be right.
            n_allowed = 0 if request.sampler is None else request.sampler.expect(tokens)
            if n_allowed:
                chosen[request] = tokens[:n_allowed]
                request.is_drafted = request.slot in gate.drafted
        if gate.keeps_states and chosen:
            lengths = limit_to_undoable(
                [r.slot for r in decoding], [len(chosen.get(r, ())) for r in decoding]
            )
            chosen = {r: chosen[r][:n] for r, n in zip(decoding, lengths, strict=True) if n}
        if gate.has_window and chosen:
            shortest = min(map(len, chosen.values()))
            chosen = {request: tokens[:shortest] for request, tokens in chosen.items()}
        if gate.copies_states:
            for request in chosen:
                request.n_certain = request.n_past
                self.cache.memory_ops.append(Keep(request.slot, request.n_past))
        return chosen

    def commit(self, plan: BatchPlan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Record a step: its KV cells, and for each of ``plan.requests`` a token or a NoToken.

        Returns the requests that are still part of the step, with their tokens; requests with ``LATER`` are left out.
        """
        plan.in_flight = False
        self._last = None  # only the step that was sampled last can be repeated
        if plan.n_guessed:
            return self._commit_guesses(plan, sampled)
        if self.gate.copies_states:
            self.n_again += sum(
                n for request, n in plan.scheduled[plan.n_decode :] if request.n_past == request.n_certain
            )
        for request, n in plan.scheduled:
            if request.batch_plan is plan:
                request.n_past += n
        if self.cache.exact_multiple is not None and len(plan.scheduled) == 1:
            self.cache.note_computed_alone(*plan.scheduled[0])
        if len(plan.scheduled) > plan.n_decode:
            for request, _ in plan.scheduled[plan.n_decode :]:
                if request.places and request.batch_plan is plan:
                    self.cache.save_reached_state(request)
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
            # The step has all decoding requests. After a change from two micro-batches it may have half of them.
            self._last = plan
        return [pair for pair in taken if pair[1] != _LATER] if _LATER in sampled else taken

    def _commit_guesses(self, plan: BatchPlan, sampled: Sequence[int]) -> list[tuple[Request, int]]:
        """Commit a step with guessed tokens; see ``commit``. No row after a wrong guess was drawn from."""
        taken: list[tuple[Request, int]] = []
        gate, before = self.gate, None
        n_drawn: dict[Request, int] = {}
        again: set[Request] = set()  # requests that compute their tokens of this step again
        gate.n_drafted += plan.n_guessed
        begin = 0
        for request, n in plan.scheduled:
            request.n_drafted += n - 1
            gate.n_drafted_by_model += (n - 1) * request.is_drafted
            drawn = sampled[begin : begin + n]
            begin += n
            n_left = drawn.count(NoToken.NOT_DRAWN)
            # A draft may contain a stop token. Nothing follows a stop token.
            n_left = next(
                (n - 1 - i for i, token in enumerate(drawn) if token in request.stop_tokens), n_left
            )
            if n_left and request.batch_plan is plan and request.slot >= 0:
                # Remove the cells of wrong guesses. This comes first, because a request may end below, and all cells
                # that it leaves in its slot must be useful.
                if gate.copies_states:
                    self.cache.memory_ops.append(GoBack(request.slot, request.n_past))
                    again.add(request)
                else:
                    self.cache.memory_ops.append(Discard(request.slot, request.n_past + n - n_left))
        for i, (request, token) in enumerate(zip(plan.requests, sampled, strict=True)):
            if request.batch_plan is plan and token != NoToken.NOT_DRAWN:
                if request is before and request.sampler is not None:  # the guessed token before it was right
                    gate.n_accepted += 1
                    gate.n_accepted_by_model += request.is_drafted
                    request.n_accepted += 1
                    gate.n_forced += request.sampler.is_forced
                before = request
                n_drawn[request] = n_drawn.get(request, 0) + 1
                request.n_past += request not in again
                if token != _LATER:
                    taken.append((request, token))
                # The sampler has seen all tokens of the step, so ``finished`` concerns only the last one.
                is_last = plan.guessed[i] < 0 or sampled[i + 1] == NoToken.NOT_DRAWN
                self._add_token(request, token, is_last)
        gate.n_steps_saved += min(n_drawn.values(), default=1) - 1
        for request in [request for request in self._running.decoding if request in again]:
            self._running.take(request)
            self._running.add(request)
        return taken

    def accept_drawn(self, request: Request, token: int) -> None:
        """Record a token (or a NoToken) that was drawn after its step, for a request that ``is_drawing``."""
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
        elif request in self._waiting.paused:  # preempted since the step
            self.resume(request)

    def _add_token(self, request: Request, token: int, is_last: bool = True) -> None:
        """Continue a request with a token, or end the request. ``is_last``: this is its last token of the step."""
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
            if sampler is not None and sampler.is_busy:  # the sampler soon knows whether the text is complete
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
            if request.spec.resumable:
                # If the caller changes the sequence, the next token is sampled from the logits of its last token.
                self.cache.truncate(request, len(request.tokens) - 1)
            self.finish(request, "stop")
        else:
            self.fail(request, request.sampling_error(code))

    def _draw_later(self, request: Request) -> None:
        """Leave a request out of the steps until ``accept_drawn`` is called."""
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

    def observe(self, plan: BatchPlan, seconds: float, turn_s: float | None = None) -> None:
        """Learn the seconds of a step, from its launch until its tokens were sampled.

        ``turn_s``: the seconds of the loop's whole turn, which callers wait for; None: equal to ``seconds``.
        """
        only_decodes = plan.n_decode == len(plan.tokens) or plan.n_guessed > 0
        if self.turns.observe(len(plan.tokens), only_decodes, seconds):
            return  # the first step after a change of adapters says little about other steps
        if plan.n_guessed or ((self.can_guess or self.drafts) and plan.n_decode == len(plan.tokens)):
            self.gate.observe(plan.n_decode, plan.n_guessed, seconds if turn_s is None else turn_s)
        budget = self.batch_builder.budget
        if budget.is_on and (plan.n_decode or self._running.others) and not plan.n_guessed:
            n = len(plan.tokens) - plan.n_decode - len(plan.padding)
            n_rows = sum(len(scored.entries) for scored in plan.scored)
            position = sum(plan.positions[-n:]) / n if n else 0.0
            budget.observe(n, position, seconds, n_rows, decodes=plan.n_decode > 0)

    def _score_next(self, request: Request, targets: LogprobTargets) -> None:
        """Continue with the next text to score after the same context. End the request if there is none."""
        following = targets.following()
        if following is None:
            self.finish(request, "stop")
            return
        request.tokens, n_kept = following
        self.cache.truncate(request, n_kept)

    def abort(self, plan: BatchPlan, error: BaseException) -> list[Request]:
        """End the requests of a step that failed, and only these. Return them."""
        requests = self.drop(plan)
        for request in requests:
            self.fail(request, error)
        return requests

    def drop(self, plan: BatchPlan) -> list[Request]:
        """Discard a step that was not computed. Return the requests that are still part of it."""
        plan.in_flight = False
        self.cache.memory_ops += plan.padding
        return [request for request, _ in plan.scheduled if request.batch_plan is plan]

    def note_cell_changes(self, changes: CellChanges) -> bool:
        """Record the outcome of ``cache.memory_ops``.

        Return False if a sequence lost its cells, so that a request must compute them again.
        """
        for key, n_bytes in changes.saved:
            self.cache.note_saved(key, n_bytes)
        lost = set(changes.lost)
        for slot in changes.stale:
            if slot in self.cache.free:
                self.cache.mark_stale(slot)
            else:
                self.cache.memory_ops.append(Remove(slot, 0))
                lost.add(slot)
        for slot in lost:
            request = next((request for request in self._running if request.slot == slot), None)
            self.cache.note_lost(slot, request)
            if request is not None:
                self._running.recompute(request)
        return not lost

    def free_cells_after(self, plan: BatchPlan) -> bool:
        """Discard a step that found no free cells, and free cells. Return False if only one request has a slot."""
        self.drop(plan)
        if self.cache.n_parked_cells:
            self.cache.evict(0)
            return True
        none_paused = not self._running.paused
        preempted = self._preempt_least()
        # Otherwise a running request that was preempted would be admitted immediately, and its step would fail again.
        self._full = preempted is not None and none_paused
        return preempted is not None

    # ---- slots and cells
    def _count_gaps(self, plan: BatchPlan) -> None:
        """Count the cost of gaps, padded or not, between the slots of decoding requests."""
        if plan.n_decode and self.batch_builder.n_micro_batches == 1:
            first, last = plan.seq_ids[0], self._running.decoding[-1].slot
            n = last - first + 1 - plan.n_decode
            if n:
                n -= sum(first < request.slot < last for request in self._running.prefilling)
            self._n_gaps = self._n_gaps + n if n else 0

    def _close_gaps(self) -> None:
        """Move decoding requests to neighbouring slots once the gaps have cost about as much as the move."""
        running, cache = self._running, self.cache
        decoding = running.decoding
        if (
            not decoding
            or running.prefilling
            or any(r.batch_plan is not None and r.batch_plan.in_flight for r in decoding)
            or not all(map(cache.is_rotated, decoding))
        ):
            return
        # Paused requests keep their slots. For the n requests, choose the n slots that are closest together, then
        # those for which the fewest cells are moved, or saved to make room.
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
        """Preempt the request that ``Running.least`` names, and return it; None if only one request has a slot."""
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
                continue  # a follower of the preempted request may now be next
            if self._full or (self._scarce and self._running.n_cells + len(request.tokens) > self.n_cells):
                if paused:
                    self.preempt(next(iter(paused)))
                    continue
                if self._preempt_below(request):
                    continue
                if self._running.can_compute:
                    return
            prefix = cache.find(request)
            waiting.remove(request)
            if prefix.leader is not None:
                waiting.follow(request, prefix.leader, cache.place_for_follower(prefix.leader, prefix.n))
                continue
            if prefix.cells is not None:
                cache.touch(prefix.cells)
            if self._scarce:
                cache.evict(max(self.n_cells - self._running.n_cells - len(request.tokens), 0))
            if request.saved_cells is not None:
                cache.unpin(request)
            cache.place(request, prefix)
            waiting.note_admitted(request)
            if not request.n_total:
                request.n_cached = request.n_past
            self.dequeued.append(request)
            request.move(State.RUNNING)
            self._running.add(request)

    def _preempt_below(self, request: Request) -> bool:
        """Preempt a request with a lower priority than this one. Return False if there is none."""
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
        """Return the number of cells by slot. Call it when all memory operations are done and no step is in flight.

        Slots that have more cells because their state could not go back are left out.
        """
        parked, cells = self.cache.parked, dict.fromkeys(range(self.cache.n_slots), 0)
        cells |= {slot: parked[slot].n for slot in parked}
        cells |= {request.slot: request.n_past for request in self._running}
        return {slot: n for slot, n in cells.items() if slot not in parked or not parked[slot].is_stale}

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, states and lists disagree. For tests and debugging."""
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

"""One engine in virtual time: the real ``Scheduler`` and ``KvCache``, with step times from ``StepCost``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llamapipe._engine.policy.core import (
    UNLIMITED,
    BatchPlan,
    Copy,
    MemoryOp,
    Request,
    RequestSpec,
    Restore,
    Save,
    State,
)
from llamapipe._engine.policy.kv import KvCache
from llamapipe._engine.policy.scheduler import Scheduler
from simulate.cost import Load as StepLoad
from simulate.cost import StepCost, load_of
from simulate.workload import TOKENS

_NO_TOKENS: frozenset[int] = frozenset()
_STREAMED = UNLIMITED - 1  # tokens that a stream may be ahead of its reader; no limit
BINS_PER_E = 20  # bins of the histogram of gaps per factor of e: neighbours differ by 5 %


@dataclass(frozen=True)
class NodeOptions:
    """The options of an engine, as of ``llamapipe.Engine``. ``cell_bytes``: of one position's keys and values."""

    n_ctx: int = 4096
    n_seq_max: int = 16
    n_batch: int = 2048
    n_ubatch: int = 512
    cache_bytes: int = 4 * 2**30
    cell_bytes: float = 24_576.0
    prefix_cache: bool = True
    prefill_cutoff: int | None = 256
    max_itl_s: float | None = None


class Answer:
    """A request from its arrival to its end, in seconds of virtual time; ``Request.sink`` on a node.

    ``n_cached``: prompt tokens that were cached. ``on_end``: called with this object when the request has ended.
    """

    __slots__ = (
        "arrived_s",
        "ended_s",
        "first_s",
        "last_s",
        "n_answer",
        "n_cached",
        "n_prompt",
        "on_end",
        "tokens",
    )

    def __init__(
        self, arrived_s: float, tokens: list[int], max_tokens: int, on_end: Callable[[Answer], None]
    ) -> None:
        self.arrived_s = arrived_s
        self.first_s = self.last_s = self.ended_s = math.nan
        self.n_cached = 0
        self.tokens = tokens
        self.n_prompt = len(tokens)
        self.n_answer = max_tokens
        self.on_end = on_end

    def token(self, request: Request, token: int) -> bool:
        """Does nothing: the node counts tokens."""
        return False

    def finish(self, request: Request) -> None:
        """Does nothing: the node calls ``on_end``."""

    def restart_text(self, at_start: bool) -> None:
        """Does nothing: there is no text."""


class Node:
    """One engine. ``end_s``: when its portion ends; infinity if it has no work. ``gaps``: a histogram, counts by bin.

    While the same requests decode, each step repeats the previous one, and takes longer only because of its additional
    cells. Such steps form a *portion*, whose last step ends a request. An arrival cuts a portion after the step in
    flight. The scheduler plans the first step and commits the last one. For the steps between them, only the token
    counts are updated. ``max_portion``: the most steps in a portion.
    """

    __slots__ = (
        "_begin_s", "_cost", "_inbox", "_last_s", "_load", "_n_portion", "_n_ubatch", "_plan", "_repeated", "_slope_s",
        "_step_s", "busy_s", "end_s", "gaps", "max_portion", "n_open", "n_open_tokens", "n_steps", "scheduler",
    )  # fmt: skip

    def __init__(self, cost: StepCost, options: NodeOptions) -> None:
        cache = KvCache(
            options.n_seq_max,
            options.prefix_cache,
            host_bytes=options.cache_bytes if options.prefix_cache else 0,
            cell_bytes=options.cell_bytes,
            min_prefix=16,
        )
        self.scheduler = Scheduler(
            cache,
            options.n_ctx,
            options.n_ctx * options.n_seq_max,
            options.n_batch,
            options.n_ubatch,
            padding_token=0,
            prefill_cutoff=options.prefill_cutoff,
            max_itl_s=options.max_itl_s,
        )
        self.end_s = math.inf
        self.n_open = 0
        self.n_open_tokens = 0  # of prompts and answers that are not finished
        self.busy_s = 0.0
        self.n_steps = 0
        self.gaps: Counter[int] = Counter()
        self.max_portion = (
            1 if self.scheduler.batch_builder.budget.is_on else 2**30
        )  # the budget learns from each step
        self._cost = cost
        self._n_ubatch = options.n_ubatch
        self._inbox: list[Answer] = []
        self._plan: BatchPlan | None = None  # in flight
        self._load = StepLoad(False, (), 0, 0)  # of the portion's first step
        self._begin_s = 0.0  # of the portion
        self._n_portion = 1
        self._step_s = self._slope_s = (
            0.0  # time of its first step, and by how much each step is longer than the one before
        )
        self._repeated: BatchPlan | None = (
            None  # the last repeating plan; its requests got their latest tokens at `_last_s`
        )
        self._last_s = 0.0

    def __repr__(self) -> str:
        return f"<Node n_open={self.n_open} n_steps={self.n_steps}>"

    def submit(self, answer: Answer, now_s: float) -> None:
        """Accepts a request. Starts a step if none is in flight."""
        self.n_open += 1
        self.n_open_tokens += answer.n_prompt + answer.n_answer
        self._inbox.append(answer)
        if self._plan is None:
            self._start(now_s)
        elif self._n_portion > 1:
            self._cut(now_s)

    def finish_step(self) -> None:
        """Ends the portion in flight, at ``end_s``, and starts the next one if there is work."""
        plan, now_s = self._plan, self.end_s
        assert plan is not None
        if self._n_portion > 1:
            self._skip(self._n_portion - 1)
        scheduler = self.scheduler
        self._plan, self.end_s = None, math.inf
        taken = scheduler.commit(plan, [_following(request.tokens[-1]) for request in plan.requests])
        if self.max_portion == 1:
            scheduler.observe(plan, self._step_s)
        self.n_steps += 1
        self.busy_s += self._step_s
        if plan.repeats:
            self.gaps[_bin(self._step_s)] += len(taken)
        else:
            self._note_tokens(plan, now_s)
        self._last_s = now_s
        if scheduler.dequeued:  # some requests have ended
            self._note_ends(plan, now_s)
        self._start(now_s)

    def count(self, now_s: float) -> None:
        """Adds the steps that have ended by now to the counters."""
        if self._plan is not None and self._n_portion > 1:
            self._count_steps(now_s)

    def _ended_s(self, n: int) -> float:
        """When the ``n``-th step of the portion ends."""
        return self._begin_s + n * self._step_s + n * (n - 1) / 2 * self._slope_s

    def _cut(self, now_s: float) -> None:
        """Ends the portion with the step that is in flight now."""
        self._count_steps(now_s)
        self._n_portion = 1
        self.end_s = self._begin_s + self._step_s

    def _count_steps(self, now_s: float) -> None:
        """Commits the steps of the portion that have ended."""
        low, high = 0, self._n_portion - 1  # bounds of their number
        while low < high:
            middle = (low + high + 1) // 2
            if self._ended_s(middle) <= now_s:
                low = middle
            else:
                high = middle - 1
        if low:
            self._skip(low)

    def _skip(self, n: int) -> None:
        """Commits the first ``n`` steps of the portion, which end no request."""
        plan = self._plan
        assert plan is not None
        for request in plan.requests:
            tokens = request.tokens
            begin = _following(tokens[-1])
            tokens += TOKENS[begin : begin + n] if begin + n <= len(TOKENS) else range(begin, begin + n)
            request.n_past += n
            request.n_generated += n
            request.n_total += n
        self.n_steps += n
        self._note_gaps(n, len(plan.requests))
        ended_s = self._last_s = self._ended_s(n)
        self.busy_s += ended_s - self._begin_s
        self._begin_s = ended_s
        self._step_s += n * self._slope_s
        self._n_portion -= n
        self._load = self._load.repeated(n)

    def _note_gaps(self, n: int, n_requests: int) -> None:
        """Counts the gaps of the first ``n`` steps of the portion."""
        step_s, slope_s = self._step_s, self._slope_s
        last = _bin(step_s + (n - 1) * slope_s)
        noted = 0
        for number in range(_bin(step_s), last):
            upper_s = math.exp((number + 1) / BINS_PER_E)
            below = min(max(math.ceil((upper_s - step_s) / slope_s), noted), n)
            self.gaps[number] += (below - noted) * n_requests
            noted = below
        self.gaps[last] += (n - noted) * n_requests

    def _note_tokens(self, plan: BatchPlan, now_s: float) -> None:
        """Counts the gaps before these tokens, request by request."""
        if self._repeated is not None:
            for request in self._repeated.requests:
                request.sink.last_s = self._last_s  # type: ignore[attr-defined]
            self._repeated = None
        for request in plan.requests:
            answer: Answer = request.sink  # type: ignore[assignment]
            if answer.first_s == answer.first_s:
                self.gaps[_bin(now_s - answer.last_s)] += 1
            else:
                answer.first_s = now_s
                answer.n_cached = request.n_cached
            answer.last_s = now_s

    def _note_ends(self, plan: BatchPlan, now_s: float) -> None:
        for request in plan.requests:
            if request.state is State.FINISHED:
                answer: Answer = request.sink  # type: ignore[assignment]
                answer.ended_s = answer.last_s = now_s
                self.n_open -= 1
                self.n_open_tokens -= answer.n_prompt + answer.n_answer
                answer.on_end(answer)

    def _start(self, now_s: float) -> None:
        scheduler = self.scheduler
        if self._inbox:
            for answer in self._inbox:
                spec = RequestSpec(answer.n_answer, _NO_TOKENS, _STREAMED, sink=answer)
                scheduler.add(Request(answer.tokens, spec))
                answer.tokens = []  # the request owns them now, and is freed long before the answer
            self._inbox.clear()
        plan = scheduler.plan()
        if scheduler.dequeued:
            scheduler.take_dequeued()
        copies = (0, 0)
        if scheduler.cache.memory_ops:
            copies = count_copies(scheduler.cache.take_memory_ops(), scheduler.cache)
        if plan is None:
            return
        self._plan, self._begin_s, self._n_portion = plan, now_s, 1
        if plan.repeats:
            load = self._load = self._load.repeated()
            self._repeated = plan
            n_ctx = scheduler.n_ctx
            n_left = min(min(r.max_tokens - r.n_generated, n_ctx - len(r.tokens)) for r in plan.requests)
            self._n_portion = min(max(n_left, 1), self.max_portion)
            self._slope_s = self._cost.repeated_s(load)
        else:
            load = self._load = load_of(plan, self._n_ubatch, *copies)
            self._slope_s = 0.0
        self._step_s = self._cost.seconds(load)
        self.end_s = self._ended_s(self._n_portion)


def count_copies(ops: Iterable[MemoryOp], cache: KvCache) -> tuple[int, int]:
    """Number of copies of cells, between slots, to host memory or back, and number of copied cells."""
    n_copies = n_cells = 0
    for op in ops:
        if isinstance(op, (Copy, Restore)):
            n_copies, n_cells = n_copies + 1, n_cells + op.n
        elif isinstance(op, Save):
            n_copies, n_cells = n_copies + 1, n_cells + cache.n_saved_cells(op.key)
    return n_copies, n_cells


def _following(token: int) -> int:
    """The next token of a text; the same object each time."""
    return TOKENS[token + 1] if token + 1 < len(TOKENS) else token + 1


def _bin(seconds: float) -> int:
    return math.floor(math.log(max(seconds, 1e-6)) * BINS_PER_E)


def quantile_of(gaps: Counter[int], q: float) -> float:
    """A quantile of a histogram of gaps, in seconds."""
    left = q * sum(gaps.values())
    for number in sorted(gaps):
        left -= gaps[number]
        if left <= 0:
            return math.exp((number + 0.5) / BINS_PER_E)
    return math.nan

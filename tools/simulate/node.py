"""One engine in virtual time: the real ``Scheduler`` and ``KvCache``, and steps that take what ``StepCost`` says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from llamapipe.engine.scheduler.batch_plan import BatchPlan, Copy, Save
from llamapipe.engine.scheduler.batch_plan import Load as LoadCells
from llamapipe.engine.scheduler.kv_cache import KvCache
from llamapipe.engine.scheduler.request import UNLIMITED, Request, State
from llamapipe.engine.scheduler.scheduler import Scheduler
from simulate.cost import Load as StepLoad
from simulate.cost import StepCost, load_of

_NO_TOKENS: frozenset[int] = frozenset()
BINS_PER_E = 20  # of the histogram of gaps: neighbours differ by 5 %


@dataclass(frozen=True)
class NodeOptions:
    """The options of an engine, as of ``llamapipe.Engine``, and the speed of its memory.

    ``cell_bytes``: of one position's keys and values. ``copy_bytes_per_s``: of copies between slots and to host memory.
    """

    n_ctx: int = 4096
    n_seq_max: int = 16
    n_batch: int = 2048
    n_ubatch: int = 512
    cache_bytes: int = 4 * 2**30
    cell_bytes: float = 24_576.0
    copy_bytes_per_s: float = 4e9
    prefix_cache: bool = True
    prefill_cutoff: int | None = 256
    max_itl_s: float | None = None


class Answer:
    """A request from its arrival to its end, in seconds of virtual time; ``Request.sink`` on a node.

    ``n_cached``: prompt tokens that were in cells. ``on_end``: called with this object when the last token is there.
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
        """Tokens are counted by the node."""
        return False

    def finish(self, request: Request) -> None:
        """The node says when."""

    def restart_text(self) -> None:
        """There is no text."""


class Node:
    """One engine. ``end_s``: when the step in flight ends; infinity if none is. ``gaps``: between tokens, by bin."""

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
        self._cost = cost
        self._options = options
        self._inbox: list[Answer] = []
        self._plan: BatchPlan | None = None
        self._load = StepLoad(0, 0, 0, 0)
        self._repeated: BatchPlan | None = None  # whose requests have had their last tokens at `_last_s`
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

    def finish_step(self) -> None:
        """Ends the step in flight, at ``end_s``, and starts the next one if there is work."""
        plan, now_s = self._plan, self.end_s
        assert plan is not None
        scheduler = self.scheduler
        self._plan, self.end_s = None, math.inf
        taken = scheduler.commit(plan, [request.tokens[-1] + 1 for request in plan.requests])
        if scheduler.batch_builder.budget.is_on:
            scheduler.observe(plan, self._cost.seconds(self._load))
        self.n_steps += 1
        if plan.repeats:
            self.gaps[_bin(now_s - self._last_s)] += len(taken)
        else:
            self._note_tokens(plan, now_s)
        self._last_s = now_s
        if scheduler.dequeued:  # some have ended
            self._note_ends(plan, now_s)
        self._start(now_s)

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
                scheduler.add(Request(answer.tokens, answer.n_answer, _NO_TOKENS, UNLIMITED, sink=answer))
                answer.tokens = []  # the request's now: it ends long before the answer is forgotten
            self._inbox.clear()
        plan = scheduler.plan()
        if scheduler.dequeued:
            scheduler.take_dequeued()
        memory_s = self._memory_s() if scheduler.has_memory_ops else 0.0
        if plan is None:
            return
        if plan.repeats:
            n_decode, n_cells, _, _ = self._load
            self._load = StepLoad(n_decode, n_cells + n_decode, 0, 0)
            self._repeated = plan
        else:
            self._load = load_of(plan)
        seconds = self._cost.seconds(self._load) + memory_s
        self._plan = plan
        self.busy_s += seconds
        self.end_s = now_s + seconds

    def _memory_s(self) -> float:
        """Performs the changes to KV cells. Returns the time of those that copy."""
        cache, n_cells = self.scheduler.cache, 0
        for op in cache.take_memory_ops():
            if isinstance(op, (Copy, LoadCells)):
                n_cells += op.n
            elif isinstance(op, Save):
                n_cells += cache.n_saved_cells(op.key)
        return n_cells * self._options.cell_bytes / self._options.copy_bytes_per_s


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

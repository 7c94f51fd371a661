"""One request as the scheduler sees it, and every transition of its state.

::

    WAITING -> RUNNING -> PAUSED -> RUNNING ...     a request pauses when it has produced what it may for now
       ^          |          |
       +----------+----------+                      preempted: its cells are dropped, its tokens kept
    any state -> FINISHED                           or, for a kept request, PAUSED with a finish reason
"""

from __future__ import annotations

from enum import Enum
from typing import Any

UNLIMITED = 2**62


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"  # no slot: queued, preempted, or preempted and without leave to go on
    RUNNING = "running"  # in a slot, part of the next steps
    PAUSED = "paused"  # in a slot, but not allowed to produce more for now
    FINISHED = "finished"


_ALLOWED = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.PAUSED, State.WAITING, State.FINISHED},
    State.PAUSED: {State.RUNNING, State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


class Request:
    """A sequence of tokens that is being continued.

    ``tokens``: the whole sequence, prompt and generated; the first ``n_past`` of them are in KV cells.
    ``token_budget``: how many tokens it may have generated in all before it pauses; consumers raise it.
    ``max_tokens``: most generated tokens since the start or the last append; with 0, the request only computes its
    ``logprob_targets``. ``sink``: receives the results; opaque here.

    Only the engine thread changes a request, except ``token_budget`` and ``cancelled``, which its one consumer sets.
    """

    __slots__ = (
        "arrival",
        "batch_plan",
        "cancelled",
        "error",
        "finish_reason",
        "last_logprob",
        "logprob_targets",
        "max_tokens",
        "n_generated",
        "n_past",
        "n_prompt",
        "n_total",
        "prompt_group",
        "resumable",
        "sampler",
        "sampler_factory",
        "seed",
        "sink",
        "slot",
        "state",
        "stop_tokens",
        "token_budget",
        "tokens",
        "wants_logprobs",
    )

    def __init__(
        self,
        tokens: list[int],
        max_tokens: int | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        token_budget: int = UNLIMITED,
        resumable: bool = False,
        sink: Any = None,
    ) -> None:
        self.tokens = tokens
        self.n_prompt = len(tokens)
        self.max_tokens = UNLIMITED if max_tokens is None else max_tokens
        self.stop_tokens = stop_tokens
        self.token_budget = token_budget
        self.resumable = resumable
        self.sink = sink
        self.sampler_factory: Any = None  # makes the sampler; opaque here, like the sampler and the sink
        self.seed = 0
        self.sampler: Any = None
        self.prompt_group: Any = None  # requests with the same prompt
        self.logprob_targets: Any = None  # which of its own tokens' rows are wanted, and what they said
        self.wants_logprobs = False  # whether it is to be known how probable each token was
        self.last_logprob: Any = None  # that of the last one
        self.arrival = -1  # order of arrival, set by the scheduler
        self.slot = -1
        self.batch_plan: Any = None  # the plan it is part of, while it keeps its slot
        self.n_past = 0
        self.n_generated = 0  # since the start or the last append: against max_tokens
        self.n_total = 0  # ever: against limit
        self.state = State.WAITING
        self.cancelled = False
        self.finish_reason: str | None = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        why = f" {self.finish_reason}" if self.finish_reason else ""
        return (
            f"<Request {self.arrival} {self.state.value}{why} slot={self.slot} n_prompt={self.n_prompt} "
            f"n_tokens={len(self.tokens)} n_past={self.n_past}>"
        )

    @property
    def n_left(self) -> int:
        """Tokens that are to be fed."""
        return len(self.tokens) - self.n_past

    @property
    def is_streaming(self) -> bool:
        """Whether somebody reads its tokens as they come."""
        return self.max_tokens > 0 and self.token_budget < UNLIMITED

    def move(self, state: State) -> None:
        """Changes the state; the only place that does."""
        if state not in _ALLOWED[self.state]:
            raise AssertionError(f"{self!r} cannot become {state.value}")
        self.state = state

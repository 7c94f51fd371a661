"""What one step computes, and what is done to KV cells before it. Pure data.

The scheduler makes a plan and alone changes it afterwards: ``in_flight`` and ``repeats``. Executors only read it.
"""

from __future__ import annotations

from typing import NamedTuple

from llamapipe.engine.scheduler.logprob_targets import LogprobTargets
from llamapipe.engine.scheduler.request import Request


class Remove(NamedTuple):
    """Remove the cells of a sequence from ``position`` on."""

    slot: int
    position: int


class Copy(NamedTuple):
    """Copy the first ``n`` cells of a sequence to another one, which is empty."""

    source: int
    slot: int
    n: int


class Save(NamedTuple):
    """Copy the cells of a sequence to host memory, as ``key``, if they take at most ``max_bytes``."""

    slot: int
    key: int
    max_bytes: int


class Load(NamedTuple):
    """Copy the first ``n`` saved cells to a sequence, which is empty."""

    key: int
    slot: int
    n: int


class Forget(NamedTuple):
    """Free saved cells."""

    key: int


class Shift(NamedTuple):
    """Remove the cells of a sequence at the positions from ``begin`` to before ``end``, and move those after them."""

    slot: int
    begin: int
    end: int


MemoryOp = Shift | Remove | Copy | Save | Load | Forget


class ScoredRows(NamedTuple):
    """Rows that score a request's own tokens: batch ``entries``, for its positions from ``first`` on."""

    request: Request
    targets: LogprobTargets
    first: int
    entries: range


class BatchPlan:
    """The batch of one step, as parallel lists over its entries, and the requests that get a token from it.

    ``rows[i]`` is the batch entry whose logits continue ``requests[i]``.
    ``scheduled``: each request in the batch with its number of entries; the first ``n_decode`` of them decode.
    ``scored``: rows that score the requests' own tokens. ``padding``: cells of entries that only keep the batch in one
    piece; they are removed after the step.

    ``in_flight``: planned and not committed; plans made meanwhile leave its requests out.

    ``repeats``: the step has the entries of the step before it. Each gets the token that was sampled from it, one
    position further; ``tokens`` and ``positions`` stay those of the first of these steps.
    """

    __slots__ = (
        "in_flight",
        "n_decode",
        "outputs",
        "padding",
        "positions",
        "repeats",
        "requests",
        "rows",
        "scheduled",
        "scored",
        "seq_ids",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.seq_ids: list[int] = []
        self.outputs: list[int] = []
        self.rows: list[int] = []
        self.requests: list[Request] = []
        self.scheduled: list[tuple[Request, int]] = []
        self.scored: list[ScoredRows] = []
        self.padding: list[Remove] = []
        self.n_decode = 0
        self.repeats = False
        self.in_flight = True

    def __repr__(self) -> str:
        scheduled = ", ".join(f"{request.arrival}: {n}" for request, n in self.scheduled)
        repeats = " repeats" if self.repeats else ""
        return f"<BatchPlan{repeats} n_tokens={len(self.tokens)} n_outputs={len(self.rows)} scheduled {scheduled}>"

"""What one step feeds, and what is done to the cells before it. Pure data."""

from __future__ import annotations

from typing import NamedTuple

from llamapipe.engine.scheduler.request import Request


class Remove(NamedTuple):
    """Cells to forget: those of a sequence from ``position`` on."""

    slot: int
    position: int


class Copy(NamedTuple):
    """The first ``n`` cells of a sequence, to be another's, which is empty."""

    source: int
    slot: int
    n: int


class BatchPlan:
    """What one step feeds: parallel lists over batch entries, and whose rows come out.

    ``rows[i]`` is the batch entry whose logits continue ``requests[i]``, some of which may wait for a slot.
    ``scheduled``: each request with its number of entries, the first ``n_decode`` of them decoding. ``scored``:
    (request, first position, batch entries) of rows that score the request's own tokens.
    ``padding``: (seq_id, position) of entries that only keep the batch in one piece; they are removed afterwards.

    ``in_flight``: planned and not committed; the requests in it are left out of plans made meanwhile.

    ``repeats``: the entries are those of the step before, each fed what was sampled from it, one position further;
    ``tokens`` and ``positions`` stay those of the first such step then.
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
        self.scored: list[tuple[Request, int, range]] = []
        self.padding: list[Remove] = []
        self.n_decode = 0
        self.repeats = False
        self.in_flight = True

    def __repr__(self) -> str:
        scheduled = ", ".join(f"{request.arrival}: {n}" for request, n in self.scheduled)
        again = " again" if self.repeats else ""
        return f"<BatchPlan{again} n_tokens={len(self.tokens)} n_outputs={len(self.rows)} fed {scheduled}>"

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


class StepPlan:
    """What one step feeds: parallel lists over batch entries, and whose rows come out.

    ``rows[i]`` is the batch entry whose logits continue ``requests[i]``, some of which may wait for a slot. ``fed``:
    each request with its number of entries, the first ``n_decode`` of them decoding. ``scored``: (request, first
    position, batch entries) of rows that say something of the request's own tokens. ``fillers``: (seq_id, position) of
    entries that only keep the batch in one piece; they are removed afterwards.

    ``flying``: planned and not committed; the requests in it are left out of plans made meanwhile.

    ``again``: the entries are those of the step before, each fed what was sampled from it, one position further;
    ``tokens`` and ``positions`` stay those of the first such step then.
    """

    __slots__ = (
        "again",
        "fed",
        "fillers",
        "flying",
        "n_decode",
        "outputs",
        "positions",
        "requests",
        "rows",
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
        self.fed: list[tuple[Request, int]] = []
        self.scored: list[tuple[Request, int, range]] = []
        self.fillers: list[Remove] = []
        self.n_decode = 0
        self.again = False
        self.flying = True

    def __repr__(self) -> str:
        fed = ", ".join(f"{request.arrival}: {n}" for request, n in self.fed)
        again = " again" if self.again else ""
        return f"<StepPlan{again} n_tokens={len(self.tokens)} n_outputs={len(self.rows)} fed {fed}>"

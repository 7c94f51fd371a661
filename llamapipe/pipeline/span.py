"""One stage of one step in a trace: plain data, shared by the recorder and the drawing."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """One stage of one step, in seconds of ``time.perf_counter``; ``step`` is -1 for work between steps."""

    stage: str
    step: int
    begin_s: float
    end_s: float
    n_tokens: int = 0
    n_rows: int = 0
    sequences: str = ""  # as ranges: "0-3,7"

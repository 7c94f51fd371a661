"""Records the most recent steps of an engine, for the page."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from llamapipe.engine import Engine
from llamapipe.pipeline.trace import ORDER

_IDLE_S = 5.0  # recording stops after this time without a reader
_MAX_SPANS = 4000


class Timeline:
    """Records the engine's stages while a client reads them. Use it on the event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started = False
        self._idle: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Timeline {'on' if self._started else 'off'}>"

    async def since(self, after_s: float) -> dict[str, Any]:
        """Return the spans that ended after ``after_s``, and the engine's current state.

        ``after_s``: in seconds on the server's clock.
        """
        if not self._engine.trace.on:
            self._engine.trace.start(_MAX_SPANS)
            self._started = True
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._stop)
        return await asyncio.to_thread(self._read, after_s)

    def _stop(self) -> None:
        if self._started and not self._engine.closed:
            self._engine.trace.stop()
        self._started = False

    def _read(self, after_s: float) -> dict[str, Any]:
        engine = self._engine
        stats = engine.stats()
        now = perf_counter()
        lanes = {stage: i for i, stage in enumerate(ORDER)}
        spans = [
            (lanes[span.stage], span.step, round(span.begin_s, 6), round(span.end_s, 6))
            for span in engine.trace.spans()
            if span.end_s > after_s and span.stage in lanes
        ]
        return {
            "now": now,
            "stages": ORDER,
            "spans": spans[-_MAX_SPANS:],
            "stats": {
                "n_completion_tokens": stats.n_completion_tokens,
                "n_prompt_tokens": stats.n_prompt_tokens,
                "n_active": stats.n_active,
                "n_queued": stats.n_queued,
                "n_used_cells": stats.n_used_cells,
                "n_cells": engine.n_cells,
                "n_threads": stats.n_threads,
            },
        }

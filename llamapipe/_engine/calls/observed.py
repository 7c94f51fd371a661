"""The requests of one prompt as an observer sees them (``llamapipe.types.ObservedRequest``).

Open this file when telemetry needs another count or time.

The principle: an observer only reads. Counts are read from the requests on demand. Times are recorded by a sink around
each request's own sink, which only an observer adds, so an engine without an observer pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from llamapipe._engine.policy.core import UNLIMITED, Request, ResultSink
from llamapipe._engine.runtime.samplers import SamplerFactory
from llamapipe.params import SamplingParams
from llamapipe.types import ObservedRequest


class _Observed:
    """The requests of one prompt; see ``ObservedRequest``. Creating it wraps their sinks in sinks that record times."""

    __slots__ = ("_requests", "_sinks", "operation")

    def __init__(self, requests: Sequence[Request], operation: str) -> None:
        self.operation = operation
        self._requests = requests
        self._sinks = [_TimedSink(request.sink) for request in requests]
        for request, sink in zip(requests, self._sinks, strict=True):
            request.sink = sink

    def __repr__(self) -> str:
        return f"<_Observed {self.operation} n={len(self._requests)}>"

    @property
    def params(self) -> SamplingParams | None:
        factory = self._requests[0].spec.sampler_factory
        return factory.params if isinstance(factory, SamplerFactory) else None

    @property
    def is_stream(self) -> bool:
        return self._requests[0].token_budget < UNLIMITED

    @property
    def n_prompt_tokens(self) -> int:
        return self._requests[0].n_prompt

    @property
    def n_cached_tokens(self) -> int:
        return min(request.n_cached for request in self._requests)

    @property
    def n_completion_tokens(self) -> int:
        return sum(max(len(r.full_sequence) - r.n_prompt, 0) for r in self._requests)

    @property
    def finish_reasons(self) -> tuple[str | None, ...]:
        return tuple(request.finish_reason for request in self._requests)

    @property
    def prefill_at(self) -> float | None:
        times = [r.left_queue_at for r in self._requests if r.left_queue_at is not None and r.n_past]
        return min(times, default=None)

    @property
    def first_token_at(self) -> float | None:
        return min((s.first_at for s in self._sinks if s.first_at is not None), default=None)

    @property
    def ended_at(self) -> float | None:
        ends = [sink.ended_at for sink in self._sinks if sink.ended_at is not None]
        return max(ends) if len(ends) == len(self._sinks) else None


def observed_request(requests: Sequence[Request], operation: str) -> ObservedRequest:
    """Return the requests of one prompt as an observer sees them. Call it before the requests are submitted."""
    return _Observed(requests, operation)


class _TimedSink:
    """Records when the first token and the end arrive, on the engine thread, and passes everything on to a sink."""

    __slots__ = ("_sink", "ended_at", "first_at")

    def __init__(self, sink: ResultSink) -> None:
        self._sink = sink
        self.first_at: float | None = None
        self.ended_at: float | None = None

    def token(self, request: Request, token: int) -> bool:
        if self.first_at is None:
            self.first_at = perf_counter()
        return self._sink.token(request, token)

    def finish(self, request: Request) -> None:
        self.ended_at = perf_counter()
        self._sink.finish(request)

    def restart_text(self, at_start: bool) -> None:
        self._sink.restart_text(at_start)

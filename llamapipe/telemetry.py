"""OpenTelemetry: a span for each request of an engine. Needs the extra ``otel``.

Names follow OpenTelemetry's semantic conventions for generative AI, which are not stable yet. Prompts and outputs are
not recorded. An engine that is not instrumented does no tracing work.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from llamapipe._engine.request import UNLIMITED, Request, ResultSink
from llamapipe._engine.sampling import SamplerFactory
from llamapipe.engine import Engine

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_INT64_MAX = 2**63 - 1  # integers of the protocol are signed
# Spans of streams that a destructor cancelled. Not per engine: it may be closed or uninstrumented by then.
_dropped: deque[_RequestSpan] = deque()


def instrument(engine: Engine, tracer_provider: TracerProvider | None = None) -> None:
    """Creates a span for each request that is submitted to the engine from now on.

    ``tracer_provider``: default: the global one. A span is a child of the caller's current span, in threads and in
    asyncio tasks. It begins when the request is submitted and ends with the last token. The thread or task that reads
    the result ends the span, so the engine never waits for an exporter. Each prompt of a list has its own span, for any
    ``n``.

    Spans of ``generate`` and streams are named ``text_completion``, of chats ``chat``, of scores ``score``. The events
    ``llamapipe.prefill`` and ``llamapipe.first_token`` mark when a request got a slot and its first token. Spans of
    failed requests have the status ERROR and ``error.type``. ``start`` and ``Embedder`` create no spans.

    Any thread. Raises ImportError without the extra ``otel``.
    """
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an Engine, not {type(engine).__name__}")
    try:
        trace: Any = import_module("opentelemetry.trace")
    except ImportError:
        raise ImportError('spans need opentelemetry-api: pip install "llamapipe[otel]"') from None
    tracer: Tracer = trace.get_tracer("llamapipe", tracer_provider=tracer_provider)
    atexit.unregister(_end_dropped)
    atexit.register(_end_dropped)  # again: before a provider that was made meanwhile shuts down
    engine._observe(_Spans(trace, tracer, engine.model.name))


def uninstrument(engine: Engine) -> None:
    """Creates no spans for future requests."""
    engine._observe(None)
    _end_dropped()


def _end_dropped() -> None:
    while _dropped:
        try:
            span = _dropped.popleft()
        except IndexError:  # another thread took it
            return
        span.end()


class _Spans:
    """Begins and ends the spans of one engine."""

    def __init__(self, trace: Any, tracer: Tracer, model: str) -> None:
        self.trace = trace
        self._tracer = tracer
        self._model = model

    def begin(self, requests: Sequence[Request], operation: str) -> _RequestSpan:
        """Starts the span of one prompt, as a child of the caller's current span."""
        _end_dropped()
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "llamapipe",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": requests[0].n_prompt,
        }
        factory = requests[0].spec.sampler_factory
        if isinstance(factory, SamplerFactory):
            params = factory.params
            for name in _OPTIONS:
                value = getattr(params, name)
                if value is not None and value <= _INT64_MAX:
                    attributes[f"gen_ai.request.{name}"] = value
            if params.stop:
                attributes["gen_ai.request.stop_sequences"] = tuple(params.stop)
            if params.n > 1:
                attributes["gen_ai.request.choice.count"] = params.n
            attributes["gen_ai.request.stream"] = requests[0].token_budget < UNLIMITED
        span = self._tracer.start_span(
            f"{operation} {self._model}", kind=self.trace.SpanKind.INTERNAL, attributes=attributes
        )
        return _RequestSpan(self, span, requests)

    def close(self) -> None:
        """Ends the spans of dropped streams."""
        _end_dropped()


class _RequestSpan:
    """The span of one prompt, and the times of its requests."""

    def __init__(self, spans: _Spans, span: Span, requests: Sequence[Request]) -> None:
        self._spans = spans
        self._span = span
        self._requests = requests
        self._began_ns, self._began_at = time_ns(), perf_counter()
        self._sinks = [_TimedSink(request.sink) for request in requests]
        for request, sink in zip(requests, self._sinks, strict=True):
            request.sink = sink

    def end(self, error: BaseException | None = None, timed_out: bool = False) -> None:
        """Ends the span at the time of the requests' end, or now."""
        span = self._span
        if span.is_recording():
            for name, at in (("prefill", self._prefill_at()), ("first_token", self._first_at())):
                if at is not None:
                    span.add_event(
                        f"llamapipe.{name}", {"seconds": at - self._began_at}, timestamp=self._ns(at)
                    )
            span.set_attributes(self._results("timeout" if timed_out else "cancelled"))
            if isinstance(error, Exception):  # neither Ctrl-C nor a cancelled task
                kind = "timeout" if isinstance(error, TimeoutError) else type(error).__qualname__
                span.set_attribute("error.type", kind)
                span.set_status(self._spans.trace.Status(self._spans.trace.StatusCode.ERROR, str(error)))
        ends = [sink.ended_at for sink in self._sinks if sink.ended_at is not None]
        is_over = len(ends) == len(self._sinks)
        span.end(self._ns(max(ends) if is_over else perf_counter()))

    def drop(self) -> None:
        """Leaves the end to the next caller: a destructor may run while its thread holds an OpenTelemetry lock."""
        _dropped.append(self)

    def _results(self, cancelled: str) -> dict[str, Any]:
        requests = self._requests
        reasons = [request.finish_reason or "cancelled" for request in requests]
        return {
            "gen_ai.response.model": self._spans._model,
            "gen_ai.usage.output_tokens": sum(max(len(r.full_sequence) - r.n_prompt, 0) for r in requests),
            "gen_ai.usage.cache_read.input_tokens": min(request.n_cached for request in requests),
            "gen_ai.response.finish_reasons": tuple(cancelled if r == "cancelled" else r for r in reasons),
        }

    def _prefill_at(self) -> float | None:
        times = [r.left_queue_at for r in self._requests if r.left_queue_at is not None and r.n_past]
        return min(times, default=None)

    def _first_at(self) -> float | None:
        return min((s.first_at for s in self._sinks if s.first_at is not None), default=None)

    def _ns(self, at: float) -> int:
        return self._began_ns + max(round((at - self._began_at) * 1e9), 0)


class _TimedSink:
    """Records the times of the first token and of the end, on the engine thread."""

    __slots__ = ("_sink", "ended_at", "first_at")

    def __init__(self, sink: ResultSink) -> None:
        self._sink = sink
        self.first_at: float | None = None
        self.ended_at: float | None = None

    def token(self, request: Request, token: int) -> bool:
        """Passes the token on."""
        if self.first_at is None:
            self.first_at = perf_counter()
        return self._sink.token(request, token)

    def finish(self, request: Request) -> None:
        """Passes the end on."""
        self.ended_at = perf_counter()
        self._sink.finish(request)

    def restart_text(self) -> None:
        """Passes the call on."""
        self._sink.restart_text()

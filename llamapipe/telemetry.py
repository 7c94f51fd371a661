"""OpenTelemetry: a span for each request of an engine. Needs the extra ``otel``.

Names follow OpenTelemetry's semantic conventions for generative AI, which are not stable yet. Prompts and outputs are
not recorded. An engine that is not instrumented does no tracing work.
"""

from __future__ import annotations

import atexit
from collections import deque
from importlib import import_module
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from llamapipe.engine import Engine
from llamapipe.types import ObservedRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider
else:
    Span = Tracer = TracerProvider = Any  # types of the extra; annotations must resolve without it

_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_INT64_MAX = 2**63 - 1  # the protocol's integers are signed
# Spans of streams that a destructor cancelled. A global, because the engine may already be closed or uninstrumented.
_dropped: deque[_RequestSpan] = deque()


def instrument(engine: Engine, tracer_provider: TracerProvider | None = None) -> None:
    """Create a span for each request that is submitted to the engine from now on.

    ``tracer_provider``: None means the global one. A span is a child of the caller's current span, in threads and in
    asyncio tasks. It begins when the request is submitted and ends with the last token. The thread or task that reads
    the result ends the span, so the engine never waits for an exporter. Each prompt of a list has one span, whatever
    ``n`` is.

    Spans of ``generate`` and streams are named ``text_completion``, those of chats ``chat``, those of scores ``score``.
    The events ``llamapipe.prefill`` and ``llamapipe.first_token`` mark when a request got a slot and its first token.
    Spans of failed requests have the status ERROR and ``error.type``. ``start`` and ``Embedder`` create no spans.

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
    atexit.register(_end_dropped)  # again, so that it runs before a newer provider shuts down
    engine.observe(_Spans(trace, tracer, engine.model.name))


def uninstrument(engine: Engine) -> None:
    """Create no spans for future requests."""
    engine.observe(None)
    _end_dropped()


def _end_dropped() -> None:
    while _dropped:
        try:
            span = _dropped.popleft()
        except IndexError:  # another thread took the last span
            return
        span.end()


class _Spans:
    """Begins and ends the spans of one engine."""

    def __init__(self, trace: Any, tracer: Tracer, model: str) -> None:
        self.trace = trace
        self._tracer = tracer
        self.model = model

    def begin(self, request: ObservedRequest) -> _RequestSpan:
        """Start the span of one prompt, as a child of the caller's current span."""
        _end_dropped()
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": "llamapipe",
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": request.n_prompt_tokens,
        }
        params = request.params
        if params is not None:
            for name in _OPTIONS:
                value = getattr(params, name)
                if value is not None and value <= _INT64_MAX:
                    attributes[f"gen_ai.request.{name}"] = value
            if params.stop:
                attributes["gen_ai.request.stop_sequences"] = tuple(params.stop)
            if params.n > 1:
                attributes["gen_ai.request.choice.count"] = params.n
            attributes["gen_ai.request.stream"] = request.is_stream
        span = self._tracer.start_span(
            f"{request.operation} {self.model}", kind=self.trace.SpanKind.INTERNAL, attributes=attributes
        )
        return _RequestSpan(self, span, request)

    def close(self) -> None:
        """End the spans of dropped streams."""
        _end_dropped()


class _RequestSpan:
    """The span of one prompt."""

    def __init__(self, spans: _Spans, span: Span, request: ObservedRequest) -> None:
        self._spans = spans
        self._span = span
        self._request = request
        self._began_ns, self._began_at = time_ns(), perf_counter()

    def end(self, error: BaseException | None = None, timed_out: bool = False) -> None:
        """End the span with the time when the requests ended, or now if that is not known."""
        span, request = self._span, self._request
        if span.is_recording():
            for name, at in (("prefill", request.prefill_at), ("first_token", request.first_token_at)):
                if at is not None:
                    span.add_event(
                        f"llamapipe.{name}", {"seconds": at - self._began_at}, timestamp=self._ns(at)
                    )
            span.set_attributes(self._results("timeout" if timed_out else "cancelled"))
            if isinstance(error, Exception):  # not Ctrl-C or a cancelled task
                kind = "timeout" if isinstance(error, TimeoutError) else type(error).__qualname__
                span.set_attribute("error.type", kind)
                span.set_status(self._spans.trace.Status(self._spans.trace.StatusCode.ERROR, str(error)))
        ended_at = request.ended_at
        span.end(self._ns(perf_counter() if ended_at is None else ended_at))

    def drop(self) -> None:
        """Let the next caller end the span: a destructor may run while its thread holds an OpenTelemetry lock."""
        _dropped.append(self)

    def _results(self, cancelled: str) -> dict[str, Any]:
        request = self._request
        reasons = [reason or "cancelled" for reason in request.finish_reasons]
        return {
            "gen_ai.response.model": self._spans.model,
            "gen_ai.usage.output_tokens": request.n_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.n_cached_tokens,
            "gen_ai.response.finish_reasons": tuple(cancelled if r == "cancelled" else r for r in reasons),
        }

    def _ns(self, at: float) -> int:
        return self._began_ns + max(round((at - self._began_at) * 1e9), 0)

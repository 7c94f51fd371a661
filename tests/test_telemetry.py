"""Spans of requests: whose children they are, what they say, and that they end however a request ends."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from support.control import turn

import llamapipe as lp
from llamapipe import telemetry

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

PROMPT = "1, 2, 3, 4,"
PARAMS = lp.SamplingParams(max_tokens=4, temperature=0, seed=7, ignore_eos=True)
LONG = lp.SamplingParams(max_tokens=200, ignore_eos=True)


class Watched:
    """An engine, and the spans it has made."""

    def __init__(self, engine: lp.Engine) -> None:
        self.engine = engine
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        telemetry.instrument(engine, self.provider)

    def take(self) -> list[ReadableSpan]:
        """The spans that have ended."""
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return spans

    def only_span(self) -> ReadableSpan:
        """The only one."""
        (span,) = self.take()
        return span


@pytest.fixture
def watched(make_engine: Callable[..., lp.Engine]) -> Watched:
    return Watched(make_engine(n_seq_max=2))


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def test_a_completion_is_a_span_with_its_counts_and_times(watched: Watched) -> None:
    out = watched.engine.generate(PROMPT, PARAMS)
    span = watched.only_span()
    span_attributes = attributes(span)
    assert span.name == "text_completion tiny" and span_attributes["gen_ai.request.model"] == "tiny"
    assert span_attributes["gen_ai.usage.input_tokens"] == out.n_prompt_tokens
    assert span_attributes["gen_ai.usage.output_tokens"] == out.n_completion_tokens == 4
    assert span_attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (span_attributes["gen_ai.request.max_tokens"], span_attributes["gen_ai.request.seed"]) == (4, 7)
    assert (
        not span_attributes["gen_ai.request.stream"] and "gen_ai.request.choice.count" not in span_attributes
    )
    assert [event.name for event in span.events] == ["llamapipe.prefill", "llamapipe.first_token"]
    assert span.start_time is not None and span.end_time is not None
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(out.timings.total_s, abs=0.05)
    assert out.timings.queue_s is not None and out.timings.first_token_s is not None
    assert 0 <= out.timings.queue_s <= out.timings.first_token_s <= out.timings.total_s


def test_each_prompt_of_a_list_has_a_span_and_choices_have_none(watched: Watched) -> None:
    watched.engine.generate([PROMPT, "A", "B"], lp.SamplingParams(max_tokens=3, n=2, ignore_eos=True))
    spans = watched.take()
    assert [attributes(span)["gen_ai.usage.output_tokens"] for span in spans] == [6, 6, 6]
    assert all(attributes(span)["gen_ai.request.choice.count"] == 2 for span in spans)


def test_an_answer_from_the_prefix_cache_says_so(watched: Watched) -> None:
    prompt = "the same words " * 8
    first, second = (watched.engine.generate(prompt, PARAMS) for _ in range(2))
    cached = [attributes(span)["gen_ai.usage.cache_read.input_tokens"] for span in watched.take()]
    assert cached == [first.n_cached_tokens, second.n_cached_tokens] and cached[0] == 0 < cached[1]


def test_streams_chats_and_scores(demo: lp.Model, make_engine: Callable[..., lp.Engine]) -> None:
    pytest.importorskip("jinja2")
    watched = Watched(make_engine(demo))
    engine = watched.engine
    list(engine.stream(PROMPT, PARAMS))
    engine.chat("Hello", PARAMS)
    list(engine.stream_chat("Hello", PARAMS))
    engine.score(PROMPT, [" 5", " 6"])
    engine.perplexity(PROMPT)
    dict(engine.iter_completed([PROMPT], PARAMS))
    with engine.start(PROMPT, PARAMS) as generation:  # its life is its caller's: no span
        generation.next()
    spans = watched.take()
    names = ["text_completion", "chat", "chat", "score", "score", "text_completion"]
    assert [span.name for span in spans] == [f"{name} demo" for name in names]
    streamed = [attributes(span).get("gen_ai.request.stream") for span in spans]
    assert streamed == [True, False, True, None, None, False]


def test_spans_are_children_of_the_callers_span_in_threads_and_tasks(watched: Watched) -> None:
    engine, tracer = watched.engine, watched.tracer

    def in_thread(n: int) -> tuple[str, int]:
        with tracer.start_as_current_span(f"caller {n}") as span:
            engine.generate(PROMPT, PARAMS)
        return f"caller {n}", span.get_span_context().span_id

    async def in_task(n: int) -> tuple[str, int]:
        with tracer.start_as_current_span(f"caller {n}") as span:
            if n % 3 == 0:
                await engine.agenerate(PROMPT, PARAMS)
            elif n % 3 == 1:
                assert [delta async for delta in engine.astream(PROMPT, PARAMS)]
            else:
                assert [index async for index, _ in engine.aiter_completed([PROMPT], PARAMS)] == [0]
        return f"caller {n}", span.get_span_context().span_id

    async def tasks() -> list[tuple[str, int]]:
        return await asyncio.gather(*map(in_task, range(6)))

    with ThreadPoolExecutor(4) as pool:
        callers = dict(pool.map(in_thread, range(10, 16)))
    callers |= asyncio.run(tasks())
    spans = watched.take()
    ours = [span.parent.span_id for span in spans if span.name.startswith("text") and span.parent]
    assert sorted(ours) == sorted(callers.values()) and len(callers) == 12


def test_a_request_that_fails_is_an_error(watched: Watched) -> None:
    def fail(row: Any) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError):
        watched.engine.generate(PROMPT, lp.SamplingParams(logits_processors=[fail]))
    span = watched.only_span()
    assert span.status.status_code.name == "ERROR" and attributes(span)["error.type"] == "RuntimeError"
    assert span.status.description == "planted"


def test_timeouts_are_errors_unless_the_caller_takes_what_there_is(watched: Watched) -> None:
    with pytest.raises(TimeoutError):
        watched.engine.generate(PROMPT, LONG, timeout=0)
    span = watched.only_span()
    assert span.status.status_code.name == "ERROR" and attributes(span)["error.type"] == "timeout"
    watched.engine.generate(PROMPT, LONG, timeout=0, on_timeout="return")
    span = watched.only_span()
    assert span.status.is_unset and attributes(span)["gen_ai.response.finish_reasons"] == ("timeout",)
    stream = watched.engine.stream(PROMPT, LONG, timeout=0)
    with pytest.raises(TimeoutError):
        next(stream)
    assert attributes(watched.only_span())["error.type"] == "timeout"


def test_a_full_queue_is_an_error(make_engine: Callable[..., lp.Engine]) -> None:
    watched = Watched(make_engine(n_seq_max=1, max_queue=1))
    with pytest.raises(lp.errors.QueueFullError):
        watched.engine.generate([PROMPT] * 3, PARAMS, block=False)
    assert [attributes(span)["error.type"] for span in watched.take()] == ["QueueFullError"] * 3
    with pytest.raises(lp.errors.QueueFullError):
        _ = [watched.engine.stream(PROMPT, LONG, block=False) for _ in range(4)]
    gc.collect()
    watched.engine.generate(PROMPT, PARAMS)
    assert "QueueFullError" in {attributes(span).get("error.type") for span in watched.take()}


def test_what_a_caller_gives_up_ends_as_cancelled(watched: Watched) -> None:
    engine = watched.engine
    with engine.stream(PROMPT, LONG) as stream:
        next(stream)
    span = watched.only_span()
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("cancelled",) and span.status.is_unset

    async def cancelled() -> None:
        task = asyncio.create_task(engine.agenerate(PROMPT, LONG))
        await turn()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancelled())
    assert attributes(watched.only_span())["gen_ai.response.finish_reasons"] == ("cancelled",)

    done = engine.iter_completed([PROMPT, "A"], [PARAMS, LONG])
    next(done)
    done.close()  # type: ignore[attr-defined]
    reasons = [attributes(span)["gen_ai.response.finish_reasons"] for span in watched.take()]
    assert reasons == [("length",), ("cancelled",)]


def test_a_dropped_stream_ends_with_the_next_call(watched: Watched) -> None:
    stream = watched.engine.stream(PROMPT, LONG)
    next(stream)
    del stream
    gc.collect()
    assert not watched.take()  # a destructor may run while OpenTelemetry holds a lock
    watched.engine.generate(PROMPT, PARAMS)
    reasons = [attributes(span)["gen_ai.response.finish_reasons"] for span in watched.take()]
    assert reasons == [("cancelled",), ("length",)]


def test_closing_the_engine_ends_the_spans_of_dropped_streams(demo: lp.Model) -> None:
    with lp.Engine(demo, n_ctx=256) as engine:
        watched = Watched(engine)
        next(engine.stream(PROMPT, LONG))
        gc.collect()
    assert watched.only_span().end_time is not None


def test_uninstrument_ends_it(watched: Watched) -> None:
    telemetry.uninstrument(watched.engine)
    watched.engine.generate(PROMPT, PARAMS)
    assert not watched.take()


def test_a_wrong_engine_is_an_error() -> None:
    with pytest.raises(TypeError, match="engine must be an Engine, not str"):
        telemetry.instrument("engine")  # type: ignore[arg-type]


def test_without_the_package_the_error_names_the_extra() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
import llamapipe as lp
with lp.Engine(lp.demo_model_path(), n_ctx=64) as engine:
    try:
        lp.telemetry.instrument(engine)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "llamapipe[otel]"' in done.stdout


def test_a_stream_that_is_dropped_late_ends_too(
    watched: Watched, make_engine: Callable[..., lp.Engine]
) -> None:
    """After the engine is closed, no longer instrumented, or instrumented anew."""
    closed, uninstrumented = Watched(make_engine()), Watched(make_engine())
    streams = [watch.engine.stream(PROMPT, LONG) for watch in (watched, closed, uninstrumented)]
    closed.engine.close()
    telemetry.uninstrument(uninstrumented.engine)
    again = TracerProvider(shutdown_on_exit=False)
    telemetry.instrument(watched.engine, again)
    streams.clear()
    gc.collect()
    watched.engine.generate(PROMPT, PARAMS)
    for watch in (watched, closed, uninstrumented):
        assert watch.only_span().end_time is not None


def test_a_stream_that_is_dropped_last_ends_at_exit() -> None:
    script = """
import llamapipe as lp
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
with lp.Engine(lp.demo_model_path()) as engine:
    lp.telemetry.instrument(engine, provider)
    stream = engine.stream("1, 2,", lp.SamplingParams(max_tokens=200))
del stream
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert '"gen_ai.response.finish_reasons"' in done.stdout

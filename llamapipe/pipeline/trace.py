"""Records when each stage of each step ran, for Perfetto or as an SVG timeline.

Stages of the pipeline are timed by native code and fetched when the trace is read. Stages of the caller (``add``,
``span``) are kept in Python; both use the clock of ``time.perf_counter``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llamapipe.arguments import check_int, path_of
from llamapipe.locks import Lock
from llamapipe.native.load import enum_names
from llamapipe.pipeline.span import Span

if TYPE_CHECKING:
    from llamapipe.llama.native_pipeline import NativePipeline

# Top to bottom in the timeline, followed by the caller's own stages.
ORDER = ("plan", "memory", "launch", "compute", "copy", "wait", "sample", "deliver")


class Trace:
    """Records the stages of a pipeline's steps between ``start`` and ``stop``. Any thread.

    Beyond ``max_spans`` the oldest spans are dropped. While ``on`` is False a stage costs one comparison.

    The stages: ``plan`` and ``deliver`` (engines only), ``memory`` (KV operations), ``launch`` (the call that starts a
    decode; on a CPU it returns when the step is computed), ``compute``, ``copy`` (rows to host memory), ``wait`` (a
    reader blocks), ``sample``, and any stage recorded with ``span``.
    """

    def __init__(self, pipeline: NativePipeline) -> None:
        self._pipeline = pipeline
        self._lock = Lock()
        self._spans: list[Span] = []
        self._max = 1
        self.on = False  # True while stages are recorded

    def __repr__(self) -> str:
        return f"<Trace {'on' if self.on else 'off'} n_spans={len(self._spans)}>"

    def start(self, max_spans: int = 100_000) -> None:
        """Starts recording; earlier spans are dropped."""
        most = check_int("max_spans", max_spans, 1, 10_000_000)
        with self._lock:
            self._drain()
            self._spans = []
            self._max = most
            self.on = True
            self._pipeline.native.lib.lp_trace(self._pipeline.handle, most)

    def stop(self) -> None:
        """Stops recording; the spans recorded so far stay."""
        with self._lock:
            self._drain()
            self.on = False
            self._pipeline.native.lib.lp_trace(self._pipeline.handle, 0)

    def add(self, stage: str, step: int, begin_s: float, end_s: float) -> None:
        """Records a stage measured by the caller, in seconds of ``time.perf_counter``."""
        if self.on:
            self._spans.append(Span(stage, step, begin_s, end_s))
            if len(self._spans) > 2 * self._max:
                with self._lock:
                    del self._spans[: -self._max]

    @contextmanager
    def span(self, stage: str, step: int = -1) -> Iterator[None]:
        """Times the body and records it as ``stage``: ``with pipe.trace.span("consume", out.number)``."""
        begin_s = perf_counter()
        try:
            yield
        finally:
            self.add(stage, step, begin_s, perf_counter())

    def spans(self) -> list[Span]:
        """The recorded spans, sorted by their beginning."""
        with self._lock:
            self._drain()
            return sorted(self._spans[-self._max :], key=lambda s: s.begin_s)

    def to_chrome(self) -> dict[str, Any]:
        """The trace in Chrome's trace-event format, which Perfetto opens; times are in microseconds."""
        spans = self.spans()
        zero_s = spans[0].begin_s if spans else 0.0
        lanes = {stage: i for i, stage in enumerate(_lanes(spans))}
        names = [("process_name", 0, "llamapipe"), *(("thread_name", i, name) for name, i in lanes.items())]
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": kind, "pid": 1, "tid": lane, "args": {"name": name}}
            for kind, lane, name in names
        ]
        events += [
            {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": i, "args": {"sort_index": i}}
            for i in lanes.values()
        ]
        for span in spans:
            arguments: dict[str, Any] = {"step": span.step}
            if span.n_tokens:
                arguments |= {"tokens": span.n_tokens, "rows": span.n_rows, "sequences": span.sequences}
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.stage} {span.step}" if span.step >= 0 else span.stage,
                    "cat": span.stage,
                    "pid": 1,
                    "tid": lanes[span.stage],
                    "ts": round((span.begin_s - zero_s) * 1e6, 3),
                    "dur": round((span.end_s - span.begin_s) * 1e6, 3),
                    "args": arguments,
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def to_svg(self, first_step: int | None = None, n_steps: int | None = None, title: str = "") -> str:
        """A timeline as a self-contained SVG document, with one line per stage.

        ``first_step`` and ``n_steps`` select the steps to draw; the default is all of them.
        """
        spans = self.spans()
        if first_step is not None or n_steps is not None:
            steps = sorted({span.step for span in spans if span.step >= 0})
            first = steps[0] if first_step is None and steps else first_step or 0
            chosen = [step for step in steps if step >= first][:n_steps]
            kept = set(chosen)
            spans = [span for span in spans if span.step in kept]
        from llamapipe.pipeline.trace_svg import draw

        return draw(spans, _lanes(spans), title)

    def save(self, path: str | Path, **options: Any) -> Path:
        """Writes the trace as ``.json`` (Chrome's trace events) or ``.svg``; ``options`` are passed to ``to_svg``.

        Raises ValueError for another suffix.
        """
        target = check_trace_path(path)
        if target.suffix == ".json":
            text = json.dumps(self.to_chrome(), separators=(",", ":"))
        else:
            text = self.to_svg(**options)
        target.write_text(text, encoding="utf-8")
        return target

    def _drain(self) -> None:
        """Fetches the spans that native code recorded and converts them to ``time.perf_counter``."""
        native = self._pipeline.native
        ffi, lib = native.ffi, native.lib
        # Both clocks are steady; reading them one right after the other gives their difference.
        offset_s = perf_counter() - lib.lp_now_ns() * 1e-9
        span = ffi.new("lp_span *")
        names = {
            value: name.removeprefix("LP_STAGE_").lower() for value, name in enum_names("lp_stage").items()
        }
        while lib.lp_next_span(self._pipeline.handle, span):
            self._spans.append(
                Span(
                    names[span.stage],
                    span.step,
                    span.begin_ns * 1e-9 + offset_s,
                    span.end_ns * 1e-9 + offset_s,
                    span.n_tokens,
                    span.n_rows,
                    ffi.string(span.sequences).decode(),
                )
            )


def check_trace_path(path: str | Path) -> Path:
    """``path`` as a Path. Raises ValueError unless its suffix names a format."""
    target = path_of(path)
    if target.suffix not in (".json", ".svg"):
        raise ValueError(f"{target.name!r} must end in .json (for Perfetto) or .svg (a picture)")
    return target


def _lanes(spans: list[Span]) -> list[str]:
    """The stages that occur, in the order they are shown."""
    found = {span.stage for span in spans}
    return [stage for stage in ORDER if stage in found] + sorted(found - set(ORDER))

"""Traces record when each stage of each step ran, for Perfetto or as an SVG timeline.

Native code times the stages of the pipeline; reading the trace fetches them. Stages of the caller (``add``, ``span``)
are kept in Python. The times of both are those of ``time.perf_counter``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

from llamapipe.arguments import check_int, path_of
from llamapipe.llama.native_pipeline import NativePipeline
from llamapipe.locks import Lock
from llamapipe.native.load import enum_names


class Span(NamedTuple):
    """One stage of one step, in seconds of ``time.perf_counter``; ``step`` is -1 for work between steps.

    ``n_drafted``, ``n_accepted``: the numbers of the step's drafted and accepted tokens; set for the stage ``deliver``.
    """

    stage: str
    step: int
    begin_s: float
    end_s: float
    n_tokens: int = 0
    n_rows: int = 0
    sequences: str = ""  # as ranges: "0-3,7"
    n_drafted: int = 0
    n_accepted: int = 0


# The stages in the timeline from top to bottom; the caller's own stages follow.
ORDER = ("plan", "memory", "launch", "compute", "copy", "wait", "sample", "deliver")


def _clock_offset_s(now_ns: Callable[[], int]) -> float:
    """Return the seconds to add to another steady clock's time to get the time of ``perf_counter``.

    This reads the other clock between two reads of ours, five times, and uses the reading whose two reads are closest:
    nothing interrupted the thread there.
    """
    readings = [(perf_counter(), now_ns(), perf_counter()) for _ in range(5)]
    begin_s, ns, end_s = min(readings, key=lambda reading: reading[2] - reading[0])
    return (begin_s + end_s) / 2 - ns * 1e-9


class Trace:
    """Records the stages of a pipeline's steps between ``start`` and ``stop``. Any thread.

    Beyond ``max_spans`` spans, the oldest are dropped. While ``on`` is False, a stage costs one comparison.

    The stages: ``plan`` and ``deliver`` (engines only), ``memory`` (KV operations), ``launch`` (the call that starts a
    decode; on a CPU it returns when the step is computed), ``compute``, ``copy`` (rows to host memory), ``wait`` (a
    reader blocks), ``sample``, and any stage recorded with ``span`` or ``add``.
    """

    def __init__(self, pipeline: NativePipeline, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Make a trace. ``notes``: metadata for Chrome's format, such as why nothing is drafted."""
        self._pipeline = pipeline
        self._notes = notes
        self._lock = Lock()
        self._spans: list[Span] = []
        self._max = 1
        self.on = False  # True while stages are recorded

    def __repr__(self) -> str:
        return f"<Trace {'on' if self.on else 'off'} n_spans={len(self._spans)}>"

    def start(self, max_spans: int = 100_000) -> None:
        """Drop earlier spans and start recording at most ``max_spans`` spans."""
        most = check_int("max_spans", max_spans, 1, 10_000_000)
        with self._lock:
            self._drain()
            self._spans = []
            self._max = most
            self.on = True
            self._pipeline.native.lib.lp_trace(self._pipeline.handle, most)

    def stop(self) -> None:
        """Stop recording; the spans recorded so far stay."""
        with self._lock:
            self._drain()
            self.on = False
            self._pipeline.native.lib.lp_trace(self._pipeline.handle, 0)

    def add(
        self, stage: str, step: int, begin_s: float, end_s: float, n_drafted: int = 0, n_accepted: int = 0
    ) -> None:
        """Record a stage that the caller measured in seconds of ``time.perf_counter``; does nothing unless ``on``.

        ``Span`` describes the arguments.
        """
        if self.on:
            self._spans.append(Span(stage, step, begin_s, end_s, n_drafted=n_drafted, n_accepted=n_accepted))
            if len(self._spans) > 2 * self._max:
                with self._lock:
                    del self._spans[: -self._max]

    @contextmanager
    def span(self, stage: str, step: int = -1) -> Iterator[None]:
        """Time the block and record it as ``stage``: ``with pipe.trace.span("consume", out.number)``."""
        begin_s = perf_counter()
        try:
            yield
        finally:
            self.add(stage, step, begin_s, perf_counter())

    def spans(self) -> list[Span]:
        """Return the recorded spans, sorted by ``begin_s``."""
        with self._lock:
            self._drain()
            return sorted(self._spans[-self._max :], key=lambda s: s.begin_s)

    def to_chrome(self) -> dict[str, Any]:
        """Return the trace in Chrome's trace-event format, which Perfetto opens; times are in microseconds."""
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
            if span.n_drafted:
                arguments |= {"drafted": span.n_drafted, "accepted": span.n_accepted}
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
        notes = {"otherData": dict(self._notes)} if self._notes else {}
        return {"traceEvents": events, "displayTimeUnit": "ms", **notes}

    def to_svg(self, first_step: int | None = None, n_steps: int | None = None, title: str = "") -> str:
        """Return a timeline as a self-contained SVG document, with one line per stage.

        ``first_step`` and ``n_steps`` select the steps to draw; the default is all of them.
        """
        spans = self.spans()
        if first_step is not None or n_steps is not None:
            steps = sorted({span.step for span in spans if span.step >= 0})
            first = steps[0] if first_step is None and steps else first_step or 0
            chosen = [step for step in steps if step >= first][:n_steps]
            kept = set(chosen)
            spans = [span for span in spans if span.step in kept]
        return _draw(spans, _lanes(spans), title)

    def save(
        self, path: str | Path, first_step: int | None = None, n_steps: int | None = None, title: str = ""
    ) -> Path:
        """Write the trace as ``.json`` (Chrome's trace events) or ``.svg``.

        The other arguments apply to ``.svg``; see ``to_svg``. Raises ValueError for another suffix.
        """
        target = check_trace_path(path)
        if target.suffix == ".json":
            text = json.dumps(self.to_chrome(), separators=(",", ":"))
        else:
            text = self.to_svg(first_step, n_steps, title)
        target.write_text(text, encoding="utf-8")
        return target

    def _drain(self) -> None:
        """Fetch the spans that native code recorded and convert them to ``time.perf_counter``."""
        native = self._pipeline.native
        ffi, lib = native.ffi, native.lib
        offset_s = _clock_offset_s(lib.lp_now_ns)
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
    """Return ``path`` as a Path. Raises ValueError unless its suffix names a format."""
    target = path_of(path)
    if target.suffix not in (".json", ".svg"):
        raise ValueError(f"{target.name!r} must end in .json (for Perfetto) or .svg (a picture)")
    return target


def _lanes(spans: list[Span]) -> list[str]:
    """Return the stages that occur in ``spans``, from top to bottom."""
    stages = {span.stage for span in spans}
    return [stage for stage in ORDER if stage in stages] + sorted(stages - set(ORDER))


_WIDTH, _LEFT, _RIGHT = 1200, 90, 16
_TOP, _LANE, _BAR = 44, 30, 20
# Neighbouring steps get different colours.
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_NO_STEP = "#9d9d9d"
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}"
    ".t{font-size:14px;font-weight:600}"
    ".n{fill:#fff;font-size:11px;pointer-events:none}"
    "line{stroke:#8888;stroke-width:1}.g{stroke-dasharray:2 4}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)


def _draw(spans: Sequence[Span], lanes: Sequence[str], title: str = "") -> str:
    """Return an SVG document for light and dark pages; ``lanes`` names the stages from top to bottom."""
    from html import escape

    begin_s = min((span.begin_s for span in spans), default=0.0)
    length_s = max((span.end_s for span in spans), default=begin_s + 1e-3) - begin_s or 1e-3
    scale = (_WIDTH - _LEFT - _RIGHT) / length_s
    bottom = _TOP + _LANE * len(lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 34}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<text class="t" x="{_LEFT}" y="20">{escape(title or "llamapipe: timeline of steps")}</text>',
    ]
    tick_s = _tick(length_s)
    for i in range(int(length_s / tick_s) + 1):
        x = _LEFT + i * tick_s * scale
        parts.append(f'<line class="g" x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{min(x, _WIDTH - 28):.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{_time(i * tick_s, tick_s)}</text>"
        )
    rows = {stage: i for i, stage in enumerate(lanes)}
    for stage, i in rows.items():
        y = _TOP + _LANE * i
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(stage)}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y + _BAR + 5}" x2="{_WIDTH - _RIGHT}" y2="{y + _BAR + 5}"/>')
    for span in spans:
        x, width = _LEFT + (span.begin_s - begin_s) * scale, max((span.end_s - span.begin_s) * scale, 0.6)
        y = _TOP + _LANE * rows[span.stage]
        colour = _COLOURS[span.step % len(_COLOURS)] if span.step >= 0 else _NO_STEP
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" rx="2" fill="{colour}">'
            f"<title>{escape(_title(span))}</title></rect>"
        )
        if span.step >= 0 and width > 9 * len(str(span.step)) + 4:
            parts.append(
                f'<text class="n" x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle">{span.step}</text>'
            )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _title(span: Span) -> str:
    text = span.stage if span.step < 0 else f"{span.stage} of step {span.step}"
    text += f": {(span.end_s - span.begin_s) * 1e6:.1f} µs"
    if span.n_tokens:
        text += f"; {span.n_tokens} tokens, {span.n_rows} rows, sequences {span.sequences}"
    return text


def _tick(length_s: float) -> float:
    """Return a round interval between ticks in seconds, so that at most 12 fit into ``length_s``."""
    step = 1e-6
    while True:
        for factor in (1, 2, 5):
            if length_s / (step * factor) <= 12:
                return step * factor
        step *= 10


def _time(seconds: float, tick_s: float) -> str:
    if tick_s >= 1e-3:
        return f"{seconds * 1e3:.0f} ms"
    return (
        f"{seconds * 1e3:.{2 if tick_s < 1e-4 else 1}f} ms" if tick_s >= 1e-5 else f"{seconds * 1e6:.0f} µs"
    )

"""Draws a trace as a self-contained SVG timeline: a line for each stage, a colour for each step.

Pure: it maps spans to text and reads no clock. The colours work on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from llamapipe.pipeline.span import Span

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


def draw(spans: Sequence[Span], lanes: Sequence[str], title: str = "") -> str:
    """The SVG document; ``lanes`` names the stages from top to bottom."""
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
            f"<title>{escape(_about(span))}</title></rect>"
        )
        if span.step >= 0 and width > 9 * len(str(span.step)) + 4:
            parts.append(
                f'<text class="n" x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle">{span.step}</text>'
            )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _about(span: Span) -> str:
    text = span.stage if span.step < 0 else f"{span.stage} of step {span.step}"
    text += f": {(span.end_s - span.begin_s) * 1e6:.1f} µs"
    if span.n_tokens:
        text += f"; {span.n_tokens} tokens, {span.n_rows} rows, sequences {span.sequences}"
    return text


def _tick(length_s: float) -> float:
    """A round distance between ticks in seconds; at most 12 fit into ``length_s``."""
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

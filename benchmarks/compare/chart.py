"""Draws the README's chart from stored figures: throughput by concurrency, for a small and a larger model.

python benchmarks/compare/chart.py FIGURES.json OUT.svg

Each panel shows one model: the median generated tokens per second of whole completions, over the rounds of one run in
which all sides shown took turns. The SVG needs no fonts of its own and follows the reader's light or dark theme.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 900, 350
TOP, BOTTOM = 96, 292  # of the plots
STYLE = (
    "text{font:13px system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif;fill:#57606a}"
    ".title{font-size:17px;font-weight:600;fill:#1f2328}.panel{font-weight:600;fill:#1f2328}"
    ".grid{stroke:#d0d7de;stroke-width:1}.line{fill:none;stroke-width:2.25;stroke-linejoin:round}"
    ".ours{stroke:#0969da}.dot-ours,.label-ours{fill:#0969da}.line.ours{stroke-width:3.5}"
    ".server{stroke:#bc4c00}.dot-server,.label-server{fill:#bc4c00}"
    ".xllama{stroke:#8250df}.dot-xllama,.label-xllama{fill:#8250df}"
    ".lock{stroke:#6e7781}.dot-lock,.label-lock{fill:#6e7781}"
    ".label{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#9198a1}.title,.panel{fill:#f0f6fc}.grid{stroke:#3d444d}"
    ".ours{stroke:#4493f8}.dot-ours,.label-ours{fill:#4493f8}.server{stroke:#f0883e}"
    ".dot-server,.label-server{fill:#f0883e}.xllama{stroke:#ab7df8}.dot-xllama,.label-xllama{fill:#ab7df8}"
    ".lock{stroke:#9198a1}.dot-lock,.label-lock{fill:#9198a1}}"
)


@dataclass(frozen=True)
class Series:
    """One side of the comparison: its key in the figures, its label and its style."""

    side: str
    label: str
    style: str


@dataclass(frozen=True)
class Panel:
    """One model: the runs to show, the plot's place, and the end and step of its vertical axis in tokens/s."""

    title: str
    runs: tuple[str, ...]
    left: int
    right: int
    most: int
    tick: int


SERIES = (
    Series("llamapipe whole", "llamapipe", "ours"),
    Series("llama-server whole", "llama-server", "server"),
    Series("xllamacpp", "xllamacpp", "xllama"),
    Series("llama-cpp-python", "llama-cpp-python, lock", "lock"),
)
PANELS = (
    Panel("15M weights, Q8_0", ("all-q8_0",), 62, 400, 3000, 1000),
    Panel("0.6B weights, Q4_K_M", ("06b-n1", "06b-n4", "06b-n8"), 610, 780, 90, 30),
)


def main() -> None:
    """The command line."""
    figures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(draw(figures), encoding="utf-8")


def draw(figures: dict[str, Any]) -> str:
    """The chart as an SVG document."""
    cpu = figures["machine"]["cpu"]
    title = "Generated tokens per second, by the number of concurrent requests"
    subtitle = f"64-token prompts, 64 generated tokens, greedy; two cores of an {cpu}; higher is better"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="20" y="30">{escape(title)}</text>',
        f'<text x="20" y="52">{escape(subtitle)}</text>',
    ]
    for panel in PANELS:
        parts += _panel(panel, [work for work in figures["works"] if work["run"] in panel.runs])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, works: list[dict[str, Any]]) -> list[str]:
    middle = (panel.left + panel.right) / 2
    parts = [f'<text class="panel" x="{panel.left}" y="{TOP - 16}">{escape(panel.title)}</text>']
    for value in range(0, panel.most + 1, panel.tick):
        y = _y(panel, value)
        parts.append(
            f'<line class="grid" x1="{panel.left}" y1="{y:.1f}" x2="{panel.right}" y2="{y:.1f}"/>'
            f'<text x="{panel.left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,}</text>'
        )
    counts = [work["n"] for work in works]
    for i, n in enumerate(counts):
        x = _x(panel, i, len(counts))
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{n}</text>')
    parts.append(f'<text x="{middle}" y="{BOTTOM + 44}" text-anchor="middle">concurrent requests</text>')
    ends: list[tuple[float, float, Series]] = []
    for series in SERIES:
        points = [
            (_x(panel, i, len(works)), _y(panel, _median(work["sides"][series.side])))
            for i, work in enumerate(works)
            if series.side in work["sides"]
        ]
        if not points:
            continue
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line {series.style}" points="{line}"/>')
        parts += [f'<circle class="dot-{series.style}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]
        ends.append((*points[-1], series))
    return parts + _labels(ends)


def _labels(ends: list[tuple[float, float, Series]]) -> list[str]:
    """A label at the end of each line, moved down where it would cover the one above it."""
    parts, lowest = [], 0.0
    for x, y, series in sorted(ends, key=lambda end: end[1]):
        below = series.style == "lock"  # its line ends inside the plot: the label goes under the last point
        at = y + 22 if below else max(y + 4, lowest + 17)
        lowest = lowest if below else at
        anchor = "middle" if below else "start"
        parts.append(
            f'<text class="label label-{series.style}" x="{x if below else x + 12:.1f}" y="{at:.1f}" '
            f'text-anchor="{anchor}">{escape(series.label)}</text>'
        )
    return parts


def _x(panel: Panel, i: int, n: int) -> float:
    return panel.left + 16 + (panel.right - panel.left - 32) * i / max(n - 1, 1)


def _y(panel: Panel, value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * value / panel.most


def _median(rounds: list[dict[str, Any]]) -> float:
    return statistics.median(float(r["rate"]) for r in rounds)


if __name__ == "__main__":
    main()

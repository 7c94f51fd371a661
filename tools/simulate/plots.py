"""Draws simulation results: latency over load, routing policies, the cost of tokens.

The SVG files embed no fonts and follow the reader's light or dark theme, as those of ``benchmarks/compare/chart.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Point = tuple[float, float]
_NAMES = ("p50", "p95", "p99")
_WIDTH, _LEFT, _TOP, _HEIGHT, _GAP = 300, 62, 96, 200, 84  # of a panel; its place in the picture
_LIGHT = ("#0969da", "#bc4c00", "#8250df", "#1a7f37", "#6e7781")
_DARK = ("#4493f8", "#f0883e", "#ab7df8", "#3fb950", "#9198a1")


@dataclass
class Panel:
    """One plot; values without a logarithm are left out on a log axis.

    ``lines``: points by label. ``limit``: a value with its label. ``places``: ticks of the x axis.
    """

    title: str
    x_title: str
    places: Sequence[float]
    lines: dict[str, list[Point]] = field(default_factory=dict)
    limit: tuple[float, str] | None = None
    is_log_x: bool = False
    is_log_y: bool = False


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draws the files of ``capacity -o`` and ``policies -o``, and returns the paths of the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, str] = {}
    capacities = [result for result in results if "capacity_per_s" in result]
    policies: dict[str, Result] = {}  # by traffic; results for different numbers of nodes are joined
    for result in results:
        name = result["arguments"]["workload"]
        if result in capacities:
            pictures[f"load-{name}.svg"] = _latencies(result)
        elif name in policies:
            policies[name]["rows"] += result["rows"]
        else:
            policies[name] = {**result, "rows": list(result["rows"])}
    for name, result in policies.items():
        pictures[f"policies-{name}.svg"] = _policies(result)
    priced = [result for result in capacities if result["arguments"]["node_cost"] is not None]
    if priced:
        pictures["cost.svg"] = _costs(priced)
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")
    return [folder / name for name in pictures]


def _latencies(result: Result) -> str:
    """First tokens and gaps at percentiles over the load of a node."""
    arguments, rows, capacity = result["arguments"], result["rows"], result["capacity_per_s"]
    panels = []
    for title, key, factor, limit in (
        ("First token, s", "first_s", 1.0, (arguments["first"], "limit of p95")),
        ("Gap between tokens, ms", "gap_s", 1e3, (1e3 * arguments["gap"], "limit of p99")),
    ):
        panel = Panel(
            title, "load, % of the capacity", (0, 20, 40, 60, 80, 100, 120), limit=limit, is_log_y=True
        )
        for i, name in enumerate(_NAMES):
            panel.lines[name] = [(100 * row["load"], factor * row[key][i]) for row in rows]
        panels.append(panel)
    subtitle = (
        f"{arguments['workload']} traffic; capacity {capacity:.3g} requests a second; {_source(result)}"
    )
    return _draw("Latency of one node over its load", subtitle, panels)


def _policies(result: Result) -> str:
    """The 99th percentiles and the hit rate of each policy over the number of nodes."""
    arguments, rows = result["arguments"], result["rows"]
    counts = sorted({row["nodes"] for row in rows})
    of: tuple[tuple[str, Callable[[Result], float]], ...] = (
        ("First token, p99, s", lambda row: float(row["first_s"][2])),
        ("Gap between tokens, p99, ms", lambda row: 1e3 * float(row["gap_s"][2])),
        ("Prompt tokens found in cells, %", lambda row: 100 * float(row["hit_rate"])),
    )
    panels = []
    for title, value in of:
        panel = Panel(title, "nodes", counts, is_log_x=True, is_log_y=title.startswith("First"))
        for row in sorted(rows, key=lambda row: int(row["nodes"])):
            panel.lines.setdefault(row["policy"], []).append((row["nodes"], value(row)))
        panels.append(panel)
    subtitle = f"{arguments['workload']} traffic, {arguments['per_s']:g} requests a second and node; {_source(result)}"
    return _draw("Routing policies", subtitle, panels)


def _costs(results: Sequence[Result]) -> str:
    """What a million generated tokens cost over the load of a node, up to its capacity."""
    places = (0, 20, 40, 60, 80, 100)
    panel = Panel("Cost of a million generated tokens", "load, % of the capacity", places, is_log_y=True)
    for result in results:
        arguments = result["arguments"]
        panel.lines[arguments["workload"]] = [
            (100 * row["load"], arguments["node_cost"] / (row["tokens_per_s"] * 3600) * 1e6)
            for row in result["rows"]
            if row["load"] <= 1.0 and row["tokens_per_s"] > 0
        ]
    prices = ", ".join(f"{price:g}" for price in sorted({r["arguments"]["node_cost"] for r in results}))
    return _draw(f"Cost, if a node costs {prices} an hour", _source(results[0]), [panel])


def _source(result: Result) -> str:
    fit = result["fit"]
    return f"simulated, {fit['model']}, step times within {100 * fit['held_out_error']:.0f} %"


def _draw(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """A picture of panels side by side, with one legend."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    width = _LEFT + len(panels) * (_WIDTH + _GAP) + 90
    colours = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(_LIGHT))
    dark = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(_DARK))
    style = (
        "text{font:13px system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif;fill:#57606a}"
        ".title{font-size:17px;font-weight:600;fill:#1f2328}.panel{font-weight:600;fill:#1f2328}"
        ".grid{stroke:#d0d7de;stroke-width:1}.limit{stroke:#cf222e;stroke-width:1.5;stroke-dasharray:5 4}"
        ".line{fill:none;stroke:var(--c);stroke-width:2.25;stroke-linejoin:round}.dot,.label{fill:var(--c)}"
        f".label{{font-weight:600}}{colours}@media(prefers-color-scheme:dark){{text{{fill:#9198a1}}"
        f".title,.panel{{fill:#f0f6fc}}.grid{{stroke:#3d444d}}{dark}}}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_TOP + _HEIGHT + 60}" role="img">',
        f"<title>{escape(title)}</title><style>{style}</style>",
        f'<text class="title" x="20" y="30">{escape(title)}</text>',
        f'<text x="20" y="52">{escape(subtitle)}</text>',
    ]
    for i, panel in enumerate(panels):
        parts += _panel(panel, _LEFT + i * (_WIDTH + _GAP), labels)
    x = _LEFT + len(panels) * (_WIDTH + _GAP) - _GAP + 16
    for i, label in enumerate(labels):
        parts.append(f'<text class="label c{i}" x="{x}" y="{_TOP + 12 + 20 * i}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: float, labels: Sequence[str]) -> list[str]:
    lines = {
        label: [(x, y) for x, y in line if math.isfinite(y) and (y > 0 or not panel.is_log_y)]
        for label, line in panel.lines.items()
    }
    values = [y for line in lines.values() for _, y in line] + ([panel.limit[0]] if panel.limit else [])
    ticks = _log_ticks(values or [1.0]) if panel.is_log_y else _ticks(max(values, default=1.0))
    low, high = _axis(ticks[0], panel.is_log_y), _axis(ticks[-1], panel.is_log_y)
    begin, end = (_axis(x, panel.is_log_x) for x in (panel.places[0], panel.places[-1]))

    def at(x: float, y: float) -> Point:
        across = (_axis(x, panel.is_log_x) - begin) / ((end - begin) or 1)
        up = (_axis(y, panel.is_log_y) - low) / ((high - low) or 1)
        return left + 8 + (_WIDTH - 16) * across, _TOP + _HEIGHT * (1 - up)

    parts = [f'<text class="panel" x="{left}" y="{_TOP - 16}">{escape(panel.title)}</text>']
    for tick in ticks:
        y = at(panel.places[0], tick)[1]
        parts.append(
            f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}"/>'
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.10g}</text>'
        )
    bottom = _TOP + _HEIGHT
    for place in panel.places:
        x = at(place, ticks[0])[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{place:,g}</text>')
    parts.append(
        f'<text x="{left + _WIDTH / 2}" y="{bottom + 42}" text-anchor="middle">{escape(panel.x_title)}</text>'
    )
    if panel.limit is not None:
        y = at(panel.places[0], panel.limit[0])[1]
        above = -6 if y > _TOP + 20 else 16  # not over the panel's title
        parts.append(
            f'<line class="limit" x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}"/>'
            f'<text x="{left + 8}" y="{y + above:.1f}">{escape(panel.limit[1])}</text>'
        )
    for label, line in lines.items():
        places = [at(*point) for point in line]
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour = f"c{labels.index(label)}"
        parts.append(f'<polyline class="line {colour}" points="{where}"/>')
        parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    return parts


def _axis(value: float, is_log: bool) -> float:
    return math.log(max(value, 1e-9)) if is_log else value


def _ticks(most: float) -> list[float]:
    """From 0 to at least ``most``, in four to eight equal steps of 1, 2 or 5 times a power of ten."""
    most = most or 1.0
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(k * power for k in (1, 2, 5, 10) if most / (k * power) <= 8)
    return [round(i * step, 10) for i in range(math.ceil(most / step - 1e-9) + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    """From below the least value to above the greatest: 1, 2 and 5 times powers of ten, or these alone if it is far."""
    low, high = min(values), max(values)
    powers = [10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    fine = [k * power for power in powers for k in (1, 2, 5)]
    begin = max(i for i, tick in enumerate(fine) if tick <= low * (1 + 1e-9))
    end = next(i for i, tick in enumerate(fine) if tick >= high * (1 - 1e-9))
    return fine[begin : max(end, begin + 1) + 1] if end - begin < 8 else powers

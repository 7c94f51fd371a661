"""Pictures of a comparison's figures: throughput and first tokens by concurrency, and a step's time by stage.

python benchmarks/compare/plots.py FIGURES.json FOLDER       # needs matplotlib
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

Figure = dict[str, Any]
STAGES = ("compute_s", "plan_s", "sample_s", "deliver_s")


def main() -> None:
    """The command line."""
    figures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "llamapipe"  # the same picture of the same figures
    mpl.rcParams["svg.fonttype"] = "none"
    for model in dict.fromkeys(work["model"] for work in figures["works"]):
        works = [work for work in figures["works"] if work["model"] == model]
        stem = Path(model).stem
        lines(
            works, rate, f"{stem}: generated tokens per second, prompts included", folder / f"{stem}-rate.svg"
        )
        lines(works, first_ms, f"{stem}: first token, median, ms", folder / f"{stem}-first.svg")
        stages(works, f"{stem}: microseconds of a step", folder / f"{stem}-step.svg")


def rate(rounds: list[Figure]) -> float | None:
    """Median over rounds."""
    return statistics.median(float(r["rate"]) for r in rounds)


def first_ms(rounds: list[Figure]) -> float | None:
    """Median over all requests; None where it is not known."""
    times: list[float] = [t for r in rounds for t in r.get("first_s", [])]
    return statistics.median(times) * 1e3 if times else None


def lines(works: list[Figure], of: Callable[[list[Figure]], float | None], title: str, path: Path) -> None:
    """A line for each side."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for side in dict.fromkeys(side for work in works for side in work["sides"]):
        points = [(work["n"], of(work["sides"][side])) for work in works if side in work["sides"]]
        known = [(n, value) for n, value in points if value is not None]
        if known:
            ours = side.startswith("llamapipe")
            axes.plot(*zip(*known, strict=True), marker="o", label=side, linewidth=2 if ours else 1,
                      linestyle="-" if ours else "--")  # fmt: skip
    axes.set(title=title, xlabel="requests at once", xscale="log", ylim=(0, None))
    axes.set_xticks([work["n"] for work in works], [str(work["n"]) for work in works])
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def stages(works: list[Figure], title: str, path: Path) -> None:
    """A bar for each concurrency: what a step of whole completions is made of."""
    bars = [
        (work["n"], work["sides"]["llamapipe whole"]) for work in works if "llamapipe whole" in work["sides"]
    ]
    figure, axes = plt.subplots(figsize=(8, 5))
    bottom = [0.0] * len(bars)
    for stage in STAGES:
        heights = [
            statistics.median(r["more"][stage] / r["more"]["steps"] * 1e6 for r in rounds)
            for _, rounds in bars
        ]
        axes.bar([str(n) for n, _ in bars], heights, bottom=bottom, label=stage.removesuffix("_s"))
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(title=title, xlabel="requests at once")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()

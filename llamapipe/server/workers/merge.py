"""Metrics of several workers as those of one server."""

from __future__ import annotations

from collections.abc import Iterable

# A family is (name, help text, type, samples), a sample is (name, labels, value): what JSON can carry.
Sample = tuple[str, dict[str, str], float]
Family = tuple[str, str, str, list[Sample]]
_RATIOS = {"vllm:kv_cache_usage_perc"}


def merged(live: Iterable[list[Family]], ended: Iterable[list[Family]] = ()) -> list[Family]:
    """One family for each name: counters, histograms and gauges are added up, ratios averaged.

    ``ended``: the last metrics of workers that are no more. Their counters still count, so that no counter of the
    server falls; their gauges do not.
    """
    texts: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    for families, is_live in [*((one, True) for one in live), *((one, False) for one in ended)]:
        for name, text, kind, samples in families:
            if kind == "gauge" and not is_live:
                continue
            texts.setdefault(name, (text, kind))
            found = values.setdefault(name, {})
            for sample, labels, value in samples:
                found.setdefault((sample, tuple(sorted(labels.items()))), []).append(value)
    return [
        (
            name,
            text,
            kind,
            [
                (sample, dict(labels), _joined(sample, all_))
                for (sample, labels), all_ in values[name].items()
            ],
        )
        for name, (text, kind) in texts.items()
    ]


def _joined(name: str, values: list[float]) -> float:
    if name in _RATIOS:
        return sum(values) / len(values)
    if name.endswith("_created"):  # the time since which a counter counts
        return min(values)
    return sum(values)

"""Adds up the reports of several processes: metrics, and where the time of requests went. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llamapipe.server.metrics import Family

_RATIOS = {"vllm:kv_cache_usage_perc"}


class Totals:
    """The counts of all of a server's processes. Ended processes are included, so that no counter falls.

    ``n_requests``: the maximum number of entries that ``requests_with`` returns.
    """

    def __init__(self, n_requests: int) -> None:
        self._n_requests = n_requests
        self._ended: list[Family] = []
        self._requests: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        return f"<Totals of {len(self._ended)} metrics>"

    def keep(self, families: Sequence[Family], requests: Sequence[dict[str, Any]]) -> None:
        """Add the last report of a process that has ended: its requests, and its metrics except gauges."""
        self._ended = add_families([], [self._ended, families])
        self._requests = self.requests_with([requests])

    def with_live(self, live: Iterable[Sequence[Family]]) -> list[Family]:
        """Return the metrics of all processes. ``live``: the metrics of each running process."""
        return add_families(live, [self._ended])

    def requests_with(self, live: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the entries of ``GET /requests``, the newest first. ``live``: the entries of each running process."""
        entries = [entry for entries in (self._requests, *live) for entry in entries]
        return sorted(entries, key=lambda entry: -entry["ended_at"])[: self._n_requests]


def add_families(live: Iterable[Sequence[Family]], ended: Iterable[Sequence[Family]] = ()) -> list[Family]:
    """Merge families, one for each name.

    Counters, histograms and gauges are added up, and ratios are averaged. Gauges in ``ended`` are left out.
    """
    texts: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    counted = [family for families in live for family in families]
    counted += [family for families in ended for family in families if family.kind != "gauge"]
    for family in counted:
        texts.setdefault(family.name, (family.text, family.kind))
        samples = values.setdefault(family.name, {})
        for sample, labels, value in family.samples:
            samples.setdefault((sample, tuple(sorted(labels.items()))), []).append(value)
    return [
        Family(
            name,
            text,
            kind,
            [
                (sample, dict(labels), _join(sample, numbers))
                for (sample, labels), numbers in values[name].items()
            ],
        )
        for name, (text, kind) in texts.items()
    ]


def with_labels(families: Iterable[Family], **labels: str) -> list[Family]:
    """Return the families with these labels on each sample."""
    return [
        family._replace(samples=[(sample, {**own, **labels}, value) for sample, own, value in family.samples])
        for family in families
    ]


def _join(name: str, values: list[float]) -> float:
    if name in _RATIOS:
        return sum(values) / len(values)
    if name.endswith("_created"):  # when a counter began to count
        return min(values)
    return sum(values)

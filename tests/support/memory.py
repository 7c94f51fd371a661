"""Prefix caches for tests of the scheduler."""

from __future__ import annotations

from typing import Any

from llamapipe._engine.policy.kv import KvCache


def cache_of(n_slots: int, enabled: bool = False, **options: Any) -> KvCache:
    """A cache without host memory, whose saved cells take a byte each; by default it keeps no cells at all."""
    return KvCache(n_slots, enabled, cell_bytes=1, **options)

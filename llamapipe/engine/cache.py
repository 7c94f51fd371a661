"""The prefix cache of an engine: its options, and what the context's memory allows."""

from __future__ import annotations

from llamapipe.engine.scheduler.kv_cache import KvCache
from llamapipe.host.memory import free_memory
from llamapipe.llama.context import Context

MIN_PREFIX = 16  # tokens; sharing fewer gains nothing
_MAX_PARKED_UNIFIED = 512  # cells; every step of a unified cache reads parked cells, too
_META_BYTES = 16  # of a saved cell: position and sequence
_DEFAULT_BYTES = 512 * 2**20  # where the free memory is not known


def cache_of(context: Context, enabled: bool, n_bytes: int | None, kv_bytes: int) -> KvCache:
    """The cache of a context. ``n_bytes``: of host memory, by default a tenth of what is free; 0: none.

    ``kv_bytes``: what the context's cells take, 0 if that is not known.
    """
    model = context.model
    if n_bytes is None:
        free = free_memory()
        n_bytes = _DEFAULT_BYTES if free is None else free // 10
    return KvCache(
        context.n_seq_max,
        enabled,
        whole_only=model.is_recurrent or model.n_swa > 0,
        host_bytes=n_bytes if enabled else 0,
        cell_bytes=kv_bytes / context.n_cells + _META_BYTES,
        max_parked=_MAX_PARKED_UNIFIED if context.kv_unified else None,
        min_prefix=MIN_PREFIX,
    )

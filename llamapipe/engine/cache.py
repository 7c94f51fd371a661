"""The prefix cache of an engine: its limits, and the sharing that the context supports."""

from __future__ import annotations

from llamapipe.engine.scheduler.kv_cache import KvCache
from llamapipe.host.memory import free_memory
from llamapipe.llama.context import Context

MIN_PREFIX = 16  # tokens; sharing fewer gains nothing
_MAX_PARKED_UNIFIED = 512  # cells; with unified KV every step also reads parked cells
_META_BYTES = 16  # position and sequence of a saved cell
_DEFAULT_BYTES = 512 * 2**20  # if the free memory is not known


def cache_of(context: Context, enabled: bool, n_bytes: int | None, kv_bytes: int) -> KvCache:
    """The cache of a context. ``n_bytes``: limit of host memory; None: a tenth of the free memory.

    ``kv_bytes``: size of the context's cells, 0 if it is not known.
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

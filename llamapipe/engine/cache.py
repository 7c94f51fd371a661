"""The prefix cache of an engine: its limits, and the sharing that the context supports."""

from __future__ import annotations

from llamapipe._engine.kv import KvCache, TreeObserver
from llamapipe.host.memory import free_memory
from llamapipe.llama.context import Context

MIN_PREFIX = 16  # tokens; sharing fewer gains nothing
_MAX_PARKED_UNIFIED = 512  # cells; with unified KV every step also reads parked cells
_META_BYTES = 16  # position and sequence of a saved cell
_DEFAULT_BYTES = 512 * 2**20  # if the free memory is not known


def cache_of(
    context: Context,
    mode: bool | str,
    n_bytes: int | None,
    kv_bytes: int,
    observer: TreeObserver | None = None,
) -> KvCache:
    """The cache of a context. ``mode``: True, ``"exact"`` or False.

    ``n_bytes``: limit of host memory; None: a tenth of the free memory. ``kv_bytes``: size of the context's cells, 0 if
    it is not known. ``observer``: see KvCache. Raises ValueError for options that do not go together.
    """
    if mode == "exact" and context.n_batch % context.n_ubatch:
        raise ValueError(
            f"n_batch is {context.n_batch} and n_ubatch {context.n_ubatch}; prefix_cache='exact' needs an n_batch that "
            "is a multiple of n_ubatch"
        )
    if mode == "exact" and context.kv_unified:
        raise ValueError(
            "prefix_cache='exact' needs a KV cache for each request, because rounding depends on where cells are: "
            "leave n_cells and kv_unified out"
        )
    model = context.model
    if n_bytes is None:
        free = free_memory()
        n_bytes = _DEFAULT_BYTES if free is None else free // 10
    return KvCache(
        context.n_seq_max,
        bool(mode),
        whole_only=model.is_recurrent or model.n_swa > 0,
        host_bytes=n_bytes if mode else 0,
        cell_bytes=kv_bytes / context.n_cells + _META_BYTES,
        max_parked=_MAX_PARKED_UNIFIED if context.kv_unified else None,
        min_prefix=MIN_PREFIX,
        exact_multiple=context.n_ubatch if mode == "exact" else None,
        observer=observer,
    )

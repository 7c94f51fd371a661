"""What happens to a request that has filled its context: it ends, or drops old tokens and goes on. Pure policy."""

from __future__ import annotations

from llamapipe.engine.scheduler.kv_cache import KvCache
from llamapipe.engine.scheduler.request import Request

MODES = ("stop", "recompute", "shift")


class Overflow:
    """One rule for all requests of a context.

    ``mode``: ``"stop"``: it ends. ``"recompute"``: it keeps its first ``n_keep`` tokens and the newer half of the
    others, which are computed again. ``"shift"``: the same, but the cells of the newer half are moved to their new
    positions. They were computed with the dropped tokens before them, so the result is another one, and no other
    request may use them.
    """

    def __init__(self, mode: str = "stop", n_keep: int = 0) -> None:
        self._mode = mode
        self._n_keep = n_keep

    def __repr__(self) -> str:
        return f"<Overflow {self._mode} n_keep={self._n_keep}>"

    def drop(self, request: Request, cache: KvCache) -> bool:
        """Drops old tokens of a full request, which is then no longer in order among those that run. False: it ends."""
        if self._mode == "stop":
            return False
        tokens, n_keep = request.tokens, self._n_keep
        end = n_keep + (len(tokens) - n_keep) // 2
        request.n_kept = n_keep
        request.dropped += tokens[n_keep:end]
        del tokens[n_keep:end]
        if self._mode == "shift" and request.cells is not None:
            cache.shift(request, n_keep, end)
        else:
            cache.truncate(request, n_keep)
        return True

"""Decides how a request that has filled its context continues.

Open this file to change which tokens are dropped.

The principle: one rule for all requests of an engine. It ends a request, or drops tokens in the middle and keeps the
first ones, such as a system prompt, and the newest ones. Pure policy.
"""

from __future__ import annotations

from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.kv import KvCache


class Overflow:
    """The rule for requests that have filled the context, the same for all of them.

    ``mode``: with ``"stop"`` the request ends. With ``"recompute"`` it keeps its first ``n_keep`` tokens and the newer
    half of the others, which are computed again. ``"shift"`` does the same, but moves the cells of the newer half to
    their new positions. These cells were computed with the dropped tokens before them, so the result differs, and no
    other request may use them.
    """

    def __init__(self, mode: str = "stop", n_keep: int = 0) -> None:
        self._mode = mode
        self._n_keep = n_keep

    def __repr__(self) -> str:
        return f"<Overflow {self._mode} n_keep={self._n_keep}>"

    def drop(self, request: Request, cache: KvCache) -> bool:
        """Drop old tokens of a full request.

        The request must then be sorted again among those that run. Returns False if it ends.
        """
        if self._mode == "stop":
            return False
        n_keep = self._n_keep
        n_keep, end = request.drop_between(n_keep, n_keep + (len(request.tokens) - n_keep) // 2)
        if self._mode == "shift" and request.cells is not None:
            cache.shift(request, n_keep, end)
        else:
            cache.truncate(request, n_keep)
        return True

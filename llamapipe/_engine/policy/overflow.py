"""Decides how a request that has filled its context continues.

Open this file to change which tokens are dropped.

The principle: all requests of an engine have the same rule. The rule ends a request, or drops tokens in the middle and
keeps the first tokens, such as a system prompt, and the newest ones. Pure policy.
"""

from __future__ import annotations

from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.kv import KvCache


class Overflow:
    """The rule for requests that have filled the context.

    ``mode``: ``"stop"`` ends the request. ``"recompute"`` keeps its first ``n_keep`` tokens and the newer half of the
    others; the newer half is computed again. ``"shift"`` keeps the same tokens, but moves the cells of the newer half
    to their new positions. These cells were computed with the dropped tokens before them, so the result differs, and
    no other request may use the cells.
    """

    def __init__(self, mode: str = "stop", n_keep: int = 0) -> None:
        self._mode = mode
        self._n_keep = n_keep

    def __repr__(self) -> str:
        return f"<Overflow {self._mode} n_keep={self._n_keep}>"

    def drop(self, request: Request, cache: KvCache) -> bool:
        """Drop old tokens of a full request.

        The caller must then put the request into the right list of ``Running``. Returns False if the request must end.
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

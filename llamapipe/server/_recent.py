"""Keeps the times of the last requests, without their texts, for ``GET /requests``."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from llamapipe.server._client_request import ClientRequest

_MOST_OF_PATH = 200  # characters; so that an entry has about a kilobyte at most


class Recent:
    """The last requests that used a model. Use it on the event loop's thread.

    ``n``: how many are kept, 0 for none. ``model``: the name of the model that computes them, if there is only one.
    """

    def __init__(self, n: int) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=n)
        self.model: str | None = None

    def __repr__(self) -> str:
        return f"<Recent {len(self._kept)} of {self._kept.maxlen}>"

    def add(self, request: ClientRequest, seconds: float) -> None:
        """Note an answered request.

        Requests that ask the engine for nothing are left out, unless they were refused.
        """
        times, status = request.times, request.status
        is_refused = request.method == "POST" and status >= 400 and status not in (401, 403, 404, 405)
        if not (times.was_computed or is_refused) or request.is_forwarded:
            return
        entry: dict[str, Any] = {
            "id": request.id,
            "path": request.path[:_MOST_OF_PATH],
            "status": status,
            "ended_at": round(time.time(), 3),
            "total_ms": round(seconds * 1e3, 3),
            "n_others": request.n_others,
            "n_prompt_tokens": request.n_prompt_tokens,
            "n_completion_tokens": request.n_completion_tokens,
            "n_cached_tokens": times.n_cached,
        }
        if self.model is not None:
            entry["model"] = self.model
        if times.was_computed:
            phases = times.phases_ms()
            entry |= {
                "n_drafted_tokens": times.n_drafted,
                "n_accepted_tokens": times.n_accepted,
                "n_steps": max((request.n_completion_tokens or 0) - times.n_accepted, 0),
                "phases_ms": phases,
                "slowest": max(phases, key=lambda name: phases[name]),
            }
        self._kept.append(entry)

    def entries(self) -> list[dict[str, Any]]:
        """Return the kept requests, the newest first."""
        return list(reversed(self._kept))

"""The data of a request for limits, log and metrics, and the most recent requests, for ``GET /requests``."""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llamapipe.server._inside import INSIDE, Inside
from llamapipe.server._times import RequestTimes
from llamapipe.server.errors import Dialect, dialect_of

_MOST_OF_PATH = 200  # characters; limits an entry to about a kilobyte
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientRequest(Request):
    """A client's request, and the server's measurements of it.

    ``id``: from the header ``x-request-id``, or random. ``path``: the request's path inside this application.
    ``route``: the path of its route, a label of the metrics. ``dialect``: the format of errors. ``key``: the digest of
    its API key; None if no key is needed. ``status``: the status of the answer; 0 until its first byte is sent.
    ``n_prompt_tokens``, ``n_completion_tokens``: None if unknown. ``times``: where its time went. ``n_others``: the
    number of requests being served when it arrived. ``intervals_s``: seconds between the tokens of a stream.
    ``is_forwarded``: whether a model's process has answered and logged it. ``inside``: the client for whom the server
    made the request itself; None if a client made it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        request_id = self.headers.get("x-request-id", "")
        self.id = request_id if _SAFE_ID.fullmatch(request_id) else uuid.uuid4().hex
        self.path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        self.dialect: Dialect = dialect_of(self.path, self.headers)
        self.route = "other"
        self.key: bytes | None = None
        self.inside: Inside | None = scope.get(INSIDE)
        self.times = RequestTimes()
        self.n_others = 0
        self.is_forwarded = False
        self.status = 0
        self.n_prompt_tokens: int | None = 0
        self.n_completion_tokens: int | None = 0
        self.intervals_s: list[float] = []


class Recent:
    """The most recent requests that used a model. Use it on the event loop's thread.

    ``n``: how many are kept, 0 for none. ``model``: the name of the model that computes them, if there is only one.
    """

    def __init__(self, n: int) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=n)
        self.model: str | None = None

    def __repr__(self) -> str:
        return f"<Recent {len(self._kept)} of {self._kept.maxlen}>"

    def add(self, request: ClientRequest, owner: str, seconds: float) -> None:
        """Add an answered request. ``owner``: see ``Gate.owner_of``. ``seconds``: how long the request took.

        Requests that the engine did not compute are left out, unless they were refused.
        """
        times, status = request.times, request.status
        is_refused = request.method == "POST" and status >= 400 and status not in (401, 403, 404, 405)
        if not (times.was_computed or is_refused) or request.is_forwarded:
            return
        entry: dict[str, Any] = {
            "owner": owner,
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
        """Return the kept requests, the newest first, with their owners; see ``Gate.own_requests``."""
        return list(reversed(self._kept))

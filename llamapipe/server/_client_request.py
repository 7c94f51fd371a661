"""A request as the limits, the log and the metrics see it."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llamapipe.server._inside import INSIDE, Inside
from llamapipe.server._times import RequestTimes
from llamapipe.server.errors import Dialect, dialect_of

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientRequest(Request):
    """A client's request, and what the server measures about it.

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

"""A budget that limits the memory of all request bodies, from their first byte to their answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from llamapipe.server.errors import ApiError

_FREE_BYTES = 64 * 2**10  # of each body do not count, so ordinary requests pass even if the budget is used up


class BodyBudget:
    """Limits the bytes of all bodies, beyond the first 64 KiB of each. Use it on the event loop's thread.

    A body counts from its first byte until its request has an answer, because the decoded data is kept that long. When
    there are too many bytes, the largest body of the client with the most bytes is refused. So a client with many large
    bodies, which it never completes or which need long answers, does not keep others out.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._n_bytes = 0
        self._of: Counter[str] = Counter()  # bytes by client
        self._held: dict[Held, None] = {}

    def __repr__(self) -> str:
        return f"<BodyBudget {self._n_bytes} of {self._most_bytes} bytes>"

    def hold(self, client: str, refuse: Callable[[], object]) -> Held:
        """Begin to count a body. ``refuse``: called at most once, if the body must be dropped to make room."""
        return Held(self, client, refuse)

    def _change(self, held: Held, n_bytes: int) -> None:
        self._n_bytes += n_bytes - held.n_bytes
        self._of[held.client] += n_bytes - held.n_bytes
        held.n_bytes = n_bytes
        if n_bytes:
            self._held[held] = None
        else:
            self._held.pop(held, None)
            if not self._of[held.client]:
                del self._of[held.client]

    def _make_room(self) -> None:
        while self._n_bytes > self._most_bytes:
            ((client, _),) = self._of.most_common(1)
            largest = max(
                (body for body in self._held if body.client == client), key=lambda body: body.n_bytes
            )
            largest.release()
            largest.refused = True
            largest.refuse()

    def error(self) -> ApiError:
        """Return the error for a refused body."""
        return ApiError(
            503,
            f"the bodies of requests without an answer have more than {self._most_bytes} bytes together, which is the "
            "limit of this server (--max-bodies-bytes); try again later",
            code="too_many_bytes",
        )


class Held:
    """The share of the budget that one body uses.

    ``refuse``: ends the body's request to make room. ``refused``: whether ``refuse`` was called.
    """

    def __init__(self, budget: BodyBudget, client: str, refuse: Callable[[], object]) -> None:
        self.client = client
        self.refuse = refuse
        self.refused = False
        self.n_bytes = 0
        self._budget = budget

    def __repr__(self) -> str:
        return f"<Held {self.n_bytes} bytes of {self.client}>"

    def grow(self, n_bytes: int) -> None:
        """Set the number of bytes of the body. As a result, this body or another may be refused."""
        if n_bytes > _FREE_BYTES:
            self._budget._change(self, n_bytes - _FREE_BYTES)
            self._budget._make_room()

    def add(self, n_bytes: int) -> None:
        """Add bytes to the body. As a result, this body or another may be refused."""
        self._budget._change(self, self.n_bytes + n_bytes)
        self._budget._make_room()

    def release(self) -> None:
        """Release the bytes, which are no longer needed. A second call does nothing."""
        self._budget._change(self, 0)

"""Requests with the same prompt: the leader computes it, the waiters copy it.

Every operation here takes constant time, whatever the number of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamapipe.engine.scheduler.request import Request, State


class PromptGroup:
    """The requests of one prompt: a leader, and waiters that have no slot until the prompt is in KV cells.

    All members get their first tokens from the prompt's one row. When the prompt is in KV cells, waiters are released:
    they are admitted with a copy of the cells, or take over the slot of a member that ends.

    ``waiting``: the waiters, in the order of arrival.
    """

    def __init__(self, members: Sequence[Request]) -> None:
        self.waiting: dict[Request, None] = {}
        self.n_prompt = members[0].n_prompt
        self._n_leaders = 0  # members that arrived, do not wait and are not finished
        self._placed: dict[Request, None] = {}  # members in a slot
        self._released: dict[Request, None] = {}  # former waiters that have no slot yet
        for request in members:
            request.prompt_group = self

    def arrive(self, request: Request) -> bool:
        """Adds an arriving member. False if it has to wait for the leader."""
        if self._n_leaders and self.source() is None:
            self.waiting[request] = None
            return False
        self._n_leaders += 1
        return True

    def wait(self, request: Request) -> None:
        """Makes a member wait that was a leader or released."""
        self._n_leaders -= 1
        self._released.pop(request, None)
        self.waiting[request] = None

    def place(self, request: Request) -> None:
        """A member got a slot."""
        self._released.pop(request, None)
        self._placed[request] = None

    def take_successor(self) -> Request | None:
        """A member without a slot, to take over a finished member's. It waits no longer. None if there is none."""
        successor = next(iter(self._released), None) or next(iter(self.waiting), None)
        if successor in self.waiting:
            del self.waiting[successor]
            self._n_leaders += 1
        return successor

    def leave(self, request: Request) -> None:
        """A member lost its slot, stopped waiting, or is finished."""
        self._placed.pop(request, None)
        self._released.pop(request, None)
        if request in self.waiting:
            del self.waiting[request]
            self._n_leaders += 1  # until it is finished
        if request.state is State.FINISHED:
            self._n_leaders -= 1

    def source(self) -> Request | None:
        """A member whose KV cells hold the prompt. None if there is none."""
        for request in self._placed:
            if request.n_past >= self.n_prompt:
                return request
        return None

    def is_computing(self) -> bool:
        """Whether a member is computing the prompt."""
        return bool(self._placed) and self.source() is None

    def release_waiters(self) -> list[Request]:
        """Releases waiters: all of them if the prompt is computed, else one if there is no leader."""
        if self.source() is not None:
            ready = list(self.waiting)
        elif self.waiting and self._n_leaders == 0:
            ready = [next(iter(self.waiting))]
        else:
            return []
        for request in ready:
            del self.waiting[request]
            self._released[request] = None
        self._n_leaders += len(ready)
        return ready

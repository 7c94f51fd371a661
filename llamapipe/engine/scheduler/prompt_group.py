"""Requests with the same prompt, which is computed by one of them and copied for the others."""

from __future__ import annotations

from collections.abc import Sequence

from llamapipe.engine.scheduler.request import Request, State


class PromptGroup:
    """The requests of one prompt: one of them leads, the others wait for it.

    They get their first tokens from the prompt's row. Once the prompt is in cells, they come in with a copy of those,
    and who ends leaves its cells to one that has none. Everything here takes a time that does not depend on how many
    they are.
    """

    def __init__(self, members: Sequence[Request]) -> None:
        self.waiting: dict[Request, None] = {}
        self.n_prompt = members[0].n_prompt
        self._n_leaders = 0  # that arrived, are not finished and do not wait
        self._placed: dict[Request, None] = {}  # those in a slot
        self._released: dict[Request, None] = {}  # those that waited, need not any more and have no slot yet
        for request in members:
            request.prompt_group = self

    def arrive(self, request: Request) -> bool:
        """A member is new: whether it need not wait, because it leads or the prompt is there."""
        if self._n_leaders and self.source() is None:
            self.waiting[request] = None
            return False
        self._n_leaders += 1
        return True

    def wait(self, request: Request) -> None:
        """One that need not wait does so after all."""
        self._n_leaders -= 1
        self._released.pop(request, None)
        self.waiting[request] = None

    def place(self, request: Request) -> None:
        """A member got a slot."""
        self._released.pop(request, None)
        self._placed[request] = None

    def take_successor(self) -> Request | None:
        """One that has no slot, to take over the cells of one that is finished; it does not wait any more."""
        successor = next(iter(self._released), None) or next(iter(self.waiting), None)
        if successor in self.waiting:
            del self.waiting[successor]
            self._n_leaders += 1
        return successor

    def leave(self, request: Request) -> None:
        """A member lost its slot, or its place among those who wait; or it is finished."""
        self._placed.pop(request, None)
        self._released.pop(request, None)
        if request in self.waiting:
            del self.waiting[request]
            self._n_leaders += 1  # until it is finished
        if request.state is State.FINISHED:
            self._n_leaders -= 1

    def source(self) -> Request | None:
        """A member whose cells hold the prompt."""
        for request in self._placed:
            if request.n_past >= self.n_prompt:
                return request
        return None

    def is_computing(self) -> bool:
        """Whether a member is about to have the prompt in cells, and none has."""
        return bool(self._placed) and self.source() is None

    def release_waiters(self) -> list[Request]:
        """Those who need not wait any more: all once the prompt is computed, else one if nobody leads."""
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

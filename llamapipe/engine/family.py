"""Requests with the same prompt, which is computed by one of them and copied for the others."""

from __future__ import annotations

from collections.abc import Sequence

from llamapipe.engine.request import Request, State


class Family:
    """The requests of one prompt: the first of them that is not finished leads, the others wait for it.

    They get their first tokens from the prompt's row. Once the prompt is in cells, they come in with a copy of those.
    """

    def __init__(self, members: Sequence[Request]) -> None:
        self.members = list(members)
        self.waiting: list[Request] = []
        self.n_prompt = members[0].n_prompt
        for request in members:
            request.family = self

    def source(self) -> Request | None:
        """A member whose cells hold the prompt."""
        for request in self.members:
            if request.slot >= 0 and request.n_past >= self.n_prompt:
                return request
        return None

    def leads(self, request: Request) -> bool:
        """Whether this one computes the prompt: no other that came before it is about to."""
        for member in self.members:
            if member is request:
                return True
            if member.state is not State.FINISHED and member not in self.waiting:
                return False
        return True

    def is_computing(self, request: Request) -> bool:
        """Whether another one is about to have the prompt in cells, and none has."""
        return self.source() is None and any(
            member.slot >= 0 and member is not request for member in self.members
        )

    def leave(self, request: Request) -> None:
        """A member is finished."""
        self.members.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def take_ready(self) -> list[Request]:
        """Those who need not wait any more: all once the prompt is computed, else one if nobody leads."""
        if self.source() is not None:
            ready, self.waiting = self.waiting, []
            return ready
        if self.waiting and all(m in self.waiting for m in self.members):
            return [self.waiting.pop(0)]
        return []

"""A gate that takes whatever is guessed, cut at random: times must not decide what a test computes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.speculation import Gate, Guess, alternatives


class EagerGate(Gate):
    """Put it in the place of ``llamapipe._engine.assembly.Gate``."""

    rng = random.Random(1)

    @property
    def considers_drafts(self) -> bool:
        """Whether there is a drafter: what drafts have cost does not matter."""
        return self.drafter is not None

    def choose(self, n_decoding: int, guesses: Sequence[Guess], n_room: int) -> dict[Request, Sequence[int]]:
        """Up to eight tokens of each guess."""
        chosen: dict[Request, Sequence[int]] = {}
        drafts: dict[Request, int] = {}
        n_left = min(self.n_most, n_room)
        for guess in alternatives(guesses)[-1]:
            n = min(self.rng.randrange(1, 9), len(guess.tokens), n_left)
            n_left -= n
            if n and guess.is_draft:
                drafts[guess.request] = n
            elif n:
                chosen[guess.request] = guess.tokens[:n]
        if drafts and self.drafter is not None:
            drafted = self.drafter.draft(drafts)
            assert all(0 < len(tokens) <= drafts[request] for request, tokens in drafted.items())
            chosen.update(drafted)
        self.drafted = {request.slot for request in drafts}
        return chosen

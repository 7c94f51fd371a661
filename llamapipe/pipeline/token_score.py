"""What a row of logits says of one token."""

from __future__ import annotations

from typing import NamedTuple


class TokenScore(NamedTuple):
    """What a row says of a token: its log-probability, whether it is the most probable, and those that are."""

    logprob: float
    is_greedy: bool
    top: list[tuple[int, float]]

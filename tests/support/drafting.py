"""What the tests of a model's own drafts share: prompts, parameters, and what was drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import llamapipe as lp
from llamapipe._engine.policy.core import Request
from llamapipe._engine.runtime.draft import Eagle3Draft, MtpLayer

Drafts = list[tuple[tuple[int, ...], tuple[int, ...]]]
# Tokens of the made models' vocabulary that are neither special nor end a text.
RANDOM: dict[str, Any] = {"temperature": 4.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPTS = [[40 + i, 90, 60 + 3 * i, *range(50, 54 + 2 * i)] for i in range(7)]


def params(max_tokens: int = 40, **options: Any) -> lp.SamplingParams:
    """Greedy, with drafts."""
    given: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "speculate": "draft",
    }
    return lp.SamplingParams(**given | options)


def watch(monkeypatch: pytest.MonkeyPatch, kind: type[Eagle3Draft] | type[MtpLayer]) -> Drafts:
    """A list that gets the tokens of each request that something is drafted for, and the draft."""
    seen: Drafts = []
    draft = kind.draft

    def watched(self: Any, chosen: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        made = draft(self, chosen)
        for request in chosen:  # cells of drafted tokens come from drafted states
            assert self._context.seq_pos_max(request.slot) < len(request.tokens)
        seen.extend((tuple(request.tokens), tuple(tokens)) for request, tokens in made.items())
        return made

    monkeypatch.setattr(kind, "draft", watched)
    return seen

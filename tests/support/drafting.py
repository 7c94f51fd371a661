"""What the tests of a model's own drafts share: prompts, parameters, and what was drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import llamapipe as lp
from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.speculation import Worth
from llamapipe._engine.runtime.draft import DraftModel

Drafts = list[tuple[tuple[int, ...], tuple[int, ...]]]
# Tokens of the made models' vocabulary that are neither special nor end a text.
RANDOM: dict[str, Any] = {"temperature": 4.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPTS = [[40 + i, 90, 60 + 3 * i, *range(50, 54 + 2 * i)] for i in range(7)]


def params(max_tokens: int = 40, **options: Any) -> lp.SamplingParams:
    """Greedy, with drafts."""
    defaults: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "speculate": "draft",
    }
    return lp.SamplingParams(**defaults | options)


def watch(monkeypatch: pytest.MonkeyPatch, kind: type[DraftModel]) -> Drafts:
    """A list that gets the tokens of each request that something is drafted for, and the draft."""
    seen: Drafts = []
    draft = kind.draft

    def watched(self: Any, chosen: Mapping[Request, int], *worth: Worth) -> dict[Request, Sequence[int]]:
        drafted = draft(self, chosen, *worth)
        for request in chosen:  # cells of drafted tokens come from drafted states
            assert self._context.seq_pos_max(request.slot) < len(request.tokens)
        seen.extend((tuple(request.tokens), tuple(tokens)) for request, tokens in drafted.items())
        return drafted

    monkeypatch.setattr(kind, "draft", watched)
    return seen


def share_right(before: lp.EngineStats, after: lp.EngineStats) -> float:
    """The share of the tokens drafted in between that were right."""
    n = after.n_drafted_by_model - before.n_drafted_by_model
    return (after.n_accepted_by_model - before.n_accepted_by_model) / max(n, 1)


def share_alone(engine: lp.Engine, drafts: Drafts) -> float:
    """The share of drafts that an engine makes again after the same tokens, as one prompt. ``drafts``: of ``watch``."""
    seen, n_same = drafts.copy(), 0
    assert len(seen) > 20
    some = seen[:: len(seen) // 20]
    for tokens, drafted in some:
        drafts.clear()
        engine.generate(list(tokens[:-1]), params(8, logit_bias={tokens[-1]: 1e4}))
        again = next((alone for after, alone in drafts if after == tokens), None)
        assert again is not None
        n = min(len(drafted), len(again))
        n_same += drafted[:n] == again[:n]
    return n_same / len(some)


def check_texts(engine: lp.Engine, way: dict[str, Any]) -> None:
    """Seven requests have the texts that they have without drafts; a seed's text shows the same distribution."""
    params_of = [params(seed=i, **way) for i in range(7)]
    plain = [params(seed=i, **way | {"speculate": "off"}) for i in range(7)]
    expected = engine.generate(PROMPTS, plain)
    assert engine.stats().n_drafted == 0
    for completion, without in zip(engine.generate(PROMPTS, params_of), expected, strict=True):
        assert completion.token_ids == without.token_ids
        assert completion.finish_reason == without.finish_reason
    stats = engine.stats()
    assert stats.n_drafted_by_model > 0  # how many depends on which steps a grammar's thread is in time for
    assert stats.n_accepted_by_model <= stats.n_drafted_by_model <= stats.n_drafted
    engine.check_integrity()


def check_fork_and_snapshot(engine: lp.Engine) -> None:
    """A fork and a restored snapshot write the rest of the text that there is without drafts."""
    expected = engine.generate(PROMPTS[3], params(60, speculate="off")).token_ids
    with engine.start(PROMPTS[3], params(60)) as generation:
        head = [token.id for token in (generation.next() for _ in range(11)) if token is not None]
        with generation.fork() as forked:
            rest = [token.id for token in forked]
        snapshot = generation.snapshot()
    assert (*head, *rest) == tuple(expected)
    with engine.restore(snapshot, params(60)) as restored:
        rest = [token.id for token in restored]
    assert (*head, *rest)[: len(expected)] == tuple(expected)
    engine.check_integrity()

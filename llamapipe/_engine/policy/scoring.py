"""Scores of a request's own tokens: says which rows score which tokens, and collects the scores.

Open this file to change what ``Engine.score`` or ``prompt_logprobs`` computes.

The principle: the row of a position has the log-probabilities of the next token. The wanted positions are consecutive
and extend to the end of the tokens to compute. So one number, ``wanted_from``, says which positions still need scores,
even after a preemption. Pure policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TokenScore(NamedTuple):
    """The score of one token in one row of logits.

    ``logprob``: its log-probability. ``is_greedy``: whether it is the most probable token. ``top``: the most probable
    tokens with their log-probabilities, best first.
    """

    logprob: float
    is_greedy: bool
    top: list[tuple[int, float]]


class LogprobTargets:
    """The positions of a sequence whose rows are wanted: from ``wanted_from`` to ``wanted_to``, exclusive.

    ``n_top``: the number of most probable tokens in each score.
    """

    def __init__(self, wanted_from: int, wanted_to: int, n_top: int) -> None:
        self.wanted_from = wanted_from
        self.wanted_to = wanted_to
        self.n_top = n_top

    def targets(self, position: int) -> list[int]:
        """Return the tokens to score in the row of ``position``."""
        raise NotImplementedError

    def take(self, position: int, scores: Sequence[TokenScore]) -> None:
        """Store the scores of ``targets(position)``. The caller calls it once for each position, in order."""
        raise NotImplementedError

    @property
    def n_shared(self) -> int:
        """The number of tokens that the following texts also begin with; 0 if no text follows."""
        return 0

    def following(self) -> tuple[list[int], int] | None:
        """Return the next tokens to compute, and how many of them keep their KV cells; None after the last text."""
        return None


class PromptTargets(LogprobTargets):
    """Every token of a prompt except the first, before generation starts."""

    def __init__(self, prompt: Sequence[int], n_top: int) -> None:
        super().__init__(0, len(prompt) - 1, n_top)
        self._prompt = list(prompt)
        self.scores: list[TokenScore] = []

    def targets(self, position: int) -> list[int]:
        """Return the prompt's next token."""
        return [self._prompt[position + 1]]

    def take(self, position: int, scores: Sequence[TokenScore]) -> None:
        self.scores += scores
        self.wanted_from = position + 1


class ContinuationTargets(LogprobTargets):
    """Continuations of one context, which is computed once. Each continuation is computed after it and then removed.

    The context's last row scores the first tokens of all continuations, so continuations of one token cost no further
    rows.
    """

    def __init__(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]], n_top: int = 0
    ) -> None:
        self._context = list(context)
        self._continuations = [list(c) for c in continuations]
        self._left = [i for i, c in enumerate(continuations) if len(c) > 1]
        self._now = self._left.pop(0) if self._left else -1
        self.scores: list[list[TokenScore]] = [[] for _ in continuations]
        super().__init__(len(context) - 1, len(self.first()), n_top)

    def first(self) -> list[int]:
        """Return the first tokens to compute: the context, and the first continuation of more than one token."""
        return self._context + (self._continuations[self._now][:-1] if self._now >= 0 else [])

    def targets(self, position: int) -> list[int]:
        """Return all first tokens at the context's last position; later, the current continuation's next token."""
        i = position - len(self._context) + 1
        if i == 0:
            return [c[0] for c in self._continuations]
        return [self._continuations[self._now][i]]

    def take(self, position: int, scores: Sequence[TokenScore]) -> None:
        if position == len(self._context) - 1:
            for continuation_scores, score in zip(self.scores, scores, strict=True):
                continuation_scores.append(score)
        else:
            self.scores[self._now] += scores
        self.wanted_from = position + 1

    @property
    def n_shared(self) -> int:
        """The length of the context, if more continuations follow."""
        return len(self._context) if self._left else 0

    def following(self) -> tuple[list[int], int] | None:
        """Return the context with the next continuation, and the context's length; None after the last one."""
        if not self._left:
            return None
        self._now = self._left.pop(0)
        tokens = self.first()
        self.wanted_from, self.wanted_to = len(self._context), len(tokens)
        return tokens, len(self._context)

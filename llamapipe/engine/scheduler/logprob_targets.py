"""Which rows of a request's own tokens are wanted, for which tokens, and what they said. Pure bookkeeping.

The row of a position says how probable each token is at the next one. Wanted positions are always a run that ends with
the tokens to be fed, so one number tells which of them are still to come, also after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TokenScore(NamedTuple):
    """What one row of logits says about one token.

    ``logprob``: its log-probability. ``is_greedy``: whether it is the most probable token. ``top``: the most probable
    tokens with their log-probabilities, best first.
    """

    logprob: float
    is_greedy: bool
    top: list[tuple[int, float]]


class LogprobTargets:
    """The wanted positions of a sequence: from ``wanted_from`` up to ``wanted_to``, which is not one of them.

    ``n_top``: how many of the most probable tokens are asked for with each.
    """

    def __init__(self, wanted_from: int, wanted_to: int, n_top: int) -> None:
        self.wanted_from = wanted_from
        self.wanted_to = wanted_to
        self.n_top = n_top

    def targets(self, position: int) -> list[int]:
        """The tokens whose probability behind ``position`` is asked for."""
        raise NotImplementedError

    def take(self, position: int, scores: Sequence[TokenScore]) -> None:
        """The scores of ``targets(position)``; positions come in order, each once."""
        raise NotImplementedError

    def following(self) -> tuple[list[int], int] | None:
        """After all wanted positions: the tokens to go on with, and how many of them are fed; None at the end."""
        return None


class PromptTargets(LogprobTargets):
    """Every token of a prompt but the first, before something is generated."""

    def __init__(self, prompt: Sequence[int], n_top: int) -> None:
        super().__init__(0, len(prompt) - 1, n_top)
        self._prompt = list(prompt)
        self.scores: list[TokenScore] = []

    def targets(self, position: int) -> list[int]:
        """The prompt's next token."""
        return [self._prompt[position + 1]]

    def take(self, position: int, scores: Sequence[TokenScore]) -> None:
        """Notes the score of the prompt's next token."""
        self.scores += scores
        self.wanted_from = position + 1


class ContinuationTargets(LogprobTargets):
    """Continuations of one context, which is computed once: each is fed behind it and removed again.

    The first tokens of all of them are in one row, the context's last; so those of a single token cost nothing more.
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
        """The tokens to begin with: the context and the first continuation that needs more than its last row."""
        return self._context + (self._continuations[self._now][:-1] if self._now >= 0 else [])

    def targets(self, position: int) -> list[int]:
        """Behind the context all first tokens, behind that the one continuation's next."""
        i = position - len(self._context) + 1
        if i == 0:
            return [c[0] for c in self._continuations]
        return [self._continuations[self._now][i]]

    def take(self, position: int, scores: Sequence[TokenScore]) -> None:
        """Notes them with their continuations."""
        if position == len(self._context) - 1:
            for mine, score in zip(self.scores, scores, strict=True):
                mine.append(score)
        else:
            self.scores[self._now] += scores
        self.wanted_from = position + 1

    def following(self) -> tuple[list[int], int] | None:
        """The context with the next continuation."""
        if not self._left:
            return None
        self._now = self._left.pop(0)
        tokens = self.first()
        self.wanted_from, self.wanted_to = len(self._context), len(tokens)
        return tokens, len(self._context)

"""What the harness asks of a model, computed by a plain loop of one sequence and numpy in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

import llamapipe as lp
from llamapipe.llama import Context, DecodeBatch

# For each token: steps of several sequences may be rounded otherwise than one alone.
BOUND = 0.005
# Rows of one decode, about as many as of an engine's step. Flash attention on the CPU uses other code from 64 tokens
# on, which moves the log-probability of a very improbable token by up to 0.23 (the bundled model); without flash
# attention the number makes no difference.
N_ROWS = 32


class PlainScores:
    """Any number of scores and texts, one after another."""

    def __init__(self, model: lp.Model, n_ctx: int, flash_attn: str = "auto") -> None:
        self.model = model
        self._context = Context(
            model, n_ctx=n_ctx, n_batch=n_ctx, n_outputs_max=N_ROWS, n_threads=1, flash_attn=flash_attn
        )

    def close(self) -> None:
        self._context.close()

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool | None]:
        """Its log-probability and whether it is greedy, None where that is too close to say."""
        tokens = [*context, *continuation][:-1]
        self._context.clear()
        first = len(context) - 1
        if first:
            self._decode(tokens, 0, first, wanted=False)
        parts = []
        for begin in range(first, len(tokens), N_ROWS):
            end = min(begin + N_ROWS, len(tokens))
            self._decode(tokens, begin, end, wanted=True)
            parts += [self._context.logits(i).astype(np.float64) for i in range(end - begin)]
        rows = np.stack(parts)
        rows -= rows.max(axis=1, keepdims=True)
        logits = rows[np.arange(len(continuation)), continuation]
        total = float((logits - np.log(np.exp(rows).sum(axis=1))).sum())
        rows[np.arange(len(continuation)), continuation] = -np.inf
        lead = float((logits - rows.max(axis=1)).min())
        return total, None if abs(lead) < 2 * BOUND else lead > 0

    def assert_is(
        self, answer: tuple[float, bool], context: Sequence[int], continuation: Sequence[int]
    ) -> None:
        total, greedy = self.score(context, continuation)
        assert answer[0] == pytest.approx(total, abs=BOUND * math.sqrt(len(continuation)))
        assert answer[1] is greedy or greedy is None

    def _decode(self, tokens: Sequence[int], begin: int, end: int, wanted: bool) -> None:
        n = end - begin
        positions = np.arange(begin, end)
        self._context.decode(
            DecodeBatch(np.array(tokens[begin:end]), positions, np.zeros(n, int), np.full(n, wanted))
        )

    def rolling(self, text: str, n_ctx: int) -> tuple[float, int]:
        """Of a whole text, and its tokens: windows of ``n_ctx`` fed tokens, each token behind as many as possible.

        The last window reaches back, but scores only what no other did.
        """
        model = self.model
        tokens = [model.bos or 0, *model.tokenize(text, add_special=False)]
        total, done = 0.0, 1
        while done < len(tokens):
            end = min(done + n_ctx, len(tokens))
            first = max(0, end - n_ctx - 1) if done > 1 else 0
            total += self.score(tokens[first:done], tokens[done:end])[0]
            done = end
        return total, len(tokens) - 1

    def text(self, prompt: Sequence[int], until: Sequence[str], max_tokens: int) -> str:
        """Greedy, a token at a time, up to the first place where a text of ``until`` is complete."""
        tokens, text = list(prompt), ""
        self._context.clear()
        batch = DecodeBatch.of_tokens(tokens, 0)
        for _ in range(max_tokens):
            self._context.decode(batch)
            token = int(self._context.logits(len(batch.tokens) - 1).argmax())
            if self.model.is_eog(token):
                break
            tokens.append(token)
            text = self.model.detokenize(tokens[len(prompt) :])
            if ends := [text.index(stop) for stop in until if stop in text]:
                return text[: min(ends)]
            batch = DecodeBatch.of_tokens([token], len(tokens) - 1)
        return text

"""The plain ``llama_decode`` loop of one sequence alone, which the engine's output is held against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import llamapipe as lp
from llamapipe.llama import Context, DecodeBatch, Model
from support.chains import Chain


def greedy(max_tokens: int | None, **options: Any) -> lp.SamplingParams:
    """The most probable token each time, and no end of generation unless ``options`` say otherwise."""
    return lp.SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **options})


def tokens_of(n: int, seed: int) -> list[int]:
    """Tokens of the vocabularies of all small models."""
    return [5 + (seed * 37 + i * 11 + i * i) % 100 for i in range(n)]


class PlainLoop:
    """Prompts in chunks of ``n_ubatch``, then one token a decode, greedy; one sequence, one thread."""

    def __init__(self, context: Context, sampler: Chain, ignore_eos: bool) -> None:
        self._context = context
        self._sampler = sampler
        self._eog = context.model.vocab.eog_tokens
        self._ignore_eos = ignore_eos

    def greedy(self, prompt: Sequence[int], max_tokens: int | None = None) -> list[int]:
        """What the prompt is continued with, until EOG, ``max_tokens`` or the end of the context."""
        context, tokens = self._context, list(prompt)
        end = context.n_ctx if max_tokens is None else min(len(prompt) + max_tokens, context.n_ctx)
        row = self._prefill(tokens)
        while True:
            token = self._sampler.sample(context.logits(row))
            if token in self._eog and not self._ignore_eos:
                break
            tokens.append(token)
            if len(tokens) >= end:
                break
            context.decode(DecodeBatch.of_tokens([token], len(tokens) - 1))
            row = 0
        return tokens[len(prompt) :]

    def compare(self, prompt: Sequence[int], tokens: Sequence[int], bound: float) -> int:
        """Feeds the loop the continuation of another loop; how many of its tokens are not the loop's own choice.

        These must have a logit within ``bound`` of it.
        """
        context = self._context
        row = self._prefill(prompt)
        n_near = 0
        for i, token in enumerate(tokens):
            logits = context.logits(row)
            if self._ignore_eos:
                logits[list(self._eog)] = -math.inf
            if token != int(logits.argmax()):
                short = float(logits.max() - logits[token])
                n_near += 1
                assert short <= bound, (
                    f"token {i} of {len(tokens)} is {token}, the loop has {logits.argmax()} "
                    f"and its logit is {short} larger"
                )
            if i + 1 < len(tokens):
                context.decode(DecodeBatch.of_tokens([token], len(prompt) + i))
            row = 0
        return n_near

    def agrees(self, prompt: Sequence[int], tokens: Sequence[int], bound: float = 0.02) -> bool:
        """Whether these are the loop's own first tokens, but for near ties; for F16 models."""
        if tokens and list(tokens) != self.greedy(prompt, len(tokens)):
            self.compare(prompt, tokens, bound)
        return True

    def _prefill(self, prompt: Sequence[int]) -> int:
        context = self._context
        context.seq_remove(0)
        for first in range(0, len(prompt), context.n_ubatch):
            chunk = prompt[first : first + context.n_ubatch]
            context.decode(DecodeBatch.of_tokens(chunk, first))
        return len(chunk) - 1


@contextmanager
def plain_loop(
    model: Model, n_ctx: int = 256, n_ubatch: int = 512, ignore_eos: bool = True
) -> Iterator[PlainLoop]:
    """A loop on a context of its own."""
    with (
        Context(model, n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=1) as context,
        Chain(model.vocab) as sampler,
    ):
        if ignore_eos:
            sampler.set_bias(dict.fromkeys(model.vocab.eog_tokens, -math.inf))
        yield PlainLoop(context, sampler.add_temperature(0.0), ignore_eos)


def random_prompt(rng: np.random.Generator, model: Model, n_tokens: int) -> list[int]:
    """BOS and tokens that are neither special nor bytes."""
    words = rng.integers(259, model.n_vocab, n_tokens - 1).tolist()
    return [model.bos or 0, *words]

"""Requests at the same time, with random prompts: how fast they are."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median

import llamapipe as lp

_ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """``n`` requests at the same time, with prompts of ``n_prompt`` tokens, which generate ``n_tokens`` each."""

    n: int
    n_prompt: int
    n_tokens: int


@dataclass(frozen=True)
class Speed:
    """Medians of a few rounds.

    ``tokens_per_s``: generated tokens of all requests, from the first's submission to the last's end.
    ``first_token_s``: from the submission to the first token, of the median request.
    """

    tokens_per_s: float
    first_token_s: float


class LoadRunner:
    """Runs loads on engines of one model; its prompts share nothing, so that no prefix is found in the cache."""

    def __init__(self, model: lp.Model, seed: int = 1) -> None:
        vocab = model.vocab
        self._tokens = [t for t in range(vocab.n_vocab) if not vocab.is_control(t)]
        self._random = random.Random(seed)

    def __repr__(self) -> str:
        return f"<LoadRunner n_tokens={len(self._tokens)}>"

    def measure(self, engine: lp.Engine, load: Load) -> Speed:
        """The speed of a load, after a short one that warms the engine up."""
        self._run(engine, Load(load.n, min(load.n_prompt, 4), min(load.n_tokens, 8)))
        speeds = [self._run(engine, load) for _ in range(_ROUNDS)]
        return Speed(median(s.tokens_per_s for s in speeds), median(s.first_token_s for s in speeds))

    def _run(self, engine: lp.Engine, load: Load) -> Speed:
        prompts = [self._random.choices(self._tokens, k=load.n_prompt) for _ in range(load.n)]
        params = lp.SamplingParams(max_tokens=load.n_tokens, ignore_eos=True, cache=False)
        began = time.perf_counter()
        done = engine.generate(prompts, params)
        seconds = time.perf_counter() - began
        firsts = [one.timings.first_token_s or 0.0 for one in done]
        return Speed(sum(one.n_completion_tokens for one in done) / seconds, median(firsts))

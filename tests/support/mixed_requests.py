"""Seeded requests, and what an engine with ``batch_invariant=True`` makes of them, alone and in a crowd."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import llamapipe as lp
from llamapipe.engine import with_tuning

Job = tuple[list[int], lp.SamplingParams]
Told = list[
    tuple[int, float]
]  # tokens and their log-probabilities, which tell what is too little to change the text


def mixed_requests(n: int, tokens: Sequence[int], n_shared: int, n_most: int = 24) -> list[Job]:
    """Prompts of some of the tokens, a third of which begin alike, for at most so many tokens each."""
    jobs, rng = [], random.Random(5)
    shared = rng.choices(tokens, k=n_shared)
    for i in range(n):
        own = rng.choices(tokens, k=rng.choice([1, 3, 40, 110]))
        prompt = shared[: rng.randrange(n_shared)] + own if i % 3 == 0 else own
        params = lp.SamplingParams(
            max_tokens=rng.randrange(4, n_most), temperature=1.2, seed=i, logprobs=1, ignore_eos=True
        )
        jobs.append((prompt, params))
    return jobs


def told_alone(model: lp.Model, jobs: list[Job], **options: Any) -> list[Told]:
    """Of one after another, on one thread, without a prefix cache."""
    with lp.Engine(
        model, n_seq_max=1, n_threads=1, prefix_cache=False, batch_invariant=True, **with_tuning(options)
    ) as engine:
        return [_told(engine.generate(*job)) for job in jobs]


def told_among_others(model: lp.Model, jobs: list[Job], **options: Any) -> list[Told]:
    """Of all at once, some of which are beside requests that are cancelled."""
    with lp.Engine(model, n_threads=2, batch_invariant=True, **with_tuning(options)) as engine:
        others = [engine.stream([7] * (20 + i), lp.SamplingParams(max_tokens=90)) for i in range(6)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(partial(engine.generate, *job)) for job in jobs]
            for other in others:
                other.cancel()
            return [_told(job.result()) for job in running]


def _told(completion: lp.Completion) -> Told:
    assert completion.logprobs is not None
    return [(token.id, token.logprob) for token in completion.logprobs]

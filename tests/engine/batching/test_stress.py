"""64 threads and 200 asyncio tasks on one engine, half of which change their minds: all results right, nothing left.

What each does is drawn from seeded generators; when is up to the machine. Whatever was received before a request was
cancelled, dropped or timed out must be the beginning of what the plain loop says.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import Callable

import pytest
from support.control import PATIENCE_S, Worker, all_results, turn
from support.plain import greedy, plain_loop

import llamapipe as lp

MakeEngine = Callable[..., lp.Engine]
Got = tuple[list[int], list[int], bool]  # prompt, tokens received, whether that is all it asked for

N_THREADS, N_TASKS = 64, 200


def draw_prompt(rng: random.Random) -> list[int]:
    """Few different ones, of very different length."""
    seed = rng.randrange(12)
    n = [1, 2, 5, 9, 20, 31, 32, 33, 60, 90, 120, 150][seed]
    return [1, *random.Random(seed).choices(range(259, 512), k=n - 1)]


class Threaded:
    """What a thread may do with an engine; each returns what it got."""

    def __init__(self, engine: lp.Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)

    def act(self) -> list[Got]:
        action: Callable[[], list[Got]] = self.rng.choice(
            [self.generate, self.several, self.wake_all_if_stalled, self.stream, self.leave, self.step]
        )
        return action()

    def generate(self) -> list[Got]:
        prompt, n = draw_prompt(self.rng), self.rng.randint(1, 40)
        out: lp.Completion = self.engine.generate(prompt, greedy(n))
        return [(prompt, out.token_ids, len(out.token_ids) == n)]

    def several(self) -> list[Got]:
        prompts = [draw_prompt(self.rng) for _ in range(3)]
        outs = self.engine.generate(prompts, greedy(7))
        return [(p, out.token_ids, len(out.token_ids) == 7) for p, out in zip(prompts, outs, strict=True)]

    def wake_all_if_stalled(self) -> list[Got]:
        prompt = draw_prompt(self.rng)
        with contextlib.suppress(TimeoutError):
            out: lp.Completion = self.engine.generate(prompt, greedy(60), timeout=self.rng.random() * 0.1)
            return [(prompt, out.token_ids, len(out.token_ids) == 60)]
        return []

    def stream(self) -> list[Got]:
        prompt, n = draw_prompt(self.rng), self.rng.randint(1, 90)
        tokens = [t for delta in self.engine.stream(prompt, greedy(n)) for t in delta.token_ids]
        return [(prompt, tokens, len(tokens) == n)]

    def leave(self) -> list[Got]:
        """Reads a part, then closes the stream or just drops it."""
        prompt, n = draw_prompt(self.rng), self.rng.randint(0, 30)
        stream = self.engine.stream(prompt, greedy(None))
        tokens = [t for _ in range(n) for t in next(stream).token_ids]
        if self.rng.random() < 0.5:
            stream.close()
        return [(prompt, tokens, len(tokens) == n)]

    def step(self) -> list[Got]:
        """Steps through a sequence, cuts and lengthens it, and forgets to end it."""
        generation = self.engine.start(draw_prompt(self.rng), greedy(None))
        got = []
        for _ in range(3):
            before, n = generation.token_ids, self.rng.randint(0, 8)
            tokens = [token.id for _ in range(n) if (token := generation.next()) is not None]
            got.append((before, tokens, len(tokens) == n))
            generation.trim(self.rng.randint(1, generation.n_tokens))
            generation.append(self.rng.choices(range(259, 512), k=self.rng.randint(1, 20)))
        return got


class Tasked:
    """The same for an asyncio task, with cancellation."""

    def __init__(self, engine: lp.Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)

    async def act(self) -> list[Got]:
        action = self.rng.choice(
            [self.generate, self.stream, self.leave, self.wake_all_if_stalled, self.cancelled]
        )
        return await action()

    async def generate(self) -> list[Got]:
        prompts, n = [draw_prompt(self.rng) for _ in range(2)], self.rng.randint(1, 40)
        outs = await self.engine.agenerate(prompts, greedy(n))
        return [(p, out.token_ids, len(out.token_ids) == n) for p, out in zip(prompts, outs, strict=True)]

    async def stream(self) -> list[Got]:
        prompt, n = draw_prompt(self.rng), self.rng.randint(1, 90)
        tokens = [t async for delta in self.engine.astream(prompt, greedy(n)) for t in delta.token_ids]
        return [(prompt, tokens, len(tokens) == n)]

    async def leave(self) -> list[Got]:
        prompt, n = draw_prompt(self.rng), self.rng.randint(1, 30)
        tokens: list[int] = []
        async for delta in self.engine.astream(prompt, greedy(None)):
            tokens += delta.token_ids
            if len(tokens) == n:
                break
        return [(prompt, tokens, len(tokens) == n)]

    async def wake_all_if_stalled(self) -> list[Got]:
        prompt, timeout = draw_prompt(self.rng), self.rng.random() * 0.1
        tokens: list[int] = []
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            if self.rng.random() < 0.5:
                await asyncio.wait_for(self.engine.agenerate(prompt, greedy(None)), timeout)
            async for delta in self.engine.astream(prompt, greedy(200), timeout=timeout):
                tokens += delta.token_ids
        return [(prompt, tokens, True)]

    async def cancelled(self) -> list[Got]:
        prompt = draw_prompt(self.rng)
        tokens: list[int] = []

        async def read() -> None:
            async for delta in self.engine.astream(prompt, greedy(None)):
                tokens.extend(delta.token_ids)

        async def wait() -> None:
            await self.engine.agenerate(prompt, greedy(None))

        task = asyncio.ensure_future(self.rng.choice([read, wait])())
        await turn(self.rng.randint(0, 20))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return [(prompt, tokens, True)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"n_seq_max": 16, "n_ubatch": 32}, id="streams"),
        pytest.param({"n_seq_max": 8, "n_cells": 700}, id="few_cells"),
        pytest.param({"n_seq_max": 32, "max_queue": 5, "kv_unified": True}, id="short_queue"),
        pytest.param({"n_seq_max": 2, "n_batch": 16, "n_ubatch": 16}, id="two_slots"),
    ],
)
def test_all_at_once(tiny: lp.Model, make_engine: MakeEngine, options: dict[str, int]) -> None:
    engine = make_engine(n_ctx=256, **options)
    barrier = threading.Barrier(N_THREADS + 2)

    def thread(seed: int) -> list[Got]:
        actor = Threaded(engine, seed)
        barrier.wait(PATIENCE_S)
        return [got for _ in range(2) for got in actor.act()]

    async def tasks(seeds: range) -> list[Got]:
        barrier.wait(PATIENCE_S)
        results = await asyncio.gather(*[Tasked(engine, seed).act() for seed in seeds])
        return [got for result in results for got in result]

    workers = [Worker(thread, seed) for seed in range(N_THREADS)]
    half = N_TASKS // 2
    workers += [Worker(lambda r=r: asyncio.run(tasks(r))) for r in (range(half), range(half, N_TASKS))]
    everything = [got for result in all_results(workers) for got in result]
    gc.collect()
    stats = engine.stats()
    assert (stats.n_active, stats.n_queued) == (0, 0)
    engine.check_integrity()
    assert "n_queued=0" in repr(engine)
    engine.close()  # hangs when anything is left

    assert all(complete for _, _, complete in everything)
    longest: dict[tuple[int, ...], list[int]] = {}
    for prompt, tokens, _ in everything:
        longest.setdefault(tuple(prompt), []).append(len(tokens))
    with plain_loop(tiny, n_ubatch=options.get("n_ubatch", 512)) as loop:
        known = {
            prompt: loop.greedy(prompt, max(lengths)) for prompt, lengths in longest.items() if max(lengths)
        }
        for prompt, tokens, _ in everything:
            if tokens and tokens != known[tuple(prompt)][: len(tokens)]:
                loop.compare(prompt, tokens, bound=0.02)

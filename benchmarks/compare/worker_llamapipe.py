"""llamapipe: whole completions, streams from threads or asyncio, one by one, or a context for each caller."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after an installed llamapipe

from worker import Measured, Run, serve
from workload import SCHEMA, Work

import llamapipe as lp


def start(path: Path, work: Work, arguments: list[str]) -> Run:
    """The model and its engine live until the process ends."""
    mode = arguments[0]
    model = lp.Model(path)
    params = lp.SamplingParams(
        temperature=0,
        max_tokens=work.n_generate,
        ignore_eos=not work.schema,
        json_schema=SCHEMA if work.schema else None,
        # Greedy texts after prompts of noise repeat themselves: guesses would be right more often than for real users.
        speculate=None if work.schema else "off",
    )
    n_engines, n_seq = {"blocking": (1, 1), "contexts": (work.n, 1)}.get(mode, (1, work.n))
    n_threads = max(work.n_threads // n_engines, 1)
    engines = [
        lp.Engine(model, n_ctx=work.n_ctx, n_seq_max=n_seq, n_threads=n_threads) for _ in range(n_engines)
    ]
    engine = engines[0]

    def whole(prompts: list[list[int]]) -> Measured:
        before, began = engine.stats(), perf_counter()
        outs = engine.generate(prompts, params)
        seconds, after = perf_counter() - began, engine.stats()
        names = ("steps", "compute_s", "plan_s", "launch_s", "sample_s", "deliver_s", "idle_s")
        more = {name: getattr(after, name) - getattr(before, name) for name in names}
        return Measured(seconds, sum(len(out.token_ids) for out in outs), [], more)

    def blocking(prompts: list[list[int]]) -> Measured:
        began = perf_counter()
        n = sum(len(engine.generate(prompt, params).token_ids) for prompt in prompts)
        return Measured(perf_counter() - began, n, [])

    def contexts(prompts: list[list[int]]) -> Measured:
        counts: list[int] = []
        jobs = [
            threading.Thread(target=lambda e=e, p=p: counts.append(len(e.generate(p, params).token_ids)))
            for e, p in zip(engines, prompts, strict=True)
        ]
        began = perf_counter()
        _run(jobs)
        return Measured(perf_counter() - began, sum(counts), [])

    def threads(prompts: list[list[int]]) -> Measured:
        counts: list[int] = []
        firsts: list[float] = []

        def read(prompt: list[int]) -> None:
            n = 0
            for delta in engine.stream(prompt, params):
                if n == 0:
                    firsts.append(perf_counter() - began)
                n += len(delta.token_ids)
            counts.append(n)

        jobs = [threading.Thread(target=read, args=(prompt,)) for prompt in prompts]
        began = perf_counter()
        _run(jobs)
        return Measured(perf_counter() - began, sum(counts), firsts)

    async def read_all(prompts: list[list[int]]) -> Measured:
        firsts: list[float] = []

        async def read(prompt: list[int]) -> int:
            n = 0
            async for delta in engine.astream(prompt, params):
                if n == 0:
                    firsts.append(perf_counter() - began)
                n += len(delta.token_ids)
            return n

        began = perf_counter()
        counts = await asyncio.gather(*map(read, prompts))
        return Measured(perf_counter() - began, sum(counts), firsts)

    ways: dict[str, Any] = {
        "whole": whole,
        "blocking": blocking,
        "contexts": contexts,
        "threads": threads,
        "asyncio": lambda prompts: asyncio.run(read_all(prompts)),
    }
    run: Run = ways[mode]
    return run


def _run(jobs: list[threading.Thread]) -> None:
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()


serve(start)

"""Shared prefixes, conversations and few KV cells: the engine against llama-server with its own caches on.

All sides get the same prompts of token ids, in turns; each round has other prompts. llama-server answers whole
completions over HTTP, one connection a request; the engine is called from as many threads in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from local_server import post, running

import llamapipe as lp

Ask = Callable[[list[int], int], list[int]]  # a prompt and a number of tokens; what was generated


@dataclass(frozen=True)
class Work:
    """``run`` does the work with a way to ask, at most ``n_clients`` at once; it is timed from start to end."""

    name: str
    n_slots: int
    n_ctx: int
    n_cells: int | None
    n_clients: int
    run: Callable[[Ask, ThreadPoolExecutor, random.Random], None]
    prepare: Callable[[Ask, random.Random], None] | None = None


def tokens(rng: random.Random, n: int) -> list[int]:
    """Random tokens, which are text."""
    return [rng.randrange(300, 30000) for _ in range(n)]


def all_of(ask: Ask, pool: ThreadPoolExecutor, prompts: Sequence[list[int]], n: int) -> None:
    """Asks for all prompts at once and waits."""
    failed = 0
    for answer in [pool.submit(ask, prompt, n) for prompt in prompts]:
        try:
            answer.result()
        except (RuntimeError, HTTPError):
            failed += 1
    if failed:
        print(f"    {failed} of {len(prompts)} requests failed")


def shared(ask: Ask, pool: ThreadPoolExecutor, rng: random.Random) -> None:
    """16 requests of 512 shared and 16 own tokens."""
    prefix = tokens(rng, 512)
    all_of(ask, pool, [prefix + tokens(rng, 16) for _ in range(16)], 32)


def warm_prefix(ask: Ask, rng: random.Random) -> None:
    """The prefix of ``shared_warm``, once."""
    ask(tokens(rng, 512), 1)


def conversations(ask: Ask, pool: ThreadPoolExecutor, rng: random.Random) -> None:
    """8 users, each with 6 turns of 48 tokens, answers of 32, and a system prompt of 128 tokens."""
    system = tokens(rng, 128)

    def talk(seed: int) -> None:
        own = random.Random(seed)
        told = list(system)
        for _ in range(6):
            told += tokens(own, 48)
            told += ask(told, 32)

    for user in [pool.submit(talk, rng.randrange(2**30)) for _ in range(8)]:
        user.result()


def many(ask: Ask, pool: ThreadPoolExecutor, rng: random.Random) -> None:
    """48 requests of 236 and 64 tokens, for which there are 4,096 cells."""
    all_of(ask, pool, [tokens(rng, 236) for _ in range(48)], 64)


def unrelated(ask: Ask, pool: ThreadPoolExecutor, rng: random.Random) -> None:
    """32 requests that share nothing, 8 at once."""
    all_of(ask, pool, [tokens(rng, 128) for _ in range(32)], 32)


WORKS = [
    Work("prefix cold", 16, 1024, None, 16, shared),
    Work("prefix warm", 16, 1024, None, 16, shared, warm_prefix),
    Work("chat, 8 slots", 8, 1024, None, 8, conversations),
    Work("chat, 4 slots", 4, 1024, None, 8, conversations),
    Work("few cells", 16, 512, 4096, 48, many),
    Work("unrelated", 8, 512, None, 8, unrelated),
]


def over_http(port: int) -> Ask:
    """Asks llama-server."""

    def ask(prompt: list[int], n: int) -> list[int]:
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        token_ids: list[int] = post(port, "/completion", body)["tokens"]
        return token_ids

    return ask


def in_process(engine: lp.Engine) -> Ask:
    """Asks the engine."""

    def ask(prompt: list[int], n: int) -> list[int]:
        params = lp.SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, speculate="off")
        return list(engine.generate(prompt, params).token_ids)

    return ask


def measure(args: argparse.Namespace, work: Work) -> dict[str, list[float]]:
    """Seconds of each side in each round."""
    times: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        sides: dict[str, tuple[Ask, lp.Engine | None]] = {}
        layouts = [True] if work.n_cells else [False, True]
        for unified in layouts:
            layout = "unified" if unified else "streams"
            for name, prefix_cache in (("", True), (", no cache", False)):
                engine = stack.enter_context(
                    lp.Engine(
                        args.model,
                        n_ctx=work.n_ctx,
                        n_seq_max=work.n_slots,
                        n_cells=work.n_cells,
                        n_threads=args.threads,
                        tuning=lp.EngineTuning(kv_unified=unified),
                        prefix_cache=prefix_cache,
                    )
                )
                sides[f"llamapipe {layout}{name}"] = in_process(engine), engine
            if args.llama_server:
                n_cells = work.n_cells or work.n_slots * work.n_ctx
                command = [
                    args.llama_server, "-m", args.model, "-np", work.n_slots, "-c", n_cells, "-t", args.threads,
                    "-tb", args.threads, "-b", 2048, "-ub", 512, "--log-disable", "-kvu" if unified else "-no-kvu",
                ]  # fmt: skip
                server = stack.enter_context(running(*command))
                sides[f"llama-server {layout}"] = over_http(server.port), None
        pool = stack.enter_context(ThreadPoolExecutor(work.n_clients))
        for i in range(args.rounds + 1):
            for name, (ask, side) in sides.items():
                rng = random.Random(1000 + i)
                if work.prepare is not None:
                    work.prepare(ask, random.Random(1000 + i))
                before = None if side is None else side.stats()
                began = time.perf_counter()
                work.run(ask, pool, rng)
                seconds = time.perf_counter() - began
                if i:  # the first round warms up
                    times.setdefault(name, []).append(seconds)
                if side is not None and before is not None:
                    notes[name] = _note(before, side.stats())
    first = next(iter(times))
    for name, seconds_of in times.items():
        ratio = statistics.median(b / a for a, b in zip(times[first], seconds_of, strict=True))
        print(
            f"  {name:28} {1e3 * statistics.median(seconds_of):8.0f} ms  {ratio:5.2f} of {first}  "
            f"{notes.get(name, '')}",
            flush=True,
        )
    return times


def _note(before: Any, after: Any) -> str:
    computed = after.n_prompt_tokens - before.n_prompt_tokens
    cached = after.n_cache_hit_tokens - before.n_cache_hit_tokens
    n_preempted = after.n_preempted - before.n_preempted
    return f"{computed} prompt tokens computed, {cached} cached, {n_preempted} preempted"


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, help="the program of the pinned llama.cpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side")
    parser.add_argument("--only", help="works whose names begin with this")
    args = parser.parse_args()
    for work in WORKS:
        if args.only is None or work.name.startswith(args.only):
            print(f"{work.name}: {work.run.__doc__}")
            measure(args, work)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What prompts that begin alike cost, beside llama-server: tokens computed, time to the first token, processor time.

    python benchmarks/bench_prefixes.py gemma-3-270m.gguf --llama-server PATH

Both servers run on the loopback address and get the same requests, in turns, through ``/completion``: each request
generates one token. Prompts are random tokens, so nothing is shared by chance. ``ideal``: the tokens that no earlier
prompt of the round has. ``ratio``: ours to llama-server's time. On a machine where other programs compute, the
processor time of one thread (``--threads 1``) says more than the time to the first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from local_server import SERVE, Server, cpu_seconds, post, running

N_MORE = 20  # tokens after what is shared
Post = Callable[[list[int]], int]  # asks for a token; prompt tokens that were computed
Work = tuple[str, int, Callable[[Post], int]]  # name, ideal, and how it is asked


class Cost(NamedTuple):
    """What requests cost: prompt tokens computed, seconds until all first tokens were there, the server's CPU time."""

    n_computed: float
    seconds: float
    cpu_s: float


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, help="its program; default: llamapipe alone")
    parser.add_argument("--shared", type=int, default=600, help="tokens that prompts share")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    n_ctx = args.shared + 424
    common = ["-m", args.model, "-np", args.slots, "-t", args.threads]
    with ExitStack() as stack:
        sides: dict[str, Server] = {"llamapipe": stack.enter_context(running(*SERVE, *common, "-c", n_ctx))}
        if args.llama_server is not None:
            theirs = [args.llama_server, *common, "-tb", args.threads, "-c", n_ctx * args.slots, "--no-webui"]
            sides["llama-server"] = stack.enter_context(running(*theirs))
        costs: dict[tuple[str, str], list[Cost]] = {}
        ideals: dict[str, int] = {}
        for i in range(args.rounds):
            for name, ideal, work in works(random.Random(i), args.shared, args.slots):
                ideals[name] = ideal
                for side in sorted(sides, reverse=bool(i % 2)):
                    costs.setdefault((name, side), []).append(cost(work, *sides[side]))
    print(
        f"{'work':36}{'ideal':>7}"
        + "".join(f"{side + ': tokens, ms, CPU ms':>37}" for side in sides)
        + "   ratio, CPU"
    )
    for name, ideal in ideals.items():
        row = f"{name:36}{ideal:7}"
        medians = [Cost(*map(statistics.median, zip(*costs[name, side], strict=True))) for side in sides]
        for median in medians:
            row += f"{median.n_computed:19.0f}{1e3 * median.seconds:9.0f}{1e3 * median.cpu_s:9.0f}"
        if len(medians) == 2:
            our, their = medians
            row += f"{our.seconds / their.seconds:8.2f}{our.cpu_s / max(their.cpu_s, 0.01):6.2f}"
        print(row)


def cost(work: Callable[[Post], int], port: int, pid: int) -> Cost:
    """Asks a server."""
    began, cpu_began = time.perf_counter(), cpu_seconds(pid)
    n = work(partial(n_computed, port))
    return Cost(n, time.perf_counter() - began, cpu_seconds(pid) - cpu_began)


def works(rng: random.Random, n: int, n_slots: int) -> Iterator[Work]:
    """The works of a round, in their order."""

    def fresh(n_tokens: int) -> list[int]:
        return [rng.randrange(300, 30_000) for _ in range(n_tokens)]

    def alone(prompt: list[int]) -> Callable[[Post], int]:
        return lambda post: post(prompt)

    def together(prompts: list[list[int]]) -> Callable[[Post], int]:
        def ask(post: Post) -> int:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return sum(pool.map(post, prompts))

        return ask

    base = fresh(n)
    first = base + fresh(N_MORE)
    yield "a new prompt", len(first), alone(first)
    yield "the same again", 1, alone(first)
    yield "parts near its end, the second", N_MORE, alone(base + fresh(N_MORE))
    yield "parts near its end, the third", N_MORE, alone(base + fresh(N_MORE))
    yield "parts in its middle, the second", N_MORE, alone(first[: n // 2] + fresh(N_MORE))
    yield "parts in its middle, the third", N_MORE, alone(first[: n // 2] + fresh(N_MORE))
    yield "the first prompt again", 1, alone(first)
    base = fresh(n)
    several = [base + fresh(N_MORE) for _ in range(n_slots)]
    yield f"{n_slots} at once, new", n + n_slots * N_MORE, together(several)
    several = [base + fresh(N_MORE) for _ in range(n_slots)]
    yield f"{n_slots} at once, with the same beginning", n_slots * N_MORE, together(several)
    yield f"{n_slots} at once, nothing shared", n_slots * n, together([fresh(n) for _ in range(n_slots)])


def n_computed(port: int, prompt: list[int]) -> int:
    """One request for one token."""
    asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True}
    return int(post(port, "/completion", asked)["timings"]["prompt_n"])


if __name__ == "__main__":
    main()

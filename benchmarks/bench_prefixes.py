"""What prompts that begin alike cost, beside llama-server: tokens computed, and the time to the first token.

    python benchmarks/bench_prefixes.py gemma-3-270m.gguf --llama-server PATH

Both servers run on the loopback address and get the same requests, in turns, through ``/completion``: each request
generates one token. Prompts are random tokens, so nothing is shared by chance. ``ideal``: the tokens that no earlier
prompt of the round has.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from local_server import free_port, process

N_MORE = 20  # tokens after what is shared
Post = Callable[[list[int]], "Answer"]


class Answer(NamedTuple):
    """Of one or several requests: prompt tokens that were computed, and seconds until all first tokens were there."""

    n_computed: int
    seconds: float


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
    n_threads = str(args.threads)
    common = ["-m", str(args.model), "-np", str(args.slots), "-t", n_threads]
    with ExitStack() as stack:
        sides: dict[str, int] = {}
        ours = [sys.executable, "-m", "llamapipe_command", "serve", *common, "-c", str(n_ctx)]
        port = free_port()
        sides["llamapipe"] = stack.enter_context(process([*ours, "--port", str(port)], port))
        if args.llama_server is not None:
            theirs = [str(args.llama_server), *common, "-tb", n_threads, "-c", str(n_ctx * args.slots)]
            port = free_port()
            sides["llama-server"] = stack.enter_context(
                process([*theirs, "--port", str(port), "--no-webui"], port)
            )
        found: dict[tuple[str, str], list[Answer]] = {}
        ideals: dict[str, int] = {}
        for i in range(args.rounds):
            for side, port in sides.items():
                for name, ideal, answer in works(random.Random(i), port, args.shared, args.slots):
                    found.setdefault((name, side), []).append(answer)
                    ideals[name] = ideal
    print(f"{'work':36}{'ideal':>7}" + "".join(f"{side + ': tokens, ms':>28}" for side in sides))
    for name, ideal in ideals.items():
        row = f"{name:36}{ideal:7}"
        for side in sides:
            answers = found[name, side]
            n = statistics.median(answer.n_computed for answer in answers)
            ms = 1e3 * statistics.median(answer.seconds for answer in answers)
            row += f"{n:18.0f}{ms:10.0f}"
        print(row)


def works(rng: random.Random, port: int, n: int, n_slots: int) -> Iterator[tuple[str, int, Answer]]:
    """The works of a round, in their order: name, ideal, answer."""

    def fresh(n_tokens: int) -> list[int]:
        return [rng.randrange(300, 30_000) for _ in range(n_tokens)]

    def post(prompt: list[int]) -> Answer:
        return completion(port, prompt)

    base = fresh(n)
    first = base + fresh(N_MORE)
    yield "a new prompt", len(first), post(first)
    yield "the same again", 1, post(first)
    yield "parts near its end, the second", N_MORE, post(base + fresh(N_MORE))
    yield "parts near its end, the third", N_MORE, post(base + fresh(N_MORE))
    yield "parts in its middle, the second", N_MORE, post(first[: n // 2] + fresh(N_MORE))
    yield "parts in its middle, the third", N_MORE, post(first[: n // 2] + fresh(N_MORE))
    yield "the first prompt again", 1, post(first)
    base = fresh(n)
    several = [base + fresh(N_MORE) for _ in range(n_slots)]
    yield f"{n_slots} at once, new", n + n_slots * N_MORE, together(post, several)
    several = [base + fresh(N_MORE) for _ in range(n_slots)]
    yield f"{n_slots} at once, with the same beginning", n_slots * N_MORE, together(post, several)
    yield (
        f"{n_slots} at once, nothing shared",
        n_slots * n,
        together(post, [fresh(n) for _ in range(n_slots)]),
    )


def together(post: Post, prompts: list[list[int]]) -> Answer:
    """Several prompts at the same time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(post, prompts))
    return Answer(sum(answer.n_computed for answer in answers), time.perf_counter() - began)


def completion(port: int, prompt: list[int]) -> Answer:
    """One request for one token."""
    asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    return Answer(int(answer["timings"]["prompt_n"]), time.perf_counter() - began)


if __name__ == "__main__":
    main()
